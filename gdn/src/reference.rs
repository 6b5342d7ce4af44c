//! The mixer in plain scalar f32, one function per step, in the notation of *Gated Delta Networks* (arXiv 2412.06464).
//!
//! Per value head the state `S` `[d_k, d_v]` follows the gated delta rule, with decay `exp(g)` and write strength `β`:
//!
//! ```text
//! S ← exp(g) S          u = β (v − Sᵀ k)          S ← S + k uᵀ          o = Sᵀ q
//! ```
//!
//! [`recurrent`] is that, word for word. [`chunked`] is the same map, rewritten for a chunk of `C` tokens with the WY
//! representation: `G` is the running sum of `g` within the chunk, `Γ_ij = exp(G_i − G_j)` for `i ≥ j` and zero above, and
//!
//! ```text
//! A = strictly lower part of (diag(β) K Kᵀ ⊙ Γ)          T = (I + A)⁻¹
//! U = T diag(β) V          W = T diag(β exp(G)) K          V′ = U − W S
//! O = (Q ⊙ exp(G)) S + (Q Kᵀ ⊙ Γ) V′          S ← exp(G_C) S + (K ⊙ exp(G_C − G))ᵀ V′
//! ```
//!
//! Everything here is slow and meant to be read, and to be compared with.

use alloc::vec;
use alloc::vec::Vec;

use crate::form::{CHUNK, Form};
use crate::math::{exp, ln_1p, sqrt};
use crate::shape::{Input, Shape, Weights};
use crate::state::{Span, assert_spans};

/// Added to the sum of squares in [`l2_normalise`].
pub const L2_EPS: f32 = 1e-6;

/// Logistic function.
#[must_use]
pub fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + exp(-x))
}

/// `x · sigmoid(x)`.
#[must_use]
pub fn silu(x: f32) -> f32 {
    x / (1.0 + exp(-x))
}

/// `ln(1 + exp(x))`, which is `x` itself above 20.
#[must_use]
pub fn softplus(x: f32) -> f32 {
    if x > 20.0 { x } else { ln_1p(exp(x)) }
}

/// The log decay `g = a · softplus(alpha + dt_bias)` of one token and head; never positive when `a < 0`.
#[must_use]
pub fn log_decay(a: f32, alpha: f32, dt_bias: f32) -> f32 {
    a * softplus(alpha + dt_bias)
}

/// Causal depthwise convolution, then SiLU.
///
/// `taps` `[channels, kernel]`, `window` `[kernel - 1, channels]` (the rows before `rows`, oldest first, updated to the last
/// `kernel - 1` of both), `rows` and `out` `[n, channels]`.
///
/// # Panics
/// When a slice does not fit.
pub fn conv_silu(kernel: usize, taps: &[f32], window: &mut [f32], rows: &[f32], out: &mut [f32]) {
    let channels = taps.len() / kernel;
    let n = rows.len() / channels;
    let history = kernel - 1;
    let seen: Vec<f32> = window.iter().chain(rows).copied().collect();
    for t in 0..n {
        for c in 0..channels {
            let sum: f32 = (0..kernel).map(|j| taps[c * kernel + j] * seen[(t + j) * channels + c]).sum();
            out[t * channels + c] = silu(sum);
        }
    }
    window.copy_from_slice(&seen[n * channels..(n + history) * channels]);
}

/// `x ← scale · x · (Σ x² + 1e-6)^−½`. A zero vector stays zero.
pub fn l2_normalise(x: &mut [f32], scale: f32) {
    let sum: f32 = x.iter().map(|x| x * x).sum();
    let factor = scale / sqrt(sum + L2_EPS);
    x.iter_mut().for_each(|x| *x *= factor);
}

/// One head, `n` tokens, token by token: `q` and `k` `[n, d_k]`, `v` and `o` `[n, d_v]`, `g` and `beta` `[n]`, `s` `[d_k, d_v]`.
///
/// # Panics
/// When a slice does not fit.
pub fn recurrent(q: &[f32], k: &[f32], v: &[f32], g: &[f32], beta: &[f32], s: &mut [f32], o: &mut [f32]) {
    let n = g.len();
    let (d_k, d_v) = (k.len() / n.max(1), v.len() / n.max(1));
    let mut u = vec![0.0; d_v];
    for t in 0..n {
        let (q, k, v) = (&q[t * d_k..][..d_k], &k[t * d_k..][..d_k], &v[t * d_v..][..d_v]);
        let decay = exp(g[t]);
        s.iter_mut().for_each(|s| *s *= decay);
        for (j, u) in u.iter_mut().enumerate() {
            let read: f32 = (0..d_k).map(|i| s[i * d_v + j] * k[i]).sum();
            *u = beta[t] * (v[j] - read);
        }
        for i in 0..d_k {
            for j in 0..d_v {
                s[i * d_v + j] += k[i] * u[j];
            }
        }
        for j in 0..d_v {
            o[t * d_v + j] = (0..d_k).map(|i| s[i * d_v + j] * q[i]).sum();
        }
    }
}

/// One head, `n` tokens, in chunks of at most `chunk` tokens: arguments as for [`recurrent`].
///
/// `G` is kept in f32 as in the paper, so a token whose own log decay is below about -1e4 costs its neighbours in the chunk
/// precision, and an infinite one is not representable.
///
/// # Panics
/// When a slice does not fit or `chunk` is zero.
pub fn chunked(
    chunk: usize,
    q: &[f32],
    k: &[f32],
    v: &[f32],
    g: &[f32],
    beta: &[f32],
    s: &mut [f32],
    o: &mut [f32],
) {
    let n = g.len();
    let (d_k, d_v) = (k.len() / n.max(1), v.len() / n.max(1));
    for start in (0..n).step_by(chunk) {
        let rows = start..n.min(start + chunk);
        let keys = rows.start * d_k..rows.end * d_k;
        let values = rows.start * d_v..rows.end * d_v;
        one_chunk(
            &q[keys.clone()],
            &k[keys],
            &v[values.clone()],
            &g[rows.clone()],
            &beta[rows],
            s,
            &mut o[values],
        );
    }
}

fn one_chunk(q: &[f32], k: &[f32], v: &[f32], g: &[f32], beta: &[f32], s: &mut [f32], o: &mut [f32]) {
    let c = g.len();
    let (d_k, d_v) = (k.len() / c, v.len() / c);
    let dot = |x: &[f32], i: usize, y: &[f32], j: usize| -> f32 {
        x[i * d_k..][..d_k].iter().zip(&y[j * d_k..][..d_k]).map(|(x, y)| x * y).sum()
    };
    let cumulative: Vec<f32> = g
        .iter()
        .scan(0.0, |sum, g| {
            *sum += g;
            Some(*sum)
        })
        .collect();
    // The upper triangle is never evaluated: its exponents are positive and would overflow.
    let gamma = |i: usize, j: usize| if i >= j { exp(cumulative[i] - cumulative[j]) } else { 0.0 };

    // T by forward substitution: row i of (I + A) T = I.
    let mut t = vec![0.0; c * c];
    for i in 0..c {
        t[i * c + i] = 1.0;
        for m in 0..i {
            let a = beta[i] * dot(k, i, k, m) * gamma(i, m);
            for j in 0..=m {
                t[i * c + j] -= a * t[m * c + j];
            }
        }
    }
    // V′ = T diag(β) V − T diag(β exp(G)) K S
    let mut fresh = vec![0.0; c * d_v];
    for i in 0..c {
        let mut w = vec![0.0; d_k];
        for m in 0..=i {
            let u = t[i * c + m] * beta[m];
            for j in 0..d_v {
                fresh[i * d_v + j] += u * v[m * d_v + j];
            }
            for (p, w) in w.iter_mut().enumerate() {
                *w += u * exp(cumulative[m]) * k[m * d_k + p];
            }
        }
        for j in 0..d_v {
            fresh[i * d_v + j] -= (0..d_k).map(|p| w[p] * s[p * d_v + j]).sum::<f32>();
        }
    }
    for i in 0..c {
        for j in 0..d_v {
            let carried: f32 = (0..d_k).map(|p| q[i * d_k + p] * s[p * d_v + j]).sum();
            o[i * d_v + j] = exp(cumulative[i]) * carried;
        }
        for m in 0..=i {
            let score = dot(q, i, k, m) * gamma(i, m);
            for j in 0..d_v {
                o[i * d_v + j] += score * fresh[m * d_v + j];
            }
        }
    }
    for p in 0..d_k {
        for j in 0..d_v {
            let written: f32 = (0..c).map(|i| k[i * d_k + p] * gamma(c - 1, i) * fresh[i * d_v + j]).sum();
            s[p * d_v + j] = exp(cumulative[c - 1]) * s[p * d_v + j] + written;
        }
    }
}

/// Gated RMS norm of one head of one token: `out = o · (mean(o²) + eps)^−½ · norm ⊙ silu(z)`, all `[d_v]`.
/// The norm comes before the gate.
///
/// # Panics
/// When a slice is shorter than `o`.
pub fn gated_norm(o: &[f32], norm: &[f32], eps: f32, z: &[f32], out: &mut [f32]) {
    let mean = o.iter().map(|x| x * x).sum::<f32>() / o.len() as f32;
    let factor = 1.0 / sqrt(mean + eps);
    for j in 0..o.len() {
        out[j] = o[j] * factor * norm[j] * silu(z[j]);
    }
}

/// The whole mixer, serial and scalar; the same contract as the parallel `mix` of this crate (feature `std`).
/// [`Form::Auto`] means [`Form::Recurrent`] here.
///
/// # Panics
/// When a slice does not fit the shape, or the spans do not ascend without overlap inside the batch.
pub fn mix(
    shape: &Shape,
    weights: &Weights<'_>,
    spans: &mut [Span<'_>],
    input: &Input<'_>,
    form: Form,
    out: &mut [f32],
) {
    weights.assert_fits(shape);
    let n = input.assert_fits(shape);
    assert_eq!(out.len(), n * shape.value_dim(), "out is not [n, value_dim]");
    assert_spans(shape, spans, n);
    let (d_k, d_v) = (shape.head_k_dim(), shape.head_v_dim());
    let (conv_dim, value_dim, v_heads) = (shape.conv_dim(), shape.value_dim(), shape.v_heads());
    out.fill(0.0);
    for span in spans {
        let rows = span.tokens.clone();
        let n = rows.len();
        if n == 0 {
            continue;
        }
        let (window, states) = span.state.parts_mut();
        let mut mixed = vec![0.0; n * conv_dim];
        let raw = &input.qkv[rows.start * conv_dim..rows.end * conv_dim];
        conv_silu(shape.conv_kernel(), weights.conv(), window, raw, &mut mixed);
        for row in mixed.chunks_exact_mut(conv_dim) {
            let (q, rest) = row.split_at_mut(shape.key_dim());
            let (k, _) = rest.split_at_mut(shape.key_dim());
            q.chunks_exact_mut(d_k).for_each(|q| l2_normalise(q, 1.0 / sqrt(d_k as f32)));
            k.chunks_exact_mut(d_k).for_each(|k| l2_normalise(k, 1.0));
        }
        let gather = |channels: core::ops::Range<usize>| -> Vec<f32> {
            mixed.chunks_exact(conv_dim).flat_map(|row| &row[channels.clone()]).copied().collect()
        };
        for (head, s) in states.chunks_exact_mut(shape.head_state()).enumerate() {
            let k_head = shape.k_head_of(head);
            let q = gather(shape.q_channels(k_head));
            let k = gather(shape.k_channels(k_head));
            let v = gather(shape.v_channels(head));
            let at = |t: usize| (rows.start + t) * v_heads + head;
            let g: Vec<f32> = (0..n)
                .map(|t| log_decay(weights.a()[head], input.alpha[at(t)], weights.dt_bias()[head]))
                .collect();
            let beta: Vec<f32> = (0..n).map(|t| sigmoid(input.beta[at(t)])).collect();
            let mut o = vec![0.0; n * d_v];
            match form {
                Form::Chunked => chunked(CHUNK, &q, &k, &v, &g, &beta, s, &mut o),
                Form::Auto | Form::Recurrent => recurrent(&q, &k, &v, &g, &beta, s, &mut o),
            }
            for t in 0..n {
                let place = (rows.start + t) * value_dim + head * d_v
                    ..(rows.start + t) * value_dim + (head + 1) * d_v;
                let (z, out) = (&input.z[place.clone()], &mut out[place]);
                gated_norm(&o[t * d_v..][..d_v], weights.norm(), weights.eps(), z, out);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn values(n: usize, seed: u32) -> Vec<f32> {
        let mut x = seed;
        let mut next = || {
            x = x.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (x >> 8) as f32 / (1 << 23) as f32 - 1.0
        };
        (0..n).map(|_| next()).collect()
    }

    #[test]
    fn both_forms_agree_for_every_chunk_length() {
        let (n, d_k, d_v) = (30, 6, 5);
        let (mut q, mut k, v) = (values(n * d_k, 1), values(n * d_k, 2), values(n * d_v, 3));
        q.chunks_exact_mut(d_k).for_each(|q| l2_normalise(q, 0.4));
        k.chunks_exact_mut(d_k).for_each(|k| l2_normalise(k, 1.0));
        let g: Vec<f32> = values(n, 4).iter().map(|x| -2.0 * x.abs()).collect();
        let beta: Vec<f32> = values(n, 5).iter().map(|x| sigmoid(4.0 * x)).collect();
        for start in [vec![0.0; d_k * d_v], values(d_k * d_v, 6)] {
            let (mut s, mut o) = (start.clone(), vec![0.0; n * d_v]);
            recurrent(&q, &k, &v, &g, &beta, &mut s, &mut o);
            for chunk in [1, 2, 4, 7, 29, 30, 64] {
                let (mut chunked_s, mut chunked_o) = (start.clone(), vec![0.0; n * d_v]);
                chunked(chunk, &q, &k, &v, &g, &beta, &mut chunked_s, &mut chunked_o);
                let close = |x: &[f32], y: &[f32]| x.iter().zip(y).all(|(x, y)| (x - y).abs() < 1e-5);
                assert!(close(&s, &chunked_s) && close(&o, &chunked_o), "chunks of {chunk}");
            }
        }
    }

    #[test]
    fn the_rule_overwrites_what_a_key_held() {
        // One-hot keys, full write strength, no decay: a memory of d_k cells.
        let (mut s, mut o) = (vec![0.0; 4], vec![0.0; 6]);
        let (first, second) = ([1.0, 0.0], [0.0, 1.0]);
        let k = [first, second, first].concat();
        recurrent(&k, &k, &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0], &[0.0; 3], &[1.0; 3], &mut s, &mut o);
        assert_eq!(s, [5.0, 6.0, 3.0, 4.0]);
        assert_eq!(o, [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]);
    }

    #[test]
    fn the_last_tap_meets_the_current_token() {
        let (mut window, mut out) = (vec![7.0, 8.0], vec![0.0; 2]);
        conv_silu(3, &[0.0, 0.0, 1.0], &mut window, &[1.0, 2.0], &mut out);
        assert_eq!(out, [silu(1.0), silu(2.0)]);
        assert_eq!(window, [1.0, 2.0]);
        conv_silu(3, &[1.0, 0.0, 0.0], &mut window, &[3.0], &mut out[..1]);
        assert_eq!(out[0], silu(1.0));
        assert_eq!(window, [2.0, 3.0]);
    }

    #[test]
    fn scalar_functions_at_their_edges() {
        assert_eq!(softplus(20.5), 20.5);
        assert!((softplus(19.9) - 19.9).abs() < 1e-6);
        assert!((softplus(0.0) - core::f32::consts::LN_2).abs() < 1e-7);
        assert_eq!(softplus(-200.0), 0.0);
        assert_eq!((sigmoid(200.0), sigmoid(-200.0)), (1.0, 0.0));
        assert_eq!(silu(-200.0), 0.0);
        let mut zero = [0.0; 3];
        l2_normalise(&mut zero, 1.0);
        assert_eq!(zero, [0.0; 3]);
        assert_eq!(log_decay(-0.5, 0.0, 0.0), -0.5 * core::f32::consts::LN_2);
    }

    #[test]
    fn the_norm_comes_before_the_gate() {
        let mut out = [0.0; 2];
        gated_norm(&[3.0, 4.0], &[1.0, 2.0], 0.0, &[1.0, -1.0], &mut out);
        let rms = sqrt(12.5);
        assert!((out[0] - 3.0 / rms * silu(1.0)).abs() < 1e-6);
        assert!((out[1] - 8.0 / rms * silu(-1.0)).abs() < 1e-6);
    }
}

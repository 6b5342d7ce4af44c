//! Every kernel called directly and compared with the scalar reference.

use alloc::vec;
use alloc::vec::Vec;

use super::{Avx2, chunked, elementwise, lanes, recurrent};
use crate::cpu::{Conv, Kernels, Rule, Scalar, sizes};
use crate::form::CHUNK;
use crate::reference;

/// The proof, or a note that nothing was tested.
fn avx2() -> Option<Avx2> {
    let found = Avx2::detect();
    if found.is_none() {
        std::println!("skipped: no AVX2 and FMA on this machine");
    }
    found
}

fn values(n: usize, scale: f32, seed: u64) -> Vec<f32> {
    let mut x = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        (x >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    };
    (0..n).map(|_| scale * next()).collect()
}

#[track_caller]
fn assert_close(x: &[f32], y: &[f32], tolerance: f32) {
    assert_eq!(x.len(), y.len());
    for (i, (&x, &y)) in x.iter().zip(y).enumerate() {
        let same = x == y || x.is_nan() && y.is_nan() || (x - y).abs() <= tolerance * y.abs().max(1.0);
        assert!(same, "element {i}: {x} instead of {y}");
    }
}

#[test]
fn exp_is_within_two_ulp_and_saturates() {
    let Some(_) = avx2() else { return };
    let exp = |x: f32| -> f32 {
        // SAFETY: the features were detected above.
        unsafe {
            #[target_feature(enable = "avx2,fma")]
            fn one(x: f32) -> f32 {
                let mut out = [0.0; 8];
                lanes::store(&mut out, lanes::exp(lanes::load(&[x; 8])));
                out[0]
            }
            one(x)
        }
    };
    let mut worst = 0;
    for i in -86_990..88_700 {
        let x = i as f32 * 1e-3;
        let (found, expected) = (exp(x), f64::from(x).exp() as f32);
        worst = worst.max(found.to_bits().abs_diff(expected.to_bits()));
    }
    assert!(worst <= 2, "{worst} ulp");
    assert_eq!(exp(0.0), 1.0);
    assert_eq!(exp(f32::INFINITY), f32::INFINITY);
    assert_eq!(exp(1e30), f32::INFINITY);
    for x in [f32::NEG_INFINITY, -1e30, -88.0] {
        assert!((0.0..2e-38).contains(&exp(x)));
    }
    assert!(exp(f32::NAN).is_nan());
}

#[test]
fn convolution_follows_the_reference() {
    let Some(_) = avx2() else { return };
    for kernel in 1..=9 {
        for width in [8, 24, 128] {
            for n in [1, 2, 3, 5, 66] {
                let (stride, column) = (width + 13, 5);
                let taps = values(width * kernel, 1.0, 1);
                let history = values(width * (kernel - 1), 2.0, 2);
                let mut rows = values(n * stride, 2.0, 3);
                // Saturated and invalid values stay in their channel.
                rows[column + 1] = 1e30;
                rows[column + 2] = -1e30;
                rows[column + 3] = f32::NAN;
                let mut transposed = vec![0.0; taps.len()];
                let mut expected_taps = vec![0.0; taps.len()];
                Scalar.transpose(&taps, kernel, &mut expected_taps);
                // SAFETY: the features were detected above.
                unsafe { elementwise::transpose(&taps, kernel, &mut transposed) };
                assert_eq!(transposed, expected_taps);
                let conv =
                    Conv { kernel, width, history: &history, taps: &transposed, rows: &rows, stride, column };
                let inner: Vec<f32> =
                    rows.chunks_exact(stride).flat_map(|row| &row[column..][..width]).copied().collect();
                let mut expected = vec![0.0; n * width];
                let mut window = history.clone();
                reference::conv_silu(kernel, &taps, &mut window, &inner, &mut expected);
                for first in [0, n / 2] {
                    let mut out = vec![f32::NAN; (n - first) * width];
                    // SAFETY: the features were detected above.
                    unsafe { elementwise::conv_silu(&conv, first, &mut out) };
                    // A huge sum cancels differently in another order.
                    assert_close(&out, &expected[first * width..], 2e-5);
                    Scalar.conv_silu(&conv, first, &mut out);
                    assert_close(&out, &expected[first * width..], 2e-5);
                }
            }
        }
    }
}

#[test]
fn norms_follow_the_reference() {
    let Some(_) = avx2() else { return };
    for width in [8, 16, 40, 128, 256] {
        for scale in [0.0, 1e-12, 1e-3, 1.0, 1e6] {
            let rows = values(3 * width, scale, width as u64);
            let (mut out, mut expected) = (rows.clone(), rows.clone());
            // SAFETY: the features were detected above.
            unsafe { elementwise::l2_normalise(&mut out, width, 0.25) };
            Scalar.l2_normalise(&mut expected, width, 0.25);
            assert_close(&out, &expected, 1e-6);

            let (norm, z) = (values(width, 1.0, 5), values(width, 100.0, 6));
            let (mut out, mut expected) = (vec![f32::NAN; width], vec![f32::NAN; width]);
            // SAFETY: the features were detected above.
            unsafe { elementwise::gated_norm(&rows[..width], &norm, 1e-6, &z, &mut out) };
            Scalar.gated_norm(&rows[..width], &norm, 1e-6, &z, &mut expected);
            assert_close(&out, &expected, 2e-5);
        }
    }
}

/// Operands of a rule, with keys and queries as the normalisation leaves them.
struct Operands {
    d_k: usize,
    d_v: usize,
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
    g: Vec<f32>,
    decay: Vec<f32>,
    beta: Vec<f32>,
    s: Vec<f32>,
}

impl Operands {
    fn new(d_k: usize, d_v: usize, n: usize, seed: u64) -> Self {
        let (mut q, mut k) = (values(n * d_k, 1.0, seed), values(n * d_k, 1.0, seed + 1));
        Scalar.l2_normalise(&mut q, d_k, (d_k as f32).powf(-0.5));
        Scalar.l2_normalise(&mut k, d_k, 1.0);
        let mut g: Vec<f32> = values(n, 1.0, seed + 3).iter().map(|x| -x.abs()).collect();
        // Forgetting nothing, and everything.
        g.iter_mut().step_by(7).for_each(|g| *g = 0.0);
        g.iter_mut().skip(3).step_by(11).for_each(|g| *g = -80.0);
        g.iter_mut().skip(5).step_by(23).for_each(|g| *g = f32::NEG_INFINITY);
        Self {
            d_k,
            d_v,
            q,
            k,
            v: values(n * d_v, 2.0, seed + 2),
            decay: g.iter().map(|g| g.exp()).collect(),
            g,
            beta: values(n, 0.5, seed + 4).iter().map(|x| x + 0.5).collect(),
            s: values(d_k * d_v, 1.0, seed + 5),
        }
    }

    fn rule(&self) -> Rule<'_> {
        let Self { d_k, d_v, q, k, v, g, decay, beta, .. } = self;
        Rule { d_k: *d_k, d_v: *d_v, q, k, v, g, decay, beta }
    }
}

const DIMS: [(usize, usize); 6] = [(8, 8), (16, 40), (40, 16), (128, 128), (64, 72), (256, 24)];

#[test]
fn the_recurrent_kernel_follows_the_reference_on_both_paths_with_the_same_bits() {
    let Some(_) = avx2() else { return };
    for (d_k, d_v) in DIMS {
        for n in [1, 2, 3, 5, CHUNK] {
            let operands = Operands::new(d_k, d_v, n, n as u64);
            let rule = operands.rule();
            let (mut expected_s, mut expected) = (operands.s.clone(), vec![f32::NAN; n * d_v]);
            Scalar.recurrent(&rule, &mut expected_s, &mut expected, &mut []);
            // Whatever an earlier call left in the scratch.
            let mut work = vec![f32::NAN; sizes(d_k, d_v).work];
            let mut results = Vec::new();
            for path in [recurrent::in_place, recurrent::tiled, recurrent::recurrent] {
                let (mut s, mut o) = (operands.s.clone(), vec![f32::NAN; n * d_v]);
                // SAFETY: the features were detected above.
                unsafe { path(&rule, &mut s, &mut o, &mut work) };
                assert_close(&o, &expected, 2e-5);
                assert_close(&s, &expected_s, 2e-5);
                results.push((s, o));
            }
            assert!(results.iter().all(|result| *result == results[0]), "{d_k} x {d_v}, {n} tokens");
        }
    }
}

#[test]
fn the_chunked_kernel_follows_the_recurrent_reference() {
    let Some(_) = avx2() else { return };
    for (d_k, d_v) in DIMS {
        for n in [1, 2, 3, 4, 5, 8, 9, 15, 16, 17, 33, 63, 64] {
            let operands = Operands::new(d_k, d_v, n, 100 + n as u64);
            let rule = operands.rule();
            let (mut expected_s, mut expected) = (operands.s.clone(), vec![f32::NAN; n * d_v]);
            Scalar.recurrent(&rule, &mut expected_s, &mut expected, &mut []);
            let sizes = sizes(d_k, d_v);
            let (mut scores, mut work) = (vec![f32::NAN; sizes.scores], vec![f32::NAN; sizes.work]);
            let (mut s, mut o) = (operands.s.clone(), vec![f32::NAN; n * d_v]);
            // SAFETY: the features were detected above.
            unsafe { chunked::scores(rule.q, rule.k, d_k, &mut scores) };
            // SAFETY: the features were detected above.
            unsafe { chunked::chunked(&rule, &scores, &mut s, &mut o, &mut work) };
            assert_close(&o, &expected, 2e-5);
            assert_close(&s, &expected_s, 2e-5);
        }
    }
}

//! Every kernel of every instruction set against the reference.

use alloc::vec;
use alloc::vec::Vec;

use skep_quant::Isa;

use super::{BLOCK, Heads, Kernels};
use crate::{Activation, reference};

fn kernels() -> impl Iterator<Item = (Isa, Kernels)> {
    Isa::ALL.iter().filter(|isa| isa.is_supported()).map(|isa| (*isa, Kernels::of(*isa)))
}

struct Random(u64);

impl Random {
    /// Uniform in -1..1.
    fn unit(&mut self) -> f32 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 40) as f32 / (1 << 23) as f32 - 1.0
    }

    fn vector(&mut self, len: usize, scale: f32) -> Vec<f32> {
        (0..len).map(|_| scale * (self.unit() + self.unit() + self.unit())).collect()
    }
}

/// `[n, heads * dim]` as the kernels take it; what lies past the last token is hostile.
fn blocked(x: &[f32], heads: usize, dim: usize) -> Vec<f32> {
    let n = x.len() / (heads * dim);
    let mut out = vec![f32::NAN; n.div_ceil(BLOCK) * BLOCK * heads * dim];
    for (i, x) in x.chunks_exact(heads * dim).enumerate() {
        for (head, x) in x.chunks_exact(dim).enumerate() {
            let at = ((i / BLOCK * heads + head) * BLOCK + i % BLOCK) * dim;
            out[at..][..dim].copy_from_slice(x);
        }
    }
    out
}

fn attend(kernels: &Kernels, x: [&[f32]; 3], heads: usize, dim: usize) -> Vec<f32> {
    let [q, k, v] = x.map(|x| blocked(x, heads, dim));
    let n = x[0].len() / (heads * dim);
    let heads = Heads { q: &q, k: &k, v: &v, n, heads, dim };
    let mut out = vec![f32::NAN; x[0].len()];
    for (block, out) in out.chunks_mut(BLOCK * heads.heads * dim).enumerate() {
        (kernels.attend)(&heads, block, out);
    }
    out
}

/// One head after the other, `[n, heads * dim]`.
fn attend_reference(x: [&[f32]; 3], heads: usize, dim: usize) -> Vec<f32> {
    let mut out = vec![0.0; x[0].len()];
    for head in 0..heads {
        let of = |x: &[f32]| -> Vec<f32> {
            x.chunks_exact(heads * dim).flat_map(|x| &x[head * dim..][..dim]).copied().collect()
        };
        let attended = reference::attend(&of(x[0]), &of(x[1]), &of(x[2]), dim);
        for (out, row) in out.chunks_exact_mut(heads * dim).zip(attended.chunks_exact(dim)) {
            out[head * dim..][..dim].copy_from_slice(row);
        }
    }
    out
}

#[test]
fn attention_is_the_reference_at_awkward_sizes() {
    let mut random = Random(1);
    for (n, heads, dim) in [
        (1, 1, 4),
        (9, 2, 72),
        (31, 1, 64),
        (BLOCK - 1, 2, 20),
        (BLOCK, 1, 8),
        (BLOCK + 1, 3, 36),
        (2 * BLOCK + 49, 1, 72),
    ] {
        // From even weights to weights that one key has alone.
        for scale in [0.0, 0.3, 3.0] {
            let len = n * heads * dim;
            let (q, k, v) = (random.vector(len, scale), random.vector(len, 1.0), random.vector(len, 1.0));
            let expected = attend_reference([&q, &k, &v], heads, dim);
            for (isa, kernels) in kernels() {
                let out = attend(&kernels, [&q, &k, &v], heads, dim);
                for (i, (out, expected)) in out.iter().zip(&expected).enumerate() {
                    // Scores of size s are off by a few ulp of s, and weights by as much relatively.
                    let allowed = 2e-6 * (1.0 + scale * dim as f32);
                    assert!(
                        (out - expected).abs() <= allowed,
                        "{isa:?} {n}x{heads}x{dim} scale {scale} [{i}]: {out} for {expected}"
                    );
                }
            }
        }
    }
}

/// Scores that rise and fall by hundreds from block to block, so that running sums are rescaled to nothing and back.
#[test]
fn attention_with_scores_far_apart() {
    let (n, dim) = (3 * BLOCK + 5, 8);
    for rising in [1.0, -1.0] {
        let q: Vec<f32> = (0..n * dim).map(|i| if i % dim == 0 { 10.0 } else { 0.0 }).collect();
        let k: Vec<f32> = (0..n * dim).map(|i| rising * (i / dim) as f32).collect();
        let v: Vec<f32> = (0..n * dim).map(|i| (i / dim) as f32).collect();
        // The key with the largest score has all the weight but e^-10.
        let best = if rising > 0.0 { n as f32 - 1.0 } else { 0.0 };
        for (isa, kernels) in kernels() {
            let out = attend(&kernels, [&q, &k, &v], 1, dim);
            assert!(out.iter().all(|x| (x - best).abs() < 1e-3), "{isa:?} {rising}: {:?}", &out[..dim]);
        }
    }
}

/// A query that is not a number spoils its own row, a key or value every row of its head; never another head.
#[test]
fn attention_keeps_what_is_not_a_number_where_it_is() {
    let mut random = Random(2);
    let (n, heads, dim) = (BLOCK + 40, 2, 12);
    let len = n * heads * dim;
    let clean = [random.vector(len, 0.5), random.vector(len, 1.0), random.vector(len, 1.0)];
    for (isa, kernels) in kernels() {
        let before = attend(&kernels, [&clean[0], &clean[1], &clean[2]], heads, dim);
        for which in 0..3 {
            for hostile in [f32::NAN, f32::INFINITY] {
                let mut x = clean.clone();
                let token = BLOCK + 3;
                x[which][(token * heads + 1) * dim + 5] = hostile;
                let after = attend(&kernels, [&x[0], &x[1], &x[2]], heads, dim);
                for (i, (after, before)) in after.iter().zip(&before).enumerate() {
                    let (row, head, d) = (i / (heads * dim), i / dim % heads, i % dim);
                    let what = (isa, which, hostile, row, head, d);
                    if head == 0 || (which == 0 && row != token) {
                        assert_eq!(after.to_bits(), before.to_bits(), "{what:?}");
                    } else if hostile.is_nan() && (which != 2 || d == 5) {
                        assert!(after.is_nan(), "{what:?}: {after}");
                    }
                }
            }
        }
    }
}

#[test]
fn gates_are_their_formulas() {
    let x: Vec<f32> =
        (-6000..6000).map(|i| i as f32 * 0.0031).chain([0.0, -0.0, 1e30, -1e30, 1e-30]).collect();
    let up: Vec<f32> = (0..x.len()).map(|i| 1.0 + (i % 3) as f32).collect();
    for (isa, kernels) in kernels() {
        for activation in [Activation::GeluTanh, Activation::GeluQuick, Activation::Silu] {
            for len in [0, 1, 7, 33, x.len()] {
                let mut out = x[..len].to_vec();
                (kernels.gate)(activation, &mut out, &up[..len]);
                for ((out, x), up) in out.iter().zip(&x).zip(&up) {
                    let expected = reference::activation(activation, *x) * up;
                    let allowed = 2e-6 * expected.abs() + 2e-7;
                    assert!(
                        (out - expected).abs() <= allowed,
                        "{isa:?} {activation:?} {x}: {out} for {expected}"
                    );
                }
            }
            let mut out = [f32::NAN, 1.0];
            (kernels.gate)(activation, &mut out, &[1.0, 1.0]);
            assert!(out[0].is_nan() && out[1].is_finite());
        }
    }
}

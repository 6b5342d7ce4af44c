//! Portable kernels.

use alloc::vec;

use super::{BLOCK, Heads};
use crate::Activation;

pub(crate) fn attend(heads: &Heads<'_>, block: usize, out: &mut [f32]) {
    let (dim, row) = (heads.dim, heads.heads * heads.dim);
    let mut p = vec![0.0; heads.n];
    for (i, out) in out.chunks_exact_mut(row).enumerate() {
        for (head, out) in out.chunks_exact_mut(dim).enumerate() {
            let q = &heads.block(heads.q, block, head)[i * dim..][..dim];
            for block in 0..heads.blocks() {
                let keys = heads.block(heads.k, block, head).chunks_exact(dim);
                for (p, k) in p[block * BLOCK..].iter_mut().zip(keys) {
                    *p = skep_quant::vec::dot(q, k);
                }
            }
            skep_quant::vec::softmax_in_place(&mut p);
            out.fill(0.0);
            for block in 0..heads.blocks() {
                let values = heads.block(heads.v, block, head).chunks_exact(dim);
                for (p, v) in p[block * BLOCK..].iter().zip(values) {
                    skep_quant::vec::axpy(*p, v, out);
                }
            }
        }
    }
}

#[inline(always)]
pub(crate) fn gate(activation: Activation, gate: &mut [f32], up: &[f32]) {
    // ½(1 + tanh u) = σ(2u).
    const TWICE_SQRT_2_OVER_PI: f32 = 1.595_769_2;
    match activation {
        Activation::GeluTanh => {
            map(gate, up, |x| over_one_plus_exp(x, -TWICE_SQRT_2_OVER_PI * (x + 0.044_715 * x * x * x)));
        }
        Activation::GeluQuick => map(gate, up, |x| over_one_plus_exp(x, -1.702 * x)),
        Activation::Silu => map(gate, up, |x| over_one_plus_exp(x, -x)),
    }
}

#[inline(always)]
fn map(gate: &mut [f32], up: &[f32], act: impl Fn(f32) -> f32) {
    for (gate, up) in gate.iter_mut().zip(up) {
        *gate = act(*gate) * up;
    }
}

#[inline(always)]
fn over_one_plus_exp(x: f32, y: f32) -> f32 {
    x / (1.0 + exp(y))
}

/// e^x to 3e-7 relative for -87 … 88, clamped outside; without branches and calls, so that loops over it vectorise.
/// NaN for NaN.
#[inline(always)]
fn exp(x: f32) -> f32 {
    /// 1.5 * 2^23: adding it rounds to an integer, which then stands in the low bits.
    const ROUND: f32 = 12_582_912.0;
    let x = x.clamp(-87.0, 88.0);
    let shifted = x * core::f32::consts::LOG2_E + ROUND;
    let n = shifted - ROUND;
    // ln 2 in two parts, the first with enough trailing zeros to make n times it exact.
    let r = x - n * 0.693_359_4 + n * 2.121_944_4e-4;
    // Taylor terms up to r^7 / 7!; the rest is below 2^-27.
    let mut p = 1.0 / 5040.0;
    for factor in [1.0 / 720.0, 1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 0.5, 1.0, 1.0] {
        p = p * r + factor;
    }
    p * f32::from_bits((shifted.to_bits() << 23).wrapping_add(0x3f80_0000))
}

//! The inner tile of float products: two rows, three tokens, half of the partial sums at a time: with all of
//! them a tile would not fit the registers, and loads would limit the rate.

use core::arch::x86_64::*;

use super::dense::{floats, reduce};
use super::{load_f32, store_f32};
use crate::cpu::gemm::{Micro, ROW, Sums};
use crate::cpu::scalar::LANES;

const ROWS: usize = 2;
const TOKENS: usize = 3;

/// To be used on processors with the features only.
pub(in crate::cpu) const MICRO: Micro = Micro {
    rows: ROWS,
    tokens: TOKENS,
    // SAFETY: `Kernels::of` gives these kernels out only on a processor with the features; so below.
    decode: |ty, bytes, out| unsafe { floats(ty, bytes, out) },
    // SAFETY: as above.
    step: |w, x, stride, sums, fresh, steps| unsafe { step(w, x, stride, sums, fresh, steps) },
    // SAFETY: as above.
    reduce: |sums, out| unsafe { reduce_all(sums, out) },
};

#[target_feature(enable = "avx2,fma,f16c")]
fn step(w: &[f32], x: &[f32], stride: usize, sums: &mut [Sums], fresh: bool, steps: usize) {
    let sums: &mut [Sums; ROWS * TOKENS] = sums.try_into().expect("a tile's sums");
    if fresh {
        sums.fill([0.0; LANES]);
    }
    let row = |r: usize| w[r * ROW..].as_chunks::<LANES>().0[..steps].iter();
    let token = |t: usize| x[t * stride..].as_chunks::<LANES>().0[..steps].iter();
    for half in 0..2 {
        let mut acc = [[[_mm256_setzero_ps(); 2]; ROWS]; TOKENS];
        for t in 0..TOKENS {
            for r in 0..ROWS {
                let sums = &sums[t * ROWS + r];
                acc[t][r] = [part(sums, 2 * half), part(sums, 2 * half + 1)];
            }
        }
        let tokens = token(0).zip(token(1)).zip(token(2));
        for ((w0, w1), ((x0, x1), x2)) in row(0).zip(row(1)).zip(tokens) {
            for k in 0..2 {
                let at = 2 * half + k;
                let x = [part(x0, at), part(x1, at), part(x2, at)];
                for (r, w) in [w0, w1].into_iter().enumerate() {
                    let w = part(w, at);
                    for t in 0..TOKENS {
                        acc[t][r][k] = _mm256_fmadd_ps(w, x[t], acc[t][r][k]);
                    }
                }
            }
        }
        for t in 0..TOKENS {
            for r in 0..ROWS {
                let sums = sums[t * ROWS + r].as_chunks_mut().0;
                store_f32(&mut sums[2 * half], acc[t][r][0]);
                store_f32(&mut sums[2 * half + 1], acc[t][r][1]);
            }
        }
    }
}

/// A quarter of the elements of a step.
#[inline]
#[target_feature(enable = "avx2")]
fn part(lanes: &[f32; LANES], quarter: usize) -> __m256 {
    load_f32(&lanes.as_chunks().0[quarter])
}

#[target_feature(enable = "avx2")]
fn reduce_all(sums: &[Sums], out: &mut [f32]) {
    for (sums, out) in sums.iter().zip(out) {
        *out = reduce(sums);
    }
}

//! The inner tile of float products: two rows, three tokens, half of the partial sums at a time.

use core::arch::x86_64::*;

use super::dense::{floats, reduce};
use super::{load_f32, store_f32};
use crate::cpu::gemm::{Micro, ROW, Sums};
use crate::cpu::scalar::LANES;

const ROWS: usize = 2;
const TOKENS: usize = 3;
/// Partial sums of a pass: with all of them a tile would not fit the registers, and loads would limit the rate.
const HALF: usize = LANES / 2;

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
    let w: [&[[f32; LANES]]; ROWS] = core::array::from_fn(|r| &w[r * ROW..].as_chunks().0[..steps]);
    let x: [&[[f32; LANES]]; TOKENS] = core::array::from_fn(|t| &x[t * stride..].as_chunks().0[..steps]);
    let sums: &mut [Sums; ROWS * TOKENS] = sums.try_into().expect("a tile's sums");
    if fresh {
        sums.fill([0.0; LANES]);
    }
    for half in 0..2 {
        let mut acc = [[[_mm256_setzero_ps(); 2]; ROWS]; TOKENS];
        for t in 0..TOKENS {
            for r in 0..ROWS {
                let sums = sums[t * ROWS + r].as_chunks::<HALF>().0[half].as_chunks().0;
                acc[t][r] = [load_f32(&sums[0]), load_f32(&sums[1])];
            }
        }
        for i in 0..steps {
            for k in 0..2 {
                let part = |lanes: &[f32; LANES]| load_f32(&lanes.as_chunks().0[2 * half + k]);
                let x = [part(&x[0][i]), part(&x[1][i]), part(&x[2][i])];
                for r in 0..ROWS {
                    let w = part(&w[r][i]);
                    for t in 0..TOKENS {
                        acc[t][r][k] = _mm256_fmadd_ps(w, x[t], acc[t][r][k]);
                    }
                }
            }
        }
        for t in 0..TOKENS {
            for r in 0..ROWS {
                let sums = sums[t * ROWS + r].as_chunks_mut::<HALF>().0[half].as_chunks_mut().0;
                store_f32(&mut sums[0], acc[t][r][0]);
                store_f32(&mut sums[1], acc[t][r][1]);
            }
        }
    }
}

#[target_feature(enable = "avx2")]
fn reduce_all(sums: &[Sums], out: &mut [f32]) {
    for (sums, out) in sums.iter().zip(out) {
        *out = reduce(sums);
    }
}

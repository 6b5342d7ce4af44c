//! The inner tile of float products: four rows, three tokens, a vector of partial sums each.

use core::arch::x86_64::*;

use super::dense::{floats, reduce_vectors};
use super::{load_f32, store_f32};
use crate::cpu::gemm::{self, Micro, decode_split};

const WIDTH: usize = 8;
const ROWS: usize = 4;
const TOKENS: usize = 3;

pub(in crate::cpu) const MICRO: Micro =
    Micro { width: WIDTH, rows: ROWS, tokens: TOKENS, split, decode, step, reduce };

#[target_feature(enable = "avx2,fma,f16c")]
fn split(x: &[f32], pad: f32, out: &mut [f32], stride: usize) {
    gemm::split::<WIDTH>(x, pad, out, stride);
}

/// Decodes blocks to four planes.
#[target_feature(enable = "avx2,fma,f16c")]
fn decode(ty: crate::Type, bytes: &[u8], out: &mut [f32], stride: usize) {
    decode_split::<WIDTH>(bytes, ty, out, stride, |bytes, out| floats(ty, bytes, out));
}

#[target_feature(enable = "avx2,fma")]
fn step(w: &[f32], w_row: usize, x: &[f32], x_row: usize, sums: &mut [f32], fresh: bool, vectors: usize) {
    let sums: &mut [[f32; WIDTH]; ROWS * TOKENS] = sums.as_chunks_mut().0.try_into().expect("a tile's sums");
    let mut acc = [[_mm256_setzero_ps(); ROWS]; TOKENS];
    if !fresh {
        for t in 0..TOKENS {
            for r in 0..ROWS {
                acc[t][r] = load_f32(&sums[t * ROWS + r]);
            }
        }
    }
    let row = |r: usize| w[r * w_row..].as_chunks::<WIDTH>().0[..vectors].iter();
    let token = |t: usize| x[t * x_row..].as_chunks::<WIDTH>().0[..vectors].iter();
    let rows = row(0).zip(row(1)).zip(row(2)).zip(row(3));
    let tokens = token(0).zip(token(1)).zip(token(2));
    for ((((w0, w1), w2), w3), ((x0, x1), x2)) in rows.zip(tokens) {
        let x = [load_f32(x0), load_f32(x1), load_f32(x2)];
        for (r, w) in [w0, w1, w2, w3].into_iter().enumerate() {
            let w = load_f32(w);
            for t in 0..TOKENS {
                acc[t][r] = _mm256_fmadd_ps(w, x[t], acc[t][r]);
            }
        }
    }
    for t in 0..TOKENS {
        for r in 0..ROWS {
            store_f32(&mut sums[t * ROWS + r], acc[t][r]);
        }
    }
}

#[target_feature(enable = "avx2")]
fn reduce(sums: &[f32], out: &mut [f32; 24]) {
    let planes: &[[[f32; WIDTH]; ROWS * TOKENS]; 4] =
        sums.as_chunks().0.as_chunks().0.try_into().expect("a tile's sums");
    for (i, out) in out[..ROWS * TOKENS].iter_mut().enumerate() {
        let plane = |p: usize| load_f32(&planes[p][i]);
        *out = reduce_vectors([plane(0), plane(1), plane(2), plane(3)]);
    }
}

//! Products with weights decoded to f32.

use core::arch::x86_64::*;

use super::{load_f32, store_f32};
use crate::Type;
use crate::blocks::bf16_to_f32;
use crate::cpu::scalar::{LANES, reduce};
use crate::decode::decode_blocks;
use crate::matmul::Tile;

/// Tokens per pass over a row: their partial sums lie on the stack.
const TOKENS: usize = 12;
/// Elements decoded at a time.
const CHUNK: usize = 256;

#[target_feature(enable = "avx2,fma,f16c")]
pub(crate) fn exact(tile: &mut Tile<'_>) {
    let (ty, n_tokens) = (tile.w.ty(), tile.out.tokens());
    let chunk_bytes = CHUNK / ty.block_len() * ty.block_bytes();
    let mut decoded = [0.0; CHUNK];
    for row in 0..tile.w.rows() {
        for first in (0..n_tokens).step_by(TOKENS) {
            let n = TOKENS.min(n_tokens - first);
            let mut x: [&[f32]; TOKENS] = [&[]; TOKENS];
            for (i, x) in x[..n].iter_mut().enumerate() {
                *x = tile.acts.f32_row(tile.tokens.get(first + i));
            }
            let mut lanes = [[0.0; LANES]; TOKENS];
            for (c, bytes) in tile.w.row(row).chunks(chunk_bytes).enumerate() {
                let from = c * CHUNK;
                let len = CHUNK.min(tile.w.cols() - from);
                let w = floats(ty, bytes, &mut decoded[..len]);
                for (x, lanes) in x[..n].chunks(3).zip(lanes.chunks_mut(3)) {
                    match x {
                        [a] => step(w, [&a[from..][..len]], lanes),
                        [a, b] => step(w, [&a[from..][..len], &b[from..][..len]], lanes),
                        [a, b, c, ..] => {
                            step(w, [&a[from..][..len], &b[from..][..len], &c[from..][..len]], lanes);
                        }
                        [] => {}
                    }
                }
            }
            for (i, lanes) in lanes[..n].iter().enumerate() {
                tile.out.put(first + i, row, &[reduce(*lanes)]);
            }
        }
    }
}

/// The weights in `bytes`, decoded into `space` unless they are f32 already.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn floats<'a>(ty: Type, bytes: &'a [u8], space: &'a mut [f32]) -> &'a [f32] {
    match ty {
        Type::F32 => {
            if let Ok(floats) = bytemuck::try_cast_slice(bytes) {
                return floats;
            }
            decode_blocks(Type::F32, bytes, space);
        }
        Type::F16 => {
            let (whole, rest) = space.as_chunks_mut::<8>();
            let (bytes, tail) = bytes.as_chunks::<16>();
            for (space, bytes) in whole.iter_mut().zip(bytes) {
                store_f32(space, _mm256_cvtph_ps(super::load_half(bytes)));
            }
            decode_blocks(Type::F16, tail, rest);
        }
        Type::BF16 => {
            for (x, b) in space.iter_mut().zip(bytes.as_chunks().0) {
                *x = bf16_to_f32(*b);
            }
        }
        ty => decode_blocks(ty, bytes, space),
    }
    space
}

/// Adds the products of up to [`CHUNK`] weights with `NT` tokens to their partial sums.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn step<const NT: usize>(w: &[f32], x: [&[f32]; NT], lanes: &mut [[f32; LANES]]) {
    let mut sums = [[_mm256_setzero_ps(); 4]; NT];
    for t in 0..NT {
        for (k, lanes) in lanes[t].as_chunks::<8>().0.iter().enumerate() {
            sums[t][k] = load_f32(lanes);
        }
    }
    let (whole, tail) = w.as_chunks::<LANES>();
    for (i, w) in whole.iter().enumerate() {
        let w = w.as_chunks::<8>().0;
        for t in 0..NT {
            let x = x[t][i * LANES..][..LANES].as_chunks::<8>().0;
            for k in 0..4 {
                sums[t][k] = _mm256_fmadd_ps(load_f32(&w[k]), load_f32(&x[k]), sums[t][k]);
            }
        }
    }
    for t in 0..NT {
        for (k, lanes) in lanes[t].as_chunks_mut::<8>().0.iter_mut().enumerate() {
            store_f32(lanes, sums[t][k]);
        }
        let x = &x[t][whole.len() * LANES..];
        for (lane, (w, x)) in lanes[t].iter_mut().zip(tail.iter().zip(x)) {
            *lane = w.mul_add(*x, *lane);
        }
    }
}

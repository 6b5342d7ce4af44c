//! Products with weights decoded to f32.

use core::arch::x86_64::*;

use super::{load_f32, store_f32};
use crate::Type;
use crate::cpu::gemm;
use crate::cpu::scalar::LANES;
use crate::decode::decode_blocks;
use crate::matmul::Tile;

/// Rows and tokens worked on at once: their partial sums, and a chunk of each token, stay in the first-level cache.
const ROWS: usize = 8;
const TOKENS: usize = 9;
/// Elements decoded at a time.
const CHUNK: usize = 512;

/// A chunk of each token, side by side: in the batch rows often lie a power of two apart, in the same few cache
/// sets.
#[repr(align(64))]
struct Chunks([[f32; CHUNK]; TOKENS]);

#[target_feature(enable = "avx2,fma,f16c")]
pub(crate) fn exact(tile: &mut Tile<'_>) {
    if gemm::pays(tile) {
        // SAFETY: the features are those of this function.
        return unsafe { gemm::exact(&super::gemm::MICRO, tile) };
    }
    few(tile);
}

/// One row after the other: for few tokens, whose weights come from memory as fast as they are used.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn few(tile: &mut Tile<'_>) {
    let (ty, n_rows, n_tokens) = (tile.w.ty(), tile.w.rows(), tile.out.tokens());
    let chunk_bytes = CHUNK / ty.block_len() * ty.block_bytes();
    let mut decoded = [0.0; CHUNK];
    let mut x = Chunks([[0.0; CHUNK]; TOKENS]);
    let mut lanes = [[[0.0; LANES]; TOKENS]; ROWS];
    for first in (0..n_tokens).step_by(TOKENS) {
        let n = TOKENS.min(n_tokens - first);
        for row in (0..n_rows).step_by(ROWS) {
            let rows = row..(row + ROWS).min(n_rows);
            for lanes in &mut lanes {
                lanes[..n].fill([0.0; LANES]);
            }
            for from in (0..tile.w.cols()).step_by(CHUNK) {
                let len = CHUNK.min(tile.w.cols() - from);
                for (i, x) in x.0[..n].iter_mut().enumerate() {
                    let row = tile.acts.f32_row(tile.tokens.get(first + i));
                    x[..len].copy_from_slice(&row[from..][..len]);
                }
                for (row, lanes) in rows.clone().zip(&mut lanes) {
                    let bytes = &tile.w.row(row)[from / CHUNK * chunk_bytes..];
                    let bytes = &bytes[..chunk_bytes.min(bytes.len())];
                    let w = read(ty, bytes, &mut decoded[..len]);
                    for (x, lanes) in x.0[..n].chunks(3).zip(lanes.chunks_mut(3)) {
                        match x {
                            [a] => step(w, [a], lanes),
                            [a, b] => step(w, [a, b], lanes),
                            [a, b, c, ..] => step(w, [a, b, c], lanes),
                            [] => {}
                        }
                    }
                }
            }
            for (row, lanes) in rows.zip(&lanes) {
                for (i, lanes) in lanes[..n].iter().enumerate() {
                    tile.out.put(first + i, row, &[reduce(lanes)]);
                }
            }
        }
    }
}

/// See [`scalar::reduce`](crate::cpu::scalar::reduce).
#[inline]
#[target_feature(enable = "avx2")]
pub(super) fn reduce(lanes: &[f32; LANES]) -> f32 {
    let v = lanes.as_chunks::<8>().0;
    reduce_vectors([load_f32(&v[0]), load_f32(&v[1]), load_f32(&v[2]), load_f32(&v[3])])
}

/// As [`reduce`].
#[inline]
#[target_feature(enable = "avx2")]
pub(super) fn reduce_vectors(v: [__m256; 4]) -> f32 {
    let sum = _mm256_add_ps(_mm256_add_ps(v[0], v[2]), _mm256_add_ps(v[1], v[3]));
    let sum = _mm_add_ps(_mm256_castps256_ps128(sum), _mm256_extractf128_ps::<1>(sum));
    let sum = _mm_add_ps(sum, _mm_movehl_ps(sum, sum));
    _mm_cvtss_f32(_mm_add_ss(sum, _mm_movehdup_ps(sum)))
}

/// The weights in `bytes`, decoded into `space` unless they are f32 already.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn read<'a>(ty: Type, bytes: &'a [u8], space: &'a mut [f32]) -> &'a [f32] {
    if ty == Type::F32
        && let Ok(floats) = bytemuck::try_cast_slice(bytes)
    {
        return floats;
    }
    floats(ty, bytes, space);
    space
}

/// Decodes the weights in `bytes`.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn floats(ty: Type, bytes: &[u8], space: &mut [f32]) {
    match ty {
        Type::F16 => {
            let (whole, rest) = space.as_chunks_mut::<8>();
            let (bytes, tail) = bytes.as_chunks::<16>();
            for (space, bytes) in whole.iter_mut().zip(bytes) {
                store_f32(space, _mm256_cvtph_ps(super::load_half(bytes)));
            }
            decode_blocks(Type::F16, tail, rest);
        }
        Type::BF16 => {
            let (whole, rest) = space.as_chunks_mut::<8>();
            let (bytes, tail) = bytes.as_chunks::<16>();
            for (space, bytes) in whole.iter_mut().zip(bytes) {
                let words = _mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(super::load_half(bytes)));
                store_f32(space, _mm256_castsi256_ps(words));
            }
            decode_blocks(Type::BF16, tail, rest);
        }
        ty => decode_blocks(ty, bytes, space),
    }
}

/// Adds the products of up to [`CHUNK`] weights with `NT` tokens to their partial sums.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn step<const NT: usize>(w: &[f32], x: [&[f32; CHUNK]; NT], lanes: &mut [[f32; LANES]]) {
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

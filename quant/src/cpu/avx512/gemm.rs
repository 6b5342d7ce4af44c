//! The inner tile of float products: eight rows, three tokens, a vector of partial sums each.

use core::arch::x86_64::*;

use crate::Type;
use crate::cpu::gemm::{self, Micro, decode_split};
use crate::decode::decode_blocks;

const WIDTH: usize = 16;
/// Rows come from the first-level cache, tokens from the second: more rows than tokens.
const ROWS: usize = 8;
const TOKENS: usize = 3;

pub(in crate::cpu) const MICRO: Micro =
    Micro { width: WIDTH, rows: ROWS, tokens: TOKENS, split, decode, step, reduce };

#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl")]
fn split(x: &[f32], pad: f32, out: &mut [f32], stride: usize) {
    gemm::split::<WIDTH>(x, pad, out, stride);
}

#[inline]
#[target_feature(enable = "avx512f")]
fn load(x: &[f32; WIDTH]) -> __m512 {
    // SAFETY: 16 readable floats; the load is unaligned.
    unsafe { _mm512_loadu_ps(x.as_ptr()) }
}

#[inline]
#[target_feature(enable = "avx512f")]
fn store(x: &mut [f32; WIDTH], v: __m512) {
    // SAFETY: 16 writable floats; the store is unaligned.
    unsafe { _mm512_storeu_ps(x.as_mut_ptr(), v) };
}

/// Brings a line closer that the next tile will load.
#[inline]
#[target_feature(enable = "avx512f")]
#[allow(unused_unsafe)] // Safe in newer compilers than the oldest supported.
fn prefetch(x: *const f32) {
    // SAFETY: a prefetch does not access memory architecturally, so any address will do.
    unsafe { _mm_prefetch::<_MM_HINT_T0>(x.cast()) };
}

/// Decodes blocks to two planes.
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl")]
fn decode(ty: Type, bytes: &[u8], out: &mut [f32], stride: usize) {
    if !matches!(ty, Type::BF16 | Type::F16) {
        return decode_split::<WIDTH>(bytes, ty, out, stride, |bytes, out| decode_blocks(ty, bytes, out));
    }
    let (whole, tail) = bytes.as_chunks::<64>();
    let (low, high) = out.split_at_mut(stride);
    let (low, high) = (low.as_chunks_mut().0, high.as_chunks_mut().0);
    for ((bytes, low), high) in whole.iter().zip(&mut *low).zip(&mut *high) {
        let halves = bytes.as_chunks().0;
        store(low, sixteen(ty, &halves[0]));
        store(high, sixteen(ty, &halves[1]));
    }
    if !tail.is_empty() {
        let mut padded = [0; 64];
        padded[..tail.len()].copy_from_slice(tail);
        let halves = padded.as_chunks().0;
        store(&mut low[whole.len()], sixteen(ty, &halves[0]));
        store(&mut high[whole.len()], sixteen(ty, &halves[1]));
    }
}

/// The values of sixteen half-length floats.
#[inline]
#[target_feature(enable = "avx512f")]
fn sixteen(ty: Type, bytes: &[u8; 32]) -> __m512 {
    // SAFETY: 32 readable bytes; the load is unaligned.
    let halves = unsafe { _mm256_loadu_si256(bytes.as_ptr().cast()) };
    match ty {
        Type::BF16 => _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(halves))),
        _ => _mm512_cvtph_ps(halves),
    }
}

#[target_feature(enable = "avx512f")]
fn step(w: &[f32], w_row: usize, x: &[f32], x_row: usize, sums: &mut [f32], fresh: bool, vectors: usize) {
    let sums: &mut [[f32; WIDTH]; ROWS * TOKENS] = sums.as_chunks_mut().0.try_into().expect("a tile's sums");
    let mut acc = [[_mm512_setzero_ps(); ROWS]; TOKENS];
    if !fresh {
        for t in 0..TOKENS {
            for r in 0..ROWS {
                acc[t][r] = load(&sums[t * ROWS + r]);
            }
        }
    }
    let row = |r: usize| w[r * w_row..].as_chunks::<WIDTH>().0[..vectors].iter();
    let token = |t: usize| x[t * x_row..].as_chunks::<WIDTH>().0[..vectors].iter();
    let rows = row(0).zip(row(1)).zip(row(2)).zip(row(3)).zip(row(4)).zip(row(5)).zip(row(6)).zip(row(7));
    let tokens = token(0).zip(token(1)).zip(token(2));
    for ((((((((w0, w1), w2), w3), w4), w5), w6), w7), ((x0, x1), x2)) in rows.zip(tokens) {
        for x in [x0, x1, x2] {
            prefetch(x.as_ptr().wrapping_add(TOKENS * x_row));
        }
        let x = [load(x0), load(x1), load(x2)];
        for (r, w) in [w0, w1, w2, w3, w4, w5, w6, w7].into_iter().enumerate() {
            let w = load(w);
            for t in 0..TOKENS {
                acc[t][r] = _mm512_fmadd_ps(w, x[t], acc[t][r]);
            }
        }
    }
    for t in 0..TOKENS {
        for r in 0..ROWS {
            store(&mut sums[t * ROWS + r], acc[t][r]);
        }
    }
}

/// See [`scalar::reduce`](crate::cpu::scalar::reduce): halves onto halves, all values of the tile side by side.
#[target_feature(enable = "avx512f")]
fn reduce(sums: &[f32], out: &mut [f32; ROWS * TOKENS]) {
    let sums: &[[[f32; WIDTH]; ROWS * TOKENS]; 2] =
        sums.as_chunks().0.as_chunks().0.try_into().expect("a tile's sums");
    let (first, last) = out.split_at_mut(WIDTH);
    store(first.try_into().expect("sixteen values"), reduce_sixteen(sums, 0));
    // Twice the same eight.
    let mut twice = [0.0; WIDTH];
    store(&mut twice, reduce_sixteen(sums, WIDTH));
    last.copy_from_slice(&twice[..ROWS]);
}

/// The sums of sixteen values from `first` on; past the last value, earlier ones again.
#[inline]
#[target_feature(enable = "avx512f")]
fn reduce_sixteen(sums: &[[[f32; WIDTH]; ROWS * TOKENS]; 2], first: usize) -> __m512 {
    // The values at distances of four become the quarters of a vector, neighbours the lanes of a quarter.
    let quarters = |i: usize| {
        let value = |k: usize| {
            let at = first + i + 4 * k;
            let at = if at < ROWS * TOKENS { at } else { at - ROWS };
            _mm512_add_ps(load(&sums[0][at]), load(&sums[1][at]))
        };
        let (a, b) = (eight(value(0), value(1)), eight(value(2), value(3)));
        _mm512_add_ps(_mm512_shuffle_f32x4::<0x88>(a, b), _mm512_shuffle_f32x4::<0xdd>(a, b))
    };
    let (a, b) = (pairs(quarters(0), quarters(1)), pairs(quarters(2), quarters(3)));
    _mm512_add_ps(_mm512_shuffle_ps::<0x88>(a, b), _mm512_shuffle_ps::<0xdd>(a, b))
}

/// The upper halves added to the lower ones.
#[inline]
#[target_feature(enable = "avx512f")]
fn eight(a: __m512, b: __m512) -> __m512 {
    _mm512_add_ps(_mm512_shuffle_f32x4::<0x44>(a, b), _mm512_shuffle_f32x4::<0xee>(a, b))
}

/// The upper halves of quarters added to the lower ones.
#[inline]
#[target_feature(enable = "avx512f")]
fn pairs(a: __m512, b: __m512) -> __m512 {
    _mm512_add_ps(_mm512_shuffle_ps::<0x44>(a, b), _mm512_shuffle_ps::<0xee>(a, b))
}

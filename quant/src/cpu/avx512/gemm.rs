//! The inner tile of float products: four rows, three tokens, two vectors of partial sums each.

use core::arch::x86_64::*;

use crate::Type;
use crate::cpu::gemm::{Micro, ROW, Sums};
use crate::cpu::scalar::LANES;
use crate::decode::decode_blocks;

const ROWS: usize = 4;
const TOKENS: usize = 3;

/// To be used on processors with the features only.
pub(in crate::cpu) const MICRO: Micro = Micro {
    rows: ROWS,
    tokens: TOKENS,
    // SAFETY: `Kernels::of` gives these kernels out only on a processor with the features; so below.
    decode: |ty, bytes, out| unsafe { decode(ty, bytes, out) },
    // SAFETY: as above.
    step: |w, x, stride, sums, fresh, steps| unsafe { step(w, x, stride, sums, fresh, steps) },
    // SAFETY: as above.
    reduce: |sums, out| unsafe { reduce(sums, out) },
};

#[inline]
#[target_feature(enable = "avx512f")]
fn load(x: &[f32; 16]) -> __m512 {
    // SAFETY: 16 readable floats; the load is unaligned.
    unsafe { _mm512_loadu_ps(x.as_ptr()) }
}

#[inline]
#[target_feature(enable = "avx512f")]
fn store(x: &mut [f32; 16], v: __m512) {
    // SAFETY: 16 writable floats; the store is unaligned.
    unsafe { _mm512_storeu_ps(x.as_mut_ptr(), v) };
}

/// Decodes blocks to f32.
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl")]
fn decode(ty: Type, bytes: &[u8], out: &mut [f32]) {
    match ty {
        Type::BF16 => {
            let (whole, rest) = out.as_chunks_mut::<16>();
            let (bytes, tail) = bytes.as_chunks::<32>();
            for (out, bytes) in whole.iter_mut().zip(bytes) {
                // SAFETY: 32 readable bytes; the load is unaligned.
                let halves = unsafe { _mm256_loadu_si256(bytes.as_ptr().cast()) };
                let words = _mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(halves));
                store(out, _mm512_castsi512_ps(words));
            }
            decode_blocks(Type::BF16, tail, rest);
        }
        Type::F16 => {
            let (whole, rest) = out.as_chunks_mut::<16>();
            let (bytes, tail) = bytes.as_chunks::<32>();
            for (out, bytes) in whole.iter_mut().zip(bytes) {
                // SAFETY: 32 readable bytes; the load is unaligned.
                let halves = unsafe { _mm256_loadu_si256(bytes.as_ptr().cast()) };
                store(out, _mm512_cvtph_ps(halves));
            }
            decode_blocks(Type::F16, tail, rest);
        }
        ty => decode_blocks(ty, bytes, out),
    }
}

#[target_feature(enable = "avx512f")]
fn step(w: &[f32], x: &[f32], stride: usize, sums: &mut [Sums], fresh: bool, steps: usize) {
    let sums: &mut [Sums; ROWS * TOKENS] = sums.try_into().expect("a tile's sums");
    let mut acc = [[[_mm512_setzero_ps(); 2]; ROWS]; TOKENS];
    if !fresh {
        for t in 0..TOKENS {
            for r in 0..ROWS {
                let sums = sums[t * ROWS + r].as_chunks().0;
                acc[t][r] = [load(&sums[0]), load(&sums[1])];
            }
        }
    }
    let row = |r: usize| w[r * ROW..].as_chunks::<LANES>().0[..steps].iter();
    let token = |t: usize| x[t * stride..].as_chunks::<LANES>().0[..steps].iter();
    let rows = row(0).zip(row(1)).zip(row(2)).zip(row(3));
    let tokens = token(0).zip(token(1)).zip(token(2));
    for ((((w0, w1), w2), w3), ((x0, x1), x2)) in rows.zip(tokens) {
        for half in 0..2 {
            let x = [part(x0, half), part(x1, half), part(x2, half)];
            for (r, w) in [w0, w1, w2, w3].into_iter().enumerate() {
                let w = part(w, half);
                for t in 0..TOKENS {
                    acc[t][r][half] = _mm512_fmadd_ps(w, x[t], acc[t][r][half]);
                }
            }
        }
    }
    for t in 0..TOKENS {
        for r in 0..ROWS {
            let sums = sums[t * ROWS + r].as_chunks_mut().0;
            store(&mut sums[0], acc[t][r][0]);
            store(&mut sums[1], acc[t][r][1]);
        }
    }
}

/// Half of the elements of a step.
#[inline]
#[target_feature(enable = "avx512f")]
fn part(lanes: &[f32; LANES], half: usize) -> __m512 {
    load(&lanes.as_chunks().0[half])
}

/// See [`scalar::reduce`](crate::cpu::scalar::reduce): halves onto halves, all values of the tile side by side.
#[target_feature(enable = "avx512f")]
fn reduce(sums: &[Sums], out: &mut [f32]) {
    let sums: &[Sums; ROWS * TOKENS] = sums.try_into().expect("a tile's sums");
    let sixteen = |i: usize| {
        let lanes = sums[i].as_chunks().0;
        _mm512_add_ps(load(&lanes[0]), load(&lanes[1]))
    };
    let eight = |a: __m512, b: __m512| {
        _mm512_add_ps(_mm512_shuffle_f32x4::<0x44>(a, b), _mm512_shuffle_f32x4::<0xee>(a, b))
    };
    // One row's four sums of each token, a token to a quarter; the last quarter is not used.
    let four = |row: usize| {
        let a = eight(sixteen(row), sixteen(ROWS + row));
        let b = sixteen(2 * ROWS + row);
        let b = eight(b, b);
        _mm512_add_ps(_mm512_shuffle_f32x4::<0x88>(a, b), _mm512_shuffle_f32x4::<0xdd>(a, b))
    };
    let two = |a: __m512, b: __m512| {
        _mm512_add_ps(_mm512_shuffle_ps::<0x44>(a, b), _mm512_shuffle_ps::<0xee>(a, b))
    };
    let (a, b) = (two(four(0), four(1)), two(four(2), four(3)));
    let all = _mm512_add_ps(_mm512_shuffle_ps::<0x88>(a, b), _mm512_shuffle_ps::<0xdd>(a, b));
    store((&mut out[..16]).try_into().expect("sixteen values"), all);
}

//! Kernels for x86-64 with AVX2, FMA and F16C.
//!
//! Integer sums are exact, and float operations follow the portable kernels one by one, so results have the
//! same bits.

mod blocks32;
mod dense;
mod quantise;
mod superblocks;
pub(crate) mod vec;

pub(crate) use dense::exact;
pub(crate) use quantise::{quantise_32, quantise_256};

use core::arch::x86_64::*;

use crate::Type;
use crate::matmul::Tile;

/// Rows of the inner tile: one per f32 lane.
const ROWS: usize = 8;

#[target_feature(enable = "avx2,fma,f16c")]
pub(crate) fn fast(tile: &mut Tile<'_>) {
    match tile.w.ty() {
        Type::Q4_0 => blocks32::fast::<{ Type::Q4_0.id() }>(tile),
        Type::Q4_1 => blocks32::fast::<{ Type::Q4_1.id() }>(tile),
        Type::Q5_0 => blocks32::fast::<{ Type::Q5_0.id() }>(tile),
        Type::Q5_1 => blocks32::fast::<{ Type::Q5_1.id() }>(tile),
        Type::Q8_0 => blocks32::fast::<{ Type::Q8_0.id() }>(tile),
        Type::Q4_K => superblocks::fast::<{ Type::Q4_K.id() }>(tile),
        Type::Q5_K => superblocks::fast::<{ Type::Q5_K.id() }>(tile),
        Type::Q6_K => superblocks::fast::<{ Type::Q6_K.id() }>(tile),
        ty => unreachable!("{ty} has no integer codes"),
    }
}

#[inline]
#[target_feature(enable = "avx2")]
fn load(bytes: &[u8; 32]) -> __m256i {
    // SAFETY: 32 readable bytes; the load is unaligned.
    unsafe { _mm256_loadu_si256(bytes.as_ptr().cast()) }
}

#[inline]
#[target_feature(enable = "avx2")]
fn load_codes(codes: &[i8; 32]) -> __m256i {
    // SAFETY: 32 readable bytes; the load is unaligned.
    unsafe { _mm256_loadu_si256(codes.as_ptr().cast()) }
}

#[inline]
#[target_feature(enable = "avx2")]
fn load_half(bytes: &[u8; 16]) -> __m128i {
    // SAFETY: 16 readable bytes; the load is unaligned.
    unsafe { _mm_loadu_si128(bytes.as_ptr().cast()) }
}

#[inline]
#[target_feature(enable = "avx2")]
fn load_f32(x: &[f32; 8]) -> __m256 {
    // SAFETY: 8 readable floats; the load is unaligned.
    unsafe { _mm256_loadu_ps(x.as_ptr()) }
}

#[inline]
#[target_feature(enable = "avx2")]
fn store_f32(x: &mut [f32; 8], v: __m256) {
    // SAFETY: 8 writable floats; the store is unaligned.
    unsafe { _mm256_storeu_ps(x.as_mut_ptr(), v) }
}

/// The sums of the lanes of each vector, in order.
#[inline]
#[target_feature(enable = "avx2")]
fn sum_lanes(v: &[__m256i; ROWS]) -> __m256i {
    let a = _mm256_hadd_epi32(_mm256_hadd_epi32(v[0], v[1]), _mm256_hadd_epi32(v[2], v[3]));
    let b = _mm256_hadd_epi32(_mm256_hadd_epi32(v[4], v[5]), _mm256_hadd_epi32(v[6], v[7]));
    _mm256_add_epi32(_mm256_permute2x128_si256::<0x20>(a, b), _mm256_permute2x128_si256::<0x31>(a, b))
}

/// As [`sum_lanes`] for vectors of four lanes.
#[inline]
#[target_feature(enable = "avx2")]
fn sum_half_lanes(v: &[__m128i; ROWS]) -> __m256i {
    let pair = |r: usize| _mm256_set_m128i(v[r + 4], v[r]);
    _mm256_hadd_epi32(_mm256_hadd_epi32(pair(0), pair(1)), _mm256_hadd_epi32(pair(2), pair(3)))
}

/// The values of eight pairs of halves, each pair in one word: low halves, high halves.
#[inline]
#[target_feature(enable = "avx2,f16c")]
fn half_pairs(words: &[u32; ROWS]) -> (__m256, __m256) {
    let w = words.map(|w| w as i32);
    let v = _mm256_setr_epi32(w[0], w[1], w[2], w[3], w[4], w[5], w[6], w[7]);
    let low = _mm256_and_si256(v, _mm256_set1_epi32(0xffff));
    let high = _mm256_srli_epi32::<16>(v);
    let both = _mm256_permute4x64_epi64::<0b11_01_10_00>(_mm256_packus_epi32(low, high));
    (_mm256_cvtph_ps(_mm256_castsi256_si128(both)), _mm256_cvtph_ps(_mm256_extracti128_si256::<1>(both)))
}

/// The values of eight halves.
#[inline]
#[target_feature(enable = "avx2,f16c")]
fn halves(bits: &[u16; ROWS]) -> __m256 {
    let b = bits.map(|b| b as i16);
    _mm256_cvtph_ps(_mm_setr_epi16(b[0], b[1], b[2], b[3], b[4], b[5], b[6], b[7]))
}

/// Brings the cache line of `data[at]` closer; nothing happens past the end.
#[inline]
#[target_feature(enable = "avx2")]
#[allow(unused_unsafe)] // Safe in newer compilers than the oldest supported.
fn prefetch(data: &[u8], at: usize) {
    if at < data.len() {
        // SAFETY: a prefetch does not access memory architecturally.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(data.as_ptr().wrapping_add(at).cast()) };
    }
}

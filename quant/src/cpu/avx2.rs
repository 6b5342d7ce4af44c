//! Kernels for x86-64 with AVX2, FMA and F16C.
//!
//! Integer sums are exact, and float operations follow the portable kernels one by one, so results have the
//! same bits.

// Loops over tokens and rows index several arrays alike.
#![allow(clippy::needless_range_loop)]

pub(in crate::cpu) mod blocks32;
mod dense;
mod gemm;
mod quantise;
pub(in crate::cpu) mod strips;
pub(in crate::cpu) mod superblocks;
pub(crate) mod vec;

pub(crate) use dense::exact;
pub(crate) use quantise::{quantise_32, quantise_256};

use core::arch::x86_64::*;

use crate::matmul::Tile;
use crate::{Matrix, Type};

/// Rows of the inner tile: one per f32 lane.
pub(in crate::cpu) const ROWS: usize = 8;

#[target_feature(enable = "avx2,fma,f16c")]
pub(crate) fn fast(tile: &mut Tile<'_>) {
    match tile.w.ty() {
        Type::Q4_0 => blocks32::fast::<{ Type::Q4_0.id() }, { Type::Q4_0.block_bytes() }>(tile),
        Type::Q4_1 => blocks32::fast::<{ Type::Q4_1.id() }, { Type::Q4_1.block_bytes() }>(tile),
        Type::Q5_0 => blocks32::fast::<{ Type::Q5_0.id() }, { Type::Q5_0.block_bytes() }>(tile),
        Type::Q5_1 => blocks32::fast::<{ Type::Q5_1.id() }, { Type::Q5_1.block_bytes() }>(tile),
        Type::Q8_0 => blocks32::fast::<{ Type::Q8_0.id() }, { Type::Q8_0.block_bytes() }>(tile),
        Type::Q4_K => superblocks::fast::<{ Type::Q4_K.id() }, { Type::Q4_K.block_bytes() }>(tile),
        Type::Q5_K => superblocks::fast::<{ Type::Q5_K.id() }, { Type::Q5_K.block_bytes() }>(tile),
        Type::Q6_K => superblocks::fast::<{ Type::Q6_K.id() }, { Type::Q6_K.block_bytes() }>(tile),
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
fn store(bytes: &mut [u8; 32], v: __m256i) {
    // SAFETY: 32 writable bytes; the store is unaligned.
    unsafe { _mm256_storeu_si256(bytes.as_mut_ptr().cast(), v) };
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

/// The values of eight pairs of halves, each pair in one lane: low halves, high halves.
#[inline]
#[target_feature(enable = "avx2,f16c")]
fn half_pairs(v: __m256i) -> (__m256, __m256) {
    let low = _mm256_and_si256(v, _mm256_set1_epi32(0xffff));
    let high = _mm256_srli_epi32::<16>(v);
    let both = _mm256_permute4x64_epi64::<0b11_01_10_00>(_mm256_packus_epi32(low, high));
    (_mm256_cvtph_ps(_mm256_castsi256_si128(both)), _mm256_cvtph_ps(_mm256_extracti128_si256::<1>(both)))
}

/// Word `i` of eight 128-bit vectors, for `i` in 0..4.
#[inline]
#[target_feature(enable = "avx2")]
fn transpose_words(v: &[__m128i; ROWS]) -> [__m256i; 4] {
    let pair = |r: usize| _mm256_set_m128i(v[r + 4], v[r]);
    let (a, b, c, d) = (pair(0), pair(1), pair(2), pair(3));
    let (ab, cd) = (_mm256_unpacklo_epi32(a, b), _mm256_unpacklo_epi32(c, d));
    let (ab_high, cd_high) = (_mm256_unpackhi_epi32(a, b), _mm256_unpackhi_epi32(c, d));
    [
        _mm256_unpacklo_epi64(ab, cd),
        _mm256_unpackhi_epi64(ab, cd),
        _mm256_unpacklo_epi64(ab_high, cd_high),
        _mm256_unpackhi_epi64(ab_high, cd_high),
    ]
}

/// Word `i` of eight vectors, for `i` in 0..8.
#[inline]
#[target_feature(enable = "avx2")]
pub(in crate::cpu) fn transpose(v: &[__m256i; ROWS]) -> [__m256i; 8] {
    let quad = |[a, b, c, d]: [__m256i; 4]| {
        let (ab, cd) = (_mm256_unpacklo_epi32(a, b), _mm256_unpacklo_epi32(c, d));
        let (ab_high, cd_high) = (_mm256_unpackhi_epi32(a, b), _mm256_unpackhi_epi32(c, d));
        [
            _mm256_unpacklo_epi64(ab, cd),
            _mm256_unpackhi_epi64(ab, cd),
            _mm256_unpacklo_epi64(ab_high, cd_high),
            _mm256_unpackhi_epi64(ab_high, cd_high),
        ]
    };
    let (a, b) = (quad([v[0], v[1], v[2], v[3]]), quad([v[4], v[5], v[6], v[7]]));
    let low = |i: usize| _mm256_permute2x128_si256::<0x20>(a[i], b[i]);
    let high = |i: usize| _mm256_permute2x128_si256::<0x31>(a[i], b[i]);
    [low(0), low(1), low(2), low(3), high(0), high(1), high(2), high(3)]
}

/// The values of the halves at byte `at` of block `b` of each row.
#[inline]
#[target_feature(enable = "avx2,f16c")]
fn halves<const BYTES: usize>(rows: &Rows<'_, BYTES>, b: usize, at: usize) -> __m256 {
    let half = |r: usize| {
        let block = &rows.blocks[r][b];
        i16::from_le_bytes([block[at], block[at + 1]])
    };
    _mm256_cvtph_ps(_mm_setr_epi16(half(0), half(1), half(2), half(3), half(4), half(5), half(6), half(7)))
}

/// Eight consecutive rows as blocks of `BYTES`; past the last row of the matrix, that row again.
pub(in crate::cpu) struct Rows<'a, const BYTES: usize> {
    pub(in crate::cpu) blocks: [&'a [[u8; BYTES]]; ROWS],
    /// Where the next eight rows begin.
    ahead: *const u8,
}

impl<'a, const BYTES: usize> Rows<'a, BYTES> {
    #[inline]
    pub(in crate::cpu) fn new(w: &Matrix<'a>, row: usize) -> Self {
        let mut blocks: [&[_]; ROWS] = [&[]; ROWS];
        for (r, blocks) in blocks.iter_mut().enumerate() {
            *blocks = w.row((row + r).min(w.rows() - 1)).as_chunks().0;
        }
        Self { blocks, ahead: w.data().as_ptr().wrapping_add((row + ROWS) * w.row_bytes()) }
    }
}

/// Brings closer what the next eight rows need when block `b` of these is at work, in the order of the bytes.
#[inline]
#[target_feature(enable = "avx2")]
#[allow(unused_unsafe)] // Safe in newer compilers than the oldest supported.
pub(in crate::cpu) fn prefetch<const BYTES: usize>(rows: &Rows<'_, BYTES>, b: usize) {
    for line in (0..ROWS * BYTES).step_by(64) {
        let at = rows.ahead.wrapping_add(b * ROWS * BYTES + line);
        // SAFETY: a prefetch does not access memory architecturally, so any address will do.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(at.cast()) };
    }
}

//! Kernels for x86-64 with AVX-512 (F, BW, DQ, VL) and VNNI.
//!
//! Products with many tokens; everything else runs the AVX2 kernels. Integer sums are
//! exact, and float operations follow the portable kernels one by one, so results have the same bits.

// Loops over tokens index several arrays alike.
#![allow(clippy::needless_range_loop)]

mod blocks32;
mod gemm;
mod strips;

use core::arch::x86_64::*;

use super::avx2::strips::TOKENS;
use super::avx2::superblocks::MANY;
use crate::Type;
use crate::matmul::Tile;

/// Rows of the inner tile: one per 32-bit lane.
const ROWS: usize = 16;

#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
pub(crate) fn fast(tile: &mut Tile<'_>) {
    if tile.out.tokens() < MANY {
        return super::avx2::fast(tile);
    }
    match tile.w.ty() {
        Type::Q4_0 => blocks32::many::<{ Type::Q4_0.id() }, { Type::Q4_0.block_bytes() }>(tile),
        Type::Q4_1 => blocks32::many::<{ Type::Q4_1.id() }, { Type::Q4_1.block_bytes() }>(tile),
        Type::Q5_0 => blocks32::many::<{ Type::Q5_0.id() }, { Type::Q5_0.block_bytes() }>(tile),
        Type::Q5_1 => blocks32::many::<{ Type::Q5_1.id() }, { Type::Q5_1.block_bytes() }>(tile),
        Type::Q8_0 => blocks32::many::<{ Type::Q8_0.id() }, { Type::Q8_0.block_bytes() }>(tile),
        Type::Q4_K => strips::many::<{ Type::Q4_K.id() }, { Type::Q4_K.block_bytes() }>(tile),
        Type::Q5_K => strips::many::<{ Type::Q5_K.id() }, { Type::Q5_K.block_bytes() }>(tile),
        Type::Q6_K => strips::many::<{ Type::Q6_K.id() }, { Type::Q6_K.block_bytes() }>(tile),
        ty => unreachable!("{ty} has no integer codes"),
    }
}

#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
pub(crate) fn exact(tile: &mut Tile<'_>) {
    if super::gemm::pays(tile) {
        // SAFETY: the features are those of this function.
        unsafe { super::gemm::exact(&gemm::MICRO, tile) };
    } else {
        super::avx2::exact(tile);
    }
}

/// Two vectors as one.
#[inline]
#[target_feature(enable = "avx512f")]
fn join(v: &[__m256i; 2]) -> __m512i {
    // SAFETY: 64 readable bytes; the load is unaligned.
    unsafe { _mm512_loadu_si512(v.as_ptr().cast()) }
}

/// Two vectors as one.
#[inline]
#[target_feature(enable = "avx512f")]
fn join_ps(v: &[__m256; 2]) -> __m512 {
    // SAFETY: 64 readable bytes; the load is unaligned.
    unsafe { _mm512_loadu_ps(v.as_ptr().cast()) }
}

/// Writes the sums of the tokens from `first` on for the rows from `row` on.
#[inline]
#[target_feature(enable = "avx512f")]
fn put(tile: &mut Tile<'_>, first: usize, row: usize, sums: &[__m512]) {
    let n_rows = ROWS.min(tile.out.rows() - row);
    for (t, sums) in sums.iter().enumerate() {
        let mut values = [0.0f32; ROWS];
        // SAFETY: 16 writable floats; the store is unaligned.
        unsafe { _mm512_storeu_ps(values.as_mut_ptr(), *sums) };
        tile.out.put(first + t, row, &values[..n_rows]);
    }
}

//! Kernels for x86-64 with AVX2 and FMA.

// Loops over halves and rows index several arrays alike.
#![allow(clippy::needless_range_loop)]

use alloc::vec;
use alloc::vec::Vec;
use core::arch::x86_64::*;

use super::{BLOCK, Heads};
use crate::Activation;

type V = __m256;
const LANES: usize = 8;
/// Two vectors for each, the two operands and a broadcast fill 15 of 16 registers.
const TILE: usize = 6;

super::attend::kernels!("avx2,fma");

#[inline]
#[target_feature(enable = "avx2")]
fn load(x: &[f32; LANES]) -> V {
    // SAFETY: 8 readable floats; the load is unaligned.
    unsafe { _mm256_loadu_ps(x.as_ptr()) }
}

#[inline]
#[target_feature(enable = "avx2")]
fn store(x: &mut [f32; LANES], v: V) {
    // SAFETY: 8 writable floats; the store is unaligned.
    unsafe { _mm256_storeu_ps(x.as_mut_ptr(), v) };
}

#[inline]
#[target_feature(enable = "avx2")]
fn splat(x: f32) -> V {
    _mm256_set1_ps(x)
}

#[inline]
#[target_feature(enable = "avx2")]
fn add(a: V, b: V) -> V {
    _mm256_add_ps(a, b)
}

#[inline]
#[target_feature(enable = "avx2")]
fn sub(a: V, b: V) -> V {
    _mm256_sub_ps(a, b)
}

#[inline]
#[target_feature(enable = "avx2")]
fn mul(a: V, b: V) -> V {
    _mm256_mul_ps(a, b)
}

#[inline]
#[target_feature(enable = "avx2,fma")]
fn fma(a: V, b: V, c: V) -> V {
    _mm256_fmadd_ps(a, b, c)
}

/// `b` where `a` is not a number.
#[inline]
#[target_feature(enable = "avx2")]
fn max(a: V, b: V) -> V {
    _mm256_max_ps(a, b)
}

/// `exp(x)` for `x <= 0` within 2 ulp, and 0 below -87: subnormal numbers would slow every product with them down a
/// hundred times. NaN for NaN.
#[inline]
#[target_feature(enable = "avx2,fma")]
fn exp(x: V) -> V {
    // exp(x) = 2^n exp(r) with n = round(x / ln 2) and |r| <= ln 2 / 2.
    let normal = _mm256_cmp_ps::<_CMP_NLT_UQ>(x, splat(-87.0));
    let n = _mm256_round_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(_mm256_mul_ps(
        x,
        splat(core::f32::consts::LOG2_E),
    ));
    // ln 2 in two parts, the first with enough trailing zeros to make n times it exact.
    let r = _mm256_fnmadd_ps(n, splat(0.693_359_4), x);
    let r = _mm256_fnmadd_ps(n, splat(-2.121_944_4e-4), r);
    // Taylor terms up to r^7 / 7!; the rest is below 2^-27.
    let mut p = splat(1.0 / 5040.0);
    for factor in [1.0 / 720.0, 1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 0.5, 1.0, 1.0] {
        p = _mm256_fmadd_ps(p, r, splat(factor));
    }
    let exponent = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
    let power = _mm256_castsi256_ps(_mm256_slli_epi32::<23>(exponent));
    _mm256_and_ps(_mm256_mul_ps(p, power), normal)
}

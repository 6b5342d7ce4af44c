//! Kernels for x86-64 with AVX-512.

// Loops over halves and rows index several arrays alike.
#![allow(clippy::needless_range_loop)]

use alloc::vec;
use alloc::vec::Vec;
use core::arch::x86_64::*;

use super::{BLOCK, Heads};
use crate::Activation;

type V = __m512;
const LANES: usize = 16;
/// Two vectors for each, the two operands and a broadcast fill 27 of 32 registers.
const TILE: usize = 12;

super::attend::kernels!("avx2,fma,avx512f,avx512bw,avx512dq,avx512vl");

#[inline]
#[target_feature(enable = "avx512f")]
fn load(x: &[f32; LANES]) -> V {
    // SAFETY: 16 readable floats; the load is unaligned.
    unsafe { _mm512_loadu_ps(x.as_ptr()) }
}

#[inline]
#[target_feature(enable = "avx512f")]
fn store(x: &mut [f32; LANES], v: V) {
    // SAFETY: 16 writable floats; the store is unaligned.
    unsafe { _mm512_storeu_ps(x.as_mut_ptr(), v) };
}

#[inline]
#[target_feature(enable = "avx512f")]
fn splat(x: f32) -> V {
    _mm512_set1_ps(x)
}

#[inline]
#[target_feature(enable = "avx512f")]
fn add(a: V, b: V) -> V {
    _mm512_add_ps(a, b)
}

#[inline]
#[target_feature(enable = "avx512f")]
fn sub(a: V, b: V) -> V {
    _mm512_sub_ps(a, b)
}

#[inline]
#[target_feature(enable = "avx512f")]
fn mul(a: V, b: V) -> V {
    _mm512_mul_ps(a, b)
}

#[inline]
#[target_feature(enable = "avx512f")]
fn fma(a: V, b: V, c: V) -> V {
    _mm512_fmadd_ps(a, b, c)
}

/// `b` where `a` is not a number.
#[inline]
#[target_feature(enable = "avx512f")]
fn max(a: V, b: V) -> V {
    _mm512_max_ps(a, b)
}

/// `exp(x)` for `x <= 0` within 2 ulp, and 0 below -87: subnormal numbers would slow every product with them down a
/// hundred times. NaN for NaN.
#[inline]
#[target_feature(enable = "avx512f")]
fn exp(x: V) -> V {
    // exp(x) = 2^n exp(r) with n = round(x / ln 2) and |r| <= ln 2 / 2.
    let normal = _mm512_cmp_ps_mask::<_CMP_NLT_UQ>(x, splat(-87.0));
    let n = _mm512_roundscale_ps::<0>(_mm512_mul_ps(x, splat(core::f32::consts::LOG2_E)));
    // ln 2 in two parts, the first with enough trailing zeros to make n times it exact.
    let r = _mm512_fnmadd_ps(n, splat(0.693_359_4), x);
    let r = _mm512_fnmadd_ps(n, splat(-2.121_944_4e-4), r);
    // Taylor terms up to r^7 / 7!; the rest is below 2^-27.
    let mut p = splat(1.0 / 5040.0);
    for factor in [1.0 / 720.0, 1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 0.5, 1.0, 1.0] {
        p = _mm512_fmadd_ps(p, r, splat(factor));
    }
    _mm512_maskz_scalef_ps(normal, p, n)
}

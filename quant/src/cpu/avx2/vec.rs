//! Vector operations.

use core::arch::x86_64::*;

use super::dense::reduce;
use super::{load_f32, store_f32};
use crate::cpu::scalar::{self, LANES};

#[target_feature(enable = "avx2,fma,f16c")]
pub(crate) fn dot(a: &[f32], b: &[f32]) -> f32 {
    let mut sums = [_mm256_setzero_ps(); 4];
    let ((a, a_tail), (b, b_tail)) = (a.as_chunks::<LANES>(), b.as_chunks::<LANES>());
    for (a, b) in a.iter().zip(b) {
        let (a, b) = (a.as_chunks::<8>().0, b.as_chunks::<8>().0);
        for k in 0..4 {
            sums[k] = _mm256_fmadd_ps(load_f32(&a[k]), load_f32(&b[k]), sums[k]);
        }
    }
    let mut lanes = [0.0; LANES];
    for (lanes, sum) in lanes.as_chunks_mut::<8>().0.iter_mut().zip(sums) {
        store_f32(lanes, sum);
    }
    for (lane, (a, b)) in lanes.iter_mut().zip(a_tail.iter().zip(b_tail)) {
        *lane = a.mul_add(*b, *lane);
    }
    reduce(&lanes)
}

#[target_feature(enable = "avx2,fma,f16c")]
pub(crate) fn rms_norm(x: &[f32], weight: Option<&[f32]>, eps: f32, out: &mut [f32]) {
    let mut sums = [_mm256_setzero_pd(); 4];
    let (whole, tail) = x.as_chunks::<16>();
    for x in whole {
        let x = x.as_chunks::<8>().0;
        for k in 0..2 {
            let v = load_f32(&x[k]);
            let (low, high) =
                (_mm256_cvtps_pd(_mm256_castps256_ps128(v)), _mm256_cvtps_pd(_mm256_extractf128_ps::<1>(v)));
            sums[2 * k] = _mm256_fmadd_pd(low, low, sums[2 * k]);
            sums[2 * k + 1] = _mm256_fmadd_pd(high, high, sums[2 * k + 1]);
        }
    }
    let sum = _mm256_add_pd(_mm256_add_pd(sums[0], sums[1]), _mm256_add_pd(sums[2], sums[3]));
    let sum = _mm_add_pd(_mm256_castpd256_pd128(sum), _mm256_extractf128_pd::<1>(sum));
    let mut sum = _mm_cvtsd_f64(_mm_add_sd(sum, _mm_unpackhi_pd(sum, sum)));
    for x in tail {
        sum += f64::from(*x) * f64::from(*x);
    }
    scalar::vec::scale_rows(x, weight, eps, sum, out);
}

/// `exp(x)` within 2 ulp, subnormal results and overflow included; NaN for NaN.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn exp(x: __m256) -> __m256 {
    // exp(x) = 2^n exp(r) with n = round(x / ln 2) and |r| <= ln 2 / 2. The bounds are where the result has
    // overflowed and vanished for certain; the operand order keeps a NaN.
    let x = _mm256_max_ps(_mm256_set1_ps(-104.0), _mm256_min_ps(_mm256_set1_ps(89.0), x));
    let n = _mm256_round_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(_mm256_mul_ps(
        x,
        _mm256_set1_ps(core::f32::consts::LOG2_E),
    ));
    // ln 2 in two parts, the first with enough trailing zeros to make n times it exact.
    let r = _mm256_fnmadd_ps(n, _mm256_set1_ps(0.693_359_4), x);
    let r = _mm256_fnmadd_ps(n, _mm256_set1_ps(-2.121_944_4e-4), r);
    // Taylor terms up to r^7 / 7!; the rest is below 2^-27.
    let mut p = _mm256_set1_ps(1.0 / 5040.0);
    for factor in [1.0 / 720.0, 1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 0.5, 1.0, 1.0] {
        p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(factor));
    }
    // 2^n in two factors, each of them a normal number.
    let n = _mm256_cvtps_epi32(n);
    let half = _mm256_srai_epi32::<1>(n);
    let power = |n: __m256i| {
        _mm256_castsi256_ps(_mm256_slli_epi32::<23>(_mm256_add_epi32(n, _mm256_set1_epi32(127))))
    };
    _mm256_mul_ps(_mm256_mul_ps(p, power(half)), power(_mm256_sub_epi32(n, half)))
}

/// Applies a vector function to a slice; the tail is padded with zeros.
macro_rules! map_in_place {
    ($x:ident, $v:ident => $f:expr) => {{
        let (whole, tail) = $x.as_chunks_mut::<8>();
        for x in whole {
            let $v = load_f32(x);
            store_f32(x, $f);
        }
        let mut padded = [0.0; 8];
        padded[..tail.len()].copy_from_slice(tail);
        let $v = load_f32(&padded);
        store_f32(&mut padded, $f);
        tail.copy_from_slice(&padded[..tail.len()]);
    }};
}

/// `1 + exp(-x)`.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn one_plus_exp_neg(x: __m256) -> __m256 {
    _mm256_add_ps(_mm256_set1_ps(1.0), exp(_mm256_xor_ps(x, _mm256_set1_ps(-0.0))))
}

#[target_feature(enable = "avx2,fma,f16c")]
pub(crate) fn sigmoid_in_place(x: &mut [f32]) {
    map_in_place!(x, v => _mm256_div_ps(_mm256_set1_ps(1.0), one_plus_exp_neg(v)));
}

#[target_feature(enable = "avx2,fma,f16c")]
pub(crate) fn silu_in_place(x: &mut [f32]) {
    map_in_place!(x, v => _mm256_div_ps(v, one_plus_exp_neg(v)));
}

#[target_feature(enable = "avx2,fma,f16c")]
pub(crate) fn silu_mul(gate: &[f32], up: &[f32], out: &mut [f32]) {
    out.copy_from_slice(gate);
    silu_in_place(out);
    for (out, up) in out.iter_mut().zip(up) {
        *out *= up;
    }
}

#[target_feature(enable = "avx2,fma,f16c")]
pub(crate) fn softmax_in_place(x: &mut [f32]) {
    let max = x.iter().fold(f32::NEG_INFINITY, |max, x| max.max(*x));
    let shift = _mm256_set1_ps(max);
    map_in_place!(x, v => exp(_mm256_sub_ps(v, shift)));
    let sum: f64 = x.iter().map(|x| f64::from(*x)).sum();
    let inverse = (1.0 / sum) as f32;
    for x in x {
        *x *= inverse;
    }
}

#[target_feature(enable = "avx2,fma,f16c")]
pub(crate) fn axpy(a: f32, x: &[f32], y: &mut [f32]) {
    scalar::vec::axpy(a, x, y);
}

//! Eight lanes of f32: loads, sums, and the exponential.

use core::arch::x86_64::*;

#[inline]
#[target_feature(enable = "avx2,fma")]
pub(super) fn load(x: &[f32; 8]) -> __m256 {
    // SAFETY: eight readable f32, no alignment needed.
    unsafe { _mm256_loadu_ps(x.as_ptr()) }
}

#[inline]
#[target_feature(enable = "avx2,fma")]
pub(super) fn store(x: &mut [f32; 8], value: __m256) {
    // SAFETY: eight writable f32, no alignment needed.
    unsafe { _mm256_storeu_ps(x.as_mut_ptr(), value) }
}

/// `N` values from `x`, the first `x.len()` of them if it has fewer, then zeros.
#[inline]
pub(super) fn padded<const N: usize>(x: &[f32]) -> [f32; N] {
    match x.first_chunk() {
        Some(x) => *x,
        None => {
            let mut out = [0.0; N];
            out[..x.len()].copy_from_slice(x);
            out
        }
    }
}

/// As many of the `N` values as `out` has room for.
#[inline]
pub(super) fn cut<const N: usize>(x: &[f32; N], out: &mut [f32]) {
    match out.first_chunk_mut() {
        Some(out) => *out = *x,
        None => out.copy_from_slice(&x[..out.len()]),
    }
}

/// Copies columns of the state `s` from `column` on, as many as there are up to `N`, to a tile padded with zeros.
#[inline]
pub(super) fn take_tile<const N: usize>(s: &[f32], d_v: usize, column: usize, tile: &mut [[f32; N]]) {
    for (tile, row) in tile.iter_mut().zip(s.chunks_exact(d_v)) {
        *tile = padded(&row[column..]);
    }
}

/// The way back of [`take_tile`].
#[inline]
pub(super) fn put_tile<const N: usize>(tile: &[[f32; N]], s: &mut [f32], d_v: usize, column: usize) {
    for (tile, row) in tile.iter().zip(s.chunks_exact_mut(d_v)) {
        cut(tile, &mut row[column..]);
    }
}

#[inline]
#[target_feature(enable = "avx2,fma")]
pub(super) fn sum(x: __m256) -> f32 {
    let x = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps::<1>(x));
    let x = _mm_add_ps(x, _mm_movehl_ps(x, x));
    _mm_cvtss_f32(_mm_add_ss(x, _mm_movehdup_ps(x)))
}

/// The dot product of two equally long slices whose length is a multiple of 8.
#[inline]
#[target_feature(enable = "avx2,fma")]
pub(super) fn dot(x: &[f32], y: &[f32]) -> f32 {
    let (mut even, mut odd) = (_mm256_setzero_ps(), _mm256_setzero_ps());
    let (x, y) = (x.as_chunks::<8>().0, y.as_chunks::<8>().0);
    for (x, y) in x.chunks(2).zip(y.chunks(2)) {
        even = _mm256_fmadd_ps(load(&x[0]), load(&y[0]), even);
        if let ([_, x], [_, y]) = (x, y) {
            odd = _mm256_fmadd_ps(load(x), load(y), odd);
        }
    }
    sum(_mm256_add_ps(even, odd))
}

/// `exp(x)` to about 1 ulp between -87 and 88.7; below it stays at `exp(-87)`, which is still a normal number, above it is infinite. NaN
/// stays NaN.
///
/// `x = n ln 2 + r` with `|r| ≤ ln 2 / 2`, a polynomial for `exp(r)` (Cephes, `expf`), and `2^n` put together in two factors so that
/// neither overflows.
#[inline]
#[target_feature(enable = "avx2,fma")]
pub(super) fn exp(x: __m256) -> __m256 {
    let set = |value: f32| _mm256_set1_ps(value);
    // The bounds come first: max and min return their second operand when one is NaN.
    let x = _mm256_max_ps(set(-87.0), x);
    let x = _mm256_min_ps(set(89.0), x);
    let n = _mm256_round_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(_mm256_mul_ps(
        x,
        set(core::f32::consts::LOG2_E),
    ));
    // ln 2 in two parts, the first exact in few bits.
    let r = _mm256_fnmadd_ps(n, set(0.693_359_4), x);
    let r = _mm256_fnmadd_ps(n, set(-2.121_944_4e-4), r);
    let mut p = set(1.987_569_1e-4);
    for c in [1.398_2e-3, 8.333_452e-3, 4.166_579_6e-2, 1.666_666_5e-1, 0.5] {
        p = _mm256_fmadd_ps(p, r, set(c));
    }
    let p = _mm256_fmadd_ps(_mm256_mul_ps(p, r), r, _mm256_add_ps(r, set(1.0)));
    let n = _mm256_cvtps_epi32(n);
    let half = _mm256_srai_epi32::<1>(n);
    let power = |n: __m256i| -> __m256 {
        _mm256_castsi256_ps(_mm256_slli_epi32::<23>(_mm256_add_epi32(n, _mm256_set1_epi32(127))))
    };
    _mm256_mul_ps(_mm256_mul_ps(p, power(half)), power(_mm256_sub_epi32(n, half)))
}

/// `x / (1 + exp(-x))`.
#[inline]
#[target_feature(enable = "avx2,fma")]
pub(super) fn silu(x: __m256) -> __m256 {
    let e = exp(_mm256_sub_ps(_mm256_setzero_ps(), x));
    _mm256_div_ps(x, _mm256_add_ps(_mm256_set1_ps(1.0), e))
}

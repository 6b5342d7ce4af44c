use core::arch::x86_64::*;
use core::ops::Range;

use super::avx2::{Avx2, sum_lanes_4, to_array};
use super::{Ahead, Isa, KEYS, PAD};
use crate::math;

/// AVX-512F beside AVX2; holding one proves that the processor has both.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Avx512(Avx2);

impl Avx512 {
    pub(crate) fn detect() -> Option<Self> {
        let found = std::is_x86_feature_detected!("avx512f") && std::is_x86_feature_detected!("avx512vl");
        Avx2::detect().filter(|_| found).map(Self)
    }
}

/// The loops that take the time are here, the rest is that of [`Avx2`].
impl Isa for Avx512 {
    fn widen(self, from: &[u16], to: &mut [f32]) {
        // SAFETY: `self` exists, so the processor has the instructions.
        unsafe { widen(from, to) }
    }

    fn narrow(self, from: &[f32], to: &mut [u16]) {
        self.0.narrow(from, to);
    }

    fn rms_norm(self, head: &mut [f32], weight: Option<&[f32]>, eps: f32) {
        self.0.rms_norm(head, weight, eps);
    }

    fn scores(
        self,
        q: &[f32],
        k: &[f32],
        dim: usize,
        keys: Range<usize>,
        scale: f32,
        scores: &mut [f32],
        ahead: Ahead<'_>,
    ) {
        assert!(dim > 0 && dim.is_multiple_of(PAD) && k.len() == KEYS * dim && keys.end <= KEYS);
        assert!(q.len().is_multiple_of(dim) && scores.len() == q.len() / dim * KEYS);
        // Four keys at a time; those beyond the range are scratch.
        let keys = keys.start & !3..keys.end.next_multiple_of(4);
        let mut ahead = ahead.spread(q.len() / dim / 4 * keys.len() / 4);
        let (mut q4, mut scores4) = (q.chunks_exact(4 * dim), scores.chunks_exact_mut(4 * KEYS));
        for (q, scores) in q4.by_ref().zip(scores4.by_ref()) {
            for j in keys.clone().step_by(4) {
                // SAFETY: as above.
                unsafe { ahead.step() };
                // SAFETY: as above.
                let s = unsafe { dot_nx4::<4>(q, &k[j * dim..][..4 * dim], dim, scale) };
                for (scores, s) in scores.chunks_exact_mut(KEYS).zip(s) {
                    scores[j..j + 4].copy_from_slice(&s);
                }
            }
        }
        let rest = q4.remainder().chunks_exact(dim);
        for (q, scores) in rest.zip(scores4.into_remainder().chunks_exact_mut(KEYS)) {
            for j in keys.clone().step_by(4) {
                // SAFETY: as above.
                let [s] = unsafe { dot_nx4::<1>(q, &k[j * dim..][..4 * dim], dim, scale) };
                scores[j..j + 4].copy_from_slice(&s);
            }
        }
    }

    fn softmax(self, scores: &mut [f32; KEYS], seen: Range<usize>, max: &mut f32, sum: &mut f32) -> f32 {
        // SAFETY: as above.
        unsafe { softmax(scores, seen, max, sum) }
    }

    fn weigh(
        self,
        weights: &[f32],
        v: &[f32],
        dim: usize,
        keys: Range<usize>,
        acc: &mut [f32],
        ahead: Ahead<'_>,
    ) {
        assert!(dim > 0 && dim.is_multiple_of(PAD) && v.len() == KEYS * dim && keys.end <= KEYS);
        assert!(acc.len().is_multiple_of(dim) && weights.len() == acc.len() / dim * KEYS);
        let mut ahead = ahead.spread(acc.len() / dim / 4 * (dim / 64));
        let (mut acc4, mut weights4) = (acc.chunks_exact_mut(4 * dim), weights.chunks_exact(4 * KEYS));
        for (acc, weights) in acc4.by_ref().zip(weights4.by_ref()) {
            // SAFETY: as above.
            unsafe { weigh_n::<4>(weights, v, dim, keys.clone(), acc, &mut ahead) }
        }
        let rest = acc4.into_remainder().chunks_exact_mut(dim);
        for (acc, weights) in rest.zip(weights4.remainder().chunks_exact(KEYS)) {
            // SAFETY: as above.
            unsafe { weigh_n::<1>(weights, v, dim, keys.clone(), acc, &mut ahead) }
        }
    }

    fn scale(self, acc: &mut [f32], factor: f32) {
        self.0.scale(acc, factor);
    }

    fn merge(self, acc: &mut [f32], a: f32, part: &[f32], b: f32) {
        self.0.merge(acc, a, part, b);
    }

    fn finish(self, acc: &[f32], factor: f32, gate: Option<&[f32]>, out: &mut [f32]) {
        self.0.finish(acc, factor, gate, out);
    }
}

/// Loads the sixteen floats from index `at`.
///
/// # Safety
/// `at + 16 <= from.len()`.
#[target_feature(enable = "avx512f,avx512vl,avx2,fma,f16c")]
unsafe fn load16_at(from: &[f32], at: usize) -> __m512 {
    debug_assert!(at + 16 <= from.len());
    // SAFETY: within the slice by the caller's promise.
    let first = unsafe { from.as_ptr().add(at) };
    // SAFETY: sixteen floats from there are within the slice.
    unsafe { _mm512_loadu_ps(first) }
}

#[target_feature(enable = "avx512f,avx512vl,avx2,fma,f16c")]
fn load16(from: &[f32; 16]) -> __m512 {
    // SAFETY: reads sixteen floats behind a valid reference.
    unsafe { _mm512_loadu_ps(from.as_ptr()) }
}

#[target_feature(enable = "avx512f,avx512vl,avx2,fma,f16c")]
fn save16(to: &mut [f32; 16], x: __m512) {
    // SAFETY: writes sixteen floats behind a valid reference.
    unsafe { _mm512_storeu_ps(to.as_mut_ptr(), x) }
}

/// Sum of the two halves.
#[target_feature(enable = "avx512f,avx512vl,avx2,fma,f16c")]
fn fold(x: __m512) -> __m256 {
    let high = _mm256_castpd_ps(_mm512_extractf64x4_pd::<1>(_mm512_castps_pd(x)));
    _mm256_add_ps(_mm512_castps512_ps256(x), high)
}

#[target_feature(enable = "avx512f,avx512vl,avx2,fma,f16c")]
fn widen(from: &[u16], to: &mut [f32]) {
    assert_eq!(from.len(), to.len());
    let (from16, from_tail) = from.as_chunks::<16>();
    let (to16, to_tail) = to.as_chunks_mut::<16>();
    for (from, to) in from16.iter().zip(to16) {
        // SAFETY: reads sixteen halves behind a valid reference.
        let halves = unsafe { _mm256_loadu_si256(from.as_ptr().cast()) };
        save16(to, _mm512_cvtph_ps(halves));
    }
    for (from, to) in from_tail.iter().zip(to_tail) {
        *to = half::f16::from_bits(*from).to_f32();
    }
}

/// Scaled dot products of `N` adjacent queries with four adjacent keys; the operations on each sum do not depend on `N`.
#[target_feature(enable = "avx512f,avx512vl,avx2,fma,f16c")]
fn dot_nx4<const N: usize>(q: &[f32], keys: &[f32], dim: usize, scale: f32) -> [[f32; 4]; N] {
    assert!(q.len() == N * dim && keys.len() == 4 * dim && dim.is_multiple_of(16));
    let mut sums = [[_mm512_setzero_ps(); 4]; N];
    for i in (0..dim).step_by(16) {
        let mut k = [_mm512_setzero_ps(); 4];
        for (j, k) in k.iter_mut().enumerate() {
            // SAFETY: `j * dim + i + 16 <= 4 * dim`.
            *k = unsafe { load16_at(keys, j * dim + i) };
        }
        for (n, sums) in sums.iter_mut().enumerate() {
            // SAFETY: `n * dim + i + 16 <= N * dim`.
            let q = unsafe { load16_at(q, n * dim + i) };
            for (sum, k) in sums.iter_mut().zip(k) {
                *sum = _mm512_fmadd_ps(q, k, *sum);
            }
        }
    }
    let scale = _mm_set1_ps(scale);
    let mut out = [[0.0; 4]; N];
    for (out, sums) in out.iter_mut().zip(sums) {
        let folded = [fold(sums[0]), fold(sums[1]), fold(sums[2]), fold(sums[3])];
        *out = to_array(_mm_mul_ps(scale, sum_lanes_4(folded)));
    }
    out
}

/// `exp(x)` for `x <= 0` as that of AVX2.
#[target_feature(enable = "avx512f,avx512vl,avx2,fma,f16c")]
fn exp(x: __m512) -> __m512 {
    // Below this the result is no longer a normal number. "Not less than" lets NaN through.
    let kept = _mm512_cmp_ps_mask::<_CMP_NLT_UQ>(x, _mm512_set1_ps(-87.336_54));
    let n = _mm512_roundscale_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(_mm512_mul_ps(
        x,
        _mm512_set1_ps(core::f32::consts::LOG2_E),
    ));
    let r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693_359_4), x);
    let r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.121_944_4e-4), r);
    let mut p = _mm512_set1_ps(1.987_569_1e-4);
    for c in [1.398_199_9e-3, 8.333_452e-3, 4.166_579_6e-2, 1.666_666_5e-1, 0.5] {
        p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(c));
    }
    let y = _mm512_fmadd_ps(_mm512_mul_ps(r, r), p, _mm512_add_ps(r, _mm512_set1_ps(1.0)));
    _mm512_maskz_scalef_ps(kept, y, n)
}

#[target_feature(enable = "avx512f,avx512vl,avx2,fma,f16c")]
fn softmax(scores: &mut [f32; KEYS], seen: Range<usize>, max: &mut f32, sum: &mut f32) -> f32 {
    scores[..seen.start].fill(f32::NEG_INFINITY);
    scores[seen.end..].fill(f32::NEG_INFINITY);
    let vectors = scores.as_chunks_mut::<16>().0;
    let mut top = load16(&vectors[0]);
    for x in &vectors[1..] {
        top = _mm512_max_ps(top, load16(x));
    }
    let new = max.max(_mm512_reduce_max_ps(top));
    let factor = if *sum == 0.0 {
        0.0
    } else if new == *max {
        1.0
    } else {
        math::exp(*max - new)
    };
    let new16 = _mm512_set1_ps(new);
    let mut sums = _mm512_setzero_ps();
    for x in vectors {
        let y = exp(_mm512_sub_ps(load16(x), new16));
        save16(x, y);
        sums = _mm512_add_ps(sums, y);
    }
    let folded = fold(sums);
    let [total, ..] = to_array(sum_lanes_4([folded; 4]));
    *sum = *sum * factor + total;
    *max = new;
    factor
}

/// `acc[n] += Σ_j weights[n, j] · v[j]` for `N` queries; the operations on each sum do not depend on `N`.
#[target_feature(enable = "avx512f,avx512vl,avx2,fma,f16c")]
fn weigh_n<const N: usize>(
    weights: &[f32],
    v: &[f32],
    dim: usize,
    keys: Range<usize>,
    acc: &mut [f32],
    ahead: &mut Ahead<'_>,
) {
    assert!(weights.len() == N * KEYS && v.len() == KEYS * dim && keys.end <= KEYS && acc.len() == N * dim);
    let mut from = 0;
    while from + 64 <= dim {
        ahead.step();
        weigh_step::<N, 4>(weights, v, dim, keys.clone(), acc, from);
        from += 64;
    }
    while from + 16 <= dim {
        weigh_step::<N, 1>(weights, v, dim, keys.clone(), acc, from);
        from += 16;
    }
}

/// Dimensions `from..from + 16 * V`.
#[inline]
#[target_feature(enable = "avx512f,avx512vl,avx2,fma,f16c")]
fn weigh_step<const N: usize, const V: usize>(
    weights: &[f32],
    v: &[f32],
    dim: usize,
    keys: Range<usize>,
    acc: &mut [f32],
    from: usize,
) {
    assert!(from + 16 * V <= dim && v.len() == KEYS * dim && keys.end <= KEYS);
    assert!(acc.len() == N * dim && weights.len() == N * KEYS);
    let mut sums = [[_mm512_setzero_ps(); V]; N];
    for (n, sums) in sums.iter_mut().enumerate() {
        for (part, sum) in sums.iter_mut().enumerate() {
            // SAFETY: `from + 16 * part + 16 <= dim`, and `acc` has `N` rows of that length.
            *sum = unsafe { load16_at(acc, n * dim + from + 16 * part) };
        }
    }
    for j in keys {
        let mut values = [_mm512_setzero_ps(); V];
        for (part, value) in values.iter_mut().enumerate() {
            // SAFETY: as above; `v` has `KEYS` rows and `j < KEYS`.
            *value = unsafe { load16_at(v, j * dim + from + 16 * part) };
        }
        for (n, sums) in sums.iter_mut().enumerate() {
            // SAFETY: `n < N`, `j < KEYS`.
            let weight = _mm512_set1_ps(*unsafe { weights.get_unchecked(n * KEYS + j) });
            for (sum, value) in sums.iter_mut().zip(values) {
                *sum = _mm512_fmadd_ps(weight, value, *sum);
            }
        }
    }
    for (n, sums) in sums.into_iter().enumerate() {
        for (to, sum) in acc[n * dim + from..][..16 * V].as_chunks_mut::<16>().0.iter_mut().zip(sums) {
            save16(to, sum);
        }
    }
}

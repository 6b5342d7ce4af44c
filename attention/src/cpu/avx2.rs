use core::arch::x86_64::*;
use core::ops::Range;

use super::{Ahead, Isa, KEYS, PAD};
use crate::{cache, math};

/// AVX2 with FMA and F16C; holding one proves that the processor has them.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Avx2(());

impl Avx2 {
    pub(crate) fn detect() -> Option<Self> {
        let found = std::is_x86_feature_detected!("avx2")
            && std::is_x86_feature_detected!("fma")
            && std::is_x86_feature_detected!("f16c");
        found.then_some(Self(()))
    }
}

impl Isa for Avx2 {
    fn widen(self, from: &[u16], to: &mut [f32]) {
        // SAFETY: `self` exists, so the processor has the instructions.
        unsafe { widen(from, to) }
    }

    fn narrow(self, from: &[f32], to: &mut [u16]) {
        // SAFETY: as above.
        unsafe { narrow(from, to) }
    }

    fn rms_norm(self, head: &mut [f32], weight: Option<&[f32]>, eps: f32) {
        // SAFETY: as above.
        unsafe { rms_norm(head, weight, eps) }
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
        let mut ahead = ahead.spread(q.len() / dim / 2 * keys.len() / 4);
        let (mut q2, mut scores2) = (q.chunks_exact(2 * dim), scores.chunks_exact_mut(2 * KEYS));
        for (q, scores) in q2.by_ref().zip(scores2.by_ref()) {
            let (q0, q1) = q.split_at(dim);
            let (scores0, scores1) = scores.split_at_mut(KEYS);
            for j in keys.clone().step_by(4) {
                // SAFETY: as above.
                unsafe { ahead.step() };
                // SAFETY: as above.
                let (s0, s1) = unsafe { dot_2x4(q0, q1, &k[j * dim..][..4 * dim], scale) };
                scores0[j..j + 4].copy_from_slice(&s0);
                scores1[j..j + 4].copy_from_slice(&s1);
            }
        }
        let (q, scores) = (q2.remainder(), scores2.into_remainder());
        if !q.is_empty() {
            for j in keys.step_by(4) {
                // SAFETY: as above.
                let s = unsafe { dot_1x4(q, &k[j * dim..][..4 * dim], scale) };
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
        let v = &v[keys.start * dim..keys.end.max(keys.start) * dim];
        let mut ahead = ahead.spread(acc.len() / dim / 2 * (dim / 32));
        let (mut acc2, mut weights2) = (acc.chunks_exact_mut(2 * dim), weights.chunks_exact(2 * KEYS));
        for (acc, weights) in acc2.by_ref().zip(weights2.by_ref()) {
            let (acc0, acc1) = acc.split_at_mut(dim);
            let (w0, w1) = weights.split_at(KEYS);
            // SAFETY: as above.
            unsafe { weigh_2(&w0[keys.clone()], &w1[keys.clone()], v, acc0, acc1, &mut ahead) }
        }
        let (acc, weights) = (acc2.into_remainder(), weights2.remainder());
        if !acc.is_empty() {
            // SAFETY: as above.
            unsafe { weigh_1(&weights[keys], v, acc) }
        }
    }

    fn scale(self, acc: &mut [f32], factor: f32) {
        // SAFETY: as above.
        unsafe { scale(acc, factor) }
    }

    fn merge(self, acc: &mut [f32], a: f32, part: &[f32], b: f32) {
        // SAFETY: as above.
        unsafe { merge(acc, a, part, b) }
    }

    fn finish(self, acc: &[f32], factor: f32, gate: Option<&[f32]>, out: &mut [f32]) {
        // SAFETY: as above.
        unsafe { finish(acc, factor, gate, out) }
    }
}

#[target_feature(enable = "avx2,fma,f16c")]
fn load(from: &[f32; 8]) -> __m256 {
    // SAFETY: reads eight floats behind a valid reference.
    unsafe { _mm256_loadu_ps(from.as_ptr()) }
}

#[target_feature(enable = "avx2,fma,f16c")]
fn save(to: &mut [f32; 8], x: __m256) {
    // SAFETY: writes eight floats behind a valid reference.
    unsafe { _mm256_storeu_ps(to.as_mut_ptr(), x) }
}

/// Loads the eight floats from index `at`.
///
/// # Safety
/// `at + 8 <= from.len()`.
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn load_at(from: &[f32], at: usize) -> __m256 {
    debug_assert!(at + 8 <= from.len());
    // SAFETY: within the slice by the caller's promise.
    let first = unsafe { from.as_ptr().add(at) };
    // SAFETY: eight floats from there are within the slice.
    unsafe { _mm256_loadu_ps(first) }
}

/// Sum of the eight lanes: pairs, pairs of pairs, halves.
#[target_feature(enable = "avx2,fma,f16c")]
fn sum_lanes(x: __m256) -> f32 {
    let pairs = _mm256_hadd_ps(x, x);
    let quads = _mm256_hadd_ps(pairs, pairs);
    _mm_cvtss_f32(_mm_add_ss(_mm256_castps256_ps128(quads), _mm256_extractf128_ps::<1>(quads)))
}

/// Sums of the lanes of four vectors, each in the order of [`sum_lanes`].
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn sum_lanes_4(x: [__m256; 4]) -> __m128 {
    let quads = _mm256_hadd_ps(_mm256_hadd_ps(x[0], x[1]), _mm256_hadd_ps(x[2], x[3]));
    _mm_add_ps(_mm256_castps256_ps128(quads), _mm256_extractf128_ps::<1>(quads))
}

#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn to_array(x: __m128) -> [f32; 4] {
    let mut out = [0.0; 4];
    // SAFETY: writes four floats into an array of four.
    unsafe { _mm_storeu_ps(out.as_mut_ptr(), x) };
    out
}

#[target_feature(enable = "avx2,fma,f16c")]
fn widen(from: &[u16], to: &mut [f32]) {
    assert_eq!(from.len(), to.len());
    let (from8, from_tail) = from.as_chunks::<8>();
    let (to8, to_tail) = to.as_chunks_mut::<8>();
    for (from, to) in from8.iter().zip(to8) {
        // SAFETY: reads eight halves behind a valid reference.
        let halves = unsafe { _mm_loadu_si128(from.as_ptr().cast()) };
        save(to, _mm256_cvtph_ps(halves));
    }
    for (from, to) in from_tail.iter().zip(to_tail) {
        *to = half::f16::from_bits(*from).to_f32();
    }
}

#[target_feature(enable = "avx2,fma,f16c")]
fn narrow(from: &[f32], to: &mut [u16]) {
    assert_eq!(from.len(), to.len());
    let (from8, from_tail) = from.as_chunks::<8>();
    let (to8, to_tail) = to.as_chunks_mut::<8>();
    let (max, min) = (_mm256_set1_ps(65504.0), _mm256_set1_ps(-65504.0));
    let (sign, infinity) = (_mm256_set1_ps(-0.0), _mm256_set1_ps(f32::INFINITY));
    for (from, to) in from8.iter().zip(to8) {
        let x = load(from);
        // The second operand is returned when either is NaN.
        let clamped = _mm256_max_ps(min, _mm256_min_ps(max, x));
        let infinite = _mm256_cmp_ps::<_CMP_EQ_OQ>(_mm256_andnot_ps(sign, x), infinity);
        let x = _mm256_blendv_ps(clamped, x, infinite);
        let halves = _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(x);
        // SAFETY: writes eight halves behind a valid reference.
        unsafe { _mm_storeu_si128(to.as_mut_ptr().cast(), halves) };
    }
    for (from, to) in from_tail.iter().zip(to_tail) {
        *to = cache::narrow(*from);
    }
}

#[target_feature(enable = "avx2,fma,f16c")]
fn rms_norm(head: &mut [f32], weight: Option<&[f32]>, eps: f32) {
    let len = head.len();
    let (head8, tail) = head.as_chunks_mut::<8>();
    let mut squares = _mm256_setzero_ps();
    for x in head8.iter() {
        let x = load(x);
        squares = _mm256_fmadd_ps(x, x, squares);
    }
    let sum = sum_lanes(squares) + tail.iter().map(|x| x * x).sum::<f32>();
    let factor = 1.0 / math::sqrt(sum / len as f32 + eps);
    let factor8 = _mm256_set1_ps(factor);
    match weight {
        Some(weight) => {
            assert_eq!(weight.len(), len);
            let (weight8, weight_tail) = weight.as_chunks::<8>();
            for (x, w) in head8.iter_mut().zip(weight8) {
                let y = _mm256_mul_ps(load(x), _mm256_mul_ps(factor8, load(w)));
                save(x, y);
            }
            tail.iter_mut().zip(weight_tail).for_each(|(x, w)| *x *= factor * w);
        }
        None => {
            for x in head8.iter_mut() {
                let y = _mm256_mul_ps(load(x), factor8);
                save(x, y);
            }
            tail.iter_mut().for_each(|x| *x *= factor);
        }
    }
}

/// Scaled dot products of two queries with four adjacent keys.
#[target_feature(enable = "avx2,fma,f16c")]
fn dot_2x4(q0: &[f32], q1: &[f32], keys: &[f32], scale: f32) -> ([f32; 4], [f32; 4]) {
    let dim = q0.len();
    assert!(q1.len() == dim && keys.len() == 4 * dim && dim.is_multiple_of(8));
    let mut acc0 = [_mm256_setzero_ps(); 4];
    let mut acc1 = [_mm256_setzero_ps(); 4];
    for i in (0..dim).step_by(8) {
        // SAFETY: `i + 8 <= dim`, the length of both.
        let (a, b) = (unsafe { load_at(q0, i) }, unsafe { load_at(q1, i) });
        for j in 0..4 {
            // SAFETY: `j * dim + i + 8 <= 4 * dim`.
            let k = unsafe { load_at(keys, j * dim + i) };
            acc0[j] = _mm256_fmadd_ps(a, k, acc0[j]);
            acc1[j] = _mm256_fmadd_ps(b, k, acc1[j]);
        }
    }
    let scale = _mm_set1_ps(scale);
    (to_array(_mm_mul_ps(scale, sum_lanes_4(acc0))), to_array(_mm_mul_ps(scale, sum_lanes_4(acc1))))
}

/// The same for one query, with the same operations on each sum.
#[target_feature(enable = "avx2,fma,f16c")]
fn dot_1x4(q: &[f32], keys: &[f32], scale: f32) -> [f32; 4] {
    let dim = q.len();
    assert!(keys.len() == 4 * dim && dim.is_multiple_of(8));
    let mut acc = [_mm256_setzero_ps(); 4];
    for i in (0..dim).step_by(8) {
        // SAFETY: `i + 8 <= dim`.
        let q = unsafe { load_at(q, i) };
        for (j, acc) in acc.iter_mut().enumerate() {
            // SAFETY: `j * dim + i + 8 <= 4 * dim`.
            *acc = _mm256_fmadd_ps(q, unsafe { load_at(keys, j * dim + i) }, *acc);
        }
    }
    to_array(_mm_mul_ps(_mm_set1_ps(scale), sum_lanes_4(acc)))
}

/// `exp(x)` for `x <= 0`, to 2 units in the last place; zero below the normal range, NaN for NaN.
#[target_feature(enable = "avx2,fma,f16c")]
fn exp(x: __m256) -> __m256 {
    // Below this the result is no longer a normal number. "Not less than" lets NaN through.
    let kept = _mm256_cmp_ps::<_CMP_NLT_UQ>(x, _mm256_set1_ps(-87.336_54));
    let n = _mm256_round_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(_mm256_mul_ps(
        x,
        _mm256_set1_ps(core::f32::consts::LOG2_E),
    ));
    // ln 2 in two parts, the first short enough that its product with n is exact.
    let r = _mm256_fnmadd_ps(n, _mm256_set1_ps(0.693_359_4), x);
    let r = _mm256_fnmadd_ps(n, _mm256_set1_ps(-2.121_944_4e-4), r);
    // Minimax polynomial of the Cephes library's expf.
    let mut p = _mm256_set1_ps(1.987_569_1e-4);
    for c in [1.398_199_9e-3, 8.333_452e-3, 4.166_579_6e-2, 1.666_666_5e-1, 0.5] {
        p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(c));
    }
    let y = _mm256_fmadd_ps(_mm256_mul_ps(r, r), p, _mm256_add_ps(r, _mm256_set1_ps(1.0)));
    let exponent = _mm256_slli_epi32::<23>(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)));
    _mm256_and_ps(kept, _mm256_mul_ps(y, _mm256_castsi256_ps(exponent)))
}

#[target_feature(enable = "avx2,fma,f16c")]
fn softmax(scores: &mut [f32; KEYS], seen: Range<usize>, max: &mut f32, sum: &mut f32) -> f32 {
    const UNSEEN: f32 = f32::NEG_INFINITY;
    scores[..seen.start].fill(UNSEEN);
    scores[seen.end..].fill(UNSEEN);
    let vectors = scores.as_chunks_mut::<8>().0;
    let mut top = load(&vectors[0]);
    for x in &vectors[1..] {
        top = _mm256_max_ps(top, load(x));
    }
    let mut tops = [0.0; 8];
    save(&mut tops, top);
    let new = tops.iter().fold(*max, |max, &score| max.max(score));
    let factor = if *sum == 0.0 {
        0.0
    } else if new == *max {
        1.0
    } else {
        math::exp(*max - new)
    };
    let new8 = _mm256_set1_ps(new);
    let mut sums = _mm256_setzero_ps();
    for x in vectors {
        let y = exp(_mm256_sub_ps(load(x), new8));
        save(x, y);
        sums = _mm256_add_ps(sums, y);
    }
    *sum = *sum * factor + sum_lanes(sums);
    *max = new;
    factor
}

/// `acc += Σ_j w[j] · v[j]` for two queries at once.
#[target_feature(enable = "avx2,fma,f16c")]
fn weigh_2(w0: &[f32], w1: &[f32], v: &[f32], acc0: &mut [f32], acc1: &mut [f32], ahead: &mut Ahead<'_>) {
    let dim = acc0.len();
    assert!(acc1.len() == dim && w0.len() == w1.len() && v.len() == w0.len() * dim);
    let (wide0, narrow0) = acc0.as_chunks_mut::<32>();
    let (wide1, narrow1) = acc1.as_chunks_mut::<32>();
    for (i, (acc0, acc1)) in wide0.iter_mut().zip(wide1).enumerate() {
        ahead.step();
        let (acc0, acc1) = (acc0.as_chunks_mut::<8>().0, acc1.as_chunks_mut::<8>().0);
        let mut sums0 = [load(&acc0[0]), load(&acc0[1]), load(&acc0[2]), load(&acc0[3])];
        let mut sums1 = [load(&acc1[0]), load(&acc1[1]), load(&acc1[2]), load(&acc1[3])];
        for (j, (&w0, &w1)) in w0.iter().zip(w1).enumerate() {
            let (w0, w1) = (_mm256_set1_ps(w0), _mm256_set1_ps(w1));
            for part in 0..4 {
                // SAFETY: `32 * i + 8 * part + 8 <= dim`, and there are `dim` values for each weight.
                let v = unsafe { load_at(v, j * dim + 32 * i + 8 * part) };
                sums0[part] = _mm256_fmadd_ps(w0, v, sums0[part]);
                sums1[part] = _mm256_fmadd_ps(w1, v, sums1[part]);
            }
        }
        for part in 0..4 {
            save(&mut acc0[part], sums0[part]);
            save(&mut acc1[part], sums1[part]);
        }
    }
    let done = dim - narrow0.len();
    weigh_narrow(w0, v, dim, done, narrow0);
    weigh_narrow(w1, v, dim, done, narrow1);
}

/// The same for one query, with the same operations on each sum.
#[target_feature(enable = "avx2,fma,f16c")]
fn weigh_1(w: &[f32], v: &[f32], acc: &mut [f32]) {
    let dim = acc.len();
    assert!(v.len() == w.len() * dim);
    let (wide, narrow) = acc.as_chunks_mut::<32>();
    for (i, acc) in wide.iter_mut().enumerate() {
        let acc = acc.as_chunks_mut::<8>().0;
        let mut sums = [load(&acc[0]), load(&acc[1]), load(&acc[2]), load(&acc[3])];
        for (j, &w) in w.iter().enumerate() {
            let w = _mm256_set1_ps(w);
            for (part, sum) in sums.iter_mut().enumerate() {
                // SAFETY: as in `weigh_2`.
                *sum = _mm256_fmadd_ps(w, unsafe { load_at(v, j * dim + 32 * i + 8 * part) }, *sum);
            }
        }
        for (acc, sum) in acc.iter_mut().zip(sums) {
            save(acc, sum);
        }
    }
    let done = dim - narrow.len();
    weigh_narrow(w, v, dim, done, narrow);
}

/// Dimensions from `from` on that do not fill a wide step.
#[target_feature(enable = "avx2,fma,f16c")]
fn weigh_narrow(w: &[f32], v: &[f32], dim: usize, from: usize, acc: &mut [f32]) {
    for (i, acc) in acc.as_chunks_mut::<8>().0.iter_mut().enumerate() {
        let mut sum = load(acc);
        for (v, &w) in v.chunks_exact(dim).zip(w) {
            // SAFETY: `from + 8 * i + 8 <= dim`, the length of `v`.
            sum = _mm256_fmadd_ps(_mm256_set1_ps(w), unsafe { load_at(v, from + 8 * i) }, sum);
        }
        save(acc, sum);
    }
}

#[target_feature(enable = "avx2,fma,f16c")]
fn scale(acc: &mut [f32], factor: f32) {
    assert!(acc.len().is_multiple_of(8));
    let factor = _mm256_set1_ps(factor);
    for acc in acc.as_chunks_mut::<8>().0 {
        let product = _mm256_mul_ps(load(acc), factor);
        save(acc, product);
    }
}

#[target_feature(enable = "avx2,fma,f16c")]
fn merge(acc: &mut [f32], a: f32, part: &[f32], b: f32) {
    assert!(acc.len() == part.len() && acc.len().is_multiple_of(8));
    let (a, b) = (_mm256_set1_ps(a), _mm256_set1_ps(b));
    for (acc, part) in acc.as_chunks_mut::<8>().0.iter_mut().zip(part.as_chunks::<8>().0) {
        let sum = _mm256_fmadd_ps(load(acc), a, _mm256_mul_ps(load(part), b));
        save(acc, sum);
    }
}

#[target_feature(enable = "avx2,fma,f16c")]
fn finish(acc: &[f32], factor: f32, gate: Option<&[f32]>, out: &mut [f32]) {
    assert!(acc.len() >= out.len() && gate.is_none_or(|gate| gate.len() == out.len()));
    let factor8 = _mm256_set1_ps(factor);
    let (out8, out_tail) = out.as_chunks_mut::<8>();
    let (acc8, tail_start) = (acc.as_chunks::<8>().0, 8 * out8.len());
    let acc_tail = &acc[tail_start..];
    let Some(gate) = gate else {
        for (out, acc) in out8.iter_mut().zip(acc8) {
            save(out, _mm256_mul_ps(load(acc), factor8));
        }
        out_tail.iter_mut().zip(acc_tail).for_each(|(out, acc)| *out = acc * factor);
        return;
    };
    let (gate8, gate_tail) = gate.as_chunks::<8>();
    let (one, sign) = (_mm256_set1_ps(1.0), _mm256_set1_ps(-0.0));
    for ((out, acc), gate) in out8.iter_mut().zip(acc8).zip(gate8) {
        let gate = load(gate);
        let z = exp(_mm256_or_ps(sign, gate));
        // The sign bit of the gate selects between the two tails.
        let above = _mm256_blendv_ps(one, z, gate);
        let sigmoid = _mm256_div_ps(above, _mm256_add_ps(one, z));
        save(out, _mm256_mul_ps(_mm256_mul_ps(load(acc), factor8), sigmoid));
    }
    for ((out, acc), &gate) in out_tail.iter_mut().zip(acc_tail).zip(gate_tail) {
        *out = acc * factor * math::sigmoid(gate);
    }
}

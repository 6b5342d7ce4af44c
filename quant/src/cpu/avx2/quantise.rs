//! Activations to signed bytes.

use core::arch::x86_64::*;
use core::array;

use super::load_f32;
use crate::activations::{Q8K, Q8x8};

#[target_feature(enable = "avx2,fma,f16c")]
pub(crate) fn quantise_256(x: &[f32], blocks: &mut [Q8K]) {
    for (x, block) in x.as_chunks::<256>().0.iter().zip(blocks) {
        block.d = quantise(x, &mut block.q);
        block.sums16 = array::from_fn(|i| block.q[16 * i..][..16].iter().map(|q| i16::from(*q)).sum());
        block.sums32 = array::from_fn(|i| block.sums16[2 * i] + block.sums16[2 * i + 1]);
    }
}

#[target_feature(enable = "avx2,fma,f16c")]
pub(crate) fn quantise_32(x: &[f32], groups: &mut [Q8x8]) {
    for (x, group) in x.chunks(256).zip(groups) {
        for (i, x) in x.as_chunks::<32>().0.iter().enumerate() {
            group.d[i] = quantise(x, &mut group.q[i]);
            group.sums[i] = group.q[i].iter().map(|q| i32::from(*q)).sum();
        }
    }
}

/// See [`reference::quantise`](crate::reference::quantise).
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn quantise<const N: usize>(x: &[f32; N], q: &mut [i8; N]) -> f32 {
    let magnitude = _mm256_set1_epi32(0x7fff_ffff);
    // Magnitudes order like their bits, and everything not finite is above all finite ones.
    let mut max = _mm256_setzero_si256();
    for x in x.as_chunks::<8>().0 {
        max = _mm256_max_epi32(max, _mm256_and_si256(_mm256_castps_si256(load_f32(x)), magnitude));
    }
    let max = _mm_max_epi32(_mm256_castsi256_si128(max), _mm256_extracti128_si256::<1>(max));
    let max = _mm_max_epi32(max, _mm_shuffle_epi32::<0b01_00_11_10>(max));
    let max = _mm_max_epi32(max, _mm_shuffle_epi32::<0b10_11_00_01>(max));
    let max = f32::from_bits(_mm_cvtsi128_si32(max) as u32);
    let inverse = 127.0 / max;
    if !max.is_finite() || !inverse.is_finite() {
        q.fill(0);
        return if max.is_finite() { 0.0 } else { f32::NAN };
    }
    let inverse = _mm256_set1_ps(inverse);
    for (x, q) in x.as_chunks::<32>().0.iter().zip(q.as_chunks_mut::<32>().0) {
        let x = x.as_chunks::<8>().0;
        let word = |i: usize| _mm256_cvtps_epi32(_mm256_mul_ps(load_f32(&x[i]), inverse));
        let (a, b) = (_mm256_packs_epi32(word(0), word(1)), _mm256_packs_epi32(word(2), word(3)));
        // Packing works within lanes: the words of four now lie in the order 0 2 4 6 1 3 5 7.
        let order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
        let bytes = _mm256_permutevar8x32_epi32(_mm256_packs_epi16(a, b), order);
        // SAFETY: 32 writable bytes; the store is unaligned.
        unsafe { _mm256_storeu_si256(q.as_mut_ptr().cast(), bytes) };
    }
    max / 127.0
}

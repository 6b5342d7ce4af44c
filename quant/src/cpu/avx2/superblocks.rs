//! Integer dot products of the K types: super-blocks of 256.

use core::arch::x86_64::*;

use super::{
    ROWS, half_pairs, halves, load, load_codes, load_half, prefetch, store_f32, sum_half_lanes, sum_lanes,
};
use crate::Type;
use crate::activations::Q8K;
use crate::blocks::{Q4K, Q5K, Q6K, six_bit_scales};
use crate::matmul::Tile;

const Q4_K: u32 = Type::Q4_K.id();
const Q5_K: u32 = Type::Q5_K.id();

const fn block_bytes(ty: u32) -> usize {
    match ty {
        Q4_K => size_of::<Q4K>(),
        Q5_K => size_of::<Q5K>(),
        _ => size_of::<Q6K>(),
    }
}

#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn fast<const TY: u32>(tile: &mut Tile<'_>) {
    let (n_rows, n_tokens) = (tile.w.rows(), tile.out.tokens());
    for row in (0..n_rows).step_by(ROWS) {
        let mut rows = [tile.w.row(row); ROWS];
        for (r, bytes) in rows.iter_mut().enumerate() {
            *bytes = tile.w.row((row + r).min(n_rows - 1));
        }
        let ahead = &tile.w.data()[(row + ROWS).min(n_rows) * tile.w.row_bytes()..];
        let mut i = 0;
        while i < n_tokens {
            i += match n_tokens - i {
                1 => few::<TY, 1>(tile, row, &rows, i, ahead),
                2 => few::<TY, 2>(tile, row, &rows, i, ahead),
                3 => few::<TY, 3>(tile, row, &rows, i, ahead),
                _ => few::<TY, 4>(tile, row, &rows, i, ahead),
            };
        }
    }
}

/// Eight rows from `row` on with `NT` tokens from the `i`-th on; returns `NT`.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn few<const TY: u32, const NT: usize>(
    tile: &mut Tile<'_>,
    row: usize,
    rows: &[&[u8]; ROWS],
    i: usize,
    ahead: &[u8],
) -> usize {
    let mut y: [&[Q8K]; NT] = [&[]; NT];
    for (t, y) in y.iter_mut().enumerate() {
        *y = tile.acts.q8k_row(tile.tokens.get(i + t));
    }
    let sums = dot::<TY, NT>(rows, &y, if i == 0 { ahead } else { &[] });
    let n_rows = ROWS.min(tile.out.rows() - row);
    for (t, sums) in sums.iter().enumerate() {
        let mut values = [0.0; ROWS];
        store_f32(&mut values, *sums);
        tile.out.put(i + t, row, &values[..n_rows]);
    }
    NT
}

#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn dot<const TY: u32, const NT: usize>(rows: &[&[u8]; ROWS], y: &[&[Q8K]; NT], ahead: &[u8]) -> [__m256; NT] {
    let bytes = const { block_bytes(TY) };
    let mut sums = [_mm256_setzero_ps(); NT];
    for s in 0..y[0].len() {
        let mut ys = [&y[0][s]; NT];
        for (ys, y) in ys.iter_mut().zip(y) {
            *ys = &y[s];
        }
        for line in (0..ROWS * bytes).step_by(64) {
            prefetch(ahead, s * ROWS * bytes + line);
        }
        let mut codes = [[_mm256_setzero_si256(); ROWS]; NT];
        let mut mins = [[_mm_setzero_si128(); ROWS]; NT];
        let mut heads = [0u32; ROWS];
        for r in 0..ROWS {
            let block = &rows[r][s * bytes..][..bytes];
            let (row_codes, row_mins, head) = match TY {
                Q4_K => q4_k(bytemuck::from_bytes(block), &ys),
                Q5_K => q5_k(bytemuck::from_bytes(block), &ys),
                _ => q6_k(bytemuck::from_bytes(block), &ys),
            };
            heads[r] = head;
            for t in 0..NT {
                codes[t][r] = row_codes[t];
                mins[t][r] = row_mins[t];
            }
        }
        if matches!(TY, Q4_K | Q5_K) {
            let (d, dmin) = half_pairs(&heads);
            for t in 0..NT {
                let yd = _mm256_set1_ps(ys[t].d);
                let codes = _mm256_cvtepi32_ps(sum_lanes(&codes[t]));
                let mins = _mm256_cvtepi32_ps(sum_half_lanes(&mins[t]));
                let term = _mm256_sub_ps(
                    _mm256_mul_ps(_mm256_mul_ps(d, yd), codes),
                    _mm256_mul_ps(_mm256_mul_ps(dmin, yd), mins),
                );
                sums[t] = _mm256_add_ps(sums[t], term);
            }
        } else {
            let d = halves(&heads.map(|h| h as u16));
            for t in 0..NT {
                let yd = _mm256_set1_ps(ys[t].d);
                let codes = _mm256_cvtepi32_ps(sum_lanes(&codes[t]));
                sums[t] = _mm256_add_ps(sums[t], _mm256_mul_ps(_mm256_mul_ps(d, yd), codes));
            }
        }
    }
    sums
}

/// Partial sums of codes and of minima of one super-block with `NT` tokens, and the scales of both.
type Partial<const NT: usize> = ([__m256i; NT], [__m128i; NT], u32);

#[inline]
#[target_feature(enable = "avx2")]
fn q4_k<const NT: usize>(b: &Q4K, y: &[&Q8K; NT]) -> Partial<NT> {
    let (scales, mins) = scales_and_mins(&b.scales);
    let mask = _mm256_set1_epi8(15);
    let mut sums = [_mm256_setzero_si256(); NT];
    for (run, bytes) in b.qs.as_chunks::<32>().0.iter().enumerate() {
        let bits = load(bytes);
        let low = _mm256_and_si256(bits, mask);
        let high = _mm256_and_si256(_mm256_srli_epi16::<4>(bits), mask);
        accumulate(&mut sums, y, 2 * run, low, scale_of(scales, 2 * run));
        accumulate(&mut sums, y, 2 * run + 1, high, scale_of(scales, 2 * run + 1));
    }
    (sums, mins_dot(mins, y), u32::from_le_bytes([b.d[0], b.d[1], b.dmin[0], b.dmin[1]]))
}

#[inline]
#[target_feature(enable = "avx2")]
fn q5_k<const NT: usize>(b: &Q5K, y: &[&Q8K; NT]) -> Partial<NT> {
    let (scales, mins) = scales_and_mins(&b.scales);
    let mask = _mm256_set1_epi8(15);
    let fifth = _mm256_set1_epi8(16);
    let mut sums = [_mm256_setzero_si256(); NT];
    let mut upper = load(&b.qh);
    for (run, bytes) in b.qs.as_chunks::<32>().0.iter().enumerate() {
        let bits = load(bytes);
        let low = _mm256_and_si256(bits, mask);
        let low = _mm256_or_si256(low, _mm256_and_si256(_mm256_slli_epi16::<4>(upper), fifth));
        let high = _mm256_and_si256(_mm256_srli_epi16::<4>(bits), mask);
        let high = _mm256_or_si256(high, _mm256_and_si256(_mm256_slli_epi16::<3>(upper), fifth));
        upper = _mm256_srli_epi16::<2>(upper);
        accumulate(&mut sums, y, 2 * run, low, scale_of(scales, 2 * run));
        accumulate(&mut sums, y, 2 * run + 1, high, scale_of(scales, 2 * run + 1));
    }
    (sums, mins_dot(mins, y), u32::from_le_bytes([b.d[0], b.d[1], b.dmin[0], b.dmin[1]]))
}

#[inline]
#[target_feature(enable = "avx2")]
fn q6_k<const NT: usize>(b: &Q6K, y: &[&Q8K; NT]) -> Partial<NT> {
    let bytes = load_half(&b.scales);
    // Even scales in the lower lane, odd ones in the upper: a vector of 32 codes has one of each.
    let split = _mm_setr_epi8(0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15);
    let scales = _mm256_cvtepi8_epi16(_mm_shuffle_epi8(bytes, split));
    let in_order = _mm256_cvtepi8_epi16(bytes);
    let (four, two) = (_mm256_set1_epi8(15), _mm256_set1_epi8(0x30));
    let mut sums = [_mm256_setzero_si256(); NT];
    for half in 0..2 {
        let ql = b.ql.as_chunks::<32>().0;
        let (a, c) = (load(&ql[2 * half]), load(&ql[2 * half + 1]));
        let h = load(&b.qh.as_chunks::<32>().0[half]);
        let codes = [
            _mm256_or_si256(_mm256_and_si256(a, four), _mm256_and_si256(_mm256_slli_epi16::<4>(h), two)),
            _mm256_or_si256(_mm256_and_si256(c, four), _mm256_and_si256(_mm256_slli_epi16::<2>(h), two)),
            _mm256_or_si256(_mm256_and_si256(_mm256_srli_epi16::<4>(a), four), _mm256_and_si256(h, two)),
            _mm256_or_si256(
                _mm256_and_si256(_mm256_srli_epi16::<4>(c), four),
                _mm256_and_si256(_mm256_srli_epi16::<2>(h), two),
            ),
        ];
        for (part, codes) in codes.into_iter().enumerate() {
            let j = 4 * half + part;
            accumulate(&mut sums, y, j, codes, scale_of(scales, j));
        }
    }
    // Codes carry an offset of 32: take 32 times the scaled activation sums off.
    for (sums, y) in sums.iter_mut().zip(y) {
        let offset = _mm256_madd_epi16(in_order, load_sums16(&y.sums16));
        *sums = _mm256_sub_epi32(*sums, _mm256_slli_epi32::<5>(offset));
    }
    (sums, [_mm_setzero_si128(); NT], u32::from(u16::from_le_bytes(b.d)))
}

/// Adds the products of 32 codes with the `j`-th 32 activations of each token, times `scale`.
#[inline]
#[target_feature(enable = "avx2")]
fn accumulate<const NT: usize>(
    sums: &mut [__m256i; NT],
    y: &[&Q8K; NT],
    j: usize,
    codes: __m256i,
    scale: __m256i,
) {
    for (sum, y) in sums.iter_mut().zip(y) {
        let pairs = _mm256_maddubs_epi16(codes, load_codes(&y.q.as_chunks::<32>().0[j]));
        *sum = _mm256_add_epi32(*sum, _mm256_madd_epi16(pairs, scale));
    }
}

/// The 16-bit scales of a [`Q4K`] or [`Q5K`] block, in both lanes, and its 16-bit minima.
#[inline]
#[target_feature(enable = "avx2")]
fn scales_and_mins(packed: &[u8; 12]) -> (__m256i, __m128i) {
    let (scales, mins) = six_bit_scales(packed);
    let bytes = _mm_set_epi64x(mins as i64, scales as i64);
    let words = _mm256_cvtepu8_epi16(bytes);
    (_mm256_permute4x64_epi64::<0b01_00_01_00>(words), _mm256_extracti128_si256::<1>(words))
}

/// The `j`-th word of each lane, in all words of the lane.
#[inline]
#[target_feature(enable = "avx2")]
fn scale_of(scales: __m256i, j: usize) -> __m256i {
    let low = 2 * j as i16;
    let word = low | ((low + 1) << 8);
    _mm256_shuffle_epi8(scales, _mm256_set1_epi16(word))
}

#[inline]
#[target_feature(enable = "avx2")]
fn mins_dot<const NT: usize>(mins: __m128i, y: &[&Q8K; NT]) -> [__m128i; NT] {
    let mut dots = [_mm_setzero_si128(); NT];
    for (dot, y) in dots.iter_mut().zip(y) {
        // SAFETY: 16 readable bytes; the load is unaligned.
        let sums = unsafe { _mm_loadu_si128(y.sums32.as_ptr().cast()) };
        *dot = _mm_madd_epi16(mins, sums);
    }
    dots
}

#[inline]
#[target_feature(enable = "avx2")]
fn load_sums16(sums: &[i16; 16]) -> __m256i {
    // SAFETY: 32 readable bytes; the load is unaligned.
    unsafe { _mm256_loadu_si256(sums.as_ptr().cast()) }
}

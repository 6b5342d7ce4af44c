//! Integer dot products of the K types: super-blocks of 256.
//!
//! Eight rows are worked on at once. Each row's products are summed over a whole super-block as integers, eight
//! such sums form a vector, and one float operation per step serves eight rows.

use core::arch::x86_64::*;
use core::hint::black_box;

use super::{
    ROWS, Rows, half_pairs, halves, load, load_codes, load_half, prefetch, store, store_f32, sum_lanes,
    transpose_words,
};
use crate::Type;
use crate::activations::Q8K;
use crate::blocks::{Q4K, Q5K, Q6K};
use crate::matmul::Tile;

pub(in crate::cpu) const Q4_K: u32 = Type::Q4_K.id();
pub(in crate::cpu) const Q5_K: u32 = Type::Q5_K.id();
pub(in crate::cpu) const Q6_K: u32 = Type::Q6_K.id();

/// From this many tokens on, weights are rearranged first.
pub(in crate::cpu) const MANY: usize = 8;

#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn fast<const TY: u32, const BYTES: usize>(tile: &mut Tile<'_>) {
    // Opaque, or the compiler turns one shuffle by a loaded mask into two by immediates.
    let masks = black_box(if TY == Q6_K { &WORDS } else { &BYTES_TO_WORDS });
    let n_tokens = tile.out.tokens();
    for row in (0..tile.w.rows()).step_by(ROWS) {
        let rows = Rows::<BYTES>::new(&tile.w, row);
        if n_tokens >= MANY {
            super::strips::many::<TY, BYTES>(tile, row, &rows);
            continue;
        }
        let mut i = 0;
        while i < n_tokens {
            i += match n_tokens - i {
                1 => few::<TY, BYTES, 1>(tile, row, &rows, i, masks),
                2 => few::<TY, BYTES, 2>(tile, row, &rows, i, masks),
                3 => few::<TY, BYTES, 3>(tile, row, &rows, i, masks),
                _ => few::<TY, BYTES, 4>(tile, row, &rows, i, masks),
            };
        }
    }
}

/// Eight rows from `row` on with `NT` tokens from the `i`-th on; returns `NT`.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn few<const TY: u32, const BYTES: usize, const NT: usize>(
    tile: &mut Tile<'_>,
    row: usize,
    rows: &Rows<'_, BYTES>,
    i: usize,
    masks: &Masks,
) -> usize {
    let mut y: [&[Q8K]; NT] = [&[]; NT];
    for (t, y) in y.iter_mut().enumerate() {
        *y = tile.acts.q8k_row(tile.tokens.get(i + t));
    }
    let mut sums = [_mm256_setzero_ps(); NT];
    let mut codes = [[_mm256_setzero_si256(); ROWS]; NT];
    for s in 0..y[0].len() {
        let mut ys = [&y[0][s]; NT];
        for (ys, y) in ys.iter_mut().zip(y) {
            *ys = &y[s];
        }
        if i == 0 {
            prefetch::<BYTES>(rows, s);
        }
        if TY == Q6_K {
            for r in 0..ROWS {
                let sums = q6_k_dot(bytemuck::from_bytes(&rows.blocks[r][s]), &ys, masks);
                for t in 0..NT {
                    codes[t][r] = sums[t];
                }
            }
            let d = halves(rows, s, const { size_of::<Q6K>() - 2 });
            for t in 0..NT {
                let codes = _mm256_cvtepi32_ps(sum_lanes(&codes[t]));
                let d = _mm256_mul_ps(d, _mm256_set1_ps(ys[t].d));
                sums[t] = _mm256_add_ps(sums[t], _mm256_mul_ps(d, codes));
            }
        } else {
            let header = Header::new(rows, s);
            let scales = header.scales_by_row();
            for r in 0..ROWS {
                let w = codes_of::<TY, BYTES>(&rows.blocks[r][s]);
                let scales = _mm256_set1_epi64x(scales[r]);
                let mut sums = [_mm256_setzero_si256(); NT];
                accumulate(&mut sums, &ys, &w, scales, masks);
                for t in 0..NT {
                    codes[t][r] = sums[t];
                }
            }
            let (d, dmin) = half_pairs(header.d);
            let mins = header.min_pairs();
            for t in 0..NT {
                let term = super_term(d, dmin, sum_lanes(&codes[t]), mins_dot(&mins, ys[t]), ys[t].d);
                sums[t] = _mm256_add_ps(sums[t], term);
            }
        }
    }
    let n_rows = ROWS.min(tile.out.rows() - row);
    for (t, sums) in sums.iter().enumerate() {
        let mut values = [0.0; ROWS];
        store_f32(&mut values, *sums);
        tile.out.put(i + t, row, &values[..n_rows]);
    }
    NT
}

/// What a super-block with minima adds to a dot product, for eight rows.
#[inline]
#[target_feature(enable = "avx2")]
pub(super) fn super_term(d: __m256, dmin: __m256, codes: __m256i, mins: __m256i, yd: f32) -> __m256 {
    let yd = _mm256_set1_ps(yd);
    _mm256_sub_ps(
        _mm256_mul_ps(_mm256_mul_ps(d, yd), _mm256_cvtepi32_ps(codes)),
        _mm256_mul_ps(_mm256_mul_ps(dmin, yd), _mm256_cvtepi32_ps(mins)),
    )
}

/// The headers of eight [`Q4K`] or [`Q5K`] blocks, one row per 32-bit lane.
pub(super) struct Header {
    /// The halves d (low) and dmin (high).
    pub(super) d: __m256i,
    /// Scales of the sub-blocks 0..4 and 4..8, one byte each.
    pub(super) scales: [__m256i; 2],
    /// Minima of the sub-blocks 0..4 and 4..8, one byte each.
    mins: [__m256i; 2],
}

impl Header {
    #[inline]
    #[target_feature(enable = "avx2")]
    pub(super) fn new<const BYTES: usize>(rows: &Rows<'_, BYTES>, s: usize) -> Self {
        let mut heads = [_mm_setzero_si128(); ROWS];
        for (head, blocks) in heads.iter_mut().zip(rows.blocks) {
            let (head_bytes, _) = blocks[s].as_chunks::<16>();
            *head = load_half(&head_bytes[0]);
        }
        let [d, scales, mins, nibbles] = transpose_words(&heads);
        let (six, four) = (_mm256_set1_epi32(0x3f3f_3f3f), _mm256_set1_epi32(0x0f0f_0f0f));
        let two = _mm256_set1_epi32(0x3030_3030);
        let upper = |low: __m256i, nibbles: __m256i| {
            let high = _mm256_and_si256(_mm256_srli_epi32::<2>(low), two);
            _mm256_or_si256(high, _mm256_and_si256(nibbles, four))
        };
        Self {
            d,
            scales: [_mm256_and_si256(scales, six), upper(scales, nibbles)],
            mins: [_mm256_and_si256(mins, six), upper(mins, _mm256_srli_epi32::<4>(nibbles))],
        }
    }

    /// The eight scale bytes of each row.
    #[inline]
    #[target_feature(enable = "avx2")]
    fn scales_by_row(&self) -> [i64; ROWS] {
        let even = _mm256_unpacklo_epi32(self.scales[0], self.scales[1]);
        let odd = _mm256_unpackhi_epi32(self.scales[0], self.scales[1]);
        let mut by_row = [0; ROWS];
        let halves: &mut [[u8; 32]; 2] = bytemuck::cast_mut(&mut by_row);
        store(&mut halves[0], _mm256_permute2x128_si256::<0x20>(even, odd));
        store(&mut halves[1], _mm256_permute2x128_si256::<0x31>(even, odd));
        by_row
    }

    /// The minima of the sub-blocks `2 p` and `2 p + 1` as two words.
    #[inline]
    #[target_feature(enable = "avx2")]
    pub(super) fn min_pairs(&self) -> [__m256i; 4] {
        let (low, high) = (_mm256_set1_epi32(0x0000_00ff), _mm256_set1_epi32(0x00ff_0000));
        // Bytes b0 and b1 of a lane become words: b0 stays, b1 moves up by one byte.
        let first =
            |v| _mm256_or_si256(_mm256_and_si256(v, low), _mm256_and_si256(_mm256_slli_epi32::<8>(v), high));
        let [a, b] = self.mins;
        [first(a), first(_mm256_srli_epi32::<16>(a)), first(b), first(_mm256_srli_epi32::<16>(b))]
    }
}

/// Sums over the sub-blocks of minimum times activation sum, for eight rows.
#[inline]
#[target_feature(enable = "avx2")]
pub(super) fn mins_dot(mins: &[__m256i; 4], y: &Q8K) -> __m256i {
    let sums: &[i32; 4] = bytemuck::cast_ref(&y.sums32);
    let part = |p: usize| _mm256_madd_epi16(mins[p], _mm256_set1_epi32(sums[p]));
    _mm256_add_epi32(_mm256_add_epi32(part(0), part(1)), _mm256_add_epi32(part(2), part(3)))
}

/// The unsigned codes of a super-block, 32 to a vector.
#[inline]
#[target_feature(enable = "avx2")]
pub(super) fn codes_of<const TY: u32, const BYTES: usize>(block: &[u8; BYTES]) -> [__m256i; 8] {
    match TY {
        Q4_K => q4_k(bytemuck::from_bytes(block)),
        Q5_K => q5_k(bytemuck::from_bytes(block)),
        _ => q6_k(bytemuck::from_bytes(block)),
    }
}

#[inline]
#[target_feature(enable = "avx2")]
fn q4_k(b: &Q4K) -> [__m256i; 8] {
    let mask = _mm256_set1_epi32(0x0f0f_0f0f);
    let mut codes = [mask; 8];
    for (codes, bytes) in codes.as_chunks_mut::<2>().0.iter_mut().zip(b.qs.as_chunks().0) {
        let bits = load(bytes);
        *codes = [_mm256_and_si256(bits, mask), _mm256_and_si256(_mm256_srli_epi16::<4>(bits), mask)];
    }
    codes
}

#[inline]
#[target_feature(enable = "avx2")]
fn q5_k(b: &Q5K) -> [__m256i; 8] {
    let mask = _mm256_set1_epi32(0x0f0f_0f0f);
    let fifth = _mm256_set1_epi32(0x1010_1010);
    let mut upper = load(&b.qh);
    let mut codes = [mask; 8];
    for (codes, bytes) in codes.as_chunks_mut::<2>().0.iter_mut().zip(b.qs.as_chunks().0) {
        let bits = load(bytes);
        let low = _mm256_and_si256(bits, mask);
        let high = _mm256_and_si256(_mm256_srli_epi16::<4>(bits), mask);
        *codes = [
            _mm256_or_si256(low, _mm256_and_si256(_mm256_slli_epi16::<4>(upper), fifth)),
            _mm256_or_si256(high, _mm256_and_si256(_mm256_slli_epi16::<3>(upper), fifth)),
        ];
        upper = _mm256_srli_epi16::<2>(upper);
    }
    codes
}

#[inline]
#[target_feature(enable = "avx2")]
fn q6_k(b: &Q6K) -> [__m256i; 8] {
    let (four, two) = (_mm256_set1_epi32(0x0f0f_0f0f), _mm256_set1_epi32(0x3030_3030));
    let mut codes = [four; 8];
    let halves = b.ql.as_chunks::<64>().0.iter().zip(b.qh.as_chunks().0);
    for (codes, (ql, qh)) in codes.as_chunks_mut::<4>().0.iter_mut().zip(halves) {
        let (ql, h) = (ql.as_chunks().0, load(qh));
        let (a, c) = (load(&ql[0]), load(&ql[1]));
        let join = |low, high| _mm256_or_si256(_mm256_and_si256(low, four), _mm256_and_si256(high, two));
        *codes = [
            join(a, _mm256_slli_epi16::<4>(h)),
            join(c, _mm256_slli_epi16::<2>(h)),
            join(_mm256_srli_epi16::<4>(a), h),
            join(_mm256_srli_epi16::<4>(c), _mm256_srli_epi16::<2>(h)),
        ];
    }
    codes
}

#[inline]
#[target_feature(enable = "avx2")]
fn q6_k_dot<const NT: usize>(b: &Q6K, y: &[&Q8K; NT], masks: &Masks) -> [__m256i; NT] {
    let bytes = load_half(&b.scales);
    // Even scales in the lower lane, odd ones in the upper: a vector of 32 codes has one of each.
    let split = _mm_setr_epi8(0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15);
    let scales = _mm256_cvtepi8_epi16(_mm_shuffle_epi8(bytes, split));
    let mut sums = [_mm256_setzero_si256(); NT];
    accumulate(&mut sums, y, &q6_k(b), scales, masks);
    // Codes carry an offset of 32: take 32 times the scaled activation sums off.
    let scales = _mm256_slli_epi16::<5>(_mm256_cvtepi8_epi16(bytes));
    for (sums, y) in sums.iter_mut().zip(y) {
        let offset = _mm256_madd_epi16(scales, load(bytemuck::cast_ref(&y.sums16)));
        *sums = _mm256_sub_epi32(*sums, offset);
    }
    sums
}

/// Adds the products of 256 codes with the activations of each token; the scale of the `j`-th 32 codes is what
/// mask `j` picks from `scales`.
#[inline]
#[target_feature(enable = "avx2")]
fn accumulate<const NT: usize>(
    sums: &mut [__m256i; NT],
    y: &[&Q8K; NT],
    codes: &[__m256i; 8],
    scales: __m256i,
    masks: &Masks,
) {
    for j in 0..8 {
        let scale = _mm256_shuffle_epi8(scales, load(&masks[j]));
        for (sum, y) in sums.iter_mut().zip(y) {
            let pairs = _mm256_maddubs_epi16(codes[j], load_codes(&y.q.as_chunks::<32>().0[j]));
            *sum = _mm256_add_epi32(*sum, _mm256_madd_epi16(pairs, scale));
        }
    }
}

/// Byte shuffles that spread one of eight scales over all words of a lane.
type Masks = [[u8; 32]; 8];

/// Word `j` of a lane.
static WORDS: Masks = masks(true);
/// Byte `j` of a lane, zero extended.
static BYTES_TO_WORDS: Masks = masks(false);

const fn masks(words: bool) -> Masks {
    let mut masks = [[0; 32]; 8];
    let mut at = 0;
    while at < 256 {
        let (j, odd) = ((at / 32) as u8, at % 2 == 1);
        masks[at / 32][at % 32] = match (words, odd) {
            (true, _) => 2 * j + odd as u8,
            (false, false) => j,
            (false, true) => 0x80,
        };
        at += 1;
    }
    masks
}

//! Products of the K types with many tokens.
//!
//! A strip, one super-block of eight rows, is unpacked once and rearranged so that each vector holds four
//! consecutive codes of each of the eight rows. Sums of rows then need no shuffles, and products of several
//! vectors are added as words before they are scaled.

use core::arch::x86_64::*;

use super::superblocks::{Header, Q4_K, Q5_K, Q6_K, codes_of, mins_dot, super_term};
use super::{ROWS, Rows, half_pairs, halves, load_half, prefetch, store_f32, transpose, transpose_words};
use crate::activations::Q8K;
use crate::blocks::Q6K;
use crate::matmul::Tile;

/// Tokens per pass over a row: their sums lie on the stack.
pub(in crate::cpu) const TOKENS: usize = 64;

/// How many products of codes with activations a word holds: pairs of 15 * 127, 31 * 127 or 63 * 127.
const fn per_word(ty: u32) -> usize {
    match ty {
        Q4_K => 8,
        Q5_K => 4,
        _ => 2,
    }
}

/// A super-block of `N` times eight rows, one row per 32-bit lane.
#[repr(C, align(64))]
pub(in crate::cpu) struct Strip<const N: usize> {
    /// Codes `4 g .. 4 g + 4`.
    pub(in crate::cpu) codes: [[__m256i; N]; 64],
    /// The scale of the `j`-th 16 codes as two equal words; with scales of 32 codes, of the `j`-th 32.
    pub(in crate::cpu) scales: [[__m256i; N]; 16],
    /// Pairs of words: minima, or offsets of the codes times -scale.
    pub(in crate::cpu) pairs: [[__m256i; N]; 8],
    pub(in crate::cpu) d: [__m256; N],
    pub(in crate::cpu) dmin: [__m256; N],
}

#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn many<const TY: u32, const BYTES: usize>(
    tile: &mut Tile<'_>,
    row: usize,
    rows: &Rows<'_, BYTES>,
) {
    let mut strip = Strip::<1>::new();
    let (n_tokens, n_rows) = (tile.out.tokens(), ROWS.min(tile.out.rows() - row));
    for first in (0..n_tokens).step_by(TOKENS) {
        let n = TOKENS.min(n_tokens - first);
        let mut y: [&[Q8K]; TOKENS] = [&[]; TOKENS];
        for (t, y) in y[..n].iter_mut().enumerate() {
            *y = tile.acts.q8k_row(tile.tokens.get(first + t));
        }
        let mut sums = [_mm256_setzero_ps(); TOKENS];
        for s in 0..y[0].len() {
            if first == 0 {
                prefetch::<BYTES>(rows, s);
            }
            strip.fill::<TY, BYTES>(0, rows, s);
            for (sums, y) in sums[..n].chunks_mut(4).zip(y[..n].chunks(4)) {
                match y {
                    [a] => strip.add::<TY, 1>([&a[s]], sums),
                    [a, b] => strip.add::<TY, 2>([&a[s], &b[s]], sums),
                    [a, b, c] => strip.add::<TY, 3>([&a[s], &b[s], &c[s]], sums),
                    [a, b, c, d, ..] => strip.add::<TY, 4>([&a[s], &b[s], &c[s], &d[s]], sums),
                    [] => {}
                }
            }
        }
        for (t, sums) in sums[..n].iter().enumerate() {
            let mut values = [0.0; ROWS];
            store_f32(&mut values, *sums);
            tile.out.put(first + t, row, &values[..n_rows]);
        }
    }
}

impl<const N: usize> Strip<N> {
    #[inline]
    #[target_feature(enable = "avx2")]
    pub(in crate::cpu) fn new() -> Self {
        let (zero, none) = ([_mm256_setzero_si256(); N], [_mm256_setzero_ps(); N]);
        Self { codes: [zero; 64], scales: [zero; 16], pairs: [zero; 8], d: none, dmin: none }
    }

    /// Takes super-block `s` of `rows` as the `n`-th eight rows.
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    pub(in crate::cpu) fn fill<const TY: u32, const BYTES: usize>(
        &mut self,
        n: usize,
        rows: &Rows<'_, BYTES>,
        s: usize,
    ) {
        let mut unpacked = [[_mm256_setzero_si256(); ROWS]; 8];
        for (r, blocks) in rows.blocks.iter().enumerate() {
            for (unpacked, codes) in unpacked.iter_mut().zip(codes_of::<TY, BYTES>(&blocks[s])) {
                unpacked[r] = codes;
            }
        }
        for (codes, unpacked) in self.codes.as_chunks_mut::<8>().0.iter_mut().zip(&unpacked) {
            for (codes, transposed) in codes.iter_mut().zip(transpose(unpacked)) {
                codes[n] = transposed;
            }
        }
        if TY == Q6_K {
            let mut bytes = [_mm_setzero_si128(); ROWS];
            for (r, blocks) in rows.blocks.iter().enumerate() {
                let b: &Q6K = bytemuck::from_bytes(&blocks[s]);
                bytes[r] = load_half(&b.scales);
            }
            for (q, bytes) in transpose_words(&bytes).into_iter().enumerate() {
                // Bytes of a lane to words: the odd ones sign extended in place, the even ones moved up first.
                let odd = _mm256_srai_epi16::<8>(bytes);
                let even = _mm256_srai_epi16::<8>(_mm256_slli_epi16::<8>(bytes));
                let low = _mm256_blend_epi16::<0xaa>(even, _mm256_slli_epi32::<16>(odd));
                let high = _mm256_blend_epi16::<0xaa>(_mm256_srli_epi32::<16>(even), odd);
                for (p, pair) in [low, high].into_iter().enumerate() {
                    let p = 2 * q + p;
                    let both = |high, low| _mm256_blend_epi16::<0xaa>(low, high);
                    self.scales[2 * p][n] = both(_mm256_slli_epi32::<16>(pair), pair);
                    self.scales[2 * p + 1][n] = both(pair, _mm256_srli_epi32::<16>(pair));
                    let minus = _mm256_sub_epi16(_mm256_setzero_si256(), pair);
                    self.pairs[p][n] = _mm256_slli_epi16::<5>(minus);
                }
            }
            self.d[n] = halves(rows, s, const { size_of::<Q6K>() - 2 });
        } else {
            let header = Header::new(rows, s);
            for (j, scale) in self.scales[..8].iter_mut().enumerate() {
                let bytes = header.scales[j / 4];
                let byte = (j % 4) as i32;
                let lane = (byte | 0x80 << 8 | byte << 16) | i32::MIN;
                let first = _mm256_set1_epi32(lane);
                let of_lane = _mm256_setr_epi32(0, 0x40004, 0x80008, 0xc000c, 0, 0x40004, 0x80008, 0xc000c);
                scale[n] = _mm256_shuffle_epi8(bytes, _mm256_add_epi32(first, of_lane));
            }
            for (pairs, mins) in self.pairs.iter_mut().zip(header.min_pairs()) {
                pairs[n] = mins;
            }
            (self.d[n], self.dmin[n]) = half_pairs(header.d);
        }
    }
}

impl Strip<1> {
    /// Adds what this strip contributes to the sums of `NT` tokens.
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    fn add<const TY: u32, const NT: usize>(&self, y: [&Q8K; NT], sums: &mut [__m256]) {
        let per_word = const { per_word(TY) };
        let mut codes = [_mm256_setzero_si256(); NT];
        if TY == Q6_K {
            for p in 0..8 {
                for t in 0..NT {
                    let pairs: &[i32; 8] = bytemuck::cast_ref(&y[t].sums16);
                    let offset = _mm256_madd_epi16(self.pairs[p][0], _mm256_set1_epi32(pairs[p]));
                    codes[t] = _mm256_add_epi32(codes[t], offset);
                }
            }
        }
        for (c, w) in self.codes.chunks_exact(per_word).enumerate() {
            let mut words = [_mm256_setzero_si256(); NT];
            for (g, [w]) in w.iter().enumerate() {
                for t in 0..NT {
                    let four: &[i32; 64] = bytemuck::cast_ref(&y[t].q);
                    let product = _mm256_maddubs_epi16(*w, _mm256_set1_epi32(four[c * per_word + g]));
                    words[t] = if g == 0 { product } else { _mm256_add_epi16(words[t], product) };
                }
            }
            let [scale] = self.scales[c * per_word / if TY == Q6_K { 4 } else { 8 }];
            for t in 0..NT {
                codes[t] = _mm256_add_epi32(codes[t], _mm256_madd_epi16(words[t], scale));
            }
        }
        for t in 0..NT {
            let term = if TY == Q6_K {
                let d = _mm256_mul_ps(self.d[0], _mm256_set1_ps(y[t].d));
                _mm256_mul_ps(d, _mm256_cvtepi32_ps(codes[t]))
            } else {
                let [[a], [b], [c], [d], ..] = self.pairs;
                super_term(self.d[0], self.dmin[0], codes[t], mins_dot(&[a, b, c, d], y[t]), y[t].d)
            };
            sums[t] = _mm256_add_ps(sums[t], term);
        }
    }
}

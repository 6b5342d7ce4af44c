//! Integer dot products of the types in blocks of 32.

use core::arch::x86_64::*;

use super::strips::TOKENS;
use super::superblocks::MANY;
use super::{
    ROWS, Rows, half_pairs, halves, load, load_codes, load_half, prefetch, store_f32, sum_lanes, transpose,
};
use crate::Type;
use crate::activations::Q8x8;
use crate::blocks::{Q4_0, Q4_1, Q5_0, Q5_1, Q8_0};
use crate::matmul::Tile;

pub(in crate::cpu) const IS_Q4_0: u32 = Type::Q4_0.id();
pub(in crate::cpu) const IS_Q4_1: u32 = Type::Q4_1.id();
pub(in crate::cpu) const IS_Q5_0: u32 = Type::Q5_0.id();
pub(in crate::cpu) const IS_Q5_1: u32 = Type::Q5_1.id();

/// How many sums of two products fit in a word: 2 * 127 times 15, 31 or 128.
const fn per_word(ty: u32) -> usize {
    match ty {
        IS_Q4_0 | IS_Q4_1 => 8,
        IS_Q5_0 | IS_Q5_1 => 4,
        _ => 1,
    }
}

/// What has to be taken off unsigned codes to get the signed ones.
pub(in crate::cpu) const fn offset(ty: u32) -> i32 {
    match ty {
        IS_Q4_0 => 8,
        IS_Q5_0 => 16,
        _ => 0,
    }
}

#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn fast<const TY: u32, const BYTES: usize>(tile: &mut Tile<'_>) {
    let n_tokens = tile.out.tokens();
    for row in (0..tile.w.rows()).step_by(ROWS) {
        let rows = Rows::<BYTES>::new(&tile.w, row);
        if n_tokens >= MANY {
            many::<TY, BYTES>(tile, row, &rows);
            continue;
        }
        let mut i = 0;
        while i < n_tokens {
            i += match n_tokens - i {
                1 => few::<TY, BYTES, 1>(tile, row, &rows, i),
                2 => few::<TY, BYTES, 2>(tile, row, &rows, i),
                3 => few::<TY, BYTES, 3>(tile, row, &rows, i),
                _ => few::<TY, BYTES, 4>(tile, row, &rows, i),
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
) -> usize {
    let mut y: [&[Q8x8]; NT] = [&[]; NT];
    for (t, y) in y.iter_mut().enumerate() {
        *y = tile.acts.q8x8_row(tile.tokens.get(i + t));
    }
    let mut sums = [_mm256_setzero_ps(); NT];
    let mut codes = [[_mm256_setzero_si256(); ROWS]; NT];
    for b in 0..rows.blocks[0].len() {
        let (group, k) = (b / 8, b % 8);
        if i == 0 {
            prefetch(rows, b);
        }
        for r in 0..ROWS {
            let w = unpack::<TY, BYTES>(&rows.blocks[r][b]);
            for t in 0..NT {
                codes[t][r] = dot32::<TY>(w, load_codes(&y[t][group].q[k]));
            }
        }
        let (d, m) = scales::<TY, BYTES>(rows, b);
        for t in 0..NT {
            sums[t] = _mm256_add_ps(sums[t], term::<TY>(d, m, sum_lanes(&codes[t]), &y[t][group], k));
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

/// Eight rows from `row` on with all tokens. The codes of a block are rearranged once, so that each vector holds
/// four consecutive ones of each row.
#[target_feature(enable = "avx2,fma,f16c")]
fn many<const TY: u32, const BYTES: usize>(tile: &mut Tile<'_>, row: usize, rows: &Rows<'_, BYTES>) {
    let (n_tokens, n_rows) = (tile.out.tokens(), ROWS.min(tile.out.rows() - row));
    for first in (0..n_tokens).step_by(TOKENS) {
        let n = TOKENS.min(n_tokens - first);
        let mut y: [&[Q8x8]; TOKENS] = [&[]; TOKENS];
        for (t, y) in y[..n].iter_mut().enumerate() {
            *y = tile.acts.q8x8_row(tile.tokens.get(first + t));
        }
        let mut sums = [_mm256_setzero_ps(); TOKENS];
        for b in 0..rows.blocks[0].len() {
            if first == 0 {
                prefetch(rows, b);
            }
            let mut w = [_mm256_setzero_si256(); ROWS];
            for (w, blocks) in w.iter_mut().zip(rows.blocks) {
                *w = unpack::<TY, BYTES>(&blocks[b]);
            }
            let w = transpose(&w);
            let (d, m) = scales::<TY, BYTES>(rows, b);
            for (sums, y) in sums[..n].chunks_mut(4).zip(y[..n].chunks(4)) {
                let g = b / 8;
                match y {
                    [a] => add::<TY, 1>(&w, d, m, [&a[g]], b % 8, sums),
                    [a, b_] => add::<TY, 2>(&w, d, m, [&a[g], &b_[g]], b % 8, sums),
                    [a, b_, c] => add::<TY, 3>(&w, d, m, [&a[g], &b_[g], &c[g]], b % 8, sums),
                    [a, b_, c, e, ..] => {
                        add::<TY, 4>(&w, d, m, [&a[g], &b_[g], &c[g], &e[g]], b % 8, sums);
                    }
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

/// Adds what a rearranged block of eight rows contributes to the sums of `NT` tokens.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn add<const TY: u32, const NT: usize>(
    w: &[__m256i; 8],
    d: __m256,
    m: __m256,
    y: [&Q8x8; NT],
    k: usize,
    sums: &mut [__m256],
) {
    let per_word = const { per_word(TY) };
    let one = _mm256_set1_epi16(1);
    let mut codes = [_mm256_setzero_si256(); NT];
    for (c, w) in w.chunks_exact(per_word).enumerate() {
        let mut words = [_mm256_setzero_si256(); NT];
        for (g, w) in w.iter().enumerate() {
            for t in 0..NT {
                let four: &[i32; 8] = bytemuck::cast_ref(&y[t].q[k]);
                let product = products::<TY>(*w, _mm256_set1_epi32(four[c * per_word + g]));
                words[t] = if g == 0 { product } else { _mm256_add_epi16(words[t], product) };
            }
        }
        for t in 0..NT {
            codes[t] = _mm256_add_epi32(codes[t], _mm256_madd_epi16(words[t], one));
        }
    }
    for t in 0..NT {
        sums[t] = _mm256_add_ps(sums[t], term::<TY>(d, m, codes[t], y[t], k));
    }
}

/// The scales and minima of block `b` of eight rows.
#[inline]
#[target_feature(enable = "avx2,f16c")]
pub(in crate::cpu) fn scales<const TY: u32, const BYTES: usize>(
    rows: &Rows<'_, BYTES>,
    b: usize,
) -> (__m256, __m256) {
    if matches!(TY, IS_Q4_1 | IS_Q5_1) {
        let head = |r: usize| {
            let block = &rows.blocks[r][b];
            i32::from_le_bytes([block[0], block[1], block[2], block[3]])
        };
        half_pairs(_mm256_setr_epi32(head(0), head(1), head(2), head(3), head(4), head(5), head(6), head(7)))
    } else {
        (halves(rows, b, 0), _mm256_setzero_ps())
    }
}

/// What a block adds to a dot product, for eight rows; `codes` are sums of unsigned codes times activations.
#[inline]
#[target_feature(enable = "avx2")]
fn term<const TY: u32>(d: __m256, m: __m256, codes: __m256i, y: &Q8x8, k: usize) -> __m256 {
    let yd = _mm256_set1_ps(y.d[k]);
    let offset = _mm256_set1_epi32(const { offset(TY) } * y.sums[k]);
    let codes = _mm256_cvtepi32_ps(_mm256_sub_epi32(codes, offset));
    let term = _mm256_mul_ps(_mm256_mul_ps(d, yd), codes);
    if matches!(TY, IS_Q4_1 | IS_Q5_1) {
        let sum = _mm256_set1_ps(y.sums[k] as f32);
        _mm256_add_ps(term, _mm256_mul_ps(_mm256_mul_ps(m, yd), sum))
    } else {
        term
    }
}

/// The codes of a block, without their offset.
#[inline]
#[target_feature(enable = "avx2")]
pub(in crate::cpu) fn unpack<const TY: u32, const BYTES: usize>(block: &[u8; BYTES]) -> __m256i {
    match TY {
        IS_Q4_0 => nibbles(&bytemuck::from_bytes::<Q4_0>(block).qs),
        IS_Q4_1 => nibbles(&bytemuck::from_bytes::<Q4_1>(block).qs),
        IS_Q5_0 => {
            let b = bytemuck::from_bytes::<Q5_0>(block);
            _mm256_or_si256(nibbles(&b.qs), fifth_bits(b.qh))
        }
        IS_Q5_1 => {
            let b = bytemuck::from_bytes::<Q5_1>(block);
            _mm256_or_si256(nibbles(&b.qs), fifth_bits(b.qh))
        }
        _ => load(&bytemuck::from_bytes::<Q8_0>(block).qs),
    }
}

/// Low nibbles in the lower lane, high nibbles in the upper.
#[inline]
#[target_feature(enable = "avx2")]
fn nibbles(qs: &[u8; 16]) -> __m256i {
    let bits = load_half(qs);
    let both = _mm256_set_m128i(_mm_srli_epi16::<4>(bits), bits);
    _mm256_and_si256(both, _mm256_set1_epi8(15))
}

/// 16 in byte `i` where bit `i` is set.
#[inline]
#[target_feature(enable = "avx2")]
fn fifth_bits(qh: [u8; 4]) -> __m256i {
    let words = _mm256_set1_epi32(i32::from_le_bytes(qh));
    let byte_of = _mm256_setr_epi64x(0, 0x0101_0101_0101_0101, 0x0202_0202_0202_0202, 0x0303_0303_0303_0303);
    let bytes = _mm256_shuffle_epi8(words, byte_of);
    let bit_of = _mm256_set1_epi64x(0x8040_2010_0804_0201_u64 as i64);
    let set = _mm256_cmpeq_epi8(_mm256_and_si256(bytes, bit_of), bit_of);
    _mm256_and_si256(set, _mm256_set1_epi8(16))
}

/// Sums of two products each, as words.
#[inline]
#[target_feature(enable = "avx2")]
fn products<const TY: u32>(w: __m256i, y: __m256i) -> __m256i {
    if TY == Type::Q8_0.id() {
        // The unsigned factor is |w|, up to 128; the sign moves to y, which is never -128.
        _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(y, w))
    } else {
        _mm256_maddubs_epi16(w, y)
    }
}

/// Sums of four products each.
#[inline]
#[target_feature(enable = "avx2")]
fn dot32<const TY: u32>(w: __m256i, y: __m256i) -> __m256i {
    _mm256_madd_epi16(products::<TY>(w, y), _mm256_set1_epi16(1))
}

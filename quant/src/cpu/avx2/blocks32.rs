//! Integer dot products of the types in blocks of 32.

use core::arch::x86_64::*;

use super::{ROWS, half_pairs, halves, load, load_codes, load_half, prefetch, store_f32, sum_lanes};
use crate::Type;
use crate::activations::Q8x8;
use crate::blocks::{Q4_0, Q4_1, Q5_0, Q5_1, Q8_0};
use crate::matmul::Tile;

const IS_Q4_0: u32 = Type::Q4_0.id();
const IS_Q4_1: u32 = Type::Q4_1.id();
const IS_Q5_0: u32 = Type::Q5_0.id();
const IS_Q5_1: u32 = Type::Q5_1.id();

const fn block_bytes(ty: u32) -> usize {
    match ty {
        IS_Q4_0 => size_of::<Q4_0>(),
        IS_Q4_1 => size_of::<Q4_1>(),
        IS_Q5_0 => size_of::<Q5_0>(),
        IS_Q5_1 => size_of::<Q5_1>(),
        _ => size_of::<Q8_0>(),
    }
}

/// What has to be taken off unsigned codes to get the signed ones.
const fn offset(ty: u32) -> i32 {
    match ty {
        IS_Q4_0 => 8,
        IS_Q5_0 => 16,
        _ => 0,
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
    let mut y: [&[Q8x8]; NT] = [&[]; NT];
    for (t, y) in y.iter_mut().enumerate() {
        *y = tile.acts.q8x8_row(tile.tokens.get(i + t));
    }
    let n_blocks = tile.w.cols() / 32;
    let sums = dot::<TY, NT>(rows, &y, n_blocks, if i == 0 { ahead } else { &[] });
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
fn dot<const TY: u32, const NT: usize>(
    rows: &[&[u8]; ROWS],
    y: &[&[Q8x8]; NT],
    n_blocks: usize,
    ahead: &[u8],
) -> [__m256; NT] {
    let bytes = const { block_bytes(TY) };
    let mut sums = [_mm256_setzero_ps(); NT];
    for b in 0..n_blocks {
        let (group, k) = (b / 8, b % 8);
        for line in (0..ROWS * bytes).step_by(64) {
            prefetch(ahead, b * ROWS * bytes + line);
        }
        let mut codes = [[_mm256_setzero_si256(); ROWS]; NT];
        let mut heads = [0u32; ROWS];
        for r in 0..ROWS {
            let block = &rows[r][b * bytes..][..bytes];
            let w = unpack::<TY>(block);
            heads[r] = u32::from_le_bytes([block[0], block[1], block[2], block[3]]);
            for t in 0..NT {
                codes[t][r] = dot32::<TY>(w, load_codes(&y[t][group].q[k]));
            }
        }
        let (d, m) = if matches!(TY, IS_Q4_1 | IS_Q5_1) {
            half_pairs(&heads)
        } else {
            (halves(&heads.map(|h| h as u16)), _mm256_setzero_ps())
        };
        for t in 0..NT {
            let y = &y[t][group];
            let yd = _mm256_set1_ps(y.d[k]);
            let offset = _mm256_set1_epi32(const { offset(TY) } * y.sums[k]);
            let codes = _mm256_cvtepi32_ps(_mm256_sub_epi32(sum_lanes(&codes[t]), offset));
            let mut term = _mm256_mul_ps(_mm256_mul_ps(d, yd), codes);
            if matches!(TY, IS_Q4_1 | IS_Q5_1) {
                let sum = _mm256_set1_ps(y.sums[k] as f32);
                term = _mm256_add_ps(term, _mm256_mul_ps(_mm256_mul_ps(m, yd), sum));
            }
            sums[t] = _mm256_add_ps(sums[t], term);
        }
    }
    sums
}

/// The codes of a block, without their offset.
#[inline]
#[target_feature(enable = "avx2")]
fn unpack<const TY: u32>(block: &[u8]) -> __m256i {
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

/// Sums of four products each.
#[inline]
#[target_feature(enable = "avx2")]
fn dot32<const TY: u32>(w: __m256i, y: __m256i) -> __m256i {
    let pairs = if TY == Type::Q8_0.id() {
        // The unsigned factor is |w|, up to 128; the sign moves to y, which is never -128.
        _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(y, w))
    } else {
        _mm256_maddubs_epi16(w, y)
    };
    _mm256_madd_epi16(pairs, _mm256_set1_epi16(1))
}

//! Products of the types in blocks of 32 with many tokens.

use core::arch::x86_64::*;

use super::{ROWS, TOKENS, join, join_ps, put};
use crate::Type;
use crate::activations::Q8x8;
use crate::cpu::avx2::blocks32::{IS_Q4_1, IS_Q5_1, offset, scales, unpack};
use crate::cpu::avx2::{Rows, prefetch, transpose};
use crate::matmul::Tile;

/// A block of sixteen rows: each vector of codes holds four of each row.
struct Block {
    codes: [[__m256i; 2]; 8],
    d: [__m256; 2],
    m: [__m256; 2],
}

#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
pub(super) fn many<const TY: u32, const BYTES: usize>(tile: &mut Tile<'_>) {
    let none = [_mm256_setzero_ps(); 2];
    let mut block = Block { codes: [[_mm256_setzero_si256(); 2]; 8], d: none, m: none };
    let n_tokens = tile.out.tokens();
    for row in (0..tile.w.rows()).step_by(ROWS) {
        let rows = [Rows::<BYTES>::new(&tile.w, row), Rows::<BYTES>::new(&tile.w, row + ROWS / 2)];
        for first in (0..n_tokens).step_by(TOKENS) {
            let n = TOKENS.min(n_tokens - first);
            let mut y: [&[Q8x8]; TOKENS] = [&[]; TOKENS];
            for (t, y) in y[..n].iter_mut().enumerate() {
                *y = tile.acts.q8x8_row(tile.tokens.get(first + t));
            }
            let mut sums = [_mm512_setzero_ps(); TOKENS];
            for b in 0..rows[0].blocks[0].len() {
                for (half, rows) in rows.iter().enumerate() {
                    if first == 0 {
                        prefetch(rows, b);
                    }
                    block.fill::<TY, BYTES>(half, rows, b);
                }
                let mut t = 0;
                while t < n {
                    t += match n - t {
                        8.. => block.add::<TY, 8>(b, &y[t..], &mut sums[t..]),
                        4.. => block.add::<TY, 4>(b, &y[t..], &mut sums[t..]),
                        2.. => block.add::<TY, 2>(b, &y[t..], &mut sums[t..]),
                        _ => block.add::<TY, 1>(b, &y[t..], &mut sums[t..]),
                    };
                }
            }
            put(tile, first, row, &sums[..n]);
        }
    }
}

impl Block {
    /// Takes block `b` of `rows` as one half of the rows.
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    fn fill<const TY: u32, const BYTES: usize>(&mut self, half: usize, rows: &Rows<'_, BYTES>, b: usize) {
        let mut w = [_mm256_setzero_si256(); 8];
        for (w, blocks) in w.iter_mut().zip(rows.blocks) {
            *w = unpack::<TY, BYTES>(&blocks[b]);
            if TY == Type::Q8_0.id() {
                // The multiplication wants unsigned codes: add 128.
                *w = _mm256_xor_si256(*w, _mm256_set1_epi8(i8::MIN));
            }
        }
        for (codes, w) in self.codes.iter_mut().zip(transpose(&w)) {
            codes[half] = w;
        }
        (self.d[half], self.m[half]) = scales::<TY, BYTES>(rows, b);
    }

    /// Adds what this block, the `b`-th, contributes to the sums of the first `NT` tokens; returns `NT`.
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
    fn add<const TY: u32, const NT: usize>(&self, b: usize, y: &[&[Q8x8]], sums: &mut [__m512]) -> usize {
        let offset = const { if TY == Type::Q8_0.id() { 128 } else { offset(TY) } };
        let mut codes = [_mm512_setzero_si512(); NT];
        for (g, w) in self.codes.iter().enumerate() {
            let w = join(w);
            for t in 0..NT {
                let four: &[i32; 8] = bytemuck::cast_ref(&y[t][b / 8].q[b % 8]);
                codes[t] = _mm512_dpbusd_epi32(codes[t], w, _mm512_set1_epi32(four[g]));
            }
        }
        let (d, m) = (join_ps(&self.d), join_ps(&self.m));
        for t in 0..NT {
            let (yd, sum) = (y[t][b / 8].d[b % 8], y[t][b / 8].sums[b % 8]);
            let codes = _mm512_sub_epi32(codes[t], _mm512_set1_epi32(offset * sum));
            let yd = _mm512_set1_ps(yd);
            let term = _mm512_mul_ps(_mm512_mul_ps(d, yd), _mm512_cvtepi32_ps(codes));
            let term = if matches!(TY, IS_Q4_1 | IS_Q5_1) {
                let min = _mm512_mul_ps(_mm512_mul_ps(m, yd), _mm512_set1_ps(sum as f32));
                _mm512_add_ps(term, min)
            } else {
                term
            };
            sums[t] = _mm512_add_ps(sums[t], term);
        }
        NT
    }
}

//! Products of the K types with many tokens.

use core::arch::x86_64::*;

use super::{ROWS, TOKENS, join, join_ps, put};
use crate::activations::Q8K;
use crate::cpu::avx2::strips::Strip;
use crate::cpu::avx2::superblocks::{Q4_K, Q6_K};
use crate::cpu::avx2::{Rows, prefetch};
use crate::matmul::Tile;

/// A super-block of sixteen rows.
type Wide = Strip<2>;

#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
pub(super) fn many<const TY: u32, const BYTES: usize>(tile: &mut Tile<'_>) {
    let mut strip = Wide::new();
    let n_tokens = tile.out.tokens();
    for row in (0..tile.w.rows()).step_by(ROWS) {
        let rows = [Rows::<BYTES>::new(&tile.w, row), Rows::<BYTES>::new(&tile.w, row + ROWS / 2)];
        for first in (0..n_tokens).step_by(TOKENS) {
            let n = TOKENS.min(n_tokens - first);
            let mut y: [&[Q8K]; TOKENS] = [&[]; TOKENS];
            for (t, y) in y[..n].iter_mut().enumerate() {
                *y = tile.acts.q8k_row(tile.tokens.get(first + t));
            }
            let mut sums = [_mm512_setzero_ps(); TOKENS];
            for s in 0..y[0].len() {
                for (half, rows) in rows.iter().enumerate() {
                    if first == 0 {
                        prefetch(rows, s);
                    }
                    strip.fill::<TY, BYTES>(half, rows, s);
                }
                let mut t = 0;
                while t < n {
                    t += match n - t {
                        8.. => add::<TY, 8>(&strip, s, &y[t..], &mut sums[t..]),
                        4.. => add::<TY, 4>(&strip, s, &y[t..], &mut sums[t..]),
                        2.. => add::<TY, 2>(&strip, s, &y[t..], &mut sums[t..]),
                        _ => add::<TY, 1>(&strip, s, &y[t..], &mut sums[t..]),
                    };
                }
            }
            put(tile, first, row, &sums[..n]);
        }
    }
}

/// Adds what super-block `s` contributes to the sums of the first `NT` tokens; returns `NT`.
#[inline]
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
fn add<const TY: u32, const NT: usize>(strip: &Wide, s: usize, y: &[&[Q8K]], sums: &mut [__m512]) -> usize {
    let mut ys = [&y[0][s]; NT];
    for (ys, y) in ys.iter_mut().zip(y) {
        *ys = &y[s];
    }
    let zero = _mm512_setzero_si512();
    let mut codes = [zero; NT];
    let mut mins = [zero; NT];
    for p in 0..if TY == Q6_K { 8 } else { 4 } {
        let pairs = join(&strip.pairs[p]);
        for t in 0..NT {
            if TY == Q6_K {
                let sums: &[i32; 8] = bytemuck::cast_ref(&ys[t].sums16);
                codes[t] = _mm512_dpwssd_epi32(codes[t], pairs, _mm512_set1_epi32(sums[p]));
            } else {
                let sums: &[i32; 4] = bytemuck::cast_ref(&ys[t].sums32);
                mins[t] = _mm512_dpwssd_epi32(mins[t], pairs, _mm512_set1_epi32(sums[p]));
            }
        }
    }
    // 16 codes of four bits with activations sum to at most 16 * 15 * 127, a word, so that one instruction can
    // multiply by the scale and add. Sums of wider codes are multiplied as double words.
    let run = if TY == Q4_K || TY == Q6_K { 4 } else { 8 };
    for (j, w) in strip.codes.chunks_exact(run).enumerate() {
        let mut dot = [zero; NT];
        for (g, w) in w.iter().enumerate() {
            let w = join(w);
            for t in 0..NT {
                let four: &[i32; 64] = bytemuck::cast_ref(&ys[t].q);
                dot[t] = _mm512_dpbusd_epi32(dot[t], w, _mm512_set1_epi32(four[j * run + g]));
            }
        }
        let scale = join(&strip.scales[if TY == Q4_K { j / 2 } else { j }]);
        let low = _mm512_and_si512(scale, _mm512_set1_epi32(0xffff));
        let scale = _mm512_srai_epi32::<16>(scale);
        for t in 0..NT {
            codes[t] = if TY == Q4_K {
                _mm512_dpwssd_epi32(codes[t], dot[t], low)
            } else {
                _mm512_add_epi32(codes[t], _mm512_mullo_epi32(dot[t], scale))
            };
        }
    }
    let (d, dmin) = (join_ps(&strip.d), join_ps(&strip.dmin));
    for t in 0..NT {
        let yd = _mm512_set1_ps(ys[t].d);
        let term = _mm512_mul_ps(_mm512_mul_ps(d, yd), _mm512_cvtepi32_ps(codes[t]));
        let term = if TY == Q6_K {
            term
        } else {
            _mm512_sub_ps(term, _mm512_mul_ps(_mm512_mul_ps(dmin, yd), _mm512_cvtepi32_ps(mins[t])))
        };
        sums[t] = _mm512_add_ps(sums[t], term);
    }
    NT
}

//! A chunk of at most [`CHUNK`] tokens through small matrix products, [`TILE`] columns of the state at a time.
//!
//! In the notation of [`reference`](crate::reference), but without `T`, `U` and `W`: `V′` solves `(I + A) V′ = diag(β) (V − diag(exp G) K S)`,
//! so it comes straight from forward substitution over the tile's right-hand sides, which is less work than applying an explicit inverse
//! and stays accurate for repeated keys. The decays `Γ` are running products of `exp(g)`, not differences of sums: row `i` is
//! `exp(g_i)` times row `i - 1`. Nothing above the diagonal is ever computed, and no decay, not even zero, overflows or cancels.

use core::arch::x86_64::*;

use super::lanes::{cut, load, padded, put_tile, store, take_tile};
use crate::cpu::Rule;
use crate::form::CHUNK;

/// Columns of a tile: the two vectors of the 4 x 16 block of sums that fills the registers.
const TILE: usize = 16;

/// Decays below this are zero: what they scale is lost in rounding, and their products would be subnormal and slow.
const VANISHED: f32 = 1e-30;

type Sums = [[__m256; 2]; 4];

/// `scores` takes `Kᵀ` `[d_k, CHUNK]`, then `K Kᵀ` and `Q Kᵀ` `[CHUNK, CHUNK]`, the products up to the diagonal's block of 16 only.
#[target_feature(enable = "avx2,fma")]
pub(super) fn scores(q: &[f32], k: &[f32], d_k: usize, scores: &mut [f32]) {
    let count = k.len() / d_k;
    let (transposed, products) = scores.split_at_mut(d_k * CHUNK);
    let (kk, qk) = products.split_at_mut(CHUNK * CHUNK);
    let transposed = transposed.as_chunks_mut::<CHUNK>().0;
    for (p, row) in transposed.iter_mut().enumerate() {
        for (t, x) in row[..count].iter_mut().enumerate() {
            *x = k[t * d_k + p];
        }
        row[count..].fill(0.0);
    }
    for (rows, out) in [(k, kk), (q, qk)] {
        let out = out.as_chunks_mut::<CHUNK>().0;
        for i in (0..count).step_by(4) {
            let a = four_rows(rows, i, d_k);
            for j in (0..i + 4).step_by(TILE) {
                let mut sums = [[_mm256_setzero_ps(); 2]; 4];
                let steps = a[0].iter().zip(a[1]).zip(a[2]).zip(a[3]).zip(transposed.iter());
                for ((((a0, a1), a2), a3), b) in steps {
                    let b = b[j..].first_chunk::<TILE>().expect("a tile of the chunk");
                    multiply(&mut sums, [*a0, *a1, *a2, *a3], b);
                }
                for (sums, out) in sums.iter().zip(&mut out[i..]) {
                    put(out[j..].first_chunk_mut::<TILE>().expect("a tile of the chunk"), *sums);
                }
            }
        }
    }
}

#[target_feature(enable = "avx2,fma")]
pub(super) fn chunked(rule: &Rule<'_>, scores: &[f32], s: &mut [f32], o: &mut [f32], work: &mut [f32]) {
    let (d_k, d_v, count) = (rule.d_k, rule.d_v, rule.beta.len());
    let (kk, qk) = scores[d_k * CHUNK..].split_at(CHUNK * CHUNK);
    let (a, work) = work.split_at_mut(CHUNK * CHUNK);
    let (p, work) = work.split_at_mut(CHUNK * CHUNK);
    let (a, p) = (a.as_chunks_mut::<CHUNK>().0, p.as_chunks_mut::<CHUNK>().0);
    let decays = weigh(rule, kk.as_chunks().0, qk.as_chunks().0, a, p);
    let (tile, work) = work.split_at_mut(TILE * d_k);
    let (fresh, carried) = work.split_at_mut(TILE * CHUNK);
    let tile = tile.as_chunks_mut::<TILE>().0;
    let (fresh, carried) = (fresh.as_chunks_mut::<TILE>().0, &mut carried.as_chunks_mut::<TILE>().0[..CHUNK]);

    for column in (0..d_v).step_by(TILE) {
        take_tile(s, d_v, column, tile);
        product(rule.k, d_k, tile, fresh);
        product(rule.q, d_k, tile, carried);
        for (t, fresh) in fresh[..count].iter_mut().enumerate() {
            let v: [f32; TILE] = padded(&rule.v[t * d_v..][column..d_v]);
            let (from_start, beta) = (_mm256_set1_ps(decays.from_start[t]), _mm256_set1_ps(rule.beta[t]));
            let (v, read) = (get(&v), get(fresh));
            put(fresh, [0, 1].map(|j| _mm256_mul_ps(beta, _mm256_fnmadd_ps(from_start, read[j], v[j]))));
        }
        fresh[count..count.next_multiple_of(4)].fill([0.0; TILE]);
        for i in (0..count).step_by(4) {
            substitute(a, fresh, i);
        }
        for i in (0..count).step_by(4) {
            let mut sums = [[_mm256_setzero_ps(); 2]; 4];
            for (m, sums) in sums.iter_mut().enumerate() {
                let from_start = _mm256_set1_ps(decays.from_start[i + m]);
                *sums = get(&carried[i + m]).map(|x| _mm256_mul_ps(from_start, x));
            }
            let [p0, p1, p2, p3] = p[i..].first_chunk::<4>().expect("rows come in fours");
            for ((((p0, p1), p2), p3), fresh) in p0[..i + 4].iter().zip(p1).zip(p2).zip(p3).zip(fresh.iter())
            {
                multiply(&mut sums, [*p0, *p1, *p2, *p3], fresh);
            }
            for (t, sums) in (i..count).zip(sums) {
                let mut out = [0.0; TILE];
                put(&mut out, sums);
                cut(&out, &mut o[t * d_v..][column..d_v]);
            }
        }
        for (fresh, &to_end) in fresh.iter_mut().zip(&decays.to_end[..count]) {
            let to_end = _mm256_set1_ps(to_end);
            put(fresh, get(fresh).map(|x| _mm256_mul_ps(to_end, x)));
        }
        let whole = _mm256_set1_ps(decays.from_start[count - 1]);
        for (i, rows) in tile.as_chunks_mut::<4>().0.iter_mut().enumerate() {
            let mut sums: Sums = [[_mm256_setzero_ps(); 2]; 4];
            for (sums, row) in sums.iter_mut().zip(&*rows) {
                *sums = get(row).map(|x| _mm256_mul_ps(whole, x));
            }
            for (k, fresh) in rule.k.chunks_exact(d_k).zip(fresh.iter()) {
                multiply(&mut sums, k.as_chunks::<4>().0[i], fresh);
            }
            for (row, sums) in rows.iter_mut().zip(sums) {
                put(row, sums);
            }
        }
        put_tile(tile, s, d_v, column);
    }
}

struct Decays {
    /// `exp(G_i)`: from the state before the chunk to token `i`.
    from_start: [f32; CHUNK],
    /// `exp(G_C − G_i)`: from token `i` to the end of the chunk.
    to_end: [f32; CHUNK],
}

/// `A = diag(β) K Kᵀ ⊙ Γ` below the diagonal and `P = Q Kᵀ ⊙ Γ` up to it, zeros in the rest of each block of four rows.
#[target_feature(enable = "avx2,fma")]
fn weigh(
    rule: &Rule<'_>,
    kk: &[[f32; CHUNK]],
    qk: &[[f32; CHUNK]],
    a: &mut [[f32; CHUNK]],
    p: &mut [[f32; CHUNK]],
) -> Decays {
    let count = rule.beta.len();
    let mut gamma = [0.0; CHUNK];
    let mut decays = Decays { from_start: [0.0; CHUNK], to_end: [0.0; CHUNK] };
    let mut whole = 1.0;
    let vanished = _mm256_set1_ps(VANISHED);
    for i in 0..count {
        let (decay, beta) = (_mm256_set1_ps(rule.decay[i]), _mm256_set1_ps(rule.beta[i]));
        whole *= rule.decay[i];
        if whole < VANISHED {
            whole = 0.0;
        }
        decays.from_start[i] = whole;
        let blocks = i / 8 + 1;
        for gamma in &mut gamma.as_chunks_mut::<8>().0[..blocks] {
            let x = _mm256_mul_ps(decay, load(gamma));
            store(gamma, _mm256_and_ps(x, _mm256_cmp_ps::<_CMP_NLT_UQ>(x, vanished)));
        }
        gamma[i] = 1.0;
        let scores = kk[i].as_chunks::<8>().0.iter().zip(qk[i].as_chunks::<8>().0);
        let out = a[i].as_chunks_mut::<8>().0.iter_mut().zip(p[i].as_chunks_mut::<8>().0);
        for (((kk, qk), (a, p)), gamma) in scores.zip(out).zip(&gamma.as_chunks::<8>().0[..blocks]) {
            let gamma = load(gamma);
            store(a, _mm256_mul_ps(_mm256_mul_ps(beta, gamma), load(kk)));
            store(p, _mm256_mul_ps(gamma, load(qk)));
        }
        let end = (i + 1).next_multiple_of(4);
        a[i][i..end].fill(0.0);
        p[i][i + 1..end].fill(0.0);
    }
    for i in count..count.next_multiple_of(4) {
        a[i].fill(0.0);
        p[i].fill(0.0);
    }
    decays.to_end[..count].copy_from_slice(&gamma[..count]);
    decays
}

/// Four rows of `V′`: `V′_i = fresh_i − Σ_{j<i} A_ij V′_j`, in place.
#[inline]
#[target_feature(enable = "avx2,fma")]
fn substitute(a: &[[f32; CHUNK]], fresh: &mut [[f32; TILE]], i: usize) {
    let (done, rows) = fresh.split_at_mut(i);
    let [a0, a1, a2, a3] = a[i..].first_chunk::<4>().expect("rows come in fours");
    let mut sums = [[_mm256_setzero_ps(); 2]; 4];
    for ((((a0, a1), a2), a3), done) in a0.iter().zip(a1).zip(a2).zip(a3).zip(done.iter()) {
        multiply(&mut sums, [*a0, *a1, *a2, *a3], done);
    }
    for m in 0..4 {
        let right = get(&rows[m]);
        let mut solved = [0, 1].map(|j| _mm256_sub_ps(right[j], sums[m][j]));
        for earlier in 0..m {
            let factor = _mm256_set1_ps(a[i + m][i + earlier]);
            let x = get(&rows[earlier]);
            solved = [0, 1].map(|j| _mm256_fnmadd_ps(factor, x[j], solved[j]));
        }
        put(&mut rows[m], solved);
    }
}

/// `out = X S` for the rows of `x` `[tokens, d_k]` and a tile of `S`; rows past the end repeat the last one.
#[inline]
#[target_feature(enable = "avx2,fma")]
fn product(x: &[f32], d_k: usize, tile: &[[f32; TILE]], out: &mut [[f32; TILE]]) {
    let count = x.len() / d_k;
    for (block, out) in out.as_chunks_mut::<4>().0[..count.div_ceil(4)].iter_mut().enumerate() {
        let a = four_rows(x, 4 * block, d_k);
        let mut sums = [[_mm256_setzero_ps(); 2]; 4];
        for ((((a0, a1), a2), a3), s) in a[0].iter().zip(a[1]).zip(a[2]).zip(a[3]).zip(tile) {
            multiply(&mut sums, [*a0, *a1, *a2, *a3], s);
        }
        for (out, sums) in out.iter_mut().zip(sums) {
            put(out, sums);
        }
    }
}

/// Rows `i..i + 4`; past the end the last row again, whose products nobody reads.
#[inline]
fn four_rows(x: &[f32], i: usize, width: usize) -> [&[f32]; 4] {
    let last = x.len() / width - 1;
    [0, 1, 2, 3].map(|m| &x[(i + m).min(last) * width..][..width])
}

/// `sums += a bᵀ`.
#[inline]
#[target_feature(enable = "avx2,fma")]
fn multiply(sums: &mut Sums, a: [f32; 4], b: &[f32; TILE]) {
    let b = get(b);
    for (sums, a) in sums.iter_mut().zip(a) {
        let a = _mm256_set1_ps(a);
        sums[0] = _mm256_fmadd_ps(a, b[0], sums[0]);
        sums[1] = _mm256_fmadd_ps(a, b[1], sums[1]);
    }
}

#[inline]
#[target_feature(enable = "avx2,fma")]
fn get(x: &[f32; TILE]) -> [__m256; 2] {
    let [low, high] = x.as_chunks::<8>().0 else { unreachable!() };
    [load(low), load(high)]
}

#[inline]
#[target_feature(enable = "avx2,fma")]
fn put(x: &mut [f32; TILE], values: [__m256; 2]) {
    let [low, high] = x.as_chunks_mut::<8>().0 else { unreachable!() };
    store(low, values[0]);
    store(high, values[1]);
}

//! Token by token, with two passes over the state instead of four.
//!
//! With `d = exp(g)`, the first pass reads `p = Sᵀk` and `r = Sᵀq` from the state before the token; then `u = β (v − d p)` and
//! `o = d r + (k·q) u`; the second pass writes `S ← d S + k uᵀ`. Columns of `S` are independent of each other.

use core::arch::x86_64::*;

use super::lanes::{cut, dot, load, padded, put_tile, store, take_tile};
use crate::cpu::Rule;

/// Columns of the state that are carried through all tokens at a time: `d_k` rows of them stay in the first-level cache, and their
/// eight sums keep the multipliers busy.
const TILE: usize = 32;

/// From this many tokens on, copying a tile of the state out and back is cheaper than reaching for it in the second-level cache.
const TILED_FROM: usize = 3;

#[target_feature(enable = "avx2,fma")]
pub(super) fn recurrent(rule: &Rule<'_>, s: &mut [f32], o: &mut [f32], work: &mut [f32]) {
    if rule.beta.len() < TILED_FROM {
        in_place(rule, s, o, work);
    } else {
        tiled(rule, s, o, work);
    }
}

/// Reads and writes the state where it is, from front to back.
#[target_feature(enable = "avx2,fma")]
pub(super) fn in_place(rule: &Rule<'_>, s: &mut [f32], o: &mut [f32], work: &mut [f32]) {
    let (d_k, d_v) = (rule.d_k, rule.d_v);
    let (p, work) = work.split_at_mut(d_v);
    let r = &mut work[..d_v];
    for t in 0..rule.beta.len() {
        let (q, k) = (&rule.q[t * d_k..][..d_k], &rule.k[t * d_k..][..d_k]);
        p.fill(0.0);
        r.fill(0.0);
        for ((rows, k), q) in s.chunks_exact(4 * d_v).zip(k.as_chunks::<4>().0).zip(q.as_chunks::<4>().0) {
            read_rows(rows, k, q, p, r);
        }
        let (decay, beta) = (_mm256_set1_ps(rule.decay[t]), _mm256_set1_ps(rule.beta[t]));
        let kq = _mm256_set1_ps(dot(k, q));
        let v = rule.v[t * d_v..][..d_v].as_chunks::<8>().0;
        let o = o[t * d_v..][..d_v].as_chunks_mut::<8>().0;
        // `p` becomes `u`.
        let sums = p.as_chunks_mut::<8>().0.iter_mut().zip(r.as_chunks::<8>().0);
        for ((p, r), (v, o)) in sums.zip(v.iter().zip(o)) {
            let u = _mm256_mul_ps(beta, _mm256_fnmadd_ps(decay, load(p), load(v)));
            store(o, _mm256_fmadd_ps(kq, u, _mm256_mul_ps(decay, load(r))));
            store(p, u);
        }
        for (row, &k) in s.chunks_exact_mut(d_v).zip(k) {
            let k = _mm256_set1_ps(k);
            for (s, u) in row.as_chunks_mut::<8>().0.iter_mut().zip(p.as_chunks::<8>().0) {
                store(s, _mm256_fmadd_ps(k, load(u), _mm256_mul_ps(decay, load(s))));
            }
        }
    }
}

/// `p += Σ k_i rows_i` and `r += Σ q_i rows_i` for four rows, in their order.
#[inline]
#[target_feature(enable = "avx2,fma")]
fn read_rows(rows: &[f32], k: &[f32; 4], q: &[f32; 4], p: &mut [f32], r: &mut [f32]) {
    let k = k.map(|k| _mm256_set1_ps(k));
    let q = q.map(|q| _mm256_set1_ps(q));
    let d_v = p.len();
    let (s0, rows) = rows.split_at(d_v);
    let (s1, rows) = rows.split_at(d_v);
    let (s2, s3) = rows.split_at(d_v);
    let s01 = s0.as_chunks::<8>().0.iter().zip(s1.as_chunks::<8>().0);
    let s23 = s2.as_chunks::<8>().0.iter().zip(s3.as_chunks::<8>().0);
    let sums = p.as_chunks_mut::<8>().0.iter_mut().zip(r.as_chunks_mut::<8>().0);
    for ((p, r), ((s0, s1), (s2, s3))) in sums.zip(s01.zip(s23)) {
        let (mut kp, mut qr) = (load(p), load(r));
        let s = [load(s0), load(s1), load(s2), load(s3)];
        for i in 0..4 {
            kp = _mm256_fmadd_ps(s[i], k[i], kp);
            qr = _mm256_fmadd_ps(s[i], q[i], qr);
        }
        store(p, kp);
        store(r, qr);
    }
}

/// Carries a tile of columns through all tokens, then the next. The same operations on every element as [`in_place`], in the same order.
#[target_feature(enable = "avx2,fma")]
pub(super) fn tiled(rule: &Rule<'_>, s: &mut [f32], o: &mut [f32], work: &mut [f32]) {
    let (d_k, d_v) = (rule.d_k, rule.d_v);
    let tile = &mut work.as_chunks_mut::<TILE>().0[..d_k];
    for column in (0..d_v).step_by(TILE) {
        take_tile(s, d_v, column, tile);
        for t in 0..rule.beta.len() {
            let (q, k) = (&rule.q[t * d_k..][..d_k], &rule.k[t * d_k..][..d_k]);
            let v = padded(&rule.v[t * d_v..][column..d_v]);
            let o_tile = step(tile, q, k, &v, rule.decay[t], rule.beta[t]);
            cut(&o_tile, &mut o[t * d_v..][column..d_v]);
        }
        put_tile(tile, s, d_v, column);
    }
}

/// One token over one tile.
#[inline]
#[target_feature(enable = "avx2,fma")]
fn step(
    tile: &mut [[f32; TILE]],
    q: &[f32],
    k: &[f32],
    v: &[f32; TILE],
    decay: f32,
    beta: f32,
) -> [f32; TILE] {
    let mut p = [_mm256_setzero_ps(); TILE / 8];
    let mut r = [_mm256_setzero_ps(); TILE / 8];
    for ((row, &k), &q) in tile.iter().zip(k).zip(q) {
        let (k, q) = (_mm256_set1_ps(k), _mm256_set1_ps(q));
        for (j, s) in row.as_chunks::<8>().0.iter().enumerate() {
            let s = load(s);
            p[j] = _mm256_fmadd_ps(s, k, p[j]);
            r[j] = _mm256_fmadd_ps(s, q, r[j]);
        }
    }
    let kq = _mm256_set1_ps(dot(k, q));
    let (decay, beta) = (_mm256_set1_ps(decay), _mm256_set1_ps(beta));
    let mut out = [0.0; TILE];
    let mut u = [_mm256_setzero_ps(); TILE / 8];
    for (j, (v, o)) in v.as_chunks::<8>().0.iter().zip(out.as_chunks_mut::<8>().0).enumerate() {
        u[j] = _mm256_mul_ps(beta, _mm256_fnmadd_ps(decay, p[j], load(v)));
        store(o, _mm256_fmadd_ps(kq, u[j], _mm256_mul_ps(decay, r[j])));
    }
    for (row, &k) in tile.iter_mut().zip(k) {
        let k = _mm256_set1_ps(k);
        for (j, s) in row.as_chunks_mut::<8>().0.iter_mut().enumerate() {
            store(s, _mm256_fmadd_ps(k, u[j], _mm256_mul_ps(decay, load(s))));
        }
    }
    out
}

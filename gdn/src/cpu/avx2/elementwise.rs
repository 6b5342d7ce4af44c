//! Everything around the delta rule.

use core::arch::x86_64::*;

use super::lanes::{dot, load, silu, store};
use crate::cpu::{Conv, Kernels, Scalar};
use crate::reference::L2_EPS;

#[target_feature(enable = "avx2,fma")]
pub(super) fn transpose(taps: &[f32], kernel: usize, out: &mut [f32]) {
    if kernel != 4 {
        return Scalar.transpose(taps, kernel, out);
    }
    let width = taps.len() / 4;
    let (w0, rest) = out.split_at_mut(width);
    let (w1, rest) = rest.split_at_mut(width);
    let (w2, w3) = rest.split_at_mut(width);
    let channels = taps.as_chunks::<32>().0.iter();
    let out = w0.as_chunks_mut::<8>().0.iter_mut().zip(w1.as_chunks_mut::<8>().0);
    let out = out.zip(w2.as_chunks_mut::<8>().0.iter_mut().zip(w3.as_chunks_mut::<8>().0));
    for (taps, ((w0, w1), (w2, w3))) in channels.zip(out) {
        let [a, b, c, d] = taps.as_chunks::<8>().0 else { unreachable!() };
        // Channels 0 and 4, 1 and 5, 2 and 6, 3 and 7, one in each half, then a 4 x 4 transposition within the halves.
        let (a, b, c, d) = (load(a), load(b), load(c), load(d));
        let (c04, c15) = (_mm256_permute2f128_ps::<0x20>(a, c), _mm256_permute2f128_ps::<0x31>(a, c));
        let (c26, c37) = (_mm256_permute2f128_ps::<0x20>(b, d), _mm256_permute2f128_ps::<0x31>(b, d));
        let (low01, high01) = (_mm256_unpacklo_ps(c04, c15), _mm256_unpackhi_ps(c04, c15));
        let (low23, high23) = (_mm256_unpacklo_ps(c26, c37), _mm256_unpackhi_ps(c26, c37));
        store(w0, _mm256_shuffle_ps::<0x44>(low01, low23));
        store(w1, _mm256_shuffle_ps::<0xee>(low01, low23));
        store(w2, _mm256_shuffle_ps::<0x44>(high01, high23));
        store(w3, _mm256_shuffle_ps::<0xee>(high01, high23));
    }
}

#[target_feature(enable = "avx2,fma")]
pub(super) fn conv_silu(conv: &Conv<'_>, first: usize, out: &mut [f32]) {
    for (t, out) in out.chunks_exact_mut(conv.width).enumerate() {
        let out = out.as_chunks_mut::<8>().0;
        if conv.kernel == 4 {
            let [w0, w1, w2, w3] =
                [0, 1, 2, 3].map(|j| conv.taps[j * conv.width..][..conv.width].as_chunks::<8>().0);
            let [x0, x1, x2, x3] = [0, 1, 2, 3].map(|j| conv.row(first + t, j).as_chunks::<8>().0);
            let early = x0.iter().zip(w0).zip(x1.iter().zip(w1));
            let late = x2.iter().zip(w2).zip(x3.iter().zip(w3));
            for (out, (((x0, w0), (x1, w1)), ((x2, w2), (x3, w3)))) in out.iter_mut().zip(early.zip(late)) {
                let y = _mm256_mul_ps(load(x0), load(w0));
                let y = _mm256_fmadd_ps(load(x1), load(w1), y);
                let y = _mm256_fmadd_ps(load(x2), load(w2), y);
                store(out, silu(_mm256_fmadd_ps(load(x3), load(w3), y)));
            }
            continue;
        }
        for (j, taps) in conv.taps.chunks_exact(conv.width).enumerate() {
            let operands = conv.row(first + t, j).as_chunks::<8>().0.iter().zip(taps.as_chunks::<8>().0);
            for (out, (x, tap)) in out.iter_mut().zip(operands) {
                let before = if j == 0 { _mm256_setzero_ps() } else { load(out) };
                store(out, _mm256_fmadd_ps(load(x), load(tap), before));
            }
        }
        for out in out {
            store(out, silu(load(out)));
        }
    }
}

#[target_feature(enable = "avx2,fma")]
pub(super) fn l2_normalise(rows: &mut [f32], width: usize, scale: f32) {
    for row in rows.chunks_exact_mut(width) {
        let factor = _mm256_set1_ps(scale / (dot(row, row) + L2_EPS).sqrt());
        for x in row.as_chunks_mut::<8>().0 {
            store(x, _mm256_mul_ps(load(x), factor));
        }
    }
}

#[target_feature(enable = "avx2,fma")]
pub(super) fn gated_norm(o: &[f32], norm: &[f32], eps: f32, z: &[f32], out: &mut [f32]) {
    let factor = _mm256_set1_ps(1.0 / (dot(o, o) / o.len() as f32 + eps).sqrt());
    let (o, norm, z) = (o.as_chunks::<8>().0, norm.as_chunks::<8>().0, z.as_chunks::<8>().0);
    for (((o, norm), z), out) in o.iter().zip(norm).zip(z).zip(out.as_chunks_mut::<8>().0) {
        let normed = _mm256_mul_ps(_mm256_mul_ps(load(o), factor), load(norm));
        store(out, _mm256_mul_ps(normed, silu(load(z))));
    }
}

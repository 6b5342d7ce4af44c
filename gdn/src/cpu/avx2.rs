//! AVX2 and FMA. Head dims are multiples of 8.

mod chunked;
mod elementwise;
mod lanes;
mod recurrent;
#[cfg(test)]
mod tests;

use super::{Conv, Kernels, Rule};

/// Proof that this machine has AVX2 and FMA.
#[derive(Clone, Copy)]
pub(crate) struct Avx2(());

impl Avx2 {
    pub(crate) fn detect() -> Option<Self> {
        let present = std::is_x86_feature_detected!("avx2") && std::is_x86_feature_detected!("fma");
        present.then_some(Self(()))
    }
}

impl Kernels for Avx2 {
    fn prefers_chunks(self, tokens: usize) -> bool {
        // Measured on Sapphire Rapids with heads of 128: equal at 4 tokens, a tenth faster at 8 to 32, a twentieth on long spans.
        tokens >= 8
    }

    fn transpose(self, taps: &[f32], kernel: usize, out: &mut [f32]) {
        // SAFETY: an `Avx2` exists only where the features do.
        unsafe { elementwise::transpose(taps, kernel, out) }
    }

    fn conv_silu(self, conv: &Conv<'_>, first: usize, out: &mut [f32]) {
        // SAFETY: an `Avx2` exists only where the features do.
        unsafe { elementwise::conv_silu(conv, first, out) }
    }

    fn l2_normalise(self, rows: &mut [f32], width: usize, scale: f32) {
        // SAFETY: an `Avx2` exists only where the features do.
        unsafe { elementwise::l2_normalise(rows, width, scale) }
    }

    fn scores(self, q: &[f32], k: &[f32], d_k: usize, scores: &mut [f32]) {
        // SAFETY: an `Avx2` exists only where the features do.
        unsafe { chunked::scores(q, k, d_k, scores) }
    }

    fn chunked(self, rule: &Rule<'_>, scores: &[f32], s: &mut [f32], o: &mut [f32], work: &mut [f32]) {
        // SAFETY: an `Avx2` exists only where the features do.
        unsafe { chunked::chunked(rule, scores, s, o, work) }
    }

    fn recurrent(self, rule: &Rule<'_>, s: &mut [f32], o: &mut [f32], work: &mut [f32]) {
        // SAFETY: an `Avx2` exists only where the features do.
        unsafe { recurrent::recurrent(rule, s, o, work) }
    }

    fn gated_norm(self, o: &[f32], norm: &[f32], eps: f32, z: &[f32], out: &mut [f32]) {
        // SAFETY: an `Avx2` exists only where the features do.
        unsafe { elementwise::gated_norm(o, norm, eps, z, out) }
    }
}

//! The steps of the mixer as kernels over one head and at most [`CHUNK`](crate::CHUNK) tokens, one implementation per ISA family.

#[cfg(target_arch = "x86_64")]
pub(crate) mod avx2;
mod scalar;

pub(crate) use scalar::Scalar;

use crate::form::CHUNK;
use crate::shape::Shape;

/// One head's causal convolution over a span.
pub(crate) struct Conv<'a> {
    pub(crate) kernel: usize,
    /// Channels of the head.
    pub(crate) width: usize,
    /// `[kernel - 1, width]`: raw rows before the span.
    pub(crate) history: &'a [f32],
    /// `[kernel, width]`
    pub(crate) taps: &'a [f32],
    /// Raw rows from the span's first one on, `stride` apart; the head's channels start at `column`.
    pub(crate) rows: &'a [f32],
    pub(crate) stride: usize,
    pub(crate) column: usize,
}

impl Conv<'_> {
    /// The raw row that tap `j` meets at token `t` of the span.
    #[inline]
    pub(crate) fn row(&self, t: usize, j: usize) -> &[f32] {
        match (t + j).checked_sub(self.kernel - 1) {
            Some(row) => &self.rows[row * self.stride + self.column..][..self.width],
            None => &self.history[(t + j) * self.width..][..self.width],
        }
    }
}

/// The operands of the gated delta rule for one head and at most [`CHUNK`] tokens.
pub(crate) struct Rule<'a> {
    pub(crate) d_k: usize,
    pub(crate) d_v: usize,
    /// `[tokens, d_k]`, normalised and scaled.
    pub(crate) q: &'a [f32],
    /// `[tokens, d_k]`, normalised.
    pub(crate) k: &'a [f32],
    /// `[tokens, d_v]`
    pub(crate) v: &'a [f32],
    /// Log decay `[tokens]`.
    pub(crate) g: &'a [f32],
    /// `exp(g)`.
    pub(crate) decay: &'a [f32],
    /// Write strength `[tokens]`, between 0 and 1.
    pub(crate) beta: &'a [f32],
}

/// One implementation of the steps. The value of such a type proves that its instructions exist.
pub(crate) trait Kernels: Copy + Send + Sync {
    /// Whether the chunked form is the faster one for a span of so many tokens.
    fn prefers_chunks(self, tokens: usize) -> bool;
    /// `taps` `[width, kernel]` to `[kernel, width]`.
    fn transpose(self, taps: &[f32], kernel: usize, out: &mut [f32]);
    /// Tokens `first..` of the span, as many as `out` `[_, width]` has rows.
    fn conv_silu(self, conv: &Conv<'_>, first: usize, out: &mut [f32]);
    /// `x ← scale · x / |x|` per row of `width`.
    fn l2_normalise(self, rows: &mut [f32], width: usize, scale: f32);
    /// What [`chunked`](Self::chunked) needs of queries and keys alone, shared by the value heads of a key head.
    fn scores(self, q: &[f32], k: &[f32], d_k: usize, scores: &mut [f32]);
    /// One chunk of the chunked form: `s` `[d_k, d_v]`, `o` `[tokens, d_v]`.
    fn chunked(self, rule: &Rule<'_>, scores: &[f32], s: &mut [f32], o: &mut [f32], work: &mut [f32]);
    /// The tokens one after another: `s` `[d_k, d_v]`, `o` `[tokens, d_v]`.
    fn recurrent(self, rule: &Rule<'_>, s: &mut [f32], o: &mut [f32], work: &mut [f32]);
    /// Gated RMS norm of one head of one token.
    fn gated_norm(self, o: &[f32], norm: &[f32], eps: f32, z: &[f32], out: &mut [f32]);
}

/// Elements of the scratch slices the kernels are given.
pub(crate) struct Sizes {
    pub(crate) scores: usize,
    pub(crate) work: usize,
}

/// Enough scratch for every implementation.
pub(crate) fn sizes(d_k: usize, d_v: usize) -> Sizes {
    Sizes {
        scores: 2 * CHUNK * CHUNK + d_k * CHUNK,
        work: 3 * CHUNK * CHUNK + (d_k * 32).max(16 * (d_k + 2 * CHUNK)) + 3 * d_v,
    }
}

/// The instruction sets this crate has kernels for.
#[derive(Clone, Copy)]
pub(crate) enum Isa {
    #[cfg(target_arch = "x86_64")]
    Avx2(avx2::Avx2),
    Scalar,
}

impl Isa {
    /// The best one this machine has, this shape fits and `SKEP_ISA` allows.
    pub(crate) fn for_shape(shape: &Shape) -> Self {
        #[cfg(target_arch = "x86_64")]
        if shape.head_k_dim().is_multiple_of(8)
            && shape.head_v_dim().is_multiple_of(8)
            && skep_quant::Isa::forced() != Some(skep_quant::Isa::Scalar)
            && let Some(kernels) = avx2::Avx2::detect()
        {
            return Self::Avx2(kernels);
        }
        Self::Scalar
    }
}

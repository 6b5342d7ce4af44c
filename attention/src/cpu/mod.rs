//! Inner loops of [`prepare`](crate::prepare()) and [`attend`](crate::attend()), one type per instruction set.
//!
//! A value of such a type proves that the processor has the instructions, so its methods are safe.

#[cfg(target_arch = "x86_64")]
mod avx2;
mod scalar;

use core::ops::Range;

#[cfg(target_arch = "x86_64")]
pub(crate) use avx2::Avx2;
pub(crate) use scalar::Scalar;

/// Keys per block: what is widened and scored together. Blocks start at multiples of it, whatever the batch.
pub(crate) const KEYS: usize = 32;

/// Rows in working memory are padded with zeros to a multiple of this.
pub(crate) const PAD: usize = 16;

/// Inner loops on padded rows (`dim` is a multiple of [`PAD`]).
///
/// Each result is a fixed sequence of operations on its own inputs, so that it is the same to the bit whatever other queries, keys
/// or dimensions a call handles.
pub(crate) trait Isa: Copy + Send + Sync {
    /// Half precision to f32.
    fn widen(self, from: &[u16], to: &mut [f32]);

    /// F32 to half precision as [`cache::narrow`](crate::cache::narrow).
    fn narrow(self, from: &[f32], to: &mut [u16]);

    /// RMS normalisation of one (unpadded) head.
    fn rms_norm(self, head: &mut [f32], weight: Option<&[f32]>, eps: f32);

    /// `scores[i, j] = scale · q[i]·k[j]` for all queries `q` `[n, dim]` and at least the keys `keys` of a block `k` `[KEYS, dim]`;
    /// `scores` is `[n, KEYS]`, other entries of which may be overwritten with anything.
    fn scores(self, q: &[f32], k: &[f32], dim: usize, keys: Range<usize>, scale: f32, scores: &mut [f32]);

    /// One step of an online softmax (Milakov and Gimelshein 2018, <https://arxiv.org/abs/1805.02867>): turns the scores of the
    /// keys `seen` into `exp(score - max)`, the others into zero, and updates the running maximum and sum. Returns the factor for
    /// what was accumulated before.
    fn softmax(self, scores: &mut [f32; KEYS], seen: Range<usize>, max: &mut f32, sum: &mut f32) -> f32;

    /// `acc[i] += Σ_j weights[i, j] · v[j]` over the keys `keys` of a block `v` `[KEYS, dim]`, in order; `weights` is `[n, KEYS]`,
    /// `acc` is `[n, dim]`.
    fn weigh(self, weights: &[f32], v: &[f32], dim: usize, keys: Range<usize>, acc: &mut [f32]);

    /// `acc = acc · factor`.
    fn scale(self, acc: &mut [f32], factor: f32);

    /// `acc = acc · a + part · b`.
    fn merge(self, acc: &mut [f32], a: f32, part: &[f32], b: f32);

    /// `out = acc · factor`, times the logistic function of `gate` if there is one.
    fn finish(self, acc: &[f32], factor: f32, gate: Option<&[f32]>, out: &mut [f32]);
}

/// Runs `$body` with `$isa` bound to the best instruction set of this processor.
macro_rules! with_isa {
    ($isa:ident => $body:expr) => {{
        #[cfg(target_arch = "x86_64")]
        {
            if let Some($isa) = crate::cpu::Avx2::detect() {
                $body
            } else {
                let $isa = crate::cpu::Scalar;
                $body
            }
        }
        #[cfg(not(target_arch = "x86_64"))]
        {
            let $isa = crate::cpu::Scalar;
            $body
        }
    }};
}
pub(crate) use with_isa;

#[cfg(test)]
mod tests;

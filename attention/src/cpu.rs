//! Inner loops of [`prepare`](crate::prepare()) and [`attend`](crate::attend()), one type per instruction set.
//!
//! A value of such a type proves that the processor has the instructions, so its methods are safe.

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod scalar;

use core::marker::PhantomData;
use core::ops::Range;

use crate::cache::Values;

#[cfg(target_arch = "x86_64")]
pub(crate) use avx2::Avx2;
#[cfg(target_arch = "x86_64")]
pub(crate) use avx512::Avx512;
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
    /// `scores` is `[n, KEYS]`, other entries of which may be overwritten with anything. Meanwhile fetches `ahead`.
    fn scores(
        self,
        q: &[f32],
        k: &[f32],
        dim: usize,
        keys: Range<usize>,
        scale: f32,
        scores: &mut [f32],
        ahead: Ahead<'_>,
    );

    /// One step of an online softmax (Milakov and Gimelshein 2018, <https://arxiv.org/abs/1805.02867>): turns the scores of the
    /// keys `seen` into `exp(score - max)`, the others into zero, and updates the running maximum and sum. Returns the factor for
    /// what was accumulated before.
    fn softmax(self, scores: &mut [f32; KEYS], seen: Range<usize>, max: &mut f32, sum: &mut f32) -> f32;

    /// `acc[i] += Σ_j weights[i, j] · v[j]` over the keys `keys` of a block `v` `[KEYS, dim]`, in order; `weights` is `[n, KEYS]`,
    /// `acc` is `[n, dim]`. Meanwhile fetches `ahead`.
    fn weigh(
        self,
        weights: &[f32],
        v: &[f32],
        dim: usize,
        keys: Range<usize>,
        acc: &mut [f32],
        ahead: Ahead<'_>,
    );

    /// `acc = acc · factor`.
    fn scale(self, acc: &mut [f32], factor: f32);

    /// `acc = acc · a + part · b`.
    fn merge(self, acc: &mut [f32], a: f32, part: &[f32], b: f32);

    /// `out = acc · factor`, times the logistic function of `gate` if there is one.
    fn finish(self, acc: &[f32], factor: f32, gate: Option<&[f32]>, out: &mut [f32]);
}

/// Cached values that will be needed next, to be brought into the processor's cache bit by bit beside arithmetic.
#[derive(Clone, Copy)]
pub(crate) struct Ahead<'a> {
    next: *const i8,
    bytes: usize,
    step: usize,
    values: PhantomData<Values<'a>>,
}

impl<'a> Ahead<'a> {
    /// Nothing to fetch.
    pub(crate) const NONE: Self = Self { next: core::ptr::null(), bytes: 0, step: 0, values: PhantomData };

    pub(crate) fn new(values: Values<'a>) -> Self {
        let (next, bytes) = match values {
            Values::F16(bits) => (bits.as_ptr().cast(), size_of_val(bits)),
            Values::F32(values) => (values.as_ptr().cast(), size_of_val(values)),
        };
        Self { next, bytes, step: 0, values: PhantomData }
    }

    /// Spreads the rest over `steps` calls of [`step`](Self::step).
    #[cfg(target_arch = "x86_64")]
    fn spread(mut self, steps: usize) -> Self {
        self.step = self.bytes.div_ceil(steps.max(1)).next_multiple_of(64);
        self
    }

    #[cfg(target_arch = "x86_64")]
    #[inline]
    #[target_feature(enable = "sse")]
    fn step(&mut self) {
        use core::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};

        for line in (0..self.step.min(self.bytes)).step_by(64) {
            // SAFETY: a prefetch faults at no address. Newer compilers know that.
            #[allow(unused_unsafe)]
            unsafe {
                _mm_prefetch::<_MM_HINT_T0>(self.next.wrapping_add(line));
            }
        }
        self.next = self.next.wrapping_add(self.step);
        self.bytes = self.bytes.saturating_sub(self.step);
    }
}

/// Runs `$body` with `$isa` bound to the best instruction set of this processor, or to what `SKEP_ISA` allows of it.
macro_rules! with_isa {
    ($isa:ident => $body:expr) => {{
        #[cfg(target_arch = "x86_64")]
        {
            let forced = skep_quant::Isa::forced();
            let (scalar, avx2) = (Some(skep_quant::Isa::Scalar), Some(skep_quant::Isa::Avx2));
            if forced != scalar
                && forced != avx2
                && let Some($isa) = crate::cpu::Avx512::detect()
            {
                $body
            } else if forced != scalar
                && let Some($isa) = crate::cpu::Avx2::detect()
            {
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

/// Runs `$check` for every instruction set that this processor has.
#[cfg(test)]
macro_rules! for_each_isa {
    ($isa:ident => $check:block) => {{
        {
            let $isa = crate::cpu::Scalar;
            $check
        }
        #[cfg(target_arch = "x86_64")]
        match crate::cpu::Avx2::detect() {
            Some($isa) => $check,
            None => std::eprintln!("skipped: no AVX2, FMA and F16C here"),
        }
        #[cfg(target_arch = "x86_64")]
        match crate::cpu::Avx512::detect() {
            Some($isa) => $check,
            None => std::eprintln!("skipped: no AVX-512 here"),
        }
    }};
}
#[cfg(test)]
pub(crate) use for_each_isa;

#[cfg(test)]
mod tests;

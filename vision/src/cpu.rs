//! Kernels for what is not a product with weights: attention and the gate of the feed-forward.

#[cfg(target_arch = "x86_64")]
mod attend;
#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod scalar;

use skep_quant::Isa;

use crate::Activation;

/// Tokens of a block: its keys and values come from memory once for as many queries. A multiple of what every instruction
/// set takes at a time.
pub(crate) const BLOCK: usize = 96;

/// Queries, keys and values of all heads, `[blocks, heads, BLOCK, dim]` each: token `i` lies in block `i / BLOCK` at
/// `i % BLOCK`. Rows past the last token hold anything.
pub(crate) struct Heads<'a> {
    pub(crate) q: &'a [f32],
    pub(crate) k: &'a [f32],
    pub(crate) v: &'a [f32],
    /// Tokens.
    pub(crate) n: usize,
    pub(crate) heads: usize,
    /// Dimensions of a head.
    pub(crate) dim: usize,
}

impl<'a> Heads<'a> {
    /// The part of `of` with one block of one head, without rows past the last token.
    #[inline]
    fn block(&self, of: &'a [f32], block: usize, head: usize) -> &'a [f32] {
        let rows = BLOCK.min(self.n - block * BLOCK);
        &of[(block * self.heads + head) * BLOCK * self.dim..][..rows * self.dim]
    }

    fn blocks(&self) -> usize {
        self.n.div_ceil(BLOCK)
    }
}

/// The kernels of one instruction set.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Kernels {
    /// Softmax attention without mask and with scale 1 for the tokens of one block: writes `[tokens, heads * dim]`.
    pub(crate) attend: fn(&Heads<'_>, usize, &mut [f32]),
    /// `gate = act(gate) * up`
    pub(crate) gate: fn(Activation, &mut [f32], &[f32]),
}

const SCALAR: Kernels = Kernels { attend: scalar::attend, gate: scalar::gate };

#[cfg(target_arch = "x86_64")]
const AVX2: Kernels = Kernels {
    // SAFETY: `of` gives the kernels out for a processor with the features only; so below.
    attend: |heads, block, out| unsafe { avx2::attend(heads, block, out) },
    // SAFETY: as above.
    gate: |activation, gate, up| unsafe { avx2::gate(activation, gate, up) },
};

#[cfg(target_arch = "x86_64")]
const AVX512: Kernels = Kernels {
    // SAFETY: as above.
    attend: |heads, block, out| unsafe { avx512::attend(heads, block, out) },
    // SAFETY: as above.
    gate: |activation, gate, up| unsafe { avx512::gate(activation, gate, up) },
};

impl Kernels {
    /// Those that the process uses.
    pub(crate) fn detect() -> Result<Self, skep_quant::Error> {
        Isa::detect().map(Self::of)
    }

    /// Those for `isa`.
    ///
    /// # Panics
    /// When the processor lacks it.
    pub(crate) fn of(isa: Isa) -> Self {
        assert!(isa.is_supported(), "the processor lacks {}", isa.name());
        match isa {
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => AVX2,
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => AVX512,
            _ => SCALAR,
        }
    }
}

#[cfg(test)]
mod tests;

//! Kernels for what is not a product with weights: attention and the gate of the feed-forward.

mod scalar;

use skep_quant::Isa;

use crate::Activation;

/// Tokens of a block of keys, a multiple of the queries of every instruction set.
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
    /// Queries that one call of `attend` takes.
    pub(crate) queries: usize,
    /// Softmax attention without mask and with scale 1, for up to `queries` tokens from a multiple of `queries` on:
    /// writes `[tokens, heads * dim]`. The value of a token does not depend on the others of the call.
    pub(crate) attend: fn(&Heads<'_>, usize, &mut [f32]),
    /// `gate = act(gate) * up`
    pub(crate) gate: fn(Activation, &mut [f32], &[f32]),
}

const SCALAR: Kernels = Kernels { queries: 16, attend: scalar::attend, gate: scalar::gate };

impl Kernels {
    /// Those that the process uses.
    pub(crate) fn detect() -> Result<Self, skep_quant::Error> {
        Isa::detect().map(Self::of)
    }

    /// Those for `isa`, which the processor has.
    pub(crate) fn of(isa: Isa) -> Self {
        match isa {
            _ => SCALAR,
        }
    }
}

//! Products of weight matrices with activation batches.

use alloc::vec::Vec;
use core::ops::Range;

use crate::cpu::Kernels;
use crate::parallel::Out;
use crate::{Activations, Forms, Matrix, Parallel};

/// How products are computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Precision {
    /// Integer dot products of weight codes with activations quantised to signed bytes. Weights stored as floats
    /// are multiplied as in [`Exact`](Self::Exact).
    Fast,
    /// Weights decoded to f32, f32 arithmetic in a fixed order.
    Exact,
}

/// One product of [`matmul`].
#[derive(Debug)]
pub struct Product<'a> {
    /// The weights, `[rows, cols]`.
    pub weight: Matrix<'a>,
    /// The results, `[n_tokens, rows]`.
    pub out: &'a mut [f32],
}

/// The tokens of a tile: a run of the batch, or any of its rows.
#[derive(Clone, Debug)]
pub(crate) enum Tokens<'a> {
    Run(Range<usize>),
    List(&'a [u32]),
}

impl Tokens<'_> {
    /// The batch row of the `i`-th token.
    #[inline]
    pub(crate) fn get(&self, i: usize) -> usize {
        match self {
            Self::Run(range) => range.start + i,
            Self::List(list) => list[i] as usize,
        }
    }
}

/// A tile of a product: all rows of `w` with some tokens of `acts`; shapes already agree.
pub(crate) struct Tile<'a> {
    pub(crate) w: Matrix<'a>,
    pub(crate) acts: &'a Activations,
    pub(crate) tokens: Tokens<'a>,
    pub(crate) out: Out<'a>,
}

/// Multiplies some weight rows with some activation rows on the calling thread:
/// `out[i * rows.len() + j]` is the dot product of weight row `rows.start + j` with activation row `tokens[i]`.
///
/// The value for a (row, token) pair has the same bits whatever the other rows and tokens of the call are, and
/// the same bits that [`matmul`] gives. Allocates only where a thread's buffer for packed floats has to grow.
///
/// # Panics
/// When `rows` does not lie in `w`, a token does not lie in `acts`, the columns differ, `out` is not
/// `tokens.len() * rows.len()` long, or `acts` lacks the form [`Forms::of`] names. When `SKEP_ISA` is unusable,
/// see [`Isa::detect`](crate::Isa::detect).
pub fn matmul_tile(
    w: Matrix<'_>,
    rows: Range<usize>,
    acts: &Activations,
    tokens: &[u32],
    precision: Precision,
    out: &mut [f32],
) {
    Kernels::active().matmul_tile(w, rows, acts, tokens, precision, out);
}

/// Multiplies several weight matrices with the same activation batch in one parallel region: for each product
/// `out[t * rows + r]` is the dot product of weight row `r` with activation row `t`.
///
/// Results do not depend on the number of workers, on the batch or on how the work was cut.
///
/// # Panics
/// As [`matmul_tile`].
pub fn matmul(par: &dyn Parallel, products: &mut [Product<'_>], acts: &Activations, precision: Precision) {
    Kernels::active().matmul(par, products, acts, precision);
}

/// Weight bytes per chunk: long enough to hide the hand-out of a chunk, short enough to balance the workers.
const CHUNK_BYTES: usize = 64 * 1024;
/// Rows are cut in multiples of this, the rows of a kernel's inner tile.
const ROW_STEP: usize = 8;
/// Tokens per chunk: their activations stay in the second-level cache.
const CHUNK_TOKENS: usize = 64;
/// Up to so many tokens a float product is limited by memory.
const FEW: usize = 8;
/// The tokens of a block of a float product: they share one decoding of the rows, as long as they stay in the second-level
/// cache.
const BLOCK_TOKENS: usize = 144;
const BLOCK_BYTES: usize = 1 << 20;
/// Blocks are whole groups of the tokens that the float kernels take at once.
pub(crate) const GROUP_TOKENS: usize = 24;

/// Tokens of a block of rows of `cols` elements.
pub(crate) fn block_tokens(cols: usize) -> usize {
    let fit = BLOCK_BYTES / 4 / cols.max(1) / GROUP_TOKENS * GROUP_TOKENS;
    fit.clamp(GROUP_TOKENS, BLOCK_TOKENS)
}

/// How one product is cut.
struct Cut {
    first_chunk: usize,
    row_step: usize,
    token_step: usize,
    token_chunks: usize,
}

impl Cut {
    fn new(w: &Matrix<'_>, n_tokens: usize, workers: usize, precision: Precision) -> Self {
        let float = precision == Precision::Exact || !w.ty().is_quantised();
        let (token_step, row_step) = if float && n_tokens > FEW {
            // Rows are decoded once for all tokens of a chunk, and tokens packed once for all its rows.
            let token_step = block_tokens(w.cols());
            let parts = (8 * workers).div_ceil(n_tokens.div_ceil(token_step));
            (token_step, w.rows().div_ceil(parts).max(128))
        } else {
            let fit = (CHUNK_BYTES / w.row_bytes().max(1)).min(w.rows().div_ceil(4 * workers));
            (CHUNK_TOKENS, fit.min(256))
        };
        // Equal parts, so that none is left over at the end.
        let row_step = match float {
            true => w.rows().div_ceil(w.rows().div_ceil(row_step.max(1)).max(1)),
            false => row_step,
        };
        let row_step = row_step.next_multiple_of(ROW_STEP).max(ROW_STEP);
        Self { first_chunk: 0, row_step, token_step, token_chunks: n_tokens.div_ceil(token_step) }
    }
}

impl Kernels {
    /// [`matmul_tile`] with these kernels.
    pub fn matmul_tile(
        &self,
        w: Matrix<'_>,
        rows: Range<usize>,
        acts: &Activations,
        tokens: &[u32],
        precision: Precision,
        out: &mut [f32],
    ) {
        check(&w, acts, precision);
        for &token in tokens {
            assert!((token as usize) < acts.n_tokens(), "token {token} of a batch of {}", acts.n_tokens());
        }
        let out = Out::new(out, tokens.len(), rows.len());
        self.tile(&mut Tile { w: w.rows_range(rows), acts, tokens: Tokens::List(tokens), out }, precision);
    }

    /// [`matmul`](crate::matmul()) with these kernels.
    pub fn matmul(
        &self,
        par: &dyn Parallel,
        products: &mut [Product<'_>],
        acts: &Activations,
        precision: Precision,
    ) {
        let n_tokens = acts.n_tokens();
        let mut n_chunks = 0;
        let parts: Vec<(Cut, Matrix<'_>, Out<'_>)> = products
            .iter_mut()
            .map(|product| {
                let w = product.weight;
                check(&w, acts, precision);
                let cut = Cut { first_chunk: n_chunks, ..Cut::new(&w, n_tokens, par.workers(), precision) };
                n_chunks += w.rows().div_ceil(cut.row_step) * cut.token_chunks;
                (cut, w, Out::new(product.out, n_tokens, w.rows()))
            })
            .collect();
        par.run(n_chunks, &|chunk| {
            let at = parts.partition_point(|(cut, ..)| cut.first_chunk <= chunk) - 1;
            let (cut, w, out) = &parts[at];
            let chunk = chunk - cut.first_chunk;
            // Tokens first: weights too large for the caches come from memory once, not once per token chunk.
            let (row_chunk, token_chunk) = (chunk / cut.token_chunks, chunk % cut.token_chunks);
            let start = row_chunk * cut.row_step;
            let rows = start..(start + cut.row_step).min(w.rows());
            let start = token_chunk * cut.token_step;
            let tokens = start..(start + cut.token_step).min(n_tokens);
            // SAFETY: chunks are disjoint rectangles, `Parallel` runs each once, and `out` itself is not written.
            let out = unsafe { out.part(tokens.clone(), rows.clone()) };
            self.tile(&mut Tile { w: w.rows_range(rows), acts, tokens: Tokens::Run(tokens), out }, precision);
        });
    }
}

fn check(w: &Matrix<'_>, acts: &Activations, precision: Precision) {
    assert_eq!(w.cols(), acts.cols(), "columns of the weights and of the activations");
    let form = Forms::of(w.ty(), precision);
    assert!(acts.forms().contains(form), "activations lack the form that {} weights need", w.ty());
}

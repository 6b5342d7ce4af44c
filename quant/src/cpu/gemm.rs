//! Float products with many tokens: a tile of rows and tokens at a time in registers, rows decoded to f32 once for a
//! block of tokens.
//!
//! The sums are those of the portable kernel, operation by operation: 32 partial sums per value, element `k` in sum
//! `k % 32`. Both operands are read along their rows, so that neither has to be turned round.

use alloc::vec::Vec;
use core::cell::RefCell;

use super::scalar::LANES;
use crate::Type;
use crate::matmul::Tile;

/// Elements of a row decoded at a time: a tile's rows and tokens of this length stay in the first-level cache. Whole
/// blocks of every type.
pub(super) const SPAN: usize = 1280;
/// Distance of the decoded rows of a tile: not a power of two, lest they fall in the same cache sets.
pub(super) const ROW: usize = SPAN + 16;
/// Tokens of a block share one decoding of the rows, as long as they stay in the second-level cache.
const MOST_TOKENS: usize = 144;
const TOKEN_BYTES: usize = 1 << 20;
/// A multiple of the tokens of every tile.
const TOKEN_STEP: usize = 12;
/// Fewer tokens or rows do not repay the packing.
const LEAST_TOKENS: usize = 4;
const LEAST_ROWS: usize = 16;

/// The partial sums of one value.
pub(super) type Sums = [f32; LANES];

/// The inner tile of an instruction set.
pub(super) struct Micro {
    /// Rows and tokens of the tile.
    pub(super) rows: usize,
    pub(super) tokens: usize,
    /// Decodes blocks of a type to f32.
    pub(super) decode: fn(Type, &[u8], &mut [f32]),
    /// `sums[t * rows + r] += w[r] * x[t]`, element by element, from zero if the flag is set: the rows of `w` lie
    /// [`ROW`] apart, the tokens of `x` the given number of elements; as many whole [`LANES`] as the last number says.
    pub(super) step: fn(&[f32], &[f32], usize, &mut [Sums], bool, usize),
    /// Adds up the partial sums: `out[i]` of `sums[i]`.
    pub(super) reduce: fn(&[Sums], &mut [f32]),
}

/// Whether [`exact`] is faster than one row after the other.
pub(super) fn pays(tile: &Tile<'_>) -> bool {
    tile.out.tokens() >= LEAST_TOKENS && tile.w.rows() >= LEAST_ROWS
}

/// Tokens that share one decoding of rows of `cols` elements.
pub(crate) fn token_block(cols: usize) -> usize {
    let fit = TOKEN_BYTES / (4 * stride(cols)) / TOKEN_STEP * TOKEN_STEP;
    fit.clamp(TOKEN_STEP, MOST_TOKENS)
}

/// Distance of packed tokens: whole lanes and a cache line.
fn stride(cols: usize) -> usize {
    cols.next_multiple_of(LANES) + 16
}

/// A cache line of floats.
#[derive(Clone, Copy, bytemuck::Zeroable, bytemuck::Pod)]
#[repr(C, align(64))]
struct Line([f32; 16]);

/// Memory of a thread.
#[derive(Default)]
struct Space {
    /// Tokens of a block, `[tokens, stride]`.
    x: Vec<Line>,
    /// Decoded rows of a tile, `[rows, ROW]`.
    w: Vec<Line>,
    /// Partial sums of all tiles of a block.
    sums: Vec<Line>,
}

/// At least `len` floats of a buffer that grows.
fn floats(lines: &mut Vec<Line>, len: usize) -> &mut [f32] {
    let n = len.div_ceil(16);
    if lines.len() < n {
        lines.resize(n, Line([0.0; 16]));
    }
    &mut bytemuck::must_cast_slice_mut(lines)[..len]
}

std::thread_local! {
    static SPACE: RefCell<Space> = RefCell::default();
}

pub(super) fn exact(micro: &Micro, tile: &mut Tile<'_>) {
    SPACE.with_borrow_mut(|space| {
        let n_tokens = tile.out.tokens();
        let block = token_block(tile.w.cols());
        for first in (0..n_tokens).step_by(block) {
            tokens(micro, tile, first, block.min(n_tokens - first), space);
        }
    });
}

/// The products of all rows with `n` tokens from `first` on.
fn tokens(micro: &Micro, tile: &mut Tile<'_>, first: usize, n: usize, space: &mut Space) {
    let (cols, stride) = (tile.w.cols(), stride(tile.w.cols()));
    let x = floats(&mut space.x, n.next_multiple_of(micro.tokens) * stride);
    for (i, packed) in x.chunks_exact_mut(stride).enumerate() {
        if i < n {
            packed[..cols].copy_from_slice(tile.acts.f32_row(tile.tokens.get(first + i)));
            // Times a weight of zero this is -0, which changes no sum.
            packed[cols..].fill(-0.0);
        } else {
            packed.fill(0.0);
        }
    }
    let values = micro.rows * micro.tokens;
    let w = floats(&mut space.w, micro.rows * ROW);
    let sums = floats(&mut space.sums, n.div_ceil(micro.tokens) * values * LANES);
    let sums = sums.as_chunks_mut::<LANES>().0;
    let (ty, n_rows) = (tile.w.ty(), tile.w.rows());
    let mut out = [0.0; 16];
    for row in (0..n_rows).step_by(micro.rows) {
        for from in (0..cols).step_by(SPAN) {
            let len = SPAN.min(cols - from);
            let bytes = from / ty.block_len() * ty.block_bytes()..(from + len) / ty.block_len() * ty.block_bytes();
            let whole = len.next_multiple_of(LANES);
            for (r, w) in w.chunks_exact_mut(ROW).enumerate().take(n_rows - row) {
                (micro.decode)(ty, &tile.w.row(row + r)[bytes.clone()], &mut w[..len]);
                w[len..whole].fill(0.0);
            }
            let x = x[from..].chunks(micro.tokens * stride);
            for (x, sums) in x.zip(sums.chunks_exact_mut(values)) {
                (micro.step)(w, x, stride, sums, from == 0, whole / LANES);
            }
        }
        let rows = micro.rows.min(n_rows - row);
        for (at, sums) in sums.chunks_exact(values).enumerate() {
            (micro.reduce)(sums, &mut out);
            let first = first + at * micro.tokens;
            for (t, out) in out.chunks_exact(micro.rows).enumerate().take(n - at * micro.tokens) {
                // A length known to the compiler is a store, any other a call.
                match out[..rows] {
                    [a, b, c, d] => tile.out.put(first + t, row, &[a, b, c, d]),
                    [a, b] => tile.out.put(first + t, row, &[a, b]),
                    ref out => tile.out.put(first + t, row, out),
                }
            }
        }
    }
}

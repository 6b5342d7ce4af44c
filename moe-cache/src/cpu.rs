//! The expert feed-forward on the CPU, over weights in GGUF blocks.
//!
//! For a token x with routes (e, w): `out += Σ w · down_e(act(gate_e · x) ⊙ (up_e · x))`, summed in rank order. Work is
//! grouped by expert, so that an expert's weights are read once for all of its tokens.

mod activation;
mod bank;
mod groups;

use alloc::vec::Vec;
use core::cell::RefCell;
use core::ops::Range;

use skep_quant::{Activations, Forms, Parallel, Precision, for_each_chunk_mut, matmul_tile};

pub use activation::Activation;
pub use bank::{Bank, Experts};

use crate::Routes;
use groups::{Group, Groups};

/// Tokens per tile: their activations stay in the second-level cache while weight rows pass by.
const TILE_TOKENS: usize = 64;
/// Most weight rows per chunk.
const MAX_ROWS: usize = 256;
/// Weight rows per chunk are a multiple of this.
const ROW_STEP: usize = 16;
/// What reading and unpacking a weight row costs, in products of that row with one token.
const ROW_COST: usize = 2;
/// Values a chunk of the down projection holds before they are summed per token: half a megabyte.
const MAX_SUMS: usize = 128 * 1024;

/// Buffers of [`experts`], reused from call to call.
#[derive(Debug, Default)]
pub struct Scratch {
    groups: Groups,
    /// `[n_pairs, ff]`, pairs in expert order: act(gate · x) ⊙ (up · x).
    hidden: Vec<f32>,
    hidden_acts: Activations,
}

impl Scratch {
    /// Empty buffers.
    pub fn new() -> Self {
        Self::default()
    }
}

std::thread_local! {
    /// A worker's buffer for the tiles of a chunk.
    static TILES: RefCell<Vec<f32>> = const { RefCell::new(Vec::new()) };
}

/// Adds the routed experts' outputs to `out`.
///
/// `acts` is the batch `[n_tokens, hidden]` in the forms that [`Experts::forms`] names, `routes` the experts of each
/// token, `out` `[n_tokens, hidden]`. For one token the weighted outputs are summed in rank order, and the sum is then
/// added to what `out` holds.
///
/// The bits of a token's result do not depend on the other tokens of the batch, on their number or order, or on the
/// number of workers.
///
/// # Panics
/// When the shapes of `acts`, `routes`, `out` and the experts disagree, a route names an expert that does not exist,
/// or `acts` lacks a form.
pub fn experts(
    par: &dyn Parallel,
    experts: &Experts<'_>,
    acts: &Activations,
    routes: &Routes,
    precision: Precision,
    scratch: &mut Scratch,
    out: &mut [f32],
) {
    let (n_tokens, top_k) = (routes.n_tokens(), routes.top_k());
    assert_eq!(acts.n_tokens(), n_tokens, "tokens of the activations and of the routes");
    assert_eq!(acts.cols(), experts.hidden(), "columns of the activations and of the experts");
    assert_eq!(out.len(), n_tokens * experts.hidden(), "output for {n_tokens} tokens x {}", experts.hidden());
    if n_tokens == 0 {
        return;
    }
    let Scratch { groups, hidden, hidden_acts } = scratch;
    groups.sort(experts.n_experts(), routes);
    hidden.resize(n_tokens * top_k * experts.ff(), 0.0);

    let mut parts = cut_hidden(groups, experts.ff(), par.workers(), hidden);
    for_each_chunk_mut(par, &mut parts, 1, |_, part| {
        gate_up(experts, acts, groups, precision, &mut part[0]);
    });
    drop(parts);

    hidden_acts.fill(par, hidden, experts.ff(), Forms::of(experts.down_type(), precision));

    let block = down_block(experts.hidden(), groups, par.workers());
    let mut parts = Vec::with_capacity(experts.hidden().div_ceil(block));
    cut(out, experts.hidden(), block, |rows, out| parts.push((rows, out)));
    for_each_chunk_mut(par, &mut parts, 1, |_, part| {
        let (rows, out) = &mut part[0];
        down(experts, hidden_acts, groups, routes, precision, rows.clone(), out);
    });
}

/// One chunk of the first phase: some hidden units of an expert, for all of its tokens.
struct Part<'a> {
    group: Group,
    rows: Range<usize>,
    out: Columns<'a>,
}

impl Part<'_> {
    fn cost(&self) -> usize {
        self.rows.len() * (self.group.pairs.len() + ROW_COST)
    }
}

/// The same columns of consecutive rows of a matrix.
enum Columns<'a> {
    One(&'a mut [f32]),
    Many(Vec<&'a mut [f32]>),
}

impl<'a> Columns<'a> {
    fn rows(&mut self) -> &mut [&'a mut [f32]] {
        match self {
            Self::One(row) => core::slice::from_mut(row),
            Self::Many(rows) => rows,
        }
    }
}

/// Cuts a matrix with `cols` columns into blocks of `block` columns.
fn cut<'a>(data: &'a mut [f32], cols: usize, block: usize, mut put: impl FnMut(Range<usize>, Columns<'a>)) {
    let n_rows = data.len() / cols;
    let columns = |i: usize| i * block..((i + 1) * block).min(cols);
    if n_rows == 1 {
        return data.chunks_mut(block).enumerate().for_each(|(i, row)| put(columns(i), Columns::One(row)));
    }
    let mut blocks: Vec<Vec<&mut [f32]>> = Vec::new();
    blocks.resize_with(cols.div_ceil(block), || Vec::with_capacity(n_rows));
    for row in data.chunks_exact_mut(cols) {
        for (block, piece) in blocks.iter_mut().zip(row.chunks_mut(block)) {
            block.push(piece);
        }
    }
    blocks.into_iter().enumerate().for_each(|(i, block)| put(columns(i), Columns::Many(block)));
}

/// Cuts the first phase in chunks of like cost, the dearest first: an expert with many tokens gets fewer rows.
fn cut_hidden<'a>(groups: &Groups, ff: usize, workers: usize, mut hidden: &'a mut [f32]) -> Vec<Part<'a>> {
    let total: usize = groups.active.iter().map(|group| ff * (group.pairs.len() + ROW_COST)).sum();
    let target = total / (workers * 24);
    let mut parts = Vec::with_capacity(workers * 48 + groups.active.len());
    for group in &groups.active {
        let block =
            (target / (group.pairs.len() + ROW_COST)).next_multiple_of(ROW_STEP).clamp(ROW_STEP, MAX_ROWS);
        let rest = core::mem::take(&mut hidden);
        let (of_group, rest) = rest.split_at_mut(group.pairs.len() * ff);
        hidden = rest;
        cut(of_group, ff, block, |rows, out| parts.push(Part { group: group.clone(), rows, out }));
    }
    parts.sort_by_key(|part| core::cmp::Reverse(part.cost()));
    parts
}

/// First phase, one chunk: act(gate · x) ⊙ (up · x).
fn gate_up(
    experts: &Experts<'_>,
    acts: &Activations,
    groups: &Groups,
    precision: Precision,
    part: &mut Part<'_>,
) {
    let expert = part.group.expert as usize;
    let (gate, up) = (experts.gate(expert), experts.up(expert));
    let n_rows = part.rows.len();
    let tokens = &groups.tokens[part.group.pairs.clone()];
    with_tiles(2 * n_rows * TILE_TOKENS.min(tokens.len()), |tiles| {
        for (tokens, out) in tokens.chunks(TILE_TOKENS).zip(part.out.rows().chunks_mut(TILE_TOKENS)) {
            let (g, rest) = tiles.split_at_mut(tokens.len() * n_rows);
            let u = &mut rest[..tokens.len() * n_rows];
            matmul_tile(gate, part.rows.clone(), acts, tokens, precision, g);
            matmul_tile(up, part.rows.clone(), acts, tokens, precision, u);
            for ((g, u), out) in g.chunks_exact(n_rows).zip(u.chunks_exact(n_rows)).zip(out) {
                experts.activation().apply(g, u, out);
            }
        }
    });
}

/// Output rows per chunk of the last phase.
fn down_block(hidden: usize, groups: &Groups, workers: usize) -> usize {
    let fit = (MAX_SUMS / groups.tokens.len()).clamp(ROW_STEP, 64);
    hidden.div_ceil(workers * 12).next_multiple_of(ROW_STEP).min(fit / ROW_STEP * ROW_STEP)
}

/// Last phase, one chunk: some rows of every expert's down projection, then per token the weighted sum.
fn down(
    experts: &Experts<'_>,
    acts: &Activations,
    groups: &Groups,
    routes: &Routes,
    precision: Precision,
    rows: Range<usize>,
    out: &mut Columns<'_>,
) {
    let (n_rows, top_k) = (rows.len(), routes.top_k());
    with_tiles(n_rows * groups.tokens.len(), |values| {
        for Group { expert, pairs } in &groups.active {
            let values = &mut values[pairs.start * n_rows..pairs.end * n_rows];
            let tokens = &groups.numbers[pairs.clone()];
            matmul_tile(experts.down(*expert as usize), rows.clone(), acts, tokens, precision, values);
        }
        let places = groups.places.chunks_exact(top_k).zip(routes.weights().chunks_exact(top_k));
        for (out, (places, weights)) in out.rows().iter_mut().zip(places) {
            let mut sum = [0.0; 64];
            let sum = &mut sum[..n_rows];
            for (&place, &weight) in places.iter().zip(weights) {
                let values = &values[place as usize * n_rows..][..n_rows];
                for (sum, value) in sum.iter_mut().zip(values) {
                    *sum += weight * value;
                }
            }
            for (out, sum) in out.iter_mut().zip(sum) {
                *out += *sum;
            }
        }
    });
}

/// Calls `body` with `len` floats of the worker's own, of any content.
fn with_tiles(len: usize, body: impl FnOnce(&mut [f32])) {
    TILES.with_borrow_mut(|tiles| {
        if tiles.len() < len {
            tiles.resize(len, 0.0);
        }
        body(&mut tiles[..len]);
    });
}

use core::ops::Range;
use core::sync::atomic::{AtomicUsize, Ordering};

use skep_quant::{Parallel, for_each_chunk_mut};

use crate::batch::check_spans;
use crate::cache::{Side, Values};
use crate::cpu::{Ahead, Isa, KEYS, with_isa};
use crate::reference::{check_attend, check_mask};
use crate::scratch::{Lane, Plan, Scratch, Shared, Sums, lane_count, padded};
use crate::{Gate, Heads, KvCache, Mask, Result, Span, math};

/// Keys per split. A split is summed on its own, whoever computes it, and the splits of a query are merged in order, so the result
/// does not depend on how the work was spread. Splits start at multiples of it.
const SPLIT: usize = 8 * KEYS;

/// Queries that share one pass over the keys.
const TILE: usize = 32;

/// Most floats that the results of single splits may take; beyond it jobs stay whole.
const MAX_PARTIALS: usize = 1 << 26;

/// Rows of one span and query heads of one key/value head, sharing one pass over the keys.
#[derive(Debug)]
pub(crate) struct Job {
    span: usize,
    rows: Range<usize>,
    kv_head: usize,
    q_heads: Range<usize>,
    /// Token indices that any of the rows sees.
    keys: Range<usize>,
}

/// What a thread takes: a job, or one split of it.
#[derive(Debug)]
pub(crate) enum Unit {
    Whole { job: usize },
    Split { job: usize, split: usize, partial: usize },
}

/// A job whose splits are computed apart.
#[derive(Debug)]
pub(crate) struct Merge {
    job: usize,
    splits: usize,
    /// Where the first split's result starts; the others follow.
    partial: usize,
}

/// Softmax attention of every row over the keys its sequence has in the cache, then the output gate.
///
/// `out[t, h] = Σ_j softmax_j(scale · q[t, h]·k[j]) v[j] · σ(gate[t, h])` over the keys `j` that `mask` shows to the row; head `h`
/// reads key/value head `h / group`. The rows' own keys and values must be in the cache ([`prepare`](crate::prepare()) puts them there).
/// Scores and sums are f32, computed block by block with an online softmax (FlashAttention, Dao et al. 2022,
/// <https://arxiv.org/abs/2205.14135>) whose blocks start at fixed token indices: a row's result is the same to the bit whatever the
/// batch, the cut of a sequence into batches, the page size or the number of workers.
///
/// * `q`: `[n_tokens, q_heads, head_dim]`, normalised and rotated;
/// * `spans`: cover rows `0..n_tokens` in order; page tables must hold every token that a row sees;
/// * `out`: `[n_tokens, q_heads, v_dim]`.
///
/// Numbers that are not finite reach the rows that see them and no others.
///
/// # Errors
/// When spans do not cover the batch, a page table is too short or names a page the cache does not have, or the window is zero. Nothing
/// is written then.
///
/// # Panics
/// When a slice has the wrong length or the cache was made for other heads.
pub fn attend(
    par: &dyn Parallel,
    heads: &Heads,
    q: &[f32],
    gate: Option<Gate<'_>>,
    spans: &[Span<'_>],
    cache: &KvCache,
    mask: Mask,
    scratch: &mut Scratch,
    out: &mut [f32],
) -> Result<()> {
    with_isa!(isa => attend_with(isa, par, heads, q, gate, spans, cache, mask, scratch, out))
}

pub(crate) fn attend_with<I: Isa>(
    isa: I,
    par: &dyn Parallel,
    heads: &Heads,
    q: &[f32],
    gate: Option<Gate<'_>>,
    spans: &[Span<'_>],
    cache: &KvCache,
    mask: Mask,
    scratch: &mut Scratch,
    out: &mut [f32],
) -> Result<()> {
    let n_tokens = check_attend(heads, q, gate, cache, out);
    check_mask(mask)?;
    check_spans(spans, n_tokens, cache, |start| mask.first_key(start))?;

    let partials = scratch.plan.make(heads, spans, mask, par.workers());
    if scratch.partials.len() < partials {
        scratch.partials.resize(partials, 0.0);
    }
    let lanes = lane_count(par, scratch.plan.units.len());
    scratch.lanes(lanes, tile_rows(heads) * tile_heads(heads), heads);
    let Scratch { lanes: all_lanes, plan, partials } = scratch;
    let pass = Pass {
        isa,
        heads,
        q,
        gate,
        spans,
        cache,
        mask,
        out: Shared::new(out),
        k_pad: padded(heads.head_dim()),
        v_pad: padded(heads.v_dim()),
    };

    let shared = Shared::new(partials);
    let next = AtomicUsize::new(0);
    for_each_chunk_mut(par, &mut all_lanes[..lanes], 1, |_, lane| {
        let lane = &mut lane[0];
        // The last jobs of a prompt are the longest: start with them.
        while let Some(unit) = take(&next, plan.units.len()) {
            match plan.units[plan.units.len() - 1 - unit] {
                Unit::Whole { job } => pass.whole(&plan.jobs[job], lane),
                Unit::Split { job, split, partial } => {
                    let job = &plan.jobs[job];
                    let len = job.queries() * (pass.v_pad + 2);
                    // SAFETY: every split has its own place in `partials`.
                    pass.split(job, split, lane, unsafe { shared.part(partial, len) });
                }
            }
        }
    });
    if plan.merges.is_empty() {
        return Ok(());
    }

    let partials = &partials[..];
    let total = plan.merges.iter().map(|merge| plan.jobs[merge.job].queries()).sum::<usize>();
    let lanes = lane_count(par, total).min(lanes);
    let next = AtomicUsize::new(0);
    for_each_chunk_mut(par, &mut all_lanes[..lanes], 1, |_, lane| {
        while let Some(mut query) = take(&next, total) {
            for merge in &plan.merges {
                let job = &plan.jobs[merge.job];
                if query < job.queries() {
                    pass.merge(job, merge, query, partials, &mut lane[0].total);
                    break;
                }
                query -= job.queries();
            }
        }
    });
    Ok(())
}

/// Takes the next of `len` tasks.
pub(crate) fn take(next: &AtomicUsize, len: usize) -> Option<usize> {
    Some(next.fetch_add(1, Ordering::Relaxed)).filter(|&i| i < len)
}

/// Query heads of a tile.
fn tile_heads(heads: &Heads) -> usize {
    heads.group().min(TILE)
}

/// Rows of a tile.
fn tile_rows(heads: &Heads) -> usize {
    TILE / tile_heads(heads)
}

impl Job {
    fn queries(&self) -> usize {
        self.rows.len() * self.q_heads.len()
    }

    fn splits(&self) -> Range<usize> {
        self.keys.start / SPLIT..self.keys.end.div_ceil(SPLIT)
    }
}

impl Plan {
    /// Lists the work of a call; returns the floats needed for the results of single splits.
    fn make(&mut self, heads: &Heads, spans: &[Span<'_>], mask: Mask, workers: usize) -> usize {
        self.jobs.clear();
        self.units.clear();
        self.merges.clear();
        let mut total = 0;
        for (number, span) in spans.iter().enumerate() {
            for first in span.tokens.clone().step_by(tile_rows(heads)) {
                let rows = first..(first + tile_rows(heads)).min(span.tokens.end);
                let seen = |row| span.seen(mask, span.token(row));
                let keys = seen(rows.start).start..seen(rows.end - 1).end;
                for kv_head in 0..heads.kv_heads() {
                    let group = kv_head * heads.group()..(kv_head + 1) * heads.group();
                    for head in group.clone().step_by(tile_heads(heads)) {
                        let q_heads = head..(head + tile_heads(heads)).min(group.end);
                        let job =
                            Job { span: number, rows: rows.clone(), kv_head, q_heads, keys: keys.clone() };
                        total += job.queries() * job.keys.len();
                        self.jobs.push(job);
                    }
                }
            }
        }
        let per_query = padded(heads.v_dim()) + 2;
        let mut partials = 0;
        for (number, job) in self.jobs.iter().enumerate() {
            let splits = job.splits();
            let len = job.queries() * per_query;
            // A job of more than half a worker's fair share would leave others waiting.
            let large = job.queries() * job.keys.len() > total / (2 * workers.max(1));
            if workers > 1 && large && splits.len() > 1 && partials + splits.len() * len <= MAX_PARTIALS {
                self.merges.push(Merge { job: number, splits: splits.len(), partial: partials });
                for split in splits {
                    self.units.push(Unit::Split { job: number, split, partial: partials });
                    partials += len;
                }
            } else {
                self.units.push(Unit::Whole { job: number });
            }
        }
        partials
    }
}

/// Arguments of one call.
struct Pass<'a, I> {
    isa: I,
    heads: &'a Heads,
    q: &'a [f32],
    gate: Option<Gate<'a>>,
    spans: &'a [Span<'a>],
    cache: &'a KvCache,
    mask: Mask,
    out: Shared<'a>,
    k_pad: usize,
    v_pad: usize,
}

impl<I: Isa> Pass<'_, I> {
    /// Computes a job from beginning to end.
    fn whole(&self, job: &Job, lane: &mut Lane) {
        self.load_queries(job, lane);
        lane.total.clear(job.queries(), self.v_pad);
        for split in job.splits() {
            self.sum_split(job, split, lane);
            for i in 0..job.queries() {
                let part = &lane.part.acc.as_ref()[i * self.v_pad..][..self.v_pad];
                self.join(&mut lane.total, i, part, lane.part.max[i], lane.part.sum[i]);
            }
        }
        for i in 0..job.queries() {
            self.finish(job, i, &lane.total, i);
        }
    }

    /// Computes one split of a job into `partial`: `[queries, v_pad]` sums, then maxima, then sums of weights.
    fn split(&self, job: &Job, split: usize, lane: &mut Lane, partial: &mut [f32]) {
        self.load_queries(job, lane);
        self.sum_split(job, split, lane);
        let n = job.queries();
        let (acc, rest) = partial.split_at_mut(n * self.v_pad);
        let (max, sum) = rest.split_at_mut(n);
        acc.copy_from_slice(&lane.part.acc.as_ref()[..n * self.v_pad]);
        max.copy_from_slice(&lane.part.max[..n]);
        sum.copy_from_slice(&lane.part.sum[..n]);
    }

    /// Merges the splits of query `query` of a job.
    fn merge(&self, job: &Job, merge: &Merge, query: usize, partials: &[f32], total: &mut Sums) {
        let n = job.queries();
        let len = n * (self.v_pad + 2);
        total.clear(1, self.v_pad);
        for partial in partials[merge.partial..][..merge.splits * len].chunks_exact(len) {
            let (acc, rest) = partial.split_at(n * self.v_pad);
            let acc = &acc[query * self.v_pad..][..self.v_pad];
            self.join(total, 0, acc, rest[query], rest[n + query]);
        }
        self.finish(job, query, total, 0);
    }

    /// Adds the result of the next split to that of those before.
    fn join(&self, total: &mut Sums, i: usize, part: &[f32], part_max: f32, part_sum: f32) {
        if part_sum == 0.0 {
            return;
        }
        let (max, sum) = (&mut total.max[i], &mut total.sum[i]);
        let acc = &mut total.acc.as_mut()[i * self.v_pad..][..self.v_pad];
        if *sum == 0.0 {
            (*max, *sum) = (part_max, part_sum);
            acc.copy_from_slice(part);
            return;
        }
        let new = max.max(part_max);
        let (a, b) = (math::exp(*max - new), math::exp(part_max - new));
        self.isa.merge(acc, a, part, b);
        (*max, *sum) = (new, *sum * a + part_sum * b);
    }

    /// Divides by the sum of weights, applies the gate and writes the output of one query.
    fn finish(&self, job: &Job, query: usize, total: &Sums, i: usize) {
        let (row, head) = job.place(query);
        let v_dim = self.heads.v_dim();
        let start = (row * self.heads.q_heads() + head) * v_dim;
        // SAFETY: jobs share no pair of row and head, and each query of a job is finished by one thread.
        let out = unsafe { self.out.part(start, v_dim) };
        let acc = &total.acc.as_ref()[i * self.v_pad..][..self.v_pad];
        let gate = self.gate.map(|gate| gate.head(self.heads, row, head));
        self.isa.finish(acc, 1.0 / total.sum[i], gate, out);
    }

    fn load_queries(&self, job: &Job, lane: &mut Lane) {
        let dim = self.heads.head_dim();
        for (i, to) in lane.q.as_mut().chunks_exact_mut(self.k_pad).take(job.queries()).enumerate() {
            let (row, head) = job.place(i);
            to[..dim].copy_from_slice(&self.q[(row * self.heads.q_heads() + head) * dim..][..dim]);
        }
    }

    /// Sums the keys of one split for all queries of a job into `lane.part`.
    fn sum_split(&self, job: &Job, split: usize, lane: &mut Lane) {
        let span = &self.spans[job.span];
        let per_row = job.q_heads.len();
        lane.part.clear(job.queries(), self.v_pad);
        let keys = job.keys.start.max(split * SPLIT)..job.keys.end.min((split + 1) * SPLIT);
        for base in (keys.start / KEYS * KEYS..keys.end).step_by(KEYS) {
            let block = keys.start.max(base)..keys.end.min(base + KEYS);
            // What of the block a row sees, counted from its base.
            let seen = |row: usize| {
                let Range { start, end } = span.seen(self.mask, span.token(row));
                let start = start.clamp(base, base + KEYS) - base;
                start..(end.clamp(base, base + KEYS) - base).max(start)
            };
            // Rows that see nothing of it come first (too early) or last (window has passed).
            let Some(first) = job.rows.clone().find(|&row| !seen(row).is_empty()) else { continue };
            let count = (first..job.rows.end).take_while(|&row| !seen(row).is_empty()).count();
            let queries = (first - job.rows.start) * per_row..(first - job.rows.start + count) * per_row;

            self.load_block(Side::K, span, job.kv_head, base, block.clone(), lane.k.as_mut());
            let q = &lane.q.as_ref()[queries.start * self.k_pad..queries.end * self.k_pad];
            let scores = &mut lane.scores.as_mut()[queries.start * KEYS..queries.end * KEYS];
            let inside = block.start - base..block.end - base;
            let scale = self.heads.scale();
            let ahead = self.ahead(Side::V, span, job.kv_head, block.clone());
            self.isa.scores(q, lane.k.as_ref(), self.k_pad, inside, scale, scores, ahead);

            let acc = &mut lane.part.acc.as_mut()[queries.start * self.v_pad..queries.end * self.v_pad];
            for (i, scores) in scores.as_chunks_mut::<KEYS>().0.iter_mut().enumerate() {
                let query = queries.start + i;
                let (max, sum) = (&mut lane.part.max[query], &mut lane.part.sum[query]);
                let factor = self.isa.softmax(scores, seen(first + i / per_row), max, sum);
                if factor != 1.0 {
                    self.isa.scale(&mut acc[i * self.v_pad..][..self.v_pad], factor);
                }
            }
            self.load_block(Side::V, span, job.kv_head, base, block.clone(), lane.v.as_mut());
            let mut ahead =
                self.ahead(Side::K, span, job.kv_head, block.end..job.keys.end.min(block.end + KEYS));
            // Rows that see the same keys go together. The others' keys are not touched: zero times NaN would be NaN.
            let mut row = 0;
            while row < count {
                let keys = seen(first + row);
                let same = (row..count).take_while(|&row| seen(first + row) == keys).count();
                let range = row * per_row..(row + same) * per_row;
                let weights = &scores[range.start * KEYS..range.end * KEYS];
                let acc = &mut acc[range.start * self.v_pad..range.end * self.v_pad];
                self.isa.weigh(weights, lane.v.as_ref(), self.v_pad, keys, acc, ahead);
                ahead = Ahead::NONE;
                row += same;
            }
        }
    }

    /// What [`load_block`](Self::load_block) will read first.
    fn ahead(&self, side: Side, span: &Span<'_>, kv_head: usize, tokens: Range<usize>) -> Ahead<'_> {
        if tokens.is_empty() {
            return Ahead::NONE;
        }
        let (page, slot) = span.place(tokens.start, self.cache.page_len());
        let count = (self.cache.page_len() - slot).min(tokens.len());
        Ahead::new(self.cache.rows(side, page, kv_head, slot..slot + count))
    }

    /// Widens the keys or values of tokens `tokens` into a block that starts at token `base`.
    fn load_block(
        &self,
        side: Side,
        span: &Span<'_>,
        kv_head: usize,
        base: usize,
        tokens: Range<usize>,
        to: &mut [f32],
    ) {
        let dim = self.cache.dim(side);
        let pad = padded(dim);
        let mut token = tokens.start;
        while token < tokens.end {
            let (page, slot) = span.place(token, self.cache.page_len());
            let count = (self.cache.page_len() - slot).min(tokens.end - token);
            let rows = self.cache.rows(side, page, kv_head, slot..slot + count);
            let to = &mut to[(token - base) * pad..][..count * pad];
            let step = if dim == pad { count * dim } else { dim };
            for (i, to) in to.chunks_exact_mut(step.max(pad)).enumerate() {
                match rows {
                    Values::F16(bits) => self.isa.widen(&bits[i * step..][..step], &mut to[..step]),
                    Values::F32(values) => to[..step].copy_from_slice(&values[i * step..][..step]),
                }
            }
            token += count;
        }
    }
}

impl Job {
    /// Batch row and query head of a query of the tile.
    fn place(&self, query: usize) -> (usize, usize) {
        let per_row = self.q_heads.len();
        (self.rows.start + query / per_row, self.q_heads.start + query % per_row)
    }
}

#[cfg(test)]
mod tests {
    use alloc::vec;

    use skep_quant::Serial;

    use super::*;
    use crate::cpu::for_each_isa;
    use crate::{KvType, Norms, Position, Projections, Queries, reference};

    /// Claims workers, so that jobs are split, and runs them backwards.
    struct Backwards(usize);

    // SAFETY: a plain loop.
    unsafe impl Parallel for Backwards {
        fn workers(&self) -> usize {
            self.0
        }

        fn run(&self, chunks: usize, body: &(dyn Fn(usize) + Sync)) {
            (0..chunks).rev().for_each(body);
        }
    }

    #[test]
    fn every_instruction_set_gives_the_reference_and_does_not_depend_on_the_cut() {
        for_each_isa!(isa => { check_cuts(isa) });
    }

    fn check_cuts(isa: impl Isa) {
        let heads = Heads::new(6, 2, 20, 9, 0.4).unwrap();
        let n = 600;
        let wave =
            |len: usize, step: f32| (0..len).map(|i| (i as f32 * step).sin() * 2.0).collect::<vec::Vec<_>>();
        let (q, k, v) = (wave(n * 120, 0.71), wave(n * 40, 0.37), wave(n * 18, 0.13));
        let pages = (0..60).rev().collect::<vec::Vec<u32>>();
        let images = [20..29, 29..33, 90..410, 530..531, 560..600];
        let whole = [Span { tokens: 0..n, pages: &pages, start: 0, together: &[] }];
        let seeing = [Span { together: &images, ..whole[0].clone() }];
        let mut cache = KvCache::new(KvType::F16, 60, 10, 2, 20, 9).unwrap();
        let projections = Projections { q: Queries::Plain(&q), k: &k, v: &v };
        let positions = vec![Position::default(); n];
        let mut queries = vec![0.0; q.len()];
        reference::prepare(
            &heads,
            &projections,
            &Norms::default(),
            None,
            &positions,
            &whole,
            &mut cache,
            &mut queries,
        )
        .unwrap();
        let masks = [Mask::Causal, Mask::Window(300), Mask::Window(10)];
        for (mask, whole) in masks.into_iter().flat_map(|mask| [(mask, &whole), (mask, &seeing)]) {
            let mut expected = vec![0.0; n * 54];
            reference::attend(&heads, &q, None, whole, &cache, mask, &mut expected).unwrap();
            let mut scratch = Scratch::new();
            let mut all = vec![0.0; n * 54];
            attend_with(isa, &Serial, &heads, &q, None, whole, &cache, mask, &mut scratch, &mut all).unwrap();
            for (a, b) in all.iter().zip(&expected) {
                assert!((a - b).abs() < 1e-5, "{a} is not {b}");
            }
            for (start, len) in [(0, 33), (599, 1), (520, 5), (80, 340), (411, 149)] {
                let inside = |image: &&Range<usize>| image.start >= start && image.end <= start + len;
                let together = whole[0].together.iter().filter(inside).cloned().collect::<vec::Vec<_>>();
                if start == 599 && !whole[0].together.is_empty() {
                    continue;
                }
                let spans = [Span { tokens: 0..len, pages: &pages, start, together: &together }];
                let (q, mut out) = (&q[start * 120..][..len * 120], vec![0.0; len * 54]);
                let par = Backwards(8);
                attend_with(isa, &par, &heads, q, None, &spans, &cache, mask, &mut scratch, &mut out)
                    .unwrap();
                assert_eq!(out, all[start * 54..][..len * 54]);
            }
        }
    }

    #[test]
    fn long_contexts_are_split_and_prompts_are_not() {
        let heads = Heads::new(16, 2, 256, 256, 1.0).unwrap();
        let plan = |spans: &[Span<'_>], workers| {
            let mut plan = Plan::default();
            let partials = plan.make(&heads, spans, Mask::Causal, workers);
            (plan.units.len(), plan.merges.len(), partials)
        };
        let one = [Span { tokens: 0..1, pages: &[], start: 8191, together: &[] }];
        assert_eq!(plan(&one, 1), (2, 0, 0));
        assert_eq!(plan(&one, 2), (64, 2, 64 * 8 * 258));
        let prompt = [Span { tokens: 0..512, pages: &[], start: 0, together: &[] }];
        assert_eq!(plan(&prompt, 2), (256, 0, 0));
        // The one long sequence of a batch is split, the short ones are not.
        let mixed = (0..9).map(|i| Span {
            tokens: i..i + 1,
            pages: &[],
            start: if i == 4 { 99_999 } else { 99 },
            together: &[],
        });
        assert_eq!(plan(&mixed.collect::<vec::Vec<_>>(), 4), (16 + 2 * 391, 2, 2 * 391 * 8 * 258));
    }
}

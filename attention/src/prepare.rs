use core::sync::atomic::AtomicUsize;

use skep_quant::{Parallel, for_each_chunk_mut};

use crate::attend::take;
use crate::batch::check_spans;
use crate::cache::{Side, ValuesMut};
use crate::cpu::{Isa, with_isa};
use crate::reference::{check_prepare, check_queries};
use crate::rope::Angles;
use crate::scratch::{Scratch, Shared, lane_count};
use crate::{Heads, KvCache, Norm, Norms, Position, Projections, Queries, Result, Rope, Span};

/// Rows that a thread takes at once.
const ROWS: usize = 4;

/// Normalises and rotates the queries of a batch into `q_out`, its keys and values into the pages of the cache.
///
/// * `projections`: queries (with or without gates), keys `[n_tokens, kv_heads, head_dim]`, values `[n_tokens, kv_heads, v_dim]`;
/// * `norms`: RMS norms of single heads, before the rotation;
/// * `rope`: rotation of queries and keys, none for layers without;
/// * `positions`: `[n_tokens]`, of the rows; their number is the number of rows;
/// * `spans`: cover rows `0..n_tokens` in order; row `r` of a span is stored as token `start + r`;
/// * `q_out`: `[n_tokens, q_heads, head_dim]`.
///
/// # Errors
/// When spans do not cover the batch, or a page table is too short, names a page the cache does not have, or makes the batch write one
/// page through two entries. Nothing is written then.
///
/// # Panics
/// When a slice has the wrong length or the cache or rope was made for other heads.
pub fn prepare(
    par: &dyn Parallel,
    heads: &Heads,
    projections: &Projections<'_>,
    norms: &Norms<'_>,
    rope: Option<&Rope>,
    positions: &[Position],
    spans: &[Span<'_>],
    cache: &mut KvCache,
    scratch: &mut Scratch,
    q_out: &mut [f32],
) -> Result<()> {
    with_isa!(isa => prepare_with(isa, par, heads, projections, norms, rope, positions, spans, cache, scratch, q_out))
}

pub(crate) fn prepare_with<I: Isa>(
    isa: I,
    par: &dyn Parallel,
    heads: &Heads,
    projections: &Projections<'_>,
    norms: &Norms<'_>,
    rope: Option<&Rope>,
    positions: &[Position],
    spans: &[Span<'_>],
    cache: &mut KvCache,
    scratch: &mut Scratch,
    q_out: &mut [f32],
) -> Result<()> {
    let n_tokens = positions.len();
    check_prepare(heads, projections, norms, rope, n_tokens, cache, q_out);
    check_spans(spans, n_tokens, cache, |start| start)?;
    cache.claim(spans)?;

    let (head_dim, v_dim, page_len) = (heads.head_dim(), heads.v_dim(), cache.page_len());
    let (writer, q_out) = (cache.writer(), Shared::new(q_out));
    let tasks = n_tokens.div_ceil(ROWS);
    let next = AtomicUsize::new(0);
    let lanes = lane_count(par, tasks);
    for_each_chunk_mut(par, scratch.rows(lanes, head_dim + v_dim), 1, |_, lane| {
        let (key, value) = lane[0].rows[..head_dim + v_dim].split_at_mut(head_dim);
        let mut angles = Angles::new();
        while let Some(task) = take(&next, tasks) {
            let rows = task * ROWS..((task + 1) * ROWS).min(n_tokens);
            let mut number = spans.partition_point(|span| span.tokens.end <= rows.start);
            for row in rows {
                while spans[number].tokens.end <= row {
                    number += 1;
                }
                let span = &spans[number];
                if let Some(rope) = rope {
                    rope.angles(positions[row], &mut angles);
                }
                let turn = |head: &mut [f32]| {
                    if let Some(rope) = rope {
                        rope.rotate(head, &angles);
                    }
                };
                for head in 0..heads.q_heads() {
                    // SAFETY: each row is handled by one thread.
                    let q = unsafe { q_out.part((row * heads.q_heads() + head) * head_dim, head_dim) };
                    q.copy_from_slice(projections.q.head(heads, row, head));
                    norm(isa, q, &norms.q, norms.eps);
                    turn(q);
                }
                let (page, slot) = span.place(span.token(row), page_len);
                for head in 0..heads.kv_heads() {
                    let index = row * heads.kv_heads() + head;
                    key.copy_from_slice(&projections.k[index * head_dim..][..head_dim]);
                    norm(isa, key, &norms.k, norms.eps);
                    turn(key);
                    // SAFETY: each row is handled by one thread, and rows lie in different slots: spans write different pages,
                    // which `claim` has checked, and a span's tokens have different slots or pages.
                    store(isa, key, unsafe { writer.row(Side::K, page, head, slot) });
                    value.copy_from_slice(&projections.v[index * v_dim..][..v_dim]);
                    norm(isa, value, &norms.v, norms.eps);
                    // SAFETY: as above.
                    store(isa, value, unsafe { writer.row(Side::V, page, head, slot) });
                }
            }
        }
    });
    Ok(())
}

/// Normalises and rotates the queries of a batch into `q_out`, for a layer that reads the keys and values of another.
///
/// * `queries`: `[n_tokens, q_heads, head_dim]`, or with gates;
/// * `q_norm`, `eps`: RMS norm of single heads, before the rotation;
/// * `rope`: rotation, none for layers without;
/// * `positions`: `[n_tokens]`, of the rows; their number is the number of rows;
/// * `q_out`: `[n_tokens, q_heads, head_dim]`, the same to the bit as [`prepare`] makes it.
///
/// # Panics
/// When a slice has the wrong length or the rope was made for other heads.
pub fn prepare_queries(
    par: &dyn Parallel,
    heads: &Heads,
    queries: Queries<'_>,
    q_norm: Norm<'_>,
    eps: f32,
    rope: Option<&Rope>,
    positions: &[Position],
    q_out: &mut [f32],
) {
    check_queries(heads, queries, q_norm, rope, positions.len(), q_out);
    let per_row = heads.q_heads() * heads.head_dim();
    with_isa!(isa => for_each_chunk_mut(par, q_out, ROWS * per_row, |task, out| {
        let mut angles = Angles::new();
        for (i, out) in out.chunks_exact_mut(per_row).enumerate() {
            let row = task * ROWS + i;
            if let Some(rope) = rope {
                rope.angles(positions[row], &mut angles);
            }
            for (head, q) in out.chunks_exact_mut(heads.head_dim()).enumerate() {
                q.copy_from_slice(queries.head(heads, row, head));
                norm(isa, q, &q_norm, eps);
                if let Some(rope) = rope {
                    rope.rotate(q, &angles);
                }
            }
        }
    }));
}

fn norm<I: Isa>(isa: I, head: &mut [f32], norm: &Norm<'_>, eps: f32) {
    match norm {
        Norm::None => {}
        Norm::Unit => isa.rms_norm(head, None, eps),
        Norm::Weight(weight) => isa.rms_norm(head, Some(weight), eps),
    }
}

fn store<I: Isa>(isa: I, row: &[f32], to: ValuesMut<'_>) {
    match to {
        ValuesMut::F16(bits) => isa.narrow(row, bits),
        ValuesMut::F32(values) => values.copy_from_slice(row),
    }
}

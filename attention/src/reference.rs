//! The plain scalar truth: one thread, f32, each formula as in the papers.
//!
//! Everything fast in this crate is tested against these two functions. They are also the whole of the crate without the feature
//! `std`. They agree with the fast paths to rounding, not to the bit.

use alloc::vec::Vec;

use crate::batch::check_spans;
use crate::cache::{Side, ValuesMut, narrow};
use crate::rope::Angles;
use crate::{
    Gate, Heads, KvCache, Mask, Norm, Norms, Position, Projections, Queries, Result, Rope, Span, math,
};

/// Normalises and rotates the queries into `q_out`, the keys and values into the pages of `cache`.
///
/// Shapes, errors and panics are those of [`prepare`](crate::prepare()).
///
/// # Errors
/// When spans or page tables do not fit the batch or the cache.
///
/// # Panics
/// When a slice has the wrong length or the cache or rope was made for other heads.
pub fn prepare(
    heads: &Heads,
    projections: &Projections<'_>,
    norms: &Norms<'_>,
    rope: Option<&Rope>,
    positions: &[Position],
    spans: &[Span<'_>],
    cache: &mut KvCache,
    q_out: &mut [f32],
) -> Result<()> {
    let n_tokens = positions.len();
    check_prepare(heads, projections, norms, rope, n_tokens, cache, q_out);
    check_spans(spans, n_tokens, cache, |start| start)?;
    cache.claim(spans)?;

    let mut angles = Angles::new();
    let (head_dim, page_len) = (heads.head_dim(), cache.page_len());
    let turn = |head: &mut [f32], angles: &Angles| {
        if let Some(rope) = rope {
            rope.rotate(head, angles);
        }
    };
    let mut key = alloc::vec![0.0; head_dim];
    let mut value = alloc::vec![0.0; heads.v_dim()];
    for span in spans {
        for row in span.tokens.clone() {
            if let Some(rope) = rope {
                rope.angles(positions[row], &mut angles);
            }
            for head in 0..heads.q_heads() {
                let q = &mut q_out[(row * heads.q_heads() + head) * head_dim..][..head_dim];
                q.copy_from_slice(projections.q.head(heads, row, head));
                norm(q, &norms.q, norms.eps);
                turn(q, &angles);
            }
            let (page, slot) = span.place(span.token(row), page_len);
            for head in 0..heads.kv_heads() {
                let index = row * heads.kv_heads() + head;
                key.copy_from_slice(&projections.k[index * head_dim..][..head_dim]);
                norm(&mut key, &norms.k, norms.eps);
                turn(&mut key, &angles);
                store(&key, cache.row_mut(Side::K, page, head, slot));
                value.copy_from_slice(&projections.v[index * heads.v_dim()..][..heads.v_dim()]);
                norm(&mut value, &norms.v, norms.eps);
                store(&value, cache.row_mut(Side::V, page, head, slot));
            }
        }
    }
    Ok(())
}

/// Attention of every row over the keys its sequence has in `cache` (Vaswani et al. 2017, <https://arxiv.org/abs/1706.03762>).
///
/// Shapes, errors and panics are those of [`attend`](crate::attend()).
///
/// # Errors
/// When spans or page tables do not fit the batch or the cache, or the window is zero.
///
/// # Panics
/// When a slice has the wrong length or the cache was made for other heads.
pub fn attend(
    heads: &Heads,
    q: &[f32],
    gate: Option<Gate<'_>>,
    spans: &[Span<'_>],
    cache: &KvCache,
    mask: Mask,
    out: &mut [f32],
) -> Result<()> {
    let n_tokens = check_attend(heads, q, gate, cache, out);
    check_mask(mask)?;
    check_spans(spans, n_tokens, cache, |start| mask.first_key(start))?;

    let (head_dim, v_dim) = (heads.head_dim(), heads.v_dim());
    let mut key = alloc::vec![0.0; head_dim];
    let mut value = alloc::vec![0.0; v_dim];
    let mut weights = Vec::new();
    for span in spans {
        for row in span.tokens.clone() {
            let token = span.token(row);
            let seen = span.seen(mask, token);
            for head in 0..heads.q_heads() {
                let kv_head = head / heads.group();
                let index = row * heads.q_heads() + head;
                let query = &q[index * head_dim..][..head_dim];
                weights.clear();
                for j in seen.clone() {
                    let (page, slot) = span.place(j, cache.page_len());
                    cache.read_k(page as u32, slot, kv_head, &mut key);
                    weights.push(heads.scale() * query.iter().zip(&key).map(|(q, k)| q * k).sum::<f32>());
                }
                let max = weights.iter().fold(f32::NEG_INFINITY, |max, &s| max.max(s));
                weights.iter_mut().for_each(|w| *w = math::exp(*w - max));
                let sum = weights.iter().sum::<f32>();

                let out = &mut out[index * v_dim..][..v_dim];
                out.fill(0.0);
                for (j, &weight) in seen.clone().zip(&weights) {
                    let (page, slot) = span.place(j, cache.page_len());
                    cache.read_v(page as u32, slot, kv_head, &mut value);
                    out.iter_mut().zip(&value).for_each(|(out, v)| *out += weight * v);
                }
                out.iter_mut().for_each(|out| *out /= sum);
                if let Some(gate) = gate {
                    let gate = gate.head(heads, row, head);
                    out.iter_mut().zip(gate).for_each(|(out, &gate)| *out *= math::sigmoid(gate));
                }
            }
        }
    }
    Ok(())
}

/// RMS normalisation of one head in place.
pub(crate) fn rms_norm(head: &mut [f32], weight: Option<&[f32]>, eps: f32) {
    let mean = head.iter().map(|x| x * x).sum::<f32>() / head.len() as f32;
    let factor = 1.0 / math::sqrt(mean + eps);
    match weight {
        Some(weight) => head.iter_mut().zip(weight).for_each(|(x, w)| *x *= factor * w),
        None => head.iter_mut().for_each(|x| *x *= factor),
    }
}

fn norm(head: &mut [f32], norm: &Norm<'_>, eps: f32) {
    match norm {
        Norm::None => {}
        Norm::Unit => rms_norm(head, None, eps),
        Norm::Weight(weight) => rms_norm(head, Some(weight), eps),
    }
}

fn store(row: &[f32], to: ValuesMut<'_>) {
    match to {
        ValuesMut::F16(bits) => bits.iter_mut().zip(row).for_each(|(bits, &x)| *bits = narrow(x)),
        ValuesMut::F32(values) => values.copy_from_slice(row),
    }
}

/// Panics unless the arguments of `prepare` fit each other.
pub(crate) fn check_prepare(
    heads: &Heads,
    projections: &Projections<'_>,
    norms: &Norms<'_>,
    rope: Option<&Rope>,
    n_tokens: usize,
    cache: &KvCache,
    q_out: &[f32],
) {
    cache.check(heads);
    check_queries(heads, projections.q, norms.q, rope, n_tokens, q_out);
    let kv_rows = n_tokens * heads.kv_heads();
    assert_eq!(
        projections.k.len(),
        kv_rows * heads.head_dim(),
        "k length must be n_tokens * kv_heads * head_dim"
    );
    assert_eq!(projections.v.len(), kv_rows * heads.v_dim(), "v length must be n_tokens * kv_heads * v_dim");
    norms.k.check(heads.head_dim());
    norms.v.check(heads.v_dim());
}

/// Panics unless the queries fit their norm, their rotation and the output.
pub(crate) fn check_queries(
    heads: &Heads,
    queries: Queries<'_>,
    q_norm: Norm<'_>,
    rope: Option<&Rope>,
    n_tokens: usize,
    q_out: &[f32],
) {
    queries.check(heads, n_tokens);
    let expected = n_tokens * heads.q_heads() * heads.head_dim();
    assert_eq!(q_out.len(), expected, "q_out length must be n_tokens * q_heads * head_dim");
    q_norm.check(heads.head_dim());
    if let Some(rope) = rope {
        assert_eq!(rope.head_dim(), heads.head_dim(), "rope and layer differ in head_dim");
    }
}

/// Panics unless the arguments of `attend` fit each other; returns the number of batch rows.
pub(crate) fn check_attend(
    heads: &Heads,
    q: &[f32],
    gate: Option<Gate<'_>>,
    cache: &KvCache,
    out: &[f32],
) -> usize {
    cache.check(heads);
    let per_token = heads.q_heads() * heads.head_dim();
    assert!(q.len().is_multiple_of(per_token), "q length must be a multiple of q_heads * head_dim");
    let n_tokens = q.len() / per_token;
    let expected = n_tokens * heads.q_heads() * heads.v_dim();
    assert_eq!(out.len(), expected, "out length must be n_tokens * q_heads * v_dim");
    if let Some(gate) = gate {
        gate.check(heads, n_tokens);
    }
    n_tokens
}

pub(crate) fn check_mask(mask: Mask) -> Result<()> {
    match mask {
        Mask::Window(0) => Err(crate::ErrorKind::Zero { name: "attention window" }.into()),
        _ => Ok(()),
    }
}

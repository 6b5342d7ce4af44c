//! What one call works on: rows of several sequences, and where their keys and values live.

use core::ops::Range;

use crate::{Error, ErrorKind, Heads, KvCache, Result};

/// Consecutive rows of the batch that belong to one sequence.
///
/// The spans of a call follow each other in the order of the rows and cover the batch completely.
#[derive(Clone, Debug, PartialEq, Eq)]
#[expect(clippy::exhaustive_structs, reason = "built by callers as a literal")]
pub struct Span<'a> {
    /// Rows of the batch.
    pub tokens: Range<usize>,
    /// Page table of the sequence: token `i` lives in slot `i % page_len` of page `pages[i / page_len]`. Only the
    /// entries that a call touches are looked at, so a window may leave anything in those it has left behind.
    pub pages: &'a [u32],
    /// Token index in the sequence of the first row; all tokens before it are in the cache already.
    pub start: usize,
    /// Ranges of token indices whose tokens see each other in both directions, as the parts of one image do: a query
    /// inside a range sees its keys up to the range's end. In order, apart from each other, none empty, and each
    /// within the tokens of the span: a range is never cut. Empty for plain causal attention.
    pub together: &'a [Range<usize>],
}

/// Which keys a query sees.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Mask {
    /// Query at token index `t` sees keys `0..=t`.
    Causal,
    /// Query at token index `t` sees the `w` keys `t-w+1..=t` (sliding window). A window of zero is an error.
    Window(usize),
}

impl Mask {
    /// First key that the query at token index `t` sees.
    pub(crate) fn first_key(self, t: usize) -> usize {
        match self {
            Self::Causal => 0,
            Self::Window(w) => (t + 1).saturating_sub(w),
        }
    }
}

/// Query projection of a batch.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub enum Queries<'a> {
    /// `[n_tokens, q_heads, head_dim]`.
    Plain(&'a [f32]),
    /// `[n_tokens, q_heads, 2 * head_dim]`: for each head its query, then its output gate (which [`prepare`](crate::prepare())
    /// neither normalises nor rotates).
    GateInterleaved(&'a [f32]),
}

impl<'a> Queries<'a> {
    pub(crate) fn check(&self, heads: &Heads, n_tokens: usize) {
        let (rows, per_head) = match self {
            Self::Plain(rows) => (rows, heads.head_dim()),
            Self::GateInterleaved(rows) => (rows, 2 * heads.head_dim()),
        };
        let expected = n_tokens * heads.q_heads() * per_head;
        assert_eq!(rows.len(), expected, "query projection length must be n_tokens * q_heads * {per_head}");
    }

    /// Query of head `head` in row `row`, `[head_dim]`.
    pub(crate) fn head(&self, heads: &Heads, row: usize, head: usize) -> &'a [f32] {
        let (index, dim) = (row * heads.q_heads() + head, heads.head_dim());
        match self {
            Self::Plain(rows) => &rows[index * dim..][..dim],
            Self::GateInterleaved(rows) => &rows[index * 2 * dim..][..dim],
        }
    }
}

/// Output gate of a batch: every attention output is multiplied by the logistic function of its gate.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub enum Gate<'a> {
    /// `[n_tokens, q_heads, v_dim]`.
    Plain(&'a [f32]),
    /// `[n_tokens, q_heads, 2 * head_dim]`, the second half of each head being the gate: the buffer given to
    /// [`prepare`](crate::prepare()) as [`Queries::GateInterleaved`]. Needs `v_dim == head_dim`.
    Interleaved(&'a [f32]),
}

impl<'a> Gate<'a> {
    pub(crate) fn check(&self, heads: &Heads, n_tokens: usize) {
        let (rows, per_head) = match self {
            Self::Plain(rows) => (rows, heads.v_dim()),
            Self::Interleaved(rows) => {
                assert_eq!(heads.v_dim(), heads.head_dim(), "an interleaved gate needs v_dim == head_dim");
                (rows, 2 * heads.head_dim())
            }
        };
        let expected = n_tokens * heads.q_heads() * per_head;
        assert_eq!(rows.len(), expected, "gate length must be n_tokens * q_heads * {per_head}");
    }

    /// Gate of head `head` in row `row`, `[v_dim]`.
    pub(crate) fn head(&self, heads: &Heads, row: usize, head: usize) -> &'a [f32] {
        let (index, dim) = (row * heads.q_heads() + head, heads.v_dim());
        match self {
            Self::Plain(rows) => &rows[index * dim..][..dim],
            Self::Interleaved(rows) => &rows[index * 2 * dim + dim..][..dim],
        }
    }
}

/// Projections of one batch, as the matrix products left them.
#[derive(Clone, Copy, Debug)]
#[expect(clippy::exhaustive_structs, reason = "built by callers as a literal")]
pub struct Projections<'a> {
    /// Queries, with or without gates.
    pub q: Queries<'a>,
    /// Keys, `[n_tokens, kv_heads, head_dim]`.
    pub k: &'a [f32],
    /// Values, `[n_tokens, kv_heads, v_dim]`.
    pub v: &'a [f32],
}

/// RMS normalisation of each head, `x · (mean(x²) + eps)^-1/2`, computed in f32.
#[derive(Clone, Copy, Debug, Default)]
#[non_exhaustive]
pub enum Norm<'a> {
    /// Not normalised.
    #[default]
    None,
    /// Normalised, no weight.
    Unit,
    /// Normalised and multiplied by this weight, as stored (`[head_dim]`, or `[v_dim]` for values), the same for all heads.
    Weight(&'a [f32]),
}

impl Norm<'_> {
    pub(crate) fn check(&self, dim: usize) {
        if let Self::Weight(weight) = self {
            assert_eq!(weight.len(), dim, "norm weight length must be the head size");
        }
    }
}

/// Normalisations of queries, keys and values; the default is none.
#[derive(Clone, Copy, Debug, Default)]
#[expect(clippy::exhaustive_structs, reason = "built by callers as a literal")]
pub struct Norms<'a> {
    /// Of each query head, before the rotation.
    pub q: Norm<'a>,
    /// Of each key head, before the rotation.
    pub k: Norm<'a>,
    /// Of each value head.
    pub v: Norm<'a>,
    /// Added to the mean square.
    pub eps: f32,
}

impl Span<'_> {
    pub(crate) fn len(&self) -> usize {
        self.tokens.end - self.tokens.start
    }

    /// Token index of batch row `row`.
    pub(crate) fn token(&self, row: usize) -> usize {
        self.start + (row - self.tokens.start)
    }

    /// Keys that the query at token index `token` sees.
    pub(crate) fn seen(&self, mask: Mask, token: usize) -> Range<usize> {
        let next = self.together.partition_point(|range| range.end <= token);
        let end = match self.together.get(next) {
            Some(range) if range.start <= token => range.end,
            _ => token + 1,
        };
        mask.first_key(token)..end
    }

    /// Page and slot of token `token`. The table must have been checked.
    pub(crate) fn place(&self, token: usize, page_len: usize) -> (usize, usize) {
        (self.pages[token / page_len] as usize, token % page_len)
    }
}

/// Checks that `spans` tile rows `0..n_tokens` and that the page tables reach tokens `first(start)..start + len` inside `cache`.
pub(crate) fn check_spans(
    spans: &[Span<'_>],
    n_tokens: usize,
    cache: &KvCache,
    first: impl Fn(usize) -> usize,
) -> Result<()> {
    let mut expected = 0;
    for (index, span) in spans.iter().enumerate() {
        let Range { start, end } = span.tokens;
        if start != expected || end < start || end > n_tokens {
            return Err(Error::in_span(index, ErrorKind::SpanRows { start, end, expected, n_tokens }));
        }
        expected = end;
        if span.len() == 0 {
            continue;
        }
        let len = span.len();
        let Some(stop) = span.start.checked_add(len) else {
            return Err(Error::in_span(index, ErrorKind::TokenOverflow { start: span.start, len }));
        };
        let mut free = span.start;
        for range in span.together {
            if range.start < free || range.end <= range.start || range.end > stop {
                let kind = ErrorKind::Together { start: range.start, end: range.end, from: free, to: stop };
                return Err(Error::in_span(index, kind));
            }
            free = range.end;
        }
        let needed = stop.div_ceil(cache.page_len());
        if span.pages.len() < needed {
            let found = span.pages.len();
            return Err(Error::in_span(index, ErrorKind::PagesMissing { found, needed, end: stop }));
        }
        let from = first(span.start) / cache.page_len();
        for (entry, &page) in span.pages[..needed].iter().enumerate().skip(from) {
            if page as usize >= cache.n_pages() {
                let kind = ErrorKind::PageOutOfRange { index: entry, page, n_pages: cache.n_pages() };
                return Err(Error::in_span(index, kind));
            }
        }
    }
    if expected != n_tokens {
        return Err(ErrorKind::RowsUncovered { covered: expected, n_tokens }.into());
    }
    Ok(())
}

//! Data from a scheduler gives errors that name it; slices of the wrong length panic.

use skep_attention::{
    Error, ErrorKind, Heads, KvCache, KvType, Mask, Norms, Position, Projections, Queries, Rope, Scratch,
    Span, reference,
};
use skep_quant::Serial;

fn heads() -> Heads {
    Heads::new(2, 1, 8, 8, 1.0).unwrap()
}

/// Three pages of four tokens.
fn cache() -> KvCache {
    KvCache::new(KvType::F32, 3, 4, 1, 8, 8).unwrap()
}

/// Both calls on `n` rows, by the fast path; the reference must agree.
fn both(n: usize, spans: &[Span<'_>], mask: Mask) -> (Result<(), Error>, Result<(), Error>) {
    let (heads, mut cache, mut scratch) = (heads(), cache(), Scratch::new());
    let (q, k, v) = (vec![1.0; n * 16], vec![1.0; n * 8], vec![1.0; n * 8]);
    let (mut queries, mut out) = (vec![0.0; n * 16], vec![0.0; n * 16]);
    let projections = Projections { q: Queries::Plain(&q), k: &k, v: &v };
    let (norms, positions) = (Norms::default(), vec![Position::default(); n]);
    let prepared = skep_attention::prepare(
        &Serial,
        &heads,
        &projections,
        &norms,
        None,
        &positions,
        spans,
        &mut cache,
        &mut scratch,
        &mut queries,
    );
    if prepared.is_err() {
        assert!(queries.iter().all(|&x| x == 0.0), "nothing is written on error");
    }
    let attended =
        skep_attention::attend(&Serial, &heads, &q, None, spans, &cache, mask, &mut scratch, &mut out);
    if attended.is_err() {
        assert!(out.iter().all(|&x| x == 0.0), "nothing is written on error");
    }
    assert_eq!(
        prepared,
        reference::prepare(&heads, &projections, &norms, None, &positions, spans, &mut cache, &mut queries)
    );
    assert_eq!(attended, reference::attend(&heads, &q, None, spans, &cache, mask, &mut out));
    (prepared, attended)
}

#[track_caller]
fn assert_both(n: usize, spans: &[Span<'_>], kind: ErrorKind, span: Option<usize>) {
    let (prepared, attended) = both(n, spans, Mask::Causal);
    for error in [prepared.unwrap_err(), attended.unwrap_err()] {
        assert_eq!((error.kind(), error.span()), (kind, span));
    }
}

#[test]
fn page_tables() {
    let span = |tokens, pages, start| Span { tokens, pages, start, together: &[] };
    let out_of_range = ErrorKind::PageOutOfRange { index: 1, page: 3, n_pages: 3 };
    assert_both(5, &[span(0..5, &[0, 3], 0)], out_of_range, Some(0));
    assert_both(2, &[span(0..1, &[0], 0), span(1..2, &[1, 3], 4)], out_of_range, Some(1));
    let missing = ErrorKind::PagesMissing { found: 1, needed: 2, end: 5 };
    assert_both(5, &[span(0..5, &[0], 0)], missing, Some(0));
    assert_both(1, &[span(0..1, &[0], 4)], missing, Some(0));
    assert_both(1, &[span(0..1, &[], 0)], ErrorKind::PagesMissing { found: 0, needed: 1, end: 1 }, Some(0));
    let overflow = ErrorKind::TokenOverflow { start: usize::MAX, len: 2 };
    assert_both(2, &[span(0..2, &[0], usize::MAX)], overflow, Some(0));
    let missing = ErrorKind::PagesMissing { found: 1, needed: usize::MAX.div_ceil(4), end: usize::MAX };
    assert_both(1, &[span(0..1, &[0], usize::MAX - 1)], missing, Some(0));
    // Entries after the last token are not looked at.
    assert!(both(4, &[span(0..4, &[0, u32::MAX], 0)], Mask::Causal).1.is_ok());

    let error = both(5, &[span(0..5, &[0, 3], 0)], Mask::Causal).0.unwrap_err();
    assert_eq!(error.to_string(), "span 0: page table entry 1 is page 3, but the cache has 3 pages");
}

#[test]
fn pages_written_twice() {
    let span = |tokens, pages, start| Span { tokens, pages, start, together: &[] };
    let shared = |index, page| ErrorKind::PageShared { index, page };
    let within = [span(0..5, &[2, 2], 0)];
    assert_eq!(both(5, &within, Mask::Causal).0.unwrap_err().kind(), shared(1, 2));
    let between = [span(0..1, &[1, 0], 4), span(1..2, &[0], 2)];
    let error = both(2, &between, Mask::Causal).0.unwrap_err();
    assert_eq!((error.kind(), error.span()), (shared(0, 0), Some(1)));
    // Reading a page together is what a shared prefix is for.
    let prefix = [span(0..1, &[1, 0], 4), span(1..2, &[1, 2], 4)];
    assert!(both(2, &prefix, Mask::Causal).0.is_ok());
}

#[test]
fn windows_leave_pages_behind() {
    // Token 8 with a window of 4 sees 5..=8: page entry 0 may be anything.
    let spans = [Span { tokens: 0..1, pages: &[u32::MAX, 0, 1], start: 8, together: &[] }];
    let (prepared, attended) = both(1, &spans, Mask::Window(4));
    assert!(prepared.is_ok() && attended.is_ok());
    let kind = ErrorKind::PageOutOfRange { index: 0, page: u32::MAX, n_pages: 3 };
    assert_eq!(both(1, &spans, Mask::Window(6)).1.unwrap_err().kind(), kind);
    assert_eq!(
        both(1, &spans, Mask::Window(0)).1.unwrap_err().kind(),
        ErrorKind::Zero { name: "attention window" }
    );
}

#[test]
#[expect(clippy::reversed_empty_ranges, reason = "a reversed range is the point")]
fn spans_cover_the_batch() {
    let span = |tokens| Span { tokens, pages: &[0], start: 0, together: &[] };
    let rows = |start, end, expected| ErrorKind::SpanRows { start, end, expected, n_tokens: 3 };
    assert_both(3, &[], ErrorKind::RowsUncovered { covered: 0, n_tokens: 3 }, None);
    assert_both(3, &[span(0..2)], ErrorKind::RowsUncovered { covered: 2, n_tokens: 3 }, None);
    assert_both(3, &[span(1..3)], rows(1, 3, 0), Some(0));
    assert_both(3, &[span(0..2), span(1..3)], rows(1, 3, 2), Some(1));
    assert_both(3, &[span(0..4)], rows(0, 4, 0), Some(0));
    assert_both(3, &[span(0..3), span(3..2)], rows(3, 2, 3), Some(1));
    assert!(both(0, &[], Mask::Causal).1.is_ok());
    assert!(both(2, &[span(0..0), span(0..2), span(2..2)], Mask::Causal).1.is_ok());
}

#[test]
fn shapes_are_validated() {
    let kind = |heads: Result<Heads, Error>| heads.unwrap_err().kind();
    assert_eq!(kind(Heads::new(3, 2, 8, 8, 1.0)), ErrorKind::Groups { q_heads: 3, kv_heads: 2 });
    assert_eq!(kind(Heads::new(1, 2, 8, 8, 1.0)), ErrorKind::Groups { q_heads: 1, kv_heads: 2 });
    assert_eq!(kind(Heads::new(2, 0, 8, 8, 1.0)), ErrorKind::Zero { name: "kv_heads" });
    assert_eq!(kind(Heads::new(2, 1, 8, 0, 1.0)), ErrorKind::Zero { name: "v_dim" });
    assert_eq!(kind(Heads::new(2, 1, 8, 8, f32::NAN)), ErrorKind::Scale);

    let kind =
        |pages, len, heads, k, v| KvCache::new(KvType::F16, pages, len, heads, k, v).unwrap_err().kind();
    assert_eq!(kind(1, 0, 1, 8, 8), ErrorKind::Zero { name: "page_len" });
    assert_eq!(kind(1 << 20, 1 << 20, 1 << 20, 8, 8), ErrorKind::Overflow);
    assert_eq!(kind(1 << 33, 1, 1, 1, 1), ErrorKind::Overflow);
    assert_eq!(kind(1 << 20, 1 << 20, 1, usize::MAX, 1), ErrorKind::Overflow);
    assert_eq!(kind(1 << 20, 1 << 20, 1 << 11, 1 << 10, 1 << 10), ErrorKind::Overflow);
    assert_eq!(kind(1 << 30, 1 << 12, 1 << 4, 1 << 8, 1 << 8), ErrorKind::Allocation { bytes: 1 << 56 });

    let cache = KvCache::new(KvType::F16, 3, 16, 2, 256, 128).unwrap();
    assert_eq!(cache.bytes(), 3 * 16 * 2 * (256 + 128) * 2);
    assert_eq!(
        (cache.n_pages(), cache.page_len(), cache.kv_heads(), cache.k_dim(), cache.v_dim()),
        (3, 16, 2, 256, 128)
    );
    assert_eq!(cache.ty(), KvType::F16);
}

/// Calls `prepare` on one row, with lengths off by the given amounts.
fn prepare_with_lengths(q: usize, k: usize, v: usize, out: usize, rope: usize) {
    let (q, k, v, mut out) = (vec![0.0; q], vec![0.0; k], vec![0.0; v], vec![0.0; out]);
    let projections = Projections { q: Queries::Plain(&q), k: &k, v: &v };
    let rope = Rope::new(rope, 4, 1e4).unwrap();
    let spans = [Span { tokens: 0..1, pages: &[0], start: 0, together: &[] }];
    let (positions, mut cache) = ([Position::default()], cache());
    let norms = Norms::default();
    skep_attention::prepare(
        &Serial,
        &heads(),
        &projections,
        &norms,
        Some(&rope),
        &positions,
        &spans,
        &mut cache,
        &mut Scratch::new(),
        &mut out,
    )
    .unwrap();
}

#[test]
fn right_lengths() {
    prepare_with_lengths(16, 8, 8, 16, 8);
}

#[test]
#[should_panic(expected = "query projection length")]
fn wrong_query_length() {
    prepare_with_lengths(32, 8, 8, 16, 8);
}

#[test]
#[should_panic(expected = "k length")]
fn wrong_key_length() {
    prepare_with_lengths(16, 7, 8, 16, 8);
}

#[test]
#[should_panic(expected = "v length")]
fn wrong_value_length() {
    prepare_with_lengths(16, 8, 9, 16, 8);
}

#[test]
#[should_panic(expected = "q_out length")]
fn wrong_output_length() {
    prepare_with_lengths(16, 8, 8, 15, 8);
}

#[test]
#[should_panic(expected = "differ in head_dim")]
fn wrong_rope() {
    prepare_with_lengths(16, 8, 8, 16, 16);
}

#[test]
#[should_panic(expected = "cache and layer differ in v_dim")]
fn wrong_cache() {
    let cache = KvCache::new(KvType::F32, 3, 4, 1, 8, 4).unwrap();
    let mut out = [0.0; 16];
    let spans = [Span { tokens: 0..1, pages: &[0], start: 0, together: &[] }];
    let _ = skep_attention::attend(
        &Serial,
        &heads(),
        &[0.0; 16],
        None,
        &spans,
        &cache,
        Mask::Causal,
        &mut Scratch::new(),
        &mut out,
    );
}

//! Tokens that see each other in both directions, as the parts of an image do.

mod common;

use std::ops::Range;

use common::{Random, assert_close, assert_same, oracle, wide};
use proptest::prelude::*;
use skep_attention::{
    ErrorKind, Heads, KvCache, KvType, Mask, Norm, Norms, Position, Projections, Queries, Rope, Scratch, Span,
};
use skep_quant::{Serial, Threads};

/// One sequence whose projections are random.
struct Case {
    heads: Heads,
    n: usize,
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
    images: Vec<Range<usize>>,
    mask: Mask,
}

impl Case {
    fn new(n: usize, images: Vec<Range<usize>>, mask: Mask) -> Self {
        let heads = Heads::new(4, 2, 16, 24, 1.0).unwrap();
        let mut random = Random(n as u64);
        let [q, k, v] = [4 * 16, 2 * 16, 2 * 24].map(|width| random.floats(n * width, 1.0));
        Self { heads, n, q, k, v, images, mask }
    }

    /// The rule, key by key.
    fn sees(&self, query: usize, key: usize) -> bool {
        let in_window = match self.mask {
            Mask::Window(window) => key + window > query,
            _ => true,
        };
        let same = self.images.iter().any(|image| image.contains(&query) && image.contains(&key));
        in_window && (key <= query || same)
    }

    /// The outputs when the sequence runs in pieces that end at `cuts`.
    fn run(&self, cuts: &[usize]) -> Vec<f32> {
        let pages: Vec<u32> = (0..self.n.div_ceil(8) as u32).rev().collect();
        let mut cache = KvCache::new(KvType::F32, pages.len(), 8, 2, 16, 24).unwrap();
        let (mut scratch, mut out) = (Scratch::new(), Vec::new());
        let mut start = 0;
        for &end in cuts {
            let rows = end - start;
            let together: Vec<_> =
                self.images.iter().filter(|image| (start..end).contains(&image.start)).cloned().collect();
            let spans = [Span { tokens: 0..rows, pages: &pages, start, together: &together }];
            let part = |data: &[f32]| {
                let width = data.len() / self.n;
                data[start * width..end * width].to_vec()
            };
            let (q, k, v) = (part(&self.q), part(&self.k), part(&self.v));
            let mut turned = vec![0.0; q.len()];
            let projections = Projections { q: Queries::Plain(&q), k: &k, v: &v };
            skep_attention::prepare(
                &Serial,
                &self.heads,
                &projections,
                &Norms::default(),
                None,
                &vec![Position::default(); rows],
                &spans,
                &mut cache,
                &mut scratch,
                &mut turned,
            )
            .unwrap();
            let mut part = vec![0.0; rows * 4 * 24];
            let (par, heads) = (Threads(2), &self.heads);
            skep_attention::attend(
                &par,
                heads,
                &turned,
                None,
                &spans,
                &cache,
                self.mask,
                &mut scratch,
                &mut part,
            )
            .unwrap();
            out.extend(part);
            start = end;
        }
        out
    }
}

fn mask() -> impl Strategy<Value = Mask> {
    prop_oneof![Just(Mask::Causal), (1_usize..80).prop_map(Mask::Window)]
}

/// Lengths of text and images in turn.
fn lengths() -> impl Strategy<Value = Vec<(usize, usize)>> {
    proptest::collection::vec((0_usize..40, 1_usize..90), 1..4)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn every_query_sees_what_the_rule_says(lengths in lengths(), tail in 0_usize..20, mask in mask()) {
        let (mut images, mut ends, mut at) = (Vec::new(), Vec::new(), 0);
        for (text, image) in lengths {
            images.push(at + text..at + text + image);
            at += text + image;
            ends.push(at);
        }
        let n = at + tail;
        let case = Case::new(n, images, mask);
        let whole = case.run(&[n]);
        let sees = |query, key| case.sees(query, key);
        let expected = oracle(&case.heads, &wide(&case.q), &wide(&case.k), &wide(&case.v), sees);
        assert_close(&whole, &expected, 1e-5);
        // Cut behind every image, nothing changes.
        ends.extend((tail > 0).then_some(n));
        assert_same(&case.run(&ends), &whole);
    }
}

#[test]
fn images_change_what_their_tokens_see_and_nothing_else() {
    let images = || vec![10..30, 50..55];
    let with = Case::new(70, images(), Mask::Window(32)).run(&[70]);
    let without = Case::new(70, Vec::new(), Mask::Window(32)).run(&[70]);
    for (token, (with, without)) in with.chunks(4 * 24).zip(without.chunks(4 * 24)).enumerate() {
        // The last token of an image has nothing of it before it.
        let changed = images().iter().any(|image| image.contains(&token) && token + 1 < image.end);
        assert_eq!(with != without, changed, "token {token}");
    }
}

#[test]
fn an_image_is_never_cut() {
    let heads = Heads::new(1, 1, 4, 4, 1.0).unwrap();
    let cache = KvCache::new(KvType::F32, 4, 8, 1, 4, 4).unwrap();
    let q = [0.5; 6 * 4];
    for (images, at) in [
        (vec![1..3, 12..14], Some((1, 10))),
        (vec![10..12, 14..17], Some((14, 12))),
        (vec![11..11, 12..13], Some((11, 10))),
        (vec![10..13, 12..14], Some((12, 13))),
        (vec![10..13, 13..16], None),
    ] {
        let spans = [Span { tokens: 0..6, pages: &[0, 1], start: 10, together: &images }];
        let mut out = [0.0; 6 * 4];
        let mut scratch = Scratch::new();
        let done = skep_attention::attend(
            &Serial,
            &heads,
            &q,
            None,
            &spans,
            &cache,
            Mask::Causal,
            &mut scratch,
            &mut out,
        );
        let found = done.err().map(|error| match error.kind() {
            ErrorKind::Together { start, from, to: 16, .. } => (start, from),
            other => panic!("{other}"),
        });
        assert_eq!(found, at, "{images:?}");
    }
}

#[test]
fn queries_alone_are_those_of_a_whole_layer() {
    let heads = Heads::new(3, 1, 16, 8, 1.0).unwrap();
    let rope = Rope::new(16, 16, 1e4).unwrap();
    let mut random = Random(5);
    let (weight, n) = (random.floats(16, 1.0), 11);
    let [q, k, v] = [3 * 16, 16, 8].map(|width| random.floats(n * width, 1.0));
    let positions: Vec<Position> = (0..n as u32).map(|at| Position::from(at + 7)).collect();
    let norms = Norms { q: Norm::Weight(&weight), k: Norm::Unit, v: Norm::None, eps: 1e-6 };
    let spans = [Span { tokens: 0..n, pages: &[0, 1], start: 0, together: &[] }];
    let mut cache = KvCache::new(KvType::F32, 2, 8, 1, 16, 8).unwrap();
    let (mut whole, mut alone) = (vec![0.0; q.len()], vec![0.0; q.len()]);
    let projections = Projections { q: Queries::Plain(&q), k: &k, v: &v };
    let (par, scratch) = (Threads(2), &mut Scratch::new());
    skep_attention::prepare(
        &par,
        &heads,
        &projections,
        &norms,
        Some(&rope),
        &positions,
        &spans,
        &mut cache,
        scratch,
        &mut whole,
    )
    .unwrap();
    let queries = Queries::Plain(&q);
    skep_attention::prepare_queries(
        &par,
        &heads,
        queries,
        norms.q,
        1e-6,
        Some(&rope),
        &positions,
        &mut alone,
    );
    assert_same(&alone, &whole);
}

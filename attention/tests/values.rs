//! Results against f64 oracles and the scalar reference.

mod common;

use common::{Random, Run, Sequence, assert_close, assert_same, oracle, wide};
use proptest::prelude::*;
use skep_attention::{
    Gate, Heads, KvCache, KvType, Mask, Norm, Norms, Position, Projections, Queries, Rope, Scratch, Span,
    reference,
};
use skep_quant::{Serial, Threads};

/// Plain attention (no norm, no rope, no gate) against brute force.
fn check(heads: Heads, len: usize, ty: KvType, mask: Mask, scale: f32, tolerance: f64) {
    let run =
        Run { heads, gated: false, norms: Norms::default(), rope: None, mask, ty, page_len: 16, seed: 9 };
    let mut sequence = Sequence::random(&mut Random(77), &heads, len, false, scale);
    if ty == KvType::F16 {
        // What the cache can hold, so that only arithmetic is compared.
        let round = |x: &mut f32| *x = half::f16::from_f32(*x).to_f32();
        sequence.k.iter_mut().for_each(round);
        sequence.v.iter_mut().for_each(round);
    }
    let sees = |t: usize, j: usize| {
        j <= t
            && match mask {
                Mask::Window(w) => t - j < w,
                _ => true,
            }
    };
    let expected = oracle(&heads, &wide(&sequence.q), &wide(&sequence.k), &wide(&sequence.v), sees);
    for chunk in [len, 1] {
        let out =
            run.outputs(&Threads(2), &mut Scratch::new(), core::slice::from_ref(&sequence), |_, _| chunk);
        assert_close(&out[0], &expected, tolerance);
    }
}

fn heads(q_heads: usize, kv_heads: usize, dim: usize) -> Heads {
    Heads::new(q_heads, kv_heads, dim, dim, (dim as f32).powf(-0.5)).unwrap()
}

#[test]
fn head_sizes_and_groups() {
    for dim in [64, 128, 256, 512, 8, 40, 72, 88, 5, 100] {
        check(heads(4, 2, dim), 70, KvType::F16, Mask::Causal, 1.0, 2e-6);
    }
    for (q_heads, kv_heads) in [(2, 2), (4, 2), (16, 2), (6, 2), (8, 1), (33, 1), (66, 2)] {
        check(heads(q_heads, kv_heads, 64), 40, KvType::F32, Mask::Causal, 1.0, 2e-6);
    }
    check(Heads::new(4, 2, 48, 80, 1.0).unwrap(), 40, KvType::F32, Mask::Causal, 1.0, 2e-6);
}

#[test]
fn several_splits() {
    check(heads(4, 2, 32), 1100, KvType::F16, Mask::Causal, 3.0, 5e-6);
}

#[test]
fn windows() {
    for window in [1, 2, 31, 32, 33, 100, 255, 256, 257, 600, 1 << 40, usize::MAX] {
        check(heads(2, 1, 16), 560, KvType::F32, Mask::Window(window), 2.0, 5e-6);
    }
}

/// Queries and keys of entries around 30: scores of unscaled products near 230,000.
#[test]
fn large_scores_stay_finite_and_right() {
    let heads = heads(8, 1, 256);
    for ty in [KvType::F16, KvType::F32] {
        let run = Run {
            heads,
            gated: false,
            norms: Norms::default(),
            rope: None,
            mask: Mask::Causal,
            ty,
            page_len: 16,
            seed: 1,
        };
        let mut random = Random(4);
        let mut sequence = Sequence::random(&mut random, &heads, 80, false, 1.0);
        // Multiples of 1/4 near 30 are exact in half precision and their products and sums in f32: no rounding to argue about.
        for x in sequence.q.iter_mut().chain(&mut sequence.k) {
            *x = 30.0 + (*x * 8.0).round() * 0.25;
        }
        sequence.v.iter_mut().for_each(|v| *v = half::f16::from_f32(*v).to_f32());
        let expected =
            oracle(&heads, &wide(&sequence.q), &wide(&sequence.k), &wide(&sequence.v), |t, j| j <= t);
        assert!(f64::from(sequence.q[0]) * f64::from(sequence.k[0]) * 256.0 > 150_000.0);
        let out = run.outputs(&Serial, &mut Scratch::new(), core::slice::from_ref(&sequence), |_, _| 80);
        assert_close(&out[0], &expected, 1e-5);
    }
}

/// Rows numbered through: head `h` has query entries `2·d·h..`, then as many gate entries.
#[test]
fn queries_and_gates_are_interleaved_by_head() {
    let heads = Heads::new(2, 1, 4, 4, 0.5).unwrap();
    let q = (0..16).map(|i| i as f32).collect::<Vec<_>>();
    let (k, v) = (vec![1.0; 4], vec![2.0, -4.0, 8.0, 0.5]);
    let mut cache = KvCache::new(KvType::F32, 1, 4, 1, 4, 4).unwrap();
    let spans = [Span { tokens: 0..1, pages: &[0], start: 0, together: &[] }];
    let mut scratch = Scratch::new();
    let mut queries = vec![0.0; 8];
    let projections = Projections { q: Queries::GateInterleaved(&q), k: &k, v: &v };
    let positions = [Position::from(0)];
    skep_attention::prepare(
        &Serial,
        &heads,
        &projections,
        &Norms::default(),
        None,
        &positions,
        &spans,
        &mut cache,
        &mut scratch,
        &mut queries,
    )
    .unwrap();
    assert_eq!(queries, [0.0, 1.0, 2.0, 3.0, 8.0, 9.0, 10.0, 11.0]);

    let mut out = vec![0.0; 8];
    let gate = Some(Gate::Interleaved(&q));
    skep_attention::attend(
        &Serial,
        &heads,
        &queries,
        gate,
        &spans,
        &cache,
        Mask::Causal,
        &mut scratch,
        &mut out,
    )
    .unwrap();
    // One key only: attention returns its value.
    let expected = [4.0, 5.0, 6.0, 7.0, 12.0, 13.0, 14.0, 15.0]
        .iter()
        .zip(v.iter().cycle())
        .map(|(gate, v)| f64::from(*v) / (1.0 + f64::exp(-gate)))
        .collect::<Vec<_>>();
    assert_close(&out, &expected, 1e-6);

    let separate = (0..16).filter(|i| i % 8 >= 4).map(|i| i as f32).collect::<Vec<_>>();
    let mut same = vec![0.0; 8];
    let gate = Some(Gate::Plain(&separate));
    skep_attention::attend(
        &Serial,
        &heads,
        &queries,
        gate,
        &spans,
        &cache,
        Mask::Causal,
        &mut scratch,
        &mut same,
    )
    .unwrap();
    assert_same(&out, &same);
}

#[test]
fn half_precision_saturates_but_keeps_faults() {
    let heads = Heads::new(1, 1, 16, 9, 1.0).unwrap();
    let mut k = vec![65504.0, 65519.9, 65520.0, 1e30, -1e30, f32::MAX, f32::MIN, 1.0, 6e-8, -0.0, 1e-10, 3.0];
    k.extend([f32::INFINITY, f32::NEG_INFINITY, f32::NAN, 2049.0]);
    let v = vec![7e4, -7e4, f32::INFINITY, 0.1, 0.2, 0.3, 0.4, 0.5, 8e4];
    let projections = Projections { q: Queries::Plain(&[0.0; 16]), k: &k, v: &v };
    let spans = [Span { tokens: 0..1, pages: &[1], start: 3, together: &[] }];
    let (mut fast, mut slow) = [0; 2].map(|_| KvCache::new(KvType::F16, 2, 4, 1, 16, 9).unwrap()).into();
    let positions = [Position::from(3)];
    let (norms, mut q) = (Norms::default(), [0.0; 16]);
    let mut scratch = Scratch::new();
    skep_attention::prepare(
        &Serial,
        &heads,
        &projections,
        &norms,
        None,
        &positions,
        &spans,
        &mut fast,
        &mut scratch,
        &mut q,
    )
    .unwrap();
    reference::prepare(&heads, &projections, &norms, None, &positions, &spans, &mut slow, &mut q).unwrap();
    for cache in [&fast, &slow] {
        let (mut key, mut value) = ([0.0; 16], [0.0; 9]);
        cache.read_k(1, 3, 0, &mut key);
        cache.read_v(1, 3, 0, &mut value);
        let max = 65504.0;
        assert_eq!(key[..8], [max, max, max, max, -max, max, -max, 1.0]);
        assert_eq!(key[8], half::f16::from_f32(6e-8).to_f32());
        assert!(key[8] > 0.0 && key[9] == 0.0 && key[9].is_sign_negative() && key[10] == 0.0);
        assert_eq!(key[11..14], [3.0, f32::INFINITY, f32::NEG_INFINITY]);
        assert!(key[14].is_nan());
        assert_eq!(key[15], 2048.0);
        assert_eq!((value[0], value[1], value[2], value[8]), (max, -max, f32::INFINITY, max));
    }
}

/// A token of NaN makes NaN of the rows that see it and changes no bit of the others.
#[test]
fn nan_stays_in_the_rows_that_see_it() {
    let heads = heads(4, 2, 24);
    for (ty, bad) in [(KvType::F16, f32::NAN), (KvType::F32, f32::NAN), (KvType::F32, f32::INFINITY)] {
        for mask in [Mask::Causal, Mask::Window(40)] {
            let run = Run {
                heads,
                gated: false,
                norms: Norms::default(),
                rope: None,
                mask,
                ty,
                page_len: 8,
                seed: 2,
            };
            let mut random = Random(8);
            let clean = [90, 50].map(|len| Sequence::random(&mut random, &heads, len, false, 1.0));
            let mut dirty = clean.clone();
            // Token 37 of the first sequence, first key/value head: keys and values. Token 10 of the second: one query head.
            dirty[0].k[37 * 48..][..24].fill(bad);
            dirty[0].v[37 * 48..][..24].fill(bad);
            dirty[1].q[(10 * 4 + 1) * 24..][..24].fill(f32::NAN);
            let outputs = |sequences: &[Sequence]| {
                run.outputs(&Threads(2), &mut Scratch::new(), sequences, |i, _| [90, 13][i])
            };
            let (clean, dirty) = (outputs(&clean), outputs(&dirty));
            for (i, (clean, dirty)) in clean.iter().zip(&dirty).enumerate() {
                for (row_head, (clean, dirty)) in clean.chunks(24).zip(dirty.chunks(24)).enumerate() {
                    let (row, head) = (row_head / 4, row_head % 4);
                    let seen = row >= 37 && (mask == Mask::Causal || row < 37 + 40);
                    if (i == 0 && head < 2 && seen) || (i == 1 && row == 10 && head == 1) {
                        assert!(dirty.iter().all(|x| x.is_nan()), "sequence {i} row {row} head {head}");
                    } else {
                        assert_same(clean, dirty);
                    }
                }
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Everything together, against the scalar reference.
    #[test]
    fn equals_the_reference(
        seed in any::<u64>(),
        group in prop::sample::select(vec![1usize, 2, 8]),
        kv_heads in 1usize..4,
        head_dim in 1usize..80,
        v_dim in 1usize..80,
        ty in prop::sample::select(vec![KvType::F16, KvType::F32]),
        window in prop::option::of(1usize..60),
        start in 0usize..100,
        lens in prop::collection::vec(0usize..40, 1..4),
        (norm, gated, rotated) in any::<(u8, bool, bool)>(),
        workers in 1usize..4,
    ) {
        let heads = Heads::new(group * kv_heads, kv_heads, head_dim, v_dim, (head_dim as f32).powf(-0.5)).unwrap();
        let mut random = Random(seed);
        let n = lens.iter().sum::<usize>();
        let q = random.floats(n * group * kv_heads * head_dim * 2, 2.0);
        let (k, v) = (random.floats(n * kv_heads * head_dim, 2.0), random.floats(n * kv_heads * v_dim, 2.0));
        let projections = Projections { q: Queries::GateInterleaved(&q), k: &k, v: &v };
        let gate = random.floats(n * group * kv_heads * v_dim, 4.0);
        let gate = gated.then_some(Gate::Plain(&gate));
        let (q_weight, v_weight) = (random.floats(head_dim, 2.0), random.floats(v_dim, 2.0));
        let pick = |which: u8, weight| [Norm::None, Norm::Unit, Norm::Weight(weight)][usize::from(which % 3)];
        let norms = Norms { q: pick(norm, &q_weight), k: pick(norm / 3, &q_weight), v: pick(norm / 9, &v_weight), eps: 1e-6 };
        let rope = (rotated && head_dim > 1).then(|| Rope::new(head_dim, 2 * head_dim.div_ceil(4), 1e4).unwrap());
        let positions = (0..n).map(|_| Position { t: random.next() as u32 >> 14, h: 3, w: 7 }).collect::<Vec<_>>();
        let mask = window.map_or(Mask::Causal, Mask::Window);

        let page_len = 8;
        let per_sequence = (start + 40usize).div_ceil(page_len);
        let tables = random.shuffled(per_sequence * lens.len());
        let mut row = 0;
        let spans = lens.iter().zip(tables.chunks(per_sequence)).map(|(len, pages)| {
            row += len;
            Span { tokens: row - len..row, pages, start, together: &[] }
        }).collect::<Vec<_>>();

        let mut caches = [0; 2].map(|_| KvCache::new(ty, tables.len(), page_len, kv_heads, head_dim, v_dim).unwrap());
        // History, by the reference in both.
        let history = lens.len() * start;
        let (old_q, old_k, old_v) = (
            vec![0.0; history * group * kv_heads * head_dim],
            random.floats(history * kv_heads * head_dim, 2.0),
            random.floats(history * kv_heads * v_dim, 2.0),
        );
        let old_spans = spans.iter().enumerate().map(|(i, span)| Span { tokens: i * start..(i + 1) * start, start: 0, ..span.clone() });
        let old_spans = old_spans.collect::<Vec<_>>();
        let old = Projections { q: Queries::Plain(&old_q), k: &old_k, v: &old_v };
        for cache in &mut caches {
            let positions = vec![Position::default(); history];
            reference::prepare(&heads, &old, &Norms::default(), None, &positions, &old_spans, cache, &mut old_q.clone()).unwrap();
        }

        let [slow, fast] = &mut caches;
        let (mut slow_q, mut fast_q) = (vec![0.0; n * group * kv_heads * head_dim], vec![1.0; n * group * kv_heads * head_dim]);
        let mut scratch = Scratch::new();
        let par = Threads(workers);
        reference::prepare(&heads, &projections, &norms, rope.as_ref(), &positions, &spans, slow, &mut slow_q).unwrap();
        skep_attention::prepare(&par, &heads, &projections, &norms, rope.as_ref(), &positions, &spans, fast, &mut scratch, &mut fast_q).unwrap();
        assert_close(&fast_q, &wide(&slow_q), 2e-6);

        let (mut slow_out, mut fast_out) = (vec![0.0; n * group * kv_heads * v_dim], vec![1.0; n * group * kv_heads * v_dim]);
        reference::attend(&heads, &slow_q, gate, &spans, slow, mask, &mut slow_out).unwrap();
        // The same cache for both, so that only the second call is compared.
        skep_attention::attend(&par, &heads, &slow_q, gate, &spans, slow, mask, &mut scratch, &mut fast_out).unwrap();
        assert_close(&fast_out, &wide(&slow_out), 1e-5);

        let tolerance = if ty == KvType::F16 { 2e-3 } else { 4e-6 };
        let (mut a, mut b) = (vec![0.0; head_dim], vec![0.0; head_dim]);
        let (mut c, mut d) = (vec![0.0; v_dim], vec![0.0; v_dim]);
        for page in 0..tables.len() as u32 {
            for (slot, head) in (0..page_len).flat_map(|slot| (0..kv_heads).map(move |head| (slot, head))) {
                slow.read_k(page, slot, head, &mut a);
                fast.read_k(page, slot, head, &mut b);
                assert_close(&b, &wide(&a), tolerance);
                slow.read_v(page, slot, head, &mut c);
                fast.read_v(page, slot, head, &mut d);
                assert_close(&d, &wide(&c), tolerance);
            }
        }
    }
}

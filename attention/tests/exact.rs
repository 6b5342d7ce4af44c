//! A row's result is the same to the bit however it is computed.

mod common;

use common::{Random, Run, Sequence, assert_same};
use proptest::prelude::*;
use skep_attention::{Heads, KvType, Mask, Norm, Norms, Rope, Scratch};
use skep_quant::{Serial, Threads};

fn layer() -> (Heads, Vec<f32>, Vec<f32>, Rope) {
    let heads = Heads::new(4, 2, 24, 24, 24f32.powf(-0.5)).unwrap();
    let mut random = Random(1);
    let (q_norm, k_norm) = (random.floats(24, 1.5), random.floats(24, 1.5));
    (heads, q_norm, k_norm, Rope::new(24, 12, 1e4).unwrap())
}

fn run<'a>(heads: Heads, q_norm: &'a [f32], k_norm: &'a [f32], rope: &'a Rope) -> Run<'a> {
    Run {
        heads,
        gated: true,
        norms: Norms { q: Norm::Weight(q_norm), k: Norm::Weight(k_norm), v: Norm::None, eps: 1e-6 },
        rope: Some(rope),
        mask: Mask::Causal,
        ty: KvType::F16,
        page_len: 16,
        seed: 5,
    }
}

#[test]
fn chunked_prefill_equals_one_shot() {
    let (heads, q_norm, k_norm, rope) = layer();
    let run = run(heads, &q_norm, &k_norm, &rope);
    let sequence = [Sequence::random(&mut Random(2), &heads, 600, true, 2.0)];
    let mut scratch = Scratch::new();
    let whole = run.outputs(&Serial, &mut scratch, &sequence, |_, _| 600);
    for chunk in [1, 3, 7, 63, 64, 65, 128, 200] {
        let parts = run.outputs(&Serial, &mut scratch, &sequence, |_, _| chunk);
        assert_same(&parts[0], &whole[0]);
    }
    // Prefill, then decode.
    let parts = run.outputs(&Threads(2), &mut scratch, &sequence, |_, done| if done < 500 { 500 } else { 1 });
    assert_same(&parts[0], &whole[0]);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn neighbours_cuts_pages_workers_do_not_matter(
        seed in any::<u64>(),
        lens in prop::collection::vec(1usize..700, 1..4),
        chunks in prop::collection::vec(1usize..300, 3),
        page_len in prop::sample::select(vec![1usize, 5, 16, 32, 100, 256]),
        workers in 1usize..6,
        window in prop::option::of(1usize..400),
        ty in prop::sample::select(vec![KvType::F16, KvType::F32]),
        shape in prop::sample::select(vec![(4usize, 2usize, 24usize, 24usize), (8, 1, 8, 40), (3, 3, 5, 7), (40, 1, 16, 8)]),
        scale in prop::sample::select(vec![0.5f32, 3.0, 40.0]),
    ) {
        let (q_heads, kv_heads, head_dim, v_dim) = shape;
        let heads = Heads::new(q_heads, kv_heads, head_dim, v_dim, 1.0 / (head_dim as f32).sqrt()).unwrap();
        let gated = head_dim == v_dim;
        let rope = Rope::new(head_dim, head_dim & !1, 1e6).unwrap();
        let mut random = Random(seed);
        let sequences = lens.iter().map(|&len| Sequence::random(&mut random, &heads, len, gated, scale)).collect::<Vec<_>>();
        let mask = window.map_or(Mask::Causal, Mask::Window);
        let alone = Run { heads, gated, norms: Norms::default(), rope: Some(&rope), mask, ty, page_len: 64, seed: 3 };
        let together = Run { page_len, seed, norms: Norms::default(), ..alone };
        let mut scratch = Scratch::new();
        let outputs = together.outputs(&Threads(workers), &mut scratch, &sequences, |i, done| {
            // Uneven cuts: a different length at every step.
            1 + (chunks[i] * (done + 7)) % 293 % chunks[i].max(1)
        });
        for (sequence, output) in sequences.iter().zip(&outputs) {
            let one = alone.outputs(&Serial, &mut Scratch::new(), core::slice::from_ref(sequence), |_, _| sequence.len);
            assert_same(output, &one[0]);
        }
    }
}

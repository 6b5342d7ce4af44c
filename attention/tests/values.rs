//! Results against f64 oracles.

mod common;

use common::{Random, Run, Sequence, Threads, assert_close, oracle, wide};
use skep_attention::{Heads, KvType, Mask, Norms, Scratch};

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
                Mask::Window(w) => j + w > t,
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

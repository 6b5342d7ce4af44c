//! The experts on the CPU against the plain reference, and against themselves under other batches and threads.
#![cfg(feature = "cpu")]

mod common;

use common::{Random, weights};
use proptest::prelude::*;
use skep_moe_cache::cpu::{Activation, Bank, Experts, Scratch, experts};
use skep_moe_cache::router::Options;
use skep_moe_cache::{Routes, reference, route};
use skep_quant::{Activations, Parallel, Precision, Serial, Threads, Type};

/// Weights of a layer with `ff` hidden units.
struct Layer {
    n_experts: usize,
    hidden: usize,
    ff: usize,
    types: [Type; 3],
    /// gate, up, down.
    data: [Vec<u8>; 3],
    activation: Activation,
}

impl Layer {
    fn new(n_experts: usize, hidden: usize, ff: usize, types: [Type; 3], random: &mut Random) -> Self {
        let len = n_experts * hidden * ff;
        let data = types.map(|ty| weights(ty, len, random));
        Self { n_experts, hidden, ff, types, data, activation: Activation::Silu }
    }

    fn experts(&self) -> Experts<'_> {
        let bank = |i: usize, rows, cols| {
            Bank::new(self.types[i], self.n_experts, rows, cols, &self.data[i]).unwrap()
        };
        let (gate, up) = (bank(0, self.ff, self.hidden), bank(1, self.ff, self.hidden));
        Experts::new(gate, up, bank(2, self.hidden, self.ff), self.activation).unwrap()
    }

    fn routes(&self, n_tokens: usize, top_k: usize, random: &mut Random) -> Routes {
        // Some experts popular, some never used.
        let logits: Vec<f32> = (0..n_tokens * self.n_experts)
            .map(|i| 2.0 * random.unit() - (i % self.n_experts) as f32 / self.n_experts as f32)
            .collect();
        let mut routes = Routes::new();
        route(&logits, self.n_experts, top_k, &Options::default(), &mut routes).unwrap();
        routes
    }
}

fn run(
    par: &dyn Parallel,
    layer: Experts<'_>,
    x: &[f32],
    routes: &Routes,
    precision: Precision,
    scratch: &mut Scratch,
) -> Vec<f32> {
    let mut acts = Activations::new();
    acts.fill(par, x, layer.hidden(), layer.forms(precision));
    let mut out = vec![0.0; x.len()];
    experts(par, &layer, &acts, routes, precision, scratch, &mut out);
    out
}

/// Mean squared difference over mean square.
fn nmse(a: &[f32], b: &[f32]) -> f64 {
    let square = |x: f32| f64::from(x) * f64::from(x);
    let difference: f64 = a.iter().zip(b).map(|(a, b)| square(a - b)).sum();
    difference / b.iter().map(|&b| square(b)).sum::<f64>().max(1e-30)
}

#[test]
fn experts_are_the_reference() {
    use Type::{BF16, F32, Q4_0, Q4_1, Q4_K, Q5_0, Q5_1, Q5_K, Q6_K, Q8_0};
    let mut random = Random(5);
    let mut scratch = Scratch::new();
    for (hidden, ff, types) in [
        (256, 256, [Q4_K, Q4_K, Q6_K]),
        (512, 256, [Q5_K, Q6_K, Q4_K]),
        (256, 96, [Q4_K, Q4_K, Q5_0]),
        (96, 160, [Q8_0, Q4_0, Q5_1]),
        (32, 32, [Q4_1, Q5_1, Q8_0]),
        (40, 24, [F32, F32, F32]),
        (33, 7, [BF16, F32, BF16]),
        (64, 33, [Q8_0, BF16, F32]),
    ] {
        for (n_tokens, top_k) in [(1, 1), (1, 4), (3, 4), (70, 3)] {
            let mut layer = Layer::new(9, hidden, ff, types, &mut random);
            for activation in [Activation::Silu, Activation::GeluTanh] {
                layer.activation = activation;
                let x = random.floats(n_tokens * hidden);
                let routes = layer.routes(n_tokens, top_k, &mut random);
                let expected = reference::experts(&layer.experts(), &x, &routes);
                let mut of =
                    |precision| run(&Threads(3), layer.experts(), &x, &routes, precision, &mut scratch);
                let exact = nmse(&of(Precision::Exact), &expected);
                let fast = nmse(&of(Precision::Fast), &expected);
                let case = format!("{hidden} x {ff} {types:?}, {n_tokens} tokens x {top_k}, {activation:?}");
                assert!(exact < 1e-11, "{case}: exact {exact:e}");
                assert!(fast < 2e-3, "{case}: fast {fast:e}");
                assert!(expected.iter().any(|y| y.abs() > 1e-4), "{case}: nothing to compare");
            }
        }
    }
}

#[test]
fn a_fused_bank_gives_the_bits_of_separate_ones() {
    let mut random = Random(6);
    let layer = Layer::new(8, 256, 64, [Type::Q4_K, Type::Q4_K, Type::Q8_0], &mut random);
    let split = layer.experts();
    let fused: Vec<u8> = (0..8).flat_map(|e| [split.gate(e).data(), split.up(e).data()].concat()).collect();
    let gate_up = Bank::new(Type::Q4_K, 8, 128, 256, &fused).unwrap();
    let down = Bank::new(Type::Q8_0, 8, 256, 64, &layer.data[2]).unwrap();
    let fused = Experts::fused(gate_up, down, Activation::Silu).unwrap();
    let x = random.floats(5 * 256);
    let routes = layer.routes(5, 2, &mut random);
    let mut scratch = Scratch::new();
    for precision in [Precision::Fast, Precision::Exact] {
        let a = run(&Serial, split, &x, &routes, precision, &mut scratch);
        assert_eq!(a, run(&Serial, fused, &x, &routes, precision, &mut scratch));
        // The order matters: up before gate is another function.
        let gate = Bank::new(Type::Q4_K, 8, 64, 256, &layer.data[0]).unwrap();
        let up = Bank::new(Type::Q4_K, 8, 64, 256, &layer.data[1]).unwrap();
        let swapped = Experts::new(up, gate, down, Activation::Silu).unwrap();
        assert!(nmse(&a, &run(&Serial, swapped, &x, &routes, precision, &mut scratch)) > 0.01);
    }
}

#[test]
fn weighted_outputs_are_summed_in_rank_order_and_added() {
    // Expert e gives silu(1) * scale[e] whatever its rank: 1 hidden unit, 1 column.
    let scale = [1e8_f32, 1.0, -1e8];
    let bytes = |x: &[f32]| x.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<u8>>();
    let (ones, down) = (bytes(&[1.0; 3]), bytes(&scale));
    let bank = |data| Bank::new(Type::F32, 3, 1, 1, data).unwrap();
    let layer = Experts::new(bank(&ones), bank(&ones), bank(&down), Activation::Silu).unwrap();
    let mut silu = [0.0];
    Activation::Silu.apply(&[1.0], &[1.0], &mut silu);
    let mut acts = Activations::new();
    acts.fill(&Serial, &[1.0; 3], 1, layer.forms(Precision::Exact));
    let ids = vec![0, 1, 2, 0, 2, 1, 1, 0, 2];
    let routes = Routes::from_parts(3, ids.clone(), vec![1.0; 9]).unwrap();
    let mut out = [0.5; 3];
    experts(&Serial, &layer, &acts, &routes, Precision::Exact, &mut Scratch::new(), &mut out);
    let expected: Vec<f32> = ids
        .chunks(3)
        .map(|ids| 0.5 + ids.iter().fold(0.0, |sum, &id| sum + silu[0] * scale[id as usize]))
        .collect();
    assert_eq!(out.to_vec(), expected);
    assert_ne!(out[0], out[1]);
}

#[test]
fn no_tokens_is_no_work() {
    let layer = Layer::new(4, 32, 32, [Type::Q8_0; 3], &mut Random(1));
    let routes = Routes::from_parts(2, vec![], vec![]).unwrap();
    let mut scratch = Scratch::new();
    assert!(run(&Serial, layer.experts(), &[], &routes, Precision::Fast, &mut scratch).is_empty());
}

#[test]
#[should_panic(expected = "tokens of the activations and of the routes")]
fn routes_of_another_batch_are_refused() {
    let mut random = Random(1);
    let layer = Layer::new(4, 32, 32, [Type::Q8_0; 3], &mut random);
    let routes = layer.routes(2, 2, &mut random);
    run(&Serial, layer.experts(), &[0.0; 32], &routes, Precision::Fast, &mut Scratch::new());
}

#[test]
#[should_panic(expected = "a route names expert 4 of 4")]
fn routes_of_another_layer_are_refused() {
    let layer = Layer::new(4, 32, 32, [Type::Q8_0; 3], &mut Random(1));
    let routes = Routes::from_parts(1, vec![4], vec![1.0]).unwrap();
    run(&Serial, layer.experts(), &[0.0; 32], &routes, Precision::Fast, &mut Scratch::new());
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    /// Bits do not depend on batch neighbours, workers, or earlier use of the buffers.
    #[test]
    fn a_token_gets_the_same_bits_in_any_batch(
        seed in any::<u64>(),
        n_tokens in 1..80_usize,
        top_k in 1..5_usize,
        n_experts in 5..12_usize,
        workers in 1..6_usize,
        kind in 0..3_usize,
        exact in any::<bool>(),
    ) {
        use Type::{F32, Q4_K, Q5_0, Q6_K, Q8_0};
        let (hidden, ff, types) =
            [(256, 256, [Q4_K, Q4_K, Q6_K]), (256, 96, [Q4_K, Q6_K, Q5_0]), (96, 48, [Q8_0, Q8_0, F32])][kind];
        let precision = if exact { Precision::Exact } else { Precision::Fast };
        let mut random = Random(seed);
        let layer = Layer::new(n_experts, hidden, ff, types, &mut random);
        let x = random.floats(n_tokens * hidden);
        let routes = layer.routes(n_tokens, top_k, &mut random);
        let mut scratch = Scratch::new();
        let whole = run(&Threads(workers), layer.experts(), &x, &routes, precision, &mut scratch);
        prop_assert!(whole.iter().all(|y| y.is_finite()));
        for token in 0..n_tokens {
            let at = token * top_k..(token + 1) * top_k;
            let alone = Routes::from_parts(top_k, routes.experts()[at.clone()].to_vec(), routes.weights()[at].to_vec());
            let row = token * hidden..(token + 1) * hidden;
            let alone = run(&Serial, layer.experts(), &x[row.clone()], &alone.unwrap(), precision, &mut scratch);
            prop_assert_eq!(&whole[row], alone, "token {}", token);
        }
    }
}

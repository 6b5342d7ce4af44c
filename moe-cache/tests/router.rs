//! The router against a plain sort of probabilities.
#![cfg(any(feature = "std", feature = "libm"))]

use proptest::collection::vec;
use proptest::prelude::*;
use skep_moe_cache::router::Options;
use skep_moe_cache::{Norm, Routes, reference, route};

/// Wide, narrow and quantised logits: the last kind is full of exact ties.
fn logits(n: usize) -> impl Strategy<Value = Vec<f32>> {
    prop_oneof![
        vec(-30.0..30.0_f32, n),
        vec(-0.01..0.01_f32, n),
        vec((-4..4_i32).prop_map(|x| x as f32 * 0.5), n),
        vec(
            prop_oneof![Just(-0.0_f32), Just(0.0), Just(20.0), Just(20.0_f32.next_down()), -1e30..1e30_f32],
            n
        ),
    ]
}

fn case() -> impl Strategy<Value = (usize, usize, Vec<f32>)> {
    (1..70_usize, 1..5_usize).prop_flat_map(|(n_experts, n_tokens)| {
        (Just(n_experts), 1..=n_experts.min(12), logits(n_experts * n_tokens))
    })
}

proptest! {
    #[test]
    fn the_router_is_the_plain_sort((n_experts, top_k, logits) in case()) {
        let mut routes = Routes::new();
        route(&logits, n_experts, top_k, &Options::default(), &mut routes).unwrap();
        let expected: Vec<_> = logits.chunks(n_experts).flat_map(|row| reference::route(row, top_k)).collect();
        prop_assert_eq!(routes.n_tokens() * top_k, expected.len());
        prop_assert_eq!(routes.experts(), expected.iter().map(|&(expert, _)| expert).collect::<Vec<_>>());
        for (&weight, &(_, other)) in routes.weights().iter().zip(&expected) {
            prop_assert!((weight - other).abs() <= 1e-6, "{weight} {other}");
        }
        for weights in routes.weights().chunks(top_k) {
            prop_assert!((weights.iter().sum::<f32>() - 1.0).abs() < 1e-5);
            prop_assert!(weights.is_sorted_by(|a, b| a >= b));
        }
    }

    #[test]
    fn a_token_is_routed_alike_whatever_its_neighbours((n_experts, top_k, logits) in case()) {
        let mut whole = Routes::new();
        let mut one = Routes::new();
        for norm in [Norm::Full, Norm::TopK] {
            let options = Options::default().with_norm(norm);
            route(&logits, n_experts, top_k, &options, &mut whole).unwrap();
            for (token, row) in logits.chunks(n_experts).enumerate() {
                route(row, n_experts, top_k, &options, &mut one).unwrap();
                let at = token * top_k..(token + 1) * top_k;
                prop_assert_eq!(&whole.experts()[at.clone()], one.experts());
                prop_assert_eq!(&whole.weights()[at], one.weights());
            }
        }
    }

    /// Renumbering the experts renumbers the answer, as long as there are no ties.
    #[test]
    fn expert_numbers_mean_nothing_without_ties(
        order in Just((0..32_usize).collect::<Vec<_>>()).prop_shuffle(),
        start in -5.0..5.0_f32,
        top_k in 1..9_usize,
    ) {
        let plain: Vec<f32> = (0..32).map(|i| start + 0.3 * i as f32).collect();
        let mixed: Vec<f32> = order.iter().map(|&i| plain[i]).collect();
        let (mut a, mut b) = (Routes::new(), Routes::new());
        route(&plain, 32, top_k, &Options::default(), &mut a).unwrap();
        route(&mixed, 32, top_k, &Options::default(), &mut b).unwrap();
        let back: Vec<u32> = b.experts().iter().map(|&expert| order[expert as usize] as u32).collect();
        prop_assert_eq!(a.experts(), back);
        prop_assert_eq!(a.weights(), b.weights());
    }
}

//! Laws of sampling.

use proptest::prelude::*;
use skep_engine::ErrorKind;
use skep_engine::sampler::{Sampler, Sampling};

fn sampling(change: impl FnOnce(&mut Sampling)) -> Sampling {
    let mut sampling = Sampling::default();
    sampling.seed = Some(1);
    change(&mut sampling);
    sampling
}

fn one(sampling: &Sampling, logits: &[f32]) -> u32 {
    Sampler::new(sampling).unwrap().sample(&mut logits.to_vec(), &[]).unwrap()
}

/// How often each token comes in `n` draws.
fn counts(sampling: &Sampling, logits: &[f32], n: usize) -> Vec<usize> {
    let mut sampler = Sampler::new(sampling).unwrap();
    let mut counts = vec![0; logits.len()];
    for _ in 0..n {
        counts[sampler.sample(&mut logits.to_vec(), &[]).unwrap() as usize] += 1;
    }
    counts
}

fn softmax(logits: &[f32], temperature: f32) -> Vec<f64> {
    let weights: Vec<f64> = logits.iter().map(|&logit| f64::from(logit / temperature).exp()).collect();
    let sum: f64 = weights.iter().sum();
    weights.iter().map(|weight| weight / sum).collect()
}

/// Pearson's statistic of counts against probabilities; tokens of probability zero must not occur.
fn chi_square(counts: &[usize], probabilities: &[f64]) -> f64 {
    let n: usize = counts.iter().sum();
    let mut sum = 0.0;
    for (&count, &probability) in counts.iter().zip(probabilities) {
        if probability == 0.0 {
            assert_eq!(count, 0);
            continue;
        }
        let expected = n as f64 * probability;
        sum += (count as f64 - expected).powi(2) / expected;
    }
    sum
}

const LOGITS: [f32; 8] = [0.0, 1.0, -1.0, 2.0, 0.5, 1.5, -0.5, 2.0];

#[test]
fn draws_follow_the_distribution() {
    // The 99.9 % quantile of chi-square with 7 degrees of freedom; seeds are fixed, so the test is too.
    let limit = 24.32;
    for temperature in [0.5, 1.0, 2.0] {
        let counts = counts(&sampling(|s| s.temperature = temperature), &LOGITS, 20_000);
        let statistic = chi_square(&counts, &softmax(&LOGITS, temperature));
        assert!(statistic < limit, "{temperature}: {statistic}");
        // The control: another temperature's distribution is told apart.
        assert!(chi_square(&counts, &softmax(&LOGITS, temperature * 1.2)) > limit);
    }
}

/// Probabilities with all but some tokens left out.
fn kept(tokens: &[usize]) -> Vec<f64> {
    let all = softmax(&LOGITS, 1.0);
    let sum: f64 = tokens.iter().map(|&token| all[token]).sum();
    (0..all.len()).map(|token| if tokens.contains(&token) { all[token] / sum } else { 0.0 }).collect()
}

#[test]
fn filters_keep_the_best() {
    let p = softmax(&LOGITS, 1.0);
    // By probability: 3 and 7, 5, 1, 4, 0, 6, 2.
    for (sampling, tokens) in [
        (sampling(|s| s.top_k = 3), &[3, 7, 5][..]),
        (sampling(|s| s.top_k = 8), &[0, 1, 2, 3, 4, 5, 6, 7]),
        (sampling(|s| s.top_p = (p[3] + p[7]) as f32 + 0.01), &[3, 7, 5]),
        (sampling(|s| s.top_p = p[3] as f32 + 0.01), &[3, 7]),
        (sampling(|s| s.top_p = 0.01), &[3]),
        (sampling(|s| s.min_p = 0.3), &[3, 7, 5, 1]),
        (sampling(|s| s.min_p = 1.0), &[3, 7]),
        (sampling(|s| (s.top_k, s.min_p) = (4, 0.5)), &[3, 7, 5]),
        // Top-p counts within what top-k leaves.
        (sampling(|s| (s.top_k, s.top_p) = (3, 0.76)), &[3, 7]),
    ] {
        let statistic = chi_square(&counts(&sampling, &LOGITS, 5_000), &kept(tokens));
        assert!(statistic < 24.32, "{sampling:?}: {statistic}");
    }
}

#[test]
fn a_seed_fixes_the_draws() {
    let draws = |seed| {
        let mut sampler = Sampler::new(&sampling(|s| s.seed = seed)).unwrap();
        (0..64).map(|_| sampler.sample(&mut LOGITS.to_vec(), &[]).unwrap()).collect::<Vec<u32>>()
    };
    assert_eq!(draws(Some(7)), draws(Some(7)));
    assert_ne!(draws(Some(7)), draws(Some(8)));
    assert_ne!(draws(None), draws(None));
    // The same on every machine; these were drawn by a script of its own.
    assert_eq!(draws(Some(42))[..8], [1, 3, 5, 7, 7, 7, 7, 7]);
}

#[test]
fn masked_tokens_never_come() {
    let mut logits = vec![f32::NEG_INFINITY; 1000];
    logits[17] = -50.0;
    logits[18] = -51.0;
    let counts = counts(&sampling(|s| s.temperature = 2.0), &logits, 500);
    assert_eq!(counts[17] + counts[18], 500);
    assert!(counts[18] > 100);
}

#[test]
fn a_file_recommends_settings() {
    let read = |temperature: f32, top_k: u32| {
        let mut writer = skep_gguf::Writer::new();
        writer.set("general.sampling.temp", temperature).unwrap();
        writer.set("general.sampling.top_k", top_k).unwrap();
        let mut file = Vec::new();
        writer.write(&mut file, |_, _| Ok(())).unwrap();
        Sampling::from_gguf(&skep_gguf::Gguf::parse(&file).unwrap())
    };
    let sampling = read(0.7, 20).unwrap();
    assert_eq!((sampling.temperature, sampling.top_k, sampling.top_p), (0.7, 20, 1.0));
    let error = read(9.0, 20).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Model);
    assert_eq!(error.to_string(), "general.sampling: temperature is 9, but must be from 0 to 2");
}

/// A vocabulary of true size, with many equal logits as from coarse weights.
fn large() -> impl Strategy<Value = Vec<f32>> {
    (1u32..=1000, any::<u64>(), 1usize..=20_000).prop_map(|(steps, seed, len)| {
        let mut state = seed;
        let mut next = move || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 40) as u32
        };
        (0..len).map(|_| (next() % steps) as f32 / steps as f32 * 20.0 - 10.0).collect()
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn top_k_of_one_is_greedy(logits in large(), temperature in 0.1f32..2.0) {
        let greatest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let first = logits.iter().position(|&logit| logit == greatest).unwrap() as u32;
        prop_assert_eq!(one(&Sampling::greedy(), &logits), first);
        prop_assert_eq!(one(&sampling(|s| (s.top_k, s.temperature) = (1, temperature)), &logits), first);
        prop_assert_eq!(one(&sampling(|s| s.top_p = f32::MIN_POSITIVE), &logits), first);
    }

    /// Against filters that sort the whole vocabulary.
    #[test]
    fn drawn_tokens_pass_the_filters(logits in large(), top_k in 1u32..200, top_p in 0.05f32..1.0, seed in any::<u64>()) {
        let token = one(&sampling(|s| (s.top_k, s.top_p, s.seed) = (top_k, top_p, Some(seed))), &logits);
        let mut order: Vec<usize> = (0..logits.len()).collect();
        order.sort_by(|&a, &b| logits[b].total_cmp(&logits[a]).then(a.cmp(&b)));
        order.truncate(top_k as usize);
        let weights: Vec<f64> = order.iter().map(|&at| f64::from(logits[at] - logits[order[0]]).exp()).collect();
        let rank = order.iter().position(|&at| at == token as usize);
        prop_assert!(rank.is_some(), "not among the best {}", top_k);
        let before: f64 = weights[..rank.unwrap()].iter().sum();
        prop_assert!(before < (f64::from(top_p) + 1e-6) * weights.iter().sum::<f64>());
    }
}

//! The value for a (row, token) pair does not depend on anything else in the call.

use proptest::prelude::*;

use crate::kernels;
use crate::samples::{KINDS, Random, activations, weights};
use skep_quant::{
    Activations, Forms, Matrix, Parallel, Precision, Product, Serial, Threads, Type, matmul, matmul_tile,
};

fn bits(x: &[f32]) -> Vec<u32> {
    x.iter().map(|x| x.to_bits()).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(60))]

    #[test]
    fn each_value_is_its_own(
        ty in prop::sample::select(&Type::ALL[..]),
        kind in prop::sample::select(&KINDS[..]),
        (rows, other_rows) in (1usize..70, 1usize..20),
        blocks in 1usize..4,
        n_tokens in 1usize..12,
        workers in 1usize..4,
        exact: bool,
        seed: u64,
    ) {
        let mut random = Random::new(seed);
        let cols = if ty.is_quantised() { blocks * ty.block_len() } else { blocks * 77 };
        let precision = if exact { Precision::Exact } else { Precision::Fast };
        let (data, other) = (weights(ty, rows, cols, &mut random), weights(ty, other_rows, cols, &mut random));
        let x = activations(kind, n_tokens * cols, &mut random);
        let (w, other) = (Matrix::new(ty, rows, cols, &data).unwrap(), Matrix::new(ty, other_rows, cols, &other).unwrap());
        for k in kernels() {
            let form = Forms::of(ty, precision);
            let mut acts = Activations::new();
            acts.fill_with(&k, &Serial, &x, cols, form);
            // The truth: each value in a call, and a batch, of its own.
            let mut alone = vec![0.0; n_tokens * rows];
            let mut single = Activations::new();
            for (t, x) in x.chunks(cols).enumerate() {
                single.fill_with(&k, &Serial, x, cols, form);
                for r in 0..rows {
                    k.matmul_tile(w, r..r + 1, &single, &[0], precision, &mut alone[t * rows + r..][..1]);
                }
            }
            // All at once, beside another product, on several threads.
            let par = Threads(workers);
            let mut out = vec![f32::NAN; n_tokens * rows];
            let mut other_out = vec![f32::NAN; n_tokens * other_rows];
            acts.fill_with(&k, &par, &x, cols, form | Forms::F32);
            k.matmul(
                &par,
                &mut [Product { weight: other, out: &mut other_out }, Product { weight: w, out: &mut out }],
                &acts,
                precision,
            );
            prop_assert_eq!(bits(&out), bits(&alone));
            prop_assert!(other_out.iter().all(|x| !x.is_nan()));
            // Some rows with some tokens, repeated and out of order.
            let start = random.bits() as usize % rows;
            let range = start..start + 1 + random.bits() as usize % (rows - start);
            let tokens: Vec<u32> =
                (0..random.bits() as usize % 20).map(|_| (random.bits() % n_tokens as u64) as u32).collect();
            let mut out = vec![f32::NAN; tokens.len() * range.len()];
            k.matmul_tile(w, range.clone(), &acts, &tokens, precision, &mut out);
            for (i, token) in tokens.iter().enumerate() {
                let expected = &alone[*token as usize * rows..][range.clone()];
                prop_assert_eq!(bits(&out[i * range.len()..][..range.len()]), bits(expected));
            }
        }
    }
}

#[test]
fn large_batches_and_wide_matrices_are_cut_without_a_trace() {
    let mut random = Random::new(7);
    let (rows, cols, n_tokens) = (600, 512, 150);
    let data = weights(Type::Q4_K, rows, cols, &mut random);
    let w = Matrix::new(Type::Q4_K, rows, cols, &data).unwrap();
    let x = activations(KINDS[0], n_tokens * cols, &mut random);
    let mut acts = Activations::new();
    acts.fill(&Threads(2), &x, cols, Forms::Q8_K);
    let run = |par: &dyn Parallel| {
        let mut out = vec![f32::NAN; n_tokens * rows];
        matmul(par, &mut [Product { weight: w, out: &mut out }], &acts, Precision::Fast);
        bits(&out)
    };
    let serial = run(&Serial);
    assert_eq!(run(&Threads(3)), serial);
    let mut one = [0.0];
    for (token, row) in [(0, 0), (149, 599), (64, 256), (63, 255)] {
        matmul_tile(w, row..row + 1, &acts, &[token as u32], Precision::Fast, &mut one);
        assert_eq!(one[0].to_bits(), serial[token * rows + row]);
    }
}

#[test]
fn float_products_are_cut_without_a_trace() {
    let mut random = Random::new(8);
    for (ty, rows, cols) in [(Type::BF16, 300, 200), (Type::F32, 140, 2500)] {
        let n_tokens = 310;
        let data = weights(ty, rows, cols, &mut random);
        let w = Matrix::new(ty, rows, cols, &data).unwrap();
        let x = activations(KINDS[0], n_tokens * cols, &mut random);
        for k in kernels().into_iter().filter(|k| k.isa() != skep_quant::Isa::Scalar) {
            let run = |par: &dyn Parallel, tokens: std::ops::Range<usize>| {
                let mut acts = Activations::new();
                acts.fill_with(&k, par, &x[tokens.start * cols..tokens.end * cols], cols, Forms::F32);
                let mut out = vec![f32::NAN; tokens.len() * rows];
                k.matmul(par, &mut [Product { weight: w, out: &mut out }], &acts, Precision::Fast);
                bits(&out)
            };
            let all = run(&Serial, 0..n_tokens);
            assert_eq!(run(&Threads(3), 0..n_tokens), all);
            for tokens in [0..1, 7..10, 100..104, 30..39, 143..310] {
                let part = &all[tokens.start * rows..tokens.end * rows];
                assert_eq!(run(&Threads(2), tokens.clone()), part, "{ty} {tokens:?}");
            }
        }
    }
}

#[test]
fn empty_shapes_are_fine() {
    let w = Matrix::new(Type::Q4_K, 0, 256, &[]).unwrap();
    let mut acts = Activations::new();
    acts.fill(&Serial, &[1.0; 256], 256, Forms::Q8_K | Forms::F32);
    matmul(&Serial, &mut [Product { weight: w, out: &mut [] }], &acts, Precision::Fast);
    matmul(&Serial, &mut [], &acts, Precision::Exact);
    matmul_tile(w, 0..0, &acts, &[0], Precision::Fast, &mut []);
    acts.fill(&Serial, &[], 256, Forms::Q8_K);
    let data = [0; 144];
    let w = Matrix::new(Type::Q4_K, 1, 256, &data).unwrap();
    matmul(&Serial, &mut [Product { weight: w, out: &mut [] }], &acts, Precision::Fast);
}

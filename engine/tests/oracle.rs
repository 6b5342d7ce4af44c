//! End to end against reference logits: Hugging Face in f32 for exact mode, exact weights for quantised files.

mod common;

use common::{Array, Ids, kl, load, logits, max_difference, mean_kl, models, shared, top};
use skep_engine::Precision;

/// Positions where some layer chooses between two experts that are this close are not compared.
const ROUTER_MARGIN: f32 = 0.005;

#[test]
fn exact_logits_are_those_of_hugging_face_whatever_the_chunk() {
    let Some(shared) = shared() else { return };
    for (kind, limit) in [("qwen35moe-nano", 2e-4), ("gemma4-nano", 2e-4)] {
        let file = |ending: &str| shared.join("oracle").join(format!("{kind}{ending}"));
        let mut runner = load(&file("-f32.gguf"), Precision::Exact);
        let ids = Ids::read(&file(".ids.json"));
        let reference =
            Array::read(&file(".hf.prefill_logits.npy")).then(Array::read(&file(".hf.decode_logits.npy")));
        for chunk in [1, 7, 64, 512] {
            compare_exact(
                &logits(&mut runner, &ids, chunk),
                &reference,
                limit,
                &format!("{kind}, chunk {chunk}"),
            );
        }
        let ids = Ids::read(&file(".long200.ids.json"));
        let reference = Array::read(&file(".hf.long200_logits.npy"));
        for chunk in [1, 3, 63, 65, 512] {
            compare_exact(
                &logits(&mut runner, &ids, chunk),
                &reference,
                limit,
                &format!("{kind}, chunk {chunk}"),
            );
        }
    }
}

fn compare_exact(found: &Array, reference: &Array, limit: f32, what: &str) {
    assert_eq!((found.rows, found.cols), (reference.rows, reference.cols));
    let mut worst = 0.0_f32;
    for row in 0..reference.rows {
        worst = worst.max(max_difference(found.row(row), reference.row(row)));
        assert_eq!(top(found.row(row)), top(reference.row(row)), "row {row}, {what}");
    }
    println!("{} rows, {what}: max difference {worst:.1e}", reference.rows);
    assert!(worst <= limit, "{what}: {worst}");
}

#[test]
fn quantised_files_are_as_close_to_their_weights_as_llama_cpp() {
    let Some(shared) = shared() else { return };
    let file = |name: &str| shared.join("oracle").join(name);
    for (kind, quant) in [
        ("qwen35moe-nano", "q8_0"),
        ("qwen35moe-nano", "q4_k_m"),
        ("qwen35moe-kq", "q4_k_m"),
        ("gemma4-nano", "bf16"),
        ("gemma4-nano", "q8_0"),
        ("gemma4-nano", "q4_k_m"),
    ] {
        let both = |of: &str| {
            Array::read(&file(&format!("{kind}.{quant}-{of}.prefill_logits.npy")))
                .then(Array::read(&file(&format!("{kind}.{quant}-{of}.decode_logits.npy"))))
        };
        let (target, llama) = (both("dequantf32"), both("llamacpp"));
        let ids = Ids::read(&file(&format!("{kind}.ids.json")));
        let margins = shared.join("oracle").join(format!("{kind}.hf.router_margin.npy"));
        let tie = match margins.is_file() {
            true => near_ties(&Array::read(&margins)),
            false => vec![false; target.rows],
        };
        let mut exact = load(&file(&format!("{kind}-{quant}.gguf")), Precision::Exact);
        let difference = mean_kl(&target, &logits(&mut exact, &ids, 512), |row| !tie[row]);
        // The targets of Gemma come from an arithmetic whose GELU is rounded to f16, which turns near ties of the router.
        let limit = if kind == "gemma4-nano" { 5e-3 } else { 1e-6 };
        assert!(difference < limit, "{kind} {quant}, exact: {difference:.1e}");
        let mut runner = load(&file(&format!("{kind}-{quant}.gguf")), Precision::Fast);
        let llama = mean_kl(&target, &llama, |row| !tie[row]);
        for chunk in [1, 64] {
            let ours = mean_kl(&target, &logits(&mut runner, &ids, chunk), |row| !tie[row]);
            let skipped = tie.iter().filter(|&&tie| tie).count();
            println!("{kind} {quant}, chunk {chunk}: {ours:.2e} (llama.cpp {llama:.2e}), {skipped} skipped");
            assert!(ours <= 1.5 * llama, "{kind} {quant}, chunk {chunk}: {ours:.2e} against {llama:.2e}");
        }
    }
}

fn near_ties(margins: &Array) -> Vec<bool> {
    (0..margins.cols)
        .map(|at| (0..margins.rows).any(|layer| margins.row(layer)[at] < ROUTER_MARGIN))
        .collect()
}

#[test]
fn the_bundled_models_have_their_reference_logits() {
    bundled("tiny-qwen35moe-Q4_K_M", 4e-5);
    bundled("tiny-gemma4-Q4_K_M", 5e-5);
}

fn bundled(name: &str, limit: f64) {
    let file = |ending: &str| models().join(format!("{name}.{ending}"));
    let reference = Array::read(&file("logits.npy"));
    let ids = Ids::read(&file("ids.json"));
    let mut runner = load(&file("gguf"), Precision::Fast);
    for chunk in [1, 64, 512] {
        let found = logits(&mut runner, &ids, chunk);
        let mean = mean_kl(&reference, &found, |_| true);
        println!("{name}, chunk {chunk}: {mean:.2e}");
        assert!(mean <= limit, "{name}, chunk {chunk}: {mean:.2e}");
    }
    let mut runner = load(&file("gguf"), Precision::Exact);
    let found = logits(&mut runner, &ids, 512);
    for row in 0..reference.rows {
        let difference = kl(reference.row(row), found.row(row));
        assert!(difference < 2e-5, "{name}, row {row}, exact: {difference:.1e}");
    }
}

//! A model on the emulated device: what the CPU makes of it, token for token.
#![cfg(all(target_arch = "x86_64", target_os = "linux"))]

use skep_engine::{Batch, DeviceKind, LoadOptions, Piece, Precision, Runner, SequenceId, Want};
use std::path::Path;

const MODEL: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../models/tiny-qwen35moe-Q4_K_M.gguf");
const SEQUENCES: usize = 3;

fn load(device: DeviceKind) -> Runner {
    let mut options = LoadOptions::default();
    options.device = device;
    options.sequences = SEQUENCES;
    options.context = Some(512);
    Runner::load(Path::new(MODEL), &options, &mut |_| {}).unwrap()
}

fn ids() -> Vec<u32> {
    let text = std::fs::read_to_string(MODEL.replace(".gguf", ".ids.json")).unwrap();
    let json: serde_json::Value = serde_json::from_str(&text).unwrap();
    json["prompt_ids"].as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect()
}

fn best(logits: &[f32]) -> u32 {
    assert!(logits.iter().all(|logit| logit.is_finite()));
    let better = |best: usize, i: usize| if logits[i] > logits[best] { i } else { best };
    (0..logits.len()).reduce(better).unwrap() as u32
}

/// Kullback-Leibler divergence of two rows of logits.
fn divergence(want: &[f32], found: &[f32]) -> f64 {
    let logs = |row: &[f32]| -> Vec<f64> {
        let most = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let sum: f64 = row.iter().map(|x| f64::from(x - most).exp()).sum();
        row.iter().map(|x| f64::from(x - most) - sum.ln()).collect()
    };
    logs(want).iter().zip(logs(found)).map(|(w, f)| w.exp() * (w - f)).sum()
}

#[test]
fn the_device_agrees_with_the_cpu_for_pieces_of_any_length() {
    let ids = ids();
    let ids = &ids[..45];
    let (mut cpu, mut device) = (load(DeviceKind::Cpu), load(DeviceKind::Emulated));
    assert_eq!(device.info().device, "emulated emulated device");
    let vocab = cpu.info().n_vocab;
    let sequence = cpu.open().unwrap();
    let want = cpu.step(&Batch::of(sequence, ids, Want::All)).unwrap().to_vec();
    for pieces in [vec![45], vec![8, 9, 1, 27]] {
        let sequence = device.open().unwrap();
        let mut found = Vec::new();
        let mut start = 0;
        for len in pieces {
            let piece = &ids[start..start + len];
            found.extend_from_slice(device.step(&Batch::of(sequence, piece, Want::All)).unwrap());
            start += len;
        }
        device.close(sequence);
        let rows = want.chunks_exact(vocab).zip(found.chunks_exact(vocab));
        let mean = rows.map(|(want, found)| divergence(want, found)).sum::<f64>() / ids.len() as f64;
        assert!(mean < 1e-4, "{mean}");
    }
}

#[test]
fn sequences_side_by_side_go_on_as_on_the_cpu() {
    let ids = ids();
    let prompts = [&ids[..20], &ids[20..27], &ids[30..61]];
    let (mut cpu, mut device) = (load(DeviceKind::Cpu), load(DeviceKind::Emulated));
    let vocab = cpu.info().n_vocab;
    let open =
        |runner: &mut Runner| -> Vec<SequenceId> { prompts.iter().map(|_| runner.open().unwrap()).collect() };
    let sequences = [open(&mut cpu), open(&mut device)];
    let mut tokens: Vec<Vec<u32>> = prompts.iter().map(|prompt| prompt.to_vec()).collect();
    let (mut sum, mut rows) = (0.0, 0);
    // Long enough for steps of every number of rows to be recorded and replayed; the CPU chooses how they go on, since the
    // best of two tokens that all but tie is open.
    for step in 0..9 {
        let live = SEQUENCES - step / 3;
        let step_of = |runner: &mut Runner, sequences: &[SequenceId]| {
            let mut batch = Batch::new();
            for (i, &sequence) in sequences[..live].iter().enumerate() {
                let new = &tokens[i][if step == 0 { 0 } else { tokens[i].len() - 1 }..];
                batch.push(Piece { sequence, tokens: new, images: &[], want: Want::Last });
            }
            runner.step(&batch).unwrap().to_vec()
        };
        let want = step_of(&mut cpu, &sequences[0]);
        let found = step_of(&mut device, &sequences[1]);
        for ((want, found), tokens) in
            want.chunks_exact(vocab).zip(found.chunks_exact(vocab)).zip(&mut tokens)
        {
            sum += divergence(want, found);
            rows += 1;
            let token = best(want);
            let gap = want[token as usize] - want[best(found) as usize];
            assert!(gap < 0.1, "the device prefers a token that is {gap} behind");
            tokens.push(token);
        }
    }
    assert!(sum / f64::from(rows) < 1e-3, "{}", sum / f64::from(rows));
}

#[test]
fn a_slot_that_is_used_again_remembers_nothing() {
    let ids = ids();
    let mut device = load(DeviceKind::Emulated);
    let mut results = Vec::new();
    for _ in 0..2 {
        let sequence = device.open().unwrap();
        results.push(device.step(&Batch::of(sequence, &ids[..12], Want::Last)).unwrap().to_vec());
        device.close(sequence);
    }
    assert_eq!(results[0], results[1]);
}

#[test]
fn what_a_device_cannot_do_is_an_error_that_says_so() {
    let mut options = LoadOptions::default();
    options.device = DeviceKind::Emulated;
    options.precision = Precision::Exact;
    let error = Runner::load(Path::new(MODEL), &options, &mut |_| {}).err().unwrap();
    assert_eq!(
        error.to_string(),
        "emulated device computes with quantised weights only: exact arithmetic needs the CPU"
    );
    options.precision = Precision::Fast;
    let gemma = MODEL.replace("qwen35moe", "gemma4");
    let error = Runner::load(Path::new(&gemma), &options, &mut |_| {}).err().unwrap();
    assert_eq!(error.to_string(), "models of this architecture run on the CPU only");
}

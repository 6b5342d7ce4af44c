//! Speed of the expert feed-forward at the shape of a Qwen3.6-35B layer: hidden 2048, 256 experts of 512 units, 8 per
//! token, Q4_K gate and up, Q6_K down.
//!
//! `cargo run --release --features cpu --example experts -- [THREADS] [TOKENS ...]`. The first column of times is
//! `experts`, the second the same products with nothing around them, on one thread divided by the number of threads.

use std::error::Error;
use std::time::{Duration, Instant};

use skep_moe_cache::cpu::{Activation, Bank, Experts, Scratch, experts};
use skep_moe_cache::router::Options;
use skep_moe_cache::{Routes, route};
use skep_quant::{Activations, Parallel, Precision, Serial, Type, matmul_tile};

const HIDDEN: usize = 2048;
const FF: usize = 512;
const N_EXPERTS: usize = 256;
const TOP_K: usize = 8;

/// A pool that has been entered.
struct Entered<'a>(&'a skep_hal::Scope<'a>);

// SAFETY: `Scope::run` calls the body once per index and returns when all calls have.
unsafe impl Parallel for Entered<'_> {
    fn workers(&self) -> usize {
        self.0.workers()
    }

    fn run(&self, chunks: usize, body: &(dyn Fn(usize) + Sync)) {
        self.0.run(chunks, body);
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let mut args = std::env::args().skip(1).map(|arg| arg.parse::<usize>());
    let threads = args.next().transpose()?.unwrap_or(2);
    let mut batches = args.collect::<Result<Vec<_>, _>>()?;
    if batches.is_empty() {
        batches = vec![1, 2, 4, 16, 64, 512];
    }
    let mut random = 1_u64;
    let mut next = || {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (random >> 33) as u32
    };
    let mut bank = |ty: Type, scales: &[usize]| -> Vec<u8> {
        let mut data = vec![0_u8; N_EXPERTS * HIDDEN * FF / ty.block_len() * ty.block_bytes()];
        data.chunks_exact_mut(4).for_each(|four| four.copy_from_slice(&next().to_le_bytes()));
        for block in data.chunks_exact_mut(ty.block_bytes()) {
            scales.iter().for_each(|&at| block[at..at + 2].copy_from_slice(&0x0c00_u16.to_le_bytes()));
        }
        data
    };
    let (gate, up) = (bank(Type::Q4_K, &[0, 2]), bank(Type::Q4_K, &[0, 2]));
    let down = bank(Type::Q6_K, &[208]);
    let layer = Experts::new(
        Bank::new(Type::Q4_K, N_EXPERTS, FF, HIDDEN, &gate)?,
        Bank::new(Type::Q4_K, N_EXPERTS, FF, HIDDEN, &up)?,
        Bank::new(Type::Q6_K, N_EXPERTS, HIDDEN, FF, &down)?,
        Activation::Silu,
    )?;
    let pool = skep_hal::Pool::new(threads)?;
    println!("{threads} threads, {}", skep_quant::Isa::detect()?.name());
    println!("{:>7} {:>12} {:>12} {:>8} {:>8}", "tokens", "experts us", "products us", "GB/s", "GOPS");
    for n_tokens in batches {
        // New routes in each round: decoding does not find the last token's experts in the processor's cache.
        let rounds: Vec<Routes> = (0..10)
            .map(|_| {
                let logits: Vec<f32> = (0..n_tokens * N_EXPERTS).map(|_| next() as f32 / 1e9).collect();
                let mut routes = Routes::new();
                route(&logits, N_EXPERTS, TOP_K, &Options::default(), &mut routes).map(|()| routes)
            })
            .collect::<Result<_, _>>()?;
        let x: Vec<f32> = (0..n_tokens * HIDDEN).map(|_| next() as f32 / 2e9 - 0.5).collect();
        let hidden: Vec<f32> = (0..n_tokens * TOP_K * FF).map(|_| next() as f32 / 2e9 - 0.5).collect();
        let (mut acts, mut hidden_acts) = (Activations::new(), Activations::new());
        acts.fill(&Serial, &x, HIDDEN, layer.forms(Precision::Fast));
        hidden_acts.fill(&Serial, &hidden, FF, layer.forms(Precision::Fast));
        let mut out = vec![0.0; n_tokens * HIDDEN];
        let mut scratch = Scratch::new();
        let (mut with, mut bare) = (Vec::new(), Vec::new());
        for _ in 0..if n_tokens < 64 { 20 } else { 2 } {
            pool.enter(|scope| {
                for routes in &rounds {
                    let start = Instant::now();
                    experts(&Entered(scope), &layer, &acts, routes, Precision::Fast, &mut scratch, &mut out);
                    with.push(start.elapsed());
                }
            });
            for routes in &rounds {
                let start = Instant::now();
                products(&layer, &acts, &hidden_acts, routes);
                bare.push(start.elapsed() / threads as u32);
            }
        }
        let mut distinct: Vec<u32> = rounds[0].experts().to_vec();
        distinct.sort_unstable();
        distinct.dedup();
        let bytes = distinct.len() * (gate.len() + up.len() + down.len()) / N_EXPERTS;
        let ops = n_tokens * TOP_K * 3 * HIDDEN * FF * 2;
        let (with, bare) = (best(&with), best(&bare));
        let per_ns = |amount: usize| amount as f64 / with.as_nanos() as f64;
        println!(
            "{n_tokens:>7} {:>12.1} {:>12.1} {:>8.1} {:>8.0}",
            with.as_secs_f64() * 1e6,
            bare.as_secs_f64() * 1e6,
            per_ns(bytes),
            per_ns(ops),
        );
    }
    Ok(())
}

/// Gate, up and down of every pair, grouped by expert, on this thread.
fn products(layer: &Experts<'_>, acts: &Activations, hidden_acts: &Activations, routes: &Routes) {
    let mut out = vec![0.0; routes.n_tokens() * HIDDEN];
    let mut first = 0;
    for expert in 0..N_EXPERTS as u32 {
        let pairs = (0..).zip(routes.experts()).filter(|pair| *pair.1 == expert);
        let tokens: Vec<u32> = pairs.map(|(pair, _)| pair / TOP_K as u32).collect();
        if tokens.is_empty() {
            continue;
        }
        let numbers: Vec<u32> = (first..).take(tokens.len()).collect();
        first += tokens.len() as u32;
        let expert = expert as usize;
        for (weight, acts, tokens) in [
            (layer.gate(expert), acts, &tokens),
            (layer.up(expert), acts, &tokens),
            (layer.down(expert), hidden_acts, &numbers),
        ] {
            let out = &mut out[..tokens.len() * weight.rows()];
            matmul_tile(weight, 0..weight.rows(), acts, tokens, Precision::Fast, out);
        }
    }
    std::hint::black_box(out);
}

/// The shortest: on a machine with other work, the one that met least of it.
fn best(times: &[Duration]) -> Duration {
    times.iter().copied().min().unwrap_or_default()
}

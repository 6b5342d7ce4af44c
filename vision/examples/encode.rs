//! Prints how fast a tower of the size of Gemma 4 26B's encodes a picture, next to the rate of f32 multiply-adds of the
//! same machine in the same seconds. Weights are random.
//!
//! `cargo run --release -p skep-vision --example encode -- [threads] [blocks] [soft tokens] [repetitions]`

use std::time::{Duration, Instant};

use skep_hal::{Pool, Scope};
use skep_quant::{Matrix, Parallel, Precision, Type};
use skep_vision::{
    Activation, Block, Config, Linear, Patches, Picture, Scratch, Standardise, Tiling, Tower, Weights,
};

const HIDDEN: usize = 1152;
const FF: usize = 4304;
const HEADS: usize = 16;
const OUT: usize = 2816;

struct Team<'s, 'p>(&'s Scope<'p>);

// SAFETY: `Scope::run` calls the body once for every chunk and returns after the last call has returned.
unsafe impl Parallel for Team<'_, '_> {
    fn workers(&self) -> usize {
        self.0.workers()
    }

    fn run(&self, chunks: usize, body: &(dyn Fn(usize) + Sync)) {
        self.0.run(chunks, body);
    }
}

/// Normal-looking numbers of this scale.
fn random(len: usize, scale: f32, seed: &mut u64) -> Vec<f32> {
    let mut next = || {
        *seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (*seed >> 40) as f32 / (1 << 23) as f32 - 1.0
    };
    (0..len).map(|_| scale * (next() + next() + next())).collect()
}

fn bf16(rows: usize, cols: usize, seed: &mut u64) -> Vec<u8> {
    let values = random(rows * cols, 1.0 / (cols as f32).sqrt(), seed);
    values.iter().flat_map(|x| ((x.to_bits() >> 16) as u16).to_le_bytes()).collect()
}

fn main() -> Result<(), Box<dyn core::error::Error>> {
    let mut args = std::env::args().skip(1).map(|arg| arg.parse::<usize>());
    let mut next = |default| args.next().unwrap_or(Ok(default));
    let (threads, n_blocks, soft, repetitions) = (next(2)?, next(2)?, next(280)?, next(3)?);
    let seed = &mut 1;
    let mut weight = |rows, cols| bf16(rows, cols, seed);
    let (square, wide, tall) = (weight(HIDDEN, HIDDEN), weight(FF, HIDDEN), weight(HIDDEN, FF));
    let (patch, projection) = (weight(HIDDEN, 768), weight(OUT, HIDDEN));
    let (ones, positions) = (vec![1.0; HIDDEN], random(2 * 10_240 * HIDDEN, 0.02, seed));
    let matrix = |rows, cols, bytes| Matrix::new(Type::BF16, rows, cols, bytes).map(Linear::new);
    let block = Block {
        attn_norm: &ones,
        q: matrix(HIDDEN, HIDDEN, &square)?,
        k: matrix(HIDDEN, HIDDEN, &square)?,
        v: matrix(HIDDEN, HIDDEN, &square)?,
        q_norm: &ones[..HIDDEN / HEADS],
        k_norm: &ones[..HIDDEN / HEADS],
        out: matrix(HIDDEN, HIDDEN, &square)?,
        attn_post_norm: &ones,
        ffn_norm: &ones,
        gate: matrix(FF, HIDDEN, &wide)?,
        up: matrix(FF, HIDDEN, &wide)?,
        down: matrix(HIDDEN, FF, &tall)?,
        ffn_post_norm: &ones,
    };
    let config = Config {
        hidden: HIDDEN,
        heads: HEADS,
        ff: FF,
        tiling: Tiling::GEMMA4V,
        eps: 1e-6,
        rope_base: 100.0,
        activation: Activation::GeluTanh,
    };
    let weights = Weights {
        patches: matrix(HIDDEN, 768, &patch)?,
        positions: &positions,
        blocks: vec![block; n_blocks],
        standardise: Some(Standardise { bias: &ones, scale: &ones }),
        projection: matrix(OUT, HIDDEN, &projection)?,
    };
    let tower = Tower::new(config, weights)?;
    // As many columns as give at least 14 rows of soft tokens, when they divide.
    let rows = (1..=soft).rev().find(|rows| soft.is_multiple_of(*rows) && rows * rows <= soft).unwrap_or(1);
    let (width, height) = (soft / rows * 48, rows * 48);
    let picture =
        Picture::new(width, height, (0..width * height * 3).map(|i| (i * 97 / 13) as u8).collect())?;
    let patches = Patches::new(&picture, 16)?;
    let pool = Pool::new(threads)?;
    let (mut scratch, mut out) = (Scratch::new(), Vec::new());
    for _ in 0..repetitions {
        let before = skep_hal::bandwidth::fma_peak(&pool, Duration::from_millis(60));
        let start = Instant::now();
        pool.enter(|scope| tower.encode(&Team(scope), &patches, Precision::Fast, &mut scratch, &mut out))?;
        let seconds = start.elapsed().as_secs_f64();
        let after = skep_hal::bandwidth::fma_peak(&pool, Duration::from_millis(60));
        let peak = before.flops_per_second.max(after.flops_per_second);
        let rate = tower.operations(patches.columns(), patches.rows()) / seconds;
        println!(
            "{soft} tokens, {n_blocks} blocks: {seconds:.3} s, {:.1} GFLOP/s, {:.0} % of {:.0} GFLOP/s ({})",
            rate / 1e9,
            rate / peak * 100.0,
            peak / 1e9,
            after.isa
        );
    }
    Ok(())
}

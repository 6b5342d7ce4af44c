//! Prints the speed of products with weights of each type: one token in GB/s of weights, next to the bandwidth
//! at which the same memory can be read, and 64 tokens in GOPS (a multiply and an add are two operations).
//!
//! `cargo run --release -p skep-quant --example throughput -- [threads] [MiB of weights] [types, comma separated]`

use std::hint::black_box;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Instant;

use skep_quant::{Activations, Forms, Isa, Matrix, Parallel, Precision, Product, Type, matmul};

const COLS: usize = 2048;

/// Threads that spin between runs.
struct Spinning {
    workers: usize,
    round: AtomicUsize,
    next: AtomicUsize,
    chunks: AtomicUsize,
    done: AtomicUsize,
    stop: AtomicBool,
    body: AtomicUsize,
}

impl Spinning {
    fn work(&self) {
        // SAFETY: `run` keeps the pointed-to reference alive until all workers have added to `done`.
        let body = unsafe { *(self.body.load(Ordering::Acquire) as *const &(dyn Fn(usize) + Sync)) };
        loop {
            let i = self.next.fetch_add(1, Ordering::Relaxed);
            if i >= self.chunks.load(Ordering::Relaxed) {
                break;
            }
            body(i);
        }
        self.done.fetch_add(1, Ordering::Release);
    }

    fn serve(&self) {
        let mut seen = 0;
        while !self.stop.load(Ordering::Relaxed) {
            if self.round.load(Ordering::Acquire) != seen {
                seen += 1;
                self.work();
            }
            std::hint::spin_loop();
        }
    }
}

// SAFETY: the counter hands out each index once, and `run` waits for every worker.
unsafe impl Parallel for Spinning {
    fn workers(&self) -> usize {
        self.workers
    }

    fn run(&self, chunks: usize, body: &(dyn Fn(usize) + Sync)) {
        self.next.store(0, Ordering::Relaxed);
        self.chunks.store(chunks, Ordering::Relaxed);
        self.done.store(0, Ordering::Relaxed);
        self.body.store(&raw const body as usize, Ordering::Release);
        self.round.fetch_add(1, Ordering::Release);
        self.work();
        while self.done.load(Ordering::Acquire) != self.workers {
            std::hint::spin_loop();
        }
    }
}

/// Bytes that are timed at once: shorter than a time slice of the scheduler.
const SEGMENT: usize = 16 << 20;

/// Reads all of `data` in the order the products do.
fn read(par: &dyn Parallel, data: &[u8]) {
    let words: &[u64] = bytemuck::cast_slice(&data[..data.len() / 8 * 8]);
    par.run(words.len().div_ceil(8192), &|i| {
        let chunk = &words[i * 8192..words.len().min((i + 1) * 8192)];
        black_box(chunk.iter().fold(0, |sum, x| sum ^ x));
    });
}

/// Seconds that `body` takes.
fn seconds(body: impl FnOnce()) -> f64 {
    let start = Instant::now();
    body();
    start.elapsed().as_secs_f64()
}

fn bench(par: &Spinning, bytes: usize, ty: Type, words: &[u64]) {
    let row_bytes = ty.row_bytes(COLS).unwrap();
    let data: &[u8] = &bytemuck::cast_slice(words)[..bytes / row_bytes * row_bytes];
    let segment = (SEGMENT / row_bytes * row_bytes).min(data.len());
    let x: Vec<f32> = (0..64 * COLS).map(|i| ((i * 37) % 101) as f32 / 50.0 - 1.0).collect();
    let product = |data: &[u8], tokens: usize| {
        let rows = data.len() / row_bytes;
        let weight = Matrix::new(ty, rows, COLS, data).unwrap();
        let mut acts = Activations::new();
        acts.fill(par, &x[..tokens * COLS], COLS, Forms::of(ty, Precision::Fast));
        let mut out = vec![0.0; tokens * rows];
        seconds(|| matmul(par, &mut [Product { weight, out: &mut out }], &acts, Precision::Fast))
    };
    // Each segment is used for one purpose only in a pass, and purposes alternate, so that all of them find
    // cold memory and the same neighbours. The shortest times are those that nobody interrupted.
    let mut best = [f64::MAX; 4];
    for pass in 0..4 {
        for (i, data) in data.chunks_exact(segment).enumerate() {
            let purpose = (i + pass) % 4;
            let time = match purpose {
                0 => seconds(|| read(par, data)),
                n => product(data, [0, 1, 2, 4][n]),
            };
            best[purpose] = best[purpose].min(time);
        }
    }
    let gbs = best.map(|time| segment as f64 / time / 1e9);
    let [eight, many] = [8, 64].map(|tokens| {
        let data = &data[..(512 * row_bytes).min(data.len())];
        let time = (0..40).map(|_| product(data, tokens)).fold(f64::MAX, f64::min);
        2.0 * (tokens * data.len() / row_bytes * COLS) as f64 / time / 1e9
    });
    println!(
        "{:<6}{:>10.1}{:>10.1}{:>8.0} %{:>10.1}{:>10.1}{eight:>10.0}{many:>10.0}",
        ty.name(),
        gbs[0],
        gbs[1],
        100.0 * gbs[1] / gbs[0],
        gbs[2],
        gbs[3],
    );
}

fn main() {
    let mut args = std::env::args().skip(1);
    let threads = args.next().and_then(|a| a.parse().ok()).unwrap_or(2);
    let mib = args.next().and_then(|a| a.parse().ok()).unwrap_or(1536);
    let wanted = args.next().unwrap_or_default();
    let bytes = mib << 20;
    // Any bits are valid codes; with this pattern every half, bfloat16 and float is ordinary.
    let mut words = vec![0u64; bytes / 8];
    let mut state = 1u64;
    for word in &mut words {
        state = state.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
        *word = (state >> 3) & 0x0fff_0fff_0fff_0fff | 0x3000_3000_3000_3000;
    }
    println!("{}, {threads} threads, {mib} MiB, {COLS} columns", Isa::detect().unwrap().name());
    println!("GB/s:     read   1 token  of read  2 tokens  4 tokens  GOPS at: 8       64");
    let par = Spinning {
        workers: threads,
        round: AtomicUsize::new(0),
        next: AtomicUsize::new(0),
        chunks: AtomicUsize::new(0),
        done: AtomicUsize::new(0),
        stop: AtomicBool::new(false),
        body: AtomicUsize::new(0),
    };
    std::thread::scope(|scope| {
        for _ in 1..threads {
            scope.spawn(|| par.serve());
        }
        for ty in Type::ALL {
            if wanted.is_empty() || wanted.split(',').any(|w| w == ty.name()) {
                bench(&par, bytes, ty, &words);
            }
        }
        par.stop.store(true, Ordering::Relaxed);
    });
}

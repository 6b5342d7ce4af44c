//! Prints the speed of products with weights of each type: one token in GB/s of weights, next to the bandwidth
//! at which the same memory can be read, and 64 tokens in GOPS (a multiply and an add are two operations).
//!
//! `cargo run --release -p skep-quant --example throughput -- [threads] [MiB of weights] [types, comma separated]`

use std::hint::black_box;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

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

/// The shortest of at least two runs that together take at least 0.3 s.
fn best(mut body: impl FnMut()) -> Duration {
    let begin = Instant::now();
    let mut best = Duration::MAX;
    let mut runs = 0;
    while runs < 2 || begin.elapsed() < Duration::from_millis(300) {
        let start = Instant::now();
        body();
        best = best.min(start.elapsed());
        runs += 1;
    }
    best
}

/// Reads all of `data` in the order the products do.
fn read(par: &dyn Parallel, data: &[u64]) {
    par.run(data.len().div_ceil(8192), &|i| {
        let chunk = &data[i * 8192..data.len().min((i + 1) * 8192)];
        black_box(chunk.iter().fold(0, |sum, x| sum ^ x));
    });
}

fn bench(par: &Spinning, bytes: usize, wanted: &str) {
    // Any bits are valid codes; with this pattern every half, bfloat16 and float is ordinary.
    let mut words = vec![0u64; bytes / 8];
    let mut state = 1u64;
    for word in &mut words {
        state = state.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
        *word = (state >> 3) & 0x0fff_0fff_0fff_0fff | 0x3000_3000_3000_3000;
    }
    let data: &[u8] = bytemuck::cast_slice(&words);
    let x: Vec<f32> = (0..64 * COLS).map(|i| ((i * 37) % 101) as f32 / 50.0 - 1.0).collect();
    println!(
        "isa {}, {} threads, {COLS} columns, {} MiB",
        Isa::detect().unwrap().name(),
        par.workers,
        bytes >> 20
    );
    println!("type    1 token GB/s  of read  2 tokens GB/s  4 tokens GB/s  8 tokens GOPS  64 tokens GOPS");
    for ty in
        Type::ALL.into_iter().filter(|ty| wanted.is_empty() || wanted.split(',').any(|w| w == ty.name()))
    {
        let rows = data.len() / ty.row_bytes(COLS).unwrap();
        let data = &data[..rows * ty.row_bytes(COLS).unwrap()];
        let speed = |tokens: usize, rows: usize| {
            let weight = Matrix::new(ty, rows, COLS, &data[..rows * ty.row_bytes(COLS).unwrap()]).unwrap();
            let mut acts = Activations::new();
            acts.fill(par, &x[..tokens * COLS], COLS, Forms::of(ty, Precision::Fast));
            let mut out = vec![0.0; tokens * rows];
            let time = best(|| {
                matmul(par, &mut [Product { weight, out: &mut out }], &acts, Precision::Fast);
            });
            (
                weight.data().len() as f64 / time.as_secs_f64() / 1e9,
                2.0 * (tokens * rows * COLS) as f64 / time.as_secs_f64() / 1e9,
            )
        };
        // Interleaved, so that a noisy neighbour hits both.
        let (mut one, mut bandwidth) = (0.0f64, 0.0f64);
        for _ in 0..4 {
            one = one.max(speed(1, rows).0);
            let time = best(|| read(par, &words));
            bandwidth = bandwidth.max(words.len() as f64 * 8.0 / time.as_secs_f64() / 1e9);
        }
        let (two, four) = (speed(2, rows).0, speed(4, rows).0);
        let (eight, many) = (speed(8, 2048.min(rows)).1, speed(64, 512.min(rows)).1);
        println!(
            "{:<8}{one:>12.1}  {:>6.0}%  {two:>13.1}  {four:>13.1}  {eight:>13.0}  {many:>14.0}   (read {bandwidth:.1})",
            ty.name(),
            100.0 * one / bandwidth
        );
    }
}

fn main() {
    let mut args = std::env::args().skip(1);
    let threads = args.next().and_then(|a| a.parse().ok()).unwrap_or(2);
    let mib = args.next().and_then(|a| a.parse().ok()).unwrap_or(1536.0);
    let wanted = args.next().unwrap_or_default();
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
        bench(&par, (mib * f64::from(1 << 20)) as usize / 64 * 64, &wanted);
        par.stop.store(true, Ordering::Relaxed);
    });
}

//! Tokens per second of one attention layer of true shape (16 query heads, 2 key/value heads of 256), without its matrix products.
//!
//! `cargo run --release -p skep-attention --example speed [f16|f32]`

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use skep_attention::{
    Gate, Heads, KvCache, KvType, Mask, Norm, Norms, Position, Projections, Queries, Rope, Scratch, Span,
};
use skep_quant::{Parallel, Serial};

const DIM: usize = 256;

fn main() {
    let ty = match std::env::args().nth(1).as_deref() {
        Some("f32") => KvType::F32,
        _ => KvType::F16,
    };
    for workers in [1, 2] {
        for (depth, rows) in [(512, 1), (8192, 1), (0, 512), (8192, 512)] {
            let (prepare, attend) = if workers == 1 {
                measure(&Serial, ty, depth, rows)
            } else {
                let pool = Pool::new(workers);
                std::thread::scope(|scope| {
                    for _ in 1..workers {
                        scope.spawn(|| pool.serve());
                    }
                    let seconds = measure(&pool, ty, depth, rows);
                    pool.stop();
                    seconds
                })
            };
            let per_second = rows as f64 / (prepare + attend);
            println!(
                "{ty:?}, {workers} threads, {rows} tokens at depth {depth}: prepare {:.1} us, attend {:.1} us, {per_second:.0} tokens/s",
                prepare * 1e6,
                attend * 1e6,
            );
        }
    }
}

/// Least seconds of both calls for `rows` tokens after `depth` others.
fn measure(par: &dyn Parallel, ty: KvType, depth: usize, rows: usize) -> (f64, f64) {
    let heads = Heads::new(16, 2, DIM, DIM, 1.0 / 16.0).expect("valid heads");
    let rope =
        Rope::new(DIM, 64, 1e7).and_then(|rope| rope.with_sections([11, 11, 10, 0])).expect("valid rope");
    let n_pages = (depth + rows).div_ceil(64);
    let mut cache = KvCache::new(ty, n_pages, 64, 2, DIM, DIM).expect("memory for the cache");
    let mut scratch = Scratch::new();
    let pages = (0..n_pages as u32).rev().collect::<Vec<_>>();
    let wave = |len: usize| (0..len).map(|i| (i as f32 * 0.37).sin()).collect::<Vec<_>>();
    let weight = wave(DIM);
    let norms = Norms { q: Norm::Weight(&weight), k: Norm::Weight(&weight), v: Norm::None, eps: 1e-6 };
    let (q, k, v) = (wave(512 * 16 * 2 * DIM), wave(512 * 2 * DIM), wave(512 * 2 * DIM));
    let (mut queries, mut out) = (wave(512 * 16 * DIM), wave(512 * 16 * DIM));
    let mut run = |start: usize, rows: usize| {
        let (q, k, v) = (&q[..rows * 16 * 2 * DIM], &k[..rows * 2 * DIM], &v[..rows * 2 * DIM]);
        let (queries, out) = (&mut queries[..rows * 16 * DIM], &mut out[..rows * 16 * DIM]);
        let positions = (start..start + rows).map(|i| Position::from(i as u32)).collect::<Vec<_>>();
        let spans = [Span { tokens: 0..rows, pages: &pages, start, together: &[] }];
        let projections = Projections { q: Queries::GateInterleaved(q), k, v };
        let began = Instant::now();
        skep_attention::prepare(
            par,
            &heads,
            &projections,
            &norms,
            Some(&rope),
            &positions,
            &spans,
            &mut cache,
            &mut scratch,
            queries,
        )
        .expect("valid batch");
        let prepared = Instant::now();
        skep_attention::attend(
            par,
            &heads,
            queries,
            Some(Gate::Interleaved(q)),
            &spans,
            &cache,
            Mask::Causal,
            &mut scratch,
            out,
        )
        .expect("valid batch");
        (prepared.duration_since(began).as_secs_f64(), prepared.elapsed().as_secs_f64())
    };
    // Fill the cache to the depth, then repeat the rows in question.
    for start in (0..depth).step_by(512) {
        run(start, 512.min(depth - start));
    }
    let repeats = if rows > 1 { 5 } else { 100 };
    (0..repeats).map(|_| run(depth, rows)).fold((f64::MAX, f64::MAX), |a, b| (a.0.min(b.0), a.1.min(b.1)))
}

/// Threads that spin for work: enough to measure with, no more.
struct Pool {
    workers: usize,
    /// Number of the operation.
    epoch: AtomicUsize,
    body: std::sync::Mutex<Option<Task>>,
    next: AtomicUsize,
    busy: AtomicUsize,
}

#[derive(Clone, Copy)]
struct Task {
    body: *const (dyn Fn(usize) + Sync),
    chunks: usize,
}

// SAFETY: the body may be called from any thread, and `run` does not return while one still uses it.
unsafe impl Send for Task {}

impl Pool {
    fn new(workers: usize) -> Self {
        Self {
            workers,
            epoch: AtomicUsize::new(0),
            body: std::sync::Mutex::new(None),
            next: AtomicUsize::new(0),
            busy: AtomicUsize::new(0),
        }
    }

    fn serve(&self) {
        let mut seen = 0;
        loop {
            let epoch = self.epoch.load(Ordering::Acquire);
            if epoch == seen {
                core::hint::spin_loop();
                continue;
            }
            seen = epoch;
            let Some(task) = *self.body.lock().expect("no panics") else { return };
            self.work(task);
            self.busy.fetch_sub(1, Ordering::Release);
        }
    }

    fn work(&self, task: Task) {
        loop {
            let i = self.next.fetch_add(1, Ordering::Relaxed);
            if i >= task.chunks {
                return;
            }
            // SAFETY: `run` keeps the body alive until all threads are done.
            let body = unsafe { &*task.body };
            body(i);
        }
    }

    fn stop(&self) {
        *self.body.lock().expect("no panics") = None;
        self.epoch.fetch_add(1, Ordering::Release);
    }
}

// SAFETY: the counter hands out each index once, and `run` waits for every thread.
unsafe impl Parallel for Pool {
    fn workers(&self) -> usize {
        self.workers
    }

    fn run(&self, chunks: usize, body: &(dyn Fn(usize) + Sync)) {
        // SAFETY: only the lifetime changes; no thread uses the body after this function returns.
        let body =
            unsafe { core::mem::transmute::<&(dyn Fn(usize) + Sync), &'static (dyn Fn(usize) + Sync)>(body) };
        let task = Task { body, chunks };
        *self.body.lock().expect("no panics") = Some(task);
        self.next.store(0, Ordering::Relaxed);
        self.busy.store(self.workers - 1, Ordering::Relaxed);
        self.epoch.fetch_add(1, Ordering::Release);
        self.work(task);
        while self.busy.load(Ordering::Acquire) > 0 {
            core::hint::spin_loop();
        }
    }
}

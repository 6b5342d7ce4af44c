//! Says what this machine offers: `cargo run --release -p skep-hal --example probe [threads]`.

use skep_hal::bandwidth::{fma_peak, read_bandwidth};
use skep_hal::{Cpu, Pool, memory};
use std::hint::black_box;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let cpu = Cpu::detect();
    println!("{cpu:#?}");
    let threads = match std::env::args().nth(1) {
        Some(text) => text.parse()?,
        None => cpu.default_threads(),
    };
    let pool = Pool::new(threads)?;
    for chunks in [threads, 4 * threads, 64] {
        let (median, best) = dispatch(&pool, chunks);
        println!("dispatch, {threads} threads, {chunks} empty chunks: median {median:?}, best {best:?}");
    }
    let (median, best) = meeting(&pool);
    println!("region in which all participants wait for each other: median {median:?}, best {best:?}");
    let pause = Duration::from_millis(2);
    let mut first: Vec<Duration> = (0..200)
        .map(|_| {
            std::thread::sleep(pause);
            let started = Instant::now();
            pool.enter(|scope| scope.run(threads, &|_| {}));
            started.elapsed()
        })
        .collect();
    first.sort();
    println!("enter and one region with parked workers: median {:?}", first[first.len() / 2]);
    println!("{}", read_bandwidth(&pool, Duration::from_secs(2))?);
    println!("{}", fma_peak(&pool, Duration::from_millis(500)));
    println!("resident memory now {:?}, at most {:?} bytes", memory::resident(), memory::peak_resident());
    Ok(())
}

/// Median and least time of a region of empty chunks.
fn dispatch(pool: &Pool, chunks: usize) -> (Duration, Duration) {
    time_regions(pool, chunks, &|chunk| {
        black_box(chunk);
    })
}

/// The same if no chunk ends before every participant has come: the time to reach the last one and to hear from it.
fn meeting(pool: &Pool) -> (Duration, Duration) {
    let threads = pool.threads();
    let arrived = AtomicUsize::new(0);
    time_regions(pool, threads, &|_| {
        let all = (arrived.fetch_add(1, Ordering::Relaxed) / threads + 1) * threads;
        while arrived.load(Ordering::Relaxed) < all {
            std::hint::spin_loop();
        }
    })
}

fn time_regions(pool: &Pool, chunks: usize, body: &(dyn Fn(usize) + Sync)) -> (Duration, Duration) {
    const BATCH: u32 = 100;
    let mut times: Vec<Duration> = pool.enter(|scope| {
        let batch = || {
            let started = Instant::now();
            for _ in 0..BATCH {
                scope.run(chunks, body);
            }
            started.elapsed() / BATCH
        };
        (0..1000).map(|_| batch()).collect()
    });
    times.sort();
    (times[times.len() / 2], times[0])
}

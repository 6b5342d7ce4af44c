//! Says what this machine offers: `cargo run --release -p skep-hal --example probe [threads]`.

use skep_hal::Pool;
use std::hint::black_box;
use std::time::{Duration, Instant};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let threads = match std::env::args().nth(1) {
        Some(text) => text.parse()?,
        None => 2,
    };
    let pool = Pool::new(threads)?;
    for chunks in [threads, 4 * threads, 64] {
        let (median, best) = dispatch(&pool, chunks);
        println!("dispatch, {threads} threads, {chunks} empty chunks: median {median:?}, best {best:?}");
    }
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
    Ok(())
}

/// Median and least time of a region of empty chunks, over batches of 100 regions.
fn dispatch(pool: &Pool, chunks: usize) -> (Duration, Duration) {
    const BATCH: u32 = 100;
    let mut times: Vec<Duration> = pool.enter(|scope| {
        let batch = || {
            let started = Instant::now();
            for _ in 0..BATCH {
                scope.run(chunks, &|chunk| {
                    black_box(chunk);
                });
            }
            started.elapsed() / BATCH
        };
        (0..2000).map(|_| batch()).collect()
    });
    times.sort();
    (times[times.len() / 2], times[0])
}

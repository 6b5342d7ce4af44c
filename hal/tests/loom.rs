//! The pool under the model checker, which tries the interleavings (up to two preemptions, one with three threads) and memory orders:
//! `RUSTFLAGS="--cfg loom" cargo test -p skep-hal --release --test loom`.

#![cfg(loom)]

// The protocol itself, once more, so that it can be built with orderings that are too weak.
#[allow(dead_code, reason = "steps are tested through the pool")]
#[path = "../src/pool/region.rs"]
mod region;
#[path = "../src/pool/sync.rs"]
mod sync;

use loom::cell::UnsafeCell;
use loom::sync::atomic::{AtomicUsize, Ordering};
use loom::sync::{Arc, Condvar, Mutex};
use loom::thread;
use region::{Orders, Region, Sound};
use skep_hal::Pool;

fn check(model: impl Fn() + Sync + Send + 'static) {
    check_preempting(2, model);
}

fn check_preempting(bound: usize, model: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(bound);
    builder.check(model);
}

/// Blocks until as many threads have come as it was made for.
struct Meeting {
    missing: Mutex<usize>,
    complete: Condvar,
}

impl Meeting {
    fn new(participants: usize) -> Self {
        Self { missing: Mutex::new(participants), complete: Condvar::new() }
    }

    fn wait(&self) {
        let mut missing = self.missing.lock().unwrap();
        *missing -= 1;
        if *missing == 0 {
            self.complete.notify_all();
        }
        while *missing != 0 {
            missing = self.complete.wait(missing).unwrap();
        }
    }
}

/// Two regions with plain memory written by the caller, read and written by chunks, and read by the caller; then the end.
/// Loom objects to any access that is not ordered, and to a thread that never ends.
fn two_regions<O: Orders>(workers: usize, chunks: usize) {
    let region = Arc::new(Region::<O>::new());
    let serving: Vec<_> = (0..workers)
        .map(|_| {
            let region = Arc::clone(&region);
            thread::spawn(move || region.serve())
        })
        .collect();
    for round in 0..2 {
        // Dropped after each round, as a body that borrows from its caller is: a late use is a use after free.
        let cells: Vec<UnsafeCell<usize>> = (0..chunks).map(|_| UnsafeCell::new(round)).collect();
        let cells = Shared(cells);
        region.run(chunks, &|chunk| {
            let cells = &cells;
            cells.0[chunk].with_mut(|value| {
                // SAFETY: each chunk has its own cell; loom checks that no other access is concurrent.
                unsafe { *value += 10 }
            });
        });
        for cell in &cells.0 {
            let value = cell.with(|value| {
                // SAFETY: the region has ended; loom checks that no access is concurrent.
                unsafe { *value }
            });
            assert_eq!(value, round + 10, "a chunk ran twice or not at all");
        }
    }
    region.close();
    for worker in serving {
        worker.join().unwrap();
    }
}

struct Shared(Vec<UnsafeCell<usize>>);

// SAFETY: loom checks every access.
unsafe impl Sync for Shared {}

/// A region whose two chunks wait for each other: it ends only if the worker, asleep or not, comes. All is leaked: where
/// loom finds a deadlock it unwinds the threads, and its own destructors abort then.
fn meeting<O: Orders>() {
    let region: &'static Region<O> = Box::leak(Box::new(Region::new()));
    let both: &'static Meeting = Box::leak(Box::new(Meeting::new(2)));
    let worker = thread::spawn(|| region.serve());
    region.run(2, &|_| both.wait());
    region.close();
    worker.join().unwrap();
}

#[test]
fn every_chunk_once_and_in_order_with_one_worker() {
    check(|| two_regions::<Sound>(1, 2));
}

#[test]
fn every_chunk_once_and_in_order_with_two_workers() {
    check_preempting(1, || two_regions::<Sound>(2, 2));
}

#[test]
fn more_chunks_than_participants() {
    check(|| two_regions::<Sound>(1, 3));
}

#[test]
fn no_wakeup_is_lost() {
    check(meeting::<Sound>);
}

#[test]
fn pool_from_start_to_end() {
    check(|| {
        let pool = Pool::new(2).unwrap();
        for _ in 0..2 {
            let total = AtomicUsize::new(0);
            pool.enter(|scope| {
                scope.run(2, &|chunk| {
                    total.fetch_add(chunk + 1, Ordering::Relaxed);
                });
            });
            assert_eq!(total.load(Ordering::Relaxed), 3);
        }
    });
}

#[test]
fn threads_that_enter_together() {
    check_preempting(1, || {
        let pool = Arc::new(Pool::new(2).unwrap());
        let count = |pool: &Pool| {
            let total = AtomicUsize::new(0);
            pool.enter(|scope| {
                scope.run(2, &|chunk| {
                    total.fetch_add(chunk + 1, Ordering::Relaxed);
                });
            });
            assert_eq!(total.load(Ordering::Relaxed), 3);
        };
        let other = {
            let pool = Arc::clone(&pool);
            thread::spawn(move || count(&pool))
        };
        count(&pool);
        other.join().unwrap();
    });
}

#[test]
fn a_nested_region_is_serial() {
    check(|| {
        let pool = Pool::new(2).unwrap();
        let total = AtomicUsize::new(0);
        pool.enter(|scope| {
            scope.run(2, &|_| {
                pool.enter(|inner| {
                    inner.run(2, &|chunk| {
                        total.fetch_add(chunk + 1, Ordering::Relaxed);
                    });
                });
            });
        });
        assert_eq!(total.load(Ordering::Relaxed), 6);
    });
}

// The controls: each ordering, weakened, must be found out.

macro_rules! weakened {
    ($name:ident, $test:ident, $model:expr, $expected:literal, $($weak:tt)*) => {
        struct $name;

        impl Orders for $name {
            $($weak)*
        }

        #[test]
        #[should_panic(expected = $expected)]
        fn $test() {
            check(|| $model);
        }
    };
}

weakened! {
    RelaxedPublish, control_publish_without_release, two_regions::<RelaxedPublish>(1, 2),
    "Causality violation", const PUBLISH: Ordering = Ordering::Relaxed;
}
weakened! {
    RelaxedClaim, control_claim_without_acquire, two_regions::<RelaxedClaim>(1, 2),
    "Causality violation", const CLAIM: Ordering = Ordering::Relaxed;
}
weakened! {
    RelaxedReport, control_report_without_release, two_regions::<RelaxedReport>(1, 2),
    "Causality violation", const REPORT: Ordering = Ordering::Relaxed;
}
weakened! {
    RelaxedCollect, control_collect_without_acquire, two_regions::<RelaxedCollect>(1, 2),
    "Causality violation", const COLLECT: Ordering = Ordering::Relaxed;
}
weakened! {
    NoFence, control_sleep_without_fence, meeting::<NoFence>(), "deadlock", fn fence() {}
}

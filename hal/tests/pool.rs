//! The pool's contract, on real threads.

#![cfg(not(loom))]

use skep_hal::{ErrorKind, Pool};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};
use std::sync::{Arc, Barrier, Mutex};
use std::time::{Duration, Instant};

fn counts(n: usize) -> Vec<AtomicU32> {
    (0..n).map(|_| AtomicU32::new(0)).collect()
}

fn assert_all(counts: &[AtomicU32], expected: u32) {
    for (chunk, count) in counts.iter().enumerate() {
        assert_eq!(count.load(Ordering::Relaxed), expected, "chunk {chunk}");
    }
}

fn message(payload: Box<dyn std::any::Any + Send>) -> String {
    match payload.downcast::<String>() {
        Ok(text) => *text,
        Err(other) => (*other.downcast::<&str>().expect("a message")).to_owned(),
    }
}

#[test]
fn every_chunk_runs_once_at_any_size() {
    for threads in [1, 2, 3, 8] {
        let pool = Pool::new(threads).unwrap();
        assert_eq!(pool.threads(), threads);
        pool.enter(|scope| {
            assert_eq!(scope.workers(), threads);
            for chunks in [0, 1, 2, 3, threads, threads + 1, 100, 1000] {
                let seen = counts(chunks);
                scope.run(chunks, &|chunk| {
                    seen[chunk].fetch_add(1, Ordering::Relaxed);
                });
                assert_all(&seen, 1);
            }
        });
    }
}

#[test]
fn many_short_regions_each_see_their_own_body() {
    let pool = Pool::new(4).unwrap();
    let mut out = [0_u64; 7];
    for step in 0..200_u64 {
        pool.enter(|scope| {
            for round in 0..50_u64 {
                let cells: Vec<Mutex<&mut u64>> = out.iter_mut().map(Mutex::new).collect();
                scope.run(cells.len(), &|chunk| {
                    **cells[chunk].lock().unwrap() = step * 1000 + round * 10 + chunk as u64
                });
                drop(cells);
                for (chunk, value) in out.iter().enumerate() {
                    assert_eq!(*value, step * 1000 + round * 10 + chunk as u64);
                }
            }
        });
    }
}

#[test]
fn all_participants_can_be_in_one_region() {
    for threads in [2, 5] {
        let pool = Pool::new(threads).unwrap();
        let barrier = Barrier::new(threads);
        let ids = Mutex::new(Vec::new());
        pool.enter(|scope| {
            scope.run(threads, &|_| {
                barrier.wait();
                ids.lock().unwrap().push(std::thread::current().id());
            });
        });
        let mut ids = ids.into_inner().unwrap();
        ids.sort_by_key(|id| format!("{id:?}"));
        ids.dedup();
        assert_eq!(ids.len(), threads);
    }
}

#[test]
fn parked_workers_come_back() {
    let pool = Pool::new(3).unwrap();
    for pause_ms in [0, 1, 5, 30] {
        std::thread::sleep(Duration::from_millis(pause_ms));
        let barrier = Barrier::new(3);
        pool.enter(|scope| {
            scope.run(3, &|_| {
                barrier.wait();
            });
            // Long enough for the workers to park inside the step.
            std::thread::sleep(Duration::from_millis(pause_ms));
            scope.run(3, &|_| {
                barrier.wait();
            });
        });
    }
}

#[test]
fn a_panic_waits_for_the_region_and_the_pool_survives() {
    for threads in [1, 2, 4] {
        let pool = Pool::new(threads).unwrap();
        for chunks in [1, 2, 40] {
            let seen = counts(chunks);
            let region = || {
                pool.enter(|scope| {
                    scope.run(chunks, &|chunk| {
                        seen[chunk].fetch_add(1, Ordering::Relaxed);
                        if chunk == chunks / 2 {
                            panic!("chunk {chunk} broke");
                        }
                    });
                });
            };
            let payload = catch_unwind(AssertUnwindSafe(region)).expect_err("the panic comes through");
            assert_eq!(message(payload), format!("chunk {} broke", chunks / 2));
            assert_all(&seen, 1);
        }
        let seen = counts(40);
        pool.enter(|scope| {
            scope.run(40, &|chunk| {
                seen[chunk].fetch_add(1, Ordering::Relaxed);
            });
        });
        assert_all(&seen, 1);
    }
}

#[test]
fn every_chunk_may_panic_even_with_payloads_that_panic_when_dropped() {
    struct Bomb {
        armed: AtomicBool,
    }
    impl Drop for Bomb {
        fn drop(&mut self) {
            if *self.armed.get_mut() && !std::thread::panicking() {
                std::panic::resume_unwind(Box::new(()));
            }
        }
    }
    for threads in [1, 2] {
        let pool = Pool::new(threads).unwrap();
        let seen = counts(20);
        let region = || {
            pool.enter(|scope| {
                scope.run(20, &|chunk| {
                    seen[chunk].fetch_add(1, Ordering::Relaxed);
                    std::panic::resume_unwind(Box::new(Bomb { armed: AtomicBool::new(true) }));
                });
            });
        };
        let payload = catch_unwind(AssertUnwindSafe(region)).expect_err("the panic comes through");
        payload.downcast_ref::<Bomb>().expect("the payload of a chunk").armed.store(false, Ordering::Relaxed);
        drop(payload);
        assert_all(&seen, 1);
        let total = AtomicUsize::new(0);
        pool.enter(|scope| {
            scope.run(20, &|chunk| {
                total.fetch_add(chunk, Ordering::Relaxed);
            });
        });
        assert_eq!(total.into_inner(), 190);
    }
}

#[test]
fn a_panic_in_the_step_leaves_the_pool_usable() {
    let pool = Pool::new(2).unwrap();
    let payload =
        catch_unwind(AssertUnwindSafe(|| pool.enter(|_| panic!("step broke")))).expect_err("passed on");
    assert_eq!(message(payload), "step broke");
    let barrier = Barrier::new(2);
    pool.enter(|scope| {
        scope.run(2, &|_| {
            barrier.wait();
        });
    });
}

#[test]
fn nested_regions_run_serially_on_the_thread_that_asks() {
    let pool = Pool::new(3).unwrap();
    let seen = counts(12 * 5);
    pool.enter(|scope| {
        scope.run(12, &|outer| {
            let me = std::thread::current().id();
            scope.run(5, &|inner| {
                assert_eq!(std::thread::current().id(), me);
                seen[outer * 5 + inner].fetch_add(1, Ordering::Relaxed);
            });
        });
    });
    assert_all(&seen, 1);
}

#[test]
fn entering_again_from_inside_does_not_block() {
    let pool = Pool::new(3).unwrap();
    let seen = counts(6 * 4);
    pool.enter(|outer_scope| {
        // Between regions: the nested scope is as good as the outer one.
        let barrier = Barrier::new(3);
        pool.enter(|scope| {
            scope.run(3, &|_| {
                barrier.wait();
            });
        });
        // Inside a chunk, on any participant.
        outer_scope.run(6, &|outer| {
            pool.enter(|scope| {
                scope.run(4, &|inner| {
                    seen[outer * 4 + inner].fetch_add(1, Ordering::Relaxed);
                });
            });
        });
    });
    assert_all(&seen, 1);
    // The way out was found as well: another thread gets its turn.
    std::thread::scope(|threads| threads.spawn(|| pool.enter(|scope| scope.workers())).join().unwrap());
}

#[test]
fn two_pools_can_be_nested() {
    let (a, b) = (Pool::new(2).unwrap(), Pool::new(3).unwrap());
    let total = AtomicUsize::new(0);
    a.enter(|outer| {
        outer.run(8, &|_| {
            b.enter(|inner| {
                inner.run(8, &|chunk| {
                    total.fetch_add(chunk, Ordering::Relaxed);
                });
            });
        });
    });
    assert_eq!(total.into_inner(), 8 * 28);
}

#[test]
fn threads_that_enter_together_take_turns() {
    let pool = Arc::new(Pool::new(3).unwrap());
    let inside = Arc::new(AtomicUsize::new(0));
    let start = Arc::new(Barrier::new(4));
    let callers: Vec<_> = (0..4)
        .map(|_| {
            let (pool, inside, start) = (Arc::clone(&pool), Arc::clone(&inside), Arc::clone(&start));
            std::thread::spawn(move || {
                start.wait();
                for _ in 0..100 {
                    pool.enter(|scope| {
                        assert_eq!(inside.fetch_add(1, Ordering::SeqCst), 0, "two threads inside");
                        let total = AtomicUsize::new(0);
                        scope.run(9, &|chunk| {
                            total.fetch_add(chunk, Ordering::Relaxed);
                        });
                        assert_eq!(total.into_inner(), 36);
                        inside.fetch_sub(1, Ordering::SeqCst);
                    });
                }
            })
        })
        .collect();
    for caller in callers {
        caller.join().unwrap();
    }
}

#[test]
fn threads_that_share_a_scope_get_every_chunk_run() {
    let pool = Pool::new(3).unwrap();
    pool.enter(|scope| {
        std::thread::scope(|threads| {
            for _ in 0..3 {
                threads.spawn(|| {
                    for _ in 0..200 {
                        let seen = counts(10);
                        scope.run(10, &|chunk| {
                            seen[chunk].fetch_add(1, Ordering::Relaxed);
                        });
                        assert_all(&seen, 1);
                    }
                });
            }
        });
    });
}

#[test]
fn far_more_threads_than_processors_still_make_progress() {
    let processors = std::thread::available_parallelism().map_or(1, usize::from);
    let pool = Pool::new(8 * processors).unwrap();
    let started = Instant::now();
    let total = AtomicUsize::new(0);
    for _ in 0..20 {
        pool.enter(|scope| {
            for _ in 0..100 {
                scope.run(64, &|_| {
                    total.fetch_add(1, Ordering::Relaxed);
                });
            }
        });
    }
    assert_eq!(total.into_inner(), 20 * 100 * 64);
    // 2000 regions. Waiting for every worker to be scheduled, or spinning out time slices, would take minutes.
    assert!(started.elapsed() < Duration::from_secs(20), "took {:?}", started.elapsed());
}

#[test]
fn dropping_ends_the_workers() {
    struct Ended<'a>(&'a AtomicUsize);
    impl Drop for Ended<'_> {
        fn drop(&mut self) {
            self.0.fetch_add(1, Ordering::SeqCst);
        }
    }
    thread_local! {
        static GUARD: std::cell::RefCell<Option<Ended<'static>>> = const { std::cell::RefCell::new(None) };
    }
    static ENDED: AtomicUsize = AtomicUsize::new(0);

    let pool = Pool::new(4).unwrap();
    let barrier = Barrier::new(4);
    let caller = std::thread::current().id();
    pool.enter(|scope| {
        scope.run(4, &|_| {
            barrier.wait();
            if std::thread::current().id() != caller {
                GUARD.with(|guard| *guard.borrow_mut() = Some(Ended(&ENDED)));
            }
        });
    });
    assert_eq!(ENDED.load(Ordering::SeqCst), 0);
    drop(pool);
    assert_eq!(ENDED.load(Ordering::SeqCst), 3);
    // Also before the workers have had time to look around.
    for threads in 1..6 {
        drop(Pool::new(threads).unwrap());
    }
}

#[test]
fn impossible_sizes_are_refused() {
    for threads in [0, Pool::MAX_THREADS + 1, usize::MAX] {
        let error = Pool::new(threads).expect_err("refused");
        assert!(matches!(error.kind(), ErrorKind::Threads { .. }), "{error}");
        assert!(error.to_string().contains(&threads.to_string()), "{error}");
    }
}

//! A resident worker pool for one computation at a time.
//!
//! See [`Pool`].

mod region;
mod sync;

use crate::{Error, ErrorKind, Result};
use core::fmt;
use region::{Region, Sound};
use std::cell::RefCell;
use sync::{Mutex, lock};

#[cfg(loom)]
use loom::{sync::Arc, thread, thread_local};
#[cfg(not(loom))]
use std::{sync::Arc, thread, thread_local};

/// A resident pool of `threads` participants: the calling thread and `threads - 1` workers.
///
/// Made for computations of many short parallel regions, such as a forward pass, which has several hundred of a few to a
/// few hundred microseconds. The pool is [entered](Pool::enter) once per computation; inside, workers spin between
/// [regions](Scope::run), so that starting one costs well under a microsecond. Outside they park after a
/// fraction of a millisecond and use no processor time.
///
/// Waiting is polite: after some tens of microseconds of spinning a waiting thread offers its processor to others
/// (`sched_yield`), and a worker that finds nothing to do for ten milliseconds parks even inside a computation. More
/// threads than free processors cost speed, not progress.
///
/// Dropping the pool ends and joins its workers.
///
/// # Examples
///
/// ```
/// use std::sync::atomic::{AtomicUsize, Ordering};
///
/// let pool = skep_hal::Pool::new(2)?;
/// let sum = AtomicUsize::new(0);
/// pool.enter(|scope| {
///     for _region in 0..3 {
///         scope.run(100, &|chunk| {
///             sum.fetch_add(chunk, Ordering::Relaxed);
///         });
///     }
/// });
/// assert_eq!(sum.into_inner(), 3 * 4950);
/// # Ok::<(), skep_hal::Error>(())
/// ```
pub struct Pool {
    region: Arc<Region>,
    workers: Vec<thread::JoinHandle<()>>,
    turn: Mutex<()>,
}

thread_local! {
    /// The pools this thread is inside of: those it has entered and, on a worker, its own.
    #[allow(clippy::missing_const_for_thread_local, reason = "loom's macro takes no const block")]
    static INSIDE: RefCell<Vec<*const Region>> = RefCell::new(Vec::new());
}

impl Pool {
    /// The largest number of participants.
    pub const MAX_THREADS: usize = 4096;

    /// Starts `threads - 1` workers, named `skep-worker-1` and so on.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Threads`] if `threads` is 0 or above [`MAX_THREADS`](Self::MAX_THREADS), [`ErrorKind::Spawn`] if the
    /// operating system refuses a thread; those already started are ended.
    pub fn new(threads: usize) -> Result<Self> {
        if threads == 0 || threads > Self::MAX_THREADS {
            return Err(Error::new(ErrorKind::Threads { threads, max: Self::MAX_THREADS }));
        }
        let mut pool = Self { region: Arc::new(Region::new()), workers: Vec::new(), turn: Mutex::new(()) };
        for index in 1..threads {
            let region = Arc::clone(&pool.region);
            let worker = thread::Builder::new().name(format!("skep-worker-{index}")).spawn(move || {
                INSIDE.with(|inside| inside.borrow_mut().push(&raw const *region));
                region.serve();
            });
            match worker {
                Ok(worker) => pool.workers.push(worker),
                Err(cause) => return Err(Error::because(ErrorKind::Spawn { index, threads }, cause)),
            }
        }
        Ok(pool)
    }

    /// Participants, the caller included.
    pub fn threads(&self) -> usize {
        self.workers.len() + 1
    }

    /// Runs `f` with the workers awake and waiting for regions.
    ///
    /// Threads that enter one pool at the same time take turns: a second one blocks until the first has left. Entering
    /// again from inside, on the thread that is inside or on a worker, does not block and shares the computation.
    ///
    /// # Panics
    ///
    /// Passes on a panic of `f`. The pool remains usable.
    pub fn enter<R>(&self, f: impl FnOnce(&Scope<'_>) -> R) -> R {
        let scope = Scope { region: &self.region, workers: self.threads() };
        let region = &raw const *self.region;
        if INSIDE.with(|inside| inside.borrow().contains(&region)) {
            return f(&scope);
        }
        let _turn = lock(&self.turn);
        let _step = Step::new(&self.region);
        f(&scope)
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.region.close();
        for worker in self.workers.drain(..) {
            // A worker catches the panics of its chunks; there is no result to look at.
            let _ = worker.join();
        }
    }
}

impl fmt::Debug for Pool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pool").field("threads", &self.threads()).finish_non_exhaustive()
    }
}

/// The time between entering and leaving, whichever way it ends.
struct Step<'p> {
    region: &'p Region<Sound>,
}

impl<'p> Step<'p> {
    fn new(region: &'p Region) -> Self {
        INSIDE.with(|inside| inside.borrow_mut().push(region));
        region.begin_step();
        Self { region }
    }
}

impl Drop for Step<'_> {
    fn drop(&mut self) {
        self.region.end_step();
        INSIDE.with(|inside| inside.borrow_mut().pop());
    }
}

/// A [`Pool`] that has been entered.
pub struct Scope<'p> {
    region: &'p Region,
    workers: usize,
}

impl Scope<'_> {
    /// Participants of a region, the caller included.
    pub fn workers(&self) -> usize {
        self.workers
    }

    /// Runs a region: calls `body` exactly once with each of `0..chunks`, on the workers and on this thread, and returns
    /// when every call has returned. What the chunks wrote is visible then.
    ///
    /// Chunks are handed out one at a time in ascending order to whoever is free; which thread gets which is open. Good
    /// sizes are several chunks per participant, of at least a few microseconds each. One chunk, or one participant, runs on
    /// this thread without waking anybody.
    ///
    /// While one region runs, another one of the same pool (started inside a chunk, or by another thread that shares
    /// the scope) runs serially on the thread that asks for it.
    ///
    /// # Panics
    ///
    /// If chunks panic, the rest of the region still runs, then the first panic is resumed here. The pool remains usable.
    /// Also panics if `chunks` is above `isize::MAX`.
    pub fn run(&self, chunks: usize, body: &(dyn Fn(usize) + Sync)) {
        if self.workers == 1 {
            region::serial(chunks, body);
        } else {
            self.region.run(chunks, body);
        }
    }
}

impl fmt::Debug for Scope<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Scope").field("workers", &self.workers).finish_non_exhaustive()
    }
}

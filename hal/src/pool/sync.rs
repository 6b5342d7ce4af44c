//! The synchronisation primitives of the pool: those of std, or those of the model checker under `--cfg loom`.

#[cfg(loom)]
pub(crate) use loom::{
    cell::UnsafeCell,
    sync::atomic::{AtomicBool, AtomicIsize, AtomicUsize, Ordering, fence},
    sync::{Condvar, Mutex, MutexGuard},
};
#[cfg(not(loom))]
pub(crate) use std::{
    sync::atomic::{AtomicBool, AtomicIsize, AtomicUsize, Ordering, fence},
    sync::{Condvar, Mutex, MutexGuard},
};

use std::sync::PoisonError;

/// Locks, whatever a panicking holder left behind: no mutex of the pool guards an invariant that a panic could break.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Waits; see [`lock`] for poisoning.
pub(crate) fn wait<'a, T>(condvar: &Condvar, guard: MutexGuard<'a, T>) -> MutexGuard<'a, T> {
    condvar.wait(guard).unwrap_or_else(PoisonError::into_inner)
}

/// `core::cell::UnsafeCell` with the interface of loom's, which reports unsynchronised access.
#[cfg(not(loom))]
pub(crate) struct UnsafeCell<T>(core::cell::UnsafeCell<T>);

#[cfg(not(loom))]
impl<T> UnsafeCell<T> {
    pub(crate) fn new(value: T) -> Self {
        Self(core::cell::UnsafeCell::new(value))
    }

    pub(crate) fn with<R>(&self, f: impl FnOnce(*const T) -> R) -> R {
        f(self.0.get())
    }

    pub(crate) fn with_mut<R>(&self, f: impl FnOnce(*mut T) -> R) -> R {
        f(self.0.get())
    }
}

/// One thread's patience: spins at first, then giving up the processor, until a time has passed.
pub(crate) struct Pause {
    #[cfg(not(loom))]
    spins: u32,
    #[cfg(not(loom))]
    since: Option<std::time::Instant>,
}

#[cfg(not(loom))]
impl Pause {
    /// Between 20 and 130 microseconds of pause instructions on current processors: longer than the serial work between
    /// two regions of a forward step and than the last chunk of a region, far shorter than a scheduler's time slice.
    const SPINS: u32 = 2048;

    pub(crate) fn new() -> Self {
        Self { spins: 0, since: None }
    }

    /// Waits a moment.
    pub(crate) fn wait(&mut self) {
        if self.spins < Self::SPINS {
            self.spins += 1;
            core::hint::spin_loop();
        } else {
            std::thread::yield_now();
        }
    }

    /// Waits a moment, or returns false once `patience` has passed since the spins ran out.
    pub(crate) fn wait_within(&mut self, patience: std::time::Duration) -> bool {
        if self.spins >= Self::SPINS {
            let since = *self.since.get_or_insert_with(std::time::Instant::now);
            if since.elapsed() >= patience {
                return false;
            }
        }
        self.wait();
        true
    }
}

/// Under the model checker waiting is a hint to run somebody else, and patience is over at once.
#[cfg(loom)]
impl Pause {
    pub(crate) fn new() -> Self {
        Self {}
    }

    pub(crate) fn wait(&mut self) {
        loom::thread::yield_now();
    }

    pub(crate) fn wait_within(&mut self, _patience: std::time::Duration) -> bool {
        false
    }
}

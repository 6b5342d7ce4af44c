use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Counts the bytes that request bodies and pictures occupy, all requests together, up to a limit.
pub(super) struct Ledger {
    used: AtomicUsize,
    limit: usize,
}

impl Ledger {
    pub(super) fn new(limit: usize) -> Self {
        Self { used: AtomicUsize::new(0), limit }
    }

    /// An entry of no bytes yet.
    pub(super) fn open(self: &Arc<Self>) -> Held {
        Held { ledger: Arc::clone(self), bytes: 0 }
    }
}

/// Bytes that are accounted for until this is dropped.
pub(super) struct Held {
    ledger: Arc<Ledger>,
    bytes: usize,
}

impl Held {
    /// Adds bytes if there is room for them.
    #[must_use]
    pub(super) fn grow(&mut self, bytes: usize) -> bool {
        let limit = self.ledger.limit;
        let within = |used: usize| used.checked_add(bytes).filter(|&sum| sum <= limit);
        let grown = self.ledger.used.fetch_update(Ordering::Relaxed, Ordering::Relaxed, within).is_ok();
        if grown {
            self.bytes += bytes;
        }
        grown
    }

    /// Whether there would be room for this many more if nobody else held any.
    pub(super) fn fits(&self, bytes: usize) -> bool {
        self.bytes.checked_add(bytes).is_some_and(|sum| sum <= self.ledger.limit)
    }

    /// Gives bytes back, as many as there are at most.
    pub(super) fn shrink(&mut self, bytes: usize) {
        let bytes = bytes.min(self.bytes);
        self.bytes -= bytes;
        self.ledger.used.fetch_sub(bytes, Ordering::Relaxed);
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.shrink(self.bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_is_given_out_twice_or_lost() {
        let ledger = Arc::new(Ledger::new(100));
        let (mut a, mut b) = (ledger.open(), ledger.open());
        assert!(a.grow(60) && b.grow(40));
        assert!(!a.grow(1) && !b.grow(usize::MAX));
        assert!(a.fits(40) && !a.fits(41) && !a.fits(usize::MAX));
        a.shrink(10);
        assert!(b.grow(10) && !b.grow(1));
        drop(b);
        assert!(a.grow(50));
        a.shrink(usize::MAX);
        drop(a);
        assert!(ledger.open().grow(100));
        assert_eq!(ledger.used.load(Ordering::Relaxed), 0);
    }
}

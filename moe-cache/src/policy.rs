//! Which slot is given up next: the [`Policy`] trait and its default, [`Lru`].

use alloc::vec::Vec;
use core::ops::Range;

use crate::{ErrorKind, Result};

/// One slot that a step used, hit or newly filled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Used {
    /// The slot.
    pub slot: u32,
    /// Flat id of the expert it holds, `layer * n_experts + expert`.
    pub id: u32,
}

/// The order in which slots are given up.
///
/// A policy keeps the set of *candidates*: slots that may be given up. All slots are candidates between steps. In a
/// step the cache first [pins](Policy::pin) every hit, which takes it out of the set, then draws one
/// [victim](Policy::victim) per miss, which takes it out as well, and at the end [returns](Policy::settle) all of
/// them. A slot used in a step can therefore never be a victim of the same step, whatever the policy prefers.
///
/// [`SlotCache::step`](crate::SlotCache::step) panics when a policy hands out a slot that is not a candidate.
pub trait Policy {
    /// Forgets everything: slots `0..n_slots` exist, all are empty and candidates.
    fn reset(&mut self, n_slots: usize);

    /// Takes a candidate out of the set because the running step hits it.
    fn pin(&mut self, slot: u32);

    /// Takes the candidate that is given up next out of the set. Empty slots must come before filled ones, lowest
    /// number first.
    fn victim(&mut self) -> Option<u32>;

    /// Ends step number `step` (counted from 1): `used`, in ascending order of slots, are candidates again.
    fn settle(&mut self, step: u64, used: &[Used]);

    /// Slots of this range, all of them candidates, are empty from now on.
    fn release(&mut self, slots: Range<u32>);

    /// Checks the policy's own state, between steps. `usage[slot]` is the last step that used the slot, 0 when empty.
    fn check_invariants(&self, usage: &[u64]) -> Result<()> {
        let _ = usage;
        Ok(())
    }
}

/// Least recently used, ties to the lower slot number; the default and the reference.
///
/// An intrusive doubly linked list over slot numbers, sorted by (step of last use, slot): choosing a victim, pinning
/// and returning a slot are O(1), and nothing is allocated after [`reset`](Policy::reset).
#[derive(Clone, Debug, Default)]
pub struct Lru {
    /// `[n_slots + 1]`; the last entry is the list's head and tail at once.
    next: Vec<u32>,
    prev: Vec<u32>,
    /// Slots that are empty; they are the first ones of the list.
    empty: Vec<bool>,
}

impl Lru {
    /// A policy without slots; the cache calls [`Policy::reset`].
    pub fn new() -> Self {
        Self::default()
    }

    fn anchor(&self) -> u32 {
        (self.next.len() - 1) as u32
    }

    fn unlink(&mut self, slot: u32) {
        let (before, after) = (self.prev[slot as usize], self.next[slot as usize]);
        self.next[before as usize] = after;
        self.prev[after as usize] = before;
    }

    fn insert_before(&mut self, place: u32, slot: u32) {
        let before = self.prev[place as usize];
        self.next[before as usize] = slot;
        self.prev[slot as usize] = before;
        self.next[slot as usize] = place;
        self.prev[place as usize] = slot;
    }
}

impl Policy for Lru {
    fn reset(&mut self, n_slots: usize) {
        let count = n_slots as u32 + 1;
        self.next.clear();
        self.next.extend((0..count).map(|slot| (slot + 1) % count));
        self.prev.clear();
        self.prev.extend((0..count).map(|slot| (slot + count - 1) % count));
        self.empty.clear();
        self.empty.resize(n_slots, true);
    }

    fn pin(&mut self, slot: u32) {
        self.unlink(slot);
    }

    fn victim(&mut self) -> Option<u32> {
        let slot = self.next[self.anchor() as usize];
        (slot != self.anchor()).then(|| {
            self.unlink(slot);
            slot
        })
    }

    fn settle(&mut self, _step: u64, used: &[Used]) {
        for &Used { slot, .. } in used {
            self.empty[slot as usize] = false;
            self.insert_before(self.anchor(), slot);
        }
    }

    fn release(&mut self, slots: Range<u32>) {
        for slot in slots.clone() {
            self.unlink(slot);
            self.empty[slot as usize] = true;
        }
        // The empty slots lead the list in ascending order: merge the range into them.
        let mut place = self.next[self.anchor() as usize];
        for slot in slots {
            while place != self.anchor() && self.empty[place as usize] && place < slot {
                place = self.next[place as usize];
            }
            self.insert_before(place, slot);
        }
    }

    fn check_invariants(&self, usage: &[u64]) -> Result<()> {
        let corrupt = |rule, at: u32| Err(ErrorKind::Corrupt { rule, at: at as usize }.into());
        let mut last = None;
        let mut slot = self.next[self.anchor() as usize];
        let mut count = 0;
        while slot != self.anchor() {
            let key = (usage[slot as usize], slot);
            if last.is_some_and(|last| last >= key) {
                return corrupt("the list is not sorted by step of last use, then slot", slot);
            }
            if self.prev[self.next[slot as usize] as usize] != slot {
                return corrupt("the list's links disagree", slot);
            }
            if self.empty[slot as usize] != (usage[slot as usize] == 0) {
                return corrupt("the list is wrong about an empty slot", slot);
            }
            last = Some(key);
            slot = self.next[slot as usize];
            count += 1;
        }
        // Strictly ascending keys exclude repetitions, so the count alone shows that no slot is missing.
        if count == usage.len() { Ok(()) } else { corrupt("the list misses slots", count as u32) }
    }
}

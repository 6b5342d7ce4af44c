use alloc::vec;
use alloc::vec::Vec;
use core::ops::Range;

use crate::policy::{Lru, Policy, Used};
use crate::{ErrorKind, Result};

/// Map entry: no slot holds the expert, or the slot is empty.
const NONE: u32 = u32::MAX;

/// The expert slot cache: one pool of slots for the experts of all layers, as a pure state machine.
///
/// It owns no expert weights and moves no bytes. [`step`](SlotCache::step) takes the experts that a layer is about to
/// use and answers with the slot of each, and with the copies that make the answer true. Memory, streams and order of
/// execution are the caller's: a slot may be overwritten as soon as a later step says so, so work that still reads it
/// must be ordered before that step's copies.
///
/// A step looks at its own experts only: O(k log k) for k distinct experts, whatever the number of slots, and without
/// allocation.
#[derive(Clone, Debug)]
pub struct SlotCache<P = Lru> {
    n_layers: usize,
    n_experts: usize,
    /// `[n_layers * n_experts]`.
    slot_of_id: Vec<u32>,
    /// `[n_slots]`, the inverse.
    id_of_slot: Vec<u32>,
    /// `[n_slots]`: step of last use, 0 when empty.
    usage: Vec<u64>,
    step: u64,
    policy: P,
    stats: Vec<LayerStats>,
    /// `[n_experts]`: number of the call that last named the expert. Calls, not steps: a refused call is no step.
    seen: Vec<u64>,
    call: u64,
    missing: Vec<u32>,
    used: Vec<Used>,
    fetches: Vec<Fetch>,
}

/// One copy of a [`Plan`]: the weights of `expert`, in every bank of the plan's layer, go to `slot`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Fetch {
    /// Expert number within the layer.
    pub expert: u32,
    /// Row of the device pool that receives it.
    pub slot: u32,
}

/// What a step asks to be copied before its slots may be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Plan<'a> {
    layer: usize,
    distinct: usize,
    fetches: &'a [Fetch],
}

/// Counts of one layer, or summed over layers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct LayerStats {
    /// Distinct experts, summed over steps.
    pub active: u64,
    /// Those that were in no slot, hence copies.
    pub misses: u64,
    /// Steps.
    pub calls: u64,
}

impl SlotCache {
    /// An empty cache of `n_slots` slots for `n_layers * n_experts` experts, with the [`Lru`] policy.
    ///
    /// # Errors
    /// [`ErrorKind::Geometry`] when a number is zero, or the slots or experts do not fit in 32 bits.
    pub fn new(n_layers: usize, n_experts: usize, n_slots: usize) -> Result<Self> {
        Self::with_policy(n_layers, n_experts, n_slots, Lru::new())
    }
}

impl<P: Policy> SlotCache<P> {
    /// As [`new`](SlotCache::new), with a policy of the caller's.
    ///
    /// # Errors
    /// As [`new`](SlotCache::new).
    pub fn with_policy(n_layers: usize, n_experts: usize, n_slots: usize, mut policy: P) -> Result<Self> {
        let refuse = |what| Err(ErrorKind::Geometry { what }.into());
        if n_layers == 0 || n_experts == 0 || n_slots == 0 {
            return refuse("layers, experts and slots must not be zero");
        }
        let Some(n_ids) = n_layers.checked_mul(n_experts).filter(|&n| n < NONE as usize) else {
            return refuse("layers times experts must fit in 32 bits");
        };
        if n_slots >= NONE as usize {
            return refuse("slots must fit in 32 bits");
        }
        policy.reset(n_slots);
        Ok(Self {
            n_layers,
            n_experts,
            slot_of_id: vec![NONE; n_ids],
            id_of_slot: vec![NONE; n_slots],
            usage: vec![0; n_slots],
            step: 0,
            policy,
            stats: vec![LayerStats::default(); n_layers],
            seen: vec![0; n_experts],
            call: 0,
            missing: Vec::with_capacity(n_experts),
            used: Vec::with_capacity(n_experts),
            fetches: Vec::with_capacity(n_experts.min(n_slots)),
        })
    }

    /// Makes room for the experts `ids` of `layer`, writes the slot of `ids[i]` to `slots[i]`, and returns the copies
    /// to make.
    ///
    /// `ids` may repeat experts (tokens of one batch share them); an expert counts, and is copied, once. Slots used
    /// by this step, hit or filled, are never given up in it. The missing experts in ascending order take the
    /// policy's victims in its order, so every implementation of these rules gives the same answer.
    ///
    /// # Errors
    /// [`ErrorKind::LayerOutOfRange`], [`ErrorKind::ExpertOutOfRange`], [`ErrorKind::Length`] when `slots` is not as
    /// long as `ids`, [`ErrorKind::TooManyExperts`] when `ids` has more distinct experts than there are slots. The
    /// cache is then as it was before the call.
    ///
    /// # Panics
    /// When the policy breaks the contract of [`Policy`]; [`Lru`] does not.
    pub fn step(&mut self, layer: usize, ids: &[u32], slots: &mut [u32]) -> Result<Plan<'_>> {
        let distinct = self.look_up(layer, ids, slots.len())?;

        self.step += 1;
        for used in &self.used {
            self.policy.pin(used.slot);
            self.usage[used.slot as usize] = self.step;
        }
        self.missing.sort_unstable();
        self.fetches.clear();
        let base = (layer * self.n_experts) as u32;
        for &expert in &self.missing {
            let slot = self.policy.victim().expect("policy has a victim while a slot is unused");
            assert!(
                self.usage[slot as usize] != self.step,
                "policy gave up slot {slot}, in use in this step"
            );
            let old = self.id_of_slot[slot as usize];
            if old != NONE {
                self.slot_of_id[old as usize] = NONE;
            }
            let id = base + expert;
            self.slot_of_id[id as usize] = slot;
            self.id_of_slot[slot as usize] = id;
            self.usage[slot as usize] = self.step;
            self.used.push(Used { slot, id });
            self.fetches.push(Fetch { expert, slot });
        }
        self.used.sort_unstable();
        self.policy.settle(self.step, &self.used);

        for (slot, &expert) in slots.iter_mut().zip(ids) {
            *slot = self.slot_of_id[(base + expert) as usize];
        }
        let stats = &mut self.stats[layer];
        stats.active += distinct as u64;
        stats.misses += self.fetches.len() as u64;
        stats.calls += 1;
        Ok(Plan { layer, distinct, fetches: &self.fetches })
    }

    /// Collects the distinct experts of a call, hits in `used` and misses in `missing`, and checks the call. Changes
    /// nothing that outlives the call.
    fn look_up(&mut self, layer: usize, ids: &[u32], n_out: usize) -> Result<usize> {
        let n_experts = self.n_experts;
        if layer >= self.n_layers {
            return Err(ErrorKind::LayerOutOfRange { layer, n_layers: self.n_layers }.into());
        }
        if n_out != ids.len() {
            return Err(ErrorKind::Length { what: "slots", expected: ids.len(), actual: n_out }.into());
        }
        self.call += 1;
        self.used.clear();
        self.missing.clear();
        let base = layer * n_experts;
        for &expert in ids {
            let Some(seen) = self.seen.get_mut(expert as usize) else {
                return Err(ErrorKind::ExpertOutOfRange { layer, expert, n_experts }.into());
            };
            if *seen == self.call {
                continue;
            }
            *seen = self.call;
            let id = base + expert as usize;
            match self.slot_of_id[id] {
                NONE => self.missing.push(expert),
                slot => self.used.push(Used { slot, id: id as u32 }),
            }
        }
        let (distinct, n_slots) = (self.used.len() + self.missing.len(), self.id_of_slot.len());
        if distinct > n_slots {
            return Err(ErrorKind::TooManyExperts { layer, distinct, n_slots }.into());
        }
        Ok(distinct)
    }

    /// Empties slots `slots`, because the caller overwrites them with something else (a streamed layer, say). They are
    /// the first to be filled again. Returns how many of them held an expert.
    ///
    /// # Errors
    /// [`ErrorKind::SlotOutOfRange`]; nothing is changed then.
    pub fn invalidate(&mut self, slots: Range<usize>) -> Result<usize> {
        let n_slots = self.id_of_slot.len();
        if slots.start > slots.end || slots.end > n_slots {
            return Err(ErrorKind::SlotOutOfRange { start: slots.start, end: slots.end, n_slots }.into());
        }
        let mut dropped = 0;
        for slot in slots.clone() {
            let id = core::mem::replace(&mut self.id_of_slot[slot], NONE);
            if id != NONE {
                self.slot_of_id[id as usize] = NONE;
                dropped += 1;
            }
            self.usage[slot] = 0;
        }
        self.policy.release(slots.start as u32..slots.end as u32);
        Ok(dropped)
    }

    /// Empties all slots and sets the step counter to zero. Statistics stay.
    pub fn clear(&mut self) {
        self.slot_of_id.fill(NONE);
        self.id_of_slot.fill(NONE);
        self.usage.fill(0);
        self.step = 0;
        self.policy.reset(self.id_of_slot.len());
    }

    /// The slot that holds `expert` of `layer`; `None` when no slot does or there is no such expert.
    pub fn slot_of(&self, layer: usize, expert: u32) -> Option<u32> {
        if layer >= self.n_layers || expert as usize >= self.n_experts {
            return None;
        }
        Some(self.slot_of_id[layer * self.n_experts + expert as usize]).filter(|&slot| slot != NONE)
    }

    /// Layer and expert that `slot` holds; `None` when it is empty or there is no such slot.
    pub fn occupant(&self, slot: u32) -> Option<(usize, u32)> {
        let id = *self.id_of_slot.get(slot as usize)? as usize;
        (id != NONE as usize).then(|| (id / self.n_experts, (id % self.n_experts) as u32))
    }

    /// The last step that used `slot`, counted from 1; 0 when it is empty. `None` when there is no such slot.
    pub fn usage(&self, slot: u32) -> Option<u64> {
        self.usage.get(slot as usize).copied()
    }

    /// Steps made so far.
    pub fn steps(&self) -> u64 {
        self.step
    }

    /// Layers.
    pub fn n_layers(&self) -> usize {
        self.n_layers
    }

    /// Experts per layer.
    pub fn n_experts(&self) -> usize {
        self.n_experts
    }

    /// Slots of the pool.
    pub fn n_slots(&self) -> usize {
        self.id_of_slot.len()
    }

    /// Counts of each layer, `[n_layers]`.
    pub fn stats(&self) -> &[LayerStats] {
        &self.stats
    }

    /// Counts summed over layers.
    pub fn total(&self) -> LayerStats {
        self.stats.iter().fold(LayerStats::default(), |sum, layer| LayerStats {
            active: sum.active + layer.active,
            misses: sum.misses + layer.misses,
            calls: sum.calls + layer.calls,
        })
    }

    /// Sets all counts to zero.
    pub fn reset_stats(&mut self) {
        self.stats.fill(LayerStats::default());
    }

    /// Checks that the two maps are inverse to each other, that empty slots and only those have no last use, and the
    /// policy's own state. O(slots + experts): for tests and a debug mode, not for every step in service.
    ///
    /// # Errors
    /// [`ErrorKind::Corrupt`] with the first rule that does not hold.
    pub fn check_invariants(&self) -> Result<()> {
        let corrupt = |rule, at| Err(ErrorKind::Corrupt { rule, at }.into());
        for (id, &slot) in self.slot_of_id.iter().enumerate() {
            if slot != NONE && self.id_of_slot.get(slot as usize) != Some(&(id as u32)) {
                return corrupt("an expert's slot holds another expert", id);
            }
        }
        for (slot, &id) in self.id_of_slot.iter().enumerate() {
            if id != NONE && self.slot_of_id.get(id as usize) != Some(&(slot as u32)) {
                return corrupt("a slot's expert is in another slot", slot);
            }
            if (id == NONE) != (self.usage[slot] == 0) {
                return corrupt("a slot is empty but used, or filled but never used", slot);
            }
            if self.usage[slot] > self.step {
                return corrupt("a slot is used by a step that has not been", slot);
            }
        }
        self.policy.check_invariants(&self.usage)
    }
}

impl<'a> Plan<'a> {
    /// Layer of the step.
    pub fn layer(&self) -> usize {
        self.layer
    }

    /// Distinct experts of the step.
    pub fn distinct(&self) -> usize {
        self.distinct
    }

    /// The copies, in ascending order of experts; experts are distinct and so are slots.
    pub fn fetches(&self) -> &'a [Fetch] {
        self.fetches
    }
}

impl LayerStats {
    /// Share of distinct experts that were found in a slot, 0 to 1; `None` before the first step.
    pub fn hit_rate(&self) -> Option<f64> {
        (self.active > 0).then(|| 1.0 - self.misses as f64 / self.active as f64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn slots_of<P: Policy>(
        cache: &mut SlotCache<P>,
        layer: usize,
        ids: &[u32],
    ) -> (Vec<u32>, Vec<(u32, u32)>) {
        let mut slots = vec![NONE; ids.len()];
        let plan = cache.step(layer, ids, &mut slots).unwrap();
        let fetches = plan.fetches().iter().map(|f| (f.expert, f.slot)).collect();
        cache.check_invariants().unwrap();
        (slots, fetches)
    }

    #[test]
    fn more_distinct_experts_than_slots_is_an_error_that_changes_nothing() {
        let mut cache = SlotCache::new(1, 8, 2).unwrap();
        slots_of(&mut cache, 0, &[5]);
        let error = cache.step(0, &[1, 2, 3], &mut [0; 3]).unwrap_err();
        assert_eq!(error.kind(), &ErrorKind::TooManyExperts { layer: 0, distinct: 3, n_slots: 2 });
        assert_eq!(
            alloc::string::ToString::to_string(&error),
            "layer 0: one step needs 3 distinct experts, the pool has 2 slots"
        );
        assert_eq!(cache.steps(), 1);
        assert_eq!(cache.slot_of(0, 5), Some(0));
        assert_eq!(cache.total(), LayerStats { active: 1, misses: 1, calls: 1 });
        cache.check_invariants().unwrap();
        // Four positions, two experts: fits.
        assert_eq!(slots_of(&mut cache, 0, &[1, 5, 1, 5]), (vec![1, 0, 1, 0], vec![(1, 1)]));
    }

    #[test]
    fn repeated_experts_share_a_slot_and_count_once() {
        let mut cache = SlotCache::new(1, 8, 3).unwrap();
        assert_eq!(slots_of(&mut cache, 0, &[1, 1, 2]), (vec![0, 0, 1], vec![(1, 0), (2, 1)]));
        assert_eq!(cache.total(), LayerStats { active: 2, misses: 2, calls: 1 });
        assert_eq!(slots_of(&mut cache, 0, &[5, 5]), (vec![2, 2], vec![(5, 2)]));
        assert_eq!(slots_of(&mut cache, 0, &[5, 5]), (vec![2, 2], vec![]));
    }

    #[test]
    fn hits_of_a_step_survive_its_misses() {
        let mut cache = SlotCache::new(1, 8, 2).unwrap();
        slots_of(&mut cache, 0, &[1]);
        slots_of(&mut cache, 0, &[2]);
        // 1 is the oldest, but in use: 2 has to go.
        assert_eq!(slots_of(&mut cache, 0, &[3, 1]), (vec![1, 0], vec![(3, 1)]));
    }

    #[test]
    fn missing_experts_in_ascending_order_take_victims_by_age_then_slot() {
        let mut cache = SlotCache::new(1, 16, 4).unwrap();
        assert_eq!(
            slots_of(&mut cache, 0, &[9, 3, 7, 5]),
            (vec![3, 0, 2, 1], vec![(3, 0), (5, 1), (7, 2), (9, 3)])
        );
        // Used in the order 7, 3: slots 2 and 0 are now younger than 1 and 3, which tie.
        slots_of(&mut cache, 0, &[7]);
        slots_of(&mut cache, 0, &[3]);
        assert_eq!(slots_of(&mut cache, 0, &[12, 11, 10]), (vec![2, 3, 1], vec![(10, 1), (11, 3), (12, 2)]));
    }

    #[test]
    fn experts_of_layers_share_the_pool() {
        let mut cache = SlotCache::new(2, 4, 2).unwrap();
        slots_of(&mut cache, 0, &[1]);
        assert_eq!(slots_of(&mut cache, 1, &[1]), (vec![1], vec![(1, 1)]));
        assert_eq!((cache.occupant(0), cache.occupant(1)), (Some((0, 1)), Some((1, 1))));
        slots_of(&mut cache, 1, &[2]);
        assert_eq!(cache.slot_of(0, 1), None);
    }

    #[test]
    fn ids_layers_and_lengths_out_of_range_are_errors_that_change_nothing() {
        let mut cache = SlotCache::new(2, 4, 2).unwrap();
        let kind = |r: Result<Plan<'_>>| r.unwrap_err().kind().clone();
        assert_eq!(
            kind(cache.step(1, &[0, 4], &mut [0; 2])),
            ErrorKind::ExpertOutOfRange { layer: 1, expert: 4, n_experts: 4 }
        );
        assert_eq!(
            kind(cache.step(1, &[u32::MAX], &mut [0])),
            ErrorKind::ExpertOutOfRange { layer: 1, expert: u32::MAX, n_experts: 4 }
        );
        assert_eq!(kind(cache.step(2, &[0], &mut [0])), ErrorKind::LayerOutOfRange { layer: 2, n_layers: 2 });
        assert_eq!(
            kind(cache.step(0, &[0], &mut [])),
            ErrorKind::Length { what: "slots", expected: 1, actual: 0 }
        );
        assert_eq!(cache.steps(), 0);
        assert_eq!(cache.total(), LayerStats::default());
        assert!((0..2).all(|slot| cache.occupant(slot).is_none()));
        cache.check_invariants().unwrap();
        assert_eq!(slots_of(&mut cache, 1, &[0]), (vec![0], vec![(0, 0)]));
    }

    #[test]
    fn an_empty_step_is_a_step() {
        let mut cache = SlotCache::new(1, 4, 2).unwrap();
        assert_eq!(slots_of(&mut cache, 0, &[]), (vec![], vec![]));
        assert_eq!(cache.total(), LayerStats { active: 0, misses: 0, calls: 1 });
        assert_eq!(cache.total().hit_rate(), None);
    }

    #[test]
    fn invalidated_slots_are_empty_and_fill_first_in_order() {
        let mut cache = SlotCache::new(1, 16, 6).unwrap();
        slots_of(&mut cache, 0, &[0, 1, 2, 3, 4]);
        slots_of(&mut cache, 0, &[1, 2]);
        assert_eq!(cache.invalidate(1..3).unwrap(), 2);
        cache.check_invariants().unwrap();
        assert_eq!((cache.slot_of(0, 1), cache.slot_of(0, 2), cache.occupant(1)), (None, None, None));
        assert_eq!(cache.invalidate(2..4).unwrap(), 1);
        cache.check_invariants().unwrap();
        // Empty: 1, 2, 3 and, never used, 5.
        assert_eq!(
            slots_of(&mut cache, 0, &[10, 11, 12, 13, 14]).1,
            [(10, 1), (11, 2), (12, 3), (13, 5), (14, 0)]
        );
        assert_eq!(cache.invalidate(0..0).unwrap(), 0);
        let error = cache.invalidate(5..7).unwrap_err();
        assert_eq!(error.kind(), &ErrorKind::SlotOutOfRange { start: 5, end: 7, n_slots: 6 });
    }

    #[test]
    fn clear_forgets_residents_but_not_counts() {
        let mut cache = SlotCache::new(1, 4, 3).unwrap();
        slots_of(&mut cache, 0, &[3, 1]);
        cache.clear();
        cache.check_invariants().unwrap();
        assert_eq!((cache.steps(), cache.slot_of(0, 3)), (0, None));
        assert_eq!(cache.total().misses, 2);
        assert_eq!(slots_of(&mut cache, 0, &[2]), (vec![0], vec![(2, 0)]));
        cache.reset_stats();
        assert_eq!(cache.total(), LayerStats::default());
    }

    #[test]
    fn impossible_geometry_is_refused() {
        for (layers, experts, slots) in
            [(0, 1, 1), (1, 0, 1), (1, 1, 0), (1 << 20, 1 << 20, 1), (usize::MAX, 2, 1)]
        {
            let error = SlotCache::new(layers, experts, slots).unwrap_err();
            assert!(matches!(error.kind(), ErrorKind::Geometry { .. }), "{layers} {experts} {slots}");
        }
        assert!(SlotCache::new(1, 1, u32::MAX as usize).is_err());
    }

    /// Gives up slot 0 always: the cache must notice instead of handing one slot to two experts.
    struct Stubborn;

    impl Policy for Stubborn {
        fn reset(&mut self, _: usize) {}
        fn pin(&mut self, _: u32) {}
        fn victim(&mut self) -> Option<u32> {
            Some(0)
        }
        fn settle(&mut self, _: u64, _: &[Used]) {}
        fn release(&mut self, _: Range<u32>) {}
    }

    #[test]
    #[should_panic(expected = "policy gave up slot 0, in use in this step")]
    fn a_policy_that_gives_up_a_pinned_slot_is_caught() {
        let mut cache = SlotCache::with_policy(1, 8, 2, Stubborn).unwrap();
        let _ = cache.step(0, &[1, 2], &mut [0; 2]);
    }

    #[test]
    fn check_invariants_notices_broken_maps() {
        let mut cache = SlotCache::new(1, 4, 3).unwrap();
        slots_of(&mut cache, 0, &[0, 1, 2]);
        let whole = cache.clone();
        let breaks: [fn(&mut SlotCache); 5] = [
            |c| c.slot_of_id[0] = 1,
            |c| c.slot_of_id[3] = 0,
            |c| c.id_of_slot[2] = NONE,
            |c| c.usage[0] = 9,
            |c| c.policy.pin(1),
        ];
        for (i, damage) in breaks.iter().enumerate() {
            cache = whole.clone();
            damage(&mut cache);
            let error = cache.check_invariants().unwrap_err();
            assert!(matches!(error.kind(), ErrorKind::Corrupt { .. }), "damage {i}");
        }
        whole.check_invariants().unwrap();
    }
}

//! The slot cache against the plain model, and against what it is for: every returned slot holds its expert.
#![cfg(any(feature = "std", feature = "libm"))]

use proptest::collection::vec;
use proptest::prelude::*;
use skep_moe_cache::replay::{Belady, Synthetic, Trace};
use skep_moe_cache::{ErrorKind, Lru, Policy, SlotCache, reference};

#[derive(Clone, Debug)]
enum Op {
    Step { layer: usize, ids: Vec<u32> },
    Invalidate { start: usize, len: usize },
    Clear,
}

/// Ids that repeat and cluster: `sharp` halvings of the range make low ids ever more likely.
fn skewed(n_experts: u32) -> impl Strategy<Value = u32> {
    (0..n_experts, 0..5_u32).prop_map(|(id, sharp)| id >> sharp)
}

fn ops(n_layers: usize, n_experts: u32, n_slots: usize) -> impl Strategy<Value = Vec<Op>> {
    let step = (0..n_layers, vec(skewed(n_experts), 0..12)).prop_map(|(layer, ids)| Op::Step { layer, ids });
    let invalidate = (0..n_slots, 0..=n_slots).prop_map(|(start, len)| Op::Invalidate { start, len });
    vec(prop_oneof![40 => step, 3 => invalidate, 1 => Just(Op::Clear)], 1..120)
}

fn geometry() -> impl Strategy<Value = (usize, u32, usize, Vec<Op>)> {
    (1..4_usize, 1..24_u32, 1..40_usize)
        .prop_flat_map(|(l, e, s)| ops(l, e, s).prop_map(move |ops| (l, e, s, ops)))
}

/// Device memory: each slot holds the bytes (here: layer and expert) last copied there.
struct Device(Vec<Option<(usize, u32)>>);

impl Device {
    fn step<P: Policy>(&mut self, cache: &mut SlotCache<P>, layer: usize, ids: &[u32]) -> Vec<(u32, u32)> {
        let resident: Vec<bool> = ids.iter().map(|&id| cache.slot_of(layer, id).is_some()).collect();
        let mut slots = std::vec![u32::MAX; ids.len()];
        let before = cache.steps();
        let plan = cache.step(layer, ids, &mut slots).unwrap();
        let fetches: Vec<_> = plan.fetches().iter().map(|fetch| (fetch.expert, fetch.slot)).collect();
        assert_eq!(plan.layer(), layer);
        assert_eq!(cache.steps(), before + 1);
        for &(expert, slot) in &fetches {
            self.0[slot as usize] = Some((layer, expert));
        }
        for ((&id, &slot), resident) in ids.iter().zip(&slots).zip(resident) {
            assert_eq!(self.0[slot as usize], Some((layer, id)), "slot {slot} does not hold expert {id}");
            assert_eq!(cache.occupant(slot), Some((layer, id)));
            assert_eq!(cache.usage(slot), Some(before + 1));
            assert_eq!(resident, !fetches.iter().any(|fetch| fetch.1 == slot), "a hit's slot is overwritten");
        }
        assert!(fetches.windows(2).all(|pair| pair[0].0 < pair[1].0), "not ascending: {fetches:?}");
        cache.check_invariants().unwrap();
        fetches
    }
}

/// Occupant and last use of every slot.
type Contents = Vec<(Option<(usize, u32)>, Option<u64>)>;

fn contents(cache: &SlotCache) -> Contents {
    (0..cache.n_slots() as u32).map(|slot| (cache.occupant(slot), cache.usage(slot))).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn the_cache_is_the_plain_model((n_layers, n_experts, n_slots, ops) in geometry()) {
        let mut cache = SlotCache::new(n_layers, n_experts as usize, n_slots).unwrap();
        let mut model = reference::SlotCache::new(n_experts as usize, n_slots);
        let mut device = Device(vec![None; n_slots]);
        let (mut active, mut misses, mut calls) = (0, 0, 0);
        for op in ops {
            match op {
                Op::Step { layer, ids } => {
                    let Some((slots, copies)) = model.step(layer, &ids) else {
                        let before = contents(&cache);
                        let error = cache.step(layer, &ids, &mut vec![0; ids.len()]).unwrap_err();
                        let refused = matches!(error.kind(), ErrorKind::TooManyExperts { .. });
                        prop_assert!(refused, "{error}");
                        prop_assert_eq!(before, contents(&cache));
                        cache.check_invariants().unwrap();
                        continue;
                    };
                    let mut distinct = ids.clone();
                    distinct.sort_unstable();
                    distinct.dedup();
                    active += distinct.len() as u64;
                    misses += copies.len() as u64;
                    calls += 1;
                    prop_assert_eq!(device.step(&mut cache, layer, &ids), copies);
                    for (&id, &slot) in ids.iter().zip(&slots) {
                        prop_assert_eq!(cache.slot_of(layer, id), Some(slot));
                    }
                }
                Op::Invalidate { start, len } => {
                    let slots = start..(start + len).min(n_slots);
                    cache.invalidate(slots.clone()).unwrap();
                    device.0[slots.clone()].fill(None);
                    model.invalidate(slots);
                    cache.check_invariants().unwrap();
                }
                Op::Clear => {
                    cache.clear();
                    device.0.fill(None);
                    model = reference::SlotCache::new(n_experts as usize, n_slots);
                    cache.check_invariants().unwrap();
                }
            }
        }
        let total = cache.total();
        prop_assert_eq!((total.active, total.misses, total.calls), (active, misses, calls));
    }

    #[test]
    fn belady_is_a_sound_policy(seed in any::<u64>(), n_slots in 4..30_usize, zipf in 0.0..2.0_f64, repeat in 0.0..0.9_f64) {
        let trace = Trace::synthetic(&Synthetic { n_layers: 2, n_experts: 12, top_k: 4, n_tokens: 40, zipf, repeat, seed }).unwrap();
        let mut best = SlotCache::with_policy(2, 12, n_slots, Belady::new(&trace)).unwrap();
        let mut lru = SlotCache::with_policy(2, 12, n_slots, Lru::new()).unwrap();
        let mut device = Device(vec![None; n_slots]);
        let mut other = Device(vec![None; n_slots]);
        for (layer, ids) in trace.steps() {
            device.step(&mut best, layer, ids);
            other.step(&mut lru, layer, ids);
        }
        prop_assert!(best.total().misses <= lru.total().misses);
    }
}

/// Capacity of exactly one step's need, twice that, and one more; skew so strong that nearly every step hits and
/// misses at once.
#[test]
fn long_skewed_runs_at_the_smallest_capacities() {
    let top_k = 8;
    for (n_slots, zipf) in [(top_k, 1.5), (top_k + 1, 0.0), (top_k + 1, 1.2), (2 * top_k, 1.5)] {
        let trace = Trace::synthetic(&Synthetic {
            n_layers: 2,
            n_experts: 64,
            top_k,
            n_tokens: 5_000,
            zipf,
            repeat: 0.5,
            seed: 3,
        })
        .unwrap();
        let mut cache = SlotCache::new(2, 64, n_slots).unwrap();
        let mut model = reference::SlotCache::new(64, n_slots);
        let mut device = Device(vec![None; n_slots]);
        for (layer, ids) in trace.steps() {
            let (_, copies) = model.step(layer, ids).unwrap();
            assert_eq!(device.step(&mut cache, layer, ids), copies);
        }
        let total = cache.total();
        assert_eq!(total.calls, 10_000);
        assert!(total.misses > 0 && total.misses <= total.active);
    }
}

#[test]
fn all_tokens_to_one_expert() {
    let mut cache = SlotCache::new(1, 256, 1).unwrap();
    let mut device = Device(vec![None; 1]);
    for step in 0..1_000_u32 {
        let fetches = device.step(&mut cache, 0, &[step / 100; 64]);
        assert_eq!(fetches.len(), usize::from(step % 100 == 0));
    }
    assert_eq!(cache.total().misses, 10);
}

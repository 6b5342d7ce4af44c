//! A step allocates nothing, from the very first one.
#![cfg(any(feature = "std", feature = "libm"))]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

use skep_moe_cache::SlotCache;
use skep_moe_cache::replay::{Synthetic, Trace};

thread_local! {
    static COUNT: Cell<usize> = const { Cell::new(0) };
}

struct Counting;

// SAFETY: every call is passed on to the system allocator unchanged.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        COUNT.set(COUNT.get() + 1);
        // SAFETY: the caller's promises are those that the system allocator asks for.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        // SAFETY: as above; `ptr` came from `System`.
        unsafe { System.dealloc(ptr, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

#[test]
fn steps_do_not_allocate() {
    let shape =
        Synthetic { n_layers: 4, n_experts: 64, top_k: 8, n_tokens: 200, zipf: 0.8, repeat: 0.3, seed: 1 };
    let trace = Trace::synthetic(&shape).unwrap();
    let mut cache = SlotCache::new(4, 64, 80).unwrap();
    let everything: Vec<u32> = (0..64).rev().chain(0..64).collect();
    let mut slots = [0; 128];

    let before = COUNT.get();
    assert!(before > 0, "the counter does not count");
    for (layer, ids) in trace.steps() {
        cache.step(layer, ids, &mut slots[..ids.len()]).unwrap();
    }
    cache.step(2, &everything, &mut slots).unwrap();
    cache.invalidate(3..70).unwrap();
    cache.step(1, &everything, &mut slots).unwrap();
    assert!(cache.step(1, &[64], &mut slots[..1]).is_err());
    cache.clear();
    cache.step(0, &everything, &mut slots).unwrap();
    assert_eq!(COUNT.get(), before);
    assert!(cache.total().misses > 200);
}

//! In a steady state nothing is allocated.

mod common;

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};

use common::Random;
use skep_attention::{
    Gate, Heads, KvCache, KvType, Mask, Norms, Position, Projections, Queries, Rope, Scratch, Span,
};
use skep_quant::{Parallel, Serial};

struct Counting;

static COUNT: AtomicUsize = AtomicUsize::new(0);

// SAFETY: hands every request on to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        COUNT.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the caller's promise.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        // SAFETY: the caller's promise.
        unsafe { System.dealloc(memory, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// One thread that claims to be four, so that work is split.
struct Four;

// SAFETY: a plain loop.
unsafe impl Parallel for Four {
    fn workers(&self) -> usize {
        4
    }

    fn run(&self, chunks: usize, body: &(dyn Fn(usize) + Sync)) {
        Serial.run(chunks, body);
    }
}

#[test]
fn steady_state_allocates_nothing() {
    let heads = Heads::new(4, 1, 40, 40, 0.2).unwrap();
    let rope = Rope::new(40, 16, 1e4).unwrap();
    let mut cache = KvCache::new(KvType::F16, 200, 16, 1, 40, 40).unwrap();
    let mut scratch = Scratch::new();
    let pages = (0..200).collect::<Vec<u32>>();
    let n = 30;
    let (q, k) = (Random(1).floats(n * 4 * 80, 1.0), Random(2).floats(n * 40, 1.0));
    let positions = [Position::default(); 30];
    let (mut queries, mut out) = (vec![0.0; n * 4 * 40], vec![0.0; n * 4 * 40]);
    let mut step = |start: usize, n: usize| {
        let before = COUNT.load(Ordering::Relaxed);
        let spans = [Span { tokens: 0..n, pages: &pages, start, together: &[] }];
        let q = &q[..n * 4 * 80];
        let projections = Projections { q: Queries::GateInterleaved(q), k: &k[..n * 40], v: &k[..n * 40] };
        let queries = &mut queries[..n * 4 * 40];
        skep_attention::prepare(
            &Four,
            &heads,
            &projections,
            &Norms::default(),
            Some(&rope),
            &positions[..n],
            &spans,
            &mut cache,
            &mut scratch,
            queries,
        )
        .unwrap();
        let gate = Some(Gate::Interleaved(q));
        skep_attention::attend(
            &Four,
            &heads,
            queries,
            gate,
            &spans,
            &cache,
            Mask::Causal,
            &mut scratch,
            &mut out[..n * 4 * 40],
        )
        .unwrap();
        COUNT.load(Ordering::Relaxed) - before
    };
    assert!(step(3000, 1) > 0, "the first call makes its room");
    step(3000, 30);
    for start in (0..3000).step_by(97) {
        assert_eq!(step(start, 1) + step(start, 30), 0, "at {start}");
    }
}

//! Steady-state calls allocate nothing.

mod common;

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};

use common::Case;
use skep_gdn::{Form, HeadOrder, Scratch, Shape, Span, State, mix};
use skep_quant::Serial;

struct Counting;

static COUNT: AtomicUsize = AtomicUsize::new(0);

// SAFETY: every call goes to the system allocator unchanged.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        COUNT.fetch_add(1, Ordering::Relaxed);
        // SAFETY: as the caller promises.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        // SAFETY: as the caller promises.
        unsafe { System.dealloc(at, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// The only test of this binary, because the counter is global.
#[test]
fn a_warm_scratch_allocates_nothing() {
    if !std::is_x86_feature_detected!("avx2") || !std::is_x86_feature_detected!("fma") {
        println!("skipped: the scalar reference allocates");
        return;
    }
    let shape = Shape::new(2, 4, 16, 24, 4, HeadOrder::Tiled).unwrap();
    let case = Case::new(shape, 150, 1);
    let mut states = [State::new(&shape), State::new(&shape)];
    let mut scratch = Scratch::new();
    let mut out = vec![0.0; 150 * shape.value_dim()];
    let mut counts = Vec::with_capacity(16);
    for form in [Form::Chunked, Form::Recurrent, Form::Auto, Form::Chunked] {
        for spans in [[0..1, 1..150], [0..70, 70..140]] {
            let before = COUNT.load(Ordering::Relaxed);
            let [first, second] = &mut states;
            let [a, b] = spans;
            let mut spans = [Span { tokens: a, state: first }, Span { tokens: b, state: second }];
            mix(&Serial, &shape, &case.weights(), &mut spans, &case.input(), &mut scratch, form, &mut out);
            counts.push(COUNT.load(Ordering::Relaxed) - before);
        }
    }
    assert!(counts[0] > 0, "the first call is the one that allocates");
    assert_eq!(counts[1..], [0; 7]);
}

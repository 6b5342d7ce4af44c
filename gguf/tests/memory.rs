//! Memory: bounded by the file, whatever its counts say, and not a string of a vocabulary is copied.

mod common;

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

use common::*;
use skep_gguf::Gguf;

/// Counts what a thread allocates.
struct Counting;

thread_local! {
    static CALLS: Cell<usize> = const { Cell::new(0) };
    static HELD: Cell<usize> = const { Cell::new(0) };
    static PEAK: Cell<usize> = const { Cell::new(0) };
}

// SAFETY: every request goes to the system's allocator unchanged.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        CALLS.set(CALLS.get() + 1);
        HELD.set(HELD.get().saturating_add(layout.size()));
        PEAK.set(PEAK.get().max(HELD.get()));
        // SAFETY: the caller's promises are those of the system's allocator.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        HELD.set(HELD.get().saturating_sub(layout.size()));
        // SAFETY: the pointer came from the system's allocator, with this layout.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;

/// Allocations made and most bytes held while parsing.
fn cost(file: &[u8]) -> (usize, usize) {
    let (calls, held) = (CALLS.get(), HELD.get());
    PEAK.set(held);
    let result = Gguf::parse(file).map(drop);
    let cost = (CALLS.get() - calls, PEAK.get() - held);
    drop(result);
    cost
}

#[test]
fn hostile_counts_claim_no_memory() {
    let start = b"GGUF\x03\0\0\0";
    let counts = |tensors: u64, entries: u64, length: usize| {
        [&start[..], &tensors.to_le_bytes(), &entries.to_le_bytes(), &vec![0; length]].concat()
    };
    let mut files = vec![counts(u64::MAX, 0, 0), counts(0, u64::MAX, 0), counts(0, 1_000_000_000, 1024)];
    // Counts that the length of the file allows, over bytes that are no entries.
    files.push(counts(1_000_000, 0, 24_000_000));
    files.push(counts(0, 1_000_000, 13_000_000));
    for length in [u64::MAX, 1 << 63, 1 << 40] {
        files.push(Raw::new().kv("k", STRING, length.to_le_bytes()).build());
        files.push(Raw::new().kv("k", ARRAY, array(U64, length, &[])).build());
        files.push(Raw::new().kv("k", ARRAY, array(STRING, length, &[])).build());
    }
    files.push(Raw::new().tensor("w", &[1_048_576, 4_398_046_511_105], 0, 0).data(64).build());
    for file in files {
        let (_, peak) = cost(&file);
        assert!(peak < 4096, "{peak} bytes for a file of {}", file.len());
    }
}

#[test]
fn memory_is_in_proportion_to_the_file() {
    let entries = (0..20_000u32).fold(Raw::new(), |raw, i| raw.kv(i.to_string(), U8, [0])).build();
    let tensors = (0..20_000u32).fold(Raw::new(), |raw, i| raw.tensor(i.to_string(), &[0], 0, 0)).build();
    for file in [entries, tensors] {
        assert!(Gguf::parse(&file).is_ok());
        let (_, peak) = cost(&file);
        assert!(peak < 20 * file.len(), "{peak} bytes for a file of {}", file.len());
    }
}

#[test]
fn a_vocabulary_is_not_copied() {
    let n = 248_320u32;
    let tokens: Vec<u8> = (0..n).flat_map(|i| string(i.to_string())).collect();
    let types: Vec<u8> = (0..n).flat_map(|_| 1i32.to_le_bytes()).collect();
    let file = Raw::new()
        .kv("tokenizer.ggml.tokens", ARRAY, array(STRING, n.into(), &tokens))
        .kv("tokenizer.ggml.token_type", ARRAY, array(I32, n.into(), &types))
        .build();
    let (calls, peak) = cost(&file);
    assert!(calls < 20 && peak < 4096, "{calls} allocations, {peak} bytes");

    let gguf = Gguf::parse(&file).unwrap();
    let before = CALLS.get();
    let tokens = gguf.array("tokenizer.ggml.tokens").unwrap().unwrap().strs().unwrap();
    let bytes: usize = tokens.map(|token| token.as_bytes().len()).sum();
    assert_eq!(CALLS.get() - before, 0);
    assert_eq!(bytes, (0..n).map(|i| i.to_string().len()).sum());
}

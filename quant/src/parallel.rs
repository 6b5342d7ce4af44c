//! How the products of this crate and its users are spread over threads.

use core::marker::PhantomData;
#[cfg(feature = "std")]
use core::sync::atomic::{AtomicUsize, Ordering};

/// Runs the independent chunks of one operation, on a thread pool or on the caller alone ([`Serial`]).
///
/// # Safety
/// `run` must call `body` exactly once for every index in `0..chunks` and return only after all of these calls
/// have returned. Users hand out disjoint mutable memory by chunk index.
pub unsafe trait Parallel: Sync {
    /// How many chunks can make progress at once; a hint for cutting work.
    fn workers(&self) -> usize;

    /// Calls `body(i)` for every `i` in `0..chunks`, in any order and from any thread.
    fn run(&self, chunks: usize, body: &(dyn Fn(usize) + Sync));
}

/// Runs every chunk on the calling thread, in order.
#[derive(Clone, Copy, Debug, Default)]
pub struct Serial;

// SAFETY: a plain loop calls each index once and finishes before returning.
unsafe impl Parallel for Serial {
    fn workers(&self) -> usize {
        1
    }

    fn run(&self, chunks: usize, body: &(dyn Fn(usize) + Sync)) {
        (0..chunks).for_each(body);
    }
}

/// Runs chunks on this many threads, started anew for every call and joined before it returns; chunks are drawn from a
/// shared counter.
///
/// For tests, tools and work that is rare: starting threads costs far more than a small product. An engine keeps its
/// threads and implements [`Parallel`] for its pool.
#[cfg(feature = "std")]
#[derive(Clone, Copy, Debug)]
pub struct Threads(pub usize);

#[cfg(feature = "std")]
// SAFETY: the counter hands out each index once, and the scope joins all threads.
unsafe impl Parallel for Threads {
    fn workers(&self) -> usize {
        self.0
    }

    fn run(&self, chunks: usize, body: &(dyn Fn(usize) + Sync)) {
        let next = AtomicUsize::new(0);
        std::thread::scope(|scope| {
            for _ in 0..self.0.max(1).min(chunks) {
                scope.spawn(|| {
                    loop {
                        let chunk = next.fetch_add(1, Ordering::Relaxed);
                        if chunk >= chunks {
                            return;
                        }
                        body(chunk);
                    }
                });
            }
        });
    }
}

/// Cuts `data` in consecutive chunks of `chunk_len` elements (the last may be shorter) and calls
/// `body(i, chunk i)` for each, spread over `par`.
///
/// # Panics
/// When `chunk_len` is zero.
pub fn for_each_chunk_mut<T: Send>(
    par: &dyn Parallel,
    data: &mut [T],
    chunk_len: usize,
    body: impl Fn(usize, &mut [T]) + Sync,
) {
    assert!(chunk_len > 0, "chunk length is zero");
    let shared = SharedMut { start: data.as_mut_ptr(), len: data.len(), owner: PhantomData };
    par.run(data.len().div_ceil(chunk_len), &|i| {
        let start = i * chunk_len;
        let len = chunk_len.min(shared.len - start);
        // SAFETY: `Parallel` hands out each index once and within the borrow of `data`; chunks do not overlap.
        let chunk = unsafe { shared.slice(start, len) };
        body(i, chunk);
    });
}

/// A mutable slice whose disjoint parts are used by several threads.
struct SharedMut<'a, T> {
    start: *mut T,
    len: usize,
    owner: PhantomData<&'a mut [T]>,
}

impl<T> SharedMut<'_, T> {
    /// # Safety
    /// No two live slices may overlap.
    #[allow(clippy::mut_from_ref)]
    unsafe fn slice(&self, start: usize, len: usize) -> &mut [T] {
        assert!(start <= self.len && len <= self.len - start);
        // SAFETY: in bounds by the assertion.
        let start = unsafe { self.start.add(start) };
        // SAFETY: in bounds, borrowed mutably by the owner, and disjoint from other parts by the contract.
        unsafe { core::slice::from_raw_parts_mut(start, len) }
    }
}

// SAFETY: parts are handed out disjointly, each to one thread, and `T` may be sent to threads.
unsafe impl<T: Send> Sync for SharedMut<'_, T> {}

/// A rectangle of an output matrix: `tokens` x `rows` values, one token `stride` values after the other.
///
/// Several threads may hold rectangles of the same matrix, as long as they do not overlap.
#[cfg(feature = "std")]
pub(crate) struct Out<'a> {
    start: *mut f32,
    stride: usize,
    tokens: usize,
    rows: usize,
    owner: PhantomData<&'a mut [f32]>,
}

#[cfg(feature = "std")]
impl<'a> Out<'a> {
    /// The whole of `out` as `[tokens, rows]`.
    pub(crate) fn new(out: &'a mut [f32], tokens: usize, rows: usize) -> Self {
        assert_eq!(Some(out.len()), tokens.checked_mul(rows), "output for {tokens} tokens x {rows} rows");
        Self { start: out.as_mut_ptr(), stride: rows, tokens, rows, owner: PhantomData }
    }

    /// The part for some of the tokens and rows.
    ///
    /// # Safety
    /// No two live parts may overlap, and `self` must not be written while a part is in use.
    pub(crate) unsafe fn part(
        &self,
        tokens: core::ops::Range<usize>,
        rows: core::ops::Range<usize>,
    ) -> Out<'a> {
        assert!(tokens.start <= tokens.end && tokens.end <= self.tokens);
        assert!(rows.start <= rows.end && rows.end <= self.rows);
        let start = self.start.wrapping_add(tokens.start * self.stride + rows.start);
        Out { start, stride: self.stride, tokens: tokens.len(), rows: rows.len(), owner: PhantomData }
    }

    /// Number of tokens.
    pub(crate) fn tokens(&self) -> usize {
        self.tokens
    }

    /// Number of rows.
    pub(crate) fn rows(&self) -> usize {
        self.rows
    }

    /// Writes the values of consecutive rows from `row` on, for one token.
    #[inline]
    pub(crate) fn put(&mut self, token: usize, row: usize, values: &[f32]) {
        assert!(token < self.tokens && row <= self.rows && values.len() <= self.rows - row);
        let at = self.start.wrapping_add(token * self.stride + row);
        // SAFETY: within this rectangle by the assertion; the rectangle lies within the borrowed output and no
        // other live one overlaps it.
        unsafe { core::ptr::copy_nonoverlapping(values.as_ptr(), at, values.len()) };
    }
}

#[cfg(feature = "std")]
// SAFETY: writing needs `&mut Out`; a shared one only makes parts, under the contract of `part`.
unsafe impl Sync for Out<'_> {}

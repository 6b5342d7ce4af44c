use alloc::vec::Vec;
use core::marker::PhantomData;

use crate::Heads;
use crate::attend::{Job, Merge, Unit};
use crate::cpu::{KEYS, PAD};

/// Working memory of [`prepare`](crate::prepare()) and [`attend`](crate::attend()), kept between calls so that a steady state allocates nothing.
///
/// One for all layers of a shape is right; it grows to the largest batch and context seen. It carries nothing from one call to
/// the next.
#[derive(Debug, Default)]
pub struct Scratch {
    pub(crate) lanes: Vec<Lane>,
    pub(crate) plan: Plan,
    /// Results of single splits, to be merged.
    pub(crate) partials: Vec<f32>,
}

/// What an attention call consists of.
#[derive(Debug, Default)]
pub(crate) struct Plan {
    pub(crate) jobs: Vec<Job>,
    pub(crate) units: Vec<Unit>,
    pub(crate) merges: Vec<Merge>,
}

/// Working memory of one thread.
#[derive(Debug, Default)]
pub(crate) struct Lane {
    shape: Option<Shape>,
    /// Queries, `[queries, k_pad]`.
    pub(crate) q: Buffer,
    /// Block of keys, `[KEYS, k_pad]`.
    pub(crate) k: Buffer,
    /// Block of values, `[KEYS, v_pad]`.
    pub(crate) v: Buffer,
    /// Scores or weights, `[queries, KEYS]`.
    pub(crate) scores: Buffer,
    /// Result of one split.
    pub(crate) part: Sums,
    /// Result of the splits so far.
    pub(crate) total: Sums,
    /// One key head and one value head, `[head_dim + v_dim]`.
    pub(crate) rows: Vec<f32>,
}

/// State of an online softmax for several queries.
#[derive(Debug, Default)]
pub(crate) struct Sums {
    /// Weighted values, `[queries, v_pad]`.
    pub(crate) acc: Buffer,
    /// Largest score of each query.
    pub(crate) max: Vec<f32>,
    /// Sum of weights of each query; zero when no key was seen.
    pub(crate) sum: Vec<f32>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Shape {
    queries: usize,
    k_dim: usize,
    v_dim: usize,
}

/// Floats aligned to a cache line.
#[derive(Debug, Default)]
pub(crate) struct Buffer {
    data: Vec<f32>,
    start: usize,
    len: usize,
}

impl Scratch {
    /// Empty working memory.
    pub fn new() -> Self {
        Self::default()
    }

    /// Lanes with room for `len` values in `rows`.
    pub(crate) fn rows(&mut self, lanes: usize, len: usize) -> &mut [Lane] {
        if self.lanes.len() < lanes {
            self.lanes.resize_with(lanes, Lane::default);
        }
        let lanes = &mut self.lanes[..lanes];
        for lane in lanes.iter_mut().filter(|lane| lane.rows.len() < len) {
            lane.rows.resize(len, 0.0);
        }
        lanes
    }

    /// Makes `lanes` lanes ready for tiles of `queries` queries.
    pub(crate) fn lanes(&mut self, lanes: usize, queries: usize, heads: &Heads) -> &mut [Lane] {
        if self.lanes.len() < lanes {
            self.lanes.resize_with(lanes, Lane::default);
        }
        let shape = Shape { queries, k_dim: heads.head_dim(), v_dim: heads.v_dim() };
        let lanes = &mut self.lanes[..lanes];
        lanes.iter_mut().for_each(|lane| lane.fit(shape));
        lanes
    }
}

impl Lane {
    fn fit(&mut self, shape: Shape) {
        if self.shape == Some(shape) {
            return;
        }
        let (k_pad, v_pad) = (padded(shape.k_dim), padded(shape.v_dim));
        self.q.reset(shape.queries * k_pad);
        self.k.reset(KEYS * k_pad);
        self.v.reset(KEYS * v_pad);
        self.scores.reset(shape.queries * KEYS);
        for sums in [&mut self.part, &mut self.total] {
            sums.acc.reset(shape.queries * v_pad);
            sums.max.clear();
            sums.max.resize(shape.queries, 0.0);
            sums.sum.clear();
            sums.sum.resize(shape.queries, 0.0);
        }
        self.shape = Some(shape);
    }
}

impl Sums {
    /// Empties the state of the first `queries` queries.
    pub(crate) fn clear(&mut self, queries: usize, v_pad: usize) {
        self.acc.as_mut()[..queries * v_pad].fill(0.0);
        self.max[..queries].fill(f32::NEG_INFINITY);
        self.sum[..queries].fill(0.0);
    }
}

impl Buffer {
    /// `len` zeros.
    fn reset(&mut self, len: usize) {
        const LINE: usize = 64;
        self.data.clear();
        self.data.resize(len + LINE / size_of::<f32>(), 0.0);
        // Alignment is for speed alone, so an `align_offset` that cannot tell is no error.
        self.start = self.data.as_ptr().align_offset(LINE).min(LINE / size_of::<f32>());
        self.len = len;
    }

    pub(crate) fn as_ref(&self) -> &[f32] {
        &self.data[self.start..][..self.len]
    }

    pub(crate) fn as_mut(&mut self) -> &mut [f32] {
        &mut self.data[self.start..][..self.len]
    }
}

/// Row length in working memory.
pub(crate) const fn padded(dim: usize) -> usize {
    dim.next_multiple_of(PAD)
}

/// A mutable slice of which threads take parts that do not overlap.
pub(crate) struct Shared<'a> {
    base: *mut f32,
    len: usize,
    borrow: PhantomData<&'a mut [f32]>,
}

// SAFETY: it stands for a `&mut [f32]`; that threads take disjoint parts is the contract of `part`.
unsafe impl Sync for Shared<'_> {}

impl<'a> Shared<'a> {
    pub(crate) fn new(slice: &'a mut [f32]) -> Self {
        Self { base: slice.as_mut_ptr(), len: slice.len(), borrow: PhantomData }
    }

    /// `len` values from `start` on.
    ///
    /// # Safety
    /// While the result lives, nobody else may ask for any of these values.
    #[expect(clippy::mut_from_ref, reason = "disjointness is the caller's promise")]
    pub(crate) unsafe fn part(&self, start: usize, len: usize) -> &mut [f32] {
        assert!(start <= self.len && len <= self.len - start, "part outside the slice");
        // SAFETY: within the slice by the assertion.
        let first = unsafe { self.base.add(start) };
        // SAFETY: within the slice, which is borrowed mutably for longer than `self`; sole reference by the caller's promise.
        unsafe { core::slice::from_raw_parts_mut(first, len) }
    }
}

/// Number of lanes worth starting for `tasks` tasks.
pub(crate) fn lane_count(par: &dyn skep_quant::Parallel, tasks: usize) -> usize {
    par.workers().min(tasks).max(1)
}

const _: () = assert!(PAD.is_multiple_of(8) && KEYS.is_multiple_of(8));

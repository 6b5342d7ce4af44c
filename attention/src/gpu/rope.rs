use super::{Kernels, WORD, words};
use crate::Rope;
use alloc::vec::Vec;
use skep_hal::Result;
use skep_hal::gpu::{Args, Memory, Stream, View};

/// Cosines and sines of a step, made once and used by every layer with the same rotation.
#[derive(Debug)]
pub struct RopeTable {
    head_dim: usize,
    max_rows: usize,
    /// Radians per position, f64 `[pairs]`.
    freqs: Memory,
    /// `[pairs]`.
    axes: Memory,
    pairs: usize,
    /// `[max_rows, pairs, 2]`: cosine and sine.
    pub(super) table: Memory,
}

/// Positions of the rows of a step, `u32` in device memory.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub enum Positions<'m> {
    /// `[rows]`: text, the same on all axes.
    Text(View<'m>),
    /// `[3, rows]`: time, height and width.
    Axes(View<'m>),
}

impl RopeTable {
    /// A table of up to `max_rows` rows for the rotation that `rope` describes.
    ///
    /// # Errors
    /// When the device has no memory for it.
    pub fn new(stream: &Stream, rope: &Rope, max_rows: usize) -> Result<Self> {
        let (freqs, axes): (Vec<f64>, Vec<u32>) = rope.pairs().unzip();
        let pairs = freqs.len();
        Ok(Self {
            head_dim: rope.head_dim(),
            max_rows,
            freqs: Memory::of(stream, &freqs)?,
            axes: Memory::of(stream, &axes)?,
            pairs,
            table: Memory::new(stream.device(), max_rows * pairs * 2 * WORD)?,
        })
    }

    /// Computes the angles of the `rows` rows of a step, reduced in f64: exact to f32 at any position.
    ///
    /// # Errors
    /// What the driver says.
    ///
    /// # Panics
    /// When the table has fewer rows, or the positions are fewer.
    pub fn fill(
        &self,
        kernels: &Kernels,
        stream: &Stream,
        positions: Positions<'_>,
        rows: usize,
    ) -> Result<()> {
        assert!(rows <= self.max_rows, "{rows} rows for a rope table of {}", self.max_rows);
        let (positions, stride) = match positions {
            Positions::Text(view) => (view, 0),
            Positions::Axes(view) => (view, rows),
        };
        words("positions", positions, if stride == 0 { rows } else { 3 * rows });
        let args = Args::new()
            .view(self.freqs.view())
            .view(self.axes.view())
            .view(positions)
            .view(self.table.view())
            .len(stride)
            .len(self.pairs)
            .len(rows);
        let blocks = (rows * self.pairs).div_ceil(kernels.rope_table.threads() as usize) as u32;
        // SAFETY: a thread writes one pair of the table, which has `max_rows` rows, and reads its frequency, axis (below 3) and position.
        unsafe { kernels.rope_table.launch(stream, [blocks, 1, 1], &args) }
    }

    /// The angles, floats `[max_rows, pairs, 2]`.
    pub fn view(&self) -> View<'_> {
        self.table.view()
    }

    pub(super) fn pairs(&self) -> usize {
        self.pairs
    }

    pub(super) fn check(&self, head_dim: usize, rows: usize) {
        assert_eq!(self.head_dim, head_dim, "rope and layer differ in head_dim");
        assert!(rows <= self.max_rows, "{rows} rows for a rope table of {}", self.max_rows);
    }
}

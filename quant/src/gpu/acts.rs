use skep_hal::Result;
use skep_hal::gpu::{Device, Memory, View};

/// Rows of activations on a device, in every form that products take: `[n, cols]` each.
#[derive(Debug)]
pub struct Acts {
    capacity: usize,
    cols: usize,
    x: Memory,
    q: Memory,
    s: Memory,
    h: Memory,
    scale: Memory,
}

impl Acts {
    /// Room for `capacity` rows of up to `cols` numbers.
    ///
    /// # Errors
    /// What the device says of memory.
    ///
    /// # Panics
    /// If `cols` is not a multiple of 32.
    pub fn new(device: &Device, capacity: usize, cols: usize) -> Result<Self> {
        assert!(cols.is_multiple_of(32), "{cols} columns are no whole units of 32");
        let memory = |bytes: usize| Memory::new(device, capacity * bytes);
        Ok(Self {
            capacity,
            cols,
            x: memory(4 * cols)?,
            q: memory(cols)?,
            s: memory(cols / 4)?,
            h: memory(2 * cols)?,
            scale: memory(4)?,
        })
    }

    /// Rows that fit, of the greatest length.
    pub fn capacity(&self) -> usize {
        self.capacity
    }

    /// The greatest length of a row.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// f32 `[n, cols]`.
    pub fn x(&self) -> View<'_> {
        self.x.view()
    }

    /// Codes, i8 `[n, cols]`.
    pub fn q(&self) -> View<'_> {
        self.q.view()
    }

    /// For every 32 codes their scale and scale times sum, f32 `[n, cols / 32, 2]`.
    pub fn s(&self) -> View<'_> {
        self.s.view()
    }

    /// f16 `[n, cols]`, divided by the row's [`scale`](Self::scale).
    pub fn h(&self) -> View<'_> {
        self.h.view()
    }

    /// Powers of two, f32 `[n]`.
    pub fn scale(&self) -> View<'_> {
        self.scale.view()
    }

    pub(crate) fn check(&self, n: usize, cols: usize) {
        assert!(
            n <= self.capacity && cols <= self.cols,
            "{n} rows of {cols} numbers do not fit activations of {} rows of {}",
            self.capacity,
            self.cols
        );
    }
}

use core::ops::Range;

/// A row-major matrix of which several threads each write their own part.
#[derive(Debug)]
pub(crate) struct RawRows {
    start: *mut f32,
    rows: usize,
    width: usize,
}

impl RawRows {
    pub(crate) fn new(data: &mut [f32], width: usize) -> Self {
        Self { start: data.as_mut_ptr(), rows: data.len() / width, width }
    }

    /// Some columns of a row.
    ///
    /// # Safety
    /// The slice given to `new` is still borrowed for as long as the part lives, and no two live parts overlap.
    #[allow(clippy::mut_from_ref)]
    pub(crate) unsafe fn part<'a>(&self, row: usize, columns: Range<usize>) -> &'a mut [f32] {
        assert!(row < self.rows && columns.start <= columns.end && columns.end <= self.width);
        // SAFETY: inside the slice by the assertion.
        let start = unsafe { self.start.add(row * self.width + columns.start) };
        // SAFETY: inside the slice by the assertion; alive and exclusive by the contract.
        unsafe { core::slice::from_raw_parts_mut(start, columns.len()) }
    }
}

// SAFETY: a `RawRows` is an address; whoever turns it into a reference vouches for it.
unsafe impl Send for RawRows {}
// SAFETY: as for `Send`.
unsafe impl Sync for RawRows {}

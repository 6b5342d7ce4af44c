//! Memory from the global allocator.

use super::LEAST_ALIGN;
use core::ptr::NonNull;
use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::io;

/// `bytes` zero bytes, at least one.
pub(super) fn allocate(bytes: usize) -> io::Result<NonNull<u8>> {
    assert_ne!(bytes, 0, "an empty allocation");
    let layout = Layout::from_size_align(bytes, LEAST_ALIGN).map_err(io::Error::other)?;
    // SAFETY: the layout is not empty.
    let start = unsafe { alloc_zeroed(layout) };
    NonNull::new(start).ok_or_else(|| io::ErrorKind::OutOfMemory.into())
}

/// # Safety
///
/// `start` came from [`allocate`] with the same `bytes` and is not used any more.
pub(super) unsafe fn free(start: NonNull<u8>, bytes: usize) {
    // SAFETY: `allocate` has checked this size and alignment.
    let layout = unsafe { Layout::from_size_align_unchecked(bytes, LEAST_ALIGN) };
    // SAFETY: the caller vouches for the origin; the layout is that of the allocation.
    unsafe { dealloc(start.as_ptr(), layout) }
}

//! Memory from the kernel, in pages.

use super::HUGE_PAGE;
use core::ptr::{self, NonNull};
use std::io;

/// `bytes` zero bytes, at least one, from a page boundary on; from a huge page boundary if they fill one.
pub(super) fn allocate(bytes: usize) -> io::Result<NonNull<u8>> {
    if bytes < HUGE_PAGE {
        return map(bytes);
    }
    // The kernel places mappings at page boundaries: map a huge page more, and give back what lies outside.
    let (Some(needed), Some(mapped)) =
        (bytes.checked_next_multiple_of(page()), bytes.checked_add(HUGE_PAGE + page()))
    else {
        return Err(io::ErrorKind::OutOfMemory.into());
    };
    let mapped = mapped / page() * page();
    let start = map(mapped)?;
    let before = start.as_ptr().align_offset(HUGE_PAGE);
    let after = mapped - before - needed;
    // SAFETY: `before` is less than a huge page, and a huge page more than `needed` was mapped.
    let aligned = unsafe { start.add(before) };
    // SAFETY: `needed` bytes from there on are in the mapping.
    let end = unsafe { aligned.add(needed) };
    if before != 0 {
        // SAFETY: whole pages of this new mapping that nobody has seen.
        unsafe { unmap(start, before) }
    }
    if after != 0 {
        // SAFETY: as above; all lengths are multiples of the page size.
        unsafe { unmap(end, after) }
    }
    // Advice: a kernel without huge pages refuses it, and ordinary pages do as well.
    // SAFETY: the range is mapped, and the advice does not change its contents.
    unsafe { libc::madvise(aligned.as_ptr().cast(), needed, libc::MADV_HUGEPAGE) };
    Ok(aligned)
}

/// # Safety
///
/// `start` came from [`allocate`] with the same `bytes` and is not used any more.
pub(super) unsafe fn free(start: NonNull<u8>, bytes: usize) {
    // SAFETY: the caller vouches for it; the kernel rounds the length up to whole pages, as `allocate` did.
    unsafe { unmap(start, bytes) }
}

fn map(bytes: usize) -> io::Result<NonNull<u8>> {
    let access = libc::PROT_READ | libc::PROT_WRITE;
    let kind = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
    // SAFETY: a new anonymous mapping at an address of the kernel's choice touches no memory in use.
    let start = unsafe { libc::mmap(ptr::null_mut(), bytes, access, kind, -1, 0) };
    if start == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    NonNull::new(start.cast()).ok_or_else(|| io::ErrorKind::OutOfMemory.into())
}

/// # Safety
///
/// The range must be mapped, owned by the caller and unused.
unsafe fn unmap(start: NonNull<u8>, bytes: usize) {
    // SAFETY: passed on to the caller.
    let result = unsafe { libc::munmap(start.as_ptr().cast(), bytes) };
    // It fails only for arguments that are no mapping, or where the process has too many mappings to split one; the range
    // then stays mapped, which harms nobody.
    debug_assert_eq!(result, 0, "munmap of {bytes} bytes");
}

fn page() -> usize {
    // SAFETY: always safe to call.
    let size = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    usize::try_from(size).ok().filter(|size| size.is_power_of_two()).unwrap_or(4096)
}

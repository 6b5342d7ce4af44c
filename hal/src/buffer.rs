//! Large zeroed memory on huge pages.
//!
//! See [`Buffer`].

#[cfg(any(test, not(target_os = "linux")))]
mod heap;
#[cfg(target_os = "linux")]
mod pages;

use crate::memory::Memory;
use crate::{Error, ErrorKind, Result};
use core::fmt;
use core::ops::{Deref, DerefMut};
use core::ptr::NonNull;
use std::io;

#[cfg(not(target_os = "linux"))]
use heap as source;
#[cfg(target_os = "linux")]
use pages as source;

/// Alignment in bytes of buffers of at least this size: the size of a huge page on x86-64 and most 64-bit ARM systems.
pub const HUGE_PAGE: usize = 2 << 20;

/// The least alignment of any buffer, that of a cache line.
const LEAST_ALIGN: usize = 64;

/// Types that a [`Buffer`] may hold.
///
/// # Safety
///
/// The value whose bytes are all zero must be a valid one.
pub unsafe trait Plain: Copy + Send + Sync + 'static {}

macro_rules! plain {
    ($($type:ty)*) => {
        $(
            // SAFETY: zero is a value of every number type.
            unsafe impl Plain for $type {}
        )*
    };
}

plain! { u8 u16 u32 u64 usize i8 i16 i32 i64 isize f32 f64 }

// SAFETY: an array of valid values is valid, and it has no padding of its own.
unsafe impl<T: Plain, const N: usize> Plain for [T; N] {}

/// An owned slice of zeros to begin with, made for weights, activations and caches.
///
/// On Linux it is an anonymous mapping. From [`HUGE_PAGE`] bytes on it is aligned to that size and marked for transparent
/// huge pages (`MADV_HUGEPAGE`; a kernel that declines leaves ordinary pages), which spares most of the address
/// translation when gigabytes are streamed. Physical memory is committed as pages are first touched, and on machines with
/// several memory nodes placed near the thread that does. Therefore success does not mean that the memory can all be
/// used: compare with [`Memory::available`] first.
///
/// On other systems it comes from the global allocator, aligned to 64 bytes.
///
/// # Examples
///
/// ```
/// let mut buffer = skep_hal::Buffer::<f32>::zeroed(1 << 20)?;
/// buffer[7] = 1.5;
/// assert_eq!(buffer.iter().sum::<f32>(), 1.5);
/// # Ok::<(), skep_hal::Error>(())
/// ```
pub struct Buffer<T: Plain> {
    start: NonNull<T>,
    len: usize,
}

// SAFETY: the buffer owns its memory, and T is Send.
unsafe impl<T: Plain> Send for Buffer<T> {}
// SAFETY: shared access gives out shared slices only, and T is Sync.
unsafe impl<T: Plain> Sync for Buffer<T> {}

impl<T: Plain> Buffer<T> {
    const FITS: () = assert!(size_of::<T>() != 0 && align_of::<T>() <= LEAST_ALIGN);

    /// `len` zeros. A `len` of 0 allocates nothing.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::OutOfMemory`], with the bytes asked for and those available, if the system refuses or the size in
    /// bytes is above `isize::MAX`.
    pub fn zeroed(len: usize) -> Result<Self> {
        const { Self::FITS };
        if len == 0 {
            return Ok(Self { start: NonNull::dangling(), len });
        }
        let refused = |bytes: u64, cause: io::Error| {
            let available = Memory::detect().available;
            Error::because(ErrorKind::OutOfMemory { bytes, available }, cause)
        };
        let bytes = len.checked_mul(size_of::<T>()).filter(|&bytes| isize::try_from(bytes).is_ok());
        let Some(bytes) = bytes else {
            let asked = (len as u64).saturating_mul(size_of::<T>() as u64);
            return Err(refused(asked, io::Error::other("more than the address space holds")));
        };
        match source::allocate(bytes) {
            Ok(start) => Ok(Self { start: start.cast(), len }),
            Err(cause) => Err(refused(bytes as u64, cause)),
        }
    }

    /// The size in bytes.
    pub fn bytes(&self) -> usize {
        self.len * size_of::<T>()
    }
}

impl<T: Plain> Drop for Buffer<T> {
    fn drop(&mut self) {
        if self.len != 0 {
            // SAFETY: `zeroed` got this memory from the same source with the same size, and nothing refers to it any more.
            unsafe { source::free(self.start.cast(), self.bytes()) }
        }
    }
}

impl<T: Plain> Deref for Buffer<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        // SAFETY: the memory is owned, aligned, `len` elements long (dangling only if that is 0), at most isize::MAX bytes,
        // and holds valid values: zeros at first, by the contract of `Plain`, and then what was written through slices.
        unsafe { core::slice::from_raw_parts(self.start.as_ptr(), self.len) }
    }
}

impl<T: Plain> DerefMut for Buffer<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        // SAFETY: as in `deref`, and the exclusive borrow of the buffer is one of the slice.
        unsafe { core::slice::from_raw_parts_mut(self.start.as_ptr(), self.len) }
    }
}

impl<T: Plain> fmt::Debug for Buffer<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Buffer").field("len", &self.len).field("bytes", &self.bytes()).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn zeroed_writable_and_aligned_at_any_size() {
        for bytes in [1, 63, 64, 4095, 4097, HUGE_PAGE - 1, HUGE_PAGE, HUGE_PAGE + 1, 5 * HUGE_PAGE + 4096] {
            let mut buffer = Buffer::<u8>::zeroed(bytes).unwrap();
            assert_eq!((buffer.len(), buffer.bytes()), (bytes, bytes));
            assert!(buffer.iter().all(|&byte| byte == 0));
            let align = if bytes >= HUGE_PAGE && cfg!(target_os = "linux") { HUGE_PAGE } else { LEAST_ALIGN };
            assert_eq!(buffer.as_ptr().addr() % align, 0, "{bytes} bytes");
            buffer.fill(0xA5);
            assert!(buffer.iter().all(|&byte| byte == 0xA5));
        }
    }

    #[test]
    fn neighbours_do_not_overlap_and_leave_nothing_behind() {
        for _round in 0..3 {
            let mut buffers: Vec<Buffer<u64>> =
                (1..20).map(|n| Buffer::zeroed(n * 70_000).unwrap()).collect();
            for (number, buffer) in buffers.iter_mut().enumerate() {
                assert!(buffer.iter().all(|&value| value == 0));
                buffer.fill(number as u64 + 1);
            }
            for (number, buffer) in buffers.iter().enumerate() {
                assert!(buffer.iter().all(|&value| value == number as u64 + 1));
            }
        }
    }

    #[test]
    fn empty() {
        let mut buffer = Buffer::<f32>::zeroed(0).unwrap();
        assert!(buffer.is_empty());
        assert_eq!(buffer.bytes(), 0);
        buffer.fill(1.0);
    }

    #[test]
    fn element_types() {
        assert!(Buffer::<[f32; 8]>::zeroed(3).unwrap().iter().flatten().all(|&x| x.to_bits() == 0));
        assert_eq!(Buffer::<i32>::zeroed(5).unwrap().bytes(), 20);
        assert_eq!(format!("{:?}", Buffer::<u16>::zeroed(4).unwrap()), "Buffer { len: 4, bytes: 8, .. }");
    }

    #[cfg(target_pointer_width = "64")]
    #[test]
    fn too_much_is_an_error_with_numbers() {
        for (len, asked) in [(1 << 57, 1 << 60), (usize::MAX, u64::MAX), (usize::MAX / 8, u64::MAX - 7)] {
            let error = Buffer::<u64>::zeroed(len).expect_err("refused");
            let ErrorKind::OutOfMemory { bytes, available } = *error.kind() else { panic!("{error:?}") };
            assert_eq!(bytes, asked);
            assert_eq!(available.is_some(), cfg!(target_os = "linux"));
            assert!(error.to_string().contains(&bytes.to_string()), "{error}");
            assert!(core::error::Error::source(&error).is_some());
        }
    }

    /// What systems without mappings use, on this one.
    #[test]
    fn heap_source() {
        for bytes in [1, 64, HUGE_PAGE + 1] {
            let start = heap::allocate(bytes).unwrap();
            assert_eq!(start.addr().get() % LEAST_ALIGN, 0);
            // SAFETY: just allocated with this size, and zeroed.
            let slice = unsafe { core::slice::from_raw_parts_mut(start.as_ptr(), bytes) };
            assert!(slice.iter().all(|&byte| byte == 0));
            slice.fill(1);
            // SAFETY: allocated above with this size; the slice is not used any more.
            unsafe { heap::free(start, bytes) }
        }
        heap::allocate(isize::MAX as usize).expect_err("too much");
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn dropping_returns_the_memory() {
        // Held together these would need 1 TiB of addresses and 8 GiB of memory.
        for _ in 0..1024 {
            let mut buffer = Buffer::<u8>::zeroed(1 << 30).unwrap();
            buffer[0] = 1;
            *buffer.last_mut().unwrap() = 1;
        }
        assert!(crate::memory::resident().is_none_or(|bytes| bytes < 2 << 30));
    }
}

use super::{Device, Pointer, Stream};
use crate::buffer::Plain;
use crate::{Error, ErrorKind, Result};
use core::marker::PhantomData;
use core::ops::Range;
use core::slice;

/// Memory on a device, given back when dropped.
#[derive(Debug)]
pub struct Memory {
    device: Device,
    pointer: Pointer,
    bytes: usize,
}

impl Memory {
    /// `bytes` bytes with undefined contents, aligned to 256 bytes.
    ///
    /// # Errors
    /// [`ErrorKind::DeviceMemory`] with what was asked for and what was free.
    pub fn new(device: &Device, bytes: usize) -> Result<Self> {
        // An address of its own even for nothing: kernels may compute with it.
        let pointer = device.driver().alloc(bytes.max(16))?;
        Ok(Self { device: device.clone(), pointer, bytes })
    }

    /// `bytes` bytes that are all 0 once the stream has come to them.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn zeroed(stream: &Stream, bytes: usize) -> Result<Self> {
        let memory = Self::new(stream.device(), bytes)?;
        memory.view().fill(stream, 0)?;
        Ok(memory)
    }

    /// Memory that holds what `data` holds once the stream has come to it.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn of<T: Plain>(stream: &Stream, data: &[T]) -> Result<Self> {
        let memory = Self::new(stream.device(), size_of_val(data))?;
        memory.view().upload(stream, data)?;
        Ok(memory)
    }

    /// All of it.
    pub fn view(&self) -> View<'_> {
        View { pointer: self.pointer, bytes: self.bytes, device: &self.device, memory: PhantomData }
    }

    /// Bytes from `range.start` to `range.end`.
    ///
    /// # Panics
    /// If they are not within the memory.
    pub fn slice(&self, range: Range<usize>) -> View<'_> {
        self.view().slice(range)
    }

    /// The device.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Length in bytes.
    pub fn bytes(&self) -> usize {
        self.bytes
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: the memory is ours, and nobody can borrow it any more. There is nobody to tell of a failure.
        let _ = unsafe { self.device.driver().free(self.pointer) };
    }
}

/// A range of device memory. What is enqueued on streams reads and writes it, whoever holds views of it: order is the
/// streams', not the borrow checker's.
#[derive(Debug, Clone, Copy)]
pub struct View<'m> {
    pointer: Pointer,
    bytes: usize,
    device: &'m Device,
    memory: PhantomData<&'m Memory>,
}

impl<'m> View<'m> {
    /// Where it begins.
    pub fn pointer(&self) -> Pointer {
        self.pointer
    }

    /// Length in bytes.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// A part of it.
    ///
    /// # Panics
    /// If the range is not within the view.
    pub fn slice(&self, range: Range<usize>) -> View<'m> {
        assert!(
            range.start <= range.end && range.end <= self.bytes,
            "bytes {range:?} of a view of {} bytes",
            self.bytes
        );
        View {
            pointer: Pointer(self.pointer.0 + range.start as u64),
            bytes: range.end - range.start,
            ..*self
        }
    }

    /// Writes `data` to the start of the view.
    ///
    /// # Errors
    /// What the driver says.
    ///
    /// # Panics
    /// If it is longer than the view.
    pub fn upload<T: Plain>(&self, stream: &Stream, data: &[T]) -> Result<()> {
        let bytes = size_of_val(data);
        self.check(stream, bytes);
        if bytes == 0 {
            return Ok(());
        }
        let driver = self.device.driver();
        // SAFETY: the view has room for the bytes; pageable memory has been read when an upload returns, and pinned memory
        // goes through `upload_pinned`.
        unsafe { driver.upload(stream.handle(), self.pointer, data.as_ptr().cast(), bytes) }?;
        Ok(())
    }

    /// Writes `bytes` of pinned memory to the start of the view, later.
    ///
    /// # Errors
    /// What the driver says.
    ///
    /// # Panics
    /// If they do not fit, or are not within the host memory.
    ///
    /// # Safety
    /// The bytes must not be written before the stream has come past this upload.
    pub unsafe fn upload_pinned(
        &self,
        stream: &Stream,
        host: &HostMemory,
        bytes: Range<usize>,
    ) -> Result<()> {
        self.check(stream, bytes.len());
        assert!(bytes.end <= host.bytes, "bytes {bytes:?} of {} bytes of host memory", host.bytes);
        if bytes.is_empty() {
            return Ok(());
        }
        // SAFETY: within the allocation, by the assertion.
        let from = unsafe { host.pointer.add(bytes.start) };
        // SAFETY: the view has room; the caller leaves the bytes alone.
        unsafe { self.device.driver().upload(stream.handle(), self.pointer, from, bytes.len()) }
    }

    /// Reads the start of the view, when all work of the stream so far is done.
    ///
    /// # Errors
    /// What the driver says, also of work enqueued earlier.
    ///
    /// # Panics
    /// If `data` is longer than the view.
    pub fn download<T: Plain>(&self, stream: &Stream, data: &mut [T]) -> Result<()> {
        let bytes = size_of_val(data);
        self.check(stream, bytes);
        if bytes > 0 {
            let to = data.as_mut_ptr().cast();
            // SAFETY: the view has the bytes; `data` is borrowed until they have come, by the wait below.
            unsafe { self.device.driver().download(stream.handle(), to, self.pointer, bytes) }?;
        }
        stream.synchronize()
    }

    /// Reads the start of the view into pinned memory, later.
    ///
    /// # Errors
    /// What the driver says.
    ///
    /// # Panics
    /// If the bytes are not within the view or the host memory.
    ///
    /// # Safety
    /// The bytes must not be read or written before the stream has come past this download.
    pub unsafe fn download_pinned(
        &self,
        stream: &Stream,
        host: &HostMemory,
        bytes: Range<usize>,
    ) -> Result<()> {
        self.check(stream, bytes.len());
        assert!(bytes.end <= host.bytes, "bytes {bytes:?} of {} bytes of host memory", host.bytes);
        if bytes.is_empty() {
            return Ok(());
        }
        // SAFETY: within the allocation, by the assertion.
        let to = unsafe { host.pointer.add(bytes.start) };
        // SAFETY: the view has the bytes; the caller leaves the target alone.
        unsafe { self.device.driver().download(stream.handle(), to, self.pointer, bytes.len()) }
    }

    /// Copies `from` to the start of the view; the ranges do not overlap.
    ///
    /// # Errors
    /// What the driver says.
    ///
    /// # Panics
    /// If it is longer than the view, or overlaps with it.
    pub fn copy(&self, stream: &Stream, from: View<'_>) -> Result<()> {
        self.check(stream, from.bytes);
        let (a, b) = (self.pointer.0, from.pointer.0);
        assert!(
            a.abs_diff(b) >= from.bytes as u64,
            "a copy of {} bytes from {b:#x} to {a:#x} overlaps",
            from.bytes
        );
        if from.bytes == 0 {
            return Ok(());
        }
        // SAFETY: both ranges are there and do not overlap.
        unsafe { self.device.driver().copy(stream.handle(), self.pointer, from.pointer, from.bytes) }
    }

    /// Sets every byte.
    ///
    /// # Errors
    /// What the driver says.
    pub fn fill(&self, stream: &Stream, value: u8) -> Result<()> {
        self.check(stream, self.bytes);
        if self.bytes == 0 {
            return Ok(());
        }
        // SAFETY: the bytes are there.
        unsafe { self.device.driver().fill(stream.handle(), self.pointer, value, self.bytes) }
    }

    fn check(&self, stream: &Stream, bytes: usize) {
        assert!(bytes <= self.bytes, "{bytes} bytes for a view of {} bytes", self.bytes);
        assert!(self.device.is(stream.device()), "the stream is of another device");
    }
}

/// Pinned host memory with the address under which the device sees it: copies to and from it run beside the host, and
/// kernels can read it.
#[derive(Debug)]
pub struct HostMemory {
    device: Device,
    pointer: *mut u8,
    bytes: usize,
    alias: Option<Pointer>,
}

// SAFETY: the memory is owned, and reached through `&self` and `&mut self` by the rules of slices.
unsafe impl Send for HostMemory {}
// SAFETY: as above.
unsafe impl Sync for HostMemory {}

impl HostMemory {
    /// `bytes` bytes of zeros.
    ///
    /// # Errors
    /// [`ErrorKind::HostMemory`] with what was asked for.
    pub fn new(device: &Device, bytes: usize) -> Result<Self> {
        if bytes == 0 || bytes > isize::MAX as usize {
            return Err(Error::new(ErrorKind::HostMemory {
                bytes: bytes as u64,
                detail: "not a size".to_owned(),
            }));
        }
        let driver = device.driver();
        let pointer = driver.host_alloc(bytes)?;
        // SAFETY: fresh memory of this length.
        unsafe { pointer.write_bytes(0, bytes) };
        // SAFETY: pinned a moment ago.
        let alias = unsafe { driver.host_alias(pointer) }.ok();
        Ok(Self { device: device.clone(), pointer, bytes, alias })
    }

    /// The address under which kernels may read the memory in place; `None` if the device cannot.
    pub fn alias(&self) -> Option<Pointer> {
        self.alias
    }

    /// Length in bytes.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// The contents.
    ///
    /// # Safety
    /// No work that writes the memory may be under way.
    pub unsafe fn as_slice(&self) -> &[u8] {
        // SAFETY: owned memory of this length; no writer, by the caller's promise.
        unsafe { slice::from_raw_parts(self.pointer, self.bytes) }
    }

    /// The contents.
    ///
    /// # Safety
    /// No work that reads or writes the memory may be under way.
    pub unsafe fn as_mut_slice(&mut self) -> &mut [u8] {
        // SAFETY: owned memory of this length, borrowed for us alone; no work beside it, by the caller's promise.
        unsafe { slice::from_raw_parts_mut(self.pointer, self.bytes) }
    }
}

impl Drop for HostMemory {
    fn drop(&mut self) {
        // SAFETY: ours, and not used again. There is nobody to tell of a failure.
        let _ = unsafe { self.device.driver().host_free(self.pointer) };
    }
}

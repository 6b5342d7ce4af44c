//! What a driver must do: the functions that CUDA, HIP and the emulated device have in common.

use super::{Caps, DeviceMemory};
use crate::Result;
use core::ffi::c_void;
use core::fmt;

/// An address in device memory, or the device's address of registered host memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(transparent)]
pub struct Pointer(pub u64);

macro_rules! handles {
    ($($(#[$doc:meta])* $name:ident),* $(,)?) => {$(
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        #[repr(transparent)]
        pub struct $name(pub usize);
    )*};
}

handles! {
    /// A driver's name for a stream.
    StreamHandle,
    /// A driver's name for an event.
    EventHandle,
    /// A driver's name for a captured graph that is ready to run.
    GraphHandle,
    /// A driver's name for loaded code.
    ModuleHandle,
    /// A driver's name for one kernel of a module.
    FunctionHandle,
}

/// One launch of a kernel, as a driver gets it.
#[derive(Debug, Clone, Copy)]
#[expect(clippy::exhaustive_structs, reason = "built by this crate and read by drivers")]
pub struct Launch<'a> {
    /// The kernel.
    pub function: FunctionHandle,
    /// Its name, for errors.
    pub name: &'a str,
    /// Blocks in x, y and z.
    pub grid: [u32; 3],
    /// Threads of a block, all in x.
    pub threads: u32,
    /// A pointer to each argument.
    pub args: &'a [*mut c_void],
    /// Size of each argument in bytes.
    pub sizes: &'a [u8],
}

/// A driver of one device.
///
/// All functions may be called from any thread; implementations make the device current where theirs needs that. Work on
/// a stream is done in the order of the calls, and may be done later than the call. Every failure is an error that names the
/// call; a failure that the caller handles does not spoil later calls.
///
/// # Safety
///
/// Implementors must uphold what the functions say: memory that [`alloc`](Self::alloc) returned is the caller's alone until
/// it is freed, and handles stay valid until they are destroyed. Callers of unsafe functions must pass handles of this driver
/// that have not been destroyed, addresses of memory that is long enough and lives until the work is done, and kernels the
/// arguments that they expect.
pub unsafe trait Driver: Send + Sync + fmt::Debug {
    /// `cuda`, `hip` or `emulated`.
    fn name(&self) -> &'static str;

    /// The device's own name.
    fn device_name(&self) -> &str;

    /// Versions of driver and runtime, for people and for keys of compiled objects.
    fn version(&self) -> &str;

    /// What the device can do.
    fn caps(&self) -> &Caps;

    /// Free and total memory of the device.
    fn memory(&self) -> Result<DeviceMemory>;

    /// Memory on the device, aligned to 256 bytes; `bytes` is not 0.
    fn alloc(&self, bytes: usize) -> Result<Pointer>;

    /// Gives memory back when the work that uses it is done.
    ///
    /// # Safety
    /// See the trait.
    unsafe fn free(&self, pointer: Pointer) -> Result<()>;

    /// Pinned host memory, aligned to a page.
    fn host_alloc(&self, bytes: usize) -> Result<*mut u8>;

    /// Gives pinned memory back.
    ///
    /// # Safety
    /// See the trait.
    unsafe fn host_free(&self, host: *mut u8) -> Result<()>;

    /// Pins host memory of the caller, which is page-aligned.
    ///
    /// # Safety
    /// See the trait.
    unsafe fn host_register(&self, host: *mut u8, bytes: usize) -> Result<()>;

    /// Ends a registration.
    ///
    /// # Safety
    /// See the trait.
    unsafe fn host_unregister(&self, host: *mut u8) -> Result<()>;

    /// The address under which the device sees pinned or registered host memory.
    ///
    /// # Safety
    /// See the trait.
    unsafe fn host_alias(&self, host: *mut u8) -> Result<Pointer>;

    /// A stream that does not wait for the default stream.
    fn stream_create(&self) -> Result<StreamHandle>;

    /// Ends a stream.
    ///
    /// # Safety
    /// See the trait.
    unsafe fn stream_destroy(&self, stream: StreamHandle) -> Result<()>;

    /// Waits on the host for all work of a stream.
    ///
    /// # Safety
    /// See the trait.
    unsafe fn stream_synchronize(&self, stream: StreamHandle) -> Result<()>;

    /// Lets later work of a stream wait for an event.
    ///
    /// # Safety
    /// See the trait.
    unsafe fn stream_wait(&self, stream: StreamHandle, event: EventHandle) -> Result<()>;

    /// Host to device. Memory that is not pinned may be read before the call returns.
    ///
    /// # Safety
    /// See the trait.
    unsafe fn upload(&self, stream: StreamHandle, to: Pointer, from: *const u8, bytes: usize) -> Result<()>;

    /// Device to host.
    ///
    /// # Safety
    /// See the trait.
    unsafe fn download(&self, stream: StreamHandle, to: *mut u8, from: Pointer, bytes: usize) -> Result<()>;

    /// Device to device; the ranges do not overlap.
    ///
    /// # Safety
    /// See the trait.
    unsafe fn copy(&self, stream: StreamHandle, to: Pointer, from: Pointer, bytes: usize) -> Result<()>;

    /// Sets every byte.
    ///
    /// # Safety
    /// See the trait.
    unsafe fn fill(&self, stream: StreamHandle, to: Pointer, value: u8, bytes: usize) -> Result<()>;

    /// An event; with `timed`, one that [`event_elapsed`](Self::event_elapsed) can read.
    fn event_create(&self, timed: bool) -> Result<EventHandle>;

    /// Ends an event.
    ///
    /// # Safety
    /// See the trait.
    unsafe fn event_destroy(&self, event: EventHandle) -> Result<()>;

    /// Marks the place in a stream's work.
    ///
    /// # Safety
    /// See the trait.
    unsafe fn event_record(&self, event: EventHandle, stream: StreamHandle) -> Result<()>;

    /// Whether the work before the mark is done.
    ///
    /// # Safety
    /// See the trait.
    unsafe fn event_done(&self, event: EventHandle) -> Result<bool>;

    /// Waits on the host for the work before the mark.
    ///
    /// # Safety
    /// See the trait.
    unsafe fn event_synchronize(&self, event: EventHandle) -> Result<()>;

    /// Milliseconds between two timed events that are done.
    ///
    /// # Safety
    /// See the trait.
    unsafe fn event_elapsed(&self, from: EventHandle, to: EventHandle) -> Result<f32>;

    /// Starts to record the work of a stream instead of doing it.
    ///
    /// # Safety
    /// See the trait.
    unsafe fn capture_begin(&self, stream: StreamHandle) -> Result<()>;

    /// Ends recording. Whatever comes of it, the stream does work again afterwards.
    ///
    /// # Safety
    /// See the trait.
    unsafe fn capture_end(&self, stream: StreamHandle) -> Result<GraphHandle>;

    /// Does recorded work.
    ///
    /// # Safety
    /// See the trait.
    unsafe fn graph_launch(&self, graph: GraphHandle, stream: StreamHandle) -> Result<()>;

    /// Forgets recorded work.
    ///
    /// # Safety
    /// See the trait.
    unsafe fn graph_destroy(&self, graph: GraphHandle) -> Result<()>;

    /// What the architecture is called in names of compiled objects, such as `sm_90` or `gfx1151`, best match first.
    fn targets(&self) -> &[String];

    /// The ending of names of compiled objects: `cubin`, `co`, `so`.
    fn object_ending(&self) -> &'static str;

    /// Compiles a unit of the kernel language for this device.
    ///
    /// # Errors
    /// [`ErrorKind::Compile`](crate::ErrorKind::Compile) with the compiler's words; [`ErrorKind::NoDriver`](crate::ErrorKind::NoDriver)
    /// if there is no compiler.
    fn compile(&self, name: &str, unit: &str) -> Result<Vec<u8>>;

    /// What apart from the unit decides the result of [`compile`](Self::compile): options and versions.
    fn compile_key(&self) -> String;

    /// Loads compiled code.
    ///
    /// # Safety
    /// The code must be what [`compile`](Self::compile) or the same compiler ahead of time made of trusted source.
    unsafe fn module_load(&self, name: &str, object: &[u8]) -> Result<ModuleHandle>;

    /// Unloads code.
    ///
    /// # Safety
    /// See the trait.
    unsafe fn module_unload(&self, module: ModuleHandle) -> Result<()>;

    /// A kernel of a module, which was made for blocks of `threads` threads.
    ///
    /// # Errors
    /// Also if the code says that it was made for other blocks.
    ///
    /// # Safety
    /// See the trait.
    unsafe fn function(&self, module: ModuleHandle, name: &str, threads: u32) -> Result<FunctionHandle>;

    /// Enqueues a kernel.
    ///
    /// # Errors
    /// Also if number or sizes of the arguments are not those of the kernel, where the driver can tell.
    ///
    /// # Safety
    /// See the trait.
    unsafe fn launch(&self, stream: StreamHandle, launch: &Launch<'_>) -> Result<()>;
}

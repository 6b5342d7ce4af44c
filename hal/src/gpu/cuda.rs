//! NVIDIA cards through the CUDA driver, which is loaded at run time.
//!
//! Nothing of CUDA is needed to build, and a machine without a driver gets an error that says what was looked for. Kernels come
//! from objects made ahead of time, or from NVRTC if that library is there.

mod nvrtc;

use super::{
    Caps, Device, DeviceMemory, Driver, EventHandle, FunctionHandle, GraphHandle, Launch, ModuleHandle,
};
use super::{Objects, Pointer, StreamHandle};
use crate::{Error, ErrorKind, Result};
use core::ffi::{CStr, c_char, c_int, c_void};
use core::ptr;
use cudarc::driver::sys::{self, CUresult};
use std::ffi::CString;
use std::sync::Mutex;
use std::sync::PoisonError;

pub use nvrtc::compile;

/// The oldest driver that has every function that is called, in the driver's own numbers.
const OLDEST_DRIVER: i32 = 12_040;

/// A card, as the driver lists it.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Found {
    /// Its number.
    pub ordinal: usize,
    /// Its name.
    pub name: String,
    /// Compute capability times ten.
    pub sm: u32,
}

/// The cards of this machine.
///
/// # Errors
/// [`ErrorKind::NoDriver`] if there is no driver, it is too old, or it finds no card.
pub fn list() -> Result<Vec<Found>> {
    initialise()?;
    let mut count = 0;
    // SAFETY: initialised; the pointer is to a local.
    no_driver("cuDeviceGetCount", unsafe { sys::cuDeviceGetCount(&mut count) })?;
    (0..count).map(|ordinal| Ok(Card::new(ordinal)?.found())).collect()
}

/// Opens a card by its number.
///
/// # Errors
/// [`ErrorKind::NoDriver`] as for [`list`], or if there is no such card or it is older than sm_75.
pub fn open(ordinal: usize) -> Result<Device> {
    open_with(ordinal, Objects::from_env())
}

/// As [`open`], with compiled kernels in given places.
///
/// # Errors
/// As [`open`].
pub fn open_with(ordinal: usize, objects: Objects) -> Result<Device> {
    let found = list()?;
    if ordinal >= found.len() {
        return Err(absent(format!("there is no card {ordinal}, the driver lists {}", found.len())));
    }
    Ok(Device::with_objects(Box::new(Cuda::new(ordinal as i32)?), objects))
}

fn absent(detail: String) -> Error {
    Error::new(ErrorKind::NoDriver { driver: "cuda", detail })
}

/// Makes sure of the library and of the driver behind it.
fn initialise() -> Result<i32> {
    // SAFETY: loading the system's own driver library.
    if !unsafe { sys::is_culib_present() } {
        return Err(absent("the driver library (libcuda.so.1, nvcuda.dll) cannot be loaded".to_owned()));
    }
    // SAFETY: the library is there.
    no_driver("cuInit", unsafe { sys::cuInit(0) })?;
    let mut version = 0;
    // SAFETY: initialised; the pointer is to a local.
    no_driver("cuDriverGetVersion", unsafe { sys::cuDriverGetVersion(&mut version) })?;
    if version < OLDEST_DRIVER {
        let text = |version: i32| format!("{}.{}", version / 1000, version % 1000 / 10);
        let (have, need) = (text(version), text(OLDEST_DRIVER));
        return Err(absent(format!("the driver is for CUDA {have}, {need} or newer is needed")));
    }
    Ok(version)
}

/// Failures before a card is open are about the driver as a whole.
fn no_driver(call: &str, result: CUresult) -> Result<()> {
    match result {
        CUresult::CUDA_SUCCESS => Ok(()),
        result => {
            let (name, text) = names(result);
            Err(absent(format!("{call}: {name} ({}): {text}", result as u32)))
        }
    }
}

/// The driver's name and description of a code.
fn names(result: CUresult) -> (String, String) {
    let read = |get: unsafe fn(CUresult, *mut *const c_char) -> CUresult| {
        let mut text = ptr::null();
        // SAFETY: the pointer is to a local; any code may be asked for.
        let known = unsafe { get(result, &mut text) } == CUresult::CUDA_SUCCESS && !text.is_null();
        if !known {
            return "unknown".to_owned();
        }
        // SAFETY: the driver's strings are constants.
        unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
    };
    (read(sys::cuGetErrorName), read(sys::cuGetErrorString))
}

/// What is known of a card before it is opened.
struct Card {
    ordinal: i32,
    device: sys::CUdevice,
    name: String,
    sm: u32,
}

impl Card {
    fn new(ordinal: i32) -> Result<Self> {
        let mut device = 0;
        // SAFETY: initialised; the pointer is to a local.
        no_driver("cuDeviceGet", unsafe { sys::cuDeviceGet(&mut device, ordinal) })?;
        let mut name = [0 as c_char; 256];
        // SAFETY: the buffer has the length that is given.
        no_driver("cuDeviceGetName", unsafe { sys::cuDeviceGetName(name.as_mut_ptr(), 255, device) })?;
        // SAFETY: zeros end the name.
        let name = unsafe { CStr::from_ptr(name.as_ptr()) }.to_string_lossy().into_owned();
        use sys::CUdevice_attribute::{
            CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR as MAJOR,
            CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR as MINOR,
        };
        let sm = 10 * attribute(device, MAJOR)? + attribute(device, MINOR)?;
        Ok(Self { ordinal, device, name, sm: sm as u32 })
    }

    fn found(self) -> Found {
        Found { ordinal: self.ordinal as usize, name: self.name, sm: self.sm }
    }
}

fn attribute(device: sys::CUdevice, attribute: sys::CUdevice_attribute) -> Result<i32> {
    let mut value = 0;
    // SAFETY: the pointer is to a local.
    no_driver("cuDeviceGetAttribute", unsafe { sys::cuDeviceGetAttribute(&mut value, attribute, device) })?;
    Ok(value)
}

#[derive(Debug)]
struct Cuda {
    name: String,
    label: String,
    version: String,
    context: usize,
    device: sys::CUdevice,
    caps: Caps,
    targets: Vec<String>,
    functions: Mutex<Vec<Function>>,
}

#[derive(Debug)]
struct Function {
    handle: usize,
    /// Sizes of the arguments in bytes.
    sizes: Vec<u8>,
}

impl Cuda {
    fn new(ordinal: i32) -> Result<Self> {
        let version = initialise()?;
        let card = Card::new(ordinal)?;
        let caps = Caps::nvidia(card.sm).ok_or_else(|| {
            absent(format!("{} is an sm_{}, kernels need sm_75 or newer", card.name, card.sm))
        })?;
        use sys::CUdevice_attribute::{
            CU_DEVICE_ATTRIBUTE_INTEGRATED as INTEGRATED, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT as UNITS,
        };
        let caps = Caps {
            units: attribute(card.device, UNITS)? as u32,
            integrated: attribute(card.device, INTEGRATED)? != 0,
            ..caps
        };
        let mut context = ptr::null_mut();
        // SAFETY: the pointer is to a local.
        no_driver("cuDevicePrimaryCtxRetain", unsafe {
            sys::cuDevicePrimaryCtxRetain(&mut context, card.device)
        })?;
        Ok(Self {
            label: format!("cuda {}", card.name),
            name: card.name,
            version: format!("driver for CUDA {}.{}", version / 1000, version % 1000 / 10),
            context: context as usize,
            device: card.device,
            targets: targets(card.sm),
            caps,
            functions: Mutex::default(),
        })
    }

    /// Makes the card current on this thread.
    fn enter(&self) -> Result<()> {
        // SAFETY: the context is retained until we are dropped.
        self.check("cuCtxSetCurrent", unsafe { sys::cuCtxSetCurrent(self.context as sys::CUcontext) }, "")
    }

    fn check(&self, call: &'static str, result: CUresult, detail: &str) -> Result<()> {
        match result {
            CUresult::CUDA_SUCCESS => Ok(()),
            result => Err(self.error(call, result, detail)),
        }
    }

    fn error(&self, call: &'static str, result: CUresult, detail: &str) -> Error {
        let (name, text) = names(result);
        let detail = if detail.is_empty() { text } else { format!("{detail}: {text}") };
        Error::new(ErrorKind::Driver { call, device: self.label.clone(), code: result as i32, name, detail })
    }

    fn host_error(&self, bytes: usize, call: &'static str, result: CUresult) -> Error {
        let (name, text) = names(result);
        let detail = format!("{call}: {name} ({}): {text}", result as u32);
        Error::new(ErrorKind::HostMemory { bytes: bytes as u64, detail })
    }
}

/// Objects that run on an architecture, best first: its own and older ones of the same generation.
fn targets(sm: u32) -> Vec<String> {
    const KNOWN: [u32; 11] = [75, 80, 86, 87, 89, 90, 100, 103, 110, 120, 121];
    let generation = |sm: u32| sm / 10;
    let older = KNOWN.into_iter().rev().filter(|&other| other < sm && generation(other) == generation(sm));
    core::iter::once(sm).chain(older).map(|sm| format!("sm_{sm}")).collect()
}

impl Drop for Cuda {
    fn drop(&mut self) {
        // SAFETY: nothing of ours uses the context any more. There is nobody to tell of a failure.
        let _ = unsafe { sys::cuDevicePrimaryCtxRelease_v2(self.device) };
    }
}

fn stream_of(stream: StreamHandle) -> sys::CUstream {
    stream.0 as sys::CUstream
}

fn event_of(event: EventHandle) -> sys::CUevent {
    event.0 as sys::CUevent
}

/// One call of the driver with the card current.
macro_rules! call {
    ($cuda:ident, $function:ident($($argument:expr),* $(,)?)) => {
        call!($cuda, $function($($argument),*), "")
    };
    ($cuda:ident, $function:ident($($argument:expr),* $(,)?), $detail:expr) => {{
        $cuda.enter()?;
        // SAFETY: pointers are to locals, or to what the caller of the driver's function promises.
        let result = unsafe { sys::$function($($argument),*) };
        $cuda.check(stringify!($function), result, $detail)
    }};
}

// SAFETY: handles are the driver's own, which checks what it is given; memory is the caller's alone until it is freed.
unsafe impl Driver for Cuda {
    fn name(&self) -> &'static str {
        "cuda"
    }

    fn device_name(&self) -> &str {
        &self.name
    }

    fn version(&self) -> &str {
        &self.version
    }

    fn caps(&self) -> &Caps {
        &self.caps
    }

    fn memory(&self) -> Result<DeviceMemory> {
        let (mut free, mut total) = (0, 0);
        call!(self, cuMemGetInfo_v2(&mut free, &mut total))?;
        Ok(DeviceMemory { free: free as u64, total: total as u64 })
    }

    fn alloc(&self, bytes: usize) -> Result<Pointer> {
        self.enter()?;
        let mut pointer = 0;
        // SAFETY: the pointer is to a local.
        match unsafe { sys::cuMemAlloc_v2(&mut pointer, bytes) } {
            CUresult::CUDA_SUCCESS => Ok(Pointer(pointer)),
            CUresult::CUDA_ERROR_OUT_OF_MEMORY => {
                let free = self.memory().map_or(0, |memory| memory.free);
                let device = self.label.clone();
                Err(Error::new(ErrorKind::DeviceMemory { device, bytes: bytes as u64, free }))
            }
            result => Err(self.error("cuMemAlloc_v2", result, &format!("{bytes} bytes"))),
        }
    }

    unsafe fn free(&self, pointer: Pointer) -> Result<()> {
        call!(self, cuMemFree_v2(pointer.0))
    }

    fn host_alloc(&self, bytes: usize) -> Result<*mut u8> {
        self.enter()?;
        let mut pointer: *mut c_void = ptr::null_mut();
        // SAFETY: the pointer is to a local.
        let result = unsafe {
            sys::cuMemHostAlloc(
                &mut pointer,
                bytes,
                sys::CU_MEMHOSTALLOC_PORTABLE | sys::CU_MEMHOSTALLOC_DEVICEMAP,
            )
        };
        match result {
            CUresult::CUDA_SUCCESS => Ok(pointer.cast()),
            result => Err(self.host_error(bytes, "cuMemHostAlloc", result)),
        }
    }

    unsafe fn host_free(&self, host: *mut u8) -> Result<()> {
        call!(self, cuMemFreeHost(host.cast()))
    }

    unsafe fn host_register(&self, host: *mut u8, bytes: usize) -> Result<()> {
        self.enter()?;
        let flags = sys::CU_MEMHOSTREGISTER_PORTABLE | sys::CU_MEMHOSTREGISTER_DEVICEMAP;
        // SAFETY: the caller's memory.
        match unsafe { sys::cuMemHostRegister_v2(host.cast(), bytes, flags) } {
            CUresult::CUDA_SUCCESS => Ok(()),
            result => Err(self.host_error(bytes, "cuMemHostRegister", result)),
        }
    }

    unsafe fn host_unregister(&self, host: *mut u8) -> Result<()> {
        call!(self, cuMemHostUnregister(host.cast()))
    }

    unsafe fn host_alias(&self, host: *mut u8) -> Result<Pointer> {
        let mut pointer = 0;
        call!(self, cuMemHostGetDevicePointer_v2(&mut pointer, host.cast(), 0))?;
        Ok(Pointer(pointer))
    }

    fn stream_create(&self) -> Result<StreamHandle> {
        let mut stream = ptr::null_mut();
        let flags = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
        call!(self, cuStreamCreate(&mut stream, flags))?;
        Ok(StreamHandle(stream as usize))
    }

    unsafe fn stream_destroy(&self, stream: StreamHandle) -> Result<()> {
        call!(self, cuStreamDestroy_v2(stream_of(stream)))
    }

    unsafe fn stream_synchronize(&self, stream: StreamHandle) -> Result<()> {
        call!(self, cuStreamSynchronize(stream_of(stream)))
    }

    unsafe fn stream_wait(&self, stream: StreamHandle, event: EventHandle) -> Result<()> {
        call!(self, cuStreamWaitEvent(stream_of(stream), event_of(event), 0))
    }

    unsafe fn upload(&self, stream: StreamHandle, to: Pointer, from: *const u8, bytes: usize) -> Result<()> {
        call!(self, cuMemcpyHtoDAsync_v2(to.0, from.cast(), bytes, stream_of(stream)))
    }

    unsafe fn download(&self, stream: StreamHandle, to: *mut u8, from: Pointer, bytes: usize) -> Result<()> {
        call!(self, cuMemcpyDtoHAsync_v2(to.cast(), from.0, bytes, stream_of(stream)))
    }

    unsafe fn copy(&self, stream: StreamHandle, to: Pointer, from: Pointer, bytes: usize) -> Result<()> {
        call!(self, cuMemcpyDtoDAsync_v2(to.0, from.0, bytes, stream_of(stream)))
    }

    unsafe fn fill(&self, stream: StreamHandle, to: Pointer, value: u8, bytes: usize) -> Result<()> {
        call!(self, cuMemsetD8Async(to.0, value, bytes, stream_of(stream)))
    }

    fn event_create(&self, timed: bool) -> Result<EventHandle> {
        let mut event = ptr::null_mut();
        let flags = if timed {
            sys::CUevent_flags::CU_EVENT_DEFAULT
        } else {
            sys::CUevent_flags::CU_EVENT_DISABLE_TIMING
        };
        call!(self, cuEventCreate(&mut event, flags as u32))?;
        Ok(EventHandle(event as usize))
    }

    unsafe fn event_destroy(&self, event: EventHandle) -> Result<()> {
        call!(self, cuEventDestroy_v2(event_of(event)))
    }

    unsafe fn event_record(&self, event: EventHandle, stream: StreamHandle) -> Result<()> {
        call!(self, cuEventRecord(event_of(event), stream_of(stream)))
    }

    unsafe fn event_done(&self, event: EventHandle) -> Result<bool> {
        self.enter()?;
        // SAFETY: the caller's handle.
        match unsafe { sys::cuEventQuery(event_of(event)) } {
            CUresult::CUDA_SUCCESS => Ok(true),
            CUresult::CUDA_ERROR_NOT_READY => Ok(false),
            result => Err(self.error("cuEventQuery", result, "")),
        }
    }

    unsafe fn event_synchronize(&self, event: EventHandle) -> Result<()> {
        call!(self, cuEventSynchronize(event_of(event)))
    }

    unsafe fn event_elapsed(&self, from: EventHandle, to: EventHandle) -> Result<f32> {
        let mut milliseconds = 0.0;
        call!(self, cuEventElapsedTime(&mut milliseconds, event_of(from), event_of(to)))?;
        Ok(milliseconds)
    }

    unsafe fn capture_begin(&self, stream: StreamHandle) -> Result<()> {
        // Other threads may go on calling the driver: only what this one does while it records must be recordable.
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        call!(self, cuStreamBeginCapture_v2(stream_of(stream), mode))
    }

    unsafe fn capture_end(&self, stream: StreamHandle) -> Result<GraphHandle> {
        let mut graph = ptr::null_mut();
        call!(self, cuStreamEndCapture(stream_of(stream), &mut graph))?;
        let mut ready = ptr::null_mut();
        let made = call!(self, cuGraphInstantiateWithFlags(&mut ready, graph, 0));
        // What was instantiated does not need its description any more.
        let freed = call!(self, cuGraphDestroy(graph));
        made.and(freed)?;
        Ok(GraphHandle(ready as usize))
    }

    unsafe fn graph_launch(&self, graph: GraphHandle, stream: StreamHandle) -> Result<()> {
        call!(self, cuGraphLaunch(graph.0 as sys::CUgraphExec, stream_of(stream)))
    }

    unsafe fn graph_destroy(&self, graph: GraphHandle) -> Result<()> {
        call!(self, cuGraphExecDestroy(graph.0 as sys::CUgraphExec))
    }

    fn targets(&self) -> &[String] {
        &self.targets
    }

    fn object_ending(&self) -> &'static str {
        "cubin"
    }

    fn compile(&self, name: &str, unit: &str) -> Result<Vec<u8>> {
        compile(name, unit, &self.targets[0])
    }

    fn compile_key(&self) -> String {
        format!("{} {} {}", nvrtc::OPTIONS.join(" "), nvrtc::version(), self.version)
    }

    unsafe fn module_load(&self, name: &str, object: &[u8]) -> Result<ModuleHandle> {
        let mut module = ptr::null_mut();
        call!(self, cuModuleLoadData(&mut module, object.as_ptr().cast()), name)?;
        Ok(ModuleHandle(module as usize))
    }

    unsafe fn module_unload(&self, module: ModuleHandle) -> Result<()> {
        call!(self, cuModuleUnload(module.0 as sys::CUmodule))
    }

    unsafe fn function(&self, module: ModuleHandle, name: &str, threads: u32) -> Result<FunctionHandle> {
        let failed = |detail: String| Error::new(ErrorKind::Kernel { kernel: name.to_owned(), detail });
        let symbol = CString::new(name).map_err(|_| failed("a name with a zero".to_owned()))?;
        let mut handle = ptr::null_mut();
        call!(self, cuModuleGetFunction(&mut handle, module.0 as sys::CUmodule, symbol.as_ptr()), name)?;
        let mut most: c_int = 0;
        let attribute = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK;
        call!(self, cuFuncGetAttribute(&mut most, attribute, handle), name)?;
        if u32::try_from(most) != Ok(threads) {
            return Err(failed(format!("made for blocks of {most} threads, declared with {threads}")));
        }
        let mut sizes = Vec::new();
        loop {
            let (mut offset, mut size) = (0, 0);
            // SAFETY: pointers are to locals; an index past the last argument is answered by an error.
            let result = unsafe { sys::cuFuncGetParamInfo(handle, sizes.len(), &mut offset, &mut size) };
            match result {
                CUresult::CUDA_SUCCESS => sizes.push(size as u8),
                CUresult::CUDA_ERROR_INVALID_VALUE => break,
                result => return Err(self.error("cuFuncGetParamInfo", result, name)),
            }
        }
        let mut functions = self.functions.lock().unwrap_or_else(PoisonError::into_inner);
        functions.push(Function { handle: handle as usize, sizes });
        Ok(FunctionHandle(functions.len() - 1))
    }

    unsafe fn launch(&self, stream: StreamHandle, launch: &Launch<'_>) -> Result<()> {
        let handle = {
            let functions = self.functions.lock().unwrap_or_else(PoisonError::into_inner);
            let function = &functions[launch.function.0];
            if function.sizes != launch.sizes {
                let detail =
                    format!("takes arguments of {:?} bytes, was given {:?}", function.sizes, launch.sizes);
                return Err(Error::new(ErrorKind::Kernel { kernel: launch.name.to_owned(), detail }));
            }
            function.handle
        };
        let [x, y, z] = launch.grid;
        call!(
            self,
            cuLaunchKernel(
                handle as sys::CUfunction,
                x,
                y,
                z,
                launch.threads,
                1,
                1,
                0,
                stream_of(stream),
                launch.args.as_ptr().cast_mut(),
                ptr::null_mut(),
            ),
            launch.name
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn objects_of_older_chips_of_a_generation_serve() {
        assert_eq!(targets(90), ["sm_90"]);
        assert_eq!(targets(89), ["sm_89", "sm_87", "sm_86", "sm_80"]);
        assert_eq!(targets(75), ["sm_75"]);
        assert_eq!(targets(121), ["sm_121", "sm_120"]);
    }
}

//! A device that is the host: kernels are compiled by the machine's C++ compiler and run on fibers.
//!
//! It exists for tests. Memory is poisoned when it is allocated and ends at a page that cannot be touched; shared memory
//! is poisoned before every block; threads run in an order of choice; a barrier or shuffle that some threads miss is an
//! error. Work is done when it is enqueued, and during capture when the graph is launched.

use super::{
    Caps, Device, DeviceMemory, Driver, EventHandle, FunctionHandle, GraphHandle, Launch, ModuleHandle,
};
use super::{Objects, Pointer, StreamHandle};
use crate::memory::Memory;
use crate::{Cpu, Error, ErrorKind, Result};
use core::ffi::{CStr, c_char, c_void};
use libloading::os::unix::Library;
use sha2::{Digest, Sha256};
use std::collections::{BTreeMap, HashMap};
use std::env;
use std::io::Write;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::Instant;

/// In which order the threads of a block run. A result that depends on it is a bug of the kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[expect(clippy::exhaustive_enums, reason = "tests go through all of them")]
pub enum Order {
    /// First to last.
    #[default]
    Forward,
    /// Last to first.
    Reverse,
    /// By a generator that starts at this value.
    Random(u64),
}

/// What to emulate.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Options {
    /// Lanes of a wave: 32 or 64.
    pub wave: u32,
    /// Order of threads.
    pub order: Order,
    /// Threads of the host that run blocks.
    pub threads: usize,
    /// Bytes of device memory.
    pub memory: u64,
}

impl Default for Options {
    fn default() -> Self {
        Self { wave: 32, order: Order::Forward, threads: Cpu::detect().default_threads(), memory: u64::MAX }
    }
}

/// Opens an emulated device.
///
/// # Errors
/// [`ErrorKind::NoDriver`] for waves that no device has, and on systems other than x86-64 Linux.
pub fn open(options: &Options) -> Result<Device> {
    open_with(options, Objects::from_env())
}

/// As [`open`], with compiled kernels in given places.
///
/// # Errors
/// As [`open`].
pub fn open_with(options: &Options, objects: Objects) -> Result<Device> {
    if options.wave != 32 && options.wave != 64 {
        return Err(no_driver(format!("waves have 32 or 64 lanes, not {}", options.wave)));
    }
    let driver = Emulated {
        options: options.clone(),
        caps: Caps { units: options.threads as u32, ..Caps::emulated(options.wave) },
        targets: [format!("wave{}", options.wave)],
        state: Mutex::default(),
        compiler: env::var("CXX").ok().filter(|name| !name.is_empty()),
        used: AtomicU64::new(0),
        launches: AtomicU64::new(0),
        started: Instant::now(),
    };
    Ok(Device::with_objects(Box::new(driver), objects))
}

fn no_driver(detail: String) -> Error {
    Error::new(ErrorKind::NoDriver { driver: "emulated", detail })
}

#[derive(Debug)]
struct Emulated {
    options: Options,
    caps: Caps,
    targets: [String; 1],
    state: Mutex<State>,
    /// `$CXX`.
    compiler: Option<String>,
    used: AtomicU64,
    launches: AtomicU64,
    started: Instant,
}

#[derive(Debug, Default)]
struct State {
    memory: HashMap<u64, Mapping>,
    modules: Vec<Code>,
    functions: Vec<Function>,
    streams: Vec<Option<Recording>>,
    events: Vec<f32>,
    graphs: HashMap<usize, Vec<Work>>,
    next: usize,
}

#[derive(Debug)]
struct Mapping {
    start: *mut c_void,
    bytes: usize,
    counted: u64,
}

// SAFETY: a mapping belongs to the process, not to a thread.
unsafe impl Send for Mapping {}

/// Work that a stream records while it is captured; `None` as a stream's entry is a stream that does its work.
type Recording = Vec<Work>;

#[derive(Debug, Clone)]
enum Work {
    Launch { function: usize, grid: [u32; 3], words: Vec<u64> },
    Copy { to: u64, from: u64, bytes: usize },
    Fill { to: u64, value: u8, bytes: usize },
}

/// A loaded library; never unloaded, since threads hold storage of it.
#[derive(Debug, Clone, Copy)]
struct Code {
    library: &'static Library,
    run: Run,
}

#[derive(Debug, Clone, Copy)]
struct Function {
    entry: &'static Entry,
    run: Run,
    name: &'static str,
}

/// As `emulated::Entry` in `kernels/emulated.h`.
#[repr(C)]
#[derive(Debug)]
struct Entry {
    call: extern "C" fn(*mut *mut c_void),
    threads: u32,
    arguments: u32,
    sizes: *const u8,
}

// SAFETY: constants of a library that stays loaded.
unsafe impl Sync for Entry {}

type Run = unsafe extern "C" fn(
    entry: *const Entry,
    arguments: *mut *mut c_void,
    grid_x: u32,
    grid_y: u32,
    first: u64,
    count: u64,
    order: u32,
    seed: u64,
    message: *mut *const c_char,
    failed_block: *mut u64,
) -> i32;

const PAGE: usize = 4096;

/// Loads a library, once however many devices ask for it: each takes of the little storage that the system's loader has for
/// variables of threads.
///
/// # Safety
/// The library must be trusted.
unsafe fn load(object: &[u8]) -> core::result::Result<Code, String> {
    static LOADED: Mutex<BTreeMap<[u8; 32], Code>> = Mutex::new(BTreeMap::new());
    let mut loaded = LOADED.lock().unwrap_or_else(PoisonError::into_inner);
    let digest = Sha256::digest(object).into();
    if let Some(code) = loaded.get(&digest) {
        return Ok(*code);
    }
    // The loader knows libraries by their paths, so every one gets a path of its own.
    let path = temporary("kernels");
    std::fs::write(&path, object).map_err(|error| error.to_string())?;
    // SAFETY: trusted code, by the caller's promise.
    let library = unsafe { Library::new(&path) };
    let _ = std::fs::remove_file(&path);
    let reason = |error: libloading::Error| match core::error::Error::source(&error) {
        Some(reason) => reason.to_string(),
        None => error.to_string(),
    };
    let library: &'static Library = Box::leak(Box::new(library.map_err(reason)?));
    // SAFETY: the type is that of `kernels/emulated.h`.
    let run = unsafe { library.get::<Run>(b"skep_emulated_run\0") };
    let code = Code { library, run: *run.map_err(reason)? };
    loaded.insert(digest, code);
    Ok(code)
}

/// A path that this process has not named before.
fn temporary(name: &str) -> PathBuf {
    static NAMED: AtomicU64 = AtomicU64::new(0);
    let number = NAMED.fetch_add(1, Ordering::Relaxed);
    env::temp_dir().join(format!("skep-{}-{number}-{name}.so", std::process::id()))
}

impl Emulated {
    fn state(&self) -> std::sync::MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn failed(call: &'static str, detail: impl Into<String>) -> Error {
        Error::new(ErrorKind::Driver {
            call,
            device: "emulated".to_owned(),
            code: 1,
            name: "refused".to_owned(),
            detail: detail.into(),
        })
    }

    /// Does work, or records it if the stream is being captured.
    fn enqueue(&self, stream: StreamHandle, work: Work) -> Result<()> {
        if let Some(recording) = &mut self.state().streams[stream.0] {
            recording.push(work);
            return Ok(());
        }
        self.perform(&work)
    }

    fn perform(&self, work: &Work) -> Result<()> {
        match work {
            Work::Launch { function, grid, words } => {
                let function = self.state().functions[*function];
                self.run(function, *grid, words)
            }
            Work::Copy { to, from, bytes } => {
                // SAFETY: the callers of the driver name memory of this length that does not overlap.
                unsafe { core::ptr::copy_nonoverlapping(*from as *const u8, *to as *mut u8, *bytes) };
                Ok(())
            }
            Work::Fill { to, value, bytes } => {
                // SAFETY: the callers of the driver name memory of this length.
                unsafe { (*to as *mut u8).write_bytes(*value, *bytes) };
                Ok(())
            }
        }
    }

    /// Runs the blocks of a grid on the host's threads, a piece at a time to whoever is free.
    fn run(&self, function: Function, grid: [u32; 3], words: &[u64]) -> Result<()> {
        const PIECE: u64 = 4;
        let blocks = grid.iter().map(|&n| u64::from(n)).product::<u64>();
        let number = self.launches.fetch_add(1, Ordering::Relaxed);
        let (order, seed) = match self.options.order {
            Order::Forward => (0, 0),
            Order::Reverse => (1, 0),
            Order::Random(seed) => (2, seed.wrapping_add(number)),
        };
        let (next, failure) = (AtomicU64::new(0), Mutex::new(None));
        let work = || {
            let mut pointers: Vec<*mut c_void> =
                words.iter().map(|word| core::ptr::from_ref(word).cast_mut().cast()).collect();
            loop {
                let first = next.fetch_add(PIECE, Ordering::Relaxed);
                if first >= blocks {
                    return;
                }
                let count = PIECE.min(blocks - first);
                let (mut message, mut block) = (core::ptr::null(), 0);
                // SAFETY: the entry is of the library that `run` is of; number and sizes of the arguments have been compared;
                // that they are good is the promise of whoever launched.
                let code = unsafe {
                    (function.run)(
                        function.entry,
                        pointers.as_mut_ptr(),
                        grid[0],
                        grid[1],
                        first,
                        count,
                        order,
                        seed.wrapping_add(first),
                        &mut message,
                        &mut block,
                    )
                };
                if code != 0 {
                    // SAFETY: a failed run leaves a constant string.
                    let message = unsafe { CStr::from_ptr(message) }.to_string_lossy();
                    let detail =
                        format!("{message} (block {block} of grid {grid:?}, {:?})", self.options.order);
                    let kind = ErrorKind::Kernel { kernel: function.name.to_owned(), detail };
                    *failure.lock().unwrap_or_else(PoisonError::into_inner) = Some(Error::new(kind));
                    next.store(blocks, Ordering::Relaxed);
                    return;
                }
            }
        };
        let helpers = (self.options.threads.max(1) as u64).min(blocks.div_ceil(PIECE)) - 1;
        thread::scope(|scope| {
            for _ in 0..helpers {
                scope.spawn(work);
            }
            work();
        });
        failure.into_inner().unwrap_or_else(PoisonError::into_inner).map_or(Ok(()), Err)
    }

    fn refuse_in_capture(&self, call: &'static str) -> Result<()> {
        if self.state().streams.iter().flatten().next().is_some() {
            return Err(Self::failed(call, "not allowed while a stream is captured"));
        }
        Ok(())
    }

    /// Memory whose last byte, but for alignment, lies before a page that cannot be touched.
    fn map(&self, bytes: usize, align: usize, poison: u8) -> Option<u64> {
        let room = bytes.checked_next_multiple_of(align)?;
        let whole = room.checked_next_multiple_of(PAGE)?.checked_add(PAGE)?;
        let access = libc::PROT_READ | libc::PROT_WRITE;
        let kind = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        // SAFETY: a fresh private mapping.
        let start = unsafe { libc::mmap(core::ptr::null_mut(), whole, access, kind, -1, 0) };
        if start == libc::MAP_FAILED {
            return None;
        }
        // SAFETY: the last page of the mapping.
        let guard = unsafe { start.cast::<u8>().add(whole - PAGE) };
        // SAFETY: as above.
        unsafe { libc::mprotect(guard.cast(), PAGE, libc::PROT_NONE) };
        let address = guard as u64 - room as u64;
        // SAFETY: `room` bytes lie before the guard.
        unsafe { (address as *mut u8).write_bytes(poison, room) };
        let mapping = Mapping { start, bytes: whole, counted: room as u64 };
        self.state().memory.insert(address, mapping);
        Some(address)
    }

    fn unmap(&self, call: &'static str, address: u64) -> Result<u64> {
        let mapping = self.state().memory.remove(&address);
        let mapping = mapping.ok_or_else(|| Self::failed(call, format!("{address:#x} was not allocated")))?;
        // SAFETY: our mapping, which nobody uses any more by the caller's promise.
        unsafe { libc::munmap(mapping.start, mapping.bytes) };
        Ok(mapping.counted)
    }

    /// The command of the compiler: `$CXX`, or the first of the usual names that is there.
    fn compiler(&self) -> Result<String> {
        let names = match &self.compiler {
            Some(name) => vec![name.as_str()],
            None => vec!["c++", "g++", "clang++"],
        };
        let works = |name: &&str| {
            let done =
                Command::new(name).arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status();
            done.is_ok_and(|status| status.success())
        };
        names.iter().find(|name| works(name)).map(|&name| name.to_owned()).ok_or_else(|| {
            no_driver(format!("kernels need a C++ compiler, and none answers to {}", names.join(", ")))
        })
    }

    fn flags(&self) -> Vec<String> {
        let mut flags: Vec<String> = [
            "-x",
            "c++",
            "-",
            "-std=c++17",
            "-O2",
            "-fPIC",
            "-shared",
            "-fvisibility=hidden",
            "-ffp-contract=off",
        ]
        .map(str::to_owned)
        .to_vec();
        #[cfg(target_arch = "x86_64")]
        if is_x86_feature_detected!("avx2")
            && is_x86_feature_detected!("fma")
            && is_x86_feature_detected!("f16c")
        {
            flags.extend(["-mavx2", "-mfma", "-mf16c"].map(str::to_owned));
        }
        flags.push(format!("-DWAVE={}", self.options.wave));
        flags
    }
}

// SAFETY: memory is mapped for its caller alone, and handles are indices that only grow; what is enqueued is done at once or
// copied into a recording.
unsafe impl Driver for Emulated {
    fn name(&self) -> &'static str {
        "emulated"
    }

    fn device_name(&self) -> &str {
        "emulated device"
    }

    fn version(&self) -> &str {
        env!("CARGO_PKG_VERSION")
    }

    fn caps(&self) -> &Caps {
        &self.caps
    }

    fn memory(&self) -> Result<DeviceMemory> {
        let used = self.used.load(Ordering::Relaxed);
        let host = Memory::detect();
        let total = host.total.unwrap_or(u64::MAX).min(self.options.memory);
        let free = host.available.unwrap_or(u64::MAX).min(total.saturating_sub(used));
        Ok(DeviceMemory { free, total })
    }

    fn alloc(&self, bytes: usize) -> Result<Pointer> {
        self.refuse_in_capture("alloc")?;
        let out_of_memory = || {
            let free = self.memory().map_or(0, |memory| memory.free);
            Error::new(ErrorKind::DeviceMemory { device: "emulated".to_owned(), bytes: bytes as u64, free })
        };
        let room = bytes.checked_next_multiple_of(256).ok_or_else(out_of_memory)? as u64;
        if self.used.load(Ordering::Relaxed).saturating_add(room) > self.options.memory {
            return Err(out_of_memory());
        }
        let address = self.map(bytes, 256, 0xFF).ok_or_else(out_of_memory)?;
        self.used.fetch_add(room, Ordering::Relaxed);
        Ok(Pointer(address))
    }

    unsafe fn free(&self, pointer: Pointer) -> Result<()> {
        let room = self.unmap("free", pointer.0)?;
        self.used.fetch_sub(room, Ordering::Relaxed);
        Ok(())
    }

    fn host_alloc(&self, bytes: usize) -> Result<*mut u8> {
        let no_memory =
            || Error::new(ErrorKind::HostMemory { bytes: bytes as u64, detail: "no mapping".to_owned() });
        self.map(bytes, PAGE, 0xFF).map(|address| address as *mut u8).ok_or_else(no_memory)
    }

    unsafe fn host_free(&self, host: *mut u8) -> Result<()> {
        self.unmap("host_free", host as u64).map(|_| ())
    }

    unsafe fn host_register(&self, _host: *mut u8, bytes: usize) -> Result<()> {
        if bytes == 0 {
            return Err(Error::new(ErrorKind::HostMemory {
                bytes: 0,
                detail: "nothing to register".to_owned(),
            }));
        }
        Ok(())
    }

    unsafe fn host_unregister(&self, _host: *mut u8) -> Result<()> {
        Ok(())
    }

    unsafe fn host_alias(&self, host: *mut u8) -> Result<Pointer> {
        Ok(Pointer(host as u64))
    }

    fn stream_create(&self) -> Result<StreamHandle> {
        let mut state = self.state();
        state.streams.push(None);
        Ok(StreamHandle(state.streams.len() - 1))
    }

    unsafe fn stream_destroy(&self, stream: StreamHandle) -> Result<()> {
        self.state().streams[stream.0] = None;
        Ok(())
    }

    unsafe fn stream_synchronize(&self, stream: StreamHandle) -> Result<()> {
        match self.state().streams[stream.0] {
            Some(_) => Err(Self::failed("stream_synchronize", "not allowed while the stream is captured")),
            None => Ok(()),
        }
    }

    unsafe fn stream_wait(&self, _stream: StreamHandle, _event: EventHandle) -> Result<()> {
        Ok(())
    }

    unsafe fn upload(&self, stream: StreamHandle, to: Pointer, from: *const u8, bytes: usize) -> Result<()> {
        self.enqueue(stream, Work::Copy { to: to.0, from: from as u64, bytes })
    }

    unsafe fn download(&self, stream: StreamHandle, to: *mut u8, from: Pointer, bytes: usize) -> Result<()> {
        self.enqueue(stream, Work::Copy { to: to as u64, from: from.0, bytes })
    }

    unsafe fn copy(&self, stream: StreamHandle, to: Pointer, from: Pointer, bytes: usize) -> Result<()> {
        self.enqueue(stream, Work::Copy { to: to.0, from: from.0, bytes })
    }

    unsafe fn fill(&self, stream: StreamHandle, to: Pointer, value: u8, bytes: usize) -> Result<()> {
        self.enqueue(stream, Work::Fill { to: to.0, value, bytes })
    }

    fn event_create(&self, _timed: bool) -> Result<EventHandle> {
        let mut state = self.state();
        state.events.push(0.0);
        Ok(EventHandle(state.events.len() - 1))
    }

    unsafe fn event_destroy(&self, _event: EventHandle) -> Result<()> {
        Ok(())
    }

    unsafe fn event_record(&self, event: EventHandle, _stream: StreamHandle) -> Result<()> {
        self.state().events[event.0] = self.started.elapsed().as_secs_f32() * 1e3;
        Ok(())
    }

    unsafe fn event_done(&self, _event: EventHandle) -> Result<bool> {
        Ok(true)
    }

    unsafe fn event_synchronize(&self, _event: EventHandle) -> Result<()> {
        Ok(())
    }

    unsafe fn event_elapsed(&self, from: EventHandle, to: EventHandle) -> Result<f32> {
        let state = self.state();
        Ok(state.events[to.0] - state.events[from.0])
    }

    unsafe fn capture_begin(&self, stream: StreamHandle) -> Result<()> {
        let recording = &mut self.state().streams[stream.0];
        if recording.is_some() {
            return Err(Self::failed("capture_begin", "the stream is captured already"));
        }
        *recording = Some(Vec::new());
        Ok(())
    }

    unsafe fn capture_end(&self, stream: StreamHandle) -> Result<GraphHandle> {
        let mut state = self.state();
        let recording = state.streams[stream.0].take();
        let work = recording.ok_or_else(|| Self::failed("capture_end", "the stream is not captured"))?;
        state.next += 1;
        let handle = state.next;
        state.graphs.insert(handle, work);
        Ok(GraphHandle(handle))
    }

    unsafe fn graph_launch(&self, graph: GraphHandle, stream: StreamHandle) -> Result<()> {
        let work = self.state().graphs.get(&graph.0).cloned();
        let work = work.ok_or_else(|| Self::failed("graph_launch", "no such graph"))?;
        work.into_iter().try_for_each(|work| self.enqueue(stream, work))
    }

    unsafe fn graph_destroy(&self, graph: GraphHandle) -> Result<()> {
        self.state().graphs.remove(&graph.0);
        Ok(())
    }

    fn targets(&self) -> &[String] {
        &self.targets
    }

    fn object_ending(&self) -> &'static str {
        "so"
    }

    fn compile(&self, name: &str, unit: &str) -> Result<Vec<u8>> {
        let compiler = self.compiler()?;
        let failed = |detail: String| {
            let target = format!("the emulated device ({compiler})");
            Error::new(ErrorKind::Compile { unit: name.to_owned(), target, detail })
        };
        let object = temporary(name);
        let mut child = Command::new(&compiler)
            .args(self.flags())
            .arg("-o")
            .arg(&object)
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .map_err(|error| failed(error.to_string()))?;
        let mut input = child.stdin.take();
        let (written, output) = thread::scope(|scope| {
            let writer = scope.spawn(move || input.take().map(|mut input| input.write_all(unit.as_bytes())));
            let output = child.wait_with_output();
            (writer.join(), output)
        });
        let output = output.map_err(|error| failed(error.to_string()));
        let bytes = output.and_then(|output| {
            if !output.status.success() || !matches!(written, Ok(Some(Ok(())))) {
                return Err(failed(String::from_utf8_lossy(&output.stderr).into_owned()));
            }
            std::fs::read(&object).map_err(|error| failed(error.to_string()))
        });
        let _ = std::fs::remove_file(&object);
        bytes
    }

    fn compile_key(&self) -> String {
        self.flags().join(" ")
    }

    unsafe fn module_load(&self, name: &str, object: &[u8]) -> Result<ModuleHandle> {
        self.refuse_in_capture("module_load")?;
        // SAFETY: trusted code, by the caller's promise.
        let code = unsafe { load(object) }
            .map_err(|detail| Self::failed("module_load", format!("{name}: {detail}")))?;
        let mut state = self.state();
        state.modules.push(code);
        Ok(ModuleHandle(state.modules.len() - 1))
    }

    unsafe fn module_unload(&self, _module: ModuleHandle) -> Result<()> {
        Ok(())
    }

    unsafe fn function(&self, module: ModuleHandle, name: &str, threads: u32) -> Result<FunctionHandle> {
        let failed = |detail: String| Error::new(ErrorKind::Kernel { kernel: name.to_owned(), detail });
        let mut state = self.state();
        let Code { library, run } = state.modules[module.0];
        let symbol = format!("skep_entry_{name}\0");
        // SAFETY: a constant of this type, by the macro `EXPORT`.
        let entry = unsafe { library.get::<*const Entry>(symbol.as_bytes()) };
        let entry = entry.map_err(|_| failed("not exported by its source".to_owned()))?;
        // SAFETY: the library is never unloaded; the symbol's address is that of the constant.
        let entry: &'static Entry = unsafe { &*entry.as_raw_ptr().cast::<Entry>() };
        if entry.threads != threads {
            return Err(failed(format!(
                "made for blocks of {} threads, declared with {threads}",
                entry.threads
            )));
        }
        if threads == 0 || threads > 1024 || !threads.is_multiple_of(self.options.wave) {
            return Err(failed(format!("{threads} threads are no whole waves of {}", self.options.wave)));
        }
        let name = Box::leak(name.to_owned().into_boxed_str());
        state.functions.push(Function { entry, run, name });
        Ok(FunctionHandle(state.functions.len() - 1))
    }

    unsafe fn launch(&self, stream: StreamHandle, launch: &Launch<'_>) -> Result<()> {
        let entry = self.state().functions[launch.function.0].entry;
        // SAFETY: the array has as many entries as there are arguments.
        let sizes = unsafe { core::slice::from_raw_parts(entry.sizes, entry.arguments as usize) };
        if sizes != launch.sizes {
            let detail = format!("takes arguments of {sizes:?} bytes, was given {:?}", launch.sizes);
            return Err(Error::new(ErrorKind::Kernel { kernel: launch.name.to_owned(), detail }));
        }
        let word = |(&pointer, &size): (&*mut c_void, &u8)| {
            let mut bytes = [0; 8];
            // SAFETY: every argument has the size that stands beside it, at most 8.
            unsafe { core::ptr::copy_nonoverlapping(pointer.cast::<u8>(), bytes.as_mut_ptr(), size.into()) };
            u64::from_le_bytes(bytes)
        };
        let words = launch.args.iter().zip(launch.sizes).map(word).collect();
        self.enqueue(stream, Work::Launch { function: launch.function.0, grid: launch.grid, words })
    }
}

use super::{Device, FunctionHandle, Launch, ModuleHandle, Objects, Stream, View};
use crate::{Error, ErrorKind, Result};
use core::ffi::c_void;
use core::fmt;
use std::sync::Arc;

/// Kernels in the kernel language: texts that are compiled as one unit, after `kernels/skep.gpu.h`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[expect(clippy::exhaustive_structs, reason = "written by kernel crates as a constant")]
pub struct Source {
    /// What compiled objects are called, and errors name.
    pub name: &'static str,
    /// The texts in order.
    pub parts: &'static [&'static str],
    /// The entry points.
    pub entries: &'static [Entry],
}

/// An entry point of a [`Source`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[expect(clippy::exhaustive_structs, reason = "written by kernel crates as a constant")]
pub struct Entry {
    /// The name in `KERNEL(name, threads)`.
    pub name: &'static str,
    /// The threads there.
    pub threads: u32,
}

impl Source {
    /// The kernel language itself, which comes before the parts.
    pub const LANGUAGE: &'static str = include_str!("../../kernels/skep.gpu.h");

    /// The text that compilers get. The emulated device's part of the language is included by name, and put in here.
    pub fn unit(&self) -> String {
        let emulated = include_str!("../../kernels/emulated.h");
        let mut unit = Self::LANGUAGE.replace("#include \"emulated.h\"", emulated);
        for part in self.parts {
            unit.push('\n');
            unit.push_str(part);
        }
        unit
    }
}

/// Loaded kernels of a [`Source`].
#[derive(Debug, Clone)]
pub struct Module {
    loaded: Arc<Loaded>,
}

#[derive(Debug)]
struct Loaded {
    device: Device,
    handle: ModuleHandle,
    source: Source,
}

impl Module {
    pub(crate) fn new(device: Device, source: &Source, objects: &Objects) -> Result<Self> {
        let driver = device.driver();
        let mut last = None;
        let handle = objects.find(driver, source, &mut |object| {
            // SAFETY: the object lies where only the user writes, under a name that holds the digest of its source.
            match unsafe { driver.module_load(source.name, object) } {
                Ok(handle) => Some(handle),
                Err(error) => {
                    last = Some(error);
                    None
                }
            }
        })?;
        let handle = match (handle, last) {
            (Some(handle), _) => handle,
            (None, Some(error)) => return Err(error),
            (None, None) => {
                let detail = "no object and no compiler".to_owned();
                return Err(Error::new(ErrorKind::Compile {
                    unit: source.name.to_owned(),
                    target: target(&device),
                    detail,
                }));
            }
        };
        Ok(Self { loaded: Arc::new(Loaded { device, handle, source: *source }) })
    }

    /// A kernel by its name.
    ///
    /// # Errors
    /// [`ErrorKind::Kernel`] if the source has no such entry, or the loaded code not as declared.
    pub fn kernel(&self, name: &'static str) -> Result<Kernel> {
        let Loaded { device, handle, source } = &*self.loaded;
        let entry = source.entries.iter().find(|entry| entry.name == name).ok_or_else(|| {
            let detail = format!("not an entry of source {}", source.name);
            Error::new(ErrorKind::Kernel { kernel: name.to_owned(), detail })
        })?;
        // SAFETY: the module lives as long as the kernel, which holds it.
        let function = unsafe { device.driver().function(*handle, name, entry.threads) }?;
        Ok(Kernel { module: self.clone(), function, entry: *entry })
    }

    /// The device.
    pub fn device(&self) -> &Device {
        &self.loaded.device
    }
}

fn target(device: &Device) -> String {
    device.driver().targets().first().cloned().unwrap_or_default()
}

impl Drop for Loaded {
    fn drop(&mut self) {
        // SAFETY: all kernels of the module are gone. There is nobody to tell of a failure.
        let _ = unsafe { self.device.driver().module_unload(self.handle) };
    }
}

/// One kernel.
#[derive(Clone)]
pub struct Kernel {
    module: Module,
    function: FunctionHandle,
    entry: Entry,
}

impl Kernel {
    /// Its name.
    pub fn name(&self) -> &'static str {
        self.entry.name
    }

    /// Threads of a block.
    pub fn threads(&self) -> u32 {
        self.entry.threads
    }

    /// Enqueues a run of the kernel over `grid` blocks; a grid without blocks is nothing to do.
    ///
    /// # Errors
    /// [`ErrorKind::Kernel`] if the arguments are not those of the kernel, or what the driver says.
    ///
    /// # Panics
    /// If the stream is of another device.
    ///
    /// # Safety
    /// The kernel must stay within the memory that the arguments name, and that memory must live until the work is done.
    pub unsafe fn launch(&self, stream: &Stream, grid: [u32; 3], args: &Args) -> Result<()> {
        assert!(self.module.device().is(stream.device()), "the stream is of another device");
        if grid.contains(&0) {
            return Ok(());
        }
        let mut pointers = [core::ptr::null_mut::<c_void>(); Args::MOST];
        for (pointer, word) in pointers.iter_mut().zip(args.words()) {
            *pointer = core::ptr::from_ref(word).cast_mut().cast();
        }
        let launch = Launch {
            function: self.function,
            name: self.entry.name,
            grid,
            threads: self.entry.threads,
            args: &pointers[..args.len],
            sizes: &args.sizes[..args.len],
        };
        // SAFETY: the handles live; the rest is the caller's promise.
        unsafe { self.module.device().driver().launch(stream.handle(), &launch) }
    }
}

impl fmt::Debug for Kernel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Kernel").field(&self.entry.name).finish()
    }
}

/// Arguments of a kernel, in the order of its parameters.
#[derive(Debug, Clone)]
pub struct Args {
    words: [u64; Self::MOST],
    sizes: [u8; Self::MOST],
    len: usize,
}

impl Default for Args {
    fn default() -> Self {
        Self::new()
    }
}

impl Args {
    /// Most arguments of a kernel.
    pub const MOST: usize = 40;

    /// None yet.
    pub fn new() -> Self {
        Self { words: [0; Self::MOST], sizes: [0; Self::MOST], len: 0 }
    }

    /// Device memory: a pointer parameter.
    #[must_use]
    pub fn view(self, view: View<'_>) -> Self {
        self.push(view.pointer().0, 8)
    }

    /// Device memory that may be absent: a pointer parameter, null without.
    #[must_use]
    pub fn maybe(self, view: Option<View<'_>>) -> Self {
        self.push(view.map_or(0, |view| view.pointer().0), 8)
    }

    /// An address: a pointer parameter.
    #[must_use]
    pub fn pointer(self, pointer: super::Pointer) -> Self {
        self.push(pointer.0, 8)
    }

    /// A `u32` parameter.
    #[must_use]
    pub fn u32(self, value: u32) -> Self {
        self.push(value.into(), 4)
    }

    /// A length or index as a `u32` parameter.
    ///
    /// # Panics
    /// If it does not fit.
    #[must_use]
    pub fn len(self, value: usize) -> Self {
        self.u32(u32::try_from(value).expect("a length that kernels count in 32 bits"))
    }

    /// A `u64` parameter.
    #[must_use]
    pub fn u64(self, value: u64) -> Self {
        self.push(value, 8)
    }

    /// A `float` parameter.
    #[must_use]
    pub fn f32(self, value: f32) -> Self {
        self.push(value.to_bits().into(), 4)
    }

    fn push(mut self, word: u64, size: u8) -> Self {
        assert!(self.len < Self::MOST, "more than {} arguments", Self::MOST);
        // Little-endian: the low bytes of a word are the argument.
        self.words[self.len] = word;
        self.sizes[self.len] = size;
        self.len += 1;
        self
    }

    fn words(&self) -> &[u64] {
        &self.words[..self.len]
    }
}

use std::io;

/// What this crate's fallible functions return.
pub type Result<T> = core::result::Result<T, Error>;

/// A failed request to the machine: threads, memory or work that it would not give or do.
///
/// [`kind`](Error::kind) says what was asked for and carries the numbers; the operating system's own reason, where it
/// gave one, is the [`source`](core::error::Error::source).
#[derive(Debug, thiserror::Error)]
#[error("{kind}")]
pub struct Error {
    kind: ErrorKind,
    #[source]
    cause: Option<io::Error>,
}

impl Error {
    pub(crate) fn new(kind: ErrorKind) -> Self {
        Self { kind, cause: None }
    }

    pub(crate) fn because(kind: ErrorKind, cause: io::Error) -> Self {
        Self { kind, cause: Some(cause) }
    }

    /// What went wrong.
    pub fn kind(&self) -> &ErrorKind {
        &self.kind
    }
}

/// The ways in which a request can fail.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ErrorKind {
    /// Memory could not be had.
    #[error("cannot allocate {bytes} bytes of memory ({})", have(*.available))]
    #[non_exhaustive]
    OutOfMemory {
        /// Bytes asked for; `u64::MAX` where the product of length and element size does not fit.
        bytes: u64,
        /// Bytes available to this process at that moment, where known.
        available: Option<u64>,
    },
    /// The operating system refused to start a worker thread.
    #[error("cannot start worker thread {index} of a pool of {threads}")]
    #[non_exhaustive]
    Spawn {
        /// Number of the worker, counted from 1; participant 0 is the caller.
        index: usize,
        /// Participants asked for.
        threads: usize,
    },
    /// A pool of a size outside `1..=max` was asked for.
    #[error("a pool of {threads} threads was asked for, the allowed sizes are 1 to {max}")]
    #[non_exhaustive]
    Threads {
        /// Participants asked for.
        threads: usize,
        /// The largest pool allowed.
        max: usize,
    },
    /// There is no driver, or none that can be used.
    #[cfg(feature = "gpu")]
    #[error("no {driver} device: {detail}")]
    #[non_exhaustive]
    NoDriver {
        /// `cuda`, `hip`, `emulated`, or the compiler of one of them.
        driver: &'static str,
        /// What was looked for and what came of it.
        detail: String,
    },
    /// A call of a driver failed.
    #[cfg(feature = "gpu")]
    #[error("{call} on {device} failed: {name} ({code}){}", colon(.detail))]
    #[non_exhaustive]
    Driver {
        /// The driver's function.
        call: &'static str,
        /// The device, by driver and name.
        device: String,
        /// The driver's code.
        code: i32,
        /// The driver's name for the code.
        name: String,
        /// What the call was about; may be empty.
        detail: String,
    },
    /// Device memory could not be had.
    #[cfg(feature = "gpu")]
    #[error("cannot allocate {bytes} bytes on {device} ({free} bytes free)")]
    #[non_exhaustive]
    DeviceMemory {
        /// The device, by driver and name.
        device: String,
        /// Bytes asked for.
        bytes: u64,
        /// Bytes free at that moment.
        free: u64,
    },
    /// Pinned host memory could not be had.
    #[cfg(feature = "gpu")]
    #[error("cannot pin {bytes} bytes of host memory: {detail}")]
    #[non_exhaustive]
    HostMemory {
        /// Bytes asked for.
        bytes: u64,
        /// The driver's reason.
        detail: String,
    },
    /// Kernels could not be compiled or found.
    #[cfg(feature = "gpu")]
    #[error("kernels {unit} for {target}: {detail}")]
    #[non_exhaustive]
    Compile {
        /// The name of the source.
        unit: String,
        /// The architecture.
        target: String,
        /// The compiler's words.
        detail: String,
    },
    /// A kernel is not what it was declared to be, or broke a rule of the kernel language while it ran.
    #[cfg(feature = "gpu")]
    #[error("kernel {kernel}: {detail}")]
    #[non_exhaustive]
    Kernel {
        /// The kernel's name.
        kernel: String,
        /// What is wrong.
        detail: String,
    },
}

#[cfg(feature = "gpu")]
fn colon(detail: &str) -> String {
    if detail.is_empty() { String::new() } else { format!(": {detail}") }
}

fn have(available: Option<u64>) -> String {
    match available {
        Some(bytes) => format!("{bytes} bytes available"),
        None => "available memory unknown".to_owned(),
    }
}

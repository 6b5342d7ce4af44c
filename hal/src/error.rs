use std::io;

/// What this crate's fallible functions return.
pub type Result<T> = core::result::Result<T, Error>;

/// A failed request to the machine: threads or memory that it would not give.
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
}

fn have(available: Option<u64>) -> String {
    match available {
        Some(bytes) => format!("{bytes} bytes available"),
        None => "available memory unknown".to_owned(),
    }
}

//! The crate's error type.

use crate::Type;
#[cfg(feature = "std")]
use crate::cpu::Isa;

/// The result type of this crate.
pub type Result<T, E = Error> = core::result::Result<T, E>;

/// A refused request: unknown type, wrong length, unusable instruction set.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{kind}")]
pub struct Error {
    kind: ErrorKind,
}

impl Error {
    pub(crate) const fn new(kind: ErrorKind) -> Self {
        Self { kind }
    }

    /// What went wrong, with the values involved.
    pub const fn kind(&self) -> &ErrorKind {
        &self.kind
    }
}

/// The kinds of [`Error`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ErrorKind {
    /// A ggml type id this crate does not implement.
    #[error("ggml type id {0} is unknown or not supported")]
    UnknownType(u32),
    /// A row length that is not a whole number of blocks.
    #[error("{cols} columns are not a multiple of the {} block length {}", ty.name(), ty.block_len())]
    PartialBlock {
        /// The block type.
        ty: Type,
        /// Elements in the row.
        cols: usize,
    },
    /// A data slice of the wrong size.
    #[error("{} data has {got} bytes, expected {expected}", ty.name())]
    DataLength {
        /// The block type.
        ty: Type,
        /// Bytes needed.
        expected: usize,
        /// Bytes given.
        got: usize,
    },
    /// A shape whose size in bytes does not fit in `usize`.
    #[error("a {} matrix of {rows} x {cols} does not fit in the address space", ty.name())]
    TooLarge {
        /// The block type.
        ty: Type,
        /// Rows of the matrix.
        rows: usize,
        /// Columns of the matrix.
        cols: usize,
    },
    /// `SKEP_ISA` names no known instruction set.
    #[cfg(feature = "std")]
    #[error("SKEP_ISA={0:?} is not an instruction set; known are scalar, avx2 and avx512")]
    UnknownIsa(alloc::string::String),
    /// The instruction set exists but this processor lacks it.
    #[cfg(feature = "std")]
    #[error("this processor does not support the {} instruction set", .0.name())]
    UnsupportedIsa(Isa),
}

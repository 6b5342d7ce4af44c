use thiserror::Error as ThisError;

/// Why a shape or a weight set was refused, and which field of it.
#[derive(Debug, Clone, Copy, PartialEq, ThisError)]
#[error("{field}: {kind}")]
pub struct Error {
    kind: ErrorKind,
    field: &'static str,
}

impl Error {
    pub(crate) const fn new(field: &'static str, kind: ErrorKind) -> Self {
        Self { kind, field }
    }

    /// What is wrong.
    #[must_use]
    pub const fn kind(&self) -> ErrorKind {
        self.kind
    }

    /// The name of the offending field, as in the constructor that refused it.
    #[must_use]
    pub const fn field(&self) -> &'static str {
        self.field
    }
}

/// The kinds of [`Error`].
#[derive(Debug, Clone, Copy, PartialEq, ThisError)]
#[non_exhaustive]
pub enum ErrorKind {
    /// An entry of `a = -exp(A_log)` is not finite and negative.
    #[error("entry {index} is {value}, but -exp(A_log) is finite and negative")]
    Decay {
        /// Position of the value head in file order.
        index: usize,
        /// The refused value.
        value: f32,
    },
    /// The epsilon of the gated norm is not finite and positive.
    #[error("{value} is not finite and positive")]
    Epsilon {
        /// The refused value.
        value: f32,
    },
    /// The value heads do not divide evenly among the key heads.
    #[error("{v_heads} value heads are not a multiple of {k_heads} key heads")]
    HeadRatio {
        /// Number of key heads.
        k_heads: usize,
        /// Number of value heads.
        v_heads: usize,
    },
    /// A slice has the wrong number of elements.
    #[error("{found} elements, expected {expected}")]
    Length {
        /// Number of elements the shape asks for.
        expected: usize,
        /// Number of elements given.
        found: usize,
    },
    /// A size derived from the shape does not fit in memory.
    #[error("the size overflows")]
    Overflow,
    /// A dimension is zero.
    #[error("must not be zero")]
    Zero,
}

/// Result with this crate's [`Error`].
pub type Result<T> = core::result::Result<T, Error>;

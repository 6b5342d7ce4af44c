use alloc::string::String;

use thiserror::Error as ThisError;

/// Why a picture or a tower was refused.
#[derive(Debug, Clone, PartialEq, ThisError)]
#[error("{kind}")]
pub struct Error {
    kind: ErrorKind,
}

impl Error {
    /// What is wrong.
    #[must_use]
    pub const fn kind(&self) -> &ErrorKind {
        &self.kind
    }
}

impl From<ErrorKind> for Error {
    fn from(kind: ErrorKind) -> Self {
        Self { kind }
    }
}

/// The kinds of [`Error`].
#[derive(Debug, Clone, PartialEq, ThisError)]
#[non_exhaustive]
pub enum ErrorKind {
    /// A number of soft tokens that the model was not made for.
    #[error("an image budget of {tokens} tokens: it must be one of 70, 140, 280, 560, 1120")]
    Budget {
        /// The refused number.
        tokens: usize,
    },
    /// A file whose pixels cannot be read.
    #[error("{format} file that cannot be decoded: {reason}")]
    Damaged {
        /// The format, with its article.
        format: &'static str,
        /// What the decoder says.
        reason: String,
    },
    /// A picture without pixels.
    #[error("a picture of {width}x{height} pixels")]
    Empty {
        /// Pixels of a row.
        width: usize,
        /// Rows.
        height: usize,
    },
    /// A file over the limit.
    #[error("a picture file of {bytes} bytes: at most {limit} are allowed")]
    File {
        /// Bytes of the file.
        bytes: usize,
        /// Bytes allowed.
        limit: usize,
    },
    /// A file of another format.
    #[error("{found} file: pictures must be PNG, JPEG, WebP or GIF")]
    Format {
        /// What the content looks like, with its article.
        found: &'static str,
    },
    /// A picture of too many pixels.
    #[error("a picture of {width}x{height} pixels: at most {limit} pixels are allowed")]
    Pixels {
        /// Pixels of a row.
        width: usize,
        /// Rows.
        height: usize,
        /// Pixels allowed.
        limit: usize,
    },
    /// A picture with too long a side.
    #[error("a picture of {width}x{height} pixels: at most {limit} a side are allowed")]
    Side {
        /// Pixels of a row.
        width: usize,
        /// Rows.
        height: usize,
        /// Pixels of a side allowed.
        limit: usize,
    },
    /// A picture without pixels, or whose bytes do not go with its size.
    #[error("a picture of {width}x{height} pixels with {bytes} bytes of rgb")]
    Size {
        /// Pixels of a row.
        width: usize,
        /// Rows.
        height: usize,
        /// Bytes given.
        bytes: usize,
    },
    /// Patches of a size that no tower has.
    #[error("patches of {patch} pixels a side pooled {pooling}x{pooling}")]
    Tiling {
        /// Pixels of a patch's side.
        patch: usize,
        /// Patches of a soft token's side.
        pooling: usize,
    },
    /// A picture whose patches the tower cannot place or pool.
    #[error("a grid of {columns}x{rows} patches: {why}")]
    Grid {
        /// Patches of a row.
        columns: usize,
        /// Rows of patches.
        rows: usize,
        /// What stands against it.
        why: String,
    },
    /// Weights and sizes of a tower that do not go together.
    #[error("{0}")]
    Tower(String),
    /// Instruction sets asked for that this machine lacks.
    #[error("{0}")]
    Isa(String),
    /// A picture that patches do not fill exactly.
    #[error("a picture of {width}x{height} pixels cannot be cut into patches of {patch}x{patch}")]
    Uneven {
        /// Pixels of a row.
        width: usize,
        /// Rows.
        height: usize,
        /// Pixels of a patch's side.
        patch: usize,
    },
}

/// The result of this crate's functions.
pub type Result<T, E = Error> = core::result::Result<T, E>;

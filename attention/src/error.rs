use core::fmt;

/// What went wrong, with the numbers involved.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ErrorKind {
    /// The allocator has no room for the pool.
    #[error("no memory for a kv cache of {bytes} bytes")]
    Allocation {
        /// Size of the pool.
        bytes: usize,
    },
    /// The `base` of a rotary embedding is not a finite number above zero.
    #[error("rope base must be finite and positive")]
    Base,
    /// The number of frequency divisors differs from half the rotated dimensions, or one is not a number above zero.
    #[error(
        "rope needs {expected} positive frequency divisors, not {found} (or one of them is not positive)"
    )]
    Divisors {
        /// Half the rotated dimensions.
        expected: usize,
        /// Entries given.
        found: usize,
    },
    /// The query heads are not a whole number of groups of key heads.
    #[error("{q_heads} query heads cannot share {kv_heads} key/value heads evenly")]
    Groups {
        /// Query heads.
        q_heads: usize,
        /// Key and value heads.
        kv_heads: usize,
    },
    /// A size that must be at least one is zero.
    #[error("{name} is zero")]
    Zero {
        /// Name of the size.
        name: &'static str,
    },
    /// Element or byte count of the pool overflows `usize`, or there are more pages than a `u32` can number.
    #[error("kv cache size overflows")]
    Overflow,
    /// A page table names a page that the pool does not have.
    #[error("page table entry {index} is page {page}, but the cache has {n_pages} pages")]
    PageOutOfRange {
        /// Index into the page table.
        index: usize,
        /// The page named there.
        page: u32,
        /// Pages in the pool.
        n_pages: usize,
    },
    /// A page would be written twice in one call.
    #[error("page table entry {index} is page {page}, which this batch already writes through another entry")]
    PageShared {
        /// Index into the page table.
        index: usize,
        /// The page named there.
        page: u32,
    },
    /// The page table ends before the last token of the span.
    #[error("page table has {found} pages, but tokens up to {end} need {needed}")]
    PagesMissing {
        /// Entries in the page table.
        found: usize,
        /// Entries needed.
        needed: usize,
        /// One past the last token index.
        end: usize,
    },
    /// The number of rotated dimensions is zero, odd, larger than the head, or above the supported maximum.
    #[error("cannot rotate {rot_dims} of {head_dim} head dimensions")]
    RotaryDims {
        /// Rotated dimensions.
        rot_dims: usize,
        /// Head size.
        head_dim: usize,
    },
    /// Attention scale is not a finite number.
    #[error("attention scale is not finite")]
    Scale,
    /// The sections of an interleaved multi-axis rotary embedding do not fit its frequencies.
    #[error("rope sections {sections:?} must sum to {expected} with a fourth of 0")]
    Sections {
        /// Sections given.
        sections: [usize; 4],
        /// Half the rotated dimensions.
        expected: usize,
    },
    /// Spans must follow each other and cover the rows of the batch.
    #[error("span covers batch rows {start}..{end}, expected it to start at row {expected} of {n_tokens}")]
    SpanRows {
        /// First row of the span.
        start: usize,
        /// One past the last row of the span.
        end: usize,
        /// Row at which it has to start.
        expected: usize,
        /// Rows in the batch.
        n_tokens: usize,
    },
    /// The spans end before the last row of the batch.
    #[error("spans cover {covered} of {n_tokens} batch rows")]
    RowsUncovered {
        /// Rows covered.
        covered: usize,
        /// Rows in the batch.
        n_tokens: usize,
    },
    /// Ranges of tokens that see each other are empty, out of order, or not within the tokens of their span.
    #[error("tokens {start}..{end} see each other, but must lie within {from}..{to} and not be empty")]
    Together {
        /// First token index of the range.
        start: usize,
        /// One past its last token index.
        end: usize,
        /// First token index that was free for it.
        from: usize,
        /// One past the last token index of the span.
        to: usize,
    },
    /// First token index plus length does not fit in `usize`.
    #[error("token index {start} + {len} overflows")]
    TokenOverflow {
        /// Token index of the first row.
        start: usize,
        /// Rows in the span.
        len: usize,
    },
}

/// An error of this crate: its kind and, when a span of the batch is to blame, the index of that span.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Error {
    kind: ErrorKind,
    span: Option<usize>,
}

impl Error {
    pub(crate) const fn in_span(span: usize, kind: ErrorKind) -> Self {
        Self { kind, span: Some(span) }
    }

    /// What went wrong.
    pub const fn kind(&self) -> ErrorKind {
        self.kind
    }

    /// Index into the `spans` argument of the span at fault, if it was one.
    pub const fn span(&self) -> Option<usize> {
        self.span
    }
}

impl From<ErrorKind> for Error {
    fn from(kind: ErrorKind) -> Self {
        Self { kind, span: None }
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(span) = self.span {
            write!(f, "span {span}: ")?;
        }
        self.kind.fmt(f)
    }
}

impl core::error::Error for Error {}

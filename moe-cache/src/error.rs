/// What went wrong, see [`Error::kind`] for the cases and the data they carry.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[error("{kind}")]
pub struct Error {
    kind: ErrorKind,
}

/// The result of every fallible call of this crate.
pub type Result<T, E = Error> = core::result::Result<T, E>;

impl Error {
    /// The case and its data: which layer, expert, slot, token or line was wrong.
    pub fn kind(&self) -> &ErrorKind {
        &self.kind
    }
}

impl From<ErrorKind> for Error {
    fn from(kind: ErrorKind) -> Self {
        Self { kind }
    }
}

/// The cases of [`Error`].
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum ErrorKind {
    /// A check of the slot cache's state failed: a defect in the cache or in its policy, never in the input.
    #[error("slot cache is corrupt: {rule} (slot or expert id {at})")]
    Corrupt {
        /// The rule that does not hold.
        rule: &'static str,
        /// The slot, or the flat id `layer * n_experts + expert`, where it does not hold.
        at: usize,
    },
    /// A call names an expert that does not exist.
    #[error("layer {layer}: expert {expert} is out of range, there are {n_experts} experts")]
    ExpertOutOfRange {
        /// Layer of the call.
        layer: usize,
        /// The expert asked for.
        expert: u32,
        /// Experts per layer.
        n_experts: usize,
    },
    /// A cache, router or bank cannot have these dimensions.
    #[error("impossible geometry: {what}")]
    Geometry {
        /// Which dimension, and why.
        what: &'static str,
    },
    /// A call names a layer that does not exist.
    #[error("layer {layer} is out of range, there are {n_layers} layers")]
    LayerOutOfRange {
        /// The layer asked for.
        layer: usize,
        /// Layers of the cache or trace.
        n_layers: usize,
    },
    /// A slice has the wrong length.
    #[error("{what} has {actual} elements where {expected} are needed")]
    Length {
        /// Which slice.
        what: &'static str,
        /// Elements needed.
        expected: usize,
        /// Elements given.
        actual: usize,
    },
    /// A router logit is NaN or +∞, or all logits of the token are −∞: there is no distribution to choose from.
    #[error("token {token}: router logit of expert {expert} is {value}")]
    Logit {
        /// Row of the logits.
        token: usize,
        /// Column of the logits.
        expert: usize,
        /// The logit.
        value: f32,
    },
    /// A range of slots does not lie in the pool.
    #[error("slots {start}..{end} are out of range, there are {n_slots} slots")]
    SlotOutOfRange {
        /// First slot.
        start: usize,
        /// One past the last slot.
        end: usize,
        /// Slots of the pool.
        n_slots: usize,
    },
    /// One call needs more distinct experts than the pool has slots.
    #[error("layer {layer}: one step needs {distinct} distinct experts, the pool has {n_slots} slots")]
    TooManyExperts {
        /// Layer of the call.
        layer: usize,
        /// Distinct experts of the call.
        distinct: usize,
        /// Slots of the pool.
        n_slots: usize,
    },
    /// More experts per token are asked for than exist, or none.
    #[error("cannot route to the best {top_k} of {n_experts} experts")]
    TopK {
        /// Experts per token.
        top_k: usize,
        /// Experts to choose from.
        n_experts: usize,
    },
    /// A recorded routing trace does not parse.
    #[error("trace line {line}: {what}")]
    Trace {
        /// Line, counted from 1.
        line: usize,
        /// What is wrong with it.
        what: &'static str,
    },
    /// A bank of expert weights is not what its shape says.
    #[cfg(feature = "cpu")]
    #[cfg_attr(docsrs, doc(cfg(feature = "cpu")))]
    #[error("expert bank [{n_experts}, {rows}, {cols}]: {source}")]
    Weights {
        /// Experts.
        n_experts: usize,
        /// Rows of each expert.
        rows: usize,
        /// Columns of each expert.
        cols: usize,
        /// The reason.
        source: skep_quant::Error,
    },
}

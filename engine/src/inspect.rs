use crate::error::{Error, Result};
use crate::graph::Reading;
use crate::{gemma4, qwen35moe};
use skep_gguf::{Gguf, Map};

/// How a layer mixes tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum LayerKind {
    /// Softmax attention over all earlier tokens.
    FullAttention,
    /// Softmax attention over the last tokens.
    SlidingAttention,
    /// Gated DeltaNet: a recurrent state of fixed size.
    GatedDeltaNet,
}

/// What this engine makes of a file, without loading it.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Inspection {
    /// Layers of the trunk in order.
    pub layers: Vec<LayerKind>,
    /// Index of the draft (multi-token prediction) block, if there is one. It is set aside.
    pub draft_block: Option<usize>,
    /// Bytes of the draft block.
    pub draft_bytes: u64,
    /// Experts of a layer; 0 where there are none.
    pub experts: usize,
    /// Experts that a token uses.
    pub experts_used: usize,
    /// Bytes of weights that one decoded token reads.
    pub active_bytes_per_token: u64,
    /// What the loader would notice and go on with.
    pub warnings: Vec<String>,
}

/// Reads the roles of all tensors of a file, as loading it would.
///
/// # Errors
/// What loading would say: an architecture that is not supported, a missing key, a tensor without a role, a role without a
/// tensor.
pub fn inspect(file: &Gguf<Map>) -> Result<Inspection> {
    Ok(read(file)?.facts.inspection)
}

/// Reads a model of any architecture that has a graph here.
pub(crate) fn read<B: AsRef<[u8]>>(file: &Gguf<B>) -> Result<Reading> {
    match file.architecture()? {
        "qwen35moe" => qwen35moe::read(file),
        "gemma4" => gemma4::read(file),
        "clip" => Err(Error::model(
            "this is a projector (architecture clip), which goes beside a model and is not one",
        )),
        other => Err(Error::model(format_args!(
            "architecture {other} is not supported (supported: gemma4, qwen35moe)"
        ))),
    }
}

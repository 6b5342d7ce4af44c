use crate::error::{Error, Result};
use crate::qwen35moe;
use skep_gguf::{Gguf, Map};

/// How a layer mixes tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum LayerKind {
    /// Softmax attention over all earlier tokens.
    FullAttention,
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
    /// Experts of a layer.
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
    supported(file.architecture()?)?;
    let (config, weights, _) = qwen35moe::read(file)?;
    let kind =
        |&recurrent: &bool| if recurrent { LayerKind::GatedDeltaNet } else { LayerKind::FullAttention };
    Ok(Inspection {
        layers: config.recurrent.iter().map(kind).collect(),
        draft_block: config.draft,
        draft_bytes: weights.draft_bytes,
        experts: config.experts,
        experts_used: config.experts_used,
        active_bytes_per_token: weights.active_bytes(&config),
        warnings: config.warnings,
    })
}

/// Refuses an architecture that has no graph here.
pub(crate) fn supported(architecture: &str) -> Result<()> {
    match architecture {
        "qwen35moe" => Ok(()),
        other => {
            Err(Error::model(format_args!("architecture {other} is not supported (supported: qwen35moe)")))
        }
    }
}

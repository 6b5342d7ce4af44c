//! `gemma4`: Gemma 4 models, Mixture-of-Experts (26B-A4B), dense (12B, 31B) and with per-layer embeddings (E2B, E4B).
//!
//! Most layers attend to a sliding window, the others to everything, with heads of another size and, where the file has no
//! value projection, values from the raw keys. A layer's feed-forward is a dense branch and, in Mixture-of-Experts models,
//! experts beside it, each with norms of its own. Norm weights are used as the file stores them.

mod config;
mod graph;
mod weights;

use config::Config;
use graph::Model;
use weights::Weights;

use crate::error::Result;
use crate::graph::{Facts, Reading};
use crate::inspect::{Inspection, LayerKind};
use crate::store::Claims;
use skep_gguf::Gguf;

/// Reads the sizes of a model and gives every tensor its role.
pub(crate) fn read<B: AsRef<[u8]>>(file: &Gguf<B>) -> Result<Reading> {
    let config = Config::read(file)?;
    let mut claims = Claims::new(file);
    let weights = Weights::claim(&config, &mut claims)?;
    let used = claims.finish()?;
    let kind = |layer: &config::LayerShape| match layer.sliding {
        true => LayerKind::SlidingAttention,
        false => LayerKind::FullAttention,
    };
    let facts = Facts {
        hidden: config.hidden,
        vocab: config.vocab,
        context: config.context,
        images: true,
        inspection: Inspection {
            layers: config.layers.iter().map(kind).collect(),
            draft_block: None,
            draft_bytes: 0,
            experts: config.moe.map_or(0, |moe| moe.experts),
            experts_used: config.moe.map_or(0, |moe| moe.used),
            active_bytes_per_token: weights.active_bytes(&config),
            warnings: Vec::new(),
        },
    };
    Ok(Reading { facts, graph: Box::new(Model::new(config, weights)?), used })
}

//! `qwen35moe`: Qwen3.5 and Qwen3.6 Mixture-of-Experts models.
//!
//! A hybrid stack: most layers mix tokens by a Gated DeltaNet, the others by gated full attention; every layer ends in a
//! Mixture-of-Experts feed-forward with one shared expert. Weights, head order and norms are used as the file stores them.

mod config;
mod device;
mod graph;
mod weights;

use config::Config;
use graph::Model;
use weights::{Mixer, Weights};

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
    let kind =
        |&recurrent: &bool| if recurrent { LayerKind::GatedDeltaNet } else { LayerKind::FullAttention };
    let facts = Facts {
        hidden: config.hidden,
        vocab: config.vocab,
        context: config.context,
        images: false,
        inspection: Inspection {
            layers: config.recurrent.iter().map(kind).collect(),
            draft_block: config.draft,
            draft_bytes: weights.draft_bytes,
            experts: config.experts,
            experts_used: config.experts_used,
            active_bytes_per_token: weights.active_bytes(&config),
            warnings: config.warnings.clone(),
        },
    };
    Ok(Reading { facts, graph: Box::new(Model::new(config, weights)?), used })
}

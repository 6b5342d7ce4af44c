//! `qwen35moe`: Qwen3.5 and Qwen3.6 Mixture-of-Experts models.
//!
//! A hybrid stack: most layers mix tokens by a Gated DeltaNet, the others by gated full attention; every layer ends in a
//! Mixture-of-Experts feed-forward with one shared expert. Weights, head order and norms are used as the file stores them.

mod config;
mod graph;
mod weights;

pub(crate) use config::Config;
pub(crate) use graph::{Model, Scratch};
pub(crate) use weights::{Mixer, Weights};

use crate::error::Result;
use crate::store::Claims;
use skep_gguf::Gguf;

/// Reads the sizes of a model and gives every tensor its role; the last value says which tensors the trunk uses.
pub(crate) fn read<B: AsRef<[u8]>>(file: &Gguf<B>) -> Result<(Config, Weights, Vec<bool>)> {
    let config = Config::read(file)?;
    let mut claims = Claims::new(file);
    let weights = Weights::claim(&config, &mut claims)?;
    Ok((config, weights, claims.finish()?))
}

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

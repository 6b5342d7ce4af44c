#![doc = include_str!("../README.md")]

mod batch;
pub mod chat;
mod constraint;
mod engine;
mod error;
mod experts;
mod gemma4;
mod gpu;
mod graph;
mod images;
mod inspect;
mod keys;
mod memory;
mod projector;
mod qwen35moe;
mod runner;
pub mod sampler;
mod store;
pub mod stream;
pub mod tokenizer;

pub use batch::{Batch, ImageRows, Piece, SequenceId, Want};
pub use engine::{
    Engine, EngineOptions, Event, FinishReason, Prompt, Request, Sink, Submitted, Timings, ToolChoice, Usage,
};
pub use error::{Error, ErrorKind, Result};
pub use gpu::DeviceKind;
pub use inspect::{Inspection, LayerKind, inspect};
pub use projector::ImageEncoder;
pub use runner::{LoadOptions, ModelInfo, Progress, Runner};
pub use sampler::Sampling;
pub use skep_attention::KvType;
pub use skep_quant::Precision;
/// The kernels of quantised products, which every model on a device needs.
pub use skep_quant::gpu::SOURCE as KERNELS;
pub use skep_vision::{Budget, Picture};
pub use store::Residence;
pub use stream::Delta;

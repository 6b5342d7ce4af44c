//! Models on a device: what the graphs of all architectures share there.

mod choice;
mod context;
mod inputs;
mod loader;

pub use choice::DeviceKind;
pub(crate) use choice::open;
pub(crate) use context::{Context, Forward, HEAD_ROWS, Steps, attention_batch};
pub(crate) use inputs::{Inputs, Rows, Run, runs};
pub(crate) use loader::Loader;

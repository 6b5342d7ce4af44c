#![doc = include_str!("../README.md")]

pub mod bandwidth;
pub mod buffer;
mod cgroup;
pub mod cpu;
mod error;
#[cfg(feature = "gpu")]
pub mod gpu;
pub mod memory;
pub mod pool;
mod system;
#[cfg(test)]
mod testing;

pub use buffer::{Buffer, Plain};
pub use cpu::Cpu;
pub use error::{Error, ErrorKind, Result};
pub use pool::{Pool, Scope};

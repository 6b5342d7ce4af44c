#![doc = include_str!("../README.md")]
#![no_std]
#![cfg_attr(docsrs, feature(doc_cfg))]
#![warn(clippy::std_instead_of_core, clippy::std_instead_of_alloc, clippy::alloc_instead_of_core)]

#[cfg(feature = "std")]
extern crate alloc;
#[cfg(any(feature = "std", test))]
extern crate std;

pub mod blocks;
mod decode;
mod error;
mod math;
mod matrix;
mod parallel;
pub mod reference;
mod types;

#[cfg(feature = "std")]
mod activations;
#[cfg(feature = "std")]
pub mod cpu;
#[cfg(feature = "gpu")]
pub mod gpu;
#[cfg(feature = "std")]
mod matmul;
#[cfg(feature = "std")]
pub mod vec;

pub use decode::decode;
pub use error::{Error, ErrorKind, Result};
pub use matrix::Matrix;
pub use parallel::{Parallel, Serial, for_each_chunk_mut};
pub use types::Type;

#[cfg(feature = "std")]
pub use activations::{Activations, Forms};
#[cfg(feature = "std")]
pub use cpu::Isa;
#[cfg(feature = "std")]
pub use matmul::{Precision, Product, matmul, matmul_tile};
#[cfg(feature = "std")]
pub use parallel::Threads;

#![cfg_attr(feature = "std", doc = include_str!("../README.md"))]
#![cfg_attr(
    not(feature = "std"),
    doc = "Grouped attention for inference; this build has the scalar [`reference`] functions alone."
)]
#![no_std]
#![warn(clippy::std_instead_of_core, clippy::std_instead_of_alloc, clippy::alloc_instead_of_core)]
#![cfg_attr(docsrs, feature(doc_cfg))]

extern crate alloc;
#[cfg(feature = "std")]
extern crate std;

#[cfg(not(any(feature = "std", feature = "libm")))]
compile_error!("skep-attention needs float functions: enable the feature `std` or the feature `libm`");

mod batch;
mod cache;
mod error;
mod heads;
mod math;
mod rope;

pub mod reference;

#[cfg(feature = "std")]
mod attend;
#[cfg(feature = "std")]
mod cpu;
#[cfg(feature = "gpu")]
pub mod gpu;
#[cfg(feature = "std")]
mod prepare;
#[cfg(feature = "std")]
mod scratch;

#[cfg(feature = "std")]
pub use attend::attend;
pub use batch::{Gate, Mask, Norm, Norms, Projections, Queries, Span};
pub use cache::{KvCache, KvType};
pub use error::{Error, ErrorKind};
pub use heads::Heads;
#[cfg(feature = "std")]
pub use prepare::{prepare, prepare_queries};
pub use rope::{Position, Rope};
#[cfg(feature = "std")]
pub use scratch::Scratch;

/// Result of this crate's fallible operations.
pub type Result<T> = core::result::Result<T, Error>;

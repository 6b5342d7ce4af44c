// The example in the README runs `mix`.
#![cfg_attr(feature = "std", doc = include_str!("../README.md"))]
#![cfg_attr(
    not(feature = "std"),
    doc = "Gated DeltaNet without `std`: shapes, states, head orders and the scalar reference."
)]
#![no_std]
#![cfg_attr(docsrs, feature(doc_cfg))]
#![warn(clippy::std_instead_of_core, clippy::std_instead_of_alloc, clippy::alloc_instead_of_core)]

extern crate alloc;
#[cfg(feature = "std")]
extern crate std;

#[cfg(not(any(feature = "std", feature = "libm")))]
compile_error!("skep-gdn needs float functions: enable the feature `std` or `libm`");

mod buffer;
#[cfg(feature = "std")]
mod cpu;
mod error;
mod form;
#[cfg(feature = "gpu")]
pub mod gpu;
mod math;
#[cfg(feature = "std")]
mod mix;
pub mod order;
#[cfg(feature = "std")]
mod raw;
pub mod reference;
mod shape;
mod state;

pub use error::{Error, ErrorKind, Result};
pub use form::{CHUNK, Form};
#[cfg(feature = "std")]
pub use mix::{Scratch, mix};
pub use shape::{HeadOrder, Input, Shape, Weights};
pub use state::{Span, State};

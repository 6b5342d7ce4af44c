// The example in the README runs the tower.
#![cfg_attr(feature = "std", doc = include_str!("../README.md"))]
#![cfg_attr(
    not(feature = "std"),
    doc = "Image input of Gemma 4 without `std`: pictures, patches and the scalar reference of the tower."
)]
#![no_std]
#![cfg_attr(docsrs, feature(doc_cfg))]
#![warn(clippy::std_instead_of_core, clippy::std_instead_of_alloc, clippy::alloc_instead_of_core)]

extern crate alloc;
#[cfg(feature = "std")]
extern crate std;

#[cfg(not(any(feature = "std", feature = "libm")))]
compile_error!("skep-vision needs float functions: enable the feature `std` or `libm`");

mod budget;
#[cfg(feature = "std")]
mod cpu;
#[cfg(feature = "decode")]
mod decode;
mod error;
mod math;
mod patches;
mod picture;
pub mod reference;
mod resize;
mod tiling;
mod tower;

pub use budget::Budget;
#[cfg(feature = "decode")]
pub use decode::{Limits, decode};
pub use error::{Error, ErrorKind, Result};
pub use patches::Patches;
pub use picture::Picture;
pub use resize::resize;
pub use tiling::Tiling;
#[cfg(feature = "std")]
pub use tower::Scratch;
pub use tower::{Activation, Block, Clip, Config, Linear, Standardise, Tower, Weights};

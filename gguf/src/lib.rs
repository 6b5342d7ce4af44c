#![cfg_attr(feature = "std", doc = include_str!("../README.md"))]
// The example in it writes a file, which needs `std`.
#![cfg_attr(
    not(feature = "std"),
    doc = "Reads GGUF model files from bytes in memory: the README describes the whole crate."
)]
#![no_std]
#![deny(unsafe_code)]
#![cfg_attr(docsrs, feature(doc_cfg))]
#![warn(clippy::std_instead_of_core, clippy::std_instead_of_alloc, clippy::alloc_instead_of_core)]

extern crate alloc;
#[cfg(feature = "std")]
extern crate std;

mod array;
mod cursor;
mod error;
#[cfg(feature = "std")]
mod files;
mod gguf;
mod header;
#[cfg(feature = "mmap")]
mod map;
mod per_layer;
mod split;
mod tensor;
mod text;
mod value;
#[cfg(feature = "std")]
mod write;

pub use array::{Array, Items, MAX_NESTING};
pub use error::{Error, ErrorKind, Result};
#[cfg(feature = "std")]
pub use files::{open_with, read};
pub use gguf::Gguf;
pub use header::{DEFAULT_ALIGNMENT, MAX_KEY};
#[cfg(feature = "mmap")]
pub use map::{Advice, Map, open};
pub use per_layer::PerLayer;
pub use tensor::{MAX_DIMS, MAX_TENSOR_NAME, TensorInfo, TensorType};
pub use value::{Str, Value, ValueType};
#[cfg(feature = "std")]
pub use write::{ToItem, ToValue, Writer};

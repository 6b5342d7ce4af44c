#![cfg_attr(any(feature = "std", feature = "libm"), doc = include_str!("../README.md"))]
// The example of the README needs the router.
#![cfg_attr(
    not(any(feature = "std", feature = "libm")),
    doc = "An expert slot cache as a pure state machine."
)]
#![no_std]
// Kernels are launched by unsafe calls, in `gpu` and nowhere else.
#![cfg_attr(not(feature = "gpu"), forbid(unsafe_code))]
#![cfg_attr(feature = "gpu", deny(unsafe_code))]
#![cfg_attr(docsrs, feature(doc_cfg))]
#![warn(clippy::std_instead_of_core, clippy::std_instead_of_alloc, clippy::alloc_instead_of_core)]

extern crate alloc;
#[cfg(feature = "std")]
extern crate std;

mod cache;
#[cfg(feature = "cpu")]
#[cfg_attr(docsrs, doc(cfg(feature = "cpu")))]
pub mod cpu;
mod error;
#[cfg(feature = "gpu")]
#[cfg_attr(docsrs, doc(cfg(feature = "gpu")))]
#[allow(unsafe_code)]
pub mod gpu;
#[cfg(any(feature = "std", feature = "libm"))]
mod math;
pub mod policy;
pub mod reference;
#[cfg(any(feature = "std", feature = "libm"))]
#[cfg_attr(docsrs, doc(cfg(any(feature = "std", feature = "libm"))))]
pub mod replay;
#[cfg(any(feature = "std", feature = "libm"))]
#[cfg_attr(docsrs, doc(cfg(any(feature = "std", feature = "libm"))))]
pub mod router;

pub use cache::{Fetch, LayerStats, Plan, SlotCache};
pub use error::{Error, ErrorKind, Result};
pub use policy::{Lru, Policy};
#[cfg(any(feature = "std", feature = "libm"))]
pub use router::{Norm, Routes, route};

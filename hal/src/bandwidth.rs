//! Measured limits of the machine: how fast memory is read and how fast multiplications are done.
//!
//! Decoding one token reads every active weight once, so that its time is at least bytes over [`read_bandwidth`]; a
//! prompt of many tokens is limited by arithmetic, for which [`fma_peak`] is a measure.

mod fma;
mod read;

pub use fma::{FmaPeak, fma_peak};
pub use read::{ReadBandwidth, read_bandwidth};

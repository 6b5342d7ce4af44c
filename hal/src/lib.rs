#![doc = include_str!("../README.md")]

mod error;
pub mod pool;

pub use error::{Error, ErrorKind, Result};
pub use pool::{Pool, Scope};

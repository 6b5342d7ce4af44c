#![doc = include_str!("../README.md")]
#![forbid(unsafe_code)]

mod http;

pub use http::{Backend, Card, Model, Options, Server};

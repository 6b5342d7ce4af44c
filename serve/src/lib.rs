#![doc = include_str!("../README.md")]
#![forbid(unsafe_code)]

mod http;

pub use http::{Backend, Card, ImageOptions, Model, Options, Server};

mod answer;
mod chat;
mod completions;
mod error;
mod fields;
mod guard;
mod line;
mod model;
mod models;
mod request;
mod server;
mod wire;

pub use model::{Backend, Card, Model};
pub use server::{Options, Server};

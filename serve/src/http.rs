mod answer;
mod chat;
mod completions;
mod error;
mod fetch;
mod fields;
mod guard;
mod images;
mod ledger;
mod line;
mod model;
mod models;
mod request;
mod server;
mod wire;

pub use images::ImageOptions;
pub use model::{Backend, Card, Model};
pub use server::{Options, Server};

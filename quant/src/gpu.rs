//! Quantised weights and their products on a device (feature `gpu`).
//!
//! Weights are packed once, on the host, in the order in which the lanes of a wave load them ([`pack`]; `kernels/blocks.gpu.h`
//! has the layout). Values are those of the file, bit for bit. Products with up to 32 rows of activations take these as
//! bytes with a scale for every 32 and sum integers; products with more rows decode weights to f16 and use the matrix
//! units. F32 weights are multiplied in f32 either way.

mod acts;
mod kernels;
mod layout;
mod matrix;

pub use acts::Acts;
pub use kernels::{FEW, Gate, Kernels, MOST_COLS, MOST_TOP, Product, SOURCE, outputs, top_k_scratch};
pub use layout::{pack, stride, unpack};
pub use matrix::{Matrix, MatrixView};

/// Device code that decodes weights, for sources of other crates: it stands before theirs.
pub const BLOCKS: &str = include_str!("../kernels/blocks.gpu.h");

/// Device code that writes rows of activations in the forms that products take, for sources of other crates.
pub const ROWS: &str = include_str!("../kernels/rows.gpu.h");

/// Device code of tiles of products, for sources of other crates: after [`BLOCKS`].
pub const TILES: &str = include_str!("../kernels/tiles.gpu.h");

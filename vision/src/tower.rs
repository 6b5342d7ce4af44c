//! The vision tower of Gemma 4 (`gemma4v`): sizes, weights, and what must hold between them.

#[cfg(feature = "std")]
mod encode;

#[cfg(feature = "std")]
pub use encode::Scratch;

use alloc::format;
use alloc::string::String;
use alloc::vec::Vec;

use skep_quant::Matrix;

use crate::{ErrorKind, Patches, Result, Tiling};

/// The sizes and constants of a tower.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Config {
    /// Length of the embedding of a patch.
    pub hidden: usize,
    /// Attention heads; each has `hidden / heads` dimensions, a multiple of 4.
    pub heads: usize,
    /// Length of the inner layer of the feed-forward.
    pub ff: usize,
    /// Patch and pooling sizes.
    pub tiling: Tiling,
    /// Added to the mean square in every root-mean-square norm.
    pub eps: f32,
    /// Base of the rotary frequencies, 100 for Gemma 4.
    pub rope_base: f32,
    /// The function applied to the gate of the feed-forward.
    pub activation: Activation,
}

impl Config {
    /// Dimensions of a head.
    #[must_use]
    pub const fn head_dim(&self) -> usize {
        self.hidden / self.heads
    }
}

/// The function applied to the gate of the feed-forward.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
#[non_exhaustive]
pub enum Activation {
    /// x · ½(1 + tanh(√(2/π)(x + 0.044715 x³))): what Gemma 4 was trained with.
    #[default]
    GeluTanh,
    /// x · σ(1.702 x).
    GeluQuick,
    /// x · σ(x).
    Silu,
}

/// Bounds that values are brought into.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Clip {
    /// The least value.
    pub min: f32,
    /// The largest value.
    pub max: f32,
}

impl Clip {
    /// No bounds.
    pub const NONE: Self = Self { min: f32::NEG_INFINITY, max: f32::INFINITY };

    /// Brings a value into the bounds. NaN stays NaN.
    #[inline]
    #[must_use]
    pub fn apply(self, x: f32) -> f32 {
        if x < self.min {
            self.min
        } else if x > self.max {
            self.max
        } else {
            x
        }
    }
}

/// A linear layer without bias that clips what goes in and what comes out: `y = clip(W clip(x))`.
///
/// Small Gemma 4 towers have bounds; in the large ones they are [`Clip::NONE`].
#[derive(Debug, Clone, Copy)]
pub struct Linear<'a> {
    /// `[outputs, inputs]`.
    pub weight: Matrix<'a>,
    /// Bounds of the input.
    pub input: Clip,
    /// Bounds of the output.
    pub output: Clip,
}

impl<'a> Linear<'a> {
    /// A layer that clips nothing.
    #[must_use]
    pub const fn new(weight: Matrix<'a>) -> Self {
        Self { weight, input: Clip::NONE, output: Clip::NONE }
    }
}

/// The weights of one transformer block: norms before and after attention and feed-forward, no biases.
#[derive(Debug, Clone, Copy)]
pub struct Block<'a> {
    /// Norm before attention, `[hidden]` (`ln1`).
    pub attn_norm: &'a [f32],
    /// Queries, `[hidden, hidden]`.
    pub q: Linear<'a>,
    /// Keys, `[hidden, hidden]`.
    pub k: Linear<'a>,
    /// Values, `[hidden, hidden]`.
    pub v: Linear<'a>,
    /// Norm of each query head, `[head_dim]`.
    pub q_norm: &'a [f32],
    /// Norm of each key head, `[head_dim]`.
    pub k_norm: &'a [f32],
    /// Output of attention, `[hidden, hidden]`.
    pub out: Linear<'a>,
    /// Norm after attention, `[hidden]`.
    pub attn_post_norm: &'a [f32],
    /// Norm before the feed-forward, `[hidden]` (`ln2`).
    pub ffn_norm: &'a [f32],
    /// Gate, `[ff, hidden]`.
    pub gate: Linear<'a>,
    /// Up projection, `[ff, hidden]`.
    pub up: Linear<'a>,
    /// Down projection, `[hidden, ff]`.
    pub down: Linear<'a>,
    /// Norm after the feed-forward, `[hidden]`.
    pub ffn_post_norm: &'a [f32],
}

/// The affine map after pooling: `(x - bias) * scale`.
#[derive(Debug, Clone, Copy)]
pub struct Standardise<'a> {
    /// Subtracted, `[hidden]`.
    pub bias: &'a [f32],
    /// Multiplied with, `[hidden]`.
    pub scale: &'a [f32],
}

/// The weights of a tower and of the projection behind it.
#[derive(Debug, Clone)]
pub struct Weights<'a> {
    /// Patch embedding, `[hidden, 3 * patch * patch]`, channel-planar.
    pub patches: Linear<'a>,
    /// Position embeddings, `[2, positions, hidden]`: those of columns, then those of rows.
    pub positions: &'a [f32],
    /// The transformer blocks in order.
    pub blocks: Vec<Block<'a>>,
    /// Applied to pooled embeddings, where the model has it.
    pub standardise: Option<Standardise<'a>>,
    /// Projection to the embedding length of the language model, `[out_dim, hidden]`.
    pub projection: Linear<'a>,
}

/// A vision tower with its projection: patches of a picture become soft tokens.
///
/// ```text
/// h  = W_patch (2 p - 1) + X[column] + Y[row]
/// h += rms(attention(rms(h))),  h += rms(ffn(rms(h)))        for every block
/// out = W_proj rms(standardise(sqrt(hidden) mean of pooling x pooling patches))
/// ```
///
/// Attention is bidirectional with scale 1; queries and keys have a norm per head and a rotary embedding whose first
/// half of dimensions turns by the column and whose second half by the row; values have a norm without weight.
#[derive(Debug, Clone)]
pub struct Tower<'a> {
    pub(crate) config: Config,
    pub(crate) weights: Weights<'a>,
}

impl<'a> Tower<'a> {
    /// Puts sizes and weights together.
    ///
    /// # Errors
    /// [`ErrorKind::Tower`] when they do not go together, naming the weight.
    pub fn new(config: Config, weights: Weights<'a>) -> Result<Self> {
        let Config { hidden, heads, ff, .. } = config;
        if heads == 0 || hidden == 0 || ff == 0 || !hidden.is_multiple_of(4 * heads) {
            return Err(wrong(format!(
                "{hidden} dimensions and {heads} heads: a head must have a multiple of 4 dimensions"
            )));
        }
        if !(config.eps.is_finite() && config.eps >= 0.0 && config.rope_base > 0.0) {
            return Err(wrong(format!("eps {} and rope base {}", config.eps, config.rope_base)));
        }
        let patch = config.tiling.patch();
        linear("patch embedding", &weights.patches, hidden, 3 * patch * patch)?;
        let positions = weights.positions.len();
        if positions == 0 || !positions.is_multiple_of(2 * hidden) {
            return Err(wrong(format!("{positions} numbers of position embeddings of length {hidden}")));
        }
        for (i, block) in weights.blocks.iter().enumerate() {
            for (name, layer, rows, cols) in [
                ("q", &block.q, hidden, hidden),
                ("k", &block.k, hidden, hidden),
                ("v", &block.v, hidden, hidden),
                ("out", &block.out, hidden, hidden),
                ("gate", &block.gate, ff, hidden),
                ("up", &block.up, ff, hidden),
                ("down", &block.down, hidden, ff),
            ] {
                linear(&format!("{name} of block {i}"), layer, rows, cols)?;
            }
            for (name, norm, len) in [
                ("attention norm", block.attn_norm, hidden),
                ("query norm", block.q_norm, hidden / heads),
                ("key norm", block.k_norm, hidden / heads),
                ("attention post norm", block.attn_post_norm, hidden),
                ("feed-forward norm", block.ffn_norm, hidden),
                ("feed-forward post norm", block.ffn_post_norm, hidden),
            ] {
                vector(&format!("{name} of block {i}"), norm, len)?;
            }
        }
        if let Some(Standardise { bias, scale }) = weights.standardise {
            vector("standardise bias", bias, hidden)?;
            vector("standardise scale", scale, hidden)?;
        }
        linear("projection", &weights.projection, weights.projection.weight.rows(), hidden)?;
        Ok(Self { config, weights })
    }

    /// The sizes.
    #[must_use]
    pub const fn config(&self) -> &Config {
        &self.config
    }

    /// Length of a soft token.
    #[must_use]
    pub const fn out_dim(&self) -> usize {
        self.weights.projection.weight.rows()
    }

    /// Rows of each position table: the largest number of patches along a side.
    #[must_use]
    pub const fn positions(&self) -> usize {
        self.weights.positions.len() / (2 * self.config.hidden)
    }

    /// Floating-point operations of encoding a grid of patches, counting the multiplications and additions of products with
    /// weights and of attention only.
    #[must_use]
    pub fn operations(&self, columns: usize, rows: usize) -> f64 {
        let Config { hidden, ff, tiling, .. } = self.config;
        let n = (columns * rows) as f64;
        let n_soft = n / (tiling.pooling() * tiling.pooling()) as f64;
        let (hidden, ff, blocks) = (hidden as f64, ff as f64, self.weights.blocks.len() as f64);
        let linear = 4.0 * hidden * hidden + 3.0 * hidden * ff;
        let attention = 2.0 * n * hidden;
        let patch = 3.0 * (tiling.patch() * tiling.patch()) as f64;
        2.0 * (n * (hidden * patch + blocks * (linear + attention)) + n_soft * hidden * self.out_dim() as f64)
    }

    /// Checks that the tower can place and pool patches; returns the number of soft tokens.
    pub(crate) fn check(&self, patches: &Patches) -> Result<usize> {
        let (columns, rows) = (patches.columns(), patches.rows());
        let refuse = |why: String| Err(ErrorKind::Grid { columns, rows, why }.into());
        let tiling = self.config.tiling;
        if patches.patch() != tiling.patch() {
            return refuse(format!(
                "they have {} pixels a side, the tower takes {}",
                patches.patch(),
                tiling.patch()
            ));
        }
        if columns.max(rows) > self.positions() {
            return refuse(format!("the tower has {} positions a side", self.positions()));
        }
        let pooling = tiling.pooling();
        if columns == 0 || rows == 0 || !columns.is_multiple_of(pooling) || !rows.is_multiple_of(pooling) {
            return refuse(format!("it cannot be pooled {pooling}x{pooling}"));
        }
        Ok((columns / pooling) * (rows / pooling))
    }

    /// Sum of the position embeddings of patch `i`.
    pub(crate) fn add_position(&self, patches: &Patches, i: usize, h: &mut [f32]) {
        let hidden = self.config.hidden;
        let (x, y) = (i % patches.columns(), i / patches.columns());
        let columns = &self.weights.positions[x * hidden..][..hidden];
        let rows = &self.weights.positions[(self.positions() + y) * hidden..][..hidden];
        for ((h, column), row) in h.iter_mut().zip(columns).zip(rows) {
            *h += column + row;
        }
    }
}

fn wrong(message: String) -> crate::Error {
    ErrorKind::Tower(message).into()
}

fn linear(name: &str, layer: &Linear<'_>, rows: usize, cols: usize) -> Result<()> {
    let w = &layer.weight;
    if (w.rows(), w.cols()) != (rows, cols) || rows == 0 {
        return Err(wrong(format!("{name} is {}x{}, not {rows}x{cols}", w.rows(), w.cols())));
    }
    for (side, Clip { min, max }) in [("input", layer.input), ("output", layer.output)] {
        // Not a number included.
        if !matches!(min.partial_cmp(&max), Some(core::cmp::Ordering::Less | core::cmp::Ordering::Equal)) {
            return Err(wrong(format!("{name} clips its {side} to {min} … {max}")));
        }
    }
    Ok(())
}

fn vector(name: &str, values: &[f32], len: usize) -> Result<()> {
    if values.len() == len {
        Ok(())
    } else {
        Err(wrong(format!("{name} has {} numbers, not {len}", values.len())))
    }
}

#[cfg(all(test, feature = "std"))]
mod tests;

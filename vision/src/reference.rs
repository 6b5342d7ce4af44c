//! The plain scalar truth of the tower: what the fast path is tested against.
//!
//! Values are f32, sums are taken in f64, one loop per formula.

use alloc::vec;
use alloc::vec::Vec;

use skep_quant::reference::{dot, rms_norm, softmax_in_place};

use crate::math;
use crate::tower::{Activation, Block, Config, Linear, Tower};
use crate::{Patches, Result};

/// Encodes the patches of one picture: `[n_soft, out_dim]`, soft tokens in raster order.
///
/// # Errors
/// [`ErrorKind::Grid`](crate::ErrorKind::Grid) when the tower cannot place or pool the patches.
pub fn encode(tower: &Tower<'_>, patches: &Patches) -> Result<Vec<f32>> {
    tower.check(patches)?;
    let (config, weights) = (&tower.config, &tower.weights);
    let pixels: Vec<f32> = patches.data().iter().map(|p| 2.0 * p - 1.0).collect();
    let mut h = linear(&weights.patches, &pixels);
    for (i, h) in h.chunks_exact_mut(config.hidden).enumerate() {
        tower.add_position(patches, i, h);
    }
    for block in &weights.blocks {
        let x = norm(&h, block.attn_norm, config.eps);
        let x = linear(&block.out, &attention(config, block, patches.columns(), &x));
        add(&mut h, &norm(&x, block.attn_post_norm, config.eps));
        let x = norm(&h, block.ffn_norm, config.eps);
        let x = linear(&block.down, &inner(config, block, &x));
        add(&mut h, &norm(&x, block.ffn_post_norm, config.eps));
    }
    let mut soft = pool(config, patches, &h);
    for soft in soft.chunks_exact_mut(config.hidden) {
        if let Some(standardise) = &weights.standardise {
            for (i, x) in soft.iter_mut().enumerate() {
                *x = (*x - standardise.bias[i]) * standardise.scale[i];
            }
        }
        let x = soft.to_vec();
        rms_norm(&x, None, config.eps, soft);
    }
    Ok(linear(&weights.projection, &soft))
}

/// `clip(W clip(x))` for each row of `x`.
pub fn linear(layer: &Linear<'_>, x: &[f32]) -> Vec<f32> {
    let w = &layer.weight;
    let x: Vec<f32> = x.iter().map(|x| layer.input.apply(*x)).collect();
    let rows = x.chunks_exact(w.cols());
    rows.flat_map(|x| (0..w.rows()).map(|r| layer.output.apply(dot(w.ty(), w.row(r), x)))).collect()
}

/// The function applied to the gate of the feed-forward.
#[must_use]
pub fn activation(activation: Activation, x: f32) -> f32 {
    let x = f64::from(x);
    let sigmoid = |x: f64| 1.0 / (1.0 + math::exp(-x));
    let y = match activation {
        Activation::GeluTanh => {
            let u = math::sqrt(2.0 / core::f64::consts::PI) * (x + 0.044715 * x * x * x);
            0.5 * x * (1.0 + math::tanh(u))
        }
        Activation::GeluQuick => x * sigmoid(1.702 * x),
        Activation::Silu => x * sigmoid(x),
    };
    y as f32
}

/// Turns one head, `[head_dim]`, by its position: the first half of its dimensions by the column, the second half by
/// the row. In each half of `d` dimensions the pairs are `(i, i + d / 2)` with the frequencies `base^(-2i / d)`.
pub fn rope(head: &mut [f32], column: usize, row: usize, base: f32) {
    let d = head.len() / 2;
    for (half, position) in head.chunks_exact_mut(d).zip([column, row]) {
        for i in 0..d / 2 {
            let frequency = math::pow(f64::from(base), -2.0 * i as f64 / d as f64);
            let (sin, cos) = math::sin_cos(position as f64 * frequency);
            let (a, b) = (f64::from(half[i]), f64::from(half[i + d / 2]));
            half[i] = (a * cos - b * sin) as f32;
            half[i + d / 2] = (b * cos + a * sin) as f32;
        }
    }
}

/// Softmax attention of one head without mask and with scale 1: all of `[n, head_dim]`.
pub fn attend(q: &[f32], k: &[f32], v: &[f32], head_dim: usize) -> Vec<f32> {
    let mut out = Vec::with_capacity(q.len());
    for q in q.chunks_exact(head_dim) {
        let product =
            |k: &[f32]| q.iter().zip(k).map(|(q, k)| f64::from(*q) * f64::from(*k)).sum::<f64>() as f32;
        let mut p: Vec<f32> = k.chunks_exact(head_dim).map(product).collect();
        softmax_in_place(&mut p);
        for d in 0..head_dim {
            let sum: f64 =
                v.chunks_exact(head_dim).zip(&p).map(|(v, p)| f64::from(v[d]) * f64::from(*p)).sum();
            out.push(sum as f32);
        }
    }
    out
}

fn attention(config: &Config, block: &Block<'_>, columns: usize, x: &[f32]) -> Vec<f32> {
    let (hidden, dim) = (config.hidden, config.head_dim());
    let n = x.len() / hidden;
    let (q, k, v) = (linear(&block.q, x), linear(&block.k, x), linear(&block.v, x));
    let head = |x: &[f32], head: usize, weight: Option<&[f32]>, turn: bool| -> Vec<f32> {
        let mut out = vec![0.0; n * dim];
        for (i, out) in out.chunks_exact_mut(dim).enumerate() {
            rms_norm(&x[i * hidden + head * dim..][..dim], weight, config.eps, out);
            if turn {
                rope(out, i % columns, i / columns, config.rope_base);
            }
        }
        out
    };
    let mut out = vec![0.0; n * hidden];
    for h in 0..config.heads {
        let (q, k) = (head(&q, h, Some(block.q_norm), true), head(&k, h, Some(block.k_norm), true));
        let attended = attend(&q, &k, &head(&v, h, None, false), dim);
        for (i, row) in attended.chunks_exact(dim).enumerate() {
            out[i * hidden + h * dim..][..dim].copy_from_slice(row);
        }
    }
    out
}

/// The inner layer of the feed-forward.
fn inner(config: &Config, block: &Block<'_>, x: &[f32]) -> Vec<f32> {
    let (gate, up) = (linear(&block.gate, x), linear(&block.up, x));
    gate.iter().zip(up).map(|(gate, up)| activation(config.activation, *gate) * up).collect()
}

/// `sqrt(hidden)` times the mean of each `pooling` x `pooling` patches.
fn pool(config: &Config, patches: &Patches, h: &[f32]) -> Vec<f32> {
    let (hidden, pooling) = (config.hidden, config.tiling.pooling());
    let scale = math::sqrt(hidden as f64) / (pooling * pooling) as f64;
    let mut out = Vec::new();
    for row in 0..patches.rows() / pooling {
        for column in 0..patches.columns() / pooling {
            for d in 0..hidden {
                let mut sum = 0.0;
                for y in row * pooling..(row + 1) * pooling {
                    for x in column * pooling..(column + 1) * pooling {
                        sum += f64::from(h[(y * patches.columns() + x) * hidden + d]);
                    }
                }
                out.push((sum * scale) as f32);
            }
        }
    }
    out
}

/// Root-mean-square norm of each row.
fn norm(x: &[f32], weight: &[f32], eps: f32) -> Vec<f32> {
    let mut out = vec![0.0; x.len()];
    for (x, out) in x.chunks_exact(weight.len()).zip(out.chunks_exact_mut(weight.len())) {
        rms_norm(x, Some(weight), eps, out);
    }
    out
}

fn add(x: &mut [f32], y: &[f32]) {
    for (x, y) in x.iter_mut().zip(y) {
        *x += y;
    }
}

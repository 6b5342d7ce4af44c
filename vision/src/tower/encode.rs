//! The tower in the order that is fast: products for runs of tokens, attention by blocks of keys.

use alloc::string::ToString;
use alloc::vec;
use alloc::vec::Vec;

use skep_quant::{
    Activations, Forms, Parallel, Precision, Product, for_each_chunk_mut, matmul, vec::rms_norm,
};

use super::{Block, Clip, Linear, Tower};
use crate::cpu::{BLOCK, Heads, Kernels};
use crate::{ErrorKind, Patches, Result, math};

/// Tokens whose inner layers are held at once: their products come from memory once per run.
const RUN: usize = 12 * BLOCK;
/// Rows of one chunk of the work between products.
const ROWS: usize = 16;

/// Buffers of [`Tower::encode`], reused from picture to picture.
#[derive(Debug, Default)]
pub struct Scratch {
    acts: Activations,
    /// The residual stream, `[n, hidden]`.
    h: Vec<f32>,
    /// Input of products, `[n, hidden]` or `[run, hidden]`.
    x: Vec<f32>,
    /// Output of products, `[run, hidden]`.
    y: [Vec<f32>; 3],
    /// `[run, ff]`
    gate: Vec<f32>,
    up: Vec<f32>,
    /// Queries, keys and values by blocks of tokens, see [`Heads`].
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
    /// The stage that comes next.
    stage: usize,
}

impl Scratch {
    /// Empty buffers.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }
}

impl Tower<'_> {
    /// Encodes the patches of one picture into `out`, `[n_soft, out_dim]`, soft tokens in raster order.
    ///
    /// The result does not depend on `par`, nor on what `scratch` was used for before.
    ///
    /// # Errors
    /// [`ErrorKind::Grid`] when the tower cannot place or pool the patches, [`ErrorKind::Isa`] when the environment asks
    /// for kernels that this machine cannot run.
    pub fn encode(
        &self,
        par: &dyn Parallel,
        patches: &Patches,
        precision: Precision,
        scratch: &mut Scratch,
        out: &mut Vec<f32>,
    ) -> Result<()> {
        let kernels = Kernels::detect().map_err(|error| ErrorKind::Isa(error.to_string()))?;
        self.encode_with(&kernels, par, patches, precision, scratch, out)
    }

    /// [`encode`](Self::encode) with the given kernels for what is not a product.
    pub(crate) fn encode_with(
        &self,
        kernels: &Kernels,
        par: &dyn Parallel,
        patches: &Patches,
        precision: Precision,
        scratch: &mut Scratch,
        out: &mut Vec<f32>,
    ) -> Result<()> {
        for stage in 0..self.stages() {
            self.stage(kernels, par, patches, precision, stage, scratch, out)?;
        }
        Ok(())
    }

    /// How many stages [`encode_stage`](Self::encode_stage) cuts the work into: one for each block, and one behind them.
    #[must_use]
    pub fn stages(&self) -> usize {
        self.weights.blocks.len() + 1
    }

    /// One stage of [`encode`](Self::encode), for callers with other work between them. `out` is complete after the last.
    ///
    /// # Errors
    /// As [`encode`](Self::encode).
    ///
    /// # Panics
    /// When `stage` is neither 0 nor the one behind the last stage that `scratch` was used for, or the picture is not that
    /// of the stages before.
    pub fn encode_stage(
        &self,
        par: &dyn Parallel,
        patches: &Patches,
        precision: Precision,
        stage: usize,
        scratch: &mut Scratch,
        out: &mut Vec<f32>,
    ) -> Result<()> {
        let kernels = Kernels::detect().map_err(|error| ErrorKind::Isa(error.to_string()))?;
        self.stage(&kernels, par, patches, precision, stage, scratch, out)
    }

    fn stage(
        &self,
        kernels: &Kernels,
        par: &dyn Parallel,
        patches: &Patches,
        precision: Precision,
        stage: usize,
        scratch: &mut Scratch,
        out: &mut Vec<f32>,
    ) -> Result<()> {
        let n_soft = self.check(patches)?;
        let n = patches.columns() * patches.rows();
        let fits = stage == scratch.stage && scratch.h.len() == n * self.config.hidden;
        assert!(stage == 0 || fits, "stage {stage} of another picture, or out of turn");
        scratch.stage = stage + 1;
        let mut pass =
            Pass { tower: self, kernels, par, precision, n, turns: Turns::new(self, patches), scratch };
        if stage == 0 {
            pass.embed(patches);
        }
        match self.weights.blocks.get(stage) {
            Some(block) => {
                pass.attention(block);
                pass.feed_forward(block);
            }
            None => pass.project(patches, n_soft, out),
        }
        Ok(())
    }
}

/// One picture on its way.
struct Pass<'a, 's> {
    tower: &'a Tower<'a>,
    kernels: &'a Kernels,
    par: &'a dyn Parallel,
    precision: Precision,
    /// Patches.
    n: usize,
    turns: Turns,
    scratch: &'s mut Scratch,
}

impl Pass<'_, '_> {
    fn embed(&mut self, patches: &Patches) {
        let hidden = self.tower.config.hidden;
        let (pixels, len) = (patches.data(), patches.data().len() / self.n);
        let Scratch { acts, h, x, .. } = &mut *self.scratch;
        x.resize(pixels.len(), 0.0);
        for_each_chunk_mut(self.par, x, ROWS * len, |i, x| {
            let pixels = &pixels[i * ROWS * len..];
            for (x, p) in x.iter_mut().zip(pixels) {
                *x = 2.0 * p - 1.0;
            }
        });
        h.resize(self.n * hidden, 0.0);
        products(self.par, self.precision, acts, x, [(&self.tower.weights.patches, h)]);
        for_each_chunk_mut(self.par, h, ROWS * hidden, |chunk, rows| {
            for (i, h) in rows.chunks_exact_mut(hidden).enumerate() {
                self.tower.add_position(patches, chunk * ROWS + i, h);
            }
        });
    }

    /// `h += rms(out(attention(rms(h))))`
    fn attention(&mut self, block: &Block<'_>) {
        let config = &self.tower.config;
        let (hidden, dim, n) = (config.hidden, config.head_dim(), self.n);
        let Scratch { acts, h, x, y, q, k, v, .. } = &mut *self.scratch;
        let block_len = BLOCK * hidden;
        for buffer in [&mut *q, k, v] {
            buffer.resize(n.div_ceil(BLOCK) * block_len, 0.0);
        }
        for first in (0..n).step_by(RUN) {
            let run = first..(first + RUN).min(n);
            x.resize(run.len() * hidden, 0.0);
            norm(self.par, &h[run.start * hidden..][..x.len()], block.attn_norm, config.eps, x);
            for y in &mut *y {
                y.resize(x.len(), 0.0);
            }
            let [yq, yk, yv] = &mut *y;
            let layers = [(&block.q, &mut *yq), (&block.k, &mut *yk), (&block.v, &mut *yv)];
            products(self.par, self.precision, acts, x, layers);
            let end = run.end.next_multiple_of(BLOCK) * hidden;
            for (raw, heads, weight, turn) in [
                (&*yq, &mut *q, Some(block.q_norm), true),
                (yk, k, Some(block.k_norm), true),
                (yv, v, None, false),
            ] {
                let heads = &mut heads[run.start * hidden..end];
                for_each_chunk_mut(self.par, heads, block_len, |at, heads| {
                    for (i, raw) in raw[at * block_len..].chunks_exact(hidden).take(BLOCK).enumerate() {
                        let position = run.start + at * BLOCK + i;
                        for (h, raw) in raw.chunks_exact(dim).enumerate() {
                            let head = &mut heads[(h * BLOCK + i) * dim..][..dim];
                            rms_norm(raw, weight, config.eps, head);
                            if turn {
                                self.turns.turn(position, head);
                            }
                        }
                    }
                });
            }
        }
        x.resize(n * hidden, 0.0);
        let heads = Heads { q, k, v, n, heads: config.heads, dim };
        for_each_chunk_mut(self.par, x, block_len, |block, out| (self.kernels.attend)(&heads, block, out));
        let y = &mut y[0];
        for first in (0..n).step_by(RUN) {
            let run = first * hidden..(first + RUN).min(n) * hidden;
            y.resize(run.len(), 0.0);
            products(self.par, self.precision, acts, &mut x[run.clone()], [(&block.out, &mut *y)]);
            add_norm(self.par, y, block.attn_post_norm, config.eps, &mut h[run]);
        }
    }

    /// `h += rms(down(act(gate(rms(h))) * up(rms(h))))`
    fn feed_forward(&mut self, block: &Block<'_>) {
        let config = &self.tower.config;
        let hidden = config.hidden;
        let Scratch { acts, h, x, y, gate, up, .. } = &mut *self.scratch;
        for h in h.chunks_mut(RUN * hidden) {
            x.resize(h.len(), 0.0);
            norm(self.par, h, block.ffn_norm, config.eps, x);
            let inner = h.len() / hidden * config.ff;
            gate.resize(inner, 0.0);
            up.resize(inner, 0.0);
            products(self.par, self.precision, acts, x, [(&block.gate, &mut *gate), (&block.up, &mut *up)]);
            for_each_chunk_mut(self.par, gate, ROWS * config.ff, |i, gate| {
                let up = &up[i * ROWS * config.ff..][..gate.len()];
                (self.kernels.gate)(config.activation, gate, up);
            });
            y[0].resize(h.len(), 0.0);
            products(self.par, self.precision, acts, gate, [(&block.down, &mut y[0])]);
            add_norm(self.par, &y[0], block.ffn_post_norm, config.eps, h);
        }
    }

    /// Pools, standardises, normalises and projects.
    fn project(&mut self, patches: &Patches, n_soft: usize, out: &mut Vec<f32>) {
        let (config, weights) = (&self.tower.config, &self.tower.weights);
        let (hidden, pooling, columns) = (config.hidden, config.tiling.pooling(), patches.columns());
        let Scratch { acts, h, x, .. } = &mut *self.scratch;
        x.resize(n_soft * hidden, 0.0);
        let scale = (math::sqrt(hidden as f64) / (pooling * pooling) as f64) as f32;
        let cells = columns / pooling;
        for_each_chunk_mut(self.par, x, hidden, |i, soft| {
            let first = (i / cells * columns + i % cells) * pooling;
            let mut sum = vec![0.0; hidden];
            for y in 0..pooling {
                for x in 0..pooling {
                    let patch = &h[(first + y * columns + x) * hidden..][..hidden];
                    for (sum, p) in sum.iter_mut().zip(patch) {
                        *sum += p;
                    }
                }
            }
            for (i, sum) in sum.iter_mut().enumerate() {
                *sum *= scale;
                if let Some(standardise) = &weights.standardise {
                    *sum = (*sum - standardise.bias[i]) * standardise.scale[i];
                }
            }
            rms_norm(&sum, None, config.eps, soft);
        });
        out.clear();
        out.resize(n_soft * self.tower.out_dim(), 0.0);
        products(self.par, self.precision, acts, x, [(&weights.projection, out)]);
    }
}

/// Sines and cosines of the rotary embedding.
struct Turns {
    columns: usize,
    /// Frequencies of a half.
    len: usize,
    /// `[columns, len]`: cosine, sine.
    by_column: Vec<(f32, f32)>,
    /// `[rows, len]`
    by_row: Vec<(f32, f32)>,
}

impl Turns {
    fn new(tower: &Tower<'_>, patches: &Patches) -> Self {
        let half = tower.config.head_dim() / 2;
        let table = |positions: usize| {
            let mut table = Vec::with_capacity(positions * half / 2);
            for position in 0..positions {
                for i in 0..half / 2 {
                    let frequency =
                        math::pow(f64::from(tower.config.rope_base), -2.0 * i as f64 / half as f64);
                    let (sin, cos) = math::sin_cos(position as f64 * frequency);
                    table.push((cos as f32, sin as f32));
                }
            }
            table
        };
        let columns = patches.columns();
        Self { columns, len: half / 2, by_column: table(columns), by_row: table(patches.rows()) }
    }

    /// Turns one head of the patch at `position`.
    fn turn(&self, position: usize, head: &mut [f32]) {
        let (column, row) = (position % self.columns, position / self.columns);
        let (first, second) = head.split_at_mut(2 * self.len);
        for (half, table, at) in [(first, &self.by_column, column), (second, &self.by_row, row)] {
            let (a, b) = half.split_at_mut(self.len);
            for ((a, b), (cos, sin)) in a.iter_mut().zip(b).zip(&table[at * self.len..]) {
                (*a, *b) = (*a * cos - *b * sin, *b * cos + *a * sin);
            }
        }
    }
}

/// Products of several layers with the same rows `x`; each layer's output has `rows(x)` rows. Clips `x` in place where
/// the layers ask for it.
fn products<const N: usize>(
    par: &dyn Parallel,
    precision: Precision,
    acts: &mut Activations,
    x: &mut [f32],
    layers: [(&Linear<'_>, &mut Vec<f32>); N],
) {
    let cols = layers[0].0.weight.cols();
    let input = layers[0].0.input;
    if layers.iter().any(|(layer, _)| layer.input != input) {
        // Bounds of their own: the input anew for each.
        for (layer, out) in layers {
            let mut x = x.to_vec();
            products(par, precision, acts, &mut x, [(layer, out)]);
        }
        return;
    }
    if input != Clip::NONE {
        clip(par, input, x);
    }
    let forms = layers.iter().fold(Forms::NONE, |forms, (l, _)| forms | Forms::of(l.weight.ty(), precision));
    acts.fill(par, x, cols, forms);
    let outputs = layers.each_ref().map(|(layer, _)| layer.output);
    let mut products = layers.map(|(layer, out)| Product { weight: layer.weight, out });
    matmul(par, &mut products, acts, precision);
    for (output, product) in outputs.into_iter().zip(products) {
        if output != Clip::NONE {
            clip(par, output, product.out);
        }
    }
}

fn clip(par: &dyn Parallel, clip: Clip, x: &mut [f32]) {
    for_each_chunk_mut(par, x, 1 << 14, |_, x| {
        for x in x {
            *x = clip.apply(*x);
        }
    });
}

/// `out = rms(x) * weight`, row by row.
fn norm(par: &dyn Parallel, x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
    let cols = weight.len();
    for_each_chunk_mut(par, out, ROWS * cols, |i, out| {
        let x = &x[i * ROWS * cols..][..out.len()];
        for (x, out) in x.chunks_exact(cols).zip(out.chunks_exact_mut(cols)) {
            rms_norm(x, Some(weight), eps, out);
        }
    });
}

/// `h += rms(x) * weight`, row by row.
fn add_norm(par: &dyn Parallel, x: &[f32], weight: &[f32], eps: f32, h: &mut [f32]) {
    let cols = weight.len();
    for_each_chunk_mut(par, h, ROWS * cols, |i, h| {
        let x = &x[i * ROWS * cols..][..h.len()];
        let mut normed = vec![0.0; cols];
        for (x, h) in x.chunks_exact(cols).zip(h.chunks_exact_mut(cols)) {
            rms_norm(x, Some(weight), eps, &mut normed);
            for (h, x) in h.iter_mut().zip(&normed) {
                *h += x;
            }
        }
    });
}

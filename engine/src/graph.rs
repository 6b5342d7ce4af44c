//! What the graphs of all architectures share: the trait they fill, and the operations between the fused ones.

use crate::batch::{Batch, Piece, Want};
use crate::error::{Error, ErrorKind, Result};
use crate::gpu::Context;
use crate::inspect::Inspection;
use crate::memory::{Layout, Memory};
use crate::store::{Store, Weight};
use skep_attention::{KvType, Position};
use skep_quant::{Activations, Forms, Parallel, Precision, Product, decode, for_each_chunk_mut, matmul, vec};
use std::ops::Range;

/// A model of one architecture: its sizes, the roles of its tensors, and the buffers of its steps.
pub(crate) trait Graph: Send {
    /// What the sequences of the model leave behind.
    fn layout(&self) -> Layout;

    /// Runs the batch; its logits are `[batch.n_logits(), n_vocab]` then. Room in `memory` must have been reserved.
    fn forward(&mut self, step: &Step<'_>, memory: &mut Memory, batch: &Batch<'_>) -> Result<()>;

    /// The logits of the last step.
    fn logits(&self) -> &[f32];

    /// The same model on a device, which keeps the weights, keys, values and states; `progress` is told the bytes of every
    /// piece that has been sent.
    fn onto(
        self: Box<Self>,
        _gpu: &Context,
        _store: &Store,
        _par: &dyn Parallel,
        _room: Room,
        _progress: &mut dyn FnMut(u64),
    ) -> Result<Box<dyn Graph>> {
        Err(Error::new(ErrorKind::Device, "models of this architecture run on the CPU only"))
    }
}

/// What a model on a device makes room for.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Room {
    /// Sequences that can be open at once.
    pub(crate) sequences: usize,
    /// Tokens of each.
    pub(crate) context: usize,
    /// Type of the KV cache.
    pub(crate) kv: KvType,
}

/// What was read of a model: its facts, its graph, and which tensors of the file the graph uses.
pub(crate) struct Reading {
    pub(crate) facts: Facts,
    pub(crate) graph: Box<dyn Graph>,
    pub(crate) used: Vec<bool>,
}

/// Sizes that the runner needs, whatever the architecture.
#[derive(Debug, Clone)]
pub(crate) struct Facts {
    pub(crate) hidden: usize,
    pub(crate) vocab: usize,
    /// Tokens that the model was made for.
    pub(crate) context: usize,
    /// Whether rows of a picture may stand in place of tokens.
    pub(crate) images: bool,
    pub(crate) inspection: Inspection,
}

/// What a step computes with.
pub(crate) struct Step<'s> {
    pub(crate) par: &'s dyn Parallel,
    pub(crate) store: &'s Store,
    pub(crate) precision: Precision,
}

impl Step<'_> {
    /// The token embeddings `[n_tokens, hidden]`, times `scale`; rows of images stand as they are.
    pub(crate) fn embed(
        &self,
        table: &Weight,
        scale: f32,
        batch: &Batch<'_>,
        out: &mut Vec<f32>,
    ) -> Result<()> {
        let (table, hidden) = (self.store.matrix(table), table.cols);
        resize(out, batch.n_tokens() * hidden);
        for (piece, rows) in rows_of(batch) {
            let out = &mut out[rows.start * hidden..rows.end * hidden];
            for (&token, row) in piece.tokens.iter().zip(out.chunks_exact_mut(hidden)) {
                decode(table.ty(), table.row(token as usize), row).map_err(Error::model)?;
                if scale != 1.0 {
                    row.iter_mut().for_each(|value| *value *= scale);
                }
            }
            for image in piece.images {
                out[image.at * hidden..][..image.rows.len()].copy_from_slice(image.rows);
            }
        }
        Ok(())
    }

    /// `outs[i] = weights[i] · rows`, with the rows quantised in `acts`, once for all.
    pub(crate) fn project(
        &self,
        weights: &[&Weight],
        rows: &[f32],
        acts: &mut Activations,
        outs: &mut [Vec<f32>],
    ) {
        let Some(first) = weights.first() else { return };
        acts.fill(self.par, rows, first.cols, self.forms(weights));
        self.products(weights, acts, outs);
    }

    /// `out = weight · rows`, with the rows quantised in `acts`.
    pub(crate) fn product(&self, weight: &Weight, rows: &[f32], acts: &mut Activations, out: &mut [f32]) {
        acts.fill(self.par, rows, weight.cols, self.forms(&[weight]));
        matmul(self.par, &mut [Product { weight: self.store.matrix(weight), out }], acts, self.precision);
    }

    /// `outs[i] = weights[i] · acts`.
    pub(crate) fn products(&self, weights: &[&Weight], acts: &Activations, outs: &mut [Vec<f32>]) {
        let mut products: Vec<Product<'_>> = weights
            .iter()
            .zip(outs)
            .map(|(weight, out)| {
                resize(out, acts.n_tokens() * weight.rows);
                Product { weight: self.store.matrix(weight), out }
            })
            .collect();
        matmul(self.par, &mut products, acts, self.precision);
    }

    /// The forms of activations that these weights need.
    pub(crate) fn forms(&self, weights: &[&Weight]) -> Forms {
        weights.iter().fold(Forms::default(), |forms, weight| forms | Forms::of(weight.ty, self.precision))
    }

    /// Logits of the rows of `x` that the batch wants: the output norm, then the head.
    pub(crate) fn head(
        &self,
        batch: &Batch<'_>,
        x: &[f32],
        norm: (&[f32], f32),
        head: &Weight,
        buffers: &mut HeadBuffers,
    ) {
        let (hidden, HeadBuffers { rows: wanted, normed, acts, logits }) = (head.cols, buffers);
        wanted.clear();
        for (piece, rows) in rows_of(batch) {
            let kept = match piece.want {
                Want::All => rows,
                Want::Last => rows.end.saturating_sub(1).max(rows.start)..rows.end,
                Want::Nothing => continue,
            };
            wanted.extend_from_slice(&x[kept.start * hidden..kept.end * hidden]);
        }
        resize(logits, batch.n_logits() * head.rows);
        if wanted.is_empty() {
            return;
        }
        resize(normed, wanted.len());
        norm_rows(self.par, wanted, norm.0, norm.1, normed);
        self.product(head, normed, acts, logits);
    }
}

/// Buffers of the head.
#[derive(Default)]
pub(crate) struct HeadBuffers {
    rows: Vec<f32>,
    normed: Vec<f32>,
    acts: Activations,
    /// `[batch.n_logits(), n_vocab]`
    pub(crate) logits: Vec<f32>,
}

/// The pieces of a batch with their rows.
pub(crate) fn rows_of<'b>(batch: &'b Batch<'_>) -> impl Iterator<Item = (&'b Piece<'b>, Range<usize>)> {
    batch.pieces().iter().scan(0, |start, piece| {
        let rows = *start..*start + piece.tokens.len();
        *start = rows.end;
        Some((piece, rows))
    })
}

/// The positions of all rows: how many tokens of their sequence come before.
pub(crate) fn positions(memory: &Memory, batch: &Batch<'_>, out: &mut Vec<Position>) {
    out.clear();
    for piece in batch.pieces() {
        let start = memory.len(piece.sequence);
        out.extend((start..start + piece.tokens.len()).map(|at| Position::from(at as u32)));
    }
}

/// RMS normalisation of every row.
pub(crate) fn norm_rows(par: &dyn Parallel, x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
    let hidden = weight.len();
    for_each_chunk_mut(par, out, hidden, |token, row| {
        vec::rms_norm(&x[token * hidden..][..hidden], Some(weight), eps, row);
    });
}

/// `x += delta`.
pub(crate) fn add(par: &dyn Parallel, x: &mut [f32], delta: &[f32]) {
    const CHUNK: usize = 1 << 14;
    for_each_chunk_mut(par, x, CHUNK, |chunk, x| {
        vec::axpy(1.0, &delta[chunk * CHUNK..][..x.len()], x);
    });
}

/// Sets the length without keeping the contents; every element is written before it is read.
pub(crate) fn resize(buffer: &mut Vec<f32>, len: usize) {
    buffer.resize(len, 0.0);
}

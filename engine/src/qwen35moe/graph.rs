use super::weights::{GateUp, Layer, SharedExpert};
use super::{Config, Mixer, Weights};
use crate::batch::{Batch, Piece, Want};
use crate::error::{Error, ErrorKind, Result};
use crate::memory::Memory;
use crate::store::{Store, Weight};
use skep_attention::{Gate, Heads, Mask, Norm, Norms, Position, Projections, Queries, Rope};
use skep_gdn::Form;
use skep_moe_cache::cpu::{self as moe, Activation, Experts};
use skep_moe_cache::router;
use skep_quant::{Activations, Forms, Parallel, Precision, Product, decode, for_each_chunk_mut, matmul, vec};
use std::ops::Range;

/// Buffers of a step, reused from step to step.
pub(crate) struct Scratch {
    rope: Rope,
    heads: Heads,
    /// The residual stream `[n_tokens, hidden]`.
    x: Vec<f32>,
    normed: Vec<f32>,
    delta: Vec<f32>,
    mixed: Vec<f32>,
    wide: [Vec<f32>; 4],
    q: Vec<f32>,
    logits: Vec<f32>,
    acts: Activations,
    inner_acts: Activations,
    gdn: skep_gdn::Scratch,
    attention: skep_attention::Scratch,
    moe: moe::Scratch,
    routes: router::Routes,
    positions: Vec<Position>,
}

impl Scratch {
    pub(crate) fn new(config: &Config) -> Result<Self> {
        let model = |error: &dyn std::fmt::Display| Error::model(error);
        let rope = Rope::new(config.head_dim, config.rope_dims, config.rope_base)
            .and_then(|rope| rope.with_sections(config.rope_sections))
            .map_err(|error| model(&error))?;
        let scale = (config.head_dim as f32).sqrt().recip();
        let heads = Heads::new(config.q_heads, config.kv_heads, config.head_dim, config.head_dim, scale)
            .map_err(|error| model(&error))?;
        Ok(Self {
            rope,
            heads,
            x: Vec::new(),
            normed: Vec::new(),
            delta: Vec::new(),
            mixed: Vec::new(),
            wide: Default::default(),
            q: Vec::new(),
            logits: Vec::new(),
            acts: Activations::new(),
            inner_acts: Activations::new(),
            gdn: skep_gdn::Scratch::new(),
            attention: skep_attention::Scratch::new(),
            moe: moe::Scratch::new(),
            routes: router::Routes::new(),
            positions: Vec::new(),
        })
    }

    /// The logits of the last step, `[batch.n_logits(), vocab]`.
    pub(crate) fn logits(&self) -> &[f32] {
        &self.logits
    }
}

/// What a step reads: the model and how it computes.
pub(crate) struct Model<'m> {
    pub(crate) config: &'m Config,
    pub(crate) weights: &'m Weights,
    pub(crate) store: &'m Store,
    pub(crate) precision: Precision,
}

impl Model<'_> {
    /// Runs the batch and leaves its logits in `scratch`. Room in `memory` must have been reserved.
    pub(crate) fn forward(
        &self,
        par: &dyn Parallel,
        memory: &mut Memory,
        batch: &Batch<'_>,
        scratch: &mut Scratch,
    ) -> Result<()> {
        let n = batch.n_tokens();
        let hidden = self.config.hidden;
        self.embed(batch, scratch)?;
        scratch.positions.clear();
        for piece in batch.pieces() {
            let start = memory.len(piece.sequence);
            scratch.positions.extend((start..start + piece.tokens.len()).map(|at| Position::from(at as u32)));
        }
        resize(&mut scratch.normed, n * hidden);
        resize(&mut scratch.delta, n * hidden);
        let (mut recurrent, mut full) = (0, 0);
        for layer in &self.weights.layers {
            norm_rows(par, &scratch.x, &layer.mixer_norm, self.config.eps, &mut scratch.normed);
            match &layer.mixer {
                Mixer::Recurrent { .. } => {
                    self.recurrent(par, layer, recurrent, memory, batch, scratch);
                    recurrent += 1;
                }
                Mixer::Attention { .. } => {
                    self.attention(par, layer, full, memory, batch, scratch)?;
                    full += 1;
                }
            }
            add(par, &mut scratch.x, &scratch.delta);
            norm_rows(par, &scratch.x, &layer.moe_norm, self.config.eps, &mut scratch.normed);
            self.feed_forward(par, layer, scratch)?;
            add(par, &mut scratch.x, &scratch.delta);
        }
        for piece in batch.pieces() {
            memory.sequences_mut()[piece.sequence.0].len += piece.tokens.len();
        }
        self.head(par, batch, scratch);
        Ok(())
    }

    fn embed(&self, batch: &Batch<'_>, scratch: &mut Scratch) -> Result<()> {
        let table = self.store.matrix(&self.weights.embedding);
        let hidden = self.config.hidden;
        resize(&mut scratch.x, batch.n_tokens() * hidden);
        let tokens = batch.pieces().iter().flat_map(|piece| piece.tokens);
        for (&token, row) in tokens.zip(scratch.x.chunks_exact_mut(hidden)) {
            decode(table.ty(), table.row(token as usize), row).map_err(Error::model)?;
        }
        Ok(())
    }

    fn recurrent(
        &self,
        par: &dyn Parallel,
        layer: &Layer,
        index: usize,
        memory: &mut Memory,
        batch: &Batch<'_>,
        scratch: &mut Scratch,
    ) {
        let Mixer::Recurrent { qkv, z, beta, alpha, conv, a, dt_bias, norm, out } = &layer.mixer else {
            return;
        };
        let shape = &self.config.gdn;
        let inputs = [qkv, z, beta, alpha];
        self.project(par, &inputs, scratch);
        resize(&mut scratch.mixed, batch.n_tokens() * shape.value_dim());

        let weights = skep_gdn::Weights::new(shape, conv, a, dt_bias, norm, self.config.eps)
            .expect("lengths and decay rates were checked when the tensors were claimed");
        let [qkv, z, beta, alpha] = &scratch.wide;
        let input = skep_gdn::Input { qkv, z, beta, alpha };
        let mut rows: Vec<Option<Range<usize>>> = vec![None; memory.sequences_mut().len()];
        for (piece, range) in rows_of(batch) {
            rows[piece.sequence.0] = Some(range);
        }
        let mut spans: Vec<skep_gdn::Span<'_>> = memory
            .sequences_mut()
            .iter_mut()
            .zip(rows)
            .filter_map(|(sequence, rows)| {
                Some(skep_gdn::Span { tokens: rows?, state: &mut sequence.states[index] })
            })
            .collect();
        spans.sort_by_key(|span| span.tokens.start);
        let form = match self.precision {
            Precision::Exact => Form::Recurrent,
            _ => Form::Auto,
        };
        skep_gdn::mix(par, shape, &weights, &mut spans, &input, &mut scratch.gdn, form, &mut scratch.mixed);
        self.product(par, out, &scratch.mixed, &mut scratch.inner_acts, &mut scratch.delta);
    }

    fn attention(
        &self,
        par: &dyn Parallel,
        layer: &Layer,
        index: usize,
        memory: &mut Memory,
        batch: &Batch<'_>,
        scratch: &mut Scratch,
    ) -> Result<()> {
        let Mixer::Attention { q, k, v, q_norm, k_norm, out } = &layer.mixer else { return Ok(()) };
        self.project(par, &[q, k, v], scratch);
        let n = batch.n_tokens();
        let width = self.config.q_heads * self.config.head_dim;
        resize(&mut scratch.q, n * width);
        resize(&mut scratch.mixed, n * width);

        let cache_error = |error: skep_attention::Error| Error::new(ErrorKind::Device, error.to_string());
        let mut caches = std::mem::take(&mut memory.caches);
        let spans: Vec<skep_attention::Span<'_>> = rows_of(batch)
            .map(|(piece, tokens)| {
                let sequence = memory.sequence(piece.sequence);
                skep_attention::Span { tokens, pages: &sequence.pages, start: sequence.len, together: &[] }
            })
            .collect();
        let [q_gate, k, v, _] = &scratch.wide;
        let cache = &mut caches[index];
        let projections = Projections { q: Queries::GateInterleaved(q_gate), k, v };
        let (q, k) = (Norm::Weight(q_norm), Norm::Weight(k_norm));
        let norms = Norms { q, k, v: Norm::None, eps: self.config.eps };
        let done = skep_attention::prepare(
            par,
            &scratch.heads,
            &projections,
            &norms,
            Some(&scratch.rope),
            &scratch.positions,
            &spans,
            cache,
            &mut scratch.attention,
            &mut scratch.q,
        )
        .and_then(|()| {
            skep_attention::attend(
                par,
                &scratch.heads,
                &scratch.q,
                Some(Gate::Interleaved(q_gate)),
                &spans,
                cache,
                Mask::Causal,
                &mut scratch.attention,
                &mut scratch.mixed,
            )
        });
        drop(spans);
        memory.caches = caches;
        done.map_err(cache_error)?;
        self.product(par, out, &scratch.mixed, &mut scratch.inner_acts, &mut scratch.delta);
        Ok(())
    }

    /// Mixture of experts with one shared expert, over `scratch.normed` into `scratch.delta`.
    fn feed_forward(&self, par: &dyn Parallel, layer: &Layer, scratch: &mut Scratch) -> Result<()> {
        let SharedExpert { gate, up, down } = &layer.shared;
        let experts = match &layer.experts.gate_up {
            GateUp::Fused(both) => Experts::fused(
                self.store.bank(both)?,
                self.store.bank(&layer.experts.down)?,
                Activation::Silu,
            ),
            GateUp::Split { gate, up } => Experts::new(
                self.store.bank(gate)?,
                self.store.bank(up)?,
                self.store.bank(&layer.experts.down)?,
                Activation::Silu,
            ),
        };
        let experts = experts.map_err(Error::model)?;
        let dense = [&layer.router, &layer.shared_gate, gate, up];
        let forms = self.forms(&dense) | experts.forms(self.precision);
        scratch.acts.fill(par, &scratch.normed, self.config.hidden, forms);
        self.products(par, &dense, &scratch.acts, &mut scratch.wide);

        let [logits, opening, gated, upped] = &scratch.wide;
        let width = gate.rows;
        resize(&mut scratch.mixed, gated.len());
        for_each_chunk_mut(par, &mut scratch.mixed, width, |token, row| {
            let tokens = token * width..(token + 1) * width;
            vec::silu_mul(&gated[tokens.clone()], &upped[tokens], row);
        });
        self.product(par, down, &scratch.mixed, &mut scratch.inner_acts, &mut scratch.delta);
        for_each_chunk_mut(par, &mut scratch.delta, self.config.hidden, |token, row| {
            let open = vec::sigmoid(opening[token]);
            row.iter_mut().for_each(|value| *value *= open);
        });

        router::route(
            logits,
            self.config.experts,
            self.config.experts_used,
            &router::Options::default(),
            &mut scratch.routes,
        )
        .map_err(|error| Error::new(ErrorKind::NotFinite, error.to_string()))?;
        moe::experts(
            par,
            &experts,
            &scratch.acts,
            &scratch.routes,
            self.precision,
            &mut scratch.moe,
            &mut scratch.delta,
        );
        Ok(())
    }

    /// Logits of the rows that the batch wants.
    fn head(&self, par: &dyn Parallel, batch: &Batch<'_>, scratch: &mut Scratch) {
        let hidden = self.config.hidden;
        scratch.delta.clear();
        for (piece, rows) in rows_of(batch) {
            let wanted = match piece.want {
                Want::All => rows,
                Want::Last => rows.end.saturating_sub(1).max(rows.start)..rows.end,
                Want::Nothing => continue,
            };
            scratch.delta.extend_from_slice(&scratch.x[wanted.start * hidden..wanted.end * hidden]);
        }
        resize(&mut scratch.logits, batch.n_logits() * self.config.vocab);
        if scratch.delta.is_empty() {
            return;
        }
        resize(&mut scratch.normed, scratch.delta.len());
        norm_rows(par, &scratch.delta, &self.weights.output_norm, self.config.eps, &mut scratch.normed);
        self.product(par, &self.weights.head, &scratch.normed, &mut scratch.acts, &mut scratch.logits);
    }

    /// `scratch.wide[i] = weights[i] · normed`, with the activations quantised once.
    fn project(&self, par: &dyn Parallel, weights: &[&Weight], scratch: &mut Scratch) {
        scratch.acts.fill(par, &scratch.normed, self.config.hidden, self.forms(weights));
        self.products(par, weights, &scratch.acts, &mut scratch.wide);
    }

    /// `out = weight · rows`, with `rows` quantised in `acts`.
    fn product(
        &self,
        par: &dyn Parallel,
        weight: &Weight,
        rows: &[f32],
        acts: &mut Activations,
        out: &mut [f32],
    ) {
        acts.fill(par, rows, weight.cols, self.forms(&[weight]));
        matmul(par, &mut [Product { weight: self.store.matrix(weight), out }], acts, self.precision);
    }

    fn products(&self, par: &dyn Parallel, weights: &[&Weight], acts: &Activations, outs: &mut [Vec<f32>]) {
        let mut products: Vec<Product<'_>> = weights
            .iter()
            .zip(outs)
            .map(|(weight, out)| {
                resize(out, acts.n_tokens() * weight.rows);
                Product { weight: self.store.matrix(weight), out }
            })
            .collect();
        matmul(par, &mut products, acts, self.precision);
    }

    fn forms(&self, weights: &[&Weight]) -> Forms {
        weights.iter().fold(Forms::default(), |forms, weight| forms | Forms::of(weight.ty, self.precision))
    }
}

/// The pieces of a batch with their rows.
fn rows_of<'b>(batch: &'b Batch<'_>) -> impl Iterator<Item = (&'b Piece<'b>, Range<usize>)> {
    batch.pieces().iter().scan(0, |start, piece| {
        let rows = *start..*start + piece.tokens.len();
        *start = rows.end;
        Some((piece, rows))
    })
}

fn norm_rows(par: &dyn Parallel, x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
    let hidden = weight.len();
    for_each_chunk_mut(par, out, hidden, |token, row| {
        vec::rms_norm(&x[token * hidden..][..hidden], Some(weight), eps, row);
    });
}

fn add(par: &dyn Parallel, x: &mut [f32], delta: &[f32]) {
    const CHUNK: usize = 1 << 14;
    for_each_chunk_mut(par, x, CHUNK, |chunk, x| {
        vec::axpy(1.0, &delta[chunk * CHUNK..][..x.len()], x);
    });
}

/// Sets the length without keeping the contents; every element is written before it is read.
fn resize(buffer: &mut Vec<f32>, len: usize) {
    buffer.resize(len, 0.0);
}

use super::weights::{Layer, SharedExpert};
use super::{Config, Mixer, Weights};
use crate::batch::Batch;
use crate::error::{Error, ErrorKind, Result};
use crate::gpu::{Context, Loader};
use crate::graph::{Graph, HeadBuffers, Room, Step, add, norm_rows, positions, resize, rows_of};
use crate::memory::{KvShape, Layout, Memory};
use crate::store::Store;
use skep_attention::{Gate, Heads, Mask, Norm, Norms, Position, Projections, Queries, Rope};
use skep_gdn::Form;
use skep_moe_cache::cpu::{self as moe, Activation};
use skep_moe_cache::router;
use skep_quant::{Activations, Parallel, Precision, for_each_chunk_mut, vec};
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
    head: HeadBuffers,
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
            head: HeadBuffers::default(),
            acts: Activations::new(),
            inner_acts: Activations::new(),
            gdn: skep_gdn::Scratch::new(),
            attention: skep_attention::Scratch::new(),
            moe: moe::Scratch::new(),
            routes: router::Routes::new(),
            positions: Vec::new(),
        })
    }
}

/// A model with its buffers.
pub(crate) struct Model {
    config: Config,
    weights: Weights,
    scratch: Scratch,
}

impl Model {
    pub(crate) fn new(config: Config, weights: Weights) -> Result<Self> {
        let scratch = Scratch::new(&config)?;
        Ok(Self { config, weights, scratch })
    }
}

impl Graph for Model {
    fn layout(&self) -> Layout {
        let Config { kv_heads: heads, head_dim: dim, .. } = self.config;
        let recurrent = self.config.recurrent.iter().filter(|&&kind| kind).count();
        Layout {
            full: vec![KvShape { heads, dim }; self.config.layers - recurrent],
            recurrent: vec![self.config.gdn; recurrent],
            ..Layout::default()
        }
    }

    fn forward(&mut self, step: &Step<'_>, memory: &mut Memory, batch: &Batch<'_>) -> Result<()> {
        let Self { config, weights, scratch } = self;
        Pass { config, weights, step }.forward(memory, batch, scratch)
    }

    fn logits(&self) -> &[f32] {
        &self.scratch.head.logits
    }

    fn onto(
        self: Box<Self>,
        gpu: &Context,
        store: &Store,
        par: &dyn Parallel,
        room: Room,
        progress: &mut dyn FnMut(u64),
    ) -> Result<Box<dyn Graph>> {
        let loader = Loader::new(gpu, store, par, progress)?;
        let layout = self.layout();
        Ok(Box::new(super::device::Model::new(&self.config, &self.weights, layout, loader, room)?))
    }
}

/// One run through the layers.
struct Pass<'m> {
    config: &'m Config,
    weights: &'m Weights,
    step: &'m Step<'m>,
}

impl Pass<'_> {
    fn forward(&self, memory: &mut Memory, batch: &Batch<'_>, scratch: &mut Scratch) -> Result<()> {
        let (n, hidden, par) = (batch.n_tokens(), self.config.hidden, self.step.par);
        self.step.embed(&self.weights.embedding, 1.0, batch, &mut scratch.x)?;
        positions(memory, batch, &mut scratch.positions);
        resize(&mut scratch.normed, n * hidden);
        resize(&mut scratch.delta, n * hidden);
        let (mut recurrent, mut full) = (0, 0);
        for layer in &self.weights.layers {
            norm_rows(par, &scratch.x, &layer.mixer_norm, self.config.eps, &mut scratch.normed);
            match &layer.mixer {
                Mixer::Recurrent { .. } => {
                    self.recurrent(layer, recurrent, memory, batch, scratch);
                    recurrent += 1;
                }
                Mixer::Attention { .. } => {
                    self.attention(layer, full, memory, batch, scratch)?;
                    full += 1;
                }
            }
            add(par, &mut scratch.x, &scratch.delta);
            norm_rows(par, &scratch.x, &layer.moe_norm, self.config.eps, &mut scratch.normed);
            self.feed_forward(layer, scratch)?;
            add(par, &mut scratch.x, &scratch.delta);
        }
        memory.advance(batch);
        let norm = (self.weights.output_norm.as_slice(), self.config.eps);
        self.step.head(batch, &scratch.x, norm, &self.weights.head, &mut scratch.head);
        Ok(())
    }

    fn recurrent(
        &self,
        layer: &Layer,
        index: usize,
        memory: &mut Memory,
        batch: &Batch<'_>,
        scratch: &mut Scratch,
    ) {
        let Mixer::Recurrent { qkv, z, beta, alpha, conv, a, dt_bias, norm, out } = &layer.mixer else {
            return;
        };
        let (shape, par) = (&self.config.gdn, self.step.par);
        let inputs = [qkv, z, beta, alpha];
        self.step.project(&inputs, &scratch.normed, &mut scratch.acts, &mut scratch.wide);
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
        let form = match self.step.precision {
            Precision::Exact => Form::Recurrent,
            _ => Form::Auto,
        };
        skep_gdn::mix(par, shape, &weights, &mut spans, &input, &mut scratch.gdn, form, &mut scratch.mixed);
        self.step.product(out, &scratch.mixed, &mut scratch.inner_acts, &mut scratch.delta);
    }

    fn attention(
        &self,
        layer: &Layer,
        index: usize,
        memory: &mut Memory,
        batch: &Batch<'_>,
        scratch: &mut Scratch,
    ) -> Result<()> {
        let Mixer::Attention { q, k, v, q_norm, k_norm, out } = &layer.mixer else { return Ok(()) };
        let par = self.step.par;
        self.step.project(&[q, k, v], &scratch.normed, &mut scratch.acts, &mut scratch.wide);
        let n = batch.n_tokens();
        let width = self.config.q_heads * self.config.head_dim;
        resize(&mut scratch.q, n * width);
        resize(&mut scratch.mixed, n * width);

        let cache_error = |error: skep_attention::Error| Error::new(ErrorKind::Device, error.to_string());
        let mut caches = std::mem::take(&mut memory.full.caches);
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
        memory.full.caches = caches;
        done.map_err(cache_error)?;
        self.step.product(out, &scratch.mixed, &mut scratch.inner_acts, &mut scratch.delta);
        Ok(())
    }

    /// Mixture of experts with one shared expert, over `scratch.normed` into `scratch.delta`.
    fn feed_forward(&self, layer: &Layer, scratch: &mut Scratch) -> Result<()> {
        let (step, par) = (self.step, self.step.par);
        let SharedExpert { gate, up, down } = &layer.shared;
        let experts = layer.experts.open(step.store, Activation::Silu)?;
        let dense = [&layer.router, &layer.shared_gate, gate, up];
        let forms = step.forms(&dense) | experts.forms(step.precision);
        scratch.acts.fill(par, &scratch.normed, self.config.hidden, forms);
        step.products(&dense, &scratch.acts, &mut scratch.wide);

        let [logits, opening, gated, upped] = &scratch.wide;
        let width = gate.rows;
        resize(&mut scratch.mixed, gated.len());
        for_each_chunk_mut(par, &mut scratch.mixed, width, |token, row| {
            let tokens = token * width..(token + 1) * width;
            vec::silu_mul(&gated[tokens.clone()], &upped[tokens], row);
        });
        step.product(down, &scratch.mixed, &mut scratch.inner_acts, &mut scratch.delta);
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
            step.precision,
            &mut scratch.moe,
            &mut scratch.delta,
        );
        Ok(())
    }
}

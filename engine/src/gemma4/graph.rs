use super::config::{Config, LayerShape, RopeShape};
use super::weights::{Layer, Moe, PerLayer, PerLayerInput, Weights};
use crate::batch::Batch;
use crate::error::{Error, ErrorKind, Result};
use crate::graph::{Graph, HeadBuffers, Step, add, norm_rows, positions, resize, rows_of};
use crate::memory::{KvShape, Layout, Memory};
use skep_attention::{Heads, Mask, Norm, Norms, Position, Projections, Queries, Rope, Span};
use skep_moe_cache::cpu::{self as moe, Activation};
use skep_moe_cache::router;
use skep_quant::{Activations, Parallel, decode, for_each_chunk_mut, vec};
use std::ops::Range;

/// A model with its buffers.
pub(crate) struct Model {
    config: Config,
    weights: Weights,
    full_rope: Rope,
    sliding_rope: Rope,
    /// Heads of every layer.
    heads: Vec<Heads>,
    scratch: Scratch,
}

/// Buffers of a step, reused from step to step.
#[derive(Default)]
struct Scratch {
    /// The residual stream `[n_tokens, hidden]`.
    x: Vec<f32>,
    normed: Vec<f32>,
    /// Outputs of attention, of the dense branch and of a layer's own embedding, `[n_tokens, hidden]`.
    delta: Vec<f32>,
    /// Outputs of the experts, `[n_tokens, hidden]`.
    routed: Vec<f32>,
    mixed: Vec<f32>,
    wide: [Vec<f32>; 3],
    q: Vec<f32>,
    /// The layers' own embeddings, `[n_tokens, layers, size]`.
    per_layer: Vec<f32>,
    head: HeadBuffers,
    acts: Activations,
    inner_acts: Activations,
    attention: skep_attention::Scratch,
    moe: moe::Scratch,
    routes: router::Routes,
    positions: Vec<Position>,
    /// Images of the batch as ranges of token indices, piece after piece.
    images: Vec<Range<usize>>,
}

impl Model {
    pub(crate) fn new(config: Config, weights: Weights) -> Result<Self> {
        let rope = |shape: RopeShape| Rope::new(shape.head_dim, shape.dims, shape.base);
        let mut full_rope = rope(config.full_rope).map_err(Error::model)?;
        if !weights.rope_divisors.is_empty() {
            full_rope = full_rope
                .with_divisors(&weights.rope_divisors)
                .map_err(|error| Error::model(format_args!("tensor rope_freqs.weight: {error}")))?;
        }
        let sliding_rope = rope(config.sliding_rope).map_err(Error::model)?;
        // Queries and keys are normalised, so that their product needs no scale.
        let heads = |layer: &LayerShape| {
            Heads::new(layer.q_heads, layer.kv_heads, layer.head_dim, layer.head_dim, 1.0)
        };
        let heads = config.layers.iter().map(heads).collect::<Result<_, _>>().map_err(Error::model)?;
        Ok(Self { config, weights, full_rope, sliding_rope, heads, scratch: Scratch::default() })
    }
}

impl Graph for Model {
    fn layout(&self) -> Layout {
        let shapes = |sliding: bool| {
            let owners = self.config.layers.iter().filter(|layer| layer.owns_cache);
            let shape = |layer: &LayerShape| KvShape { heads: layer.kv_heads, dim: layer.head_dim };
            owners.filter(|layer| layer.sliding == sliding).map(shape).collect()
        };
        Layout {
            full: shapes(false),
            sliding: shapes(true),
            window: self.config.window,
            recurrent: Vec::new(),
        }
    }

    fn forward(&mut self, step: &Step<'_>, memory: &mut Memory, batch: &Batch<'_>) -> Result<()> {
        let mut scratch = std::mem::take(&mut self.scratch);
        let done = Pass { model: self, step, batch }.forward(memory, &mut scratch);
        self.scratch = scratch;
        done
    }

    fn logits(&self) -> &[f32] {
        &self.scratch.head.logits
    }
}

/// One run through the layers.
struct Pass<'m> {
    model: &'m Model,
    step: &'m Step<'m>,
    batch: &'m Batch<'m>,
}

impl Pass<'_> {
    fn forward(&self, memory: &mut Memory, scratch: &mut Scratch) -> Result<()> {
        let Model { config, weights, .. } = self.model;
        let (n, hidden, par) = (self.batch.n_tokens(), config.hidden, self.step.par);
        self.step.embed(&weights.embedding, (hidden as f32).sqrt(), self.batch, &mut scratch.x)?;
        if let Some(per_layer) = &weights.per_layer {
            self.per_layer_embeddings(per_layer, scratch)?;
        }
        positions(memory, self.batch, &mut scratch.positions);
        scratch.images.clear();
        for piece in self.batch.pieces() {
            let start = memory.len(piece.sequence);
            let range = |at: usize, len: usize| start + at..start + at + len / hidden;
            scratch.images.extend(piece.images.iter().map(|image| range(image.at, image.rows.len())));
        }
        for buffer in [&mut scratch.normed, &mut scratch.delta] {
            resize(buffer, n * hidden);
        }
        for (index, layer) in weights.layers.iter().enumerate() {
            norm_rows(par, &scratch.x, &layer.attn_norm, config.eps, &mut scratch.normed);
            self.attention(layer, index, memory, scratch)?;
            norm_rows(par, &scratch.delta, &layer.post_attention_norm, config.eps, &mut scratch.normed);
            add(par, &mut scratch.x, &scratch.normed);
            self.dense(layer, scratch);
            if let Some(moe) = &layer.moe {
                self.experts(moe, scratch)?;
                self.join(moe, scratch);
            }
            norm_rows(par, &scratch.delta, &layer.post_ffn_norm, config.eps, &mut scratch.normed);
            match &layer.per_layer {
                Some(input) => {
                    add(par, &mut scratch.x, &scratch.normed);
                    self.per_layer_input(input, index, scratch);
                    norm_rows(par, &scratch.delta, &input.post_norm, config.eps, &mut scratch.normed);
                    add_scaled(par, &scratch.normed, layer.output_scale, &mut scratch.x);
                }
                None => add_scaled(par, &scratch.normed, layer.output_scale, &mut scratch.x),
            }
        }
        memory.advance(self.batch);
        let norm = (weights.output_norm.as_slice(), config.eps);
        self.step.head(self.batch, &scratch.x, norm, &weights.head, &mut scratch.head);
        if let Some(cap) = config.softcap {
            softcap(par, cap, &mut scratch.head.logits);
        }
        Ok(())
    }

    /// Attention over `scratch.normed` into `scratch.delta`.
    fn attention(
        &self,
        layer: &Layer,
        index: usize,
        memory: &mut Memory,
        scratch: &mut Scratch,
    ) -> Result<()> {
        let Model { config, .. } = self.model;
        let (shape, heads) = (&config.layers[index], &self.model.heads[index]);
        let (par, n) = (self.step.par, self.batch.n_tokens());
        let rope = if shape.sliding { &self.model.sliding_rope } else { &self.model.full_rope };

        let mut inputs = vec![&layer.q];
        if let Some(kv) = &layer.kv {
            inputs.push(&kv.k);
            inputs.extend(&kv.v);
        }
        self.step.project(&inputs, &scratch.normed, &mut scratch.acts, &mut scratch.wide);
        let width = shape.q_heads * shape.head_dim;
        resize(&mut scratch.q, n * width);
        resize(&mut scratch.mixed, n * width);

        let pool = if shape.sliding { &mut memory.sliding } else { &mut memory.full };
        let mut caches = std::mem::take(&mut pool.caches);
        let see = shape.sliding && config.images_see_themselves();
        let mut images = scratch.images.as_slice();
        let spans: Vec<Span<'_>> = rows_of(self.batch)
            .map(|(piece, tokens)| {
                let sequence = memory.sequence(piece.sequence);
                let pages = if shape.sliding { &sequence.window_pages } else { &sequence.pages };
                let (own, rest) = images.split_at(piece.images.len());
                images = rest;
                Span { tokens, pages, start: sequence.len, together: if see { own } else { &[] } }
            })
            .collect();
        let mask = if shape.sliding { Mask::Window(config.window) } else { Mask::Causal };
        let cache = &mut caches[shape.cache];
        let [q, k, v] = &scratch.wide;
        let prepared = match &layer.kv {
            Some(kv) => {
                let v = if kv.v.is_some() { v } else { k };
                let projections = Projections { q: Queries::Plain(q), k, v };
                let (q, k) = (Norm::Weight(&layer.q_norm), Norm::Weight(&kv.k_norm));
                skep_attention::prepare(
                    par,
                    heads,
                    &projections,
                    &Norms { q, k, v: Norm::Unit, eps: config.eps },
                    Some(rope),
                    &scratch.positions,
                    &spans,
                    cache,
                    &mut scratch.attention,
                    &mut scratch.q,
                )
            }
            None => {
                let norm = Norm::Weight(&layer.q_norm);
                let (q, positions) = (Queries::Plain(q), &scratch.positions);
                skep_attention::prepare_queries(
                    par,
                    heads,
                    q,
                    norm,
                    config.eps,
                    Some(rope),
                    positions,
                    &mut scratch.q,
                );
                Ok(())
            }
        };
        let done = prepared.and_then(|()| {
            skep_attention::attend(
                par,
                heads,
                &scratch.q,
                None,
                &spans,
                cache,
                mask,
                &mut scratch.attention,
                &mut scratch.mixed,
            )
        });
        drop(spans);
        let pool = if shape.sliding { &mut memory.sliding } else { &mut memory.full };
        pool.caches = caches;
        done.map_err(|error| Error::new(ErrorKind::Device, error.to_string()))?;
        self.step.product(&layer.out, &scratch.mixed, &mut scratch.inner_acts, &mut scratch.delta);
        Ok(())
    }

    /// The dense branch of `scratch.x` into `scratch.delta`.
    fn dense(&self, layer: &Layer, scratch: &mut Scratch) {
        let (step, par) = (self.step, self.step.par);
        norm_rows(par, &scratch.x, &layer.ffn_norm, self.model.config.eps, &mut scratch.normed);
        step.project(&[&layer.gate, &layer.up], &scratch.normed, &mut scratch.acts, &mut scratch.wide);
        let [gated, upped, _] = &scratch.wide;
        let width = layer.gate.rows;
        resize(&mut scratch.mixed, gated.len());
        for_each_chunk_mut(par, &mut scratch.mixed, width, |token, row| {
            let place = token * width..(token + 1) * width;
            Activation::GeluTanh.apply(&gated[place.clone()], &upped[place], row);
        });
        step.product(&layer.down, &scratch.mixed, &mut scratch.inner_acts, &mut scratch.delta);
    }

    /// The experts' branch of `scratch.x` into `scratch.routed`.
    fn experts(&self, moe: &Moe, scratch: &mut Scratch) -> Result<()> {
        let (step, par, config) = (self.step, self.step.par, &self.model.config);
        let Some(sizes) = config.moe else { return Ok(()) };
        norm_rows(par, &scratch.x, &moe.router_norm, config.eps, &mut scratch.normed);
        let [logits, ..] = &mut scratch.wide;
        resize(logits, self.batch.n_tokens() * sizes.experts);
        step.product(&moe.router, &scratch.normed, &mut scratch.acts, logits);
        let options = router::Options::default().with_expert_scale(&moe.expert_scale);
        router::route(logits, sizes.experts, sizes.used, &options, &mut scratch.routes)
            .map_err(|error| Error::new(ErrorKind::NotFinite, error.to_string()))?;

        let experts = moe.experts.open(step.store, Activation::GeluTanh)?;
        norm_rows(par, &scratch.x, &moe.norm, config.eps, &mut scratch.normed);
        scratch.acts.fill(par, &scratch.normed, config.hidden, experts.forms(step.precision));
        resize(&mut scratch.routed, scratch.x.len());
        scratch.routed.fill(0.0);
        moe::experts(
            par,
            &experts,
            &scratch.acts,
            &scratch.routes,
            step.precision,
            &mut scratch.moe,
            &mut scratch.routed,
        );
        Ok(())
    }

    /// The sum of both branches, each with its norm, in `scratch.delta`.
    fn join(&self, moe: &Moe, scratch: &mut Scratch) {
        let (par, eps) = (self.step.par, self.model.config.eps);
        let Scratch { delta, routed, normed, .. } = scratch;
        norm_rows(par, delta, &moe.post_dense_norm, eps, normed);
        norm_rows(par, routed, &moe.post_norm, eps, delta);
        add(par, delta, normed);
    }

    /// The embeddings that every layer takes in, from the tokens and from the residual stream at its beginning.
    fn per_layer_embeddings(&self, weights: &PerLayer, scratch: &mut Scratch) -> Result<()> {
        let (step, config) = (self.step, &self.model.config);
        let table = step.store.matrix(&weights.embedding);
        let (all, size) = (table.cols(), weights.norm.len());
        let (scale, projection_scale) = ((size as f32).sqrt(), (config.hidden as f32).sqrt().recip());
        let [projected, ..] = &mut scratch.wide;
        resize(projected, self.batch.n_tokens() * all);
        step.product(&weights.projection, &scratch.x, &mut scratch.acts, projected);
        resize(&mut scratch.per_layer, projected.len());
        let mut own = vec![0.0; all];
        for (piece, rows) in rows_of(self.batch) {
            for (index, &token) in piece.tokens.iter().enumerate() {
                let in_image = |image: &crate::batch::ImageRows<'_>| {
                    (image.at..image.at + image.rows.len() / config.hidden).contains(&index)
                };
                // Soft tokens of images have the embedding of the padding token.
                let token = if piece.images.iter().any(in_image) { 0 } else { token };
                decode(table.ty(), table.row(token as usize), &mut own).map_err(Error::model)?;
                let place = (rows.start + index) * all..(rows.start + index + 1) * all;
                let projected = &mut projected[place.clone()];
                projected.iter_mut().for_each(|value| *value *= projection_scale);
                let out = &mut scratch.per_layer[place];
                for ((out, projected), own) in
                    out.chunks_exact_mut(size).zip(projected.chunks_exact(size)).zip(own.chunks_exact(size))
                {
                    vec::rms_norm(projected, Some(&weights.norm), config.eps, out);
                    for (out, own) in out.iter_mut().zip(own) {
                        *out = (*out + own * scale) * std::f32::consts::FRAC_1_SQRT_2;
                    }
                }
            }
        }
        Ok(())
    }

    /// What `scratch.x` lets through of the layer's own embedding, in `scratch.delta`.
    fn per_layer_input(&self, input: &PerLayerInput, index: usize, scratch: &mut Scratch) {
        let (step, par, config) = (self.step, self.step.par, &self.model.config);
        let (size, all) = (input.gate.rows, input.gate.rows * config.layers.len());
        let [gated, ..] = &mut scratch.wide;
        resize(gated, self.batch.n_tokens() * size);
        step.product(&input.gate, &scratch.x, &mut scratch.acts, gated);
        let [gated, ..] = &scratch.wide;
        resize(&mut scratch.mixed, gated.len());
        let own = &scratch.per_layer;
        for_each_chunk_mut(par, &mut scratch.mixed, size, |token, row| {
            let own = &own[token * all + index * size..][..size];
            Activation::GeluTanh.apply(&gated[token * size..][..size], own, row);
        });
        step.product(&input.projection, &scratch.mixed, &mut scratch.inner_acts, &mut scratch.delta);
    }
}

/// `x = (x + delta) · scale`
fn add_scaled(par: &dyn Parallel, delta: &[f32], scale: f32, x: &mut [f32]) {
    add(par, x, delta);
    if scale != 1.0 {
        const CHUNK: usize = 1 << 14;
        for_each_chunk_mut(par, x, CHUNK, |_, x| x.iter_mut().for_each(|value| *value *= scale));
    }
}

/// `cap · tanh(logit / cap)`.
fn softcap(par: &dyn Parallel, cap: f32, logits: &mut [f32]) {
    const CHUNK: usize = 1 << 12;
    for_each_chunk_mut(par, logits, CHUNK, |_, logits| {
        // tanh x = 2σ(2x) - 1.
        logits.iter_mut().for_each(|logit| *logit *= 2.0 / cap);
        vec::sigmoid_in_place(logits);
        logits.iter_mut().for_each(|logit| *logit = cap * (2.0 * *logit - 1.0));
    });
}

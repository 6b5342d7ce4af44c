//! The same layers on a device: every operation only enqueues.

use super::weights::{Layer, Weights};
use super::{Config, Mixer};
use crate::batch::Batch;
use crate::error::{Error, ErrorKind, Result};
use crate::experts::DeviceFeedForward;
use crate::gpu::{Context, Forward, HEAD_ROWS, Inputs, Loader, Run, Steps, attention_batch};
use crate::graph::{Graph, Room, Step};
use crate::memory::{Layout, Memory as Sequences};
use skep_attention::gpu::{Cache, Gate, Norm, Norms, Positions, Projections, Queries, RopeTable, Rows};
use skep_attention::{Heads, Mask, Rope};
use skep_gdn::gpu::{DeviceInput, DeviceScratch, DeviceSpans, DeviceWeights, States};
use skep_hal::gpu::{Memory, View};
use skep_moe_cache::cpu::Activation;
use skep_moe_cache::router;
use skep_quant::Type;
use skep_quant::gpu::{Acts, Matrix, MatrixView, Product};

/// Rows of one run over the layers.
const CAPACITY: usize = 2048;

/// A model on a device. Fields are dropped in order: recorded steps before the memory that they name.
pub(crate) struct Model {
    layout: Layout,
    steps: Steps,
    layers: Layers,
    gpu: Context,
}

/// Weights, memory and buffers.
struct Layers {
    config: Config,
    embedding: Matrix,
    /// `None` where the file ties it to the embedding.
    head: Option<Matrix>,
    output_norm: Memory,
    layers: Vec<DeviceLayer>,
    heads: Heads,
    rope: RopeTable,
    buffers: Buffers,
    slots: usize,
}

struct DeviceLayer {
    mixer_norm: Memory,
    mixer: DeviceMixer,
    moe_norm: Memory,
    router: Matrix,
    shared_gate: Matrix,
    /// Gate, up and down of the expert that every token passes.
    shared: [Matrix; 3],
    experts: DeviceFeedForward,
}

enum DeviceMixer {
    Recurrent {
        /// Projections to queries, keys and values, to the output gate, to the write strength and to the decay.
        inputs: [Matrix; 4],
        weights: Box<DeviceWeights>,
        states: States,
        out: Matrix,
    },
    Attention {
        /// Projections to queries with their gates, keys and values.
        inputs: [Matrix; 3],
        q_norm: Memory,
        k_norm: Memory,
        cache: Cache,
        out: Matrix,
    },
}

/// Buffers of a step.
struct Buffers {
    /// The residual stream, f32 `[CAPACITY, hidden]`.
    x: Memory,
    /// Rows whose logits are made, f32 `[HEAD_ROWS, hidden]`.
    wanted: Memory,
    logits: Memory,
    /// Normalised rows, and rows between two projections.
    acts: Acts,
    inner: Acts,
    head: Acts,
    /// Outputs of projections.
    wide: [Memory; 4],
    q: Memory,
    delta: Memory,
    gdn: DeviceScratch,
    attention: skep_attention::gpu::Scratch,
    moe: skep_moe_cache::gpu::DeviceScratch,
    routes: skep_moe_cache::gpu::DeviceRoutes,
}

impl Model {
    pub(crate) fn new(
        config: &Config,
        weights: &Weights,
        layout: Layout,
        mut loader: Loader<'_>,
        room: Room,
    ) -> Result<Self> {
        let gpu = loader.gpu.clone();
        if !skep_gdn::gpu::Kernels::supports(&config.gdn) {
            let (k, v) = (config.gdn.head_k_dim(), config.gdn.head_v_dim());
            let message = format!("recurrent heads of {k} and {v} numbers have no kernels on devices");
            return Err(Error::new(ErrorKind::Device, message));
        }
        let capacity = CAPACITY.min(room.context.next_multiple_of(64) * room.sequences).max(64);
        let scale = (config.head_dim as f32).sqrt().recip();
        let heads = Heads::new(config.q_heads, config.kv_heads, config.head_dim, config.head_dim, scale)
            .map_err(Error::model)?;
        let rope = Rope::new(config.head_dim, config.rope_dims, config.rope_base)
            .and_then(|rope| rope.with_sections(config.rope_sections))
            .map_err(Error::model)?;
        let embedding = loader.matrix(&weights.embedding)?;
        let head = match weights.tied {
            true => None,
            false => Some(loader.matrix(&weights.head)?),
        };
        let output_norm = loader.vector(&weights.output_norm)?;
        let layers = weights
            .layers
            .iter()
            .map(|layer| DeviceLayer::load(config, layer, &layout, &mut loader, room))
            .collect::<Result<Vec<_>>>()?;
        let buffers = Buffers::new(&gpu, config, &heads, capacity, room)?;
        let rope = RopeTable::new(&gpu.stream, &rope, capacity)?;
        loader.finish()?;
        let steps = Steps::new(&gpu, capacity, room.sequences, room.context, config.hidden, config.vocab)?;
        let slots = room.sequences;
        let layers = Layers {
            config: config.clone(),
            embedding,
            head,
            output_norm,
            layers,
            heads,
            rope,
            buffers,
            slots,
        };
        Ok(Self { layout, steps, layers, gpu })
    }
}

impl Graph for Model {
    fn layout(&self) -> Layout {
        self.layout.clone()
    }

    fn forward(&mut self, _: &Step<'_>, memory: &mut Sequences, batch: &Batch<'_>) -> Result<()> {
        self.steps.forward(&self.gpu, &self.layers, memory, batch)?;
        memory.advance(batch);
        Ok(())
    }

    fn logits(&self) -> &[f32] {
        self.steps.logits()
    }
}

impl DeviceLayer {
    fn load(
        config: &Config,
        layer: &Layer,
        layout: &Layout,
        loader: &mut Loader<'_>,
        room: Room,
    ) -> Result<Self> {
        let mixer = match &layer.mixer {
            Mixer::Recurrent { qkv, z, beta, alpha, conv, a, dt_bias, norm, out } => {
                let shape = &config.gdn;
                let weights = skep_gdn::Weights::new(shape, conv, a, dt_bias, norm, config.eps)
                    .expect("lengths and decay rates were checked when the tensors were claimed");
                DeviceMixer::Recurrent {
                    inputs: [
                        loader.matrix(qkv)?,
                        loader.matrix(z)?,
                        loader.matrix(beta)?,
                        loader.matrix(alpha)?,
                    ],
                    weights: Box::new(DeviceWeights::upload(&loader.gpu.stream, shape, &weights)?),
                    states: States::new(&loader.gpu.stream, shape, room.sequences)?,
                    out: loader.matrix(out)?,
                }
            }
            Mixer::Attention { q, k, v, q_norm, k_norm, out } => {
                let pages = layout.full_pool(room.sequences, room.context);
                let dim = config.head_dim;
                DeviceMixer::Attention {
                    inputs: [loader.matrix(q)?, loader.matrix(k)?, loader.matrix(v)?],
                    q_norm: loader.vector(q_norm)?,
                    k_norm: loader.vector(k_norm)?,
                    cache: Cache::new(&loader.gpu.device, room.kv, pages, config.kv_heads, dim, dim)?,
                    out: loader.matrix(out)?,
                }
            }
        };
        let shared = &layer.shared;
        Ok(Self {
            mixer_norm: loader.vector(&layer.mixer_norm)?,
            mixer,
            moe_norm: loader.vector(&layer.moe_norm)?,
            router: loader.matrix(&layer.router)?,
            shared_gate: loader.matrix(&layer.shared_gate)?,
            shared: [loader.matrix(&shared.gate)?, loader.matrix(&shared.up)?, loader.matrix(&shared.down)?],
            experts: layer.experts.load(loader, Activation::Silu)?,
        })
    }
}

impl Buffers {
    fn new(gpu: &Context, config: &Config, heads: &Heads, capacity: usize, room: Room) -> Result<Self> {
        let device = &gpu.device;
        let (hidden, gdn) = (config.hidden, &config.gdn);
        let rows = |numbers: usize| Memory::new(device, 4 * capacity * numbers);
        let width = config.q_heads * config.head_dim;
        let kv = config.kv_heads * config.head_dim;
        let shared = config.shared_ff;
        // What the products of a layer write, side by side: of the mixer of either kind, and of the feed-forward.
        let wide = [
            gdn.conv_dim().max(2 * width).max(config.experts),
            gdn.value_dim().max(kv).max(1),
            gdn.v_heads().max(kv).max(shared),
            gdn.v_heads().max(shared),
        ];
        let inner = gdn.value_dim().max(width).max(shared).next_multiple_of(32);
        let [a, b, c, d] = wide;
        Ok(Self {
            x: rows(hidden)?,
            wanted: Memory::new(device, 4 * HEAD_ROWS * hidden)?,
            logits: Memory::new(device, 4 * HEAD_ROWS * config.vocab)?,
            acts: Acts::new(device, capacity, hidden)?,
            inner: Acts::new(device, capacity, inner)?,
            head: Acts::new(device, HEAD_ROWS, hidden)?,
            wide: [rows(a)?, rows(b)?, rows(c)?, rows(d)?],
            q: rows(width)?,
            delta: rows(hidden)?,
            gdn: DeviceScratch::new(device, gdn, capacity)?,
            attention: skep_attention::gpu::Scratch::new(device, &[*heads], HEAD_ROWS, room.context)?,
            moe: skep_moe_cache::gpu::DeviceScratch::new(
                device,
                capacity,
                config.experts_used,
                config.experts,
                config.expert_ff,
                hidden,
            )?,
            routes: skep_moe_cache::gpu::DeviceRoutes::new(device, capacity, config.experts_used)?,
        })
    }
}

impl Forward for Layers {
    fn layers(&self, gpu: &Context, inputs: &Inputs, run: &Run<'_>) -> Result<()> {
        let Self { config, buffers, .. } = self;
        let (n, hidden, stream) = (run.rows.ids.len(), config.hidden, &gpu.stream);
        let x = buffers.x.view();
        gpu.quant.embed(stream, self.embedding.view(), inputs.ids(), n, 1.0, x)?;
        self.rope.fill(&gpu.attention, stream, Positions::Text(inputs.positions()), n)?;
        for layer in &self.layers {
            let norm = Some(layer.mixer_norm.view());
            gpu.quant.norm(stream, x, None, norm, config.eps, n, hidden, None, Some(&buffers.acts))?;
            match &layer.mixer {
                DeviceMixer::Recurrent { inputs: weights, weights: small, states, out } => {
                    let wide = self.project(gpu, weights, n)?;
                    let input = DeviceInput { qkv: wide[0], z: wide[1], beta: wide[2], alpha: wide[3] };
                    let spans = DeviceSpans { list: inputs.spans(), len: run.rows.spans.len() };
                    let inner = Some(&buffers.inner);
                    gpu.gdn.mix(stream, small, states, spans, n, &input, &buffers.gdn, None, inner)?;
                    self.out(gpu, out, x, n)?;
                }
                DeviceMixer::Attention { inputs: weights, q_norm, k_norm, cache, out } => {
                    let wide = self.project(gpu, weights, n)?;
                    let width = config.q_heads * config.head_dim;
                    let kv = config.kv_heads * config.head_dim;
                    let q_gate = Rows { view: wide[0], stride: 2 * width };
                    let projections = Projections {
                        q: Queries::GateInterleaved(q_gate),
                        k: Rows { view: wide[1], stride: kv },
                        v: Rows { view: wide[2], stride: kv },
                    };
                    let (q, k) = (Norm::Weight(q_norm.view()), Norm::Weight(k_norm.view()));
                    let norms = Norms { q, k, v: Norm::None, eps: config.eps };
                    let batch = attention_batch(inputs, &run.rows, inputs.full_tables(), self.slots);
                    let q = buffers.q.view();
                    let heads = &self.heads;
                    gpu.attention.prepare(
                        stream,
                        heads,
                        &projections,
                        &norms,
                        Some(&self.rope),
                        &batch,
                        cache,
                        q,
                    )?;
                    gpu.attention.attend(
                        stream,
                        heads,
                        q,
                        Some(Gate::Interleaved(q_gate)),
                        &batch,
                        cache,
                        Mask::Causal,
                        &buffers.attention,
                        None,
                        Some(&buffers.inner),
                    )?;
                    self.out(gpu, out, x, n)?;
                }
            }
            self.feed_forward(gpu, layer, n)?;
        }
        Ok(())
    }

    fn head(&self, gpu: &Context, inputs: &Inputs, first: usize, n: usize) -> Result<()> {
        let Self { config, buffers, .. } = self;
        let (hidden, stream) = (config.hidden, &gpu.stream);
        let rows = buffers.x.bytes() / 4 / hidden;
        let x = MatrixView::new(Type::F32, rows, hidden, buffers.x.view());
        let wanted = inputs.wanted();
        let wanted = wanted.slice(4 * first..wanted.bytes());
        gpu.quant.embed(stream, x, wanted, n, 1.0, buffers.wanted.view())?;
        let norm = Some(self.output_norm.view());
        let acts = &buffers.head;
        gpu.quant.norm(stream, buffers.wanted.view(), None, norm, config.eps, n, hidden, None, Some(acts))?;
        let weight = self.head.as_ref().unwrap_or(&self.embedding).view();
        let product = Product { weight, out: buffers.logits.view(), add: false };
        Ok(gpu.quant.matmul(stream, &[product], acts, n)?)
    }

    fn logits(&self) -> &Memory {
        &self.buffers.logits
    }

    fn reset(&self, gpu: &Context, slot: usize) -> Result<()> {
        for layer in &self.layers {
            if let DeviceMixer::Recurrent { states, .. } = &layer.mixer {
                states.reset(&gpu.stream, slot)?;
            }
        }
        Ok(())
    }
}

impl Layers {
    /// Products of the normalised rows, one buffer each.
    fn project(&self, gpu: &Context, weights: &[Matrix], n: usize) -> Result<[View<'_>; 4]> {
        let wide = self.buffers.wide.each_ref().map(Memory::view);
        let products: Vec<Product<'_>> =
            weights.iter().zip(wide).map(|(weight, out)| product(weight, out)).collect();
        gpu.quant.matmul(&gpu.stream, &products, &self.buffers.acts, n)?;
        Ok(wide)
    }

    /// Adds the output projection of a mixer to the residual stream.
    fn out(&self, gpu: &Context, weight: &Matrix, x: View<'_>, n: usize) -> Result<()> {
        let product = Product { weight: weight.view(), out: x, add: true };
        Ok(gpu.quant.matmul(&gpu.stream, &[product], &self.buffers.inner, n)?)
    }

    /// Adds the mixture of experts with its shared expert to the residual stream.
    fn feed_forward(&self, gpu: &Context, layer: &DeviceLayer, n: usize) -> Result<()> {
        let Self { config, buffers, .. } = self;
        let (hidden, stream, x) = (config.hidden, &gpu.stream, buffers.x.view());
        let acts = &buffers.acts;
        let norm = Some(layer.moe_norm.view());
        gpu.quant.norm(stream, x, None, norm, config.eps, n, hidden, None, Some(acts))?;
        let [logits, opening, gated, upped] = buffers.wide.each_ref().map(Memory::view);
        let [gate, up, down] = &layer.shared;
        let products = [
            product(&layer.router, logits),
            product(&layer.shared_gate, opening),
            product(gate, gated),
            product(up, upped),
        ];
        gpu.quant.matmul(stream, &products, acts, n)?;

        let (options, routes) = (router::Options::default(), &buffers.routes);
        gpu.moe.route(stream, logits, n, config.experts, config.experts_used, &options, None, routes)?;
        layer.experts.add(gpu, acts, routes, n, &buffers.moe, x)?;

        let (silu, ff) = (skep_quant::gpu::Gate::Silu, config.shared_ff);
        gpu.quant.gated(stream, silu, gated, (upped, ff), n, ff, None, Some(&buffers.inner))?;
        gpu.quant.matmul(stream, &[product(down, buffers.delta.view())], &buffers.inner, n)?;
        Ok(gpu.quant.add(stream, x, buffers.delta.view(), Some(opening), 1.0, n, hidden)?)
    }
}

fn product<'a>(weight: &'a Matrix, out: View<'a>) -> Product<'a> {
    Product { weight: weight.view(), out, add: false }
}

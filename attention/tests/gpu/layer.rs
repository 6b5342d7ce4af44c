//! A random layer and a step of it, for the host and for a device.

use super::common::Random;
use half::f16;
use skep_attention::gpu::{self, Batch, Cache, Kernels, Positions, RopeTable, Rows, Scratch};
use skep_attention::{
    Gate, Heads, KvCache, KvType, Mask, Norm, Norms, Position, Projections, Queries, Rope, Span, reference,
};
use skep_hal::gpu::{Device, Memory, Stream, View};
use skep_quant::gpu::Acts;
use std::ops::Range;

/// A device with its kernels.
pub(crate) struct Gpu {
    pub device: Device,
    pub stream: Stream,
    pub kernels: Kernels,
}

/// Runs a test on every device.
pub(crate) fn everywhere(mut test: impl FnMut(&Gpu)) {
    for device in skep_hal::gpu::testing::devices() {
        test(&Gpu::new(&device));
    }
}

/// New rows of one sequence.
#[derive(Clone)]
pub(crate) struct Piece {
    pub start: usize,
    pub len: usize,
    pub together: Vec<Range<usize>>,
}

impl Piece {
    pub(crate) fn new(start: usize, len: usize) -> Self {
        Self { start, len, together: Vec::new() }
    }
}

/// A layer.
pub(crate) struct Layer {
    pub heads: Heads,
    pub ty: KvType,
    pub gated: bool,
    pub rope: Option<Rope>,
    pub normed: bool,
    pub values_are_keys: bool,
    pub weight: Vec<f32>,
}

impl Layer {
    pub(crate) fn new(heads: Heads, ty: KvType) -> Self {
        let weight = Random(99).floats(heads.head_dim(), 2.0);
        Self { heads, ty, gated: false, rope: None, normed: false, values_are_keys: false, weight }
    }

    pub(crate) fn norms(&self) -> Norms<'_> {
        if !self.normed {
            return Norms::default();
        }
        let weight = Norm::Weight(&self.weight);
        let v = if self.values_are_keys { Norm::Unit } else { Norm::None };
        Norms { q: weight, k: weight, v, eps: 1e-6 }
    }

    /// A step of random rows after random pasts.
    pub(crate) fn step(&self, random: &mut Random, pieces: &[Piece]) -> Step {
        let heads = &self.heads;
        let rows: usize = pieces.iter().map(|piece| piece.len).sum();
        let needed: Vec<usize> = pieces.iter().map(|piece| (piece.start + piece.len).div_ceil(64)).collect();
        // Two pages are nobody's.
        let n_pages = needed.iter().sum::<usize>() + 2;
        let mut free = random.shuffled(n_pages);
        let tables: Vec<Vec<u32>> =
            needed.iter().map(|&needed| free.split_off(free.len() - needed)).collect();
        let q_dim = heads.head_dim() * if self.gated { 2 } else { 1 };
        let past = pieces.iter().map(|piece| piece.start);
        Step {
            n_pages,
            sent: tables.clone(),
            tables,
            slots: (0..pieces.len() as u32).collect(),
            past: past
                .map(|tokens| {
                    let k = random.floats(tokens * heads.kv_heads() * heads.head_dim(), 2.0);
                    (k, random.floats(tokens * heads.kv_heads() * heads.v_dim(), 1.0))
                })
                .collect(),
            q: random.floats(rows * heads.q_heads() * q_dim, 3.0),
            k: random.floats(rows * heads.kv_heads() * heads.head_dim(), 2.0),
            v: random.floats(rows * heads.kv_heads() * heads.v_dim(), 1.0),
            pieces: pieces.to_vec(),
        }
    }
}

/// A step.
pub(crate) struct Step {
    pub pieces: Vec<Piece>,
    pub n_pages: usize,
    /// Of each slot; piece `i` is of slot `i`, unless a test says otherwise in `slots`.
    pub tables: Vec<Vec<u32>>,
    /// What the device is told of them.
    pub sent: Vec<Vec<u32>>,
    pub slots: Vec<u32>,
    past: Vec<(Vec<f32>, Vec<f32>)>,
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
}

/// Projections on the host.
pub(crate) struct Inputs<'s> {
    q: Queries<'s>,
    k: &'s [f32],
    v: &'s [f32],
}

impl Inputs<'_> {
    pub(crate) fn projections(&self) -> Projections<'_> {
        Projections { q: self.q, k: self.k, v: self.v }
    }
}

/// Contents of a cache as floats, NaN where nothing was written.
pub(crate) struct Contents {
    pub k: Vec<f32>,
    pub v: Vec<f32>,
}

impl Step {
    pub(crate) fn rows(&self) -> usize {
        self.pieces.iter().map(|piece| piece.len).sum()
    }

    pub(crate) fn spans(&self) -> Vec<Span<'_>> {
        let mut first = 0;
        let mut spans = Vec::new();
        for (piece, pages) in self.pieces.iter().zip(&self.tables) {
            let tokens = first..first + piece.len;
            first = tokens.end;
            spans.push(Span { tokens, pages, start: piece.start, together: &piece.together });
        }
        spans
    }

    /// Positions for the rotation: far from the token indices, so that the two cannot be mistaken.
    pub(crate) fn positions(&self) -> Vec<Position> {
        self.turns().into_iter().map(Position::from).collect()
    }

    fn turns(&self) -> Vec<u32> {
        self.tokens().into_iter().map(|token| token + 1000).collect()
    }

    fn tokens(&self) -> Vec<u32> {
        self.pieces
            .iter()
            .flat_map(|piece| (piece.start..piece.start + piece.len).map(|t| t as u32))
            .collect()
    }

    pub(crate) fn inputs(&self, layer: &Layer) -> Inputs<'_> {
        let q = if layer.gated { Queries::GateInterleaved(&self.q) } else { Queries::Plain(&self.q) };
        Inputs { q, k: &self.k, v: if layer.values_are_keys { &self.k } else { &self.v } }
    }

    /// A cache that holds what came before the step.
    pub(crate) fn past(&self, layer: &Layer) -> KvCache {
        let heads = &layer.heads;
        let mut cache =
            KvCache::new(layer.ty, self.n_pages, 64, heads.kv_heads(), heads.head_dim(), heads.v_dim())
                .unwrap();
        for ((piece, pages), (k, v)) in self.pieces.iter().zip(&self.tables).zip(&self.past) {
            let n = piece.start;
            let q = vec![0.0; n * heads.q_heads() * heads.head_dim()];
            let spans = [Span { tokens: 0..n, pages, start: 0, together: &[] }];
            let positions = vec![Position::default(); n];
            let projections = Projections { q: Queries::Plain(&q), k, v };
            let norms = Norms::default();
            let mut q_out = q.clone();
            reference::prepare(heads, &projections, &norms, None, &positions, &spans, &mut cache, &mut q_out)
                .unwrap();
        }
        cache
    }

    /// The same rows as a past.
    pub(crate) fn after(&self) -> Self {
        let piece = |piece: &Piece| Piece::new(piece.start + piece.len, 0);
        Self {
            pieces: self.pieces.iter().map(piece).collect(),
            tables: self.tables.clone(),
            sent: self.sent.clone(),
            slots: self.slots.clone(),
            past: Vec::new(),
            q: Vec::new(),
            k: Vec::new(),
            v: Vec::new(),
            ..*self
        }
    }

    /// One row of a step of one piece that starts a sequence.
    pub(crate) fn row(&self, row: usize) -> Self {
        let rows = self.rows();
        let part = |data: &[f32]| data[data.len() / rows * row..][..data.len() / rows].to_vec();
        Self {
            pieces: vec![Piece::new(row, 1)],
            tables: self.tables.clone(),
            sent: self.sent.clone(),
            slots: self.slots.clone(),
            past: Vec::new(),
            q: part(&self.q),
            k: part(&self.k),
            v: part(&self.v),
            ..*self
        }
    }

    /// The arrays of the step on a device.
    pub(crate) fn upload(&self, gpu: &Gpu) -> Arrays {
        let max_pages = self.sent.iter().map(Vec::len).max().unwrap() + 1;
        let mut pages = Vec::new();
        for table in &self.sent {
            pages.extend(table);
            pages.resize(pages.len().next_multiple_of(max_pages), u32::MAX);
        }
        let (mut slot, mut end, mut span, mut first) = (Vec::new(), Vec::new(), Vec::new(), 0);
        for (piece, &number) in self.pieces.iter().zip(&self.slots) {
            span.extend([number, first, piece.len as u32, piece.start as u32]);
            first += piece.len as u32;
            for token in piece.start..piece.start + piece.len {
                slot.push(number);
                let image = piece.together.iter().find(|image| image.contains(&token));
                end.push(image.map_or(token + 1, |image| image.end) as u32);
            }
        }
        let of = |data: &[u32]| Memory::of(&gpu.stream, data).unwrap();
        let any = self.pieces.iter().any(|piece| !piece.together.is_empty());
        Arrays {
            rows: self.rows(),
            slot: of(&slot),
            position: of(&self.tokens()),
            turns: of(&self.turns()),
            end: any.then(|| of(&end)),
            spans: self.pieces.len(),
            span: of(&span),
            slots: self.tables.len(),
            max_pages,
            pages: of(&pages),
        }
    }
}

/// A step's arrays on a device.
pub(crate) struct Arrays {
    rows: usize,
    slot: Memory,
    pub position: Memory,
    turns: Memory,
    end: Option<Memory>,
    spans: usize,
    span: Memory,
    slots: usize,
    max_pages: usize,
    pages: Memory,
}

impl Arrays {
    pub(crate) fn batch(&self) -> Batch<'_> {
        Batch {
            rows: self.rows,
            slot: self.slot.view(),
            position: self.position.view(),
            end: self.end.as_ref().map(Memory::view),
            spans: self.spans,
            span: self.span.view(),
            slots: self.slots,
            max_pages: self.max_pages,
            pages: self.pages.view(),
        }
    }
}

/// What a cache holds of the tokens before a step.
pub(crate) fn mirror(cache: &KvCache, step: &Step) -> Contents {
    let (heads, k_dim, v_dim) = (cache.kv_heads(), cache.k_dim(), cache.v_dim());
    let rows = cache.n_pages() * heads * 64;
    let mut contents = Contents { k: vec![f32::NAN; rows * k_dim], v: vec![f32::NAN; rows * v_dim] };
    for (piece, pages) in step.pieces.iter().zip(&step.tables) {
        for token in 0..piece.start {
            for head in 0..heads {
                let (page, slot) = (pages[token / 64], token % 64);
                let row = (page as usize * heads + head) * 64 + slot;
                cache.read_k(page, slot, head, &mut contents.k[row * k_dim..][..k_dim]);
                cache.read_v(page, slot, head, &mut contents.v[row * v_dim..][..v_dim]);
            }
        }
    }
    contents
}

pub(crate) fn narrowed(x: &[f32]) -> Vec<u16> {
    x.iter().map(|&x| f16::from_f32(x).to_bits()).collect()
}

pub(crate) fn widened(x: &[u16]) -> Vec<f32> {
    x.iter().map(|&x| f16::from_bits(x).to_f32()).collect()
}

pub(crate) fn bytes_of<T>(len: usize) -> usize {
    len * size_of::<T>()
}

impl Gpu {
    pub(crate) fn new(device: &Device) -> Self {
        let stream = Stream::new(device).unwrap();
        Self { device: device.clone(), stream, kernels: Kernels::load(device).unwrap() }
    }

    pub(crate) fn download<T: skep_hal::Plain + Default>(&self, view: View<'_>, len: usize) -> Vec<T> {
        let mut data = vec![T::default(); len];
        view.download(&self.stream, &mut data).unwrap();
        data
    }

    /// A cache like one of the host, with the given contents.
    pub(crate) fn cache(&self, like: &KvCache, contents: &Contents) -> Cache {
        let cache =
            Cache::new(&self.device, like.ty(), like.n_pages(), like.kv_heads(), like.k_dim(), like.v_dim())
                .unwrap();
        for (view, data) in [(cache.keys(), &contents.k), (cache.values(), &contents.v)] {
            match like.ty() {
                KvType::F16 => view.upload(&self.stream, &narrowed(data)).unwrap(),
                _ => view.upload(&self.stream, data).unwrap(),
            }
        }
        cache
    }

    /// Queries of a step, with the rows of its projections some floats further apart than they are long.
    pub(crate) fn prepare(
        &self,
        layer: &Layer,
        step: &Step,
        arrays: &Arrays,
        cache: &Cache,
        queries_alone: bool,
    ) -> Vec<f32> {
        let rows = step.rows();
        let spread = |data: &[f32], more: usize| {
            let cols = data.len() / rows;
            let mut all = Vec::new();
            for row in data.chunks(cols) {
                all.extend_from_slice(row);
                all.resize(all.len() + more, f32::NAN);
            }
            (Memory::of(&self.stream, &all).unwrap(), cols + more)
        };
        let (q, k, v) = (spread(&step.q, 8), spread(&step.k, 4), spread(&step.v, 12));
        let q_rows = Rows { view: q.0.view(), stride: q.1 };
        let k_rows = Rows { view: k.0.view(), stride: k.1 };
        let v_rows = if layer.values_are_keys { k_rows } else { Rows { view: v.0.view(), stride: v.1 } };
        let queries =
            if layer.gated { gpu::Queries::GateInterleaved(q_rows) } else { gpu::Queries::Plain(q_rows) };
        let weight = Memory::of(&self.stream, &layer.weight).unwrap();
        let norms = if layer.normed {
            let v = if layer.values_are_keys { gpu::Norm::Unit } else { gpu::Norm::None };
            let weight = gpu::Norm::Weight(weight.view());
            gpu::Norms { q: weight, k: weight, v, eps: 1e-6 }
        } else {
            gpu::Norms::default()
        };
        let table = layer.rope.as_ref().map(|rope| {
            let table = RopeTable::new(&self.stream, rope, rows + 1).unwrap();
            let positions = Positions::Text(arrays.turns.view());
            table.fill(&self.kernels, &self.stream, positions, rows).unwrap();
            table
        });
        let len = rows * layer.heads.q_heads() * layer.heads.head_dim();
        let out = Memory::new(&self.device, bytes_of::<f32>(len)).unwrap();
        let (stream, heads, table) = (&self.stream, &layer.heads, table.as_ref());
        if queries_alone {
            let (norm, eps) = (norms.q, norms.eps);
            self.kernels
                .prepare_queries(stream, heads, queries, norm, eps, table, &arrays.batch(), out.view())
                .unwrap();
        } else {
            let projections = gpu::Projections { q: queries, k: k_rows, v: v_rows };
            self.kernels
                .prepare(stream, heads, &projections, &norms, table, &arrays.batch(), cache, out.view())
                .unwrap();
        }
        self.download(out.view(), len)
    }

    pub(crate) fn attend(
        &self,
        layer: &Layer,
        step: &Step,
        arrays: &Arrays,
        cache: &Cache,
        q: &[f32],
        mask: Mask,
        blocks: usize,
    ) -> Vec<f32> {
        let heads = &layer.heads;
        let len = step.rows() * heads.q_heads() * heads.v_dim();
        let q = Memory::of(&self.stream, q).unwrap();
        let gate = Memory::of(&self.stream, &step.q).unwrap();
        let stride = step.q.len() / step.rows();
        let gate = layer.gated.then(|| gpu::Gate::Interleaved(Rows { view: gate.view(), stride }));
        let out = Memory::new(&self.device, bytes_of::<f32>(len)).unwrap();
        let scratch = Scratch::with_blocks(&self.device, &[*heads], 8, 1000, blocks).unwrap();
        self.kernels
            .attend(
                &self.stream,
                heads,
                q.view(),
                gate,
                &arrays.batch(),
                cache,
                mask,
                &scratch,
                Some(out.view()),
                None,
            )
            .unwrap();
        self.download(out.view(), len)
    }

    /// Attends into `acts`, and returns what comes out as plain rows.
    pub(crate) fn attend_into(&self, layer: &Layer, step: &Step, acts: &Acts) -> Vec<f32> {
        let heads = &layer.heads;
        let (past, arrays) = (step.past(layer), step.upload(self));
        let cache = self.cache(&past, &mirror(&past, step));
        let q = self.prepare(layer, step, &arrays, &cache, false);
        let memory = Memory::of(&self.stream, &q).unwrap();
        let scratch = Scratch::with_blocks(&self.device, &[*heads], 9, 1000, 10).unwrap();
        let len = step.rows() * heads.q_heads() * heads.v_dim();
        let out = Memory::new(&self.device, bytes_of::<f32>(len)).unwrap();
        for (out, acts) in [(Some(out.view()), None), (None, Some(acts))] {
            let (stream, batch) = (&self.stream, &arrays.batch());
            let (q, mask) = (memory.view(), Mask::Causal);
            self.kernels.attend(stream, heads, q, None, batch, &cache, mask, &scratch, out, acts).unwrap();
        }
        self.download(out.view(), len)
    }

    /// What the device makes of a step whose keys and values are put into the cache by the host.
    pub(crate) fn attend_with(&self, layer: &Layer, step: &Step, mask: Mask, blocks: usize) -> Vec<f32> {
        self.attend_both(layer, step, mask, blocks).0
    }

    /// The same, and what the reference makes of it.
    pub(crate) fn attend_both(
        &self,
        layer: &Layer,
        step: &Step,
        mask: Mask,
        blocks: usize,
    ) -> (Vec<f32>, Vec<f32>) {
        let heads = &layer.heads;
        let mut cache = step.past(layer);
        let inputs = step.inputs(layer);
        let mut q = vec![0.0; step.rows() * heads.q_heads() * heads.head_dim()];
        let (norms, positions, spans) = (Norms::default(), step.positions(), step.spans());
        reference::prepare(
            heads,
            &inputs.projections(),
            &norms,
            None,
            &positions,
            &spans,
            &mut cache,
            &mut q,
        )
        .unwrap();
        let device = self.cache(&cache, &mirror(&cache, &step.after()));
        let found = self.attend(layer, step, &step.upload(self), &device, &q, mask, blocks);
        let gate = layer.gated.then_some(Gate::Interleaved(&step.q));
        let mut expected = vec![0.0; found.len()];
        reference::attend(heads, &q, gate, &spans, &cache, mask, &mut expected).unwrap();
        (found, expected)
    }
}

//! A small layer with random data, threads, and an f64 oracle.
#![allow(dead_code, reason = "not every test file uses all of it")]

use std::sync::atomic::{AtomicUsize, Ordering};

use skep_attention::{
    Gate, Heads, KvCache, KvType, Mask, Norms, Position, Projections, Queries, Rope, Scratch, Span,
};
use skep_quant::Parallel;

/// Scoped threads that pull chunks from a shared counter.
pub(crate) struct Threads(pub usize);

// SAFETY: the counter hands out each index once and the scope joins all threads.
unsafe impl Parallel for Threads {
    fn workers(&self) -> usize {
        self.0
    }

    fn run(&self, chunks: usize, body: &(dyn Fn(usize) + Sync)) {
        let next = AtomicUsize::new(0);
        std::thread::scope(|scope| {
            for _ in 0..self.0.min(chunks) {
                scope.spawn(|| {
                    loop {
                        let i = next.fetch_add(1, Ordering::Relaxed);
                        if i >= chunks {
                            return;
                        }
                        body(i);
                    }
                });
            }
        });
    }
}

/// SplitMix64.
#[derive(Clone)]
pub(crate) struct Random(pub u64);

impl Random {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// Uniform in `-scale..scale`.
    pub(crate) fn float(&mut self, scale: f32) -> f32 {
        ((self.next() >> 40) as f32 / (1u64 << 23) as f32 - 1.0) * scale
    }

    pub(crate) fn floats(&mut self, len: usize, scale: f32) -> Vec<f32> {
        (0..len).map(|_| self.float(scale)).collect()
    }

    pub(crate) fn shuffled(&mut self, len: usize) -> Vec<u32> {
        let mut items = (0..len as u32).collect::<Vec<_>>();
        for i in (1..len).rev() {
            items.swap(i, self.next() as usize % (i + 1));
        }
        items
    }
}

/// One sequence of raw projections.
#[derive(Clone)]
pub(crate) struct Sequence {
    pub len: usize,
    /// `[len, q_heads, 2 * head_dim]` or `[len, q_heads, head_dim]`.
    pub q: Vec<f32>,
    pub k: Vec<f32>,
    pub v: Vec<f32>,
}

impl Sequence {
    pub(crate) fn random(random: &mut Random, heads: &Heads, len: usize, gated: bool, scale: f32) -> Self {
        let q_dim = heads.head_dim() * if gated { 2 } else { 1 };
        Self {
            len,
            q: random.floats(len * heads.q_heads() * q_dim, scale),
            k: random.floats(len * heads.kv_heads() * heads.head_dim(), scale),
            v: random.floats(len * heads.kv_heads() * heads.v_dim(), scale),
        }
    }
}

/// How sequences are run.
pub(crate) struct Run<'a> {
    pub heads: Heads,
    pub gated: bool,
    pub norms: Norms<'a>,
    pub rope: Option<&'a Rope>,
    pub mask: Mask,
    pub ty: KvType,
    pub page_len: usize,
    /// Order of pages and seed of the page tables.
    pub seed: u64,
}

impl Run<'_> {
    /// Runs `sequences` side by side, `cut(sequence, done)` rows of each in every batch, and returns the outputs `[len, q_heads, v_dim]`.
    pub(crate) fn outputs(
        &self,
        par: &dyn Parallel,
        scratch: &mut Scratch,
        sequences: &[Sequence],
        cut: impl Fn(usize, usize) -> usize,
    ) -> Vec<Vec<f32>> {
        let heads = &self.heads;
        let pages_of = |len: usize| len.div_ceil(self.page_len);
        let n_pages = sequences.iter().map(|s| pages_of(s.len)).sum::<usize>();
        let mut cache =
            KvCache::new(self.ty, n_pages, self.page_len, heads.kv_heads(), heads.head_dim(), heads.v_dim())
                .unwrap();
        let mut free = Random(self.seed).shuffled(n_pages);
        let tables =
            sequences.iter().map(|s| free.split_off(free.len() - pages_of(s.len))).collect::<Vec<_>>();
        let mut done = vec![0; sequences.len()];
        let mut outputs = vec![Vec::new(); sequences.len()];
        while sequences.iter().zip(&done).any(|(s, &done)| done < s.len) {
            let (mut q, mut k, mut v) = (Vec::new(), Vec::new(), Vec::new());
            let (mut positions, mut spans) = (Vec::new(), Vec::new());
            for (i, sequence) in sequences.iter().enumerate() {
                let rows = done[i]..(done[i] + cut(i, done[i])).min(sequence.len);
                let width = |data: &[f32]| data.len() / sequence.len;
                for (batch, data) in [(&mut q, &sequence.q), (&mut k, &sequence.k), (&mut v, &sequence.v)] {
                    batch.extend_from_slice(&data[rows.start * width(data)..rows.end * width(data)]);
                }
                let first = positions.len();
                positions.extend(rows.clone().map(|row| Position::from(row as u32)));
                spans.push(Span { tokens: first..positions.len(), pages: &tables[i], start: rows.start });
            }
            let n = positions.len();
            let queries = if self.gated { Queries::GateInterleaved(&q) } else { Queries::Plain(&q) };
            let mut q_out = vec![f32::NAN; n * heads.q_heads() * heads.head_dim()];
            let projections = Projections { q: queries, k: &k, v: &v };
            skep_attention::prepare(
                par,
                heads,
                &projections,
                &self.norms,
                self.rope,
                &positions,
                &spans,
                &mut cache,
                scratch,
                &mut q_out,
            )
            .unwrap();
            let mut out = vec![f32::NAN; n * heads.q_heads() * heads.v_dim()];
            let gate = self.gated.then_some(Gate::Interleaved(&q));
            skep_attention::attend(par, heads, &q_out, gate, &spans, &cache, self.mask, scratch, &mut out)
                .unwrap();
            let width = heads.q_heads() * heads.v_dim();
            for (i, span) in spans.iter().enumerate() {
                outputs[i].extend_from_slice(&out[span.tokens.start * width..span.tokens.end * width]);
                done[i] += span.tokens.len();
            }
        }
        outputs
    }
}

/// Attention in f64 over plain rows, brute force: `q` `[n, q_heads, head_dim]`, `k` and `v` per token; row `i` is token `i`.
pub(crate) fn oracle(
    heads: &Heads,
    q: &[f64],
    k: &[f64],
    v: &[f64],
    sees: impl Fn(usize, usize) -> bool,
) -> Vec<f64> {
    let (head_dim, v_dim) = (heads.head_dim(), heads.v_dim());
    let n = q.len() / (heads.q_heads() * head_dim);
    let mut out = vec![0.0; n * heads.q_heads() * v_dim];
    for row in 0..n {
        for head in 0..heads.q_heads() {
            let kv_head = head * heads.kv_heads() / heads.q_heads();
            let query = &q[(row * heads.q_heads() + head) * head_dim..][..head_dim];
            let keys = (0..n).filter(|&j| sees(row, j)).collect::<Vec<_>>();
            let scores = keys
                .iter()
                .map(|j| {
                    let key = &k[(j * heads.kv_heads() + kv_head) * head_dim..][..head_dim];
                    f64::from(heads.scale()) * query.iter().zip(key).map(|(a, b)| a * b).sum::<f64>()
                })
                .collect::<Vec<_>>();
            let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let sum = scores.iter().map(|s| (s - max).exp()).sum::<f64>();
            let out = &mut out[(row * heads.q_heads() + head) * v_dim..][..v_dim];
            for (j, score) in keys.iter().zip(scores) {
                let value = &v[(j * heads.kv_heads() + kv_head) * v_dim..][..v_dim];
                out.iter_mut().zip(value).for_each(|(out, v)| *out += (score - max).exp() / sum * v);
            }
        }
    }
    out
}

/// Asserts `|a - b| <= tolerance · (1 + |b|)` everywhere.
#[track_caller]
pub(crate) fn assert_close(a: &[f32], b: &[f64], tolerance: f64) {
    assert_eq!(a.len(), b.len());
    for (i, (&a, &b)) in a.iter().zip(b).enumerate() {
        assert!((f64::from(a) - b).abs() <= tolerance * (1.0 + b.abs()), "entry {i}: {a} is not {b}");
    }
}

pub(crate) fn wide(x: &[f32]) -> Vec<f64> {
    x.iter().map(|&x| f64::from(x)).collect()
}

/// Equality to the bit, except that any NaN equals any other.
#[track_caller]
pub(crate) fn assert_same(a: &[f32], b: &[f32]) {
    assert_eq!(a.len(), b.len());
    for (i, (a, b)) in a.iter().zip(b).enumerate() {
        assert!(a.to_bits() == b.to_bits() || (a.is_nan() && b.is_nan()), "entry {i}: {a} is not {b}");
    }
}

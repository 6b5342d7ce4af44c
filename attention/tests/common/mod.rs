//! A small layer with random data, and an f64 oracle.
#![allow(dead_code, unused_imports, reason = "not every test file uses all of it")]

use skep_attention::Heads;

#[cfg(feature = "std")]
mod run;

#[cfg(feature = "std")]
pub(crate) use run::Run;

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

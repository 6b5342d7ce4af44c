//! What the engine's integration tests share: reference arrays, distances between logits, model files.
#![allow(dead_code, reason = "each test binary uses its part")]

pub(crate) mod edit;

use skep_engine::{Batch, KvType, LoadOptions, Precision, Runner, Want};
use std::path::{Path, PathBuf};

/// The folder of reference files, beside the checkout; None (with a note) where it is absent.
pub(crate) fn shared() -> Option<PathBuf> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../shared");
    if path.is_dir() {
        return Some(path);
    }
    println!("skipped: the reference files are absent");
    None
}

/// The bundled model and what belongs to it.
pub(crate) fn models() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../models")
}

/// A two-dimensional f32 array of NumPy's `.npy` format.
pub(crate) struct Array {
    pub(crate) rows: usize,
    pub(crate) cols: usize,
    pub(crate) values: Vec<f32>,
}

impl Array {
    pub(crate) fn read(path: &Path) -> Self {
        let bytes = std::fs::read(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        assert_eq!(&bytes[..8], b"\x93NUMPY\x01\x00", "{}", path.display());
        let data = 10 + usize::from(u16::from_le_bytes([bytes[8], bytes[9]]));
        let header = std::str::from_utf8(&bytes[10..data]).unwrap();
        assert!(header.contains("'<f4'") && header.contains("'fortran_order': False"), "{header}");
        let (_, shape) = header.split_once("'shape': (").unwrap();
        let (shape, _) = shape.split_once(')').unwrap();
        let shape: Vec<usize> = shape.split(',').filter_map(|dim| dim.trim().parse().ok()).collect();
        let [rows, cols] = shape[..] else { panic!("{}: shape {shape:?}", path.display()) };
        let values =
            bytes[data..].as_chunks::<4>().0.iter().map(|&chunk| f32::from_le_bytes(chunk)).collect();
        Self { rows, cols, values }
    }

    pub(crate) fn row(&self, row: usize) -> &[f32] {
        &self.values[row * self.cols..][..self.cols]
    }

    /// This array with the rows of another behind it.
    pub(crate) fn then(mut self, other: Self) -> Self {
        assert_eq!(self.cols, other.cols);
        self.rows += other.rows;
        self.values.extend(other.values);
        self
    }
}

/// Token ids of a reference run.
#[derive(Clone)]
pub(crate) struct Ids {
    pub(crate) prompt: Vec<u32>,
    pub(crate) decode: Vec<u32>,
}

impl Ids {
    pub(crate) fn read(path: &Path) -> Self {
        let text =
            std::fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        let json: serde_json::Value = serde_json::from_str(&text).unwrap();
        let list = |key: &str| match json.get(key) {
            Some(list) => list.as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect(),
            None => Vec::new(),
        };
        Self { prompt: list("prompt_ids"), decode: list("decode_ids") }
    }
}

/// Loads a model with memory for a few short sequences.
pub(crate) fn load(path: &Path, precision: Precision) -> Runner {
    let mut options = LoadOptions::default();
    options.precision = precision;
    options.context = Some(1024);
    options.sequences = 3;
    options.threads = Some(2);
    options.kv = if precision == Precision::Exact { KvType::F32 } else { KvType::F16 };
    Runner::load(path, &options, &mut |_| {}).unwrap_or_else(|error| panic!("{error}"))
}

/// Logits of every token: the prompt in chunks, then one token at a time.
pub(crate) fn logits(runner: &mut Runner, ids: &Ids, chunk: usize) -> Array {
    let sequence = runner.open().unwrap();
    let mut values = Vec::new();
    for tokens in ids.prompt.chunks(chunk).chain(ids.decode.chunks(1)) {
        values.extend_from_slice(runner.step(&Batch::of(sequence, tokens, Want::All)).unwrap());
    }
    runner.close(sequence);
    Array { rows: ids.prompt.len() + ids.decode.len(), cols: runner.info().n_vocab, values }
}

/// Largest absolute difference of two rows.
pub(crate) fn max_difference(a: &[f32], b: &[f32]) -> f32 {
    a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max)
}

/// Index of the largest entry, the first of several.
pub(crate) fn top(row: &[f32]) -> usize {
    (0..row.len()).rev().max_by(|&a, &b| row[a].total_cmp(&row[b])).unwrap()
}

/// Kullback-Leibler divergence of the distribution of `row` from that of `reference`, in f64.
pub(crate) fn kl(reference: &[f32], row: &[f32]) -> f64 {
    let log_softmax = |row: &[f32]| -> Vec<f64> {
        let max = row.iter().copied().fold(f32::NEG_INFINITY, f32::max) as f64;
        let sum: f64 = row.iter().map(|&x| (x as f64 - max).exp()).sum();
        row.iter().map(|&x| x as f64 - max - sum.ln()).collect()
    };
    let (p, q) = (log_softmax(reference), log_softmax(row));
    p.iter().zip(&q).map(|(p, q)| p.exp() * (p - q)).sum()
}

/// Mean divergence over the rows that `keep` names.
pub(crate) fn mean_kl(reference: &Array, found: &Array, keep: impl Fn(usize) -> bool) -> f64 {
    assert_eq!((reference.rows, reference.cols), (found.rows, found.cols));
    let rows: Vec<f64> = (0..reference.rows)
        .filter(|&row| keep(row))
        .map(|row| kl(reference.row(row), found.row(row)))
        .collect();
    rows.iter().sum::<f64>() / rows.len() as f64
}

//! Gemma 4 models of other sizes than the bundled one, against Hugging Face: per-layer embeddings, layers that share keys and
//! values, dense models. `data/gemma4_sizes.py` makes the reference and says what the models are.

mod common;

use common::edit::{Edited, Tensor};
use common::{Array, Ids, load, logits, max_difference};
use skep_engine::Precision;
use skep_gguf::Writer;
use std::fs::File;
use std::path::Path;

const VOCAB: usize = 300;
const TOKENS: usize = 40;
const HIDDEN: usize = 64;

/// The sizes of a model.
struct Sizes {
    name: &'static str,
    sliding: &'static [bool],
    /// Key heads of layers that see everything; sliding ones have 2.
    full_kv_heads: u32,
    shared: usize,
    per_layer: usize,
    softcap: f32,
    values_are_keys: bool,
}

const E: Sizes = Sizes {
    name: "e",
    sliding: &[true, true, false, true, true, true, false],
    full_kv_heads: 2,
    shared: 3,
    per_layer: 16,
    softcap: 30.0,
    values_are_keys: false,
};

const DENSE: Sizes = Sizes {
    name: "dense",
    sliding: &[true, true, false],
    full_kv_heads: 1,
    shared: 0,
    per_layer: 0,
    softcap: 0.0,
    values_are_keys: true,
};

impl Sizes {
    fn ff(&self, layer: usize) -> usize {
        if layer >= self.sliding.len() - self.shared { 192 } else { 96 }
    }

    fn tensors(&self) -> Vec<Tensor> {
        let layers = self.sliding.len();
        let mut list =
            vec![matrix("token_embd.weight", VOCAB, HIDDEN), matrix("output_norm.weight", 1, HIDDEN)];
        // A quarter of the 16 frequencies turns.
        let divisors: Vec<f32> = (0..16).map(|i| if i < 4 { 1.0 } else { 1e30 }).collect();
        list.push(Tensor::new("rope_freqs.weight", &divisors));
        if self.per_layer > 0 {
            list.push(matrix("per_layer_token_embd.weight", VOCAB, layers * self.per_layer));
            list.push(matrix("per_layer_model_proj.weight", layers * self.per_layer, HIDDEN));
            list.push(matrix("per_layer_proj_norm.weight", 1, self.per_layer));
        }
        for (layer, &sliding) in self.sliding.iter().enumerate() {
            let head = if sliding { 16 } else { 32 };
            let kv = head * if sliding { 2 } else { self.full_kv_heads as usize };
            let ff = self.ff(layer);
            let mut push = |role: &str, rows, cols| {
                list.push(matrix(&format!("blk.{layer}.{role}.weight"), rows, cols));
            };
            push("attn_q", 4 * head, HIDDEN);
            push("attn_q_norm", 1, head);
            push("attn_output", HIDDEN, 4 * head);
            if layer < layers - self.shared {
                push("attn_k", kv, HIDDEN);
                push("attn_k_norm", 1, head);
                if sliding || !self.values_are_keys {
                    push("attn_v", kv, HIDDEN);
                }
            }
            push("ffn_gate", ff, HIDDEN);
            push("ffn_up", ff, HIDDEN);
            push("ffn_down", HIDDEN, ff);
            for norm in ["attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm"] {
                push(norm, 1, HIDDEN);
            }
            push("layer_output_scale", 1, 1);
            if self.per_layer > 0 {
                push("inp_gate", self.per_layer, HIDDEN);
                push("proj", HIDDEN, self.per_layer);
                push("post_norm", 1, HIDDEN);
            }
        }
        list
    }

    /// Writes the model, its sizes changed by `change`.
    fn write(&self, name: &str, change: impl FnOnce(&mut Vec<Tensor>)) -> Edited {
        let layers = self.sliding.len();
        let mut writer = Writer::new();
        let mut set = |key: &str, value: u32| {
            writer.set(&format!("gemma4.{key}"), value).unwrap();
        };
        for (key, value) in [
            ("block_count", layers as u32),
            ("context_length", 4096),
            ("embedding_length", HIDDEN as u32),
            ("attention.head_count", 4),
            ("attention.key_length", 32),
            ("attention.value_length", 32),
            ("attention.key_length_swa", 16),
            ("attention.value_length_swa", 16),
            ("attention.sliding_window", 8),
            ("attention.shared_kv_layers", self.shared as u32),
            ("embedding_length_per_layer_input", self.per_layer as u32),
            ("rope.dimension_count", 32),
            ("rope.dimension_count_swa", 16),
        ] {
            set(key, value);
        }
        let kv_heads: Vec<u32> =
            self.sliding.iter().map(|&sliding| if sliding { 2 } else { self.full_kv_heads }).collect();
        let ff: Vec<u32> = (0..layers).map(|layer| self.ff(layer) as u32).collect();
        let tokens: Vec<String> = ["<pad>", "<eos>", "<bos>", "<unk>"]
            .into_iter()
            .map(str::to_owned)
            .chain((0..=255_u8).map(|byte| format!("<0x{byte:02X}>")))
            .chain((260..VOCAB as u32 - 1).map(|id| char::from_u32(0x3b1 + id - 260).unwrap().to_string()))
            .chain(["αβ".to_owned()])
            .collect();
        let types: Vec<i32> =
            (0..VOCAB).map(|id| [3, 6, 1][usize::from(id >= 4) + usize::from(id >= 260)]).collect();
        writer
            .set("general.architecture", "gemma4")
            .and_then(|w| w.set("gemma4.attention.head_count_kv", &kv_heads[..]))
            .and_then(|w| w.set("gemma4.feed_forward_length", &ff[..]))
            .and_then(|w| w.set("gemma4.attention.sliding_window_pattern", self.sliding))
            .and_then(|w| w.set("gemma4.attention.layer_norm_rms_epsilon", 1e-6_f32))
            .and_then(|w| w.set("gemma4.rope.freq_base", 1e6_f32))
            .and_then(|w| w.set("gemma4.rope.freq_base_swa", 1e4_f32))
            .and_then(|w| w.set("gemma4.final_logit_softcapping", self.softcap))
            .and_then(|w| w.set("tokenizer.ggml.model", "gemma4"))
            .and_then(|w| {
                w.set("tokenizer.ggml.tokens", &tokens.iter().map(String::as_str).collect::<Vec<_>>()[..])
            })
            .and_then(|w| w.set("tokenizer.ggml.token_type", &types[..]))
            .and_then(|w| w.set("tokenizer.ggml.merges", &["α β"][..]))
            .and_then(|w| w.set("tokenizer.ggml.bos_token_id", 2_u32))
            .and_then(|w| w.set("tokenizer.ggml.eos_token_id", 1_u32))
            .and_then(|w| w.set("tokenizer.ggml.unknown_token_id", 3_u32))
            .unwrap();
        let mut list = self.tensors();
        change(&mut list);
        for tensor in &list {
            writer.tensor(&tensor.name, &tensor.shape, tensor.ty).unwrap();
        }
        let path =
            std::env::temp_dir().join(format!("skep-{}-{}-{name}.gguf", std::process::id(), self.name));
        let mut tensors = list.iter();
        let out = File::create(&path).unwrap();
        writer.write(out, |_, sink| sink.write_all(&tensors.next().unwrap().data)).unwrap();
        Edited::new(path)
    }
}

/// A tensor whose values are a function of its name.
fn matrix(name: &str, rows: usize, cols: usize) -> Tensor {
    let (middle, width) = match name {
        name if name.ends_with("q_norm.weight") || name.ends_with("k_norm.weight") => (0.5, 0.25),
        name if name.contains("norm") || name.contains("output_scale") => (1.0, 0.25),
        _ => (0.0, (1.5 / (cols as f64).sqrt()) as f32),
    };
    let seed = name
        .bytes()
        .fold(0xCBF2_9CE4_8422_2325_u64, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01B3));
    let value = |index: usize| {
        let z = (index as u64 + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15).wrapping_add(seed);
        let z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        let unit = ((z ^ (z >> 31)) >> 40) as f32 / (1 << 23) as f32 - 1.0;
        middle + width * unit
    };
    let values: Vec<f32> = (0..rows * cols).map(value).collect();
    let mut tensor = Tensor::new(name, &values);
    if rows > 1 {
        tensor.shape = vec![cols as u64, rows as u64];
    }
    tensor
}

fn ids() -> Ids {
    let id = |i: usize| if i == 0 { 2 } else { ((7 * i * i + 3 * i) % VOCAB) as u32 };
    Ids { prompt: (0..TOKENS).map(id).collect(), decode: Vec::new() }
}

/// The largest difference from the reference, which holds the rows of both models.
fn difference(file: &Edited, sizes: &Sizes, chunk: usize) -> f32 {
    let data = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/gemma4_sizes.npy");
    let reference = Array::read(&data);
    let first = if sizes.name == "e" { 0 } else { TOKENS };
    let found = logits(&mut load(file.path(), Precision::Exact), &ids(), chunk);
    let rows = (0..TOKENS).map(|row| max_difference(found.row(row), reference.row(first + row)));
    rows.fold(0.0, f32::max)
}

#[test]
fn every_size_has_the_logits_of_hugging_face() {
    for sizes in [E, DENSE] {
        let file = sizes.write("whole", |_| {});
        for chunk in [1, 7, TOKENS] {
            let difference = difference(&file, &sizes, chunk);
            println!("{}, chunk {chunk}: {difference:.1e}", sizes.name);
            assert!(difference < 2e-5, "{}, chunk {chunk}: {difference}", sizes.name);
        }
    }
}

#[test]
fn what_a_size_has_of_its_own_counts() {
    let halve = |role: &'static str| {
        move |tensors: &mut Vec<Tensor>| {
            for tensor in tensors.iter_mut().filter(|tensor| tensor.name.contains(role)) {
                for value in tensor.floats() {
                    *value = (f32::from_le_bytes(*value) / 2.0).to_le_bytes();
                }
            }
        }
    };
    for role in ["per_layer_token_embd", "per_layer_proj_norm", "post_norm", "inp_gate"] {
        let difference = difference(&E.write(role, halve(role)), &E, TOKENS);
        assert!(difference > 1e-2, "{role}: {difference}");
    }
    for (sizes, role) in [(E, "rope_freqs"), (DENSE, "blk.2.attn_k_norm"), (DENSE, "layer_output_scale")] {
        let difference = difference(&sizes.write(role, halve(role)), &sizes, TOKENS);
        assert!(difference > 1e-3, "{role}: {difference}");
    }
}

#[test]
fn keys_of_layers_that_share_are_not_used() {
    // Some converters keep them.
    let file = E.write("spare", |tensors| {
        tensors.push(matrix("blk.5.attn_k.weight", 32, HIDDEN));
        tensors.push(matrix("blk.5.attn_k_norm.weight", 1, 16));
        tensors.push(matrix("blk.5.attn_v.weight", 32, HIDDEN));
    });
    assert!(difference(&file, &E, TOKENS) < 2e-5);
}

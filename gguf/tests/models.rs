//! Real files, against what the Python package `gguf` finds in them.
#![cfg(feature = "mmap")]

mod common;

use std::path::{Path, PathBuf};

use common::walk;
use skep_gguf::{Gguf, PerLayer, Writer, open};

fn found(path: &str) -> Option<PathBuf> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(path);
    if !path.exists() {
        println!("skipped: no {}", path.display());
        return None;
    }
    Some(path)
}

fn tiny() -> Option<PathBuf> {
    found("models/tiny-qwen35moe-Q4_K_M.gguf")
}

#[test]
fn tiny_model_metadata() {
    let Some(path) = tiny() else { return };
    let gguf = open(&path).unwrap();
    walk(&gguf);
    assert_eq!((gguf.version(), gguf.alignment(), gguf.parts()), (3, 32, 1));
    assert_eq!(gguf.file_bytes(), 20_890_624);
    assert_eq!(gguf.metadata().count(), 38);
    assert_eq!(gguf.architecture().unwrap(), "qwen35moe");
    assert_eq!(gguf.usize("qwen35moe.block_count").unwrap(), Some(9));
    assert_eq!(gguf.f32("qwen35moe.attention.layer_norm_rms_epsilon").unwrap(), Some(1e-6));
    assert_eq!(gguf.per_layer_usize("qwen35moe.attention.head_count_kv").unwrap(), Some(PerLayer::All(2)));
    let sections = gguf.per_layer_usize("qwen35moe.rope.dimension_sections").unwrap();
    assert_eq!(sections, Some(PerLayer::Each(vec![3, 3, 2, 0])));
    let recurrent = gguf.per_layer_bool("qwen35moe.attention.recurrent_layers").unwrap().unwrap();
    assert_eq!((recurrent.layers(), recurrent.at(0), recurrent.at(3)), (Some(9), Some(true), Some(false)));
    let tokens = gguf.array("tokenizer.ggml.tokens").unwrap().unwrap();
    assert_eq!((tokens.len(), tokens.strs().unwrap().next().unwrap().as_str().unwrap()), (2060, "!"));
    assert_eq!(gguf.array("tokenizer.ggml.token_type").unwrap().unwrap().i32s().unwrap().len(), 2060);
    assert_eq!(gguf.array("tokenizer.ggml.merges").unwrap().unwrap().strs().unwrap().len(), 1792);
    assert_eq!(gguf.bool("tokenizer.ggml.add_bos_token").unwrap(), Some(false));
    assert!(gguf.str("tokenizer.chat_template").unwrap().unwrap().starts_with("{%- macro"));
}

/// `data/tiny-qwen35moe.tensors` was printed by the Python package: name, type, shape, offset, bytes.
#[test]
fn tiny_model_tensors() {
    let Some(path) = tiny() else { return };
    let gguf = open(&path).unwrap();
    let listed: Vec<String> = gguf
        .tensors()
        .iter()
        .map(|t| {
            let shape: Vec<String> = t.shape().iter().map(u64::to_string).collect();
            format!("{} {} {} {} {}", t.name(), t.ty(), shape.join("x"), t.offset(), t.n_bytes())
        })
        .collect();
    let expected: Vec<&str> = include_str!("data/tiny-qwen35moe.tensors").lines().collect();
    assert_eq!(listed.len(), 169);
    assert_eq!(listed, expected);
}

/// Changes in the header of a real file, in place.
#[test]
fn tiny_model_with_a_changed_header_never_panics() {
    let Some(path) = tiny() else { return };
    let mut file = std::fs::read(&path).unwrap();
    let header = 72_160;
    // Primes spread the places over keys, lengths, strings and the tensor table.
    for at in (0..header).step_by(401).chain(0..600).chain((header - 11_000..header).step_by(37)) {
        let kept: [u8; 8] = file[at..at + 8].try_into().unwrap();
        for value in [0, 1, 1 << 31, 1 << 40, 1 << 63, u64::MAX, u64::MAX - 31] {
            file[at..at + 8].copy_from_slice(&value.to_le_bytes());
            if let Ok(gguf) = Gguf::parse(&file) {
                assert!(gguf.tensors().len() <= 169);
            }
        }
        file[at..at + 8].copy_from_slice(&kept);
    }
    for length in (0..header).step_by(97) {
        assert!(Gguf::parse(&file[..length]).is_err());
    }
    assert!(Gguf::parse(&file).is_ok());
}

#[test]
fn vocabularies() {
    for (name, size) in [("qwen35", 151_936), ("gemma-4", 262_144)] {
        let Some(path) = found(&format!("../shared/vocab/ggml-vocab-{name}.gguf")) else { continue };
        let gguf = open(&path).unwrap();
        assert!(gguf.tensors().is_empty());
        let tokens = gguf.array("tokenizer.ggml.tokens").unwrap().unwrap();
        assert_eq!(tokens.len(), size, "{name}");
        assert_eq!(tokens.strs().unwrap().filter(|token| token.as_str().is_ok()).count(), size);
        assert_eq!(gguf.array("tokenizer.ggml.token_type").unwrap().unwrap().i32s().unwrap().len(), size);
    }
}

/// Files of llama.cpp come out of the writer as they were, byte for byte.
#[test]
fn rewriting_a_real_file_changes_nothing() {
    let models = ["models/tiny-qwen35moe-Q4_K_M.gguf", "../shared/models/tiny-gemma4-mmproj-bf16.gguf"];
    for path in models.into_iter().filter_map(found) {
        let gguf = open(&path).unwrap();
        let mut writer = Writer::new();
        for (key, value) in gguf.metadata() {
            writer.set(key, value).unwrap();
        }
        for tensor in gguf.tensors() {
            writer.tensor(tensor.name(), tensor.shape(), tensor.ty()).unwrap();
        }
        let mut copy = Vec::new();
        writer
            .write(&mut copy, |tensor, sink| {
                sink.write_all(gguf.data(gguf.tensor(tensor.name()).expect("added above")))
            })
            .unwrap();
        assert!(copy == gguf.part(0).unwrap().as_ref(), "{}", path.display());
    }
}

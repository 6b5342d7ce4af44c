//! What the text tests share: files of the reference collection, and what is in them.
#![allow(dead_code, reason = "each test file uses its part")]

pub(crate) mod answer;

use std::path::{Path, PathBuf};

use skep_engine::tokenizer::{Parts, Tokenizer};

/// A file of the reference collection, if that is present.
pub(crate) fn shared(path: &str) -> Option<PathBuf> {
    let path = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../shared")).join(path);
    if !path.exists() {
        println!("skipped: {} is absent", path.display());
        return None;
    }
    Some(path)
}

/// The bundled Qwen model.
pub(crate) fn tiny() -> PathBuf {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../models")).join("tiny-qwen35moe-Q4_K_M.gguf")
}

/// The bundled Gemma 4 model.
pub(crate) fn tiny_gemma() -> PathBuf {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../models")).join("tiny-gemma4-Q4_K_M.gguf")
}

pub(crate) fn json(path: &Path) -> serde_json::Value {
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

pub(crate) fn parts(path: &Path) -> Parts {
    Parts::from_gguf(&skep_gguf::open(path).unwrap()).unwrap()
}

pub(crate) fn tokenizer(path: &Path) -> Tokenizer {
    Tokenizer::from_gguf(&skep_gguf::open(path).unwrap()).unwrap()
}

/// The chat template in a model file.
pub(crate) fn template(path: &Path) -> String {
    skep_gguf::open(path).unwrap().str("tokenizer.chat_template").unwrap().unwrap().to_owned()
}

//! What the text tests share.
#![allow(dead_code)]
use skep_engine::tokenizer::{Parts, Tokenizer};
use std::path::PathBuf;

pub fn shared(path: &str) -> Option<PathBuf> {
    let path = PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../../shared")).join(path);
    if path.exists() {
        return Some(path);
    }
    println!("skipped: {} is absent", path.display());
    None
}

pub fn json(path: &std::path::Path) -> serde_json::Value {
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

pub fn key(file: &str, key: &str) -> serde_json::Value {
    let name = std::path::Path::new(file).file_name().unwrap().to_str().unwrap();
    json(&PathBuf::from(format!("/tmp/tx/parts/{name}.json")))[key].clone()
}

pub fn parts(file: &str) -> Parts {
    let name = std::path::Path::new(file).file_name().unwrap().to_str().unwrap();
    let d = json(&PathBuf::from(format!("/tmp/tx/parts/{name}.json")));
    let strs = |k: &str| d[k].as_array().unwrap().iter().map(|x| x.as_str().unwrap().to_owned()).collect::<Vec<_>>();
    let id = |k: &str| d[k].as_u64().map(|x| x as u32);
    Parts {
        model: d["tokenizer.ggml.model"].as_str().unwrap().into(),
        pre: d["tokenizer.ggml.pre"].as_str().unwrap_or_default().into(),
        tokens: strs("tokenizer.ggml.tokens"),
        types: d["tokenizer.ggml.token_type"].as_array().unwrap().iter().map(|x| x.as_i64().unwrap() as i32).collect(),
        merges: strs("tokenizer.ggml.merges"),
        bos: id("tokenizer.ggml.bos_token_id"),
        eos: id("tokenizer.ggml.eos_token_id"),
        eot: id("tokenizer.ggml.eot_token_id"),
        eom: id("tokenizer.ggml.eom_token_id"),
        padding: id("tokenizer.ggml.padding_token_id"),
        add_bos: d["tokenizer.ggml.add_bos_token"].as_bool(),
    }
}

pub fn tokenizer(file: &str) -> Tokenizer {
    Tokenizer::from_parts(parts(file)).unwrap()
}

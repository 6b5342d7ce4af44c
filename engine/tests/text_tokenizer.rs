//! The tokenizer against Hugging Face's ids and llama.cpp's, and its laws.
mod text_support;
use skep_engine::tokenizer::Specials;
use text_support::{json, parts, shared, tokenizer};

#[test]
fn oracle() {
    let Some(file) = shared("oracle/qwen35moe-nano-f32.gguf") else { return };
    let t = tokenizer(&file);
    let v = json(&shared("oracle/tokenizer_vectors.json").unwrap());
    for case in v["qwen35moe"].as_array().unwrap() {
        let text = case["text"].as_str().unwrap();
        let want: Vec<u32> = serde_json::from_value(case["hf"].clone()).unwrap();
        assert_eq!(t.encode(text, Specials::Parse).unwrap(), want, "{text:?}");
    }
}

#[test]
fn llama() {
    let Some(file) = shared("vocab/ggml-vocab-qwen35.gguf") else { return };
    let p = parts(&file);
    let now = std::time::Instant::now();
    let t = skep_engine::tokenizer::Tokenizer::from_parts(p).unwrap();
    println!("{:?} {:?}", now.elapsed(), t);
    let inp = std::fs::read_to_string(shared("vocab/ggml-vocab-qwen35.gguf.inp").unwrap()).unwrap();
    let out = std::fs::read_to_string(shared("vocab/ggml-vocab-qwen35.gguf.out").unwrap()).unwrap();
    let texts: Vec<&str> = inp.split("\n__ggml_vocab_test__\n").collect();
    let lines: Vec<&str> = out.lines().collect();
    println!("{} {}", texts.len(), lines.len());
    let mut bad = 0;
    for (text, line) in texts.iter().zip(lines) {
        let want: Vec<u32> = line.split_whitespace().map(|x| x.parse().unwrap()).collect();
        let got = t.encode(text, Specials::AsText).unwrap();
        if got != want {
            bad += 1;
            println!("{text:?}\n got {got:?}\nwant {want:?}");
        }
    }
    for n in [1_000_000usize, 5_000_000] {
        for tail in ["", "x"] {
        let text = " ".repeat(n) + tail;
        let now = std::time::Instant::now();
        println!("{n} {:?} {:?}", t.encode(&text, Specials::AsText).map(|x| x.len()), now.elapsed());
        let text = "\u{301}".repeat(n / 10) + tail;
        let now = std::time::Instant::now();
        println!("{n} {:?} {:?}", t.encode(&text, Specials::AsText).map(|x| x.len()), now.elapsed());
        }
    }
}

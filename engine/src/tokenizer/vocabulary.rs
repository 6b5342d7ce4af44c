//! The parts of a vocabulary, checked and put together.

use std::collections::HashSet;

use skep_gguf::Gguf;
use tokenizers::models::bpe::{BPE, Vocab};
use tokenizers::utils::SysRegex;

use super::specials::Matcher;
use super::{Tokenizer, alphabet};
use crate::error::{Error, ErrorKind, Result};

/// The kind of a token, `tokenizer.ggml.token_type` of a GGUF file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum TokenType {
    /// 1: made by BPE.
    Normal,
    /// 2: stands for what cannot be encoded.
    Unknown,
    /// 3: steers the model, is not shown, never comes from user text.
    Control,
    /// 4: one token wherever its text appears, shown as text.
    UserDefined,
    /// 5: padding of the vocabulary.
    Unused,
    /// 6: one byte.
    Byte,
}

impl TokenType {
    fn from_id(id: i32) -> Option<Self> {
        Some(match id {
            1 => Self::Normal,
            2 => Self::Unknown,
            3 => Self::Control,
            4 => Self::UserDefined,
            5 => Self::Unused,
            6 => Self::Byte,
            _ => return None,
        })
    }
}

/// What a GGUF file says about its tokenizer, key by key; see [`Tokenizer::from_parts`].
#[derive(Debug, Clone, Default)]
pub struct Parts {
    /// `tokenizer.ggml.model`: the family of the tokenizer.
    pub model: String,
    /// `tokenizer.ggml.pre`: the name of the pre-tokenizer.
    pub pre: String,
    /// `tokenizer.ggml.tokens`: texts by id, in the byte-level alphabet except for special tokens.
    pub tokens: Vec<String>,
    /// `tokenizer.ggml.token_type`: types by id.
    pub types: Vec<i32>,
    /// `tokenizer.ggml.merges`: pairs of tokens separated by a space, the most important first.
    pub merges: Vec<String>,
    /// `tokenizer.ggml.bos_token_id`.
    pub bos: Option<u32>,
    /// `tokenizer.ggml.eos_token_id`.
    pub eos: Option<u32>,
    /// `tokenizer.ggml.eot_token_id`: the end of a turn.
    pub eot: Option<u32>,
    /// `tokenizer.ggml.eom_token_id`: the end of a message that waits for a tool.
    pub eom: Option<u32>,
    /// `tokenizer.ggml.padding_token_id`.
    pub padding: Option<u32>,
    /// `tokenizer.ggml.add_bos_token`; absent, it follows from `pre`.
    pub add_bos: Option<bool>,
}

impl Parts {
    /// Reads the parts from the metadata of a file.
    ///
    /// # Errors
    ///
    /// `ErrorKind::Tokenizer` naming the key that is missing or of another type, or the token that is not UTF-8.
    pub fn from_gguf<B: AsRef<[u8]>>(file: &Gguf<B>) -> Result<Self> {
        let wrong = |source: skep_gguf::Error| error(source.to_string());
        let text = |key: &str| {
            let value = file.str(key).and_then(|value| file.required(key, value));
            value.map(str::to_owned).map_err(wrong)
        };
        let array = |key: &str| file.array(key).and_then(|value| file.required(key, value)).map_err(wrong);
        let texts = |key: &str| {
            let strings = array(key)?.strs().map_err(|source| error(format!("{key}: {source}")))?;
            let mut texts = Vec::with_capacity(strings.len());
            for (at, string) in strings.enumerate() {
                let text = string.as_str().map_err(|source| error(format!("{key}[{at}]: {source}")))?;
                texts.push(text.to_owned());
            }
            Ok::<_, Error>(texts)
        };
        let id = |key: &str| file.u32(key).map_err(wrong);
        let types = "tokenizer.ggml.token_type";
        Ok(Self {
            model: text("tokenizer.ggml.model")?,
            pre: file.str("tokenizer.ggml.pre").map_err(wrong)?.unwrap_or_default().to_owned(),
            tokens: texts("tokenizer.ggml.tokens")?,
            types: array(types)?.i32s().map_err(|source| error(format!("{types}: {source}")))?.collect(),
            merges: texts("tokenizer.ggml.merges")?,
            bos: id("tokenizer.ggml.bos_token_id")?,
            eos: id("tokenizer.ggml.eos_token_id")?,
            eot: id("tokenizer.ggml.eot_token_id")?,
            eom: id("tokenizer.ggml.eom_token_id")?,
            padding: id("tokenizer.ggml.padding_token_id")?,
            add_bos: file.bool("tokenizer.ggml.add_bos_token").map_err(wrong)?,
        })
    }
}

/// How text becomes words, by the name in `tokenizer.ggml.pre`.
struct PreTokenizer {
    name: &'static str,
    /// Splits a text into words; matches every character.
    words: &'static str,
    /// Normalise to NFC first.
    nfc: bool,
    /// A word that is a token is that token, whatever the merges would make of it.
    ignore_merges: bool,
    /// Prompts begin with BOS unless the file says otherwise.
    add_bos: bool,
}

/// Patterns and settings as in the `tokenizer.json` published with the models the names stand for.
const PRE_TOKENIZERS: [PreTokenizer; 3] = [
    PreTokenizer {
        name: "qwen35",
        words: r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        nfc: true,
        ignore_merges: false,
        add_bos: false,
    },
    PreTokenizer {
        name: "qwen2",
        words: r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        nfc: true,
        ignore_merges: false,
        add_bos: false,
    },
    PreTokenizer {
        name: "llama-bpe",
        words: r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        nfc: false,
        ignore_merges: true,
        add_bos: true,
    },
];

/// Markers that steer a conversation; some files wrongly type them NORMAL.
const CONTROL_MARKERS: [&str; 9] = [
    "<|begin_of_text|>",
    "<|end_header_id|>",
    "<|end_of_text|>",
    "<|endoftext|>",
    "<|eom_id|>",
    "<|eot_id|>",
    "<|im_end|>",
    "<|im_start|>",
    "<|start_header_id|>",
];

/// Markers that are one token and shown; some files wrongly type them NORMAL.
const SHOWN_MARKERS: [&str; 6] =
    ["</think>", "</tool_call>", "</tool_response>", "<think>", "<tool_call>", "<tool_response>"];

/// Control tokens that end a generation even when no key of the file names them.
const END_MARKERS: [&str; 5] = ["<|end_of_text|>", "<|endoftext|>", "<|eom_id|>", "<|eot_id|>", "<|im_end|>"];

fn error(message: impl Into<String>) -> Error {
    Error::new(ErrorKind::Tokenizer, message)
}

pub(super) fn assemble(parts: Parts) -> Result<Tokenizer> {
    let pre = pre_tokenizer(&parts.model, &parts.pre)?;
    let n_vocab = parts.tokens.len();
    check_ids(&parts, n_vocab)?;
    let merges = split_merges(&parts.merges)?;
    let types = token_types(&parts, &merges)?;

    let mut bytes = Vec::new();
    let mut offsets = vec![0];
    for (token, &kind) in parts.tokens.iter().zip(&types) {
        append_bytes(token, kind, &mut bytes);
        let end = u32::try_from(bytes.len());
        offsets.push(end.map_err(|_| error("tokenizer.ggml.tokens: more than 4 GiB of text"))?);
    }

    let special = |kind: TokenType| matches!(kind, TokenType::Control | TokenType::UserDefined);
    let named = |wanted: fn(TokenType) -> bool| {
        let typed = parts.tokens.iter().zip(&types).enumerate();
        typed
            .filter(move |(_, (_, kind))| wanted(**kind))
            .map(|(id, (text, kind))| (text.clone(), id as u32, *kind))
    };
    let mut specials: Vec<(String, u32)> = named(special).map(|(text, id, _)| (text, id)).collect();
    specials.sort();
    let matcher = Matcher::new(named(special).map(|(text, id, kind)| (text, id, kind == TokenType::Control)));

    // Special tokens come from the matcher alone, so that text marked as text cannot become one.
    let made_by_bpe: fn(TokenType) -> bool =
        |kind| !matches!(kind, TokenType::Control | TokenType::Unknown | TokenType::Unused);
    let vocab: Vocab = named(made_by_bpe).map(|(text, id, _)| (text, id)).collect();
    check_vocab(&parts.tokens, &vocab, &merges)?;

    let mut ends: Vec<u32> = [parts.eos, parts.eot, parts.eom].into_iter().flatten().collect();
    ends.extend(END_MARKERS.iter().filter_map(|marker| {
        let at = specials.binary_search_by(|(text, _)| text.as_str().cmp(marker)).ok()?;
        let id = specials[at].1;
        (types[id as usize] == TokenType::Control).then_some(id)
    }));
    ends.sort_unstable();
    ends.dedup();

    let add_bos = parts.add_bos.unwrap_or(pre.add_bos && parts.bos.is_some());
    if add_bos && parts.bos.is_none() {
        return Err(error(
            "tokenizer.ggml.add_bos_token is true, but there is no tokenizer.ggml.bos_token_id",
        ));
    }
    let bpe = BPE::builder()
        .vocab_and_merges(vocab, merges.into_iter().map(|(a, b)| (a.to_owned(), b.to_owned())).collect())
        .ignore_merges(pre.ignore_merges)
        .build()
        .map_err(|source| error(format!("tokenizer.ggml.merges: {source}")))?;
    let words =
        SysRegex::new(pre.words).map_err(|source| error(format!("pattern of {}: {source}", pre.name)))?;
    Ok(Tokenizer {
        bpe,
        words,
        normalise: pre.nfc,
        matcher,
        bytes,
        offsets,
        types,
        specials,
        ends,
        bos: parts.bos,
        eos: parts.eos,
        add_bos,
    })
}

fn pre_tokenizer(model: &str, pre: &str) -> Result<&'static PreTokenizer> {
    if model != "gpt2" {
        return Err(error(format!("tokenizer.ggml.model is {model:?}; supported: \"gpt2\"")));
    }
    PRE_TOKENIZERS.iter().find(|known| known.name == pre).ok_or_else(|| {
        let names: Vec<String> = PRE_TOKENIZERS.iter().map(|known| format!("{:?}", known.name)).collect();
        error(format!("tokenizer.ggml.pre is {pre:?}; supported: {}", names.join(", ")))
    })
}

fn check_ids(parts: &Parts, n_vocab: usize) -> Result<()> {
    if n_vocab == 0 {
        return Err(error("tokenizer.ggml.tokens is empty"));
    }
    if u32::try_from(n_vocab).is_err() {
        return Err(error(format!("tokenizer.ggml.tokens has {n_vocab} entries, more than ids can count")));
    }
    if parts.types.len() != n_vocab {
        return Err(error(format!(
            "tokenizer.ggml.token_type has {} entries for {n_vocab} tokens",
            parts.types.len()
        )));
    }
    let ids = [
        ("bos_token_id", parts.bos),
        ("eos_token_id", parts.eos),
        ("eot_token_id", parts.eot),
        ("eom_token_id", parts.eom),
        ("padding_token_id", parts.padding),
    ];
    for (key, id) in ids {
        if let Some(id) = id
            && id as usize >= n_vocab
        {
            return Err(error(format!("tokenizer.ggml.{key} is {id}, but there are {n_vocab} tokens")));
        }
    }
    Ok(())
}

fn split_merges(merges: &[String]) -> Result<Vec<(&str, &str)>> {
    let mut pairs = Vec::with_capacity(merges.len());
    for (rank, merge) in merges.iter().enumerate() {
        match merge.split_once(' ') {
            Some((left, right)) if !left.is_empty() && !right.is_empty() && !right.contains(' ') => {
                pairs.push((left, right));
            }
            _ => {
                return Err(error(format!(
                    "tokenizer.ggml.merges[{rank}] is {merge:?}, not two tokens with a space between"
                )));
            }
        }
    }
    Ok(pairs)
}

/// The types of the file, with known markers that are typed NORMAL put right.
fn token_types(parts: &Parts, merges: &[(&str, &str)]) -> Result<Vec<TokenType>> {
    let mut types = Vec::with_capacity(parts.types.len());
    for (id, &kind) in parts.types.iter().enumerate() {
        let known = TokenType::from_id(kind);
        types.push(known.ok_or_else(|| error(format!("tokenizer.ggml.token_type[{id}] is {kind}")))?);
    }
    for (id, token) in parts.tokens.iter().enumerate() {
        if types[id] != TokenType::Normal || !token.starts_with('<') {
            continue;
        }
        let right = match token.as_str() {
            marker if CONTROL_MARKERS.contains(&marker) => TokenType::Control,
            marker if SHOWN_MARKERS.contains(&marker) => TokenType::UserDefined,
            _ => continue,
        };
        let made = |(left, right): &(&str, &str)| token.strip_prefix(left) == Some(*right);
        if !merges.iter().any(made) {
            types[id] = right;
        }
    }
    Ok(types)
}

fn append_bytes(token: &str, kind: TokenType, bytes: &mut Vec<u8>) {
    let literal = matches!(kind, TokenType::Control | TokenType::UserDefined);
    let start = bytes.len();
    for c in token.chars() {
        match alphabet::byte_of(c) {
            Some(byte) if !literal => bytes.push(byte),
            _ => {
                // Not in the byte-level alphabet, so it is text as it stands.
                bytes.truncate(start);
                bytes.extend_from_slice(token.as_bytes());
                return;
            }
        }
    }
}

fn check_vocab(tokens: &[String], vocab: &Vocab, merges: &[(&str, &str)]) -> Result<()> {
    let mut seen = HashSet::with_capacity(tokens.len());
    for (id, token) in tokens.iter().enumerate() {
        if !seen.insert(token.as_str()) {
            return Err(error(format!("tokenizer.ggml.tokens[{id}] is {token:?}, which appears before")));
        }
    }
    let mut name = String::new();
    for byte in 0..=255u8 {
        name.clear();
        name.push(alphabet::char_of(byte));
        if !vocab.contains_key(&name) {
            return Err(error(format!("tokenizer.ggml.tokens has no token for byte {byte:#04x} ({name:?})")));
        }
    }
    for (rank, (left, right)) in merges.iter().enumerate() {
        name.clear();
        name.push_str(left);
        name.push_str(right);
        for part in [left, right, name.as_str()] {
            if !vocab.contains_key(part) {
                return Err(error(format!(
                    "tokenizer.ggml.merges[{rank}] names {part:?}, which is no token that BPE can make"
                )));
            }
        }
    }
    Ok(())
}

//! The parts of a vocabulary, checked and put together.

use std::collections::HashSet;

use skep_gguf::Gguf;
use tokenizers::models::bpe::{BPE, Vocab};
use tokenizers::utils::SysRegex;

use super::markers::{BYTE_LEVEL, GEMMA, ImageMarkers, Markers};
use super::specials::{Matcher, Power};
use super::{SPACE, Spelling, Tokenizer, alphabet};
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
    /// `tokenizer.ggml.tokens`: texts by id, as the family spells them except for special tokens.
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
    /// `tokenizer.ggml.add_bos_token`; absent, it follows from `model` and `pre`.
    pub add_bos: Option<bool>,
    /// `tokenizer.ggml.suppress_tokens`: ids that must never be sampled.
    pub suppressed: Vec<u32>,
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
        let ids = |key: &str| {
            let Some(array) = file.array(key).map_err(wrong)? else { return Ok(Vec::new()) };
            // Some write the ids as signed integers.
            let unsigned = array.u32s().map(Iterator::collect::<Vec<u32>>);
            unsigned
                .or_else(|source| {
                    array.i32s().map(|ids| ids.map(i32::cast_unsigned).collect()).map_err(|_| source)
                })
                .map_err(|source| error(format!("{key}: {source}")))
        };
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
            suppressed: ids("tokenizer.ggml.suppress_tokens")?,
        })
    }
}

/// How text becomes words in the family `gpt2`, by the name in `tokenizer.ggml.pre`.
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

/// A family of tokenizers, by the name in `tokenizer.ggml.model`.
#[derive(Clone, Copy)]
enum Family {
    ByteLevel(&'static PreTokenizer),
    Gemma,
}

impl Family {
    fn of(model: &str, pre: &str) -> Result<Self> {
        match model {
            "gpt2" => {
                let known = PRE_TOKENIZERS.iter().find(|known| known.name == pre);
                known
                    .map(Self::ByteLevel)
                    .ok_or_else(|| unknown_pre(pre, PRE_TOKENIZERS.iter().map(|known| known.name)))
            }
            "gemma4" if ["", "default", "gemma4"].contains(&pre) => Ok(Self::Gemma),
            "gemma4" => Err(unknown_pre(pre, ["gemma4"].into_iter())),
            _ => Err(error(format!("tokenizer.ggml.model is {model:?}; supported: \"gpt2\", \"gemma4\""))),
        }
    }

    fn spelling(self) -> Result<Spelling> {
        match self {
            Self::ByteLevel(pre) => {
                let words = SysRegex::new(pre.words)
                    .map_err(|source| error(format!("pattern of {}: {source}", pre.name)))?;
                Ok(Spelling::Bytes { words, nfc: pre.nfc })
            }
            Self::Gemma => Ok(Spelling::Lines),
        }
    }

    fn markers(self) -> &'static Markers {
        match self {
            Self::ByteLevel(_) => &BYTE_LEVEL,
            Self::Gemma => &GEMMA,
        }
    }

    /// Whether prompts begin with BOS unless the file says otherwise.
    fn adds_bos(self) -> bool {
        match self {
            Self::ByteLevel(pre) => pre.add_bos,
            Self::Gemma => true,
        }
    }

    /// The token that must exist for a byte.
    fn byte_token(self, byte: u8) -> String {
        match self {
            Self::ByteLevel(_) => alphabet::char_of(byte).into(),
            Self::Gemma => format!("<0x{byte:02X}>"),
        }
    }

    /// Appends what an ordinary token stands for.
    fn append_bytes(self, token: &str, kind: TokenType, bytes: &mut Vec<u8>) {
        match self {
            Self::ByteLevel(_) => {
                let start = bytes.len();
                for c in token.chars() {
                    match alphabet::byte_of(c) {
                        Some(byte) => bytes.push(byte),
                        None => {
                            // Not in the byte-level alphabet, so it is text as it stands.
                            bytes.truncate(start);
                            bytes.extend_from_slice(token.as_bytes());
                            return;
                        }
                    }
                }
            }
            Self::Gemma => match (kind, byte_of(token)) {
                (TokenType::Byte, Some(byte)) => bytes.push(byte),
                _ => {
                    let mut pieces = token.split(SPACE);
                    bytes.extend(pieces.next().unwrap_or_default().bytes());
                    pieces.for_each(|piece| {
                        bytes.push(b' ');
                        bytes.extend(piece.bytes());
                    });
                }
            },
        }
    }
}

/// The byte of a token `<0xNN>`.
fn byte_of(token: &str) -> Option<u8> {
    let digits = token.strip_prefix("<0x")?.strip_suffix('>')?;
    match digits.len() {
        2 => u8::from_str_radix(digits, 16).ok(),
        _ => None,
    }
}

fn unknown_pre(pre: &str, known: impl Iterator<Item = &'static str>) -> Error {
    let names: Vec<String> = known.map(|name| format!("{name:?}")).collect();
    error(format!("tokenizer.ggml.pre is {pre:?}; supported: {}", names.join(", ")))
}

fn error(message: impl Into<String>) -> Error {
    Error::new(ErrorKind::Tokenizer, message)
}

pub(super) fn assemble(parts: Parts) -> Result<Tokenizer> {
    let family = Family::of(&parts.model, &parts.pre)?;
    let markers = family.markers();
    let n_vocab = parts.tokens.len();
    check_ids(&parts, n_vocab)?;
    let merges = split_merges(&parts.merges)?;
    let types = token_types(&parts, &merges, markers)?;

    let mut bytes = Vec::new();
    let mut offsets = Vec::with_capacity(n_vocab + 1);
    offsets.push(0);
    for (token, &kind) in parts.tokens.iter().zip(&types) {
        match is_special(kind) {
            true => bytes.extend_from_slice(token.as_bytes()),
            false => family.append_bytes(token, kind, &mut bytes),
        }
        let end = u32::try_from(bytes.len());
        offsets.push(end.map_err(|_| error("tokenizer.ggml.tokens: more than 4 GiB of text"))?);
    }

    let typed = || (0..).zip(parts.tokens.iter().zip(&types));
    let power = |kind: TokenType| match kind {
        TokenType::Control => Power::Control,
        _ if markers.guards_shown => Power::Guarded,
        _ => Power::Shown,
    };
    let special = typed().filter(|(_, (_, kind))| is_special(**kind));
    let mut specials: Vec<(String, u32)> =
        special.clone().map(|(id, (text, _))| (text.clone(), id)).collect();
    specials.sort();
    let matcher = Matcher::new(special.map(|(id, (text, kind))| (text.clone(), id, power(*kind))));
    let id_of = |marker: &str| {
        let at = specials.binary_search_by(|(text, _)| text.as_str().cmp(marker)).ok()?;
        Some(specials[at].1)
    };

    // Special tokens come from the matcher alone, so that text marked as text cannot become one.
    let made_by_bpe = |kind: TokenType| match kind {
        TokenType::Control | TokenType::Unknown | TokenType::Unused => false,
        TokenType::UserDefined => !markers.guards_shown,
        _ => true,
    };
    let made = typed().filter(|(_, (_, kind))| made_by_bpe(**kind));
    let vocab: Vocab = made.map(|(id, (text, _))| (text.clone(), id)).collect();
    check_vocab(&parts.tokens, &vocab, &merges, family)?;

    let mut ends: Vec<u32> = [parts.eos, parts.eot, parts.eom].into_iter().flatten().collect();
    ends.extend(markers.ends.iter().filter_map(|marker| id_of(marker)));
    ends.sort_unstable();
    ends.dedup();
    let mut suppressed = parts.suppressed;
    suppressed.extend(markers.suppressed.iter().filter_map(|marker| id_of(marker)));
    suppressed.sort_unstable();
    suppressed.dedup();
    let image_markers = markers.image.and_then(|[begin, soft, end]| {
        Some(ImageMarkers { begin: id_of(begin)?, soft: id_of(soft)?, end: id_of(end)? })
    });

    let add_bos = parts.add_bos.unwrap_or(family.adds_bos() && parts.bos.is_some());
    if add_bos && parts.bos.is_none() {
        return Err(error(
            "tokenizer.ggml.add_bos_token is true, but there is no tokenizer.ggml.bos_token_id",
        ));
    }
    let bpe = BPE::builder()
        .vocab_and_merges(vocab, merges.into_iter().map(|(a, b)| (a.to_owned(), b.to_owned())).collect())
        .ignore_merges(matches!(family, Family::ByteLevel(pre) if pre.ignore_merges))
        .byte_fallback(matches!(family, Family::Gemma))
        .build()
        .map_err(|source| error(format!("tokenizer.ggml.merges: {source}")))?;
    Ok(Tokenizer {
        bpe,
        spelling: family.spelling()?,
        matcher,
        bytes,
        offsets,
        types,
        specials,
        ends,
        suppressed,
        image_markers,
        bos: parts.bos,
        eos: parts.eos,
        add_bos,
    })
}

/// Whether tokens of a type are matched in text, and stand for it literally.
fn is_special(kind: TokenType) -> bool {
    matches!(kind, TokenType::Control | TokenType::UserDefined)
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
    if let Some(at) = parts.suppressed.iter().position(|&id| id as usize >= n_vocab) {
        let id = parts.suppressed[at];
        return Err(error(format!(
            "tokenizer.ggml.suppress_tokens[{at}] is {id}, but there are {n_vocab} tokens"
        )));
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

/// The types of the file, with known markers that are typed otherwise put right.
fn token_types(parts: &Parts, merges: &[(&str, &str)], markers: &Markers) -> Result<Vec<TokenType>> {
    let mut types = Vec::with_capacity(parts.types.len());
    for (id, &kind) in parts.types.iter().enumerate() {
        let known = TokenType::from_id(kind);
        types.push(known.ok_or_else(|| error(format!("tokenizer.ggml.token_type[{id}] is {kind}")))?);
    }
    for (id, token) in parts.tokens.iter().enumerate() {
        if !token.starts_with('<') {
            continue;
        }
        let right = match token.as_str() {
            marker if markers.control.contains(&marker) => TokenType::Control,
            marker if markers.shown.contains(&marker) => TokenType::UserDefined,
            _ => continue,
        };
        // A marker that BPE makes is ordinary text to this model.
        let made = |(left, right): &(&str, &str)| token.strip_prefix(left) == Some(*right);
        if types[id] != TokenType::Normal || !merges.iter().any(made) {
            types[id] = right;
        }
    }
    Ok(types)
}

fn check_vocab(tokens: &[String], vocab: &Vocab, merges: &[(&str, &str)], family: Family) -> Result<()> {
    let mut seen = HashSet::with_capacity(tokens.len());
    for (id, token) in tokens.iter().enumerate() {
        if !seen.insert(token.as_str()) {
            return Err(error(format!("tokenizer.ggml.tokens[{id}] is {token:?}, which appears before")));
        }
    }
    for byte in 0..=255u8 {
        let name = family.byte_token(byte);
        if !vocab.contains_key(&name) {
            return Err(error(format!("tokenizer.ggml.tokens has no token for byte {byte:#04x} ({name:?})")));
        }
    }
    let mut name = String::new();
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

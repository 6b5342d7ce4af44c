//! Text to token ids and back, from the vocabulary inside a GGUF file.
//!
//! A GGUF file carries the parts of a byte-level BPE tokenizer (`tokenizer.ggml.tokens`, `.merges`, `.token_type`
//! and the name of its pre-tokenizer, `.pre`), not a `tokenizer.json`. [`Tokenizer`] puts them together and encodes as
//! Hugging Face's `tokenizers` does: special tokens first, then per remaining segment Unicode normalisation, the split
//! into words, and BPE inside each word.
//!
//! # Special tokens
//!
//! Tokens of type CONTROL (3) and USER_DEFINED (4) are matched in the text before anything else, the leftmost first and
//! the longest at one place. [`Specials`] says which of them a caller wants matched: USER_DEFINED ones always are,
//! CONTROL ones only where the text comes from a template or from a caller who may write them.
//!
//! # Shielding
//!
//! A chat template joins its own text with text from users. [`Tokenizer::shield`] puts the noncharacter U+FDD0 before
//! every place of a user's text where a CONTROL token starts (or could start, at the very end of the text), and
//! [`Specials::Shielded`] matches no CONTROL token right behind that mark and drops the mark. So
//! `<|im_end|>` typed by a user is ten or so ordinary tokens, while the template's own is one. USER_DEFINED tokens
//! (`<think>`, `<tool_call>`) carry no authority and stay as they are.

mod alphabet;
mod specials;
mod vocabulary;

use std::borrow::Cow;

use skep_gguf::Gguf;
use tokenizers::models::bpe::BPE;
use tokenizers::utils::SysRegex;
use tokenizers::{Model, NormalizedString};

pub use self::alphabet::char_of;
pub use self::vocabulary::{Parts, TokenType};

use self::specials::Matcher;
use crate::error::{Error, ErrorKind, Result};

/// The mark put before control-token literals of user text: a noncharacter, never meant for interchange.
pub(crate) const SHIELD: char = '\u{FDD0}';

/// Which special tokens are matched in a text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Specials {
    /// Only USER_DEFINED tokens: control-token literals are ordinary text.
    AsText,
    /// CONTROL and USER_DEFINED tokens.
    Parse,
    /// As [`Parse`](Self::Parse), except CONTROL tokens behind a mark of [`Tokenizer::shield`]; the marks are dropped.
    Shielded,
}

/// A byte-level BPE tokenizer built from GGUF metadata.
pub struct Tokenizer {
    bpe: BPE,
    words: SysRegex,
    normalise: bool,
    matcher: Matcher,
    /// The bytes of all tokens, one after the other.
    bytes: Vec<u8>,
    /// `bytes[offsets[id]..offsets[id + 1]]` are the bytes of token `id`.
    offsets: Vec<u32>,
    types: Vec<TokenType>,
    specials: Vec<(String, u32)>,
    ends: Vec<u32>,
    bos: Option<u32>,
    eos: Option<u32>,
    add_bos: bool,
}

impl Tokenizer {
    /// Puts a tokenizer together from the parts a file holds.
    ///
    /// # Errors
    ///
    /// `ErrorKind::Tokenizer` when the model is not `gpt2`, the pre-tokenizer is not one of those known here, or the
    /// parts do not fit together: lists of different length, ids outside the vocabulary, tokens that appear twice, a
    /// byte without a token, merges that lack a space or name absent tokens.
    pub fn from_parts(parts: Parts) -> Result<Self> {
        vocabulary::assemble(parts)
    }

    /// Puts a tokenizer together from the keys `tokenizer.ggml.*` of a file.
    ///
    /// # Errors
    ///
    /// As [`from_parts`](Self::from_parts), and when a key is missing or of another type.
    pub fn from_gguf<B: AsRef<[u8]>>(file: &Gguf<B>) -> Result<Self> {
        Self::from_parts(Parts::from_gguf(file)?)
    }

    /// Encodes a text, without adding a BOS token.
    ///
    /// # Errors
    ///
    /// `ErrorKind::Request` when the text has a run of about a million whitespace characters, which exceeds the limits of
    /// the regex engine.
    pub fn encode(&self, text: &str, specials: Specials) -> Result<Vec<u32>> {
        let mut ids = Vec::with_capacity(text.len() / 3);
        let mut plain = String::new();
        let mut rest = text;
        while let Some(found) = self.matcher.find(rest, specials) {
            self.encode_segment(&rest[..found.start], specials, &mut plain, &mut ids)?;
            ids.push(found.id);
            rest = &rest[found.end..];
        }
        self.encode_segment(rest, specials, &mut plain, &mut ids)?;
        Ok(ids)
    }

    /// Encodes a whole prompt: as [`encode`](Self::encode), and begun with exactly one BOS token where the vocabulary
    /// asks for one, also when the text (a rendered template) already starts with it.
    ///
    /// # Errors
    ///
    /// As [`encode`](Self::encode).
    pub fn encode_prompt(&self, text: &str, specials: Specials) -> Result<Vec<u32>> {
        let mut ids = self.encode(text, specials)?;
        if let (true, Some(bos)) = (self.add_bos, self.bos)
            && ids.first() != Some(&bos)
        {
            ids.insert(0, bos);
        }
        Ok(ids)
    }

    /// The text of ids as the model means it: control tokens left out, invalid UTF-8 replaced by U+FFFD.
    pub fn decode(&self, ids: &[u32]) -> String {
        let mut bytes = Vec::new();
        for &id in ids.iter().filter(|&&id| !self.is_control(id)) {
            bytes.extend_from_slice(self.token_bytes(id));
        }
        String::from_utf8_lossy(&bytes).into_owned()
    }

    /// Marks the control-token literals of user text, so that [`Specials::Shielded`] reads them as text.
    ///
    /// Marks already in the text are removed: U+FDD0 cannot be sent through a shielded prompt.
    pub fn shield<'t>(&self, text: &'t str) -> Cow<'t, str> {
        self.matcher.shield(text)
    }

    /// The bytes a token stands for: byte-level alphabet undone, special tokens as their literal text.
    ///
    /// Empty for an id that is not below [`n_vocab`](Self::n_vocab), as embedding tables may be padded beyond it.
    pub fn token_bytes(&self, id: u32) -> &[u8] {
        let id = id as usize;
        match (self.offsets.get(id), self.offsets.get(id.saturating_add(1))) {
            (Some(&start), Some(&end)) => &self.bytes[start as usize..end as usize],
            _ => &[],
        }
    }

    /// Whether a token is of type CONTROL: never shown, and never made from user text.
    pub fn is_control(&self, id: u32) -> bool {
        self.types.get(id as usize) == Some(&TokenType::Control)
    }

    /// Whether a token ends a generation: EOS, EOT and EOM of the file, and the well-known end markers.
    pub fn is_end(&self, id: u32) -> bool {
        self.ends.contains(&id)
    }

    /// The ids [`is_end`](Self::is_end) is true for, ascending.
    pub fn ends(&self) -> &[u32] {
        &self.ends
    }

    /// The id of a token by its text in the file (special tokens literally, others in the byte-level alphabet).
    pub fn id_of(&self, token: &str) -> Option<u32> {
        match self.specials.binary_search_by(|(text, _)| text.as_str().cmp(token)) {
            Ok(at) => Some(self.specials[at].1),
            Err(_) => self.bpe.token_to_id(token),
        }
    }

    /// The number of tokens; every id that encoding returns is below it.
    pub fn n_vocab(&self) -> usize {
        self.types.len()
    }

    /// The token that begins a text, if the file names one.
    pub fn bos(&self) -> Option<u32> {
        self.bos
    }

    /// The token that ends a text, if the file names one.
    pub fn eos(&self) -> Option<u32> {
        self.eos
    }

    /// Whether prompts begin with [`bos`](Self::bos).
    pub fn add_bos(&self) -> bool {
        self.add_bos
    }

    /// The text of a special token, for the `bos_token` and `eos_token` of a template.
    pub fn token_text(&self, id: u32) -> String {
        String::from_utf8_lossy(self.token_bytes(id)).into_owned()
    }

    fn encode_segment(
        &self,
        text: &str,
        specials: Specials,
        plain: &mut String,
        ids: &mut Vec<u32>,
    ) -> Result<()> {
        if text.is_empty() {
            return Ok(());
        }
        if specials == Specials::Shielded && text.contains(SHIELD) {
            let unmarked = text.replace(SHIELD, "");
            return self.encode_words(&self.normalised(&unmarked), plain, ids);
        }
        self.encode_words(&self.normalised(text), plain, ids)
    }

    fn normalised<'t>(&self, text: &'t str) -> Cow<'t, str> {
        // Nothing below U+0300 is changed by NFC.
        if !self.normalise || text.chars().all(|c| c < '\u{300}') {
            return Cow::Borrowed(text);
        }
        let mut normalised = NormalizedString::from(text);
        normalised.nfc();
        Cow::Owned(normalised.get().to_owned())
    }

    fn encode_words(&self, text: &str, word: &mut String, ids: &mut Vec<u32>) -> Result<()> {
        let mut at = 0;
        for (start, end) in self.words.find_iter(text) {
            if at < start {
                self.encode_word(&text[at..start], word, ids)?;
            }
            self.encode_word(&text[start..end], word, ids)?;
            at = end;
        }
        // The patterns match every character, so a rest is where the regex engine gave up.
        if at < text.len() {
            let message = "the text has too long a run of whitespace to be split into words";
            return Err(Error::new(ErrorKind::Request, message));
        }
        Ok(())
    }

    fn encode_word(&self, text: &str, word: &mut String, ids: &mut Vec<u32>) -> Result<()> {
        word.clear();
        word.extend(text.bytes().map(char_of));
        let tokens = self
            .bpe
            .tokenize(word)
            .map_err(|error| Error::new(ErrorKind::Tokenizer, format!("cannot encode a word: {error}")))?;
        ids.extend(tokens.iter().map(|token| token.id));
        Ok(())
    }
}

impl std::fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Tokenizer")
            .field("n_vocab", &self.n_vocab())
            .field("specials", &self.specials.len())
            .field("bos", &self.bos)
            .field("add_bos", &self.add_bos)
            .field("ends", &self.ends)
            .finish_non_exhaustive()
    }
}

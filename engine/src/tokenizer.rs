//! Text to token ids and back, from the vocabulary inside a GGUF file.
//!
//! A GGUF file carries the parts of a BPE tokenizer (`tokenizer.ggml.tokens`, `.merges`, `.token_type`
//! and the name of its pre-tokenizer, `.pre`), not a `tokenizer.json`. [`Tokenizer`] puts them together and encodes as
//! Hugging Face's `tokenizers` does: special tokens first, then each remaining segment by the family in
//! `tokenizer.ggml.model`:
//!
//! - `gpt2`: Unicode normalisation, the split into words, and BPE over the bytes of each word;
//! - `gemma4`: a space becomes `▁` (U+2581), and BPE goes over the characters of whole lines; runs of newlines are apart. A
//!   character without a token becomes the tokens of its bytes, `<0xNN>`. U+2581 itself in a text reads as a space afterwards.
//!
//! # Special tokens
//!
//! Tokens of type CONTROL (3) and USER_DEFINED (4) are matched in the text before anything else, the leftmost first and
//! the longest at one place. [`Specials`] says which of them a caller wants matched: USER_DEFINED ones always are,
//! CONTROL ones only where the text comes from a template or from a caller who may write them. Well-known markers have the
//! type they need whatever the file says.
//!
//! # Shielding
//!
//! A chat template joins its own text with text from users. [`Tokenizer::shield`] puts the noncharacter U+FDD0 before
//! every place of a user's text where a guarded token starts (or could start, at the very end of the text), and
//! [`Specials::Shielded`] matches no guarded token right behind that mark and drops the mark. So
//! `<|im_end|>` typed by a user is ten or so ordinary tokens, while the template's own is one.
//!
//! CONTROL tokens are guarded. USER_DEFINED tokens of the `gpt2` family (`<think>`, `<tool_call>`) carry no authority and
//! stay as they are; those of `gemma4` do: `<|"|>` ends a string, `<|tool_response>` begins a result. They are guarded, too.

mod alphabet;
mod markers;
mod specials;
mod vocabulary;

use std::borrow::Cow;

use skep_gguf::Gguf;
use tokenizers::models::bpe::BPE;
use tokenizers::utils::SysRegex;
use tokenizers::{Model, NormalizedString};

pub use self::alphabet::char_of;
pub use self::markers::ImageMarkers;
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
    /// As [`Parse`](Self::Parse), except guarded tokens behind a mark of [`Tokenizer::shield`]; the marks are dropped.
    Shielded,
}

/// How a family of tokenizers spells text before BPE.
enum Spelling {
    /// Words, in the byte-level alphabet.
    Bytes {
        words: SysRegex,
        /// Normalise to NFC first.
        nfc: bool,
    },
    /// Lines, as they are but for the spaces.
    Lines,
}

/// What stands for a space in [`Spelling::Lines`].
const SPACE: char = '▁';

/// A BPE tokenizer built from GGUF metadata.
pub struct Tokenizer {
    bpe: BPE,
    spelling: Spelling,
    matcher: Matcher,
    /// The bytes of all tokens, one after the other.
    bytes: Vec<u8>,
    /// `bytes[offsets[id]..offsets[id + 1]]` are the bytes of token `id`.
    offsets: Vec<u32>,
    types: Vec<TokenType>,
    specials: Vec<(String, u32)>,
    ends: Vec<u32>,
    suppressed: Vec<u32>,
    image_markers: Option<ImageMarkers>,
    bos: Option<u32>,
    eos: Option<u32>,
    add_bos: bool,
}

impl Tokenizer {
    /// Puts a tokenizer together from the parts a file holds.
    ///
    /// # Errors
    ///
    /// `ErrorKind::Tokenizer` when the model is neither `gpt2` nor `gemma4`, the pre-tokenizer is not one of those known
    /// here, or the parts do not fit together: lists of different length, ids outside the vocabulary, tokens that appear
    /// twice, a byte without a token, merges that lack a space or name absent tokens.
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
    /// the regex engine (family `gpt2`).
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

    /// Marks the literals of guarded tokens in user text, so that [`Specials::Shielded`] reads them as text.
    ///
    /// Marks already in the text are removed: U+FDD0 cannot be sent through a shielded prompt.
    pub fn shield<'t>(&self, text: &'t str) -> Cow<'t, str> {
        self.matcher.shield(text)
    }

    /// The bytes a token stands for: its spelling undone, special tokens as their literal text.
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

    /// Tokens that must never be sampled: places of images and sounds in a prompt, which mean nothing in an answer, and what
    /// the file lists in `tokenizer.ggml.suppress_tokens`. Ascending.
    pub fn suppressed(&self) -> &[u32] {
        &self.suppressed
    }

    /// The tokens that give an image its place in a prompt, if the vocabulary has them.
    pub fn image_markers(&self) -> Option<ImageMarkers> {
        self.image_markers
    }

    /// The id of a token by its text in the file (special tokens literally, others as the family spells them).
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
        let text = match specials == Specials::Shielded && text.contains(SHIELD) {
            true => Cow::Owned(text.replace(SHIELD, "")),
            false => Cow::Borrowed(text),
        };
        match &self.spelling {
            Spelling::Bytes { words, nfc: true } => self.encode_words(words, &normalised(&text), plain, ids),
            Spelling::Bytes { words, nfc: false } => self.encode_words(words, &text, plain, ids),
            Spelling::Lines => self.encode_lines(&text, plain, ids),
        }
    }

    fn encode_words(
        &self,
        words: &SysRegex,
        text: &str,
        word: &mut String,
        ids: &mut Vec<u32>,
    ) -> Result<()> {
        let mut spell = |text: &str, ids: &mut Vec<u32>| {
            word.clear();
            word.extend(text.bytes().map(char_of));
            self.encode_word(word, ids)
        };
        let mut at = 0;
        for (start, end) in words.find_iter(text) {
            if at < start {
                spell(&text[at..start], ids)?;
            }
            spell(&text[start..end], ids)?;
            at = end;
        }
        // The patterns match every character, so a rest is where the regex engine gave up.
        if at < text.len() {
            let message = "the text has too long a run of whitespace to be split into words";
            return Err(Error::new(ErrorKind::Request, message));
        }
        Ok(())
    }

    /// Encodes lines and the runs of newlines between them, each for itself.
    fn encode_lines(&self, text: &str, line: &mut String, ids: &mut Vec<u32>) -> Result<()> {
        let mut rest = text;
        while let Some(first) = rest.chars().next() {
            let newlines = first == '\n';
            let end = rest.find(|c| (c == '\n') != newlines).unwrap_or(rest.len());
            line.clear();
            line.extend(rest[..end].chars().map(|c| if c == ' ' { SPACE } else { c }));
            self.encode_word(line, ids)?;
            rest = &rest[end..];
        }
        Ok(())
    }

    fn encode_word(&self, word: &str, ids: &mut Vec<u32>) -> Result<()> {
        let tokens = self
            .bpe
            .tokenize(word)
            .map_err(|error| Error::new(ErrorKind::Tokenizer, format!("cannot encode a word: {error}")))?;
        ids.extend(tokens.iter().map(|token| token.id));
        Ok(())
    }
}

fn normalised(text: &str) -> Cow<'_, str> {
    // Nothing below U+0300 is changed by NFC.
    if text.chars().all(|c| c < '\u{300}') {
        return Cow::Borrowed(text);
    }
    let mut normalised = NormalizedString::from(text);
    normalised.nfc();
    Cow::Owned(normalised.get().to_owned())
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

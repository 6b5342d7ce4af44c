//! Bytes to text.

/// Turns the bytes of tokens into UTF-8 text.
///
/// A character may be cut over tokens: an incomplete sequence that can still become valid is held back. Bytes that are
/// no UTF-8 become U+FFFD, one for each maximal part of a sequence as in [`String::from_utf8_lossy`], so the joined text
/// equals the decoding of all bytes at once.
#[derive(Debug, Clone, Default)]
pub struct Detokenizer {
    held: Vec<u8>,
}

impl Detokenizer {
    /// Takes bytes and appends the text they complete to `text`.
    pub fn push(&mut self, bytes: &[u8], text: &mut String) {
        self.held.extend_from_slice(bytes);
        let mut rest = &self.held[..];
        loop {
            match std::str::from_utf8(rest) {
                Ok(valid) => {
                    text.push_str(valid);
                    rest = &[];
                    break;
                }
                Err(error) => {
                    let (valid, after) = rest.split_at(error.valid_up_to());
                    text.push_str(&String::from_utf8_lossy(valid));
                    rest = after;
                    // Without a length the sequence is a valid beginning.
                    let Some(invalid) = error.error_len() else { break };
                    text.push(char::REPLACEMENT_CHARACTER);
                    rest = &rest[invalid..];
                }
            }
        }
        let done = self.held.len() - rest.len();
        self.held.drain(..done);
    }

    /// Appends what is held back, as no more bytes come: an unfinished character is one U+FFFD.
    pub fn flush(&mut self, text: &mut String) {
        if !self.held.is_empty() {
            text.push(char::REPLACEMENT_CHARACTER);
            self.held.clear();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pieces(chunks: &[&[u8]]) -> Vec<String> {
        let mut detokenizer = Detokenizer::default();
        let mut pieces: Vec<String> = Vec::new();
        for chunk in chunks {
            pieces.push(String::new());
            detokenizer.push(chunk, pieces.last_mut().unwrap());
        }
        pieces.push(String::new());
        detokenizer.flush(pieces.last_mut().unwrap());
        pieces
    }

    #[test]
    fn holds_back_only_valid_beginnings() {
        assert_eq!(pieces(&[b"a\xF0\x9F", b"\x98", b"\x80b"]), ["a", "", "😀b", ""]);
        assert_eq!(pieces(&[b"\xE3", b"\x81", b"\x82"]), ["", "", "あ", ""]);
        assert_eq!(pieces(&[b"\xFF", b"abc"]), ["\u{FFFD}", "abc", ""]);
        assert_eq!(pieces(&[b"\xF0\x9F", b"A"]), ["", "\u{FFFD}A", ""]);
        assert_eq!(pieces(&[b"\xF0\x9F", b"\xE3\x81\x82"]), ["", "\u{FFFD}あ", ""]);
        assert_eq!(pieces(&[b"x\xE3\x81"]), ["x", "\u{FFFD}"]);
        assert_eq!(pieces(&[b"\xED\xA0\x80", b"\xC0\x80"]).concat(), "\u{FFFD}".repeat(5));
    }
}

use core::fmt::{self, Write};

/// Most characters of a text from a file that a message shows.
const SHOWN: usize = 120;

/// Shows text from a file so that it can neither forge lines nor flood a log: control characters and bytes that are
/// not UTF-8 are escaped, long text is cut.
pub(crate) struct Escaped<'a> {
    bytes: &'a [u8],
    limit: usize,
}

impl<'a> Escaped<'a> {
    pub(crate) fn text(text: &'a str) -> Self {
        Self::bytes(text.as_bytes())
    }

    pub(crate) fn bytes(bytes: &'a [u8]) -> Self {
        Self { bytes, limit: SHOWN }
    }

    pub(crate) fn whole(bytes: &'a [u8]) -> Self {
        Self { bytes, limit: usize::MAX }
    }
}

impl fmt::Display for Escaped<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut left = self.limit;
        for chunk in self.bytes.utf8_chunks() {
            for c in chunk.valid().chars() {
                if left == 0 {
                    return f.write_char('…');
                }
                left -= 1;
                match c {
                    ' '..='~' if !matches!(c, '"' | '\\') => f.write_char(c)?,
                    _ => write!(f, "{}", c.escape_debug())?,
                }
            }
            for byte in chunk.invalid() {
                if left == 0 {
                    return f.write_char('…');
                }
                left -= 1;
                write!(f, "\\x{byte:02x}")?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use alloc::string::ToString;

    use super::*;

    #[test]
    fn control_and_foreign_bytes_are_escaped() {
        assert_eq!(Escaped::bytes(b"a\0b\nc\x1b[2J\xff\xfe").to_string(), r"a\0b\nc\u{1b}[2J\xff\xfe");
        assert_eq!(Escaped::text("<|im_end|>'Ġ é").to_string(), "<|im_end|>'Ġ é");
    }

    #[test]
    fn long_text_is_cut() {
        let long = "x".repeat(65_535);
        assert_eq!(Escaped::text(&long).to_string().chars().count(), SHOWN + 1);
        assert_eq!(Escaped::whole(long.as_bytes()).to_string().len(), long.len());
    }
}

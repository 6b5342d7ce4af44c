//! The byte-level alphabet of GPT-2: every byte as one printable character.
//!
//! Bytes that are printable in Latin-1 stand for themselves; the other 68 follow from U+0100 on, in byte order.

/// The bytes that keep their own code point.
const fn is_printable(byte: u8) -> bool {
    matches!(byte, b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF)
}

const CHARS: [char; 256] = {
    let mut chars = ['\0'; 256];
    let mut next = 0x100;
    let mut byte = 0;
    while byte < 256 {
        if is_printable(byte as u8) {
            chars[byte] = byte as u8 as char;
        } else {
            // All code points from U+0100 to U+0143 are characters.
            chars[byte] = match char::from_u32(next) {
                Some(c) => c,
                None => '\0',
            };
            next += 1;
        }
        byte += 1;
    }
    chars
};

/// Inverse of [`CHARS`]: by code point, the byte plus one; zero where the code point stands for no byte.
const BYTES: [u16; 0x144] = {
    let mut bytes = [0; 0x144];
    let mut byte = 0;
    while byte < 256 {
        bytes[CHARS[byte] as usize] = byte as u16 + 1;
        byte += 1;
    }
    bytes
};

/// The character by which byte-level vocabularies (GPT-2's and those after it) spell a byte.
pub const fn char_of(byte: u8) -> char {
    CHARS[byte as usize]
}

/// The byte of a character, or `None` for characters outside the alphabet.
pub(super) fn byte_of(c: char) -> Option<u8> {
    BYTES.get(c as usize).and_then(|&byte| byte.checked_sub(1)).map(|byte| byte as u8)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_byte_comes_back() {
        for byte in 0..=255 {
            assert_eq!(byte_of(char_of(byte)), Some(byte));
        }
        assert_eq!((char_of(b' '), char_of(b'\n'), char_of(b'A')), ('Ġ', 'Ċ', 'A'));
        assert_eq!((byte_of(' '), byte_of('\u{144}'), byte_of('語')), (None, None, None));
    }
}

use std::borrow::Cow;

use base64::Engine as _;
use base64::alphabet;
use base64::engine::{DecodePaddingMode, GeneralPurpose, GeneralPurposeConfig};

/// The file in a data URL, or in plain base64. The media type is ignored: what a file is, its content says.
///
/// Base64 comes in many dresses, all of which are taken: with line breaks, in the URL-safe alphabet, without padding,
/// with its special characters percent-encoded. The error is a clause about the picture.
pub(super) fn decode(text: &str, limit: usize) -> Result<Vec<u8>, String> {
    const BASE64: GeneralPurpose = GeneralPurpose::new(
        &alphabet::STANDARD,
        GeneralPurposeConfig::new()
            .with_decode_padding_mode(DecodePaddingMode::Indifferent)
            .with_decode_allow_trailing_bits(true),
    );
    let (data, in_url) = match split(text)? {
        Some(data) => (data, true),
        None => (text, false),
    };
    let clean: Vec<u8> = match in_url {
        true => unescape(data),
        false => Cow::Borrowed(data.as_bytes()),
    }
    .iter()
    .filter(|byte| !byte.is_ascii_whitespace())
    .map(|byte| match byte {
        b'-' => b'+',
        b'_' => b'/',
        other => *other,
    })
    .collect();
    if clean.is_empty() {
        return Err("is a picture without data".into());
    }
    if clean.len() / 4 * 3 > limit.saturating_add(2) {
        return Err(format!("is a picture of more than {limit} bytes"));
    }
    match BASE64.decode(&clean) {
        Ok(bytes) if bytes.len() > limit => Err(format!("is a picture of more than {limit} bytes")),
        Ok(bytes) => Ok(bytes),
        Err(_) => Err("is a picture whose data is not valid base64".into()),
    }
}

/// The data of a data URL; `None` if this is none.
fn split(text: &str) -> Result<Option<&str>, String> {
    let text = text.trim_ascii_start();
    if !text.get(..5).is_some_and(|scheme| scheme.eq_ignore_ascii_case("data:")) {
        return Ok(None);
    }
    let Some((label, data)) = text[5..].split_once(',') else {
        return Err("is a data URL without data".into());
    };
    match label.rsplit(';').next() {
        Some(coding) if coding.trim().eq_ignore_ascii_case("base64") => Ok(Some(data)),
        _ => Err("is a data URL that is not in base64".into()),
    }
}

/// Undoes percent-encoding; what is no such sequence stays.
fn unescape(data: &str) -> Cow<'_, [u8]> {
    if !data.contains('%') {
        return Cow::Borrowed(data.as_bytes());
    }
    let hex = |byte: u8| char::from(byte).to_digit(16).and_then(|digit| u8::try_from(digit).ok());
    let mut out = Vec::with_capacity(data.len());
    let mut rest = data.as_bytes();
    while let [first, tail @ ..] = rest {
        match (first, tail) {
            (b'%', [high, low, after @ ..]) if let (Some(high), Some(low)) = (hex(*high), hex(*low)) => {
                out.push(high << 4 | low);
                rest = after;
            }
            _ => {
                out.push(*first);
                rest = tail;
            }
        }
    }
    Cow::Owned(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// All values of six bits stand in its base64, `+` and `/` with them.
    const BYTES: [u8; 7] = [0xfb, 0xef, 0xff, 0x00, 0x10, 0x83, 0x3e];

    #[test]
    fn every_dress_of_base64_is_taken() {
        for text in [
            "data:image/png;base64,++//ABCDPg==",
            "DATA:image/png;charset=utf-8;BASE64,++//ABCDPg==",
            "data:;base64,++//ABCDPg==",
            "data:image/jpeg;base64, ++//\r\nABCD\nPg==\n",
            "data:image/png;base64,--__ABCDPg",
            "data:image/png;base64,-+/_ABCDPg=",
            "data:image/png;base64,%2B%2b%2F%2fABCDPg%3D%3D",
            "data:image/png;base64,++//%0AABCDPg",
            " data:image/png;base64,++//ABCDPg==",
            "++//ABCDPg==",
            "++//\n ABCD\n Pg\n",
            "--__ABCDPh",
        ] {
            assert_eq!(decode(text, 7).as_deref(), Ok(&BYTES[..]), "{text}");
        }
    }

    #[test]
    fn what_is_no_data_is_refused() {
        for (text, clause) in [
            ("", "without data"),
            (" \n", "without data"),
            ("data:image/png;base64,", "without data"),
            ("data:image/png;base64", "without data"),
            ("data:image/png,abcd", "not in base64"),
            ("data:image/png;base64,!!!!", "not valid"),
            ("data:image/png;base64,ab=cd", "not valid"),
            ("data:image/png;base64,abcde", "not valid"),
            ("data:image/png;base64,====", "not valid"),
            ("data:image/png;base64,ab%zzcd", "not valid"),
            ("ümlaut", "not valid"),
            ("++//ABCDPg%3D", "not valid"),
        ] {
            let error = decode(text, 100).expect_err(text);
            assert!(error.contains(clause), "{text}: {error}");
        }
    }

    #[test]
    fn the_limit_is_exact() {
        for text in ["++//ABCDPg==", "data:;base64,++//ABCDPg"] {
            assert!(decode(text, 7).is_ok());
            for limit in [6, 5, 4, 0] {
                assert!(decode(text, limit).unwrap_err().contains("more than"), "{limit}");
            }
        }
    }
}

//! Picture files: what Pillow reads from them, what is refused, and that no damage brings more than an error.
#![cfg(feature = "decode")]

use std::fs;
use std::path::PathBuf;

use proptest::prelude::*;
use skep_vision::{ErrorKind, Limits, Picture, decode};

fn pictures() -> PathBuf {
    PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/pictures"))
}

fn file(name: &str) -> Vec<u8> {
    fs::read(pictures().join(name)).unwrap_or_else(|error| panic!("{name}: {error}"))
}

/// Every picture file with its name, in order.
fn files() -> Vec<(String, Vec<u8>)> {
    let mut names: Vec<_> = fs::read_dir(pictures())
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.retain(|name| ["png", "jpg", "webp", "gif"].iter().any(|end| name.ends_with(end)));
    names.sort();
    names.into_iter().map(|name| (name.clone(), file(&name))).collect()
}

fn expected(name: &str) -> Picture {
    let bytes = file(&format!("{name}.rgb"));
    let side = |at: usize| usize::from(u16::from_le_bytes([bytes[at], bytes[at + 1]]));
    Picture::new(side(0), side(2), bytes[4..].to_vec()).unwrap()
}

/// The largest and the mean difference of two pictures of one size; none of two sizes.
fn difference(a: &Picture, b: &Picture) -> Option<(u8, f64)> {
    if (a.width(), a.height()) != (b.width(), b.height()) {
        return None;
    }
    let each = || a.rgb().iter().zip(b.rgb()).map(|(a, b)| a.abs_diff(*b));
    let sum: f64 = each().map(f64::from).sum();
    Some((each().max().unwrap(), sum / a.rgb().len() as f64))
}

fn kind(bytes: &[u8], limits: &Limits) -> ErrorKind {
    decode(bytes, limits).unwrap_err().kind().clone()
}

#[test]
fn every_file_is_what_pillow_reads() {
    let files = files();
    assert!(files.len() >= 40, "{} files", files.len());
    for (name, bytes) in files {
        let picture = decode(&bytes, &Limits::default()).unwrap_or_else(|error| panic!("{name}: {error}"));
        let (most, mean) = difference(&picture, &expected(&name))
            .unwrap_or_else(|| panic!("{name}: {picture:?} instead of {:?}", expected(&name)));
        // Transforms and colour conversions of the lossy formats round in several right ways.
        let (most_allowed, mean_allowed) = match name.as_str() {
            "subsampled.jpg" => (6, 1.0),
            name if name.ends_with("jpg") => (3, 0.7),
            "lossy.webp" | "lossy-alpha.webp" => (2, 0.3),
            _ => (0, 0.0),
        };
        assert!(most <= most_allowed && mean <= mean_allowed, "{name}: at most {most}, mean {mean}");
    }
}

/// The eight turned files decode to eight different pictures, so that one turn cannot pass for another.
#[test]
fn turns_differ() {
    let turned: Vec<_> = (1..=8).map(|turn| expected(&format!("turned-{turn}.jpg"))).collect();
    for (i, a) in turned.iter().enumerate() {
        for b in &turned[..i] {
            assert!(difference(a, b).is_none_or(|(most, _)| most > 30));
        }
    }
}

#[test]
fn hidden_colours_do_not_show() {
    let picture = decode(&file("rgba.png"), &Limits::default()).unwrap();
    assert!(picture.rgb()[..3 * picture.width() * 3].iter().all(|value| *value == 255));
}

#[test]
fn content_tells_the_format() {
    let refused = |bytes: &[u8]| decode(bytes, &Limits::default()).unwrap_err().to_string();
    assert_eq!(refused(b""), "an empty file: pictures must be PNG, JPEG, WebP or GIF");
    assert_eq!(refused(b"<html>"), "an unknown file: pictures must be PNG, JPEG, WebP or GIF");
    assert_eq!(refused(b"BM\0\0\0\0\0\0\0\0"), "a BMP file: pictures must be PNG, JPEG, WebP or GIF");
    assert_eq!(
        refused(b"\0\0\0 ftypavif\0\0\0\0avifmif1"),
        "an AVIF file: pictures must be PNG, JPEG, WebP or GIF"
    );
}

#[test]
fn limits_are_named() {
    let bytes = file("rgb.png");
    let mut limits = Limits::default();
    limits.bytes = bytes.len() - 1;
    assert_eq!(kind(&bytes, &limits), ErrorKind::File { bytes: bytes.len(), limit: limits.bytes });
    let mut limits = Limits::default();
    limits.pixels = 13 * 9 - 1;
    for name in ["rgb.png", "rgb.jpg", "lossy.webp", "still.gif", "animated-webp.webp", "alpha.webp"] {
        assert_eq!(
            kind(&file(name), &limits),
            ErrorKind::Pixels { width: 13, height: 9, limit: 116 },
            "{name}"
        );
    }
    let mut limits = Limits::default();
    limits.side = 12;
    assert_eq!(kind(&bytes, &limits), ErrorKind::Side { width: 13, height: 9, limit: 12 });
    limits.side = 13;
    limits.pixels = 13 * 9;
    limits.bytes = bytes.len();
    assert!(decode(&bytes, &limits).is_ok());
}

/// A PNG of this size with next to no data.
fn png(width: u32, height: u32) -> Vec<u8> {
    let mut bytes = b"\x89PNG\r\n\x1a\n".to_vec();
    let mut header = [width.to_be_bytes(), height.to_be_bytes()].concat();
    header.extend([8, 2, 0, 0, 0]);
    for (name, data) in
        [(b"IHDR", header.as_slice()), (b"IDAT", &[0x78, 0x9C, 3, 0, 0, 0, 0, 1]), (b"IEND", &[])]
    {
        bytes.extend((data.len() as u32).to_be_bytes());
        let named = [name.as_slice(), data].concat();
        bytes.extend(&named);
        bytes.extend(crc(&named).to_be_bytes());
    }
    bytes
}

fn crc(bytes: &[u8]) -> u32 {
    !bytes.iter().fold(!0_u32, |mut crc, byte| {
        crc ^= u32::from(*byte);
        for _ in 0..8 {
            crc = crc >> 1 ^ 0xEDB8_8320 & (crc & 1).wrapping_neg();
        }
        crc
    })
}

#[test]
fn impossible_sizes() {
    let refused = |width, height| decode(&png(width, height), &Limits::default()).unwrap_err().to_string();
    assert_eq!(
        refused(20_000, 20_000),
        "a picture of 20000x20000 pixels: at most 64000000 pixels are allowed"
    );
    assert_eq!(refused(1, 100_000), "a picture of 1x100000 pixels: at most 65535 a side are allowed");
    for (width, height) in [(0, 0), (0, 5), (1 << 31, 1), (u32::MAX, u32::MAX), (100, 100)] {
        let error = refused(width, height);
        assert!(
            error.starts_with("a PNG file that cannot be decoded: ") || error.starts_with("a picture of "),
            "{error}"
        );
    }
    // A GIF and a lossless WebP may say 0 as well.
    let mut gif = file("still.gif");
    gif[6..10].fill(0);
    assert_eq!(kind(&gif, &Limits::default()), ErrorKind::Empty { width: 0, height: 0 });
}

/// No file that is cut short passes, except where only what follows the first frame is missing.
#[test]
fn cut_files_are_refused() {
    for (name, bytes) in files() {
        let whole = decode(&bytes, &Limits::default()).unwrap();
        let mut passed = 0;
        for end in 0..bytes.len() {
            if let Ok(picture) = decode(&bytes[..end], &Limits::default()) {
                assert!(
                    picture == whole,
                    "{name} cut to {end} of {} bytes gives another picture",
                    bytes.len()
                );
                passed += 1;
            }
        }
        let animated = name.starts_with("animated");
        assert!(animated || passed <= 24, "{name}: {passed} of {} bytes are not needed", bytes.len());
        if name.ends_with("jpg") || name.ends_with("webp") {
            assert_eq!(passed, 0, "{name}");
        }
    }
}

#[test]
fn what_follows_a_file_is_ignored() {
    for (name, mut bytes) in files() {
        let whole = decode(&bytes, &Limits::default()).unwrap();
        bytes.extend(b"EXIF\xFF\xFF\xFF\xF0 and more");
        assert_eq!(decode(&bytes, &Limits::default()).as_ref(), Ok(&whole), "{name}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(3000))]

    /// Damage anywhere gives a picture or one error, and never a panic of a decoder that has to be caught.
    #[test]
    fn damage_is_an_error(which in any::<proptest::sample::Index>(), damage in prop::collection::vec((any::<proptest::sample::Index>(), any::<u8>()), 1..6)) {
        let files = files();
        let (name, mut bytes) = files[which.index(files.len())].clone();
        for (at, value) in damage {
            let at = at.index(bytes.len());
            bytes[at] = value;
        }
        if let Err(error) = decode(&bytes, &Limits::default()) {
            let text = error.to_string();
            prop_assert!(!text.is_empty() && !text.contains("gave up"), "{name}: {text}");
        }
    }
}

//! Files made to do harm, and files that are merely something else: each ends in one error that says what is wrong.

mod common;

use common::*;
use skep_gguf::{ErrorKind, Gguf, TensorType};

macro_rules! refused {
    ($file:expr, $pattern:pat $(if $guard:expr)?) => {{
        let error = refused($file.as_ref());
        assert!(matches!(error.kind(), $pattern $(if $guard)?), "{error}");
        error
    }};
}

#[test]
fn absurd_counts() {
    let start = b"GGUF\x03\0\0\0";
    let all = [0xFF; 8];
    let none = [0; 8];
    let error = refused!([&start[..], &all, &none].concat(), ErrorKind::Count { what: "tensors", .. });
    assert_eq!(error.offset(), Some(8));
    let error =
        refused!([&start[..], &none, &all].concat(), ErrorKind::Count { what: "metadata entries", .. });
    assert_eq!(error.offset(), Some(16));
    assert_eq!(
        error.to_string(),
        "18446744073709551615 metadata entries are declared, but the remaining bytes hold at most 0 (at byte 16)"
    );
    let billion = 1_000_000_000u64.to_le_bytes();
    refused!(
        [&start[..], &none, &billion, &[0x41; 1024]].concat(),
        ErrorKind::Count { count: 1_000_000_000, max: 78, .. }
    );
}

#[test]
fn counts_one_beyond_the_content() {
    let mut file = two_tensors().kv("k", U8, [7]).build();
    file[16] = 2;
    // What is read as the second entry is the tensor table; nothing of it may be taken for a model.
    refused(&file);
}

#[test]
fn magic_and_versions() {
    refused!(b"", ErrorKind::Empty);
    refused!(b"GGU", ErrorKind::Truncated { needed: 4, available: 3, .. });
    refused!(b"GGUF\x03\0", ErrorKind::Truncated { what: "the version", .. });
    refused!(b"GGUF\x03\0\0\0\0\0\0\0\0\0\0\0", ErrorKind::Truncated { .. });
    refused!(b"FUGG\x03\0\0\0\0\0\0\0", ErrorKind::NotGguf { .. });
    refused!(b"ggml\x03\0\0\0\0\0\0\0", ErrorKind::NotGguf { .. });
    let error = refused!(b"\x1b[2J\n\0\0\0", ErrorKind::NotGguf { .. });
    assert_eq!(error.to_string(), r"not a gguf file: it starts with `\x1b[2J`, not with `GGUF` (at byte 0)");
    let rest = [0; 16];
    for version in [0u32, 1, 4, 255, u32::MAX] {
        let file = [&b"GGUF"[..], &version.to_le_bytes(), &rest].concat();
        refused!(file, ErrorKind::Version(found) if *found == version);
    }
    refused!([&b"GGUF\0\0\0\x03"[..], &rest].concat(), ErrorKind::BigEndian);
    refused!([&b"GGUF\0\0\0\x02"[..], &rest].concat(), ErrorKind::BigEndian);
    for version in [2u32, 3] {
        let file = [&b"GGUF"[..], &version.to_le_bytes(), &rest].concat();
        assert_eq!(accepted(&file).version(), version);
    }
}

#[test]
fn other_files_under_the_name() {
    let pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 20890624\n";
    refused!(pointer, ErrorKind::GitLfsPointer);
    for page in ["<!DOCTYPE html><html>", "\n  <html lang=en>", "\u{feff}<!doctype HTML>", "<head>"] {
        refused!(page, ErrorKind::HtmlPage);
    }
    refused!("{\"error\":\"Repository not found\"}", ErrorKind::NotGguf { .. });
}

#[test]
fn lengths_beyond_the_file() {
    let start = [&b"GGUF\x03\0\0\0"[..], &0u64.to_le_bytes(), &1u64.to_le_bytes()].concat();
    let rest = [b'k'; 30];
    let with_length = |length: u64| [&start[..], &length.to_le_bytes(), &rest].concat();
    let file_len = (start.len() + 8 + rest.len()) as u64;
    for length in [u64::MAX, 1 << 63, file_len + 1, rest.len() as u64 + 1] {
        let error = refused!(with_length(length), ErrorKind::Truncated { needed, .. } if *needed == length);
        assert_eq!(error.offset(), Some(32));
        assert!(
            error.to_string().starts_with("key number 0: file truncated in header: a key needs"),
            "{error}"
        );
    }
    // All that is left: the type of the value is missing.
    let error =
        refused!(with_length(rest.len() as u64), ErrorKind::Truncated { what: "the type of a value", .. });
    assert_eq!(error.key(), Some(&*"k".repeat(30)));

    for length in [u64::MAX, u64::MAX - 7, 1 << 63] {
        let file = Raw::new().kv("key", STRING, [&length.to_le_bytes()[..], b"abc"].concat()).build();
        let error = refused!(file, ErrorKind::Truncated { what: "a string", .. });
        assert_eq!(error.key(), Some("key"));
    }
}

#[test]
fn keys() {
    refused!(Raw::new().kv("", U8, [1]).build(), ErrorKind::EmptyName);
    let longest = "k".repeat(65_535);
    assert_eq!(accepted(&Raw::new().kv(&longest, U8, [1]).build()).u32(&longest).unwrap(), Some(1));
    refused!(
        Raw::new().kv("k".repeat(65_536), U8, [1]).build(),
        ErrorKind::LongName { length: 65_536, max: 65_535 }
    );
    refused!(Raw::new().kv(b"bad\xFF\xFE\n", U8, [1]).build(), ErrorKind::NameNotUtf8 { .. });
    let error =
        refused!(Raw::new().kv(&longest, U8, [1]).kv(&longest, U8, [1]).build(), ErrorKind::Duplicate);
    assert_eq!(error.key(), Some(&*longest));
}

#[test]
fn values() {
    for ty in [13, 14, 255, u32::MAX] {
        let error =
            refused!(Raw::new().kv("k", ty, [0; 8]).build(), ErrorKind::ValueType(found) if *found == ty);
        assert_eq!((error.key(), error.offset()), (Some("k"), Some(33)));
        refused!(Raw::new().kv("k", ARRAY, array(ty, 0, &[])).build(), ErrorKind::ValueType(_));
    }
    for bad in [2, 0xFF] {
        refused!(Raw::new().kv("k", BOOL, [bad]).build(), ErrorKind::Bool(found) if *found == bad);
        let file = Raw::new().kv("k", ARRAY, array(BOOL, 3, &[0, 1, bad])).build();
        assert_eq!(refused!(file, ErrorKind::Bool(_)).offset(), Some(24 + 9 + 4 + 12 + 2));
    }
    // Any bytes are a string; that they are not text shows when they are asked for as text.
    let file = Raw::new().kv("k", STRING, string(b"\xFF\0\x1b")).build();
    let gguf = accepted(&file);
    assert_eq!(gguf.bytes("k").unwrap().unwrap().as_bytes(), b"\xFF\0\x1b");
    let error = gguf.str("k").unwrap_err();
    assert_eq!(error.to_string(), r"key `k`: not valid utf-8: \xff\0\u{1b}");
}

#[test]
fn arrays_longer_than_the_file() {
    for (ty, count) in [
        (U8, u64::MAX),
        (U8, 9),
        (U64, 1 << 61),
        (U64, (1 << 61) + 1),
        (U64, 2),
        (F32, 3),
        (STRING, 2),
        (STRING, u64::MAX),
        (ARRAY, 1),
        (ARRAY, u64::MAX / 12),
    ] {
        let error = refused!(
            Raw::new().kv("k", ARRAY, array(ty, count, &[0; 8])).build(),
            ErrorKind::Count { what: "array items", .. }
        );
        assert_eq!(error.key(), Some("k"));
    }
    // The count fits, the second string does not.
    let items = [&string("ab")[..], &u64::MAX.to_le_bytes()].concat();
    refused!(Raw::new().kv("k", ARRAY, array(STRING, 2, &items)).build(), ErrorKind::Truncated { .. });
}

#[test]
fn nested_arrays() {
    let nested = |depth: usize| [array(ARRAY, 1, &[]).repeat(depth - 1), u32s(&[7])].concat();
    let file = Raw::new().kv("k", ARRAY, nested(4)).build();
    let gguf = accepted(&file);
    assert_eq!(gguf.get("k").unwrap().to_string(), "[[[[7]]]]");
    refused!(Raw::new().kv("k", ARRAY, nested(5)).build(), ErrorKind::Nesting);
    refused!(Raw::new().kv("k", ARRAY, nested(50_000)).build(), ErrorKind::Nesting);
}

#[test]
fn alignments() {
    let tensors = |file: Raw| file.tensor("a", &[8], 0, 0).tensor("b", &[8], 0, 64).data(96);
    for bad in [0u32, 3, 13, u32::MAX] {
        let file = tensors(Raw::new().kv("general.alignment", U32, bad.to_le_bytes())).build();
        let error = refused!(file, ErrorKind::Alignment { .. });
        assert_eq!(
            error.to_string(),
            format!(
                "key `general.alignment`: the alignment must be a u32 power of two, found u32 {bad} (at byte 53)"
            )
        );
    }
    for (ty, value) in [(I32, &32i32.to_le_bytes()[..]), (U64, &32u64.to_le_bytes()), (STRING, &string("32"))]
    {
        refused!(tensors(Raw::new().kv("general.alignment", ty, value)).build(), ErrorKind::Alignment { .. });
    }
    // A power of two that puts the data beyond the end.
    let file = tensors(Raw::new().kv("general.alignment", U32, (1u32 << 31).to_le_bytes())).build();
    assert_eq!(refused!(file, ErrorKind::OutOfFile { available: 0, .. }).tensor(), Some("a"));

    for alignment in [1u32, 2, 64] {
        let raw = tensors(Raw::new().kv("general.alignment", U32, alignment.to_le_bytes()));
        let file = raw.align(alignment as usize).build();
        let gguf = accepted(&file);
        assert_eq!(gguf.alignment(), alignment);
        assert_eq!(gguf.data(&gguf.tensors()[1])[..2], [64, 65]);
    }
    // Said to be 64, padded to 32.
    let raw = Raw::new().kv("general.alignment", U32, 64u32.to_le_bytes());
    let file = raw.tensor("a", &[8], 0, 0).tensor("b", &[8], 0, 32).data(128).build();
    let error = refused!(file, ErrorKind::Misaligned { offset: 32, alignment: 64 });
    assert_eq!(error.tensor(), Some("b"));
    // No key means 32.
    refused!(
        Raw::new().tensor("a", &[1], 0, 4).data(64).build(),
        ErrorKind::Misaligned { alignment: 32, .. }
    );
}

#[test]
fn dimension_counts() {
    let file = two_tensors().build();
    let at = 24 + 9;
    assert_eq!(file[at..at + 4], 1u32.to_le_bytes());
    for n_dims in [0u32, 5, 9, u32::MAX] {
        let mut bad = file.clone();
        bad[at..at + 4].copy_from_slice(&n_dims.to_le_bytes());
        let error = refused!(bad, ErrorKind::Dimensions(found) if *found == u64::from(n_dims));
        assert_eq!((error.tensor(), error.offset()), (Some("a"), Some(24)));
    }
}

#[test]
fn zero_sized_tensors_have_no_data() {
    let file = Raw::new().tensor("none", &[256, 0], 12, 0).tensor("some", &[8], 0, 0).data(32).build();
    let gguf = accepted(&file);
    assert!(gguf.data(gguf.tensor("none").unwrap()).is_empty());
    assert_eq!(gguf.data(gguf.tensor("some").unwrap()).len(), 32);
    // Even where the file does not reach the data section.
    let file = Raw::new().tensor("none", &[0], 0, 0).build();
    assert!(accepted(&file).tensors()[0].n_bytes() == 0);
}

#[test]
fn sizes_that_wrap() {
    for shape in [&[1_048_576u64, 4_398_046_511_105][..], &[1 << 63, 2], &[u64::MAX], &[1 << 32, 1 << 32, 0]]
    {
        let file = Raw::new().tensor("w", shape, 0, 0).data(4096).build();
        let error = refused!(file, ErrorKind::TensorSize { .. });
        assert_eq!(error.tensor(), Some("w"));
    }
}

#[test]
fn sum_of_sizes_that_wraps() {
    let n = 0x7FFF_FFFF_FFFF_FFC0;
    for second in [0, n] {
        let file = Raw::new().tensor("a", &[n], 24, 0).tensor("b", &[n], 24, second).data(4096).build();
        let error = refused!(file, ErrorKind::OutOfFile { available: 4096, .. });
        assert_eq!(error.tensor(), Some("a"));
    }
}

#[test]
fn data_outside_the_file() {
    let at = |offset| Raw::new().tensor("a", &[8], 0, 0).tensor("b", &[8], 0, offset).data(64).build();
    accepted(&at(32));
    for offset in [64, 1 << 40, u64::MAX - 31, 1 << 63] {
        let error = refused!(
            at(offset),
            ErrorKind::OutOfFile { offset: found, needed: 32, available: 64 } if *found == offset
        );
        assert_eq!(error.tensor(), Some("b"));
    }
    let whole = at(32);
    let error = refused!(&whole[..whole.len() - 1], ErrorKind::OutOfFile { available: 63, .. });
    assert_eq!(error.tensor(), Some("b"));
    let header = 24 + 2 * 33;
    refused!(&whole[..header - 1], ErrorKind::Truncated { .. } | ErrorKind::Count { .. });
    refused!(&whole[..header], ErrorKind::OutOfFile { available: 0, .. });
}

#[test]
fn duplicates_and_overlaps() {
    let file = Raw::new().kv("k", U32, 1u32.to_le_bytes()).kv("l", U8, [0]).kv("k", U32, 2u32.to_le_bytes());
    let error = refused!(file.build(), ErrorKind::Duplicate);
    assert_eq!((error.key(), error.offset()), (Some("k"), Some(24 + 17 + 14)));

    let file = Raw::new().tensor("t", &[8], 0, 0).tensor("t", &[8], 0, 32).data(64).build();
    let error = refused!(file, ErrorKind::Duplicate);
    assert_eq!((error.tensor(), error.offset()), (Some("t"), Some(24 + 33)));

    let file = Raw::new().tensor("a", &[8], 0, 0).tensor("b", &[8], 0, 0).data(64).build();
    let error = refused!(file, ErrorKind::Overlap { other } if other == "a");
    assert_eq!(error.tensor(), Some("b"));
    // A long tensor that reaches over a short one into a third.
    let file = Raw::new()
        .tensor("c", &[8], 0, 64)
        .tensor("a", &[17], 0, 0)
        .tensor("b", &[0], 0, 32)
        .data(96)
        .build();
    refused!(file, ErrorKind::Overlap { other } if other == "a");
}

#[test]
fn holes_and_order_are_free() {
    let hole = Raw::new().tensor("a", &[8], 0, 32).tensor("b", &[8], 0, 128).data(200).build();
    let descending = Raw::new().tensor("b", &[8], 0, 128).tensor("a", &[8], 0, 32).data(160).build();
    for file in [hole, descending] {
        let gguf = accepted(&file);
        assert_eq!(gguf.data(gguf.tensor("a").unwrap())[0], 32);
        assert_eq!(gguf.data(gguf.tensor("b").unwrap())[0], 128);
    }
}

#[test]
fn tensor_types() {
    let of = |ty| Raw::new().tensor("blk.0.w", &[256], ty, 0).data(4096).build();
    for (id, name) in [(39, "MXFP4"), (40, "NVFP4"), (12, "Q4_K"), (30, "BF16")] {
        assert_eq!(accepted(&of(id)).tensors()[0].ty().name(), name);
    }
    for id in [4, 5, 31, 32, 33, 36, 37, 38] {
        refused!(of(id), ErrorKind::RemovedTensorType { id: found, .. } if *found == id);
    }
    for id in [43, 0x7FFF_FFFF, 0xFFFF_FFFF] {
        let error = refused!(of(id), ErrorKind::TensorType { id: found } if *found == id);
        let message = error.to_string();
        assert!(message.starts_with(&format!("tensor `blk.0.w`: unknown tensor type {id}:")), "{message}");
        assert!(message.contains("0 F32, 1 F16") && message.contains("12 Q4_K"), "{message}");
    }
    let file = Raw::new().tensor("w", &[100, 2], 12, 0).data(4096).build();
    let error = refused!(file, ErrorKind::PartialBlock { row: 100, ty: "Q4_K", block: 256 });
    assert_eq!(
        error.to_string(),
        "tensor `w`: rows of 100 elements are not a whole number of Q4_K blocks of 256 (at byte 24)"
    );
    // Whole blocks in all, but not in a row.
    refused!(Raw::new().tensor("w", &[128, 2], 12, 0).data(4096).build(), ErrorKind::PartialBlock { .. });
}

#[test]
fn tensor_names() {
    let of = |name: &[u8]| Raw::new().tensor(name, &[8], 0, 0).data(32).build();
    for length in [1, 63, 64] {
        let name = "n".repeat(length);
        assert!(accepted(&of(name.as_bytes())).tensor(&name).is_some());
    }
    for length in [65, 4096, 100_000] {
        refused!(of("n".repeat(length).as_bytes()), ErrorKind::LongName { max: 64, .. });
    }
    refused!(of(b""), ErrorKind::EmptyName);
    let error = refused!(of(b"a\0\n\x1b\xFF\xFE"), ErrorKind::NameNotUtf8 { .. });
    assert_eq!(
        error.to_string(),
        r"tensor number 0: the name is not valid utf-8: `a\0\n\u{1b}\xff\xfe` (at byte 24)"
    );
    // Control characters are text, and escaped wherever they are shown.
    let file = Raw::new().tensor("a\n\x1b[31m", &[8], 0, 32).data(32).build();
    let error = refused!(file, ErrorKind::OutOfFile { .. });
    assert!(error.to_string().starts_with(r"tensor `a\n\u{1b}[31m`: "), "{error}");
}

#[test]
fn shapes_and_places_are_as_in_the_file() {
    let file = two_tensors().tensor("q", &[256, 3, 2], TensorType::Q4_K.id(), 64).data(64 + 6 * 144).build();
    let gguf = accepted(&file);
    let q = gguf.tensor("q").unwrap();
    assert_eq!((q.shape(), q.n_elements(), q.n_bytes(), q.part()), (&[256, 3, 2][..], 1536, 864, 0));
    assert_eq!(q.offset() as usize + 864, file.len());
    assert_eq!(gguf.data(q), &file[q.offset() as usize..]);
    assert!(gguf.tensor("r").is_none() && gguf.tensor("").is_none());
    assert_eq!(gguf.tensors().iter().map(|t| t.name()).collect::<Vec<_>>(), ["a", "b", "q"]);
}

/// Every cut of a valid file is refused, and every byte set to hostile values parses or is refused, without a panic.
#[test]
fn every_cut_and_every_byte() {
    let raw = two_tensors()
        .kv("general.architecture", STRING, string("x"))
        .kv("n", ARRAY, u32s(&[1, 2, 3]))
        .kv("s", ARRAY, array(STRING, 2, &[string("ab"), string("")].concat()))
        .kv("b", BOOL, [1])
        .kv("general.alignment", U32, 32u32.to_le_bytes())
        .kv("d", F64, 1.5f64.to_le_bytes());
    let file = raw.build();
    walk(&accepted(&file));
    for length in 0..file.len() {
        assert!(Gguf::parse(&file[..length]).is_err(), "cut to {length} bytes");
    }
    for at in 0..raw.header().len() {
        for value in [0, 1, 7, 8, 9, 0x7F, 0x80, 0xFE, 0xFF] {
            let mut bad = file.clone();
            bad[at] = value;
            if let Ok(gguf) = Gguf::parse(&bad) {
                walk(&gguf);
            }
        }
        for value in [u64::MAX, u64::MAX - 31, 1 << 63, (1 << 63) - 1, 1 << 61, 1 << 32, 1 << 31] {
            let mut bad = file.clone();
            let end = (at + 8).min(bad.len());
            bad[at..end].copy_from_slice(&value.to_le_bytes()[..end - at]);
            if let Ok(gguf) = Gguf::parse(&bad) {
                walk(&gguf);
            }
        }
    }
}

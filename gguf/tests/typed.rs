//! Typed access to metadata: integers of any width, scalars or one value for each layer, and errors that say what was found.

mod common;

use common::*;
use skep_gguf::{Error, ErrorKind, Gguf, PerLayer, ValueType};

fn with(ty: u32, value: impl AsRef<[u8]>) -> Vec<u8> {
    Raw::new().kv("m.block_count", ty, value).build()
}

fn on<T>(file: &[u8], get: impl FnOnce(&Gguf<&[u8]>) -> T) -> T {
    get(&accepted(file))
}

#[track_caller]
fn wrong_type<T: std::fmt::Debug>(result: Result<T, Error>, expected: &str, found: &str) {
    let error = result.unwrap_err();
    assert_eq!(error.to_string(), format!("key `m.block_count`: expected {expected}, found {found}"));
    assert_eq!(error.key(), Some("m.block_count"));
}

#[track_caller]
fn out_of_range<T: std::fmt::Debug>(result: Result<T, Error>, message: &str) {
    let error = result.unwrap_err();
    assert!(matches!(error.kind(), ErrorKind::OutOfRange { .. }), "{error}");
    assert_eq!(error.to_string(), format!("key `m.block_count`: {message}"));
}

#[test]
fn integers_of_any_width() {
    let files = [
        with(U8, 40u8.to_le_bytes()),
        with(1, 40i8.to_le_bytes()),
        with(U16, 40u16.to_le_bytes()),
        with(3, 40i16.to_le_bytes()),
        with(U32, 40u32.to_le_bytes()),
        with(I32, 40i32.to_le_bytes()),
        with(U64, 40u64.to_le_bytes()),
        with(11, 40i64.to_le_bytes()),
    ];
    for file in files {
        on(&file, |gguf| {
            assert_eq!(gguf.u32("m.block_count").unwrap(), Some(40));
            assert_eq!(gguf.usize("m.block_count").unwrap(), Some(40));
            assert_eq!(gguf.u64("m.block_count").unwrap(), Some(40));
            assert_eq!(gguf.i64("m.block_count").unwrap(), Some(40));
            assert_eq!(gguf.per_layer_usize("m.block_count").unwrap(), Some(PerLayer::All(40)));
            let found = gguf.get("m.block_count").unwrap().ty().name();
            wrong_type(gguf.f32("m.block_count"), "f32", found);
            wrong_type(gguf.bool("m.block_count"), "bool", found);
            wrong_type(gguf.str("m.block_count"), "string", found);
            wrong_type(gguf.array("m.block_count"), "array", found);
        });
    }
}

#[test]
fn integers_that_do_not_fit() {
    on(&with(I32, (-1i32).to_le_bytes()), |gguf| {
        out_of_range(gguf.u32("m.block_count"), "-1 does not fit u32");
        out_of_range(gguf.usize("m.block_count"), "-1 does not fit usize");
        out_of_range(gguf.u64("m.block_count"), "-1 does not fit u64");
        out_of_range(gguf.per_layer_usize("m.block_count"), "-1 does not fit usize");
        assert_eq!(gguf.i64("m.block_count").unwrap(), Some(-1));
    });
    on(&with(U64, u64::MAX.to_le_bytes()), |gguf| {
        out_of_range(gguf.u32("m.block_count"), "18446744073709551615 does not fit u32");
        out_of_range(gguf.i64("m.block_count"), "18446744073709551615 does not fit i64");
        assert_eq!(gguf.u64("m.block_count").unwrap(), Some(u64::MAX));
    });
}

#[test]
fn other_types_are_errors_not_defaults() {
    for (file, found) in [
        (with(F32, 40f32.to_le_bytes()), "f32"),
        (with(F64, 40f64.to_le_bytes()), "f64"),
        (with(STRING, string("40")), "string"),
        (with(BOOL, [1]), "bool"),
        (with(ARRAY, array(STRING, 1, &string("40"))), "array of 1 string"),
    ] {
        on(&file, |gguf| {
            wrong_type(gguf.u32("m.block_count"), "u32", found);
            wrong_type(gguf.usize("m.block_count"), "usize", found);
        });
    }
    let file = Raw::new().kv("general.architecture", U32, 1u32.to_le_bytes()).build();
    on(&file, |gguf| {
        let message = gguf.architecture().unwrap_err().to_string();
        assert_eq!(message, "key `general.architecture`: expected string, found u32");
    });
}

#[test]
fn absent_keys() {
    on(&Raw::new().build(), |gguf| {
        assert!(gguf.get("k").is_none());
        assert!(gguf.u32("k").unwrap().is_none() && gguf.str("k").unwrap().is_none());
        assert!(gguf.array("k").unwrap().is_none() && gguf.per_layer_bool("k").unwrap().is_none());
        let error = gguf.required("m.k", gguf.u32("m.k").unwrap()).unwrap_err();
        assert_eq!(error.to_string(), "key `m.k`: missing");
        assert_eq!(gguf.architecture().unwrap_err().to_string(), "key `general.architecture`: missing");
    });
}

#[test]
fn one_value_for_each_layer() {
    on(&with(ARRAY, u32s(&[0, 0, 0, 2, 0, 0, 0, 2])), |gguf| {
        let heads = gguf.per_layer_usize("m.block_count").unwrap().unwrap();
        assert_eq!((heads.at(0), heads.at(3), heads.at(8)), (Some(0), Some(2), None));
        assert_eq!(heads.distinct_nonzero(), [2]);
        wrong_type(gguf.u32("m.block_count"), "u32", "array of 8 u32");
    });
    let negative = [1i32, 2, -3].iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<_>>();
    on(&with(ARRAY, array(I32, 3, &negative)), |gguf| {
        out_of_range(gguf.per_layer_usize("m.block_count"), "-3 at index 2 does not fit usize");
        assert!(gguf.array("m.block_count").unwrap().unwrap().i32s().unwrap().eq([1, 2, -3]));
    });
    on(&with(ARRAY, array(BOOL, 3, &[1, 0, 1])), |gguf| {
        let kinds = gguf.per_layer_bool("m.block_count").unwrap().unwrap();
        assert_eq!(kinds, PerLayer::Each(vec![true, false, true]));
        wrong_type(gguf.per_layer_usize("m.block_count"), "array of usize", "array of 3 bool");
    });
    on(&with(BOOL, [1]), |gguf| {
        assert_eq!(gguf.per_layer_bool("m.block_count").unwrap(), Some(PerLayer::All(true)));
    });
    on(&with(U8, [1]), |gguf| wrong_type(gguf.per_layer_bool("m.block_count"), "bool", "u8"));
}

#[test]
fn floats() {
    on(&with(F32, 0.1f32.to_le_bytes()), |gguf| {
        assert_eq!(gguf.f32("m.block_count").unwrap(), Some(0.1));
    });
    on(&with(F64, 0.1f64.to_le_bytes()), |gguf| {
        assert_eq!(gguf.f32("m.block_count").unwrap(), Some(0.1));
    });
    on(&with(F64, 1e39f64.to_le_bytes()), |gguf| {
        let error = gguf.f32("m.block_count").unwrap_err();
        assert!(matches!(error.kind(), ErrorKind::OutOfRange { .. }), "{error}");
    });
    on(&with(F64, f64::INFINITY.to_le_bytes()), |gguf| {
        assert_eq!(gguf.f32("m.block_count").unwrap(), Some(f32::INFINITY));
    });
    on(&with(F32, f32::NAN.to_le_bytes()), |gguf| {
        assert!(gguf.f32("m.block_count").unwrap().unwrap().is_nan());
    });
    let items = [1f64, 0.5].iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<_>>();
    on(&with(ARRAY, array(F64, 2, &items)), |gguf| {
        let array = gguf.array("m.block_count").unwrap().unwrap();
        assert!(array.f32s().unwrap().eq([1.0, 0.5]));
        wrong_type(array.u32s().map(Iterator::count), "array of u32", "array of 2 f64");
    });
}

#[test]
fn arrays_of_strings() {
    let texts = ["", "a", "Ġtoken", "\u{10FFFF}"];
    let mut items = texts.iter().flat_map(string).collect::<Vec<_>>();
    items.extend(string(b"\xFF"));
    on(&with(ARRAY, array(STRING, 5, &items)), |gguf| {
        let array = gguf.array("m.block_count").unwrap().unwrap();
        assert_eq!((array.len(), array.ty()), (5, ValueType::String));
        let strs = array.strs().unwrap();
        assert_eq!(strs.len(), 5);
        let found: Vec<_> = strs.collect();
        for (text, found) in texts.iter().zip(&found) {
            assert_eq!(found.as_str().unwrap(), *text);
        }
        assert!(matches!(found[4].as_str().unwrap_err().kind(), ErrorKind::NotUtf8 { .. }));
        assert_eq!(found[4].to_str_lossy(), "\u{FFFD}");
    });
    // The vocabulary as numbers: not tokens.
    on(&with(ARRAY, array(U8, 3, b"abc")), |gguf| {
        let array = gguf.array("m.block_count").unwrap().unwrap();
        wrong_type(array.strs().map(Iterator::count), "array of strings", "array of 3 u8");
        wrong_type(array.bools().map(Iterator::count), "array of bools", "array of 3 u8");
        wrong_type(array.f32s().map(Iterator::count), "array of f32", "array of 3 u8");
        assert!(array.u32s().unwrap().eq([97, 98, 99]));
    });
    // An empty array keeps its type.
    on(&with(ARRAY, array(STRING, 0, &[])), |gguf| {
        let array = gguf.array("m.block_count").unwrap().unwrap();
        assert!(array.is_empty() && array.strs().unwrap().next().is_none());
        wrong_type(array.u32s().map(Iterator::count), "array of u32", "array of 0 string");
    });
}

#[test]
fn shown_values_are_short_and_escaped() {
    let file = Raw::new()
        .kv("a", STRING, string(b"x\n\x1b\xFF\"y"))
        .kv("b", ARRAY, u32s(&(0..1000).collect::<Vec<_>>()))
        .kv("c", STRING, string("x".repeat(100_000)))
        .kv("d", F32, 1e-6f32.to_le_bytes())
        .build();
    on(&file, |gguf| {
        let shown: Vec<String> = gguf.metadata().map(|(_, value)| value.to_string()).collect();
        assert_eq!(shown[0], r#""x\n\u{1b}\xff\"y""#);
        assert_eq!(shown[1], "[0, 1, 2, 3, 4, 5, 6, 7, … 1000 in all]");
        assert!(shown[2].len() < 200);
        assert_eq!(shown[3], "1e-6");
    });
}

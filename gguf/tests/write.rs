//! The writer: the bytes of a file by the format's description, and what it refuses.
#![cfg(feature = "std")]

mod common;

use std::io::{self, Write};

use common::*;
use skep_gguf::{ErrorKind, Gguf, TensorType, ToItem, ToValue, ValueType, Writer};

fn written(writer: &Writer) -> Vec<u8> {
    let mut file = Vec::new();
    writer
        .write(&mut file, |tensor, sink| {
            sink.write_all(&(0..tensor.n_bytes()).map(|i| i as u8).collect::<Vec<_>>())
        })
        .unwrap();
    assert_eq!(writer.file_bytes().unwrap(), file.len() as u64);
    file
}

#[test]
fn the_bytes_are_those_of_the_format() {
    let mut writer = Writer::new();
    writer.set("s", "text").unwrap().set("n", 7u32).unwrap().set("a", [1u32, 2]).unwrap();
    writer.tensor("t", &[8], TensorType::F32).unwrap();
    let raw = Raw::new()
        .kv("s", STRING, string("text"))
        .kv("n", U32, 7u32.to_le_bytes())
        .kv("a", ARRAY, u32s(&[1, 2]))
        .tensor("t", &[8], 0, 0)
        .data(32);
    assert_eq!(written(&writer), raw.build());
}

#[test]
fn data_is_aligned_and_padded_to_the_end() {
    for alignment in [1u32, 32, 64, 4096] {
        let mut writer = Writer::new();
        writer.tensor("a", &[3], TensorType::I8).unwrap();
        writer.set("general.alignment", alignment).unwrap();
        writer.tensor("none", &[0], TensorType::F32).unwrap();
        writer.tensor("b", &[256, 2], TensorType::Q4_K).unwrap();
        let file = written(&writer);
        assert!(file.len().is_multiple_of(alignment as usize));
        let gguf = accepted(&file);
        for tensor in gguf.tensors() {
            assert!(tensor.offset().is_multiple_of(alignment.into()), "{tensor:?}");
            assert!(gguf.data(tensor).iter().enumerate().all(|(i, &byte)| byte == i as u8));
        }
    }
}

#[test]
fn values_of_all_kinds() {
    let mut writer = Writer::new();
    writer.set("i8", -1i8).unwrap().set("u64", u64::MAX).unwrap().set("f64", 0.1f64).unwrap();
    writer.set("bool", true).unwrap().set("String", String::from("é")).unwrap();
    writer.set("&[&str]", &["a", ""][..]).unwrap().set("Vec<String>", vec![String::from("x")]).unwrap();
    writer.set("[bool]", [true, false]).unwrap().set("[[i32]]", vec![vec![1i32], vec![]]).unwrap();
    writer.set("empty", Vec::<f32>::new()).unwrap();
    let file = written(&writer);
    let gguf = accepted(&file);
    let shown: Vec<String> = gguf.metadata().map(|(key, value)| format!("{key} {value:?}")).collect();
    assert_eq!(
        shown,
        [
            "i8 I8(-1)",
            "u64 U64(18446744073709551615)",
            "f64 F64(0.1)",
            "bool Bool(true)",
            "String String(\"é\")",
            "&[&str] Array(string[\"a\", \"\"])",
            "Vec<String> Array(string[\"x\"])",
            "[bool] Array(bool[true, false])",
            "[[i32]] Array(array[[1], []])",
            "empty Array(f32[])",
        ]
    );
    // Metadata goes from file to file as it is.
    let mut copy = Writer::new();
    for (key, value) in gguf.metadata() {
        copy.set(key, value).unwrap();
    }
    assert_eq!(written(&copy), file);
}

#[test]
fn keys_values_and_tensors_that_are_refused() {
    let mut writer = Writer::new();
    writer.set("k", 1u8).unwrap();
    writer.tensor("t", &[8], TensorType::F32).unwrap();
    let before = written(&writer);

    let error = writer.set("k", 2u8).unwrap_err();
    assert!(matches!(error.kind(), ErrorKind::Duplicate) && error.key() == Some("k"), "{error}");
    assert!(matches!(writer.set("", 1u8).unwrap_err().kind(), ErrorKind::EmptyName));
    let error = writer.set(&"k".repeat(65_536), 1u8).unwrap_err();
    assert!(matches!(error.kind(), ErrorKind::LongName { length: 65_536, .. }), "{error}");
    for result in
        [writer.set("general.alignment", 48u32).map(drop), writer.set("general.alignment", 32u64).map(drop)]
    {
        assert!(matches!(result.unwrap_err().kind(), ErrorKind::Alignment { .. }));
    }
    let error = writer.set("deep", [[[[[1u8]]]]]).unwrap_err();
    assert!(matches!(error.kind(), ErrorKind::Nesting) && error.offset().is_none(), "{error}");

    let error = writer.tensor("t", &[8], TensorType::F32).unwrap_err();
    assert!(matches!(error.kind(), ErrorKind::Duplicate) && error.tensor() == Some("t"), "{error}");
    for (name, shape, ty) in [
        ("", &[8u64][..], TensorType::F32),
        (&"n".repeat(65), &[8], TensorType::F32),
        ("u", &[], TensorType::F32),
        ("u", &[1, 1, 1, 1, 1], TensorType::F32),
        ("u", &[100], TensorType::Q4_K),
        ("u", &[1 << 62], TensorType::F32),
        ("u", &[1 << 32, 1 << 32], TensorType::F32),
    ] {
        assert!(writer.tensor(name, shape, ty).is_err(), "{name} {shape:?}");
    }
    assert_eq!(written(&writer), before, "what was refused leaves no trace");
}

#[test]
fn files_too_large_to_be() {
    let mut writer = Writer::new();
    writer.tensor("a", &[i64::MAX as u64 - 1000], TensorType::I8).unwrap();
    assert!(writer.file_bytes().is_ok());
    writer.tensor("b", &[2000], TensorType::I8).unwrap();
    let error = writer.file_bytes().unwrap_err();
    assert!(matches!(error.kind(), ErrorKind::TensorSize { .. }), "{error}");
    assert!(writer.write(io::sink(), |_, _| panic!("nothing is written")).is_err());
}

#[test]
fn every_tensor_gets_exactly_its_bytes() {
    let mut writer = Writer::new();
    writer.tensor("a", &[8], TensorType::F32).unwrap().tensor("b", &[8], TensorType::F32).unwrap();
    let fault = |bytes: &'static [usize], swallow: bool| {
        let error = writer
            .write(io::sink(), |tensor, sink| {
                if tensor.name() == "a" {
                    return sink.write_all(&[0; 32]);
                }
                for &length in bytes {
                    let result = sink.write_all(&[0; 100][..length]);
                    if !swallow {
                        result?;
                    }
                }
                Ok(())
            })
            .unwrap_err();
        assert_eq!(error.tensor(), Some("b"));
        match *error.kind() {
            ErrorKind::TensorData { expected: 32, given } => given,
            _ => panic!("{error}"),
        }
    };
    assert_eq!(fault(&[], false), 0);
    assert_eq!(fault(&[16, 15], false), 31);
    assert_eq!(fault(&[33], false), 33);
    assert_eq!(fault(&[32, 1], false), 33);
    assert_eq!(fault(&[16, 100], true), 116);
}

#[test]
fn failures_of_source_and_destination_are_passed_on() {
    let mut writer = Writer::new();
    writer.tensor("a", &[1 << 22], TensorType::I8).unwrap();
    let error = writer.write(io::sink(), |_, _| Err(io::Error::other("no weights"))).unwrap_err();
    assert_eq!(error.to_string(), "tensor `a`: no weights");
    assert!(std::error::Error::source(&error).is_some());

    struct Full(usize);
    impl Write for Full {
        fn write(&mut self, data: &[u8]) -> io::Result<usize> {
            self.0 = self.0.checked_sub(data.len()).ok_or(io::ErrorKind::StorageFull)?;
            Ok(data.len())
        }
        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }
    for room in [0, 1 << 20] {
        let error = writer.write(Full(room), |_, sink| sink.write_all(&vec![0; 1 << 22])).unwrap_err();
        assert!(
            matches!(error.kind(), ErrorKind::Io(cause) if cause.kind() == io::ErrorKind::StorageFull),
            "{error}"
        );
    }
}

#[test]
fn values_that_are_not_what_they_say_are_refused() {
    struct Liar(ValueType, &'static [u8]);
    impl ToValue for Liar {
        fn ty(&self) -> ValueType {
            self.0
        }
        fn put(&self, out: &mut Vec<u8>) {
            out.extend_from_slice(self.1);
        }
    }
    impl ToItem for Liar {
        const TYPE: ValueType = ValueType::U32;
    }
    let mut writer = Writer::new();
    assert!(matches!(writer.set("k", Liar(ValueType::U8, &[1, 2])).unwrap_err().kind(), ErrorKind::Encoding));
    for liar in [Liar(ValueType::U32, &[1, 2]), Liar(ValueType::Bool, &[2]), Liar(ValueType::String, &[9; 9])]
    {
        assert!(writer.set("k", liar).is_err());
    }
    assert!(writer.set("k", [Liar(ValueType::U8, &[1])]).is_err());
    assert_eq!(Gguf::parse(written(&writer)).unwrap().metadata().count(), 0);
}

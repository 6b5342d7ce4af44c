//! Laws: what is written is what is read, and no bytes whatever make the reader panic.
#![cfg(feature = "std")]

mod common;

use common::*;
use proptest::collection::vec;
use proptest::prelude::*;
use skep_gguf::{Array, Gguf, TensorType, ToValue, Value, ValueType, Writer};

fn items<'a>(value: &Value<'a>) -> Option<Array<'a>> {
    match value {
        Value::Array(array) => Some(*array),
        _ => None,
    }
}

/// A metadata value that owns its content.
#[derive(Debug, Clone)]
enum Owned {
    U8(u8),
    I8(i8),
    U16(u16),
    I16(i16),
    U32(u32),
    I32(i32),
    F32(f32),
    Bool(bool),
    Text(String),
    U64(u64),
    I64(i64),
    F64(f64),
    Texts(Vec<String>),
    Ints(Vec<i32>),
    Bools(Vec<bool>),
    Floats(Vec<f32>),
    Nested(Vec<Vec<u16>>),
    DeeplyNested(Vec<Vec<Vec<String>>>),
}

macro_rules! each {
    ($owned:expr, $value:ident => $body:expr) => {
        match $owned {
            Owned::U8($value) => $body,
            Owned::I8($value) => $body,
            Owned::U16($value) => $body,
            Owned::I16($value) => $body,
            Owned::U32($value) => $body,
            Owned::I32($value) => $body,
            Owned::F32($value) => $body,
            Owned::Bool($value) => $body,
            Owned::Text($value) => $body,
            Owned::U64($value) => $body,
            Owned::I64($value) => $body,
            Owned::F64($value) => $body,
            Owned::Texts($value) => $body,
            Owned::Ints($value) => $body,
            Owned::Bools($value) => $body,
            Owned::Floats($value) => $body,
            Owned::Nested($value) => $body,
            Owned::DeeplyNested($value) => $body,
        }
    };
}

impl ToValue for Owned {
    fn ty(&self) -> ValueType {
        each!(self, value => value.ty())
    }

    fn put(&self, out: &mut Vec<u8>) {
        each!(self, value => value.put(out))
    }
}

impl Owned {
    fn is(&self, value: &Value<'_>) -> bool {
        match (self, value) {
            (Self::U8(a), Value::U8(b)) => a == b,
            (Self::I8(a), Value::I8(b)) => a == b,
            (Self::U16(a), Value::U16(b)) => a == b,
            (Self::I16(a), Value::I16(b)) => a == b,
            (Self::U32(a), Value::U32(b)) => a == b,
            (Self::I32(a), Value::I32(b)) => a == b,
            (Self::F32(a), Value::F32(b)) => a.to_bits() == b.to_bits(),
            (Self::Bool(a), Value::Bool(b)) => a == b,
            (Self::Text(a), Value::String(b)) => b.as_str().is_ok_and(|b| a == b),
            (Self::U64(a), Value::U64(b)) => a == b,
            (Self::I64(a), Value::I64(b)) => a == b,
            (Self::F64(a), Value::F64(b)) => a.to_bits() == b.to_bits(),
            (Self::Texts(a), Value::Array(b)) => b.strs().unwrap().eq(a.iter().map(|a| a.as_str())),
            (Self::Ints(a), Value::Array(b)) => b.i32s().unwrap().eq(a.iter().copied()),
            (Self::Bools(a), Value::Array(b)) => b.bools().unwrap().eq(a.iter().copied()),
            (Self::Floats(a), Value::Array(b)) => b.f32s().unwrap().eq(a.iter().copied()),
            (Self::Nested(a), Value::Array(b)) => {
                a.len() == b.len()
                    && a.iter()
                        .zip(b.iter())
                        .all(|(a, b)| items(&b).unwrap().u32s().unwrap().eq(a.iter().map(|&a| u32::from(a))))
            }
            (Self::DeeplyNested(a), Value::Array(b)) => {
                a.len() == b.len()
                    && a.iter().zip(b.iter()).all(|(a, b)| {
                        let b = items(&b).unwrap();
                        a.len() == b.len()
                            && a.iter().zip(b.iter()).all(|(a, b)| {
                                items(&b).unwrap().strs().unwrap().eq(a.iter().map(|a| a.as_str()))
                            })
                    })
            }
            _ => false,
        }
    }
}

fn value() -> impl Strategy<Value = Owned> {
    let text = || "\\PC{0,12}";
    prop_oneof![
        any::<u8>().prop_map(Owned::U8),
        any::<i8>().prop_map(Owned::I8),
        any::<u16>().prop_map(Owned::U16),
        any::<i16>().prop_map(Owned::I16),
        any::<u32>().prop_map(Owned::U32),
        any::<i32>().prop_map(Owned::I32),
        any::<u32>().prop_map(|bits| Owned::F32(f32::from_bits(bits))),
        any::<bool>().prop_map(Owned::Bool),
        any::<String>().prop_map(Owned::Text),
        any::<u64>().prop_map(Owned::U64),
        any::<i64>().prop_map(Owned::I64),
        any::<u64>().prop_map(|bits| Owned::F64(f64::from_bits(bits))),
        vec(text(), 0..9).prop_map(Owned::Texts),
        vec(any::<i32>(), 0..20).prop_map(Owned::Ints),
        vec(any::<bool>(), 0..20).prop_map(Owned::Bools),
        vec(-1e9f32..1e9, 0..20).prop_map(Owned::Floats),
        vec(vec(any::<u16>(), 0..4), 0..4).prop_map(Owned::Nested),
        vec(vec(vec(text(), 0..3), 0..3), 0..3).prop_map(Owned::DeeplyNested),
    ]
}

/// Shape and type; rows are made whole blocks.
fn tensor() -> impl Strategy<Value = (Vec<u64>, TensorType)> {
    (vec(0u64..4, 1..=4), 0..TensorType::ALL.len()).prop_map(|(mut shape, ty)| {
        let ty = TensorType::ALL[ty];
        shape[0] *= ty.block_len();
        (shape, ty)
    })
}

#[derive(Debug, Clone)]
struct Model {
    alignment: Option<u32>,
    metadata: Vec<Owned>,
    tensors: Vec<(Vec<u64>, TensorType)>,
}

fn model() -> impl Strategy<Value = Model> {
    let alignment = prop::option::of((0u32..9).prop_map(|bits| 1 << bits));
    (alignment, vec(value(), 0..12), vec(tensor(), 0..8)).prop_map(|(alignment, metadata, tensors)| Model {
        alignment,
        metadata,
        tensors,
    })
}

impl Model {
    fn write(&self) -> Vec<u8> {
        let mut writer = Writer::new();
        for (i, value) in self.metadata.iter().enumerate() {
            writer.set(&format!("key.{i}"), value).unwrap();
        }
        if let Some(alignment) = self.alignment {
            writer.set("general.alignment", alignment).unwrap();
        }
        for (i, (shape, ty)) in self.tensors.iter().enumerate() {
            writer.tensor(&format!("tensor.{i}"), shape, *ty).unwrap();
        }
        let mut file = Vec::new();
        writer
            .write(&mut file, |tensor, sink| {
                (0..tensor.n_bytes()).try_for_each(|i| sink.write_all(&[byte(tensor.name(), i)]))
            })
            .unwrap();
        file
    }
}

fn byte(name: &str, i: u64) -> u8 {
    (i as u8).wrapping_mul(31) ^ name.as_bytes()[name.len() - 1]
}

fn nothing_panics(bytes: &[u8]) {
    if let Ok(gguf) = Gguf::parse(bytes) {
        walk(&gguf);
    }
    if let Ok(gguf) = Gguf::join(vec![bytes, bytes]) {
        walk(&gguf);
    }
}

/// A change to a file: at a place in the first bytes, where the header is, or anywhere.
#[derive(Debug, Clone)]
enum Change {
    Byte(prop::sample::Index, u8),
    Word(prop::sample::Index, u64),
    Remove(prop::sample::Index, usize),
    Insert(prop::sample::Index, Vec<u8>),
    Cut(prop::sample::Index),
}

fn change() -> impl Strategy<Value = Change> {
    let at = any::<prop::sample::Index>;
    let word = prop_oneof![
        any::<u64>(),
        0u64..40,
        (0u32..64, -33i64..33).prop_map(|(bit, by)| (1u64 << bit).wrapping_add_signed(by)),
    ];
    prop_oneof![
        4 => (at(), any::<u8>()).prop_map(|(at, byte)| Change::Byte(at, byte)),
        4 => (at(), word).prop_map(|(at, word)| Change::Word(at, word)),
        1 => (at(), 1usize..40).prop_map(|(at, length)| Change::Remove(at, length)),
        1 => (at(), vec(any::<u8>(), 1..40)).prop_map(|(at, bytes)| Change::Insert(at, bytes)),
        1 => at().prop_map(Change::Cut),
    ]
}

impl Change {
    fn apply(&self, file: &mut Vec<u8>) {
        if file.is_empty() {
            return;
        }
        let place = |index: &prop::sample::Index| index.index(file.len());
        match self {
            Self::Byte(at, byte) => {
                let at = place(at);
                file[at] = *byte;
            }
            Self::Word(at, word) => {
                let at = place(at);
                let end = (at + 8).min(file.len());
                file[at..end].copy_from_slice(&word.to_le_bytes()[..end - at]);
            }
            Self::Remove(at, length) => {
                let at = place(at);
                file.drain(at..(at + length).min(file.len()));
            }
            Self::Insert(at, bytes) => {
                let at = place(at);
                file.splice(at..at, bytes.iter().copied());
            }
            Self::Cut(at) => {
                let at = place(at);
                file.truncate(at);
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    #[test]
    fn what_is_written_is_read(model in model()) {
        let file = model.write();
        let gguf = Gguf::parse(&file).unwrap();
        walk(&gguf);
        prop_assert_eq!(gguf.version(), 3);
        prop_assert_eq!(gguf.alignment(), model.alignment.unwrap_or(32));
        prop_assert_eq!(gguf.metadata().count(), model.metadata.len() + usize::from(model.alignment.is_some()));
        for (i, ((key, found), value)) in gguf.metadata().zip(&model.metadata).enumerate() {
            prop_assert_eq!(key, format!("key.{i}"));
            prop_assert!(value.is(&found), "{:?} is not {:?}", found, value);
            prop_assert!(value.is(&gguf.get(key).unwrap()));
        }
        prop_assert_eq!(gguf.tensors().len(), model.tensors.len());
        for (tensor, (shape, ty)) in gguf.tensors().iter().zip(&model.tensors) {
            prop_assert_eq!((tensor.shape(), tensor.ty()), (&shape[..], *ty));
            prop_assert_eq!(tensor.n_elements(), shape.iter().product::<u64>());
            prop_assert!(tensor.offset().is_multiple_of(gguf.alignment().into()));
            let right = (0..).zip(gguf.data(tensor)).all(|(i, &found)| found == byte(tensor.name(), i));
            prop_assert!(right, "{:?}", tensor);
        }
    }

    #[test]
    fn changed_files_never_panic(model in model(), changes in vec(change(), 1..6)) {
        let mut file = model.write();
        for change in &changes {
            change.apply(&mut file);
            nothing_panics(&file);
        }
    }

    #[test]
    fn noise_never_panics(noise in vec(any::<u8>(), 0..200), tensors in 0u64..4, entries in 0u64..4) {
        nothing_panics(&noise);
        let start = [&b"GGUF\x03\0\0\0"[..], &tensors.to_le_bytes(), &entries.to_le_bytes()].concat();
        nothing_panics(&[&start[..], &noise].concat());
    }
}

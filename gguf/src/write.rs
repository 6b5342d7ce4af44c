use alloc::boxed::Box;
use alloc::collections::BTreeSet;
use alloc::string::String;
use alloc::vec::Vec;
use core::fmt;
use std::io::{self, BufWriter, Write};

use crate::array::Array;
use crate::cursor::Cursor;
use crate::error::{Error, ErrorKind, Result};
use crate::header::{ALIGNMENT_KEY, DEFAULT_ALIGNMENT, MAGIC, MAX_KEY};
use crate::tensor::{TensorInfo, TensorType, check_name};
use crate::value::{Str, Value, ValueType};

/// Format version that is written.
const VERSION: u32 = 3;

/// Writes a GGUF file, version 3: first say what is in it, then stream the data.
///
/// Metadata and tensors appear in the file in the order in which they are added; each tensor's data starts at a multiple
/// of `general.alignment` (32 unless that key is set), with zeros in the gaps and after the last. What was written
/// without an error is a file that this crate reads.
///
/// ```
/// use skep_gguf::{Gguf, TensorType, Writer};
///
/// let mut writer = Writer::new();
/// writer.set("general.architecture", "example")?;
/// writer.tensor("bias", &[2], TensorType::F32)?;
/// let mut file = Vec::new();
/// writer.write(&mut file, |_, sink| sink.write_all(&[0; 8]))?;
/// assert_eq!(Gguf::parse(file)?.architecture()?, "example");
/// # Ok::<(), skep_gguf::Error>(())
/// ```
#[derive(Default)]
pub struct Writer {
    alignment: Option<u32>,
    keys: BTreeSet<Box<str>>,
    /// The metadata as it will be in the file.
    entries: Vec<u8>,
    names: BTreeSet<Box<str>>,
    tensors: Vec<TensorInfo>,
}

impl Writer {
    /// A file without metadata and tensors.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a metadata entry.
    ///
    /// # Errors
    /// The key is empty, over-long or there already, `general.alignment` is not a u32 power of two, or arrays are nested
    /// too deep.
    pub fn set(&mut self, key: &str, value: impl ToValue) -> Result<&mut Self> {
        self.add_entry(key, value.ty(), |out| value.put(out)).map_err(|e| e.in_key(key))?;
        Ok(self)
    }

    /// Adds a tensor; `shape` has the innermost dimension first.
    ///
    /// # Errors
    /// The name is empty, over-long or there already, the shape has not 1 to 4 dimensions, its size overflows, or rows
    /// are not a whole number of blocks.
    pub fn tensor(&mut self, name: &str, shape: &[u64], ty: TensorType) -> Result<&mut Self> {
        let info = TensorInfo::new(name.as_bytes(), shape, ty).map_err(|e| e.in_tensor(name))?;
        if !self.names.insert(name.into()) {
            return Err(Error::from(ErrorKind::Duplicate).in_tensor(name));
        }
        self.tensors.push(info);
        Ok(self)
    }

    /// Bytes that the file will have.
    ///
    /// # Errors
    /// The size is larger than 2⁶³ - 1.
    pub fn file_bytes(&self) -> Result<u64> {
        self.layout().map(|layout| layout.end)
    }

    /// Writes the file: the header, then for each tensor in order what `data` writes to the sink for it.
    ///
    /// The [`TensorInfo`] that `data` is given carries the place of the data in the file. Small writes are buffered.
    ///
    /// # Errors
    /// A tensor was given more or fewer bytes than it has, `data` failed, or the destination did; the error names the
    /// tensor. What was written by then is not a valid file.
    pub fn write<W, D>(&self, out: W, mut data: D) -> Result<()>
    where
        W: Write,
        D: FnMut(&TensorInfo, &mut dyn Write) -> io::Result<()>,
    {
        let layout = self.layout()?;
        let mut out = BufWriter::with_capacity(1 << 20, out);
        out.write_all(&layout.header)?;
        let mut position = layout.header.len() as u64;
        for tensor in &layout.tensors {
            zeros(&mut out, tensor.offset() - position)?;
            let expected = tensor.n_bytes();
            let mut sink = Sink { out: &mut out, size: expected, taken: 0, refused: None };
            let written = data(tensor, &mut sink);
            let given = sink.refused.unwrap_or(sink.taken);
            match (sink.refused, written) {
                (None, Err(error)) => Err(Error::from(error)),
                _ if given != expected => Err(ErrorKind::TensorData { expected, given }.into()),
                _ => Ok(()),
            }
            .map_err(|e| e.in_tensor(tensor.name()))?;
            position = tensor.offset() + expected;
        }
        zeros(&mut out, layout.end - position)?;
        Ok(out.flush()?)
    }

    fn add_entry(&mut self, key: &str, ty: ValueType, put: impl FnOnce(&mut Vec<u8>)) -> Result<()> {
        check_name(key.as_bytes(), MAX_KEY)?;
        if self.keys.contains(key) {
            return Err(ErrorKind::Duplicate.into());
        }
        let mut value = Vec::new();
        put(&mut value);
        let mut cursor = Cursor::new(&value);
        // Offsets in the value alone would mislead.
        let read = Value::read(&mut cursor, ty, key, 0).map_err(|e| Error::from(e.into_kind()))?;
        if cursor.left() > 0 {
            return Err(ErrorKind::Encoding.into());
        }
        if key == ALIGNMENT_KEY {
            match read {
                Value::U32(alignment) if alignment.is_power_of_two() => self.alignment = Some(alignment),
                _ => {
                    let found = alloc::format!("{} {read}", read.ty());
                    return Err(ErrorKind::Alignment { found }.into());
                }
            }
        }
        self.keys.insert(key.into());
        put_string(&mut self.entries, key.as_bytes());
        self.entries.extend_from_slice(&ty.id().to_le_bytes());
        self.entries.extend_from_slice(&value);
        Ok(())
    }

    /// The header with its padding, and the place of every tensor.
    fn layout(&self) -> Result<Layout> {
        let alignment = u64::from(self.alignment.unwrap_or(DEFAULT_ALIGNMENT));
        let mut header = Vec::with_capacity(24 + self.entries.len());
        header.extend_from_slice(&MAGIC);
        header.extend_from_slice(&VERSION.to_le_bytes());
        header.extend_from_slice(&(self.tensors.len() as u64).to_le_bytes());
        header.extend_from_slice(&(self.keys.len() as u64).to_le_bytes());
        header.extend_from_slice(&self.entries);
        let mut offset = 0u64;
        let mut offsets = Vec::with_capacity(self.tensors.len());
        for tensor in &self.tensors {
            put_string(&mut header, tensor.name().as_bytes());
            header.extend_from_slice(&(tensor.shape().len() as u32).to_le_bytes());
            for dim in tensor.shape() {
                header.extend_from_slice(&dim.to_le_bytes());
            }
            header.extend_from_slice(&tensor.ty().id().to_le_bytes());
            header.extend_from_slice(&offset.to_le_bytes());
            offsets.push(offset);
            offset = offset
                .checked_add(tensor.n_bytes())
                .and_then(|end| end.checked_next_multiple_of(alignment))
                .ok_or_else(|| too_large(tensor))?;
        }
        let data = (header.len() as u64).next_multiple_of(alignment);
        let fits = |end: &u64| i64::try_from(*end).is_ok();
        let end = match (data.checked_add(offset).filter(fits), self.tensors.last()) {
            (None, Some(last)) => return Err(too_large(last)),
            (end, _) => end.unwrap_or(data),
        };
        let tensors = self.tensors.iter().zip(offsets);
        let tensors = tensors.map(|(tensor, offset)| tensor.clone().placed(data + offset)).collect();
        Ok(Layout { header, tensors, end })
    }
}

impl fmt::Debug for Writer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Writer")
            .field("metadata", &self.keys.len())
            .field("tensors", &self.tensors.len())
            .finish_non_exhaustive()
    }
}

struct Layout {
    header: Vec<u8>,
    tensors: Vec<TensorInfo>,
    end: u64,
}

fn too_large(tensor: &TensorInfo) -> Error {
    Error::from(ErrorKind::TensorSize { shape: tensor.shape().into() }).in_tensor(tensor.name())
}

fn zeros(out: &mut impl Write, count: u64) -> io::Result<()> {
    io::copy(&mut io::Read::take(io::repeat(0), count), out).map(drop)
}

fn put_string(out: &mut Vec<u8>, bytes: &[u8]) {
    out.extend_from_slice(&(bytes.len() as u64).to_le_bytes());
    out.extend_from_slice(bytes);
}

/// Takes the data of one tensor and no more.
struct Sink<'a, W> {
    out: &'a mut W,
    size: u64,
    taken: u64,
    /// Where the data would have ended with a write that was refused.
    refused: Option<u64>,
}

impl<W: Write> Write for Sink<'_, W> {
    fn write(&mut self, data: &[u8]) -> io::Result<usize> {
        let end = self.taken.saturating_add(data.len() as u64);
        if end > self.size {
            self.refused = Some(end);
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "more data than the tensor has"));
        }
        let written = self.out.write(data)?;
        self.taken += written as u64;
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// What can be written as a metadata value: numbers, truth values, strings, slices and vectors of them, and a [`Value`]
/// read from another file.
///
/// The type in the file is that of the Rust value: `4u32` and `4i32` differ. An implementation that writes something else
/// than its type says is refused by [`Writer::set`].
pub trait ToValue {
    /// The type of the value.
    fn ty(&self) -> ValueType;

    /// Appends the value as the format stores it, without its type.
    fn put(&self, out: &mut Vec<u8>);
}

/// Values that may stand in an array, because their type is known without one: an empty array has an item type too.
pub trait ToItem: ToValue {
    /// The type of all values of this Rust type.
    const TYPE: ValueType;
}

macro_rules! items {
    ($($rust:ty, $ty:ident, |$value:ident, $out:ident| $put:expr;)*) => {$(
        impl ToValue for $rust {
            fn ty(&self) -> ValueType {
                <Self as ToItem>::TYPE
            }

            fn put(&self, $out: &mut Vec<u8>) {
                let $value = self;
                $put
            }
        }

        impl ToItem for $rust {
            const TYPE: ValueType = ValueType::$ty;
        }
    )*};
}

items! {
    u8, U8, |value, out| out.push(*value);
    i8, I8, |value, out| out.extend_from_slice(&value.to_le_bytes());
    u16, U16, |value, out| out.extend_from_slice(&value.to_le_bytes());
    i16, I16, |value, out| out.extend_from_slice(&value.to_le_bytes());
    u32, U32, |value, out| out.extend_from_slice(&value.to_le_bytes());
    i32, I32, |value, out| out.extend_from_slice(&value.to_le_bytes());
    f32, F32, |value, out| out.extend_from_slice(&value.to_le_bytes());
    bool, Bool, |value, out| out.push(u8::from(*value));
    str, String, |value, out| put_string(out, value.as_bytes());
    String, String, |value, out| put_string(out, value.as_bytes());
    Str<'_>, String, |value, out| put_string(out, value.as_bytes());
    u64, U64, |value, out| out.extend_from_slice(&value.to_le_bytes());
    i64, I64, |value, out| out.extend_from_slice(&value.to_le_bytes());
    f64, F64, |value, out| out.extend_from_slice(&value.to_le_bytes());
}

impl<T: ToValue + ?Sized> ToValue for &T {
    fn ty(&self) -> ValueType {
        (**self).ty()
    }

    fn put(&self, out: &mut Vec<u8>) {
        (**self).put(out);
    }
}

impl<T: ToItem + ?Sized> ToItem for &T {
    const TYPE: ValueType = T::TYPE;
}

impl<T: ToItem> ToValue for [T] {
    fn ty(&self) -> ValueType {
        ValueType::Array
    }

    fn put(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(&T::TYPE.id().to_le_bytes());
        out.extend_from_slice(&(self.len() as u64).to_le_bytes());
        self.iter().for_each(|item| item.put(out));
    }
}

impl<T: ToItem> ToItem for [T] {
    const TYPE: ValueType = ValueType::Array;
}

impl<T: ToItem, const N: usize> ToValue for [T; N] {
    fn ty(&self) -> ValueType {
        ValueType::Array
    }

    fn put(&self, out: &mut Vec<u8>) {
        self.as_slice().put(out);
    }
}

impl<T: ToItem, const N: usize> ToItem for [T; N] {
    const TYPE: ValueType = ValueType::Array;
}

impl<T: ToItem> ToValue for Vec<T> {
    fn ty(&self) -> ValueType {
        ValueType::Array
    }

    fn put(&self, out: &mut Vec<u8>) {
        self.as_slice().put(out);
    }
}

impl<T: ToItem> ToItem for Vec<T> {
    const TYPE: ValueType = ValueType::Array;
}

impl ToValue for Array<'_> {
    fn ty(&self) -> ValueType {
        ValueType::Array
    }

    fn put(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(&Array::ty(self).id().to_le_bytes());
        out.extend_from_slice(&(self.len() as u64).to_le_bytes());
        out.extend_from_slice(self.as_bytes());
    }
}

impl ToValue for Value<'_> {
    fn ty(&self) -> ValueType {
        Value::ty(self)
    }

    fn put(&self, out: &mut Vec<u8>) {
        match self {
            Self::U8(v) => v.put(out),
            Self::I8(v) => v.put(out),
            Self::U16(v) => v.put(out),
            Self::I16(v) => v.put(out),
            Self::U32(v) => v.put(out),
            Self::I32(v) => v.put(out),
            Self::F32(v) => v.put(out),
            Self::Bool(v) => v.put(out),
            Self::String(v) => v.put(out),
            Self::Array(v) => v.put(out),
            Self::U64(v) => v.put(out),
            Self::I64(v) => v.put(out),
            Self::F64(v) => v.put(out),
        }
    }
}

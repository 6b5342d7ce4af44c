use alloc::boxed::Box;
use alloc::format;
use alloc::string::ToString;
use alloc::vec::Vec;

use crate::cursor::Cursor;
use crate::error::{Error, ErrorKind, Result};
use crate::tensor::{MAX_DIMS, TensorInfo, TensorType, check_name};
use crate::value::{Value, ValueType};

/// Most bytes of a metadata key.
pub const MAX_KEY: usize = 65_535;

/// Alignment of the tensor data of a file that does not say otherwise.
pub const DEFAULT_ALIGNMENT: u32 = 32;

pub(crate) const MAGIC: [u8; 4] = *b"GGUF";
pub(crate) const ALIGNMENT_KEY: &str = "general.alignment";

/// No metadata entry is smaller: the length of its key, a type, a value of one byte.
const LEAST_ENTRY: u64 = 8 + 4 + 1;
/// No tensor entry is smaller: the length of its name, a number of dimensions, type and offset.
const LEAST_TENSOR: u64 = 8 + 4 + 4 + 8;

/// One metadata entry: where its value lies.
pub(crate) struct Entry {
    pub(crate) key: Box<str>,
    ty: ValueType,
    /// Where the key's length is.
    pub(crate) at: usize,
    /// Where the value is, after its type.
    start: usize,
    end: usize,
    pub(crate) part: usize,
}

impl Entry {
    pub(crate) fn in_part(mut self, part: usize) -> Self {
        self.part = part;
        self
    }

    /// True when this value in `file` has the type and bytes of `other` in `other_file`.
    pub(crate) fn same_value(&self, file: &[u8], other: &Self, other_file: &[u8]) -> bool {
        self.ty == other.ty && self.bytes(file) == other.bytes(other_file)
    }

    /// The bytes of the value.
    fn bytes<'a>(&self, file: &'a [u8]) -> &'a [u8] {
        &file[self.start..self.end]
    }

    /// The value; read a second time, from where it was checked. None only if `file` is not what was parsed.
    pub(crate) fn value<'a>(&'a self, file: &'a [u8]) -> Option<Value<'a>> {
        Value::read(&mut Cursor::new(self.bytes(file)), self.ty, &self.key, 0).ok()
    }
}

/// The header of one file, checked against its bytes.
pub(crate) struct Header {
    pub(crate) version: u32,
    pub(crate) alignment: u32,
    pub(crate) entries: Vec<Entry>,
    /// Where each tensor's entry is, in the order of `tensors`.
    pub(crate) tensor_entries: Vec<u64>,
    pub(crate) tensors: Vec<TensorInfo>,
}

impl Header {
    pub(crate) fn parse(file: &[u8]) -> Result<Self> {
        let mut cursor = Cursor::new(file);
        let version = preamble(&mut cursor)?;
        let n_tensors = cursor.u64("the number of tensors")?;
        let n_entries = cursor.u64("the number of metadata entries")?;
        cursor.bounded(n_tensors, LEAST_TENSOR, "tensors").map_err(|e| e.at(8))?;
        let n_entries = cursor.bounded(n_entries, LEAST_ENTRY, "metadata entries").map_err(|e| e.at(16))?;

        // Grown as entries are found rather than reserved: a count alone must not claim memory.
        let mut entries = Vec::new();
        for number in 0..n_entries {
            entries.push(entry(&mut cursor, number as u64)?);
        }
        reject_duplicate_keys(&entries)?;
        let alignment = alignment(file, &entries)?;

        let n_tensors = cursor.bounded(n_tensors, LEAST_TENSOR, "tensors").map_err(|e| e.at(8))?;
        let mut tensors = Vec::new();
        let mut tensor_entries = Vec::new();
        for number in 0..n_tensors {
            tensor_entries.push(cursor.position() as u64);
            tensors.push(tensor(&mut cursor, number as u64)?);
        }
        let data = (cursor.position() as u64).next_multiple_of(alignment.into());
        let tensors = place(tensors, &tensor_entries, data, alignment, file.len() as u64)?;
        Ok(Self { version, alignment, entries, tensor_entries, tensors })
    }
}

/// Magic and version; says what the file is when it is something else.
fn preamble(cursor: &mut Cursor<'_>) -> Result<u32> {
    let file = cursor.clone().take(cursor.left(), "the file")?;
    if file.is_empty() {
        return Err(ErrorKind::Empty.into());
    }
    let start = &file[..file.len().min(MAGIC.len())];
    if start != &MAGIC[..start.len()] {
        return Err(Error::from(foreign(file)).at(0));
    }
    cursor.take(MAGIC.len() as u64, "the magic number")?;
    match cursor.u32("the version")? {
        version @ (2 | 3) => Ok(version),
        version if matches!(version.swap_bytes(), 1..=0xFFFF) && version > 0xFFFF => {
            Err(Error::from(ErrorKind::BigEndian).at(4))
        }
        version => Err(Error::from(ErrorKind::Version(version)).at(4)),
    }
}

/// What a file is that does not start like a GGUF file.
fn foreign(file: &[u8]) -> ErrorKind {
    const LFS: &[u8] = b"version https://git-lfs";
    if file.starts_with(LFS) {
        return ErrorKind::GitLfsPointer;
    }
    let text = file.strip_prefix(b"\xEF\xBB\xBF").unwrap_or(file).trim_ascii_start();
    let opens = |tag: &[u8]| text.get(..tag.len()).is_some_and(|start| start.eq_ignore_ascii_case(tag));
    if opens(b"<!doctype html") || opens(b"<html") || opens(b"<head") {
        return ErrorKind::HtmlPage;
    }
    ErrorKind::NotGguf { magic: file[..file.len().min(MAGIC.len())].into() }
}

fn entry(cursor: &mut Cursor<'_>, number: u64) -> Result<Entry> {
    let at = cursor.position();
    let key = cursor
        .string("a key")
        .and_then(|key| check_name(key, MAX_KEY).map_err(|e| e.at(at as u64)))
        .map_err(|e| e.in_key_number(number))?;
    let value = |cursor: &mut Cursor<'_>| {
        let at = cursor.position() as u64;
        let id = cursor.u32("the type of a value")?;
        let ty = ValueType::from_id(id).ok_or_else(|| Error::from(ErrorKind::ValueType(id)).at(at))?;
        let start = cursor.position();
        Value::read(cursor, ty, "", 0)?;
        Ok((ty, start))
    };
    let (ty, start) = value(cursor).map_err(|e: Error| e.in_key(key))?;
    Ok(Entry { key: key.into(), ty, at, start, end: cursor.position(), part: 0 })
}

fn reject_duplicate_keys(entries: &[Entry]) -> Result<()> {
    let mut sorted: Vec<&Entry> = entries.iter().collect();
    sorted.sort_by(|a, b| a.key.cmp(&b.key));
    match sorted.windows(2).find(|pair| pair[0].key == pair[1].key) {
        Some(pair) => Err(Error::from(ErrorKind::Duplicate).in_key(&pair[1].key).at(pair[1].at as u64)),
        None => Ok(()),
    }
}

fn alignment(file: &[u8], entries: &[Entry]) -> Result<u32> {
    let Some(entry) = entries.iter().find(|entry| &*entry.key == ALIGNMENT_KEY) else {
        return Ok(DEFAULT_ALIGNMENT);
    };
    match entry.value(file) {
        Some(Value::U32(alignment)) if alignment.is_power_of_two() => Ok(alignment),
        found => {
            let found = match found {
                Some(value) => format!("{} {value}", value.ty()),
                None => entry.ty.to_string(),
            };
            Err(Error::from(ErrorKind::Alignment { found }).in_key(ALIGNMENT_KEY).at(entry.start as u64))
        }
    }
}

/// Reads one tensor entry; its offset is still relative to the data section.
fn tensor(cursor: &mut Cursor<'_>, number: u64) -> Result<TensorInfo> {
    let at = cursor.position() as u64;
    let name = cursor.string("a tensor name").map_err(|e| e.in_tensor_number(number))?;
    // A name that is not text is refused below, with everything else that can be wrong with it.
    let named = |e: Error| match core::str::from_utf8(name) {
        Ok(name) if !name.is_empty() => e.in_tensor(name),
        _ => e.in_tensor_number(number),
    };
    let mut fields = || {
        check_name(name, crate::MAX_TENSOR_NAME)?;
        let n_dims = cursor.u32("the number of dimensions")?;
        let mut dims = [0; MAX_DIMS];
        let shape = usize::try_from(n_dims)
            .ok()
            .and_then(|n| dims.get_mut(..n))
            .filter(|shape| !shape.is_empty())
            .ok_or(ErrorKind::Dimensions(n_dims.into()))?;
        for dim in &mut *shape {
            *dim = cursor.u64("a dimension")?;
        }
        let ty = TensorType::from_id(cursor.u32("the tensor type")?)?;
        let offset = cursor.u64("the data offset")?;
        Ok(TensorInfo::new(name, shape, ty)?.placed(offset))
    };
    fields().map_err(|e: Error| named(e).at(at))
}

/// Turns offsets in the data section into offsets in the file, once they are known to be aligned, inside the file and
/// free of overlaps.
fn place(
    tensors: Vec<TensorInfo>,
    entries: &[u64],
    data: u64,
    alignment: u32,
    file_len: u64,
) -> Result<Vec<TensorInfo>> {
    let available = file_len.saturating_sub(data);
    for (tensor, &at) in tensors.iter().zip(entries) {
        let (offset, needed) = (tensor.offset(), tensor.n_bytes());
        let fault = if !offset.is_multiple_of(alignment.into()) {
            ErrorKind::Misaligned { offset, alignment: alignment.into() }
        } else if offset.checked_add(needed).is_none_or(|end| end > available) {
            ErrorKind::OutOfFile { offset, needed, available }
        } else {
            continue;
        };
        return Err(Error::from(fault).in_tensor(tensor.name()).at(at));
    }
    let mut by_offset: Vec<usize> = (0..tensors.len()).filter(|&i| tensors[i].n_bytes() > 0).collect();
    by_offset.sort_by_key(|&i| tensors[i].offset());
    for pair in by_offset.windows(2) {
        let (first, second) = (&tensors[pair[0]], &tensors[pair[1]]);
        if first.offset() + first.n_bytes() > second.offset() {
            return Err(Error::from(ErrorKind::Overlap { other: first.name().into() })
                .in_tensor(second.name())
                .at(entries[pair[1]]));
        }
    }
    Ok(tensors
        .into_iter()
        .map(|tensor| {
            // Without data the offset may be that of the end of a section that the file does not reach.
            let offset = data.saturating_add(tensor.offset()).min(file_len);
            tensor.placed(offset)
        })
        .collect())
}

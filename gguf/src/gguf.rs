use alloc::format;
use alloc::string::String;
use alloc::vec::Vec;
use core::fmt;

use crate::array::Array;
use crate::error::{Error, ErrorKind, Result};
use crate::header::{ALIGNMENT_KEY, Entry, Header};
use crate::per_layer::PerLayer;
use crate::split;
use crate::tensor::TensorInfo;
use crate::value::{Str, Value};

/// A parsed GGUF file, or all parts of a split one, over bytes `B` (`&[u8]`, `Vec<u8>`, a memory map).
///
/// Everything was checked by [`parse`](Self::parse) or [`join`](Self::join): what the accessors return lies inside the
/// bytes. Metadata and tensor data are borrowed, never copied.
///
/// # Panics
/// The methods may panic, but do nothing worse, if `B` returns other bytes than those that were parsed.
pub struct Gguf<B> {
    parts: Vec<B>,
    version: u32,
    alignment: u32,
    entries: Vec<Entry>,
    /// Indexes into `entries`, by key.
    by_key: Vec<u32>,
    tensors: Vec<TensorInfo>,
    /// Indexes into `tensors`, by name.
    by_name: Vec<u32>,
}

/// One file with its header, before the parts are put together.
pub(crate) struct Part<B> {
    pub(crate) bytes: B,
    pub(crate) header: Header,
    /// What messages call the file; none for a single one in memory.
    pub(crate) label: Option<String>,
}

impl<B: AsRef<[u8]>> Part<B> {
    pub(crate) fn parse(bytes: B, label: Option<String>) -> Result<Self> {
        match Header::parse(bytes.as_ref()) {
            Ok(header) => Ok(Self { bytes, header, label }),
            Err(error) => Err(labelled(error, label.as_deref())),
        }
    }

    /// Names this file in an error.
    pub(crate) fn blame(&self, error: impl Into<Error>) -> Error {
        labelled(error.into(), self.label.as_deref())
    }

    pub(crate) fn get(&self, key: &str) -> Option<Value<'_>> {
        let entry = self.header.entries.iter().find(|entry| &*entry.key == key)?;
        entry.value(self.bytes.as_ref())
    }

    /// An integer of any width that fits `T`.
    pub(crate) fn integer<T: TryFrom<i128>>(&self, key: &str) -> Result<Option<T>> {
        let value = self.get(key).map(|value| value.to_integer(core::any::type_name::<T>())).transpose();
        value.map_err(|e| self.blame(e.in_key(key)))
    }
}

impl<B> Part<B> {
    /// What messages call the file.
    pub(crate) fn name(&self) -> String {
        self.label.clone().unwrap_or_default()
    }
}

fn labelled(error: Error, label: Option<&str>) -> Error {
    match label {
        Some(label) => error.in_file(label),
        None => error,
    }
}

impl<B: AsRef<[u8]>> Gguf<B> {
    /// Parses a single file.
    ///
    /// # Errors
    /// The file is malformed, or a lone part of a split file: the error then names the missing parts.
    pub fn parse(bytes: B) -> Result<Self> {
        Self::assemble(alloc::vec![Part::parse(bytes, None)?])
    }

    /// Parses all parts of a split file, given in any order; a single file that is not split will do too.
    ///
    /// The parts are put in the order of `split.no`. `split.count` must be the number of parts, and
    /// `split.tensors.count` the number of tensors in all of them. The metadata is that of the first part, followed by
    /// keys that only later parts have; a key that two parts have must have the same value in both, save `split.no` and
    /// `general.alignment`, which are about one file.
    ///
    /// # Errors
    /// A part is malformed, missing, given twice, or from another set.
    pub fn join(parts: Vec<B>) -> Result<Self> {
        let parts = parts.into_iter().enumerate();
        let parts = parts.map(|(i, bytes)| Part::parse(bytes, Some(format!("file {} given", i + 1))));
        Self::assemble(parts.collect::<Result<_>>()?)
    }

    /// Puts parsed parts together.
    pub(crate) fn assemble(mut parts: Vec<Part<B>>) -> Result<Self> {
        split::order(&mut parts)?;
        let (version, alignment) = match parts.first() {
            Some(first) => (first.header.version, first.header.alignment),
            None => return Err(ErrorKind::NoParts.into()),
        };
        let (entries, by_key) = merge_entries(&mut parts)?;
        let (tensors, by_name) = merge_tensors(&mut parts)?;
        let parts = parts.into_iter().map(|part| part.bytes).collect();
        Ok(Self { parts, version, alignment, entries, by_key, tensors, by_name })
    }

    /// Format version of the (first) file: 2 or 3.
    pub fn version(&self) -> u32 {
        self.version
    }

    /// Alignment in bytes of the tensor data in the (first) file, a power of two.
    pub fn alignment(&self) -> u32 {
        self.alignment
    }

    /// Number of files: 1 unless the file is split.
    pub fn parts(&self) -> usize {
        self.parts.len()
    }

    /// One of the files, in the order of the set.
    pub fn part(&self, index: usize) -> Option<&B> {
        self.parts.get(index)
    }

    /// Bytes of all files together.
    pub fn file_bytes(&self) -> u64 {
        self.parts.iter().map(|part| part.as_ref().len() as u64).sum()
    }

    /// The metadata in the order of the file.
    pub fn metadata(&self) -> impl Iterator<Item = (&str, Value<'_>)> {
        self.entries.iter().filter_map(|entry| Some((&*entry.key, self.value(entry)?)))
    }

    /// The value of a key.
    pub fn get(&self, key: &str) -> Option<Value<'_>> {
        let found = self.by_key.binary_search_by(|&i| (*self.entries[i as usize].key).cmp(key)).ok()?;
        self.value(&self.entries[self.by_key[found] as usize])
    }

    /// An integer of any width, as u32; none when the key is absent.
    ///
    /// # Errors
    /// The value is of another type or does not fit.
    pub fn u32(&self, key: &str) -> Result<Option<u32>> {
        self.typed(key, |value| value.to_integer("u32"))
    }

    /// An integer of any width, as usize; none when the key is absent.
    ///
    /// # Errors
    /// The value is of another type or does not fit.
    pub fn usize(&self, key: &str) -> Result<Option<usize>> {
        self.typed(key, |value| value.to_integer("usize"))
    }

    /// An integer of any width, as u64; none when the key is absent.
    ///
    /// # Errors
    /// The value is of another type or does not fit.
    pub fn u64(&self, key: &str) -> Result<Option<u64>> {
        self.typed(key, |value| value.to_integer("u64"))
    }

    /// An integer of any width, as i64; none when the key is absent.
    ///
    /// # Errors
    /// The value is of another type or does not fit.
    pub fn i64(&self, key: &str) -> Result<Option<i64>> {
        self.typed(key, |value| value.to_integer("i64"))
    }

    /// A float of either width, as f32; none when the key is absent.
    ///
    /// # Errors
    /// The value is of another type or beyond the range of f32.
    pub fn f32(&self, key: &str) -> Result<Option<f32>> {
        self.typed(key, Value::to_f32)
    }

    /// A truth value; none when the key is absent.
    ///
    /// # Errors
    /// The value is of another type.
    pub fn bool(&self, key: &str) -> Result<Option<bool>> {
        self.typed(key, Value::to_bool)
    }

    /// A string; none when the key is absent.
    ///
    /// # Errors
    /// The value is of another type or not UTF-8.
    pub fn str(&self, key: &str) -> Result<Option<&str>> {
        self.typed(key, |value| match value {
            Value::String(text) => text.as_str(),
            _ => Err(value.wrong_type("string")),
        })
    }

    /// A string of any bytes; none when the key is absent.
    ///
    /// # Errors
    /// The value is of another type.
    pub fn bytes(&self, key: &str) -> Result<Option<Str<'_>>> {
        self.typed(key, |value| match value {
            Value::String(text) => Ok(text),
            _ => Err(value.wrong_type("string")),
        })
    }

    /// An array; none when the key is absent.
    ///
    /// # Errors
    /// The value is of another type.
    pub fn array(&self, key: &str) -> Result<Option<Array<'_>>> {
        self.typed(key, |value| match value {
            Value::Array(array) => Ok(array),
            _ => Err(value.wrong_type("array")),
        })
    }

    /// An integer for all layers, or an array of one for each; none when the key is absent.
    ///
    /// # Errors
    /// The value is of another type, or a number does not fit.
    pub fn per_layer_usize(&self, key: &str) -> Result<Option<PerLayer<usize>>> {
        self.typed(key, |value| match value {
            Value::Array(array) => Ok(PerLayer::Each(array.usizes()?.collect())),
            _ => value.to_integer("usize").map(PerLayer::All),
        })
    }

    /// A truth value for all layers, or an array of one for each; none when the key is absent.
    ///
    /// # Errors
    /// The value is of another type.
    pub fn per_layer_bool(&self, key: &str) -> Result<Option<PerLayer<bool>>> {
        self.typed(key, |value| match value {
            Value::Array(array) => Ok(PerLayer::Each(array.bools()?.collect())),
            _ => value.to_bool().map(PerLayer::All),
        })
    }

    /// The value, or an error that says that `key` is missing: `gguf.required(key, gguf.u32(key)?)?`.
    ///
    /// # Errors
    /// The value is none.
    pub fn required<T>(&self, key: &str, value: Option<T>) -> Result<T> {
        value.ok_or_else(|| Error::from(ErrorKind::MissingKey).in_key(key))
    }

    /// `general.architecture`, which is also the prefix of the keys of the model.
    ///
    /// # Errors
    /// The key is missing or not a string.
    pub fn architecture(&self) -> Result<&str> {
        const KEY: &str = "general.architecture";
        self.required(KEY, self.str(KEY)?)
    }

    /// All tensors, part by part in the order of the files.
    pub fn tensors(&self) -> &[TensorInfo] {
        &self.tensors
    }

    /// The tensor of this name; a binary search.
    pub fn tensor(&self, name: &str) -> Option<&TensorInfo> {
        let found = self.by_name.binary_search_by(|&i| self.tensors[i as usize].name().cmp(name)).ok()?;
        Some(&self.tensors[self.by_name[found] as usize])
    }

    /// The data of a tensor of this file: [`TensorInfo::n_bytes`] bytes.
    ///
    /// # Panics
    /// The tensor is from another `Gguf` and its place is not inside this one.
    pub fn data(&self, tensor: &TensorInfo) -> &[u8] {
        // Offset and size were found to be inside the part, whose length is a usize.
        let start = tensor.offset() as usize;
        &self.parts[tensor.part()].as_ref()[start..start + tensor.n_bytes() as usize]
    }

    fn value<'a>(&'a self, entry: &'a Entry) -> Option<Value<'a>> {
        entry.value(self.parts[entry.part].as_ref())
    }

    fn typed<'a, T>(&'a self, key: &str, convert: impl FnOnce(Value<'a>) -> Result<T>) -> Result<Option<T>> {
        self.get(key).map(convert).transpose().map_err(|e| e.in_key(key))
    }
}

impl<B: AsRef<[u8]>> fmt::Debug for Gguf<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Gguf")
            .field("version", &self.version)
            .field("parts", &self.parts.len())
            .field("metadata", &self.entries.len())
            .field("tensors", &self.tensors.len())
            .finish_non_exhaustive()
    }
}

/// The entries of the first part, then those that only later parts have, and their indexes by key.
fn merge_entries<B: AsRef<[u8]>>(parts: &mut [Part<B>]) -> Result<(Vec<Entry>, Vec<u32>)> {
    let mut all = Vec::new();
    for (i, part) in parts.iter_mut().enumerate() {
        all.extend(core::mem::take(&mut part.header.entries).into_iter().map(|entry| entry.in_part(i)));
    }
    if parts.len() > 1 {
        let mut repeated = alloc::vec![false; all.len()];
        let by_key = sorted_indexes(&all, |entry| &entry.key);
        for same in by_key.chunk_by(|&a, &b| all[a as usize].key == all[b as usize].key) {
            let first = &all[same[0] as usize];
            for &i in &same[1..] {
                let (entry, part) = (&all[i as usize], &parts[all[i as usize].part]);
                let own = matches!(&*entry.key, split::NUMBER | ALIGNMENT_KEY);
                if !own && !entry.same_value(part.bytes.as_ref(), first, parts[first.part].bytes.as_ref()) {
                    let kind =
                        ErrorKind::MixedParts { key: (*entry.key).into(), other: parts[first.part].name() };
                    return Err(part.blame(Error::from(kind).at(entry.at as u64)));
                }
                repeated[i as usize] = true;
            }
        }
        let mut repeated = repeated.into_iter();
        all.retain(|_| repeated.next() == Some(false));
    }
    let by_key = sorted_indexes(&all, |entry| &entry.key);
    Ok((all, by_key))
}

/// The tensors of all parts, and their indexes by name.
fn merge_tensors<B: AsRef<[u8]>>(parts: &mut [Part<B>]) -> Result<(Vec<TensorInfo>, Vec<u32>)> {
    let mut merged = Vec::new();
    let mut entries = Vec::new();
    for (i, part) in parts.iter_mut().enumerate() {
        merged.extend(core::mem::take(&mut part.header.tensors).into_iter().map(|tensor| tensor.in_part(i)));
        entries.append(&mut part.header.tensor_entries);
    }
    let by_name = sorted_indexes(&merged, |tensor| tensor.name());
    for pair in by_name.windows(2) {
        let [first, second] = [pair[0], pair[1]].map(|i| &merged[i as usize]);
        if first.name() == second.name() {
            let error = Error::from(ErrorKind::Duplicate).in_tensor(second.name());
            return Err(parts[second.part()].blame(error.at(entries[pair[1] as usize])));
        }
    }
    Ok((merged, by_name))
}

/// The indexes of `items` in the order of their names, equal ones in the order of the items.
fn sorted_indexes<T>(items: &[T], name: impl Fn(&T) -> &str) -> Vec<u32> {
    // Items take more than 8 bytes of a file each: more than u32::MAX of them would need a header of over 32 GiB.
    let mut indexes: Vec<u32> = (0..items.len() as u32).collect();
    indexes.sort_by(|&a, &b| name(&items[a as usize]).cmp(name(&items[b as usize])));
    indexes
}

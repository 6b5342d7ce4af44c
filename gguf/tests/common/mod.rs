//! Files made byte by byte, without the crate's own writer, and the ways to open them.

#![allow(dead_code)] // each test uses its own part of this

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

use skep_gguf::{Error, Gguf};

pub(crate) const U8: u32 = 0;
pub(crate) const U16: u32 = 2;
pub(crate) const U32: u32 = 4;
pub(crate) const I32: u32 = 5;
pub(crate) const F32: u32 = 6;
pub(crate) const BOOL: u32 = 7;
pub(crate) const STRING: u32 = 8;
pub(crate) const ARRAY: u32 = 9;
pub(crate) const U64: u32 = 10;
pub(crate) const F64: u32 = 12;

/// A string as the format stores it.
pub(crate) fn string(bytes: impl AsRef<[u8]>) -> Vec<u8> {
    let bytes = bytes.as_ref();
    [&(bytes.len() as u64).to_le_bytes()[..], bytes].concat()
}

/// An array value of `count` items that are already encoded.
pub(crate) fn array(ty: u32, count: u64, items: &[u8]) -> Vec<u8> {
    [&ty.to_le_bytes()[..], &count.to_le_bytes(), items].concat()
}

/// An array value of u32.
pub(crate) fn u32s(items: &[u32]) -> Vec<u8> {
    array(U32, items.len() as u64, &items.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<_>>())
}

/// A file in the making.
#[derive(Clone)]
pub(crate) struct Raw {
    pub(crate) entries: Vec<Vec<u8>>,
    pub(crate) tensors: Vec<Vec<u8>>,
    pub(crate) data: Vec<u8>,
    pub(crate) alignment: usize,
}

impl Raw {
    pub(crate) fn new() -> Self {
        Self { entries: Vec::new(), tensors: Vec::new(), data: Vec::new(), alignment: 32 }
    }

    pub(crate) fn kv(mut self, key: impl AsRef<[u8]>, ty: u32, value: impl AsRef<[u8]>) -> Self {
        self.entries.push([&string(key)[..], &ty.to_le_bytes(), value.as_ref()].concat());
        self
    }

    pub(crate) fn tensor(mut self, name: impl AsRef<[u8]>, dims: &[u64], ty: u32, offset: u64) -> Self {
        let mut entry = string(name);
        entry.extend((dims.len() as u32).to_le_bytes());
        entry.extend(dims.iter().flat_map(|dim| dim.to_le_bytes()));
        entry.extend(ty.to_le_bytes());
        entry.extend(offset.to_le_bytes());
        self.tensors.push(entry);
        self
    }

    /// Bytes of the data section: 0, 1, 2…
    pub(crate) fn data(mut self, length: usize) -> Self {
        self.data = (0..length).map(|i| i as u8).collect();
        self
    }

    pub(crate) fn align(mut self, alignment: usize) -> Self {
        self.alignment = alignment;
        self
    }

    pub(crate) fn header(&self) -> Vec<u8> {
        let mut file = b"GGUF\x03\0\0\0".to_vec();
        file.extend((self.tensors.len() as u64).to_le_bytes());
        file.extend((self.entries.len() as u64).to_le_bytes());
        file.extend(self.entries.concat());
        file.extend(self.tensors.concat());
        file
    }

    pub(crate) fn build(&self) -> Vec<u8> {
        let mut file = self.header();
        if !self.data.is_empty() {
            file.resize(file.len().next_multiple_of(self.alignment), 0);
        }
        file.extend(&self.data);
        file
    }
}

/// Two tensors of 32 bytes, one after the other.
pub(crate) fn two_tensors() -> Raw {
    Raw::new().tensor("a", &[8], 0, 0).tensor("b", &[4, 2], 0, 32).data(64)
}

/// A folder that is removed again.
pub(crate) struct Folder(PathBuf);

impl Folder {
    pub(crate) fn new() -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let name = format!("skep-gguf-{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
        let path = std::env::temp_dir().join(name);
        std::fs::create_dir_all(&path).expect("the temporary folder can be made");
        Self(path)
    }

    pub(crate) fn path(&self) -> &Path {
        &self.0
    }

    pub(crate) fn file(&self, name: &str, bytes: &[u8]) -> PathBuf {
        let path = self.0.join(name);
        std::fs::write(&path, bytes).expect("the temporary file can be written");
        path
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        // A folder left behind in the temporary directory harms nobody.
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// The error of a file that must be refused, in memory, read and mapped alike.
pub(crate) fn refused(file: &[u8]) -> Error {
    let error = Gguf::parse(file).expect_err("the file is refused");
    let message = error.to_string();
    #[cfg(feature = "std")]
    {
        let folder = Folder::new();
        let path = folder.file("m.gguf", file);
        let read = skep_gguf::read(&path).expect_err("the file is refused").to_string();
        assert_eq!(read, format!("{}: {message}", path.display()));
        #[cfg(feature = "mmap")]
        assert_eq!(skep_gguf::open(&path).expect_err("the file is refused").to_string(), read);
    }
    assert!(!message.chars().any(char::is_control), "{message:?}");
    assert!(message.len() < 1000, "{} bytes: {message}", message.len());
    error
}

/// A file that must be accepted, in memory, read and mapped alike.
pub(crate) fn accepted(file: &[u8]) -> Gguf<&[u8]> {
    let gguf = Gguf::parse(file).unwrap_or_else(|error| panic!("{error}"));
    #[cfg(feature = "mmap")]
    {
        let folder = Folder::new();
        let mapped = skep_gguf::open(&folder.file("m.gguf", file)).unwrap_or_else(|error| panic!("{error}"));
        assert_eq!(mapped.tensors(), gguf.tensors());
        for tensor in mapped.tensors() {
            assert_eq!(mapped.data(tensor), gguf.data(tensor));
        }
        // As text, since a NaN differs from itself.
        assert_eq!(format!("{:?}", mapped.metadata().collect::<Vec<_>>()), {
            format!("{:?}", gguf.metadata().collect::<Vec<_>>())
        });
    }
    gguf
}

/// Uses everything that a parsed file offers.
pub(crate) fn walk<B: AsRef<[u8]>>(gguf: &Gguf<B>) -> usize {
    let mut sum = gguf.file_bytes() as usize;
    for (key, value) in gguf.metadata() {
        assert!(gguf.get(key).is_some());
        sum += format!("{value} {value:?}").len();
        sum += usize::from(gguf.u32(key).is_ok()) + usize::from(gguf.f32(key).is_ok());
        sum += usize::from(gguf.str(key).is_ok()) + usize::from(gguf.per_layer_usize(key).is_ok());
        if let Ok(Some(array)) = gguf.array(key) {
            assert_eq!(array.iter().count(), array.len());
            sum += array.strs().map_or(0, |items| items.map(|item| item.to_str_lossy().len()).sum());
            sum += array.i32s().map_or(0, Iterator::count) + array.f32s().map_or(0, Iterator::count);
        }
    }
    for tensor in gguf.tensors() {
        assert_eq!(gguf.tensor(tensor.name()), Some(tensor));
        assert_eq!(gguf.data(tensor).len() as u64, tensor.n_bytes());
        sum += gguf.data(tensor).iter().map(|&byte| usize::from(byte)).sum::<usize>();
    }
    sum
}

use alloc::boxed::Box;
use alloc::string::String;
use alloc::vec::Vec;
use core::fmt;

use crate::tensor::KnownTypes;
use crate::text::Escaped;

/// A result whose error is an [`Error`].
pub type Result<T, E = Error> = core::result::Result<T, E>;

/// What is wrong with a file, and where.
///
/// The message names the file (when it is known), the key or tensor, the fault and the byte offset; text that comes
/// from the file is escaped and shortened. The parts of it are also available one by one.
pub struct Error(Box<Inner>);

struct Inner {
    kind: ErrorKind,
    subject: Option<Subject>,
    offset: Option<u64>,
    file: Option<String>,
}

enum Subject {
    Key(String),
    /// A key that cannot be named: its position among the keys, from 0.
    KeyNumber(u64),
    Tensor(String),
    /// A tensor that cannot be named: its position among the tensors, from 0.
    TensorNumber(u64),
}

impl Error {
    /// What is wrong.
    pub fn kind(&self) -> &ErrorKind {
        &self.0.kind
    }

    /// Byte offset in the file of the datum that is wrong, when the fault has one.
    pub fn offset(&self) -> Option<u64> {
        self.0.offset
    }

    /// The metadata key concerned, as the file spells it.
    pub fn key(&self) -> Option<&str> {
        match &self.0.subject {
            Some(Subject::Key(name)) => Some(name),
            _ => None,
        }
    }

    /// The tensor concerned, as the file spells it.
    pub fn tensor(&self) -> Option<&str> {
        match &self.0.subject {
            Some(Subject::Tensor(name)) => Some(name),
            _ => None,
        }
    }

    /// The file concerned: its path, or its number among the parts that were given.
    pub fn file(&self) -> Option<&str> {
        self.0.file.as_deref()
    }

    #[cfg(feature = "std")]
    pub(crate) fn into_kind(self) -> ErrorKind {
        self.0.kind
    }

    pub(crate) fn at(mut self, offset: u64) -> Self {
        self.0.offset.get_or_insert(offset);
        self
    }

    pub(crate) fn in_key(self, key: &str) -> Self {
        self.about(Subject::Key(key.into()))
    }

    pub(crate) fn in_key_number(self, number: u64) -> Self {
        self.about(Subject::KeyNumber(number))
    }

    pub(crate) fn in_tensor(self, name: &str) -> Self {
        self.about(Subject::Tensor(name.into()))
    }

    pub(crate) fn in_tensor_number(self, number: u64) -> Self {
        self.about(Subject::TensorNumber(number))
    }

    pub(crate) fn in_file(mut self, file: &str) -> Self {
        self.0.file.get_or_insert_with(|| file.into());
        self
    }

    /// Says at which index of an array a number does not fit.
    pub(crate) fn in_item(mut self, index: usize) -> Self {
        if let ErrorKind::OutOfRange { value, .. } = &mut self.0.kind {
            *value = alloc::format!("{value} at index {index}");
        }
        self
    }

    fn about(mut self, subject: Subject) -> Self {
        self.0.subject.get_or_insert(subject);
        self
    }
}

impl From<ErrorKind> for Error {
    fn from(kind: ErrorKind) -> Self {
        Self(Box::new(Inner { kind, subject: None, offset: None, file: None }))
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(file) = &self.0.file {
            write!(f, "{}: ", Escaped::text(file))?;
        }
        match &self.0.subject {
            Some(Subject::Key(name)) => write!(f, "key `{}`: ", Escaped::text(name))?,
            Some(Subject::KeyNumber(n)) => write!(f, "key number {n}: ")?,
            Some(Subject::Tensor(name)) => write!(f, "tensor `{}`: ", Escaped::text(name))?,
            Some(Subject::TensorNumber(n)) => write!(f, "tensor number {n}: ")?,
            None => {}
        }
        write!(f, "{}", self.0.kind)?;
        match self.0.offset {
            Some(offset) => write!(f, " (at byte {offset})"),
            None => Ok(()),
        }
    }
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Error({self})")
    }
}

impl core::error::Error for Error {
    fn source(&self) -> Option<&(dyn core::error::Error + 'static)> {
        core::error::Error::source(&self.0.kind)
    }
}

/// The ways in which a file, a request for a value, or a file to be written can be wrong.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ErrorKind {
    /// The file has no bytes.
    #[error("the file is empty")]
    Empty,
    /// The first four bytes are not `GGUF`.
    #[error("not a gguf file: it starts with `{}`, not with `GGUF`", magic.escape_ascii())]
    NotGguf {
        /// The bytes found there, at most four.
        magic: Vec<u8>,
    },
    /// A Git LFS pointer stands in for the file.
    #[error("not a gguf file but a git-lfs pointer: the content was never downloaded")]
    GitLfsPointer,
    /// An HTML page was saved under the name of the file.
    #[error("not a gguf file but an html page, as a failed download leaves it")]
    HtmlPage,
    /// The file was written for big-endian machines.
    #[error("a big-endian file: only little-endian files are supported")]
    BigEndian,
    /// The format version is neither 2 nor 3.
    #[error("unsupported gguf version {0}: versions 2 and 3 are supported")]
    Version(u32),
    /// The file ends before the header does.
    #[error("file truncated in header: {what} needs {needed} bytes, {available} are left")]
    Truncated {
        /// The datum that does not fit.
        what: &'static str,
        /// Bytes it needs.
        needed: u64,
        /// Bytes that are left in the file.
        available: u64,
    },
    /// A count in the header is larger than the rest of the file can hold.
    #[error("{count} {what} are declared, but the remaining bytes hold at most {max}")]
    Count {
        /// What is counted.
        what: &'static str,
        /// The count in the file.
        count: u64,
        /// The most that could fit.
        max: u64,
    },
    /// A key or tensor name has no characters.
    #[error("the name is empty")]
    EmptyName,
    /// A key or tensor name is longer than the format allows.
    #[error("the name has {length} bytes: at most {max} are allowed")]
    LongName {
        /// Its length in bytes.
        length: u64,
        /// The limit in bytes.
        max: u64,
    },
    /// A key or tensor name is not UTF-8.
    #[error("the name is not valid utf-8: `{}`", Escaped::bytes(name))]
    NameNotUtf8 {
        /// The bytes of the name.
        name: Vec<u8>,
    },
    /// A key or tensor name occurs twice.
    #[error("occurs more than once")]
    Duplicate,
    /// The type of a metadata value is not one of the format's.
    #[error("unknown value type {0}")]
    ValueType(u32),
    /// Arrays are nested deeper than [`MAX_NESTING`](crate::MAX_NESTING).
    #[error("arrays nested more than {} deep", crate::MAX_NESTING)]
    Nesting,
    /// A truth value is neither 0 nor 1.
    #[error("a bool is stored as {0}: it must be 0 or 1")]
    Bool(u8),
    /// The alignment of the tensor data is unusable.
    #[error("the alignment must be a u32 power of two, found {found}")]
    Alignment {
        /// Type and value found.
        found: String,
    },
    /// The number of dimensions is not from 1 to 4.
    #[error("{0} dimensions: a tensor has 1 to 4")]
    Dimensions(u64),
    /// The number of elements or bytes is larger than 2⁶³ - 1.
    #[error("the size of shape {shape:?} is too large to be counted")]
    TensorSize {
        /// The shape, innermost dimension first.
        shape: Vec<u64>,
    },
    /// The tensor type is not known to this crate.
    #[error("unknown tensor type {id}: the known types are {KnownTypes}")]
    TensorType {
        /// The number in the file.
        id: u32,
    },
    /// The tensor type existed once and was removed from the format.
    #[error("tensor type {id} ({name}) was removed from the format: the known types are {KnownTypes}")]
    RemovedTensorType {
        /// The number in the file.
        id: u32,
        /// What it stood for.
        name: &'static str,
    },
    /// Rows are not a whole number of quantisation blocks.
    #[error("rows of {row} elements are not a whole number of {ty} blocks of {block}")]
    PartialBlock {
        /// Elements in a row.
        row: u64,
        /// Name of the tensor type.
        ty: &'static str,
        /// Elements in a block.
        block: u64,
    },
    /// A tensor's data does not start at a multiple of the alignment.
    #[error("data offset {offset} is not a multiple of the alignment {alignment}")]
    Misaligned {
        /// Offset in the data section.
        offset: u64,
        /// The alignment of the file.
        alignment: u64,
    },
    /// A tensor's data is not wholly inside the file.
    #[error(
        "{needed} bytes of data at offset {offset} of a data section of {available} bytes lie outside the file"
    )]
    OutOfFile {
        /// Offset in the data section.
        offset: u64,
        /// Bytes that the tensor needs.
        needed: u64,
        /// Bytes of the data section.
        available: u64,
    },
    /// Two tensors share bytes.
    #[error("its data overlaps that of tensor `{}`", Escaped::text(other))]
    Overlap {
        /// The tensor that comes first in the data section.
        other: String,
    },
    /// A key that is needed is not in the file.
    #[error("missing")]
    MissingKey,
    /// A value has another type than the one asked for.
    #[error("expected {expected}, found {found}")]
    WrongType {
        /// What was asked for.
        expected: &'static str,
        /// What the file has.
        found: String,
    },
    /// A number does not fit the type asked for.
    #[error("{value} does not fit {expected}")]
    OutOfRange {
        /// What was asked for.
        expected: &'static str,
        /// What the file has.
        value: String,
    },
    /// A string that is used as text is not UTF-8.
    #[error("not valid utf-8: {}", Escaped::bytes(value))]
    NotUtf8 {
        /// The bytes of the string.
        value: Vec<u8>,
    },
    /// No parts were given to join.
    #[error("no parts to join")]
    NoParts,
    /// Parts of a split file are missing.
    #[error("a part of a file split in {count}: {} missing", Numbers(missing))]
    MissingParts {
        /// Parts that the set has.
        count: u64,
        /// The missing ones, counted from 1 as in file names.
        missing: Vec<u64>,
    },
    /// A file given as a part of a set is not one.
    #[error("not a part of a split file: it has no `{key}`")]
    NotSplit {
        /// The key that a part must have.
        key: &'static str,
    },
    /// A part's number is outside the set.
    #[error("part number {number} (counted from 0) of a set of {count}")]
    PartNumber {
        /// The number, counted from 0 as in the metadata.
        number: u64,
        /// Parts that the set has.
        count: u64,
    },
    /// The same part was given twice.
    #[error("part {number} was given twice: also as {other}")]
    DuplicatePart {
        /// The number, counted from 1 as in file names.
        number: u64,
        /// The other file.
        other: String,
    },
    /// Parts of different files were given.
    #[error("parts of different models: `{}` differs from that in {other}", Escaped::text(key))]
    MixedParts {
        /// The key on which they disagree.
        key: String,
        /// The file it was compared with.
        other: String,
    },
    /// The parts together do not hold as many tensors as the set has.
    #[error("the set has {declared} tensors, but its parts hold {found}")]
    TensorTotal {
        /// Tensors that the set has.
        declared: u64,
        /// Tensors found.
        found: u64,
    },
    /// A part's name says something else than its content.
    #[error("named as part {named}, but the content is part {number}")]
    PartName {
        /// The number in the name, counted from 1.
        named: u64,
        /// The number in the metadata, counted from 1.
        number: u64,
    },
    /// A part's name does not lead to the other parts.
    #[error(
        "part {number} of a file split in {count}: its name does not end in `-{number:05}-of-{count:05}.gguf`, so the other parts cannot be found"
    )]
    SplitName {
        /// The number, counted from 1.
        number: u64,
        /// Parts that the set has.
        count: u64,
    },
    /// Files of a set do not exist.
    #[error("files of the set are missing: {}", files.join(", "))]
    MissingFiles {
        /// Their paths.
        files: Vec<String>,
    },
    /// A folder does not hold exactly one model.
    #[error("the folder holds {} gguf files or sets: {}", found.len(), found.join(", "))]
    Folder {
        /// The names found.
        found: Vec<String>,
    },
    /// A value to be written has more bytes than its type says.
    #[error("the encoded value is longer than its type says")]
    Encoding,
    /// A tensor was given more or fewer bytes than it has.
    #[error("{expected} bytes of data are needed, {given} were given")]
    TensorData {
        /// Bytes that the tensor has.
        expected: u64,
        /// Bytes given; when there were too many, at the point where that was noticed.
        given: u64,
    },
    /// The path leads to no file.
    #[cfg(feature = "std")]
    #[error("file not found")]
    NotFound,
    /// The path leads to something that is neither a regular file nor a folder.
    #[cfg(feature = "std")]
    #[error("not a regular file")]
    NotAFile,
    /// The operating system or the destination refused.
    #[cfg(feature = "std")]
    #[error("{0}")]
    Io(#[source] std::io::Error),
}

#[cfg(feature = "std")]
impl From<std::io::Error> for Error {
    fn from(error: std::io::Error) -> Self {
        ErrorKind::Io(error).into()
    }
}

/// Shows numbers as a short list.
struct Numbers<'a>(&'a [u64]);

impl fmt::Display for Numbers<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const SHOWN: usize = 16;
        f.write_str(if self.0.len() == 1 { "part " } else { "parts " })?;
        for (i, number) in self.0.iter().take(SHOWN).enumerate() {
            write!(f, "{}{number}", if i == 0 { "" } else { ", " })?;
        }
        if self.0.len() > SHOWN {
            write!(f, " and {} more", self.0.len() - SHOWN)?;
        }
        f.write_str(if self.0.len() == 1 { " is" } else { " are" })
    }
}

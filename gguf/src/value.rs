use alloc::string::{String, ToString};
use core::{fmt, str};

use crate::array::Array;
use crate::cursor::Cursor;
use crate::error::{Error, ErrorKind, Result};
use crate::text::Escaped;

/// Types of metadata values, with the numbers they have in a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ValueType {
    /// Unsigned, 8 bits.
    U8 = 0,
    /// Signed, 8 bits.
    I8 = 1,
    /// Unsigned, 16 bits.
    U16 = 2,
    /// Signed, 16 bits.
    I16 = 3,
    /// Unsigned, 32 bits.
    U32 = 4,
    /// Signed, 32 bits.
    I32 = 5,
    /// IEEE 754, 32 bits.
    F32 = 6,
    /// One byte, 0 or 1.
    Bool = 7,
    /// A length and as many bytes, meant to be UTF-8.
    String = 8,
    /// A type, a count and as many values.
    Array = 9,
    /// Unsigned, 64 bits.
    U64 = 10,
    /// Signed, 64 bits.
    I64 = 11,
    /// IEEE 754, 64 bits.
    F64 = 12,
}

impl ValueType {
    /// The type with this number in a file, if there is one.
    pub const fn from_id(id: u32) -> Option<Self> {
        Some(match id {
            0 => Self::U8,
            1 => Self::I8,
            2 => Self::U16,
            3 => Self::I16,
            4 => Self::U32,
            5 => Self::I32,
            6 => Self::F32,
            7 => Self::Bool,
            8 => Self::String,
            9 => Self::Array,
            10 => Self::U64,
            11 => Self::I64,
            12 => Self::F64,
            _ => return None,
        })
    }

    /// The number of the type in a file.
    pub const fn id(self) -> u32 {
        self as u32
    }

    /// Name of the type in messages: `u32`, `string`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::U8 => "u8",
            Self::I8 => "i8",
            Self::U16 => "u16",
            Self::I16 => "i16",
            Self::U32 => "u32",
            Self::I32 => "i32",
            Self::F32 => "f32",
            Self::Bool => "bool",
            Self::String => "string",
            Self::Array => "array",
            Self::U64 => "u64",
            Self::I64 => "i64",
            Self::F64 => "f64",
        }
    }

    /// Bytes of a value, when they are the same for all values of the type.
    pub(crate) const fn fixed_size(self) -> Option<u64> {
        match self {
            Self::U8 | Self::I8 | Self::Bool => Some(1),
            Self::U16 | Self::I16 => Some(2),
            Self::U32 | Self::I32 | Self::F32 => Some(4),
            Self::U64 | Self::I64 | Self::F64 => Some(8),
            Self::String | Self::Array => None,
        }
    }

    /// Bytes of the smallest value: an empty string is its length, an empty array its type and count.
    pub(crate) const fn least_size(self) -> u64 {
        match (self, self.fixed_size()) {
            (_, Some(size)) => size,
            (Self::Array, None) => 12,
            (_, None) => 8,
        }
    }

    pub(crate) const fn is_integer(self) -> bool {
        !matches!(self, Self::F32 | Self::F64 | Self::Bool | Self::String | Self::Array)
    }

    pub(crate) const fn is_float(self) -> bool {
        matches!(self, Self::F32 | Self::F64)
    }
}

impl fmt::Display for ValueType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A metadata value, borrowed from the bytes of the file.
///
/// Equality compares type and value: `U32(1)` and `U64(1)` differ, and arrays are compared byte by byte.
#[derive(Debug, Clone, Copy, PartialEq)]
#[non_exhaustive]
pub enum Value<'a> {
    /// Unsigned, 8 bits.
    U8(u8),
    /// Signed, 8 bits.
    I8(i8),
    /// Unsigned, 16 bits.
    U16(u16),
    /// Signed, 16 bits.
    I16(i16),
    /// Unsigned, 32 bits.
    U32(u32),
    /// Signed, 32 bits.
    I32(i32),
    /// 32-bit float.
    F32(f32),
    /// Truth value.
    Bool(bool),
    /// String of any bytes.
    String(Str<'a>),
    /// Array of values of one type.
    Array(Array<'a>),
    /// Unsigned, 64 bits.
    U64(u64),
    /// Signed, 64 bits.
    I64(i64),
    /// 64-bit float.
    F64(f64),
}

impl<'a> Value<'a> {
    /// The type of the value.
    pub fn ty(&self) -> ValueType {
        match self {
            Self::U8(_) => ValueType::U8,
            Self::I8(_) => ValueType::I8,
            Self::U16(_) => ValueType::U16,
            Self::I16(_) => ValueType::I16,
            Self::U32(_) => ValueType::U32,
            Self::I32(_) => ValueType::I32,
            Self::F32(_) => ValueType::F32,
            Self::Bool(_) => ValueType::Bool,
            Self::String(_) => ValueType::String,
            Self::Array(_) => ValueType::Array,
            Self::U64(_) => ValueType::U64,
            Self::I64(_) => ValueType::I64,
            Self::F64(_) => ValueType::F64,
        }
    }

    /// The value of an integer of any width.
    pub fn integer(&self) -> Option<i128> {
        Some(match *self {
            Self::U8(v) => v.into(),
            Self::I8(v) => v.into(),
            Self::U16(v) => v.into(),
            Self::I16(v) => v.into(),
            Self::U32(v) => v.into(),
            Self::I32(v) => v.into(),
            Self::U64(v) => v.into(),
            Self::I64(v) => v.into(),
            _ => return None,
        })
    }

    /// The value of a float of either width.
    pub fn float(&self) -> Option<f64> {
        match *self {
            Self::F32(v) => Some(v.into()),
            Self::F64(v) => Some(v),
            _ => None,
        }
    }

    /// Reads a value of type `ty`; `key` and `nesting` (arrays around it) are for messages and limits.
    pub(crate) fn read(cursor: &mut Cursor<'a>, ty: ValueType, key: &'a str, nesting: usize) -> Result<Self> {
        let at = cursor.position() as u64;
        Ok(match ty {
            ValueType::U8 => Self::U8(u8::from_le_bytes(cursor.array("a u8")?)),
            ValueType::I8 => Self::I8(i8::from_le_bytes(cursor.array("an i8")?)),
            ValueType::U16 => Self::U16(u16::from_le_bytes(cursor.array("a u16")?)),
            ValueType::I16 => Self::I16(i16::from_le_bytes(cursor.array("an i16")?)),
            ValueType::U32 => Self::U32(u32::from_le_bytes(cursor.array("a u32")?)),
            ValueType::I32 => Self::I32(i32::from_le_bytes(cursor.array("an i32")?)),
            ValueType::F32 => Self::F32(f32::from_le_bytes(cursor.array("an f32")?)),
            ValueType::Bool => match cursor.array("a bool")? {
                [0] => Self::Bool(false),
                [1] => Self::Bool(true),
                [other] => return Err(Error::from(ErrorKind::Bool(other)).at(at)),
            },
            ValueType::String => Self::String(Str(cursor.string("a string")?)),
            ValueType::Array => Self::Array(Array::read(cursor, key, nesting)?),
            ValueType::U64 => Self::U64(u64::from_le_bytes(cursor.array("a u64")?)),
            ValueType::I64 => Self::I64(i64::from_le_bytes(cursor.array("an i64")?)),
            ValueType::F64 => Self::F64(f64::from_le_bytes(cursor.array("an f64")?)),
        })
    }

    pub(crate) fn wrong_type(&self, expected: &'static str) -> Error {
        let found = match self {
            Self::Array(array) => array.describe(),
            _ => self.ty().to_string(),
        };
        ErrorKind::WrongType { expected, found }.into()
    }

    /// The integer as a `T`, whatever its width in the file.
    pub(crate) fn to_integer<T: TryFrom<i128>>(self, expected: &'static str) -> Result<T> {
        let value = self.integer().ok_or_else(|| self.wrong_type(expected))?;
        T::try_from(value).map_err(|_| ErrorKind::OutOfRange { expected, value: value.to_string() }.into())
    }

    pub(crate) fn to_f32(self) -> Result<f32> {
        let value = self.float().ok_or_else(|| self.wrong_type("f32"))?;
        let narrow = value as f32;
        if narrow.is_infinite() && value.is_finite() {
            return Err(ErrorKind::OutOfRange { expected: "f32", value: value.to_string() }.into());
        }
        Ok(narrow)
    }

    pub(crate) fn to_bool(self) -> Result<bool> {
        match self {
            Self::Bool(value) => Ok(value),
            _ => Err(self.wrong_type("bool")),
        }
    }
}

/// Text form: strings quoted and escaped, arrays cut after a few items.
impl fmt::Display for Value<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::U8(v) => v.fmt(f),
            Self::I8(v) => v.fmt(f),
            Self::U16(v) => v.fmt(f),
            Self::I16(v) => v.fmt(f),
            Self::U32(v) => v.fmt(f),
            Self::I32(v) => v.fmt(f),
            Self::F32(v) => fmt::Debug::fmt(v, f),
            Self::Bool(v) => v.fmt(f),
            Self::String(v) => write!(f, "\"{}\"", Escaped::bytes(v.0)),
            Self::Array(v) => v.fmt(f),
            Self::U64(v) => v.fmt(f),
            Self::I64(v) => v.fmt(f),
            Self::F64(v) => fmt::Debug::fmt(v, f),
        }
    }
}

/// A string as it is in the file: any bytes, meant to be UTF-8.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Str<'a>(&'a [u8]);

impl<'a> Str<'a> {
    /// A string of these bytes.
    pub const fn new(bytes: &'a [u8]) -> Self {
        Self(bytes)
    }

    /// The bytes.
    pub const fn as_bytes(self) -> &'a [u8] {
        self.0
    }

    /// The text, or an error of kind [`ErrorKind::NotUtf8`] that shows the bytes.
    pub fn as_str(self) -> Result<&'a str> {
        str::from_utf8(self.0).map_err(|_| ErrorKind::NotUtf8 { value: self.0.into() }.into())
    }

    /// The text, with U+FFFD in place of what is not UTF-8.
    pub fn to_str_lossy(self) -> alloc::borrow::Cow<'a, str> {
        String::from_utf8_lossy(self.0)
    }
}

impl<'a> From<&'a str> for Str<'a> {
    fn from(text: &'a str) -> Self {
        Self(text.as_bytes())
    }
}

impl PartialEq<str> for Str<'_> {
    fn eq(&self, other: &str) -> bool {
        self.0 == other.as_bytes()
    }
}

impl PartialEq<&str> for Str<'_> {
    fn eq(&self, other: &&str) -> bool {
        self.0 == other.as_bytes()
    }
}

/// Shows the text with control characters and bytes that are not UTF-8 escaped.
impl fmt::Display for Str<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        Escaped::whole(self.0).fmt(f)
    }
}

impl fmt::Debug for Str<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "\"{self}\"")
    }
}

use alloc::string::{String, ToString};
use core::{fmt, str};

use crate::cursor::Cursor;
use crate::error::{Error, ErrorKind, Result};
use crate::text::Escaped;

/// Deepest nesting of arrays that is read: an array of arrays of arrays of arrays of numbers.
///
/// Files in use nest at most twice; the limit keeps a hostile file from exhausting the stack.
pub const MAX_NESTING: usize = 4;

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

    const fn is_integer(self) -> bool {
        !matches!(self, Self::F32 | Self::F64 | Self::Bool | Self::String | Self::Array)
    }

    const fn is_float(self) -> bool {
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

/// An array of values of one type, borrowed from the bytes of the file.
///
/// Nothing is copied: the items are decoded while iterating. Errors name the key that the array belongs to.
#[derive(Clone, Copy)]
pub struct Array<'a> {
    key: &'a str,
    ty: ValueType,
    len: usize,
    nesting: usize,
    bytes: &'a [u8],
}

impl<'a> Array<'a> {
    /// The type of the items.
    pub fn ty(&self) -> ValueType {
        self.ty
    }

    /// Number of items.
    pub fn len(&self) -> usize {
        self.len
    }

    /// True when there are no items.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The items as the file stores them: little-endian numbers side by side, strings each after its u64 length.
    pub fn as_bytes(&self) -> &'a [u8] {
        self.bytes
    }

    /// The items in order.
    pub fn iter(&self) -> Items<'a> {
        Items { array: *self, cursor: Cursor::new(self.bytes), left: self.len }
    }

    /// The items of an array of strings.
    ///
    /// # Errors
    /// The array is of another type.
    pub fn strs(&self) -> Result<impl ExactSizeIterator<Item = Str<'a>> + Clone + use<'a>> {
        self.expect(self.ty == ValueType::String, "array of strings")?;
        Ok(self.typed(|item| match item {
            Value::String(text) => Some(text),
            _ => None,
        }))
    }

    /// The items of an array of truth values.
    ///
    /// # Errors
    /// The array is of another type.
    pub fn bools(&self) -> Result<impl ExactSizeIterator<Item = bool> + Clone + use<'a>> {
        self.expect(self.ty == ValueType::Bool, "array of bools")?;
        Ok(self.typed(|item| item.to_bool().ok()))
    }

    /// The items of an array of floats of either width.
    ///
    /// # Errors
    /// The array is of another type, or an item is beyond the range of f32.
    pub fn f32s(&self) -> Result<impl ExactSizeIterator<Item = f32> + Clone + use<'a>> {
        self.expect(self.ty.is_float(), "array of f32")?;
        self.each(|item| item.to_f32().map(drop))?;
        Ok(self.typed(|item| item.to_f32().ok()))
    }

    /// The items of an array of integers of any width, as u32.
    ///
    /// # Errors
    /// The array is of another type, or an item does not fit.
    pub fn u32s(&self) -> Result<impl ExactSizeIterator<Item = u32> + Clone + use<'a>> {
        self.integers("array of u32", "u32")
    }

    /// The items of an array of integers of any width, as i32.
    ///
    /// # Errors
    /// The array is of another type, or an item does not fit.
    pub fn i32s(&self) -> Result<impl ExactSizeIterator<Item = i32> + Clone + use<'a>> {
        self.integers("array of i32", "i32")
    }

    /// The items of an array of integers of any width, as u64.
    ///
    /// # Errors
    /// The array is of another type, or an item does not fit.
    pub fn u64s(&self) -> Result<impl ExactSizeIterator<Item = u64> + Clone + use<'a>> {
        self.integers("array of u64", "u64")
    }

    /// The items of an array of integers of any width, as usize.
    ///
    /// # Errors
    /// The array is of another type, or an item does not fit.
    pub fn usizes(&self) -> Result<impl ExactSizeIterator<Item = usize> + Clone + use<'a>> {
        self.integers("array of usize", "usize")
    }

    /// Reads type, count and items; every item is checked.
    fn read(cursor: &mut Cursor<'a>, key: &'a str, nesting: usize) -> Result<Self> {
        let at = cursor.position() as u64;
        if nesting == MAX_NESTING {
            return Err(Error::from(ErrorKind::Nesting).at(at));
        }
        let id = cursor.u32("the item type of an array")?;
        let ty = ValueType::from_id(id).ok_or_else(|| Error::from(ErrorKind::ValueType(id)).at(at))?;
        let count = cursor.u64("the length of an array")?;
        let len = cursor.bounded(count, ty.least_size(), "array items").map_err(|e| e.at(at))?;
        let start = cursor.position();
        match (ty, ty.fixed_size()) {
            (ValueType::String, _) => {
                for _ in 0..len {
                    cursor.string("a string in an array")?;
                }
            }
            // The product cannot overflow: `bounded` found that so many bytes are left.
            (ty, Some(size)) if ty != ValueType::Bool => {
                cursor.take(len as u64 * size, "an array")?;
            }
            _ => {
                for _ in 0..len {
                    Value::read(cursor, ty, key, nesting + 1)?;
                }
            }
        }
        Ok(Self { key, ty, len, nesting, bytes: cursor.since(start) })
    }

    fn describe(&self) -> String {
        alloc::format!("array of {} {}", self.len, self.ty)
    }

    fn expect(&self, right: bool, expected: &'static str) -> Result<()> {
        if right {
            return Ok(());
        }
        Err(Error::from(ErrorKind::WrongType { expected, found: self.describe() }).in_key(self.key))
    }

    /// Checks every item, so that the typed iterator over them cannot fail.
    fn each(&self, check: impl Fn(Value<'a>) -> Result<()>) -> Result<()> {
        self.iter()
            .enumerate()
            .try_for_each(|(index, item)| check(item).map_err(|error| error.in_item(index).in_key(self.key)))
    }

    fn integers<T: TryFrom<i128>>(
        &self,
        expected: &'static str,
        item_type: &'static str,
    ) -> Result<Typed<'a, T>> {
        self.expect(self.ty.is_integer(), expected)?;
        self.each(|item| item.to_integer::<T>(item_type).map(drop))?;
        Ok(self.typed(|item| item.integer().and_then(|value| T::try_from(value).ok())))
    }

    fn typed<T>(&self, convert: fn(Value<'a>) -> Option<T>) -> Typed<'a, T> {
        Typed { items: self.iter(), convert }
    }
}

impl PartialEq for Array<'_> {
    fn eq(&self, other: &Self) -> bool {
        self.ty == other.ty && self.len == other.len && self.bytes == other.bytes
    }
}

impl<'a> IntoIterator for Array<'a> {
    type Item = Value<'a>;
    type IntoIter = Items<'a>;

    fn into_iter(self) -> Items<'a> {
        self.iter()
    }
}

/// The first items, and how many there are.
impl fmt::Display for Array<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const SHOWN: usize = 8;
        f.write_str("[")?;
        for (index, item) in self.iter().take(SHOWN).enumerate() {
            write!(f, "{}{item}", if index == 0 { "" } else { ", " })?;
        }
        if self.len > SHOWN {
            write!(f, ", … {} in all", self.len)?;
        }
        f.write_str("]")
    }
}

impl fmt::Debug for Array<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{self}", self.ty)
    }
}

/// Iterates over the items of an [`Array`].
#[derive(Clone)]
pub struct Items<'a> {
    array: Array<'a>,
    cursor: Cursor<'a>,
    left: usize,
}

impl<'a> Iterator for Items<'a> {
    type Item = Value<'a>;

    fn next(&mut self) -> Option<Value<'a>> {
        self.left = self.left.checked_sub(1)?;
        // All items were read once, when the array was: this cannot fail.
        Value::read(&mut self.cursor, self.array.ty, self.array.key, self.array.nesting + 1).ok()
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        (self.left, Some(self.left))
    }
}

impl ExactSizeIterator for Items<'_> {}

impl fmt::Debug for Items<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Items({} left)", self.left)
    }
}

/// Items that were checked to be of one type.
struct Typed<'a, T> {
    items: Items<'a>,
    convert: fn(Value<'a>) -> Option<T>,
}

impl<T> Clone for Typed<'_, T> {
    fn clone(&self) -> Self {
        Self { items: self.items.clone(), convert: self.convert }
    }
}

impl<T> Iterator for Typed<'_, T> {
    type Item = T;

    fn next(&mut self) -> Option<T> {
        self.items.next().and_then(self.convert)
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        self.items.size_hint()
    }
}

impl<T> ExactSizeIterator for Typed<'_, T> {}

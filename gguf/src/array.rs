use alloc::string::String;
use core::fmt;

use crate::cursor::Cursor;
use crate::error::{Error, ErrorKind, Result};
use crate::value::{Str, Value, ValueType};

/// Deepest nesting of arrays that is read: an array of arrays of arrays of arrays of numbers.
///
/// Files in use nest at most twice; the limit keeps a hostile file from exhausting the stack.
pub const MAX_NESTING: usize = 4;

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
        Ok(Strs { rest: self.bytes, left: self.len })
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
    pub(crate) fn read(cursor: &mut Cursor<'a>, key: &'a str, nesting: usize) -> Result<Self> {
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

    pub(crate) fn describe(&self) -> String {
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

/// Strings side by side, each after its length; they were checked when the array was read.
#[derive(Clone)]
struct Strs<'a> {
    rest: &'a [u8],
    left: usize,
}

impl<'a> Iterator for Strs<'a> {
    type Item = Str<'a>;

    fn next(&mut self) -> Option<Str<'a>> {
        self.left = self.left.checked_sub(1)?;
        let (length, rest) = self.rest.split_first_chunk()?;
        let (text, rest) = rest.split_at_checked(usize::try_from(u64::from_le_bytes(*length)).ok()?)?;
        self.rest = rest;
        Some(Str::new(text))
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        (self.left, Some(self.left))
    }
}

impl ExactSizeIterator for Strs<'_> {}

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

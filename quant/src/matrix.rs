//! Weight matrices in GGUF blocks.

use core::ops::Range;

use crate::{Error, ErrorKind, Result, Type};

/// A borrowed weight matrix of `rows` x `cols` elements, row major, each row whole blocks of one [`Type`].
///
/// The shape is checked once, here; everything downstream relies on it.
#[derive(Clone, Copy, Debug)]
pub struct Matrix<'a> {
    ty: Type,
    rows: usize,
    cols: usize,
    row_bytes: usize,
    data: &'a [u8],
}

impl<'a> Matrix<'a> {
    /// A matrix over `data`, which holds exactly `rows * ty.row_bytes(cols)` bytes at any alignment.
    ///
    /// # Errors
    /// [`ErrorKind::PartialBlock`], [`ErrorKind::TooLarge`] or [`ErrorKind::DataLength`].
    pub fn new(ty: Type, rows: usize, cols: usize, data: &'a [u8]) -> Result<Self> {
        if !cols.is_multiple_of(ty.block_len()) {
            return Err(Error::new(ErrorKind::PartialBlock { ty, cols }));
        }
        let too_large = Error::new(ErrorKind::TooLarge { ty, rows, cols });
        let Some(row_bytes) = ty.row_bytes(cols) else { return Err(too_large) };
        let Some(expected) = row_bytes.checked_mul(rows) else { return Err(too_large) };
        if data.len() != expected {
            return Err(Error::new(ErrorKind::DataLength { ty, expected, got: data.len() }));
        }
        Ok(Self { ty, rows, cols, row_bytes, data })
    }

    /// The element type.
    pub const fn ty(&self) -> Type {
        self.ty
    }

    /// Number of rows (outputs of a product).
    pub const fn rows(&self) -> usize {
        self.rows
    }

    /// Number of columns (inputs of a product).
    pub const fn cols(&self) -> usize {
        self.cols
    }

    /// Bytes of one row.
    pub const fn row_bytes(&self) -> usize {
        self.row_bytes
    }

    /// All bytes.
    pub const fn data(&self) -> &'a [u8] {
        self.data
    }

    /// The bytes of row `i`.
    ///
    /// # Panics
    /// When `i` is not below `rows`.
    #[inline]
    pub fn row(&self, i: usize) -> &'a [u8] {
        assert!(i < self.rows, "row {i} of a matrix with {} rows", self.rows);
        &self.data[i * self.row_bytes..][..self.row_bytes]
    }

    /// The matrix of the rows in `range`.
    ///
    /// # Panics
    /// When the range does not lie within `rows`.
    #[inline]
    pub fn rows_range(&self, range: Range<usize>) -> Self {
        assert!(
            range.start <= range.end && range.end <= self.rows,
            "rows {range:?} of a matrix with {} rows",
            self.rows
        );
        let data = &self.data[range.start * self.row_bytes..range.end * self.row_bytes];
        Self { rows: range.len(), data, ..*self }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shapes_are_checked() {
        let data = [0u8; 144 * 6];
        let m = Matrix::new(Type::Q4_K, 3, 512, &data).unwrap();
        assert_eq!((m.row(2).len(), m.rows_range(1..3).rows()), (288, 2));
        assert_eq!(m.rows_range(1..3).row(1).as_ptr(), m.row(2).as_ptr());
        let kind = |r: Result<Matrix<'_>>| r.unwrap_err().kind().clone();
        assert_eq!(
            kind(Matrix::new(Type::Q4_K, 3, 500, &data)),
            ErrorKind::PartialBlock { ty: Type::Q4_K, cols: 500 }
        );
        assert_eq!(
            kind(Matrix::new(Type::Q4_K, 2, 512, &data)),
            ErrorKind::DataLength { ty: Type::Q4_K, expected: 576, got: 864 }
        );
        assert!(matches!(kind(Matrix::new(Type::F32, usize::MAX, 8, &data)), ErrorKind::TooLarge { .. }));
    }
}

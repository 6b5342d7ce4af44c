use super::layout::{pack, stride};
use crate::Type;
use alloc::vec;
use core::ops::Range;
use skep_hal::Result;
use skep_hal::gpu::{Device, Memory, Stream, View};

/// Weights on a device: a stack of `count` matrices `[rows, cols]`, packed by [`pack`], one row after the other.
#[derive(Debug)]
pub struct Matrix {
    ty: Type,
    rows: usize,
    cols: usize,
    count: usize,
    memory: Memory,
}

impl Matrix {
    /// Room for a stack; its contents are undefined.
    ///
    /// # Errors
    /// What the device says of memory.
    ///
    /// # Panics
    /// If rows of this type cannot have this length.
    pub fn new(device: &Device, ty: Type, rows: usize, cols: usize, count: usize) -> Result<Self> {
        let memory = Memory::new(device, count * rows * stride(ty, cols))?;
        Ok(Self { ty, rows, cols, count, memory })
    }

    /// Packs and uploads a stack from the bytes of a file.
    ///
    /// # Errors
    /// What the device says of memory.
    ///
    /// # Panics
    /// If `bytes` are not those of the stack.
    pub fn upload(
        stream: &Stream,
        ty: Type,
        rows: usize,
        cols: usize,
        count: usize,
        bytes: &[u8],
    ) -> Result<Self> {
        let matrix = Self::new(stream.device(), ty, rows, cols, count)?;
        let mut packed = vec![0_u8; matrix.memory.bytes()];
        pack(ty, cols, bytes, &mut packed);
        matrix.memory.view().upload(stream, &packed)?;
        Ok(matrix)
    }

    /// The element type.
    pub fn ty(&self) -> Type {
        self.ty
    }

    /// Rows of each matrix.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Columns.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// Matrices of the stack.
    pub fn count(&self) -> usize {
        self.count
    }

    /// The packed rows.
    pub fn memory(&self) -> &Memory {
        &self.memory
    }

    /// Bytes on the device.
    pub fn bytes(&self) -> usize {
        self.memory.bytes()
    }

    /// Bytes from one row to the next.
    pub fn stride(&self) -> usize {
        stride(self.ty, self.cols)
    }

    /// One matrix of the stack.
    ///
    /// # Panics
    /// If the stack has no such matrix.
    pub fn one(&self, index: usize) -> MatrixView<'_> {
        assert!(index < self.count, "matrix {index} of a stack of {}", self.count);
        self.view().slice(index * self.rows..(index + 1) * self.rows)
    }

    /// All rows of the stack as one matrix.
    pub fn view(&self) -> MatrixView<'_> {
        MatrixView { ty: self.ty, rows: self.count * self.rows, cols: self.cols, memory: self.memory.view() }
    }
}

/// A packed matrix `[rows, cols]` on a device.
#[derive(Debug, Clone, Copy)]
pub struct MatrixView<'m> {
    ty: Type,
    rows: usize,
    cols: usize,
    memory: View<'m>,
}

impl<'m> MatrixView<'m> {
    /// `rows` rows of `cols` weights in `memory`.
    ///
    /// # Panics
    /// If the memory is too short.
    pub fn new(ty: Type, rows: usize, cols: usize, memory: View<'m>) -> Self {
        let bytes = rows * stride(ty, cols);
        Self { ty, rows, cols, memory: memory.slice(0..bytes) }
    }

    /// Some of its rows.
    ///
    /// # Panics
    /// If it has not all of them.
    #[must_use]
    pub fn slice(&self, rows: Range<usize>) -> Self {
        assert!(rows.start <= rows.end && rows.end <= self.rows, "rows {rows:?} of {}", self.rows);
        let stride = stride(self.ty, self.cols);
        let memory = self.memory.slice(rows.start * stride..rows.end * stride);
        Self { rows: rows.len(), memory, ..*self }
    }

    /// The element type.
    pub fn ty(&self) -> Type {
        self.ty
    }

    /// Rows.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Columns.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// The packed rows.
    pub fn memory(&self) -> View<'m> {
        self.memory
    }
}

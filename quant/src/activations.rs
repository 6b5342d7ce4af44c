//! Activation rows and their quantised forms.

use alloc::vec::Vec;
use core::ops::BitOr;

use crate::cpu::Kernels;
use crate::matmul::Precision;
use crate::{Parallel, Serial, Type, for_each_chunk_mut};

/// A set of forms in which a batch of activations is held.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Forms(u8);

impl Forms {
    /// No form.
    pub const NONE: Self = Self(0);
    /// The rows as they are.
    pub const F32: Self = Self(1);
    /// Signed bytes in blocks of 32 with an f32 scale and an integer sum: for weights in blocks of 32.
    pub const Q8_0: Self = Self(2);
    /// Signed bytes in blocks of 256 with an f32 scale and integer sums of 16 and 32: for the K types.
    pub const Q8_K: Self = Self(4);

    /// The form that products with weights of type `ty` need.
    pub const fn of(ty: Type, precision: Precision) -> Self {
        match (precision, ty.block_len()) {
            (Precision::Exact, _) | (_, 1) => Self::F32,
            (Precision::Fast, 32) => Self::Q8_0,
            (Precision::Fast, _) => Self::Q8_K,
        }
    }

    /// Whether all forms of `other` are in this set.
    pub const fn contains(self, other: Self) -> bool {
        self.0 & other.0 == other.0
    }
}

impl BitOr for Forms {
    type Output = Self;

    fn bitor(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }
}

/// 256 activations as signed bytes with one scale.
#[derive(Clone, Copy, Debug)]
#[repr(C, align(64))]
pub(crate) struct Q8K {
    pub(crate) q: [i8; 256],
    /// Sums of the runs of 16 codes.
    pub(crate) sums16: [i16; 16],
    /// Sums of the runs of 32 codes.
    pub(crate) sums32: [i16; 8],
    pub(crate) d: f32,
}

/// Eight blocks of 32 activations as signed bytes with a scale each. Blocks past the end of a row are zero.
#[derive(Clone, Copy, Debug)]
#[repr(C, align(64))]
pub(crate) struct Q8x8 {
    pub(crate) q: [[i8; 32]; 8],
    pub(crate) d: [f32; 8],
    /// Sums of the codes of each block.
    pub(crate) sums: [i32; 8],
}

impl Q8K {
    pub(crate) const ZERO: Self = Self { q: [0; 256], sums16: [0; 16], sums32: [0; 8], d: 0.0 };
}

impl Q8x8 {
    pub(crate) const ZERO: Self = Self { q: [[0; 32]; 8], d: [0.0; 8], sums: [0; 8] };
}

/// A batch of activation rows `[n_tokens, cols]` with the forms that its consumers need, made once.
///
/// The buffers are reused by the next [`fill`](Self::fill).
#[derive(Debug, Default)]
pub struct Activations {
    n_tokens: usize,
    cols: usize,
    forms: Forms,
    rows: Vec<f32>,
    q8k: Vec<Q8K>,
    q8x8: Vec<Q8x8>,
}

impl Activations {
    /// An empty batch.
    pub const fn new() -> Self {
        Self { n_tokens: 0, cols: 0, forms: Forms::NONE, rows: Vec::new(), q8k: Vec::new(), q8x8: Vec::new() }
    }

    /// Replaces the batch by `rows` (`[n_tokens, cols]`, row major) and makes `forms` of it.
    ///
    /// A value that is not finite makes its whole quantisation block NaN in the quantised forms, so that every
    /// product with that row is NaN. A block whose largest magnitude is below 4e-37 is zero.
    ///
    /// # Panics
    /// When `rows` is not whole rows, or `cols` is not a multiple of 32 (Q8_0) or 256 (Q8_K) and that form is
    /// asked for. When `SKEP_ISA` is unusable, see [`Isa::detect`](crate::Isa::detect).
    pub fn fill(&mut self, par: &dyn Parallel, rows: &[f32], cols: usize, forms: Forms) {
        self.fill_with(Kernels::active(), par, rows, cols, forms);
    }

    /// [`fill`](Self::fill) with the given kernels.
    pub fn fill_with(
        &mut self,
        kernels: &Kernels,
        par: &dyn Parallel,
        rows: &[f32],
        cols: usize,
        forms: Forms,
    ) {
        let n_tokens = rows.len().checked_div(cols).unwrap_or(0);
        assert_eq!(n_tokens * cols, rows.len(), "{} activations are not rows of {cols}", rows.len());
        (self.n_tokens, self.cols, self.forms) = (n_tokens, cols, forms);
        self.q8k.clear();
        self.q8x8.clear();
        // A short batch is quantised sooner than a pool wakes up.
        let par = if rows.len() < 16 * 1024 { &Serial } else { par };
        if forms.contains(Forms::F32) {
            const CHUNK: usize = 16 * 1024;
            self.rows.resize(rows.len(), 0.0);
            for_each_chunk_mut(par, &mut self.rows, CHUNK, |i, chunk| {
                chunk.copy_from_slice(&rows[i * CHUNK..][..chunk.len()]);
            });
        } else {
            self.rows.clear();
        }
        if forms.contains(Forms::Q8_K) && n_tokens > 0 {
            assert!(cols.is_multiple_of(256), "{cols} columns are not a multiple of 256");
            self.q8k.resize(rows.len() / 256, Q8K::ZERO);
            for_each_chunk_mut(par, &mut self.q8k, cols / 256, |token, blocks| {
                kernels.quantise_256(&rows[token * cols..][..cols], blocks);
            });
        }
        if forms.contains(Forms::Q8_0) && n_tokens > 0 {
            assert!(cols.is_multiple_of(32), "{cols} columns are not a multiple of 32");
            let groups = cols.div_ceil(256);
            self.q8x8.resize(n_tokens * groups, Q8x8::ZERO);
            for_each_chunk_mut(par, &mut self.q8x8, groups, |token, groups| {
                kernels.quantise_32(&rows[token * cols..][..cols], groups);
            });
        }
    }

    /// Number of rows.
    pub const fn n_tokens(&self) -> usize {
        self.n_tokens
    }

    /// Number of columns.
    pub const fn cols(&self) -> usize {
        self.cols
    }

    /// The forms held.
    pub const fn forms(&self) -> Forms {
        self.forms
    }

    /// The rows `[n_tokens, cols]` in f32; empty unless [`Forms::F32`] is held.
    pub fn f32_rows(&self) -> &[f32] {
        &self.rows
    }

    /// One row in f32.
    #[inline]
    pub(crate) fn f32_row(&self, token: usize) -> &[f32] {
        &self.rows[token * self.cols..][..self.cols]
    }

    /// One row in the Q8_K form.
    #[inline]
    pub(crate) fn q8k_row(&self, token: usize) -> &[Q8K] {
        let len = self.cols / 256;
        &self.q8k[token * len..][..len]
    }

    /// One row in the Q8_0 form.
    #[inline]
    pub(crate) fn q8x8_row(&self, token: usize) -> &[Q8x8] {
        let len = self.cols.div_ceil(256);
        &self.q8x8[token * len..][..len]
    }
}

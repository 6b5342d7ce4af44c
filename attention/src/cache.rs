use alloc::{vec, vec::Vec};
use core::ops::Range;

use half::f16;

use crate::{Error, ErrorKind, Heads, Result, Span};

/// Number format of cached keys and values.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum KvType {
    /// IEEE half precision, rounded to nearest even. Finite values beyond ±65504 are stored as ±65504 (so that one
    /// outlier does not turn a whole row into infinities); infinities and NaN are kept, so that a fault upstream stays visible.
    F16,
    /// Single precision, stored as given.
    F32,
}

impl KvType {
    /// Bytes of one value.
    pub const fn size(self) -> usize {
        match self {
            Self::F16 => 2,
            Self::F32 => 4,
        }
    }
}

/// Paged pool of the keys and values of one layer.
///
/// A page holds `page_len` tokens of one sequence. Keys are laid out as `[n_pages, kv_heads, page_len, k_dim]`, values as
/// `[n_pages, kv_heads, page_len, v_dim]`: one head's rows of a page lie side by side. Which page belongs to which sequence is
/// the business of a scheduler; the pool knows only page numbers.
#[derive(Debug)]
pub struct KvCache {
    n_pages: usize,
    page_len: usize,
    kv_heads: usize,
    k_dim: usize,
    v_dim: usize,
    k: Store,
    v: Store,
    /// Per page the last write pass that claimed it, to find pages claimed twice.
    claims: Vec<u32>,
    pass: u32,
}

/// Values of one half of the pool.
#[derive(Debug)]
enum Store {
    F16(Vec<u16>),
    F32(Vec<f32>),
}

/// Adjacent values of the pool.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Values<'a> {
    /// Bits of half precision numbers.
    F16(&'a [u16]),
    F32(&'a [f32]),
}

/// The same, to be written.
#[derive(Debug)]
pub(crate) enum ValuesMut<'a> {
    F16(&'a mut [u16]),
    F32(&'a mut [f32]),
}

/// Keys or values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Side {
    K,
    V,
}

impl KvCache {
    /// A pool of `n_pages` pages of `page_len` tokens, zeroed. Memory is touched only when rows are written, where the
    /// operating system allows.
    ///
    /// # Errors
    /// When a size is zero, the pool's size overflows, or there is no memory for it.
    pub fn new(
        ty: KvType,
        n_pages: usize,
        page_len: usize,
        kv_heads: usize,
        k_dim: usize,
        v_dim: usize,
    ) -> Result<Self> {
        let sizes = [
            ("n_pages", n_pages),
            ("page_len", page_len),
            ("kv_heads", kv_heads),
            ("k_dim", k_dim),
            ("v_dim", v_dim),
        ];
        for (name, size) in sizes {
            if size == 0 {
                return Err(ErrorKind::Zero { name }.into());
            }
        }
        let rows = n_pages.checked_mul(page_len).and_then(|n| n.checked_mul(kv_heads));
        let values = |dim: usize| rows.and_then(|rows| rows.checked_mul(dim));
        let bytes = k_dim
            .checked_add(v_dim)
            .and_then(values)
            .and_then(|n| n.checked_mul(ty.size()))
            .filter(|&bytes| bytes <= isize::MAX as usize && u32::try_from(n_pages).is_ok());
        let (Some(k), Some(v), Some(bytes)) = (values(k_dim), values(v_dim), bytes) else {
            return Err(ErrorKind::Overflow.into());
        };
        let no_memory = |_| Error::from(ErrorKind::Allocation { bytes });
        Ok(Self {
            n_pages,
            page_len,
            kv_heads,
            k_dim,
            v_dim,
            k: Store::new(ty, k).map_err(no_memory)?,
            v: Store::new(ty, v).map_err(no_memory)?,
            claims: vec![0; n_pages],
            pass: 0,
        })
    }

    /// Number format.
    pub const fn ty(&self) -> KvType {
        match self.k {
            Store::F16(_) => KvType::F16,
            Store::F32(_) => KvType::F32,
        }
    }

    /// Number of pages.
    pub const fn n_pages(&self) -> usize {
        self.n_pages
    }

    /// Tokens per page.
    pub const fn page_len(&self) -> usize {
        self.page_len
    }

    /// Number of key and value heads.
    pub const fn kv_heads(&self) -> usize {
        self.kv_heads
    }

    /// Size of a key head.
    pub const fn k_dim(&self) -> usize {
        self.k_dim
    }

    /// Size of a value head.
    pub const fn v_dim(&self) -> usize {
        self.v_dim
    }

    /// Bytes of keys and values.
    pub const fn bytes(&self) -> usize {
        self.n_pages * self.page_len * self.kv_heads * (self.k_dim + self.v_dim) * self.ty().size()
    }

    /// Reads the key of one token and head, `[k_dim]`.
    ///
    /// # Panics
    /// When `page`, `slot` or `head` is out of range, or `out` is not `k_dim` long.
    pub fn read_k(&self, page: u32, slot: usize, head: usize, out: &mut [f32]) {
        self.read(Side::K, page, slot, head, out);
    }

    /// Reads the value of one token and head, `[v_dim]`.
    ///
    /// # Panics
    /// When `page`, `slot` or `head` is out of range, or `out` is not `v_dim` long.
    pub fn read_v(&self, page: u32, slot: usize, head: usize, out: &mut [f32]) {
        self.read(Side::V, page, slot, head, out);
    }

    fn read(&self, side: Side, page: u32, slot: usize, head: usize, out: &mut [f32]) {
        assert!((page as usize) < self.n_pages, "page {page} of {}", self.n_pages);
        assert!(slot < self.page_len, "slot {slot} of {}", self.page_len);
        assert!(head < self.kv_heads, "head {head} of {}", self.kv_heads);
        match self.rows(side, page as usize, head, slot..slot + 1) {
            Values::F16(bits) => {
                assert_eq!(out.len(), bits.len(), "output length must be the head size");
                for (out, &bits) in out.iter_mut().zip(bits) {
                    *out = f16::from_bits(bits).to_f32();
                }
            }
            Values::F32(values) => out.copy_from_slice(values),
        }
    }

    /// Panics unless the pool was made for such heads.
    pub(crate) fn check(&self, heads: &Heads) {
        assert_eq!(self.kv_heads, heads.kv_heads(), "cache and layer differ in kv_heads");
        assert_eq!(self.k_dim, heads.head_dim(), "cache and layer differ in head_dim");
        assert_eq!(self.v_dim, heads.v_dim(), "cache and layer differ in v_dim");
    }

    pub(crate) const fn dim(&self, side: Side) -> usize {
        match side {
            Side::K => self.k_dim,
            Side::V => self.v_dim,
        }
    }

    /// Index of the first value of a row.
    const fn offset(&self, side: Side, page: usize, head: usize, slot: usize) -> usize {
        ((page * self.kv_heads + head) * self.page_len + slot) * self.dim(side)
    }

    /// Rows `slots` of one page and head, side by side.
    pub(crate) fn rows(&self, side: Side, page: usize, head: usize, slots: Range<usize>) -> Values<'_> {
        debug_assert!(slots.end <= self.page_len && head < self.kv_heads);
        let store = match side {
            Side::K => &self.k,
            Side::V => &self.v,
        };
        let start = self.offset(side, page, head, slots.start);
        let range = start..start + slots.len() * self.dim(side);
        match store {
            Store::F16(bits) => Values::F16(&bits[range]),
            Store::F32(values) => Values::F32(&values[range]),
        }
    }

    /// Marks the pages that hold rows of `spans` as written by this pass. `spans` must have been checked.
    ///
    /// # Errors
    /// When two entries claim one page, within a span or between spans.
    pub(crate) fn claim(&mut self, spans: &[Span<'_>]) -> Result<()> {
        if self.pass == u32::MAX {
            self.claims.fill(0);
            self.pass = 0;
        }
        self.pass += 1;
        for (number, span) in spans.iter().enumerate().filter(|(_, span)| span.len() > 0) {
            let entries = span.start / self.page_len..(span.start + span.len()).div_ceil(self.page_len);
            for index in entries {
                let page = span.pages[index];
                let claim = &mut self.claims[page as usize];
                if *claim == self.pass {
                    return Err(Error::in_span(number, ErrorKind::PageShared { index, page }));
                }
                *claim = self.pass;
            }
        }
        Ok(())
    }

    /// Row of one token and head, to be written.
    pub(crate) fn row_mut(&mut self, side: Side, page: usize, head: usize, slot: usize) -> ValuesMut<'_> {
        let start = self.offset(side, page, head, slot);
        let range = start..start + self.dim(side);
        let store = match side {
            Side::K => &mut self.k,
            Side::V => &mut self.v,
        };
        match store {
            Store::F16(bits) => ValuesMut::F16(&mut bits[range]),
            Store::F32(values) => ValuesMut::F32(&mut values[range]),
        }
    }
}

impl Store {
    fn new(ty: KvType, len: usize) -> core::result::Result<Self, alloc::collections::TryReserveError> {
        // `vec!` gets zeroed memory without touching it but aborts when there is none: ask first.
        match ty {
            KvType::F16 => {
                Vec::<u16>::new().try_reserve_exact(len)?;
                Ok(Self::F16(vec![0; len]))
            }
            KvType::F32 => {
                Vec::<f32>::new().try_reserve_exact(len)?;
                Ok(Self::F32(vec![0.0; len]))
            }
        }
    }
}

/// Half precision bits of `x` as the cache stores it.
pub(crate) fn narrow(x: f32) -> u16 {
    let max = f16::MAX.to_f32();
    f16::from_f32(if x.is_finite() { x.clamp(-max, max) } else { x }).to_bits()
}

/// A pool borrowed by threads that write different rows of it.
#[cfg(feature = "std")]
pub(crate) struct Writer<'a> {
    k: Raw,
    v: Raw,
    page_len: usize,
    kv_heads: usize,
    k_dim: usize,
    v_dim: usize,
    borrow: core::marker::PhantomData<&'a mut KvCache>,
}

#[cfg(feature = "std")]
#[derive(Clone, Copy)]
enum Raw {
    F16(*mut u16, usize),
    F32(*mut f32, usize),
}

// SAFETY: the pointers stand for a `&mut KvCache`, whose contents are `Send`; that threads do not meet in a row is the contract of `row`.
#[cfg(feature = "std")]
unsafe impl Sync for Writer<'_> {}

#[cfg(feature = "std")]
impl KvCache {
    pub(crate) fn writer(&mut self) -> Writer<'_> {
        let Self { page_len, kv_heads, k_dim, v_dim, .. } = *self;
        let raw = |store: &mut Store| match store {
            Store::F16(bits) => Raw::F16(bits.as_mut_ptr(), bits.len()),
            Store::F32(values) => Raw::F32(values.as_mut_ptr(), values.len()),
        };
        let (k, v) = (raw(&mut self.k), raw(&mut self.v));
        Writer { k, v, page_len, kv_heads, k_dim, v_dim, borrow: core::marker::PhantomData }
    }
}

#[cfg(feature = "std")]
impl Writer<'_> {
    /// Row of one token and head, to be written.
    ///
    /// # Safety
    /// While the result lives, nobody else may ask for the same side, page, head and slot.
    pub(crate) unsafe fn row(&self, side: Side, page: usize, head: usize, slot: usize) -> ValuesMut<'_> {
        assert!(head < self.kv_heads && slot < self.page_len, "row outside its page");
        let (raw, dim) = match side {
            Side::K => (self.k, self.k_dim),
            Side::V => (self.v, self.v_dim),
        };
        let start = ((page * self.kv_heads + head) * self.page_len + slot) * dim;
        match raw {
            Raw::F16(base, len) => {
                assert!(start + dim <= len, "page outside the cache");
                // SAFETY: within the allocation by the assertion.
                let first = unsafe { base.add(start) };
                // SAFETY: `dim` values from there are within the allocation, borrowed mutably for as long as `self`, and
                // rows do not overlap, so the caller's promise makes this the only reference to them.
                ValuesMut::F16(unsafe { core::slice::from_raw_parts_mut(first, dim) })
            }
            Raw::F32(base, len) => {
                assert!(start + dim <= len, "page outside the cache");
                // SAFETY: as above.
                let first = unsafe { base.add(start) };
                // SAFETY: as above.
                ValuesMut::F32(unsafe { core::slice::from_raw_parts_mut(first, dim) })
            }
        }
    }
}

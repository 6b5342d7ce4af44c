use crate::{Heads, KvType};
use skep_hal::Result;
use skep_hal::gpu::{Device, Memory, View};

/// Tokens of a page.
pub const PAGE: usize = 64;

/// Paged pool of the keys and values of one layer, in device memory.
///
/// Keys lie as `[n_pages, kv_heads, 64, k_dim]`, values as `[n_pages, kv_heads, 64, v_dim]`, as in a [`KvCache`](crate::KvCache) with pages of
/// 64 tokens.
#[derive(Debug)]
pub struct Cache {
    ty: KvType,
    n_pages: usize,
    kv_heads: usize,
    k_dim: usize,
    v_dim: usize,
    k: Memory,
    v: Memory,
}

impl Cache {
    /// A pool of `n_pages` pages; what they hold is undefined until rows are written.
    ///
    /// # Errors
    /// When the device has no memory for it.
    ///
    /// # Panics
    /// When a size is zero, the sizes overflow, or a head size is not a multiple of 8 up to [`MAX_DIM`](super::MAX_DIM).
    pub fn new(
        device: &Device,
        ty: KvType,
        n_pages: usize,
        kv_heads: usize,
        k_dim: usize,
        v_dim: usize,
    ) -> Result<Self> {
        let rows = u32::try_from(n_pages).ok().and_then(|_| n_pages.checked_mul(PAGE * kv_heads));
        let bytes = |name: &str, dim: usize| {
            assert!(
                dim > 0 && dim.is_multiple_of(8) && dim <= super::MAX_DIM,
                "{name} {dim} must be a multiple of 8, at most {}",
                super::MAX_DIM
            );
            let bytes = rows.and_then(|rows| rows.checked_mul(dim * ty.size())).filter(|&bytes| bytes > 0);
            bytes
                .unwrap_or_else(|| panic!("{n_pages} pages of {kv_heads} heads of {dim} values are no cache"))
        };
        let (k, v) = (bytes("k_dim", k_dim), bytes("v_dim", v_dim));
        Ok(Self {
            ty,
            n_pages,
            kv_heads,
            k_dim,
            v_dim,
            k: Memory::new(device, k)?,
            v: Memory::new(device, v)?,
        })
    }

    /// Number format.
    pub fn ty(&self) -> KvType {
        self.ty
    }

    /// Number of pages.
    pub fn n_pages(&self) -> usize {
        self.n_pages
    }

    /// Bytes of keys and values.
    pub fn bytes(&self) -> usize {
        self.k.bytes() + self.v.bytes()
    }

    /// Keys, `[n_pages, kv_heads, 64, k_dim]`.
    pub fn keys(&self) -> View<'_> {
        self.k.view()
    }

    /// Values, `[n_pages, kv_heads, 64, v_dim]`.
    pub fn values(&self) -> View<'_> {
        self.v.view()
    }

    /// Panics unless the cache was made for a layer like this.
    pub(super) fn check(&self, heads: &Heads) {
        assert_eq!(self.kv_heads, heads.kv_heads(), "cache and layer differ in kv_heads");
        assert_eq!(self.k_dim, heads.head_dim(), "cache and layer differ in head_dim");
        assert_eq!(self.v_dim, heads.v_dim(), "cache and layer differ in v_dim");
    }
}

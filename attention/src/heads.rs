use crate::{ErrorKind, Result};

/// Head counts and sizes of one attention layer.
///
/// Query head `h` reads key and value head `h / (q_heads / kv_heads)` (grouped-query attention, Ainslie et al. 2023,
/// <https://arxiv.org/abs/2305.13245>).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Heads {
    q_heads: usize,
    kv_heads: usize,
    head_dim: usize,
    v_dim: usize,
    scale: f32,
}

impl Heads {
    /// Describes a layer of `q_heads` query heads and `kv_heads` key/value heads; `head_dim` is the size of a query
    /// and key head, `v_dim` that of a value head; `scale` multiplies every score q·k (usually `head_dim^-1/2`).
    ///
    /// # Errors
    /// When a count or size is zero, `q_heads` is not a multiple of `kv_heads`, or `scale` is not finite.
    pub fn new(q_heads: usize, kv_heads: usize, head_dim: usize, v_dim: usize, scale: f32) -> Result<Self> {
        for (name, size) in
            [("q_heads", q_heads), ("kv_heads", kv_heads), ("head_dim", head_dim), ("v_dim", v_dim)]
        {
            if size == 0 {
                return Err(ErrorKind::Zero { name }.into());
            }
        }
        if !q_heads.is_multiple_of(kv_heads) {
            return Err(ErrorKind::Groups { q_heads, kv_heads }.into());
        }
        if !scale.is_finite() {
            return Err(ErrorKind::Scale.into());
        }
        Ok(Self { q_heads, kv_heads, head_dim, v_dim, scale })
    }

    /// Number of query heads.
    pub const fn q_heads(&self) -> usize {
        self.q_heads
    }

    /// Number of key and value heads.
    pub const fn kv_heads(&self) -> usize {
        self.kv_heads
    }

    /// Size of a query head and of a key head.
    pub const fn head_dim(&self) -> usize {
        self.head_dim
    }

    /// Size of a value head.
    pub const fn v_dim(&self) -> usize {
        self.v_dim
    }

    /// Factor on every score.
    pub const fn scale(&self) -> f32 {
        self.scale
    }

    /// Query heads per key/value head.
    pub const fn group(&self) -> usize {
        self.q_heads / self.kv_heads
    }
}

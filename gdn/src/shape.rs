use core::ops::Range;

use crate::error::{Error, ErrorKind, Result};

/// How value heads pair with key heads when there are more of the former.
///
/// With `r = v_heads / k_heads`. The order is a property of the file and applies to eight tensors at once; see [`order`](crate::order).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum HeadOrder {
    /// Value head `h` reads key head `h / r` (transformers, FLA; `qwen3next` GGUF files).
    Grouped,
    /// Value head `h` reads key head `h % k_heads` (`qwen35` and `qwen35moe` GGUF files).
    Tiled,
}

/// Dimensions of one Gated DeltaNet layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Shape {
    k_heads: usize,
    v_heads: usize,
    head_k_dim: usize,
    head_v_dim: usize,
    conv_kernel: usize,
    order: HeadOrder,
}

impl Shape {
    /// Checks and makes a shape.
    ///
    /// # Errors
    /// [`ErrorKind::Zero`] for a zero dimension, [`ErrorKind::HeadRatio`] when `v_heads` is not a multiple of `k_heads`,
    /// [`ErrorKind::Overflow`] when the state of one sequence could not be addressed.
    pub fn new(
        k_heads: usize,
        v_heads: usize,
        head_k_dim: usize,
        head_v_dim: usize,
        conv_kernel: usize,
        order: HeadOrder,
    ) -> Result<Self> {
        for (field, value) in [
            ("k_heads", k_heads),
            ("v_heads", v_heads),
            ("head_k_dim", head_k_dim),
            ("head_v_dim", head_v_dim),
            ("conv_kernel", conv_kernel),
        ] {
            if value == 0 {
                return Err(Error::new(field, ErrorKind::Zero));
            }
        }
        if !v_heads.is_multiple_of(k_heads) {
            return Err(Error::new("v_heads", ErrorKind::HeadRatio { k_heads, v_heads }));
        }
        let shape = Self { k_heads, v_heads, head_k_dim, head_v_dim, conv_kernel, order };
        let bytes = || {
            let conv = k_heads.checked_mul(head_k_dim)?.checked_mul(2)?;
            let conv = conv.checked_add(v_heads.checked_mul(head_v_dim)?)?.checked_mul(conv_kernel)?;
            let state = v_heads.checked_mul(head_k_dim)?.checked_mul(head_v_dim)?;
            conv.checked_add(state)?
                .checked_mul(size_of::<f32>())
                .filter(|&bytes| bytes <= isize::MAX as usize)
        };
        match bytes() {
            Some(_) => Ok(shape),
            None => Err(Error::new("shape", ErrorKind::Overflow)),
        }
    }

    /// Number of query and key heads.
    #[must_use]
    pub const fn k_heads(&self) -> usize {
        self.k_heads
    }

    /// Number of value heads, which is also the number of states, gates and decays.
    #[must_use]
    pub const fn v_heads(&self) -> usize {
        self.v_heads
    }

    /// Width of a query or key head.
    #[must_use]
    pub const fn head_k_dim(&self) -> usize {
        self.head_k_dim
    }

    /// Width of a value head.
    #[must_use]
    pub const fn head_v_dim(&self) -> usize {
        self.head_v_dim
    }

    /// Number of taps of the causal convolution, the current token included.
    #[must_use]
    pub const fn conv_kernel(&self) -> usize {
        self.conv_kernel
    }

    /// How value heads pair with key heads.
    #[must_use]
    pub const fn order(&self) -> HeadOrder {
        self.order
    }

    /// The same dimensions with another pairing.
    #[must_use]
    pub const fn with_order(self, order: HeadOrder) -> Self {
        Self { order, ..self }
    }

    /// Value heads per key head.
    #[must_use]
    pub const fn ratio(&self) -> usize {
        self.v_heads / self.k_heads
    }

    /// Width of all queries, and of all keys: `k_heads * head_k_dim`.
    #[must_use]
    pub const fn key_dim(&self) -> usize {
        self.k_heads * self.head_k_dim
    }

    /// Width of all values: `v_heads * head_v_dim`.
    #[must_use]
    pub const fn value_dim(&self) -> usize {
        self.v_heads * self.head_v_dim
    }

    /// Number of channels of the convolution: queries, keys, values.
    #[must_use]
    pub const fn conv_dim(&self) -> usize {
        2 * self.key_dim() + self.value_dim()
    }

    /// The key head that value head `v_head` reads.
    ///
    /// # Panics
    /// When `v_head` is not less than `v_heads`.
    #[must_use]
    pub const fn k_head_of(&self, v_head: usize) -> usize {
        assert!(v_head < self.v_heads, "value head out of range");
        match self.order {
            HeadOrder::Grouped => v_head / self.ratio(),
            HeadOrder::Tiled => v_head % self.k_heads,
        }
    }

    /// The `member`-th of the [`ratio`](Self::ratio) value heads that read key head `k_head`.
    ///
    /// # Panics
    /// When `k_head` or `member` is out of range.
    #[must_use]
    pub const fn v_head_of(&self, k_head: usize, member: usize) -> usize {
        assert!(k_head < self.k_heads && member < self.ratio(), "key head or member out of range");
        match self.order {
            HeadOrder::Grouped => k_head * self.ratio() + member,
            HeadOrder::Tiled => member * self.k_heads + k_head,
        }
    }

    pub(crate) const fn q_channels(&self, k_head: usize) -> Range<usize> {
        let start = k_head * self.head_k_dim;
        start..start + self.head_k_dim
    }

    pub(crate) const fn k_channels(&self, k_head: usize) -> Range<usize> {
        let start = self.key_dim() + k_head * self.head_k_dim;
        start..start + self.head_k_dim
    }

    pub(crate) const fn v_channels(&self, v_head: usize) -> Range<usize> {
        let start = 2 * self.key_dim() + v_head * self.head_v_dim;
        start..start + self.head_v_dim
    }

    /// Elements of one head's recurrent state.
    pub(crate) const fn head_state(&self) -> usize {
        self.head_k_dim * self.head_v_dim
    }
}

/// The small per-layer weights of the mixer; the projections around it are the caller's.
#[derive(Debug, Clone, Copy)]
pub struct Weights<'a> {
    conv: &'a [f32],
    a: &'a [f32],
    dt_bias: &'a [f32],
    norm: &'a [f32],
    eps: f32,
}

impl<'a> Weights<'a> {
    /// Checks and makes a weight set.
    ///
    /// * `conv` `[conv_dim, conv_kernel]`: taps of the causal convolution, the last tap meets the current token;
    /// * `a` `[v_heads]`: `-exp(A_log)`, the form in which GGUF files store it;
    /// * `dt_bias` `[v_heads]`;
    /// * `norm` `[head_v_dim]`: weight of the gated norm, used as it is (nothing is added to it);
    /// * `eps`: added to the mean square in the gated norm.
    ///
    /// # Errors
    /// [`ErrorKind::Length`] for a slice that does not fit the shape, [`ErrorKind::Decay`] for an entry of `a` that is not
    /// finite and negative (an `A_log` that was not converted), [`ErrorKind::Epsilon`] for a useless `eps`.
    pub fn new(
        shape: &Shape,
        conv: &'a [f32],
        a: &'a [f32],
        dt_bias: &'a [f32],
        norm: &'a [f32],
        eps: f32,
    ) -> Result<Self> {
        for (field, expected, found) in [
            ("conv", shape.conv_dim() * shape.conv_kernel(), conv.len()),
            ("a", shape.v_heads(), a.len()),
            ("dt_bias", shape.v_heads(), dt_bias.len()),
            ("norm", shape.head_v_dim(), norm.len()),
        ] {
            if expected != found {
                return Err(Error::new(field, ErrorKind::Length { expected, found }));
            }
        }
        if let Some(index) = a.iter().position(|&a| !(a.is_finite() && a < 0.0)) {
            return Err(Error::new("a", ErrorKind::Decay { index, value: a[index] }));
        }
        if !(eps.is_finite() && eps > 0.0) {
            return Err(Error::new("eps", ErrorKind::Epsilon { value: eps }));
        }
        Ok(Self { conv, a, dt_bias, norm, eps })
    }

    /// Convolution taps `[conv_dim, conv_kernel]`.
    #[must_use]
    pub const fn conv(&self) -> &'a [f32] {
        self.conv
    }

    /// `-exp(A_log)` per value head.
    #[must_use]
    pub const fn a(&self) -> &'a [f32] {
        self.a
    }

    /// Bias inside the softplus, per value head.
    #[must_use]
    pub const fn dt_bias(&self) -> &'a [f32] {
        self.dt_bias
    }

    /// Weight of the gated norm `[head_v_dim]`.
    #[must_use]
    pub const fn norm(&self) -> &'a [f32] {
        self.norm
    }

    /// Epsilon of the gated norm.
    #[must_use]
    pub const fn eps(&self) -> f32 {
        self.eps
    }

    pub(crate) fn assert_fits(&self, shape: &Shape) {
        assert_eq!(self.conv.len(), shape.conv_dim() * shape.conv_kernel(), "conv weights of another shape");
        assert_eq!(self.a.len(), shape.v_heads(), "a of another shape");
        assert_eq!(self.norm.len(), shape.head_v_dim(), "norm of another shape");
    }
}

/// The projected rows of a batch of `n` tokens.
#[derive(Debug, Clone, Copy)]
pub struct Input<'a> {
    /// `[n, conv_dim]`: query, key and value projections in this order, before the convolution.
    pub qkv: &'a [f32],
    /// `[n, value_dim]`: output gate, before its SiLU.
    pub z: &'a [f32],
    /// `[n, v_heads]`: write strength, before its sigmoid.
    pub beta: &'a [f32],
    /// `[n, v_heads]`: decay input, before bias and softplus.
    pub alpha: &'a [f32],
}

impl Input<'_> {
    /// Checks all lengths and returns the number of tokens.
    pub(crate) fn assert_fits(&self, shape: &Shape) -> usize {
        let n = self.beta.len() / shape.v_heads();
        assert_eq!(self.beta.len(), n * shape.v_heads(), "beta is not [n, v_heads]");
        assert_eq!(self.alpha.len(), n * shape.v_heads(), "alpha is not [n, v_heads]");
        assert_eq!(self.qkv.len(), n * shape.conv_dim(), "qkv is not [n, conv_dim]");
        assert_eq!(self.z.len(), n * shape.value_dim(), "z is not [n, value_dim]");
        n
    }
}

#[cfg(test)]
mod tests {
    use alloc::string::ToString;
    use alloc::vec;
    use alloc::vec::Vec;

    use super::*;

    #[test]
    fn impossible_shapes_are_named() {
        let shape = |k, v, d_k, d_v, kernel| Shape::new(k, v, d_k, d_v, kernel, HeadOrder::Tiled);
        let message = |result: Result<Shape>| result.unwrap_err().to_string();
        assert_eq!(message(shape(0, 4, 8, 8, 4)), "k_heads: must not be zero");
        assert_eq!(message(shape(2, 0, 8, 8, 4)), "v_heads: must not be zero");
        assert_eq!(message(shape(2, 4, 0, 8, 4)), "head_k_dim: must not be zero");
        assert_eq!(message(shape(2, 4, 8, 0, 4)), "head_v_dim: must not be zero");
        assert_eq!(message(shape(2, 4, 8, 8, 0)), "conv_kernel: must not be zero");
        assert_eq!(
            message(shape(16, 40, 8, 8, 4)),
            "v_heads: 40 value heads are not a multiple of 16 key heads"
        );
        assert_eq!(message(shape(1, usize::MAX, 8, 8, 4)), "shape: the size overflows");
        assert_eq!(message(shape(1, 1 << 30, 1 << 20, 1 << 20, 4)), "shape: the size overflows");
    }

    #[test]
    fn heads_pair_by_their_order() {
        // The ratios of Qwen3.5 35B-A3B and of the dense models with 48 value heads.
        for ratio in [1, 2, 3] {
            for order in [HeadOrder::Grouped, HeadOrder::Tiled] {
                let shape = Shape::new(16, 16 * ratio, 128, 128, 4, order).unwrap();
                for k_head in 0..16 {
                    for member in 0..ratio {
                        assert_eq!(shape.k_head_of(shape.v_head_of(k_head, member)), k_head);
                    }
                }
                let mut all: Vec<_> =
                    (0..16).flat_map(|k| (0..ratio).map(move |m| shape.v_head_of(k, m))).collect();
                all.sort_unstable();
                assert_eq!(all, (0..16 * ratio).collect::<Vec<_>>());
            }
        }
        let shape = Shape::new(16, 32, 128, 128, 4, HeadOrder::Tiled).unwrap();
        assert_eq!((shape.key_dim(), shape.value_dim(), shape.conv_dim()), (2048, 4096, 8192));
        assert_eq!((shape.k_head_of(17), shape.with_order(HeadOrder::Grouped).k_head_of(17)), (1, 8));
    }

    #[test]
    fn unfit_weights_are_named() {
        let shape = Shape::new(1, 2, 8, 8, 4, HeadOrder::Tiled).unwrap();
        let (conv, norm) = (vec![0.0; 32 * 4], [1.0; 8]);
        let weights = |conv: &[f32], a: &[f32], dt: &[f32], norm: &[f32], eps| {
            Weights::new(&shape, conv, a, dt, norm, eps).map(|_| ()).map_err(|error| error.to_string())
        };
        assert_eq!(weights(&conv, &[-1.0, -0.1], &[0.0; 2], &norm, 1e-6), Ok(()));
        let refused = |result: core::result::Result<(), alloc::string::String>, message: &str| {
            assert_eq!(result.unwrap_err(), message);
        };
        refused(weights(&conv[1..], &[-1.0; 2], &[0.0; 2], &norm, 1e-6), "conv: 127 elements, expected 128");
        refused(weights(&conv, &[-1.0; 3], &[0.0; 2], &norm, 1e-6), "a: 3 elements, expected 2");
        refused(weights(&conv, &[-1.0; 2], &[0.0; 1], &norm, 1e-6), "dt_bias: 1 elements, expected 2");
        refused(weights(&conv, &[-1.0; 2], &[0.0; 2], &norm[1..], 1e-6), "norm: 7 elements, expected 8");
        for value in [0.5, 0.0, -0.0, f32::NAN, f32::NEG_INFINITY] {
            let error = Weights::new(&shape, &conv, &[-0.5, value], &[0.0; 2], &norm, 1e-6).unwrap_err();
            assert_eq!(error.field(), "a");
            assert!(matches!(error.kind(), ErrorKind::Decay { index: 1, .. }), "{value}");
        }
        for eps in [0.0, -1e-6, f32::NAN, f32::INFINITY] {
            let error = Weights::new(&shape, &conv, &[-0.5; 2], &[0.0; 2], &norm, eps).unwrap_err();
            assert!(matches!(error.kind(), ErrorKind::Epsilon { .. }), "{eps}");
        }
    }
}

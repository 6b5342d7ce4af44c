use alloc::vec::Vec;

use crate::{ErrorKind, Result, math};

/// Largest number of rotated dimensions, so that the angles of one token fit in a small fixed buffer.
const MAX_ROT_DIMS: usize = 1024;

/// Position of a token on the three axes of a multi-axis rotary embedding: time, height and width.
///
/// A text token has the same number on all three. It is the *position*, which after an image is no longer the token
/// index (an image advances it by its longer side, not by its token count).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[expect(clippy::exhaustive_structs, reason = "the three axes are the whole of it")]
pub struct Position {
    /// Time.
    pub t: u32,
    /// Row of an image patch.
    pub h: u32,
    /// Column of an image patch.
    pub w: u32,
}

impl From<u32> for Position {
    /// Position of a text token.
    fn from(position: u32) -> Self {
        Self { t: position, h: position, w: position }
    }
}

/// Rotary position embedding (Su et al. 2021, <https://arxiv.org/abs/2104.09864>) with NeoX pairing.
///
/// Of a head of `head_dim` values the first `rot_dims` are rotated: value `i` pairs with value `i + rot_dims/2`, and
/// the pair turns by `position · base^(-2i/rot_dims)` radians. The others pass unchanged. Angles are computed in f64,
/// so sine and cosine stay exact to f32 at any position.
#[derive(Clone, Debug)]
pub struct Rope {
    head_dim: usize,
    /// Radians per position of each pair.
    freqs: Vec<f64>,
    /// Axis each pair follows.
    axes: Vec<Axis>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Axis {
    T,
    H,
    W,
}

impl Rope {
    /// Tables for heads of `head_dim` values of which the first `rot_dims` are rotated, all by the time axis.
    ///
    /// # Errors
    /// When `rot_dims` is zero, odd, larger than `head_dim` or above 1024, or `base` is not finite and positive.
    pub fn new(head_dim: usize, rot_dims: usize, base: f32) -> Result<Self> {
        if rot_dims == 0 || !rot_dims.is_multiple_of(2) || rot_dims > head_dim || rot_dims > MAX_ROT_DIMS {
            return Err(ErrorKind::RotaryDims { rot_dims, head_dim }.into());
        }
        if !(base.is_finite() && base > 0.0) {
            return Err(ErrorKind::Base.into());
        }
        let freqs = (0..rot_dims / 2)
            .map(|i| math::pow64(f64::from(base), -2.0 * i as f64 / rot_dims as f64))
            .collect::<Vec<_>>();
        let axes = alloc::vec![Axis::T; rot_dims / 2];
        Ok(Self { head_dim, freqs, axes })
    }

    /// The same with interleaved multi-axis sections `[t, h, w, 0]` (mRoPE of Qwen3-VL and later): pair `i` follows
    /// the height axis when `i % 3 == 1 && i < 3·h`, the width axis when `i % 3 == 2 && i < 3·w`, else the time axis.
    ///
    /// # Errors
    /// When the sections do not sum to `rot_dims/2` or the fourth is not 0.
    pub fn with_sections(mut self, sections: [usize; 4]) -> Result<Self> {
        let expected = self.freqs.len();
        let sum = sections.iter().try_fold(0usize, |sum, &s| sum.checked_add(s));
        if sum != Some(expected) || sections[3] != 0 {
            return Err(ErrorKind::Sections { sections, expected }.into());
        }
        for (i, axis) in self.axes.iter_mut().enumerate() {
            *axis = match i % 3 {
                1 if i < 3 * sections[1] => Axis::H,
                2 if i < 3 * sections[2] => Axis::W,
                _ => Axis::T,
            };
        }
        Ok(self)
    }

    /// The same with every frequency divided by the divisor of its pair (`rope_freqs` in GGUF files); a very large
    /// divisor leaves the pair unrotated.
    ///
    /// # Errors
    /// When there are not exactly `rot_dims/2` divisors or one is not above zero.
    pub fn with_divisors(mut self, divisors: &[f32]) -> Result<Self> {
        let expected = self.freqs.len();
        // Not `d <= 0`, so that NaN is refused too.
        if divisors.len() != expected || !divisors.iter().all(|&d| d > 0.0) {
            return Err(ErrorKind::Divisors { expected, found: divisors.len() }.into());
        }
        for (freq, &divisor) in self.freqs.iter_mut().zip(divisors) {
            *freq /= f64::from(divisor);
        }
        Ok(self)
    }

    /// Size of the heads these tables are for.
    pub const fn head_dim(&self) -> usize {
        self.head_dim
    }

    /// Number of leading dimensions that are rotated.
    pub fn rot_dims(&self) -> usize {
        2 * self.freqs.len()
    }

    /// Radians per position of each pair, and the axis it follows (0 time, 1 height, 2 width).
    #[cfg(feature = "gpu")]
    pub(crate) fn pairs(&self) -> impl Iterator<Item = (f64, u32)> {
        self.freqs.iter().zip(&self.axes).map(|(&freq, &axis)| (freq, axis as u32))
    }

    /// Rotates one head in place.
    ///
    /// # Panics
    /// When `head` is not `head_dim` long.
    pub fn apply(&self, head: &mut [f32], position: Position) {
        let mut angles = Angles::new();
        self.angles(position, &mut angles);
        self.rotate(head, &angles);
    }

    /// Cosines and sines of every pair at `position`, to be shared by all heads of a token.
    pub(crate) fn angles(&self, position: Position, angles: &mut Angles) {
        for (i, (&freq, &axis)) in self.freqs.iter().zip(&self.axes).enumerate() {
            let along = match axis {
                Axis::T => position.t,
                Axis::H => position.h,
                Axis::W => position.w,
            };
            let (sin, cos) = math::sin_cos64(f64::from(along) * freq);
            angles.cos[i] = cos as f32;
            angles.sin[i] = sin as f32;
        }
    }

    pub(crate) fn rotate(&self, head: &mut [f32], angles: &Angles) {
        assert_eq!(head.len(), self.head_dim, "head length must be head_dim");
        let pairs = self.freqs.len();
        let (low, high) = head[..2 * pairs].split_at_mut(pairs);
        let (cos, sin) = (&angles.cos[..pairs], &angles.sin[..pairs]);
        for (((a, b), &c), &s) in low.iter_mut().zip(high).zip(cos).zip(sin) {
            let (x, y) = (*a, *b);
            *a = x * c - y * s;
            *b = y * c + x * s;
        }
    }
}

/// Cosine and sine of each pair at one position.
pub(crate) struct Angles {
    cos: [f32; MAX_ROT_DIMS / 2],
    sin: [f32; MAX_ROT_DIMS / 2],
}

impl Angles {
    pub(crate) const fn new() -> Self {
        Self { cos: [1.0; MAX_ROT_DIMS / 2], sin: [0.0; MAX_ROT_DIMS / 2] }
    }
}

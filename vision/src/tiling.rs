use skep_quant::Parallel;

use crate::math::{floor, sqrt};
use crate::{Budget, ErrorKind, Patches, Picture, Result, resize};

/// How a tower cuts pictures: patches of `patch` x `patch` pixels, of which `pooling` x `pooling` become one soft token.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Tiling {
    patch: usize,
    pooling: usize,
}

impl Tiling {
    /// Gemma 4: patches of 16x16 pixels, pooled 3x3, so that a soft token covers 48x48 pixels.
    pub const GEMMA4V: Self = Self { patch: 16, pooling: 3 };

    /// Patches of `patch` x `patch` pixels, pooled `pooling` x `pooling`.
    ///
    /// # Errors
    /// When one is 0, or a soft token would cover more than 65536 pixels a side.
    pub fn new(patch: usize, pooling: usize) -> Result<Self> {
        match patch.checked_mul(pooling) {
            Some(1..=0x1_0000) => Ok(Self { patch, pooling }),
            _ => Err(ErrorKind::Tiling { patch, pooling }.into()),
        }
    }

    /// Pixels of a patch's side.
    #[must_use]
    pub const fn patch(self) -> usize {
        self.patch
    }

    /// Patches of a soft token's side.
    #[must_use]
    pub const fn pooling(self) -> usize {
        self.pooling
    }

    /// Pixels of a soft token's side, `patch * pooling`.
    #[must_use]
    pub const fn cell(self) -> usize {
        self.patch * self.pooling
    }

    /// The size `(width, height)` to which a picture of `width` x `height` pixels is brought: about the budget's area at
    /// the picture's aspect ratio (small pictures are enlarged), each side rounded down to a multiple of
    /// [`cell`](Self::cell).
    ///
    /// A picture so long that its short side would vanish gets a short side of one cell, and a long side of as many
    /// cells as the aspect ratio, rounded down and bounded by the budget. Transformers'
    /// `get_aspect_ratio_preserving_size`, with the same floating-point operations in the same order.
    ///
    /// # Errors
    /// When a side is 0. Every other size has a fit, because a budget is never less than 70 soft tokens.
    pub fn fit(self, width: usize, height: usize, budget: Budget) -> Result<(usize, usize)> {
        if width == 0 || height == 0 {
            return Err(ErrorKind::Empty { width, height }.into());
        }
        let cell = self.cell();
        let area = (budget.tokens() * cell * cell) as f64;
        let factor = sqrt(area / (width as f64 * height as f64));
        let cells = |side: usize| floor(factor * side as f64 / cell as f64) as usize;
        let long = |long: usize, short: usize| (long / short).min(budget.tokens());
        let (columns, rows) = match (cells(width), cells(height)) {
            (0, _) => (1, long(height, width)),
            (_, 0) => (long(width, height), 1),
            both => both,
        };
        Ok((columns * cell, rows * cell))
    }

    /// The number of soft tokens that a picture of `width` x `height` pixels takes.
    ///
    /// # Errors
    /// As [`fit`](Self::fit).
    pub fn soft_tokens(self, width: usize, height: usize, budget: Budget) -> Result<usize> {
        let (width, height) = self.fit(width, height, budget)?;
        Ok((width / self.cell()) * (height / self.cell()))
    }

    /// Resizes a picture to its [`fit`](Self::fit) and cuts it into patches.
    ///
    /// # Errors
    /// As [`fit`](Self::fit).
    pub fn cut(self, par: &dyn Parallel, picture: &Picture, budget: Budget) -> Result<Patches> {
        let (width, height) = self.fit(picture.width(), picture.height(), budget)?;
        if (width, height) == (picture.width(), picture.height()) {
            return Patches::new(picture, self.patch);
        }
        Patches::new(&resize(par, picture, width, height)?, self.patch)
    }
}

#[cfg(test)]
mod tests {
    use alloc::string::ToString;

    use proptest::prelude::*;

    use super::*;

    fn budgets() -> impl Strategy<Value = Budget> {
        proptest::sample::select(Budget::ALL.to_vec())
    }

    #[test]
    fn known_sizes() {
        let fit = |w, h, tokens| Tiling::GEMMA4V.fit(w, h, Budget::new(tokens).unwrap()).unwrap();
        assert_eq!(fit(480, 336, 70), (480, 336));
        assert_eq!(fit(480, 336, 280), (960, 672));
        assert_eq!(fit(96, 96, 280), (768, 768));
        // The long side is bounded by the budget, not only by the aspect ratio.
        assert_eq!(fit(1, 2000, 280), (48, 13440));
        assert_eq!(fit(100_000, 1, 1120), (53760, 48));
        // sqrt(280 / 300) is under 1: the short side of 1x300 would vanish; the ratio is over the budget.
        assert_eq!(fit(1, 300, 280), (48, 280 * 48));
        // At exactly the ratio of the budget the ordinary rule holds.
        assert_eq!(fit(280, 1, 280), (280 * 48, 48));
    }

    #[test]
    fn nothing_is_refused_by_name() {
        let error = Tiling::GEMMA4V.fit(0, 7, Budget::default()).unwrap_err();
        assert_eq!(error.to_string(), "a picture of 0x7 pixels");
        for (patch, pooling) in [(0, 3), (16, 0), (usize::MAX, 2), (65536, 2)] {
            assert_eq!(
                *Tiling::new(patch, pooling).unwrap_err().kind(),
                ErrorKind::Tiling { patch, pooling }
            );
        }
        assert_eq!(Tiling::new(16, 3), Ok(Tiling::GEMMA4V));
    }

    proptest! {
        #[test]
        fn a_fit_is_whole_cells_within_the_budget(
            width in 1_usize..1_000_000, height in 1_usize..1_000_000, budget in budgets(),
        ) {
            let (w, h) = Tiling::GEMMA4V.fit(width, height, budget).unwrap();
            prop_assert!(w > 0 && h > 0 && w % 48 == 0 && h % 48 == 0);
            let tokens = Tiling::GEMMA4V.soft_tokens(width, height, budget).unwrap();
            prop_assert_eq!(tokens, w * h / (48 * 48));
            prop_assert!(tokens <= budget.tokens());
        }

        #[test]
        fn turning_a_picture_turns_its_fit(
            width in 1_usize..10_000, height in 1_usize..10_000, budget in budgets(),
        ) {
            let (w, h) = Tiling::GEMMA4V.fit(width, height, budget).unwrap();
            prop_assert_eq!(Tiling::GEMMA4V.fit(height, width, budget).unwrap(), (h, w));
        }

        #[test]
        fn any_size_has_a_fit(width in 1_usize.., height in 1_usize.., budget in budgets()) {
            prop_assert!(Tiling::GEMMA4V.soft_tokens(width, height, budget).unwrap() <= budget.tokens());
        }
    }
}

use crate::{ErrorKind, Result};

/// Soft tokens that a picture may take at most.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Budget(usize);

impl Budget {
    /// Every budget that Gemma 4 was made for.
    pub const ALL: [Self; 5] = [Self(70), Self(140), Self(280), Self(560), Self(1120)];

    /// The budget of this many soft tokens.
    ///
    /// # Errors
    /// When it is not one of [`ALL`](Self::ALL).
    pub fn new(tokens: usize) -> Result<Self> {
        let budget = Self(tokens);
        if Self::ALL.contains(&budget) { Ok(budget) } else { Err(ErrorKind::Budget { tokens }.into()) }
    }

    /// The number of soft tokens.
    #[must_use]
    pub const fn tokens(self) -> usize {
        self.0
    }
}

impl Default for Budget {
    /// 280 soft tokens.
    fn default() -> Self {
        Self(280)
    }
}

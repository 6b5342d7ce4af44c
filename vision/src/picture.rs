use alloc::vec::Vec;
use core::fmt;

use sha2::{Digest, Sha256};

use crate::{ErrorKind, Result};

/// Pixels of a picture, 8 bits per channel: `[height, width, 3]`, red, green, blue.
#[derive(Clone, PartialEq, Eq)]
pub struct Picture {
    width: usize,
    height: usize,
    rgb: Vec<u8>,
}

impl Picture {
    /// A picture of these pixels.
    ///
    /// # Errors
    /// When a side is 0 or `rgb` is not `height * width * 3` bytes long.
    pub fn new(width: usize, height: usize, rgb: Vec<u8>) -> Result<Self> {
        let bytes = rgb.len();
        let expected = width.checked_mul(height).and_then(|pixels| pixels.checked_mul(3));
        if width == 0 || height == 0 || expected != Some(bytes) {
            return Err(ErrorKind::Size { width, height, bytes }.into());
        }
        Ok(Self { width, height, rgb })
    }

    /// Pixels of a row.
    #[must_use]
    pub const fn width(&self) -> usize {
        self.width
    }

    /// Rows.
    #[must_use]
    pub const fn height(&self) -> usize {
        self.height
    }

    /// The pixels, `[height, width, 3]`.
    #[must_use]
    pub fn rgb(&self) -> &[u8] {
        &self.rgb
    }

    /// The picture's identity: SHA-256 of its width and height (little-endian, 64 bits each) and its pixels.
    #[must_use]
    pub fn digest(&self) -> [u8; 32] {
        let mut hash = Sha256::new();
        hash.update((self.width as u64).to_le_bytes());
        hash.update((self.height as u64).to_le_bytes());
        hash.update(&self.rgb);
        hash.finalize().into()
    }
}

impl fmt::Debug for Picture {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Picture({}x{})", self.width, self.height)
    }
}

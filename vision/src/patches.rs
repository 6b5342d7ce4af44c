use alloc::vec::Vec;
use core::fmt;

use crate::{ErrorKind, Picture, Result};

/// A picture cut into square patches, as the patch embedding of the tower takes them.
///
/// `data` is `[rows * columns, 3 * patch * patch]`. Patches stand in raster order: patch `i` has the position
/// `(i % columns, i / columns)`. A patch is **channel-planar**, which is the order of a convolution weight
/// `[out, 3, patch, patch]`: its red plane, then green, then blue, each row-major. Values are `pixel / 255`, 0 to 1.
#[derive(Clone, PartialEq)]
pub struct Patches {
    columns: usize,
    rows: usize,
    patch: usize,
    data: Vec<f32>,
}

impl Patches {
    /// Cuts a picture into patches of `patch` x `patch` pixels.
    ///
    /// # Errors
    /// When a side of the picture is not a multiple of `patch`.
    pub fn new(picture: &Picture, patch: usize) -> Result<Self> {
        let (width, height) = (picture.width(), picture.height());
        if patch == 0 || !width.is_multiple_of(patch) || !height.is_multiple_of(patch) {
            return Err(ErrorKind::Uneven { width, height, patch }.into());
        }
        let (columns, rows) = (width / patch, height / patch);
        let mut data = Vec::with_capacity(width * height * 3);
        for row in 0..rows {
            for column in 0..columns {
                for channel in 0..3 {
                    for y in row * patch..(row + 1) * patch {
                        let at = y * width + column * patch;
                        let pixels = picture.rgb()[at * 3..(at + patch) * 3].chunks_exact(3);
                        data.extend(pixels.map(|pixel| f32::from(pixel[channel]) / 255.0));
                    }
                }
            }
        }
        Ok(Self { columns, rows, patch, data })
    }

    /// Patches side by side.
    #[must_use]
    pub const fn columns(&self) -> usize {
        self.columns
    }

    /// Patches one above the other.
    #[must_use]
    pub const fn rows(&self) -> usize {
        self.rows
    }

    /// Pixels of a patch's side.
    #[must_use]
    pub const fn patch(&self) -> usize {
        self.patch
    }

    /// The patch vectors, `[rows * columns, 3 * patch * patch]`.
    #[must_use]
    pub fn data(&self) -> &[f32] {
        &self.data
    }
}

impl fmt::Debug for Patches {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Patches({}x{} of {} pixels)", self.columns, self.rows, self.patch)
    }
}

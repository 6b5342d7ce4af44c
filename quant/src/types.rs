//! The element types of GGUF tensors.

use crate::blocks::{Q4_0, Q4_1, Q4K, Q5_0, Q5_1, Q5K, Q6K, Q8_0};
use crate::{Error, ErrorKind, Result};

/// A ggml element type: how the numbers of a tensor are stored.
///
/// Rows are cut in blocks of [`block_len`](Self::block_len) elements, each stored in
/// [`block_bytes`](Self::block_bytes) bytes; a block never spans two rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(non_camel_case_types)]
#[non_exhaustive]
pub enum Type {
    /// IEEE 754 binary32.
    F32,
    /// IEEE 754 binary16.
    F16,
    /// bfloat16: the upper half of a binary32.
    BF16,
    /// 32 elements: f16 scale, 4-bit codes with offset 8.
    Q4_0,
    /// 32 elements: f16 scale and minimum, 4-bit codes.
    Q4_1,
    /// 32 elements: f16 scale, 5-bit codes with offset 16.
    Q5_0,
    /// 32 elements: f16 scale and minimum, 5-bit codes.
    Q5_1,
    /// 32 elements: f16 scale, signed bytes.
    Q8_0,
    /// 256 elements: f16 super-scales, 8 sub-blocks with 6-bit scale and minimum, 4-bit codes.
    Q4_K,
    /// 256 elements: as [`Q4_K`](Self::Q4_K) with 5-bit codes.
    Q5_K,
    /// 256 elements: f16 super-scale, 16 sub-blocks with signed 8-bit scale, 6-bit codes with offset 32.
    Q6_K,
}

impl Type {
    /// Every supported type.
    pub const ALL: [Self; 11] = [
        Self::F32,
        Self::F16,
        Self::BF16,
        Self::Q4_0,
        Self::Q4_1,
        Self::Q5_0,
        Self::Q5_1,
        Self::Q8_0,
        Self::Q4_K,
        Self::Q5_K,
        Self::Q6_K,
    ];

    /// The type with this ggml id, as stored in GGUF tensor headers.
    ///
    /// # Errors
    /// [`ErrorKind::UnknownType`] when the id is not one of [`ALL`](Self::ALL).
    pub const fn from_id(id: u32) -> Result<Self> {
        Ok(match id {
            0 => Self::F32,
            1 => Self::F16,
            2 => Self::Q4_0,
            3 => Self::Q4_1,
            6 => Self::Q5_0,
            7 => Self::Q5_1,
            8 => Self::Q8_0,
            12 => Self::Q4_K,
            13 => Self::Q5_K,
            14 => Self::Q6_K,
            30 => Self::BF16,
            _ => return Err(Error::new(ErrorKind::UnknownType(id))),
        })
    }

    /// The ggml id.
    pub const fn id(self) -> u32 {
        match self {
            Self::F32 => 0,
            Self::F16 => 1,
            Self::Q4_0 => 2,
            Self::Q4_1 => 3,
            Self::Q5_0 => 6,
            Self::Q5_1 => 7,
            Self::Q8_0 => 8,
            Self::Q4_K => 12,
            Self::Q5_K => 13,
            Self::Q6_K => 14,
            Self::BF16 => 30,
        }
    }

    /// The name ggml prints, such as `Q4_K`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::F32 => "F32",
            Self::F16 => "F16",
            Self::BF16 => "BF16",
            Self::Q4_0 => "Q4_0",
            Self::Q4_1 => "Q4_1",
            Self::Q5_0 => "Q5_0",
            Self::Q5_1 => "Q5_1",
            Self::Q8_0 => "Q8_0",
            Self::Q4_K => "Q4_K",
            Self::Q5_K => "Q5_K",
            Self::Q6_K => "Q6_K",
        }
    }

    /// Elements in one block: 1, 32 or 256.
    pub const fn block_len(self) -> usize {
        match self {
            Self::F32 | Self::F16 | Self::BF16 => 1,
            Self::Q4_0 | Self::Q4_1 | Self::Q5_0 | Self::Q5_1 | Self::Q8_0 => 32,
            Self::Q4_K | Self::Q5_K | Self::Q6_K => 256,
        }
    }

    /// Bytes of one block.
    pub const fn block_bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::BF16 => 2,
            Self::Q4_0 => size_of::<Q4_0>(),
            Self::Q4_1 => size_of::<Q4_1>(),
            Self::Q5_0 => size_of::<Q5_0>(),
            Self::Q5_1 => size_of::<Q5_1>(),
            Self::Q8_0 => size_of::<Q8_0>(),
            Self::Q4_K => size_of::<Q4K>(),
            Self::Q5_K => size_of::<Q5K>(),
            Self::Q6_K => size_of::<Q6K>(),
        }
    }

    /// Bytes of a row of `cols` elements; `None` when `cols` is not a whole number of blocks or the size
    /// does not fit in `usize`.
    pub const fn row_bytes(self, cols: usize) -> Option<usize> {
        if !cols.is_multiple_of(self.block_len()) {
            return None;
        }
        (cols / self.block_len()).checked_mul(self.block_bytes())
    }

    /// Whether a block stores integer codes rather than floats.
    pub const fn is_quantised(self) -> bool {
        self.block_len() > 1
    }
}

impl core::fmt::Display for Type {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_round_trip_and_strangers_are_refused() {
        for ty in Type::ALL {
            assert_eq!(Type::from_id(ty.id()), Ok(ty));
        }
        let known: [u32; 11] = Type::ALL.map(Type::id);
        for id in (0..64).chain([u32::MAX]).filter(|id| !known.contains(id)) {
            assert_eq!(Type::from_id(id).unwrap_err().kind(), &ErrorKind::UnknownType(id));
        }
    }

    #[test]
    fn row_bytes_refuses_partial_blocks_and_overflow() {
        assert_eq!(Type::Q8_0.row_bytes(10_944), Some(342 * 34));
        assert_eq!(Type::Q4_K.row_bytes(10_944), None);
        assert_eq!(Type::Q6_K.row_bytes(512), Some(420));
        assert_eq!(Type::F32.row_bytes(usize::MAX), None);
        assert_eq!(Type::Q5_1.row_bytes(0), Some(0));
    }
}

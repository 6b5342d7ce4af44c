use alloc::boxed::Box;
use core::fmt;

use crate::error::{Error, ErrorKind, Result};

/// Most dimensions of a tensor.
pub const MAX_DIMS: usize = 4;

/// Most bytes of a tensor name.
pub const MAX_TENSOR_NAME: usize = 64;

/// How the elements of a tensor are stored: a ggml type.
///
/// All types that ggml defines can be named and measured, whether or not anything can compute with them.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct TensorType(u32);

macro_rules! tensor_types {
    ($($id:literal $name:ident $block_len:literal $block_bytes:literal, $doc:literal;)*) => {
        #[allow(non_upper_case_globals)] // ggml writes Q4_K and IQ2_XXS
        impl TensorType {
            $(#[doc = concat!("ggml type ", $id, ": ", $doc, ".")]
            pub const $name: Self = Self($id);)*

            /// All known types, in the order of their numbers.
            pub const ALL: &'static [Self] = &[$(Self($id)),*];

            const fn layout(self) -> (&'static str, u64, u64) {
                match self.0 {
                    $($id => (stringify!($name), $block_len, $block_bytes),)*
                    // A value of this type is only made from the numbers above.
                    _ => ("", 1, 0),
                }
            }
        }
    };
}

// Sizes: ggml's ggml.h and ggml-common.h.
tensor_types! {
    0 F32 1 4, "IEEE 754, 32 bits";
    1 F16 1 2, "IEEE 754, 16 bits";
    2 Q4_0 32 18, "4 bits, f16 scale";
    3 Q4_1 32 20, "4 bits, f16 scale and minimum";
    6 Q5_0 32 22, "5 bits, f16 scale";
    7 Q5_1 32 24, "5 bits, f16 scale and minimum";
    8 Q8_0 32 34, "8 bits, f16 scale";
    9 Q8_1 32 36, "8 bits, f16 scale and sum; for activations";
    10 Q2_K 256 84, "2 bits, super-blocks";
    11 Q3_K 256 110, "3 bits, super-blocks";
    12 Q4_K 256 144, "4 bits, super-blocks";
    13 Q5_K 256 176, "5 bits, super-blocks";
    14 Q6_K 256 210, "6 bits, super-blocks";
    15 Q8_K 256 292, "8 bits, f32 scale and sums; for activations";
    16 IQ2_XXS 256 66, "about 2.06 bits, codebook";
    17 IQ2_XS 256 74, "about 2.31 bits, codebook";
    18 IQ3_XXS 256 98, "about 3.06 bits, codebook";
    19 IQ1_S 256 50, "about 1.56 bits, codebook";
    20 IQ4_NL 32 18, "4 bits, non-linear levels";
    21 IQ3_S 256 110, "about 3.44 bits, codebook";
    22 IQ2_S 256 82, "about 2.56 bits, codebook";
    23 IQ4_XS 256 136, "4 bits, non-linear levels, super-blocks";
    24 I8 1 1, "signed integer, 8 bits";
    25 I16 1 2, "signed integer, 16 bits";
    26 I32 1 4, "signed integer, 32 bits";
    27 I64 1 8, "signed integer, 64 bits";
    28 F64 1 8, "IEEE 754, 64 bits";
    29 IQ1_M 256 56, "about 1.75 bits, codebook";
    30 BF16 1 2, "upper half of an IEEE 754 f32";
    34 TQ1_0 256 54, "ternary, about 1.69 bits";
    35 TQ2_0 256 66, "ternary, about 2.06 bits";
    39 MXFP4 32 17, "4-bit floats, E8M0 scale";
    40 NVFP4 64 36, "4-bit floats, four E4M3 scales";
    41 Q1_0 128 18, "1 bit, f16 scale";
    42 Q2_0 64 18, "2 bits, f16 scale";
}

impl TensorType {
    /// The type with this number in a file.
    ///
    /// # Errors
    /// [`ErrorKind::TensorType`] for a number that ggml does not define, [`ErrorKind::RemovedTensorType`] for one that
    /// it no longer does; both messages list the known types.
    pub fn from_id(id: u32) -> Result<Self> {
        if Self::ALL.contains(&Self(id)) {
            return Ok(Self(id));
        }
        let name = match id {
            4 => "Q4_2",
            5 => "Q4_3",
            31 => "Q4_0_4_4",
            32 => "Q4_0_4_8",
            33 => "Q4_0_8_8",
            36 => "IQ4_NL_4_4",
            37 => "IQ4_NL_4_8",
            38 => "IQ4_NL_8_8",
            _ => return Err(ErrorKind::TensorType { id }.into()),
        };
        Err(ErrorKind::RemovedTensorType { id, name }.into())
    }

    /// The number of the type in a file.
    pub const fn id(self) -> u32 {
        self.0
    }

    /// The name ggml gives it: `F32`, `Q4_K`.
    pub const fn name(self) -> &'static str {
        self.layout().0
    }

    /// Elements in a block; 1 for plain numbers.
    pub const fn block_len(self) -> u64 {
        self.layout().1
    }

    /// Bytes of a block.
    pub const fn block_bytes(self) -> u64 {
        self.layout().2
    }

    /// Bytes of `n` elements side by side; none when they are not whole blocks or the number overflows.
    pub const fn bytes_of(self, n: u64) -> Option<u64> {
        let (_, block_len, block_bytes) = self.layout();
        if !n.is_multiple_of(block_len) {
            return None;
        }
        (n / block_len).checked_mul(block_bytes)
    }
}

impl fmt::Display for TensorType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl fmt::Debug for TensorType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Shows the known types with their numbers.
pub(crate) struct KnownTypes;

impl fmt::Display for KnownTypes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, ty) in TensorType::ALL.iter().enumerate() {
            write!(f, "{}{} {}", if i == 0 { "" } else { ", " }, ty.0, ty.name())?;
        }
        Ok(())
    }
}

/// Name, shape, type and place of a tensor.
///
/// A value of this type belongs to the [`Gguf`](crate::Gguf), or the writer, that it came from: its sizes do not overflow,
/// its rows are whole blocks, and its data lies inside the file.
#[derive(Clone, PartialEq, Eq)]
pub struct TensorInfo {
    name: Box<str>,
    dims: [u64; MAX_DIMS],
    n_dims: u8,
    ty: TensorType,
    n_elements: u64,
    n_bytes: u64,
    offset: u64,
    part: usize,
}

impl TensorInfo {
    /// Checks the name, shape and type; the place is set later.
    pub(crate) fn new(name: &[u8], shape: &[u64], ty: TensorType) -> Result<Self> {
        let name = check_name(name, MAX_TENSOR_NAME)?;
        if shape.is_empty() || shape.len() > MAX_DIMS {
            return Err(ErrorKind::Dimensions(shape.len() as u64).into());
        }
        let row = shape[0];
        if !row.is_multiple_of(ty.block_len()) {
            return Err(ErrorKind::PartialBlock { row, ty: ty.name(), block: ty.block_len() }.into());
        }
        let too_large = || Error::from(ErrorKind::TensorSize { shape: shape.into() });
        let countable = |n: &u64| i64::try_from(*n).is_ok();
        let n_elements = shape
            .iter()
            .try_fold(1u64, |n, &dim| n.checked_mul(dim).filter(countable).filter(|_| countable(&dim)))
            .ok_or_else(too_large)?;
        let n_bytes = ty.bytes_of(n_elements).filter(countable).ok_or_else(too_large)?;
        let mut dims = [1; MAX_DIMS];
        dims[..shape.len()].copy_from_slice(shape);
        Ok(Self {
            name: name.into(),
            dims,
            n_dims: shape.len() as u8,
            ty,
            n_elements,
            n_bytes,
            offset: 0,
            part: 0,
        })
    }

    pub(crate) fn placed(mut self, offset: u64) -> Self {
        self.offset = offset;
        self
    }

    pub(crate) fn in_part(mut self, part: usize) -> Self {
        self.part = part;
        self
    }

    /// The name: `blk.0.attn_norm.weight`.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The shape, 1 to 4 numbers, innermost dimension (row length) first: the reverse of PyTorch's order.
    ///
    /// A dimension may be 0: such a tensor has no data.
    pub fn shape(&self) -> &[u64] {
        &self.dims[..usize::from(self.n_dims)]
    }

    /// How the elements are stored.
    pub fn ty(&self) -> TensorType {
        self.ty
    }

    /// Number of elements: the product of the shape, less than 2⁶³.
    pub fn n_elements(&self) -> u64 {
        self.n_elements
    }

    /// Bytes of the data, less than 2⁶³.
    pub fn n_bytes(&self) -> u64 {
        self.n_bytes
    }

    /// Byte offset of the data from the start of its file.
    pub fn offset(&self) -> u64 {
        self.offset
    }

    /// Which part of a split file holds the data, from 0.
    pub fn part(&self) -> usize {
        self.part
    }
}

impl fmt::Debug for TensorInfo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?} {} {:?} at {}", self.name, self.ty, self.shape(), self.offset)?;
        if self.part > 0 { write!(f, " of part {}", self.part) } else { Ok(()) }
    }
}

/// A name of a tensor or key: UTF-8, not empty, not over-long.
pub(crate) fn check_name(name: &[u8], max: usize) -> Result<&str> {
    if name.is_empty() {
        return Err(ErrorKind::EmptyName.into());
    }
    if name.len() > max {
        return Err(ErrorKind::LongName { length: name.len() as u64, max: max as u64 }.into());
    }
    core::str::from_utf8(name).map_err(|_| ErrorKind::NameNotUtf8 { name: name.into() }.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sizes(shape: &[u64], ty: TensorType) -> Result<(u64, u64)> {
        TensorInfo::new(b"t", shape, ty).map(|t| (t.n_elements(), t.n_bytes()))
    }

    #[test]
    fn sizes_beyond_32_bits_are_exact() {
        assert_eq!(sizes(&[4096, 1024, 512], TensorType::Q4_K).unwrap(), (1 << 31, (1 << 23) * 144));
        assert_eq!(
            sizes(&[4096, 1025, 512], TensorType::Q8_0).unwrap(),
            (4096 * 1025 * 512, 4096 * 1025 * 16 * 34)
        );
        assert_eq!(sizes(&[1 << 20, 1 << 12, 3], TensorType::F32).unwrap(), (3 << 32, 3 << 34));
    }

    #[test]
    fn sizes_that_wrap_64_bits_are_refused() {
        for shape in [
            &[1_048_576, 4_398_046_511_105][..],
            &[1 << 63, 2],
            &[u64::MAX],
            &[1 << 63],
            &[1 << 32, 1 << 32],
            &[0, 1 << 63],
            &[1 << 62, 4, 0],
        ] {
            for ty in [TensorType::F32, TensorType::F64, TensorType::I64] {
                let error = sizes(shape, ty).unwrap_err();
                assert!(matches!(error.kind(), ErrorKind::TensorSize { .. }), "{shape:?} {ty}: {error}");
            }
        }
        assert_eq!(sizes(&[0x7FFF_FFFF_FFFF_FFC0], TensorType::I8).unwrap().1, 0x7FFF_FFFF_FFFF_FFC0);
    }

    #[test]
    fn zero_sized_dimensions_have_no_data() {
        assert_eq!(sizes(&[0], TensorType::Q4_K).unwrap(), (0, 0));
        assert_eq!(sizes(&[256, 0, 7], TensorType::F32).unwrap(), (0, 0));
    }

    #[test]
    fn known_removed_and_unknown_numbers() {
        for &ty in TensorType::ALL {
            assert_eq!(TensorType::from_id(ty.id()).unwrap(), ty);
            assert!(ty.block_bytes() > 0 && !ty.name().is_empty());
        }
        for id in [4, 5, 31, 32, 33, 36, 37, 38] {
            let error = TensorType::from_id(id).unwrap_err();
            assert!(matches!(error.kind(), ErrorKind::RemovedTensorType { .. }), "{error}");
        }
        for id in [43, 142, 0x7FFF_FFFF, 0xFFFF_FFFF] {
            let error = TensorType::from_id(id).unwrap_err();
            assert!(matches!(error.kind(), ErrorKind::TensorType { .. }), "{error}");
        }
    }

    #[test]
    fn partial_blocks_have_no_size() {
        assert_eq!(TensorType::Q4_K.bytes_of(100), None);
        assert_eq!(TensorType::Q4_K.bytes_of(512), Some(288));
        assert_eq!(TensorType::F64.bytes_of(u64::MAX), None);
    }
}

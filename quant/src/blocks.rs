//! Memory layouts of the ggml block types.
//!
//! All fields are bytes, so that a block may lie at any address of a mapped file. Multi-byte numbers are little
//! endian. Layouts follow `ggml-common.h` of the ggml project.

use bytemuck::{Pod, Zeroable};

/// Elements in a small block.
pub const BLOCK: usize = 32;
/// Elements in a super-block of the K types.
pub const SUPER_BLOCK: usize = 256;

macro_rules! layouts {
    ($($(#[$doc:meta])* $name:ident, $bytes:literal { $($(#[$fdoc:meta])* $field:ident: $len:literal),* $(,)? })*) => {$(
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, Pod, Zeroable)]
        #[repr(C)]
        pub struct $name {
            $($(#[$fdoc])* pub $field: [u8; $len],)*
        }
        const _: () = assert!(size_of::<$name>() == $bytes && align_of::<$name>() == 1);
    )*};
}

layouts! {
    /// `x = d * (q - 8)`.
    Q4_0, 18 {
        /// f16 scale.
        d: 2,
        /// Codes: low nibbles are elements 0..16, high nibbles 16..32.
        qs: 16,
    }
    /// `x = d * q + m`.
    Q4_1, 20 {
        /// f16 scale.
        d: 2,
        /// f16 minimum.
        m: 2,
        /// Codes as in [`Q4_0`].
        qs: 16,
    }
    /// `x = d * (q - 16)`.
    Q5_0, 22 {
        /// f16 scale.
        d: 2,
        /// Fifth bits: bit `i` belongs to element `i`.
        qh: 4,
        /// Low four bits as in [`Q4_0`].
        qs: 16,
    }
    /// `x = d * q + m`.
    Q5_1, 24 {
        /// f16 scale.
        d: 2,
        /// f16 minimum.
        m: 2,
        /// Fifth bits: bit `i` belongs to element `i`.
        qh: 4,
        /// Low four bits as in [`Q4_0`].
        qs: 16,
    }
    /// `x = d * q`.
    Q8_0, 34 {
        /// f16 scale.
        d: 2,
        /// Signed codes.
        qs: 32,
    }
    /// `x = d * scale[j] * q - dmin * min[j]` for sub-blocks `j` of 32.
    Q4K, 144 {
        /// f16 scale of the sub-block scales.
        d: 2,
        /// f16 scale of the sub-block minima.
        dmin: 2,
        /// 8 scales and 8 minima of 6 bits, see [`six_bit_scales`].
        scales: 12,
        /// 4 runs of 32 bytes; a run's low nibbles are one sub-block, its high nibbles the next.
        qs: 128,
    }
    /// As [`Q4K`] with a fifth bit.
    Q5K, 176 {
        /// f16 scale of the sub-block scales.
        d: 2,
        /// f16 scale of the sub-block minima.
        dmin: 2,
        /// As in [`Q4K`].
        scales: 12,
        /// Fifth bits: bit `j` of byte `i` belongs to element `i` of sub-block `j`.
        qh: 32,
        /// Low four bits as in [`Q4K`].
        qs: 128,
    }
    /// `x = d * scale[j] * (q - 32)` for sub-blocks `j` of 16.
    Q6K, 210 {
        /// Low four bits: two halves of 64 bytes; low nibbles are elements 0..64 of the half, high nibbles 64..128.
        ql: 128,
        /// Upper two bits: two halves of 32 bytes; bit pair `p` of byte `i` belongs to element `32 p + i`.
        qh: 64,
        /// Signed sub-block scales.
        scales: 16,
        /// f16 super-scale.
        d: 2,
    }
}

/// The scales and minima of a [`Q4K`] or [`Q5K`] block, each as eight bytes (values 0..64, element 0 lowest).
#[inline]
pub const fn six_bit_scales(packed: &[u8; 12]) -> (u64, u64) {
    let [a, b, c, d, e, f, g, h, i, j, k, l] = *packed;
    let low = u64::from_le_bytes([a, b, c, d, e, f, g, h]);
    let nibbles = u32::from_le_bytes([i, j, k, l]) as u64;
    let first = low & 0x3f3f_3f3f_3f3f_3f3f;
    let second = ((low >> 2) & 0x3030_3030_3030_3030) | ((nibbles | (nibbles << 28)) & 0x0f0f_0f0f_0f0f_0f0f);
    ((first & 0xffff_ffff) | (second << 32), (first >> 32) | (second & !0xffff_ffff))
}

/// The value of a little-endian IEEE 754 binary16; exact, and a NaN stays a NaN.
#[inline]
pub const fn f16_to_f32(bytes: [u8; 2]) -> f32 {
    let bits = u16::from_le_bytes(bytes) as u32;
    let sign = (bits & 0x8000) << 16;
    let magnitude = (bits & 0x7fff) << 13;
    // The exponent bias grows by 112; scaling by 2^112 does that for subnormal halves too.
    let scaled = f32::from_bits(magnitude) * f32::from_bits(0x7780_0000);
    let value = if magnitude >= 0x0f80_0000 { magnitude | 0x7f80_0000 } else { scaled.to_bits() };
    f32::from_bits(value | sign)
}

/// The value of a little-endian bfloat16.
#[inline]
pub const fn bf16_to_f32(bytes: [u8; 2]) -> f32 {
    f32::from_bits((u16::from_le_bytes(bytes) as u32) << 16)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_half_converts_like_the_half_crate() {
        for bits in 0..=u16::MAX {
            let ours = f16_to_f32(bits.to_le_bytes());
            let theirs = half::f16::from_bits(bits).to_f32();
            assert!(ours.to_bits() == theirs.to_bits() || (ours.is_nan() && theirs.is_nan()), "{bits:#06x}");
            let ours = bf16_to_f32(bits.to_le_bytes());
            let theirs = half::bf16::from_bits(bits).to_f32();
            assert!(ours.to_bits() == theirs.to_bits() || (ours.is_nan() && theirs.is_nan()), "{bits:#06x}");
        }
    }

    #[test]
    fn six_bit_scales_follow_the_bit_table() {
        // Each packed bit on its own must reach exactly the bit the ggml table gives it.
        for bit in 0..96 {
            let mut packed = [0u8; 12];
            packed[bit / 8] = 1 << (bit % 8);
            let at = |byte: usize| u64::from(packed[byte]);
            let (mut scales, mut mins) = (0u64, 0u64);
            for j in 0..4 {
                scales |= (at(j) & 63) << (8 * j);
                mins |= (at(j + 4) & 63) << (8 * j);
                scales |= ((at(j + 8) & 15) | ((at(j) >> 6) << 4)) << (8 * (j + 4));
                mins |= ((at(j + 8) >> 4) | ((at(j + 4) >> 6) << 4)) << (8 * (j + 4));
            }
            assert_eq!(six_bit_scales(&packed), (scales, mins), "bit {bit}");
        }
    }
}

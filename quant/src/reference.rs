//! The plain scalar truth: what every fast path is tested against, and the definition of the quantised forms.
//!
//! Sums are taken in f64, so that a reference value is right to half an f32 ulp and only the fast path's own
//! rounding shows in a comparison.

use crate::Type;
use crate::blocks::{Q4_0, Q4_1, Q4K, Q5_0, Q5_1, Q5K, Q6K, Q8_0, f16_to_f32, six_bit_scales};
use crate::decode::decode_blocks;
use crate::math;

/// The dot product of one weight row (`ty` blocks of `x.len()` elements) with `x`.
///
/// # Panics
/// When `row` is not as long as `x.len()` elements need.
pub fn dot(ty: Type, row: &[u8], x: &[f32]) -> f32 {
    assert_eq!(ty.row_bytes(x.len()), Some(row.len()), "row of {} {ty} elements", x.len());
    let mut decoded = [0.0; 256];
    let len = ty.block_len();
    let mut sum = 0.0;
    for (bytes, x) in row.chunks_exact(ty.block_bytes()).zip(x.chunks_exact(len)) {
        decode_blocks(ty, bytes, &mut decoded[..len]);
        sum += decoded.iter().zip(x).map(|(w, x)| f64::from(*w) * f64::from(*x)).sum::<f64>();
    }
    sum as f32
}

/// Quantises one block of activations to signed bytes: returns the scale, and `x[i]` is about `scale * q[i]`.
///
/// The scale is `max |x| / 127` and codes are rounded to nearest, ties to even, as in ggml's Q8_0 and Q8_K. A
/// block with a non-finite value gets the scale NaN and zero codes, so that every product with it is NaN. A
/// block so small that `127 / max |x|` overflows (below 4e-37) is zero.
///
/// # Panics
/// When `q` and `x` differ in length.
pub fn quantise(x: &[f32], q: &mut [i8]) -> f32 {
    assert_eq!(x.len(), q.len());
    q.fill(0);
    if !x.iter().all(|x| x.is_finite()) {
        return f32::NAN;
    }
    let max = x.iter().fold(0.0f32, |max, x| max.max(x.abs()));
    let inverse = 127.0 / max;
    if !inverse.is_finite() {
        return 0.0;
    }
    for (q, x) in q.iter_mut().zip(x) {
        *q = math::round_ties_even(x * inverse) as i8;
    }
    max / 127.0
}

/// A block of 32 weights as integers: `x = d * q + m`.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct Unpacked32 {
    /// Signed codes, offsets applied.
    pub q: [i8; 32],
    /// Scale.
    pub d: f32,
    /// Minimum; 0 for the types without one.
    pub m: f32,
}

/// A super-block of 256 weights as integers: `x = d * scale[i / 16] * q - dmin * min[i / 32]`.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct Unpacked256 {
    /// Signed codes, offsets applied.
    pub q: [i8; 256],
    /// Scales of the runs of 16 elements.
    pub scale: [i16; 16],
    /// Minima of the runs of 32 elements; 0 for Q6_K.
    pub min: [i16; 8],
    /// Scale of the scales.
    pub d: f32,
    /// Scale of the minima; 0 for Q6_K.
    pub dmin: f32,
}

/// Unpacks one block of a 32-element type.
///
/// # Panics
/// When `ty` is not such a type or `block` is not one block.
pub fn unpack32(ty: Type, block: &[u8]) -> Unpacked32 {
    let mut q = [0i8; 32];
    let nibbles = |q: &mut [i8; 32], qs: &[u8; 16], qh: [u8; 4], offset: i8| {
        let high = u32::from_le_bytes(qh);
        for i in 0..16 {
            q[i] = ((qs[i] & 15) as i8 | (((high >> i) & 1) << 4) as i8) - offset;
            q[i + 16] = ((qs[i] >> 4) as i8 | (((high >> (i + 16)) & 1) << 4) as i8) - offset;
        }
    };
    let (d, m) = match ty {
        Type::Q4_0 => {
            let b: &Q4_0 = bytemuck::from_bytes(block);
            nibbles(&mut q, &b.qs, [0; 4], 8);
            (b.d, [0; 2])
        }
        Type::Q4_1 => {
            let b: &Q4_1 = bytemuck::from_bytes(block);
            nibbles(&mut q, &b.qs, [0; 4], 0);
            (b.d, b.m)
        }
        Type::Q5_0 => {
            let b: &Q5_0 = bytemuck::from_bytes(block);
            nibbles(&mut q, &b.qs, b.qh, 16);
            (b.d, [0; 2])
        }
        Type::Q5_1 => {
            let b: &Q5_1 = bytemuck::from_bytes(block);
            nibbles(&mut q, &b.qs, b.qh, 0);
            (b.d, b.m)
        }
        Type::Q8_0 => {
            let b: &Q8_0 = bytemuck::from_bytes(block);
            q = b.qs.map(|q| q as i8);
            (b.d, [0; 2])
        }
        _ => panic!("{ty} is not a type of 32-element blocks"),
    };
    Unpacked32 { q, d: f16_to_f32(d), m: f16_to_f32(m) }
}

/// Unpacks one super-block of a K type.
///
/// # Panics
/// When `ty` is not such a type or `block` is not one super-block.
pub fn unpack256(ty: Type, block: &[u8]) -> Unpacked256 {
    let mut u = Unpacked256 { q: [0; 256], scale: [0; 16], min: [0; 8], d: 0.0, dmin: 0.0 };
    let six_bit = |u: &mut Unpacked256, packed: &[u8; 12]| {
        let (scales, mins) = six_bit_scales(packed);
        u.scale = core::array::from_fn(|i| i16::from(scales.to_le_bytes()[i / 2]));
        u.min = mins.to_le_bytes().map(i16::from);
    };
    match ty {
        Type::Q4_K => {
            let b: &Q4K = bytemuck::from_bytes(block);
            six_bit(&mut u, &b.scales);
            u.q = core::array::from_fn(|i| {
                let (j, k) = (i / 32, i % 32);
                ((b.qs[32 * (j / 2) + k] >> (4 * (j % 2))) & 15) as i8
            });
            (u.d, u.dmin) = (f16_to_f32(b.d), f16_to_f32(b.dmin));
        }
        Type::Q5_K => {
            let b: &Q5K = bytemuck::from_bytes(block);
            six_bit(&mut u, &b.scales);
            u.q = core::array::from_fn(|i| {
                let (j, k) = (i / 32, i % 32);
                let low = (b.qs[32 * (j / 2) + k] >> (4 * (j % 2))) & 15;
                (low | (((b.qh[k] >> j) & 1) << 4)) as i8
            });
            (u.d, u.dmin) = (f16_to_f32(b.d), f16_to_f32(b.dmin));
        }
        Type::Q6_K => {
            let b: &Q6K = bytemuck::from_bytes(block);
            u.scale = b.scales.map(|s| i16::from(s as i8));
            u.q = core::array::from_fn(|i| {
                let (half, part, k) = (i / 128, i % 128 / 32, i % 32);
                let low = (b.ql[64 * half + 32 * (part % 2) + k] >> (4 * (part / 2))) & 15;
                let high = (b.qh[32 * half + k] >> (2 * part)) & 3;
                (low | (high << 4)) as i8 - 32
            });
            u.d = f16_to_f32(b.d);
        }
        _ => panic!("{ty} is not a type of 256-element blocks"),
    }
    u
}

/// `x / sqrt(mean(x^2) + eps)`, times `weight` where given (Zhang and Sennrich, 2019).
///
/// # Panics
/// When lengths differ.
#[cfg(any(feature = "std", feature = "libm"))]
pub fn rms_norm(x: &[f32], weight: Option<&[f32]>, eps: f32, out: &mut [f32]) {
    assert_eq!(x.len(), out.len());
    let mean = x.iter().map(|x| f64::from(*x) * f64::from(*x)).sum::<f64>() / x.len() as f64;
    let scale = 1.0 / math::sqrt(mean + f64::from(eps));
    for (i, out) in out.iter_mut().enumerate() {
        let weight = weight.map_or(1.0, |w| f64::from(w[i]));
        *out = (f64::from(x[i]) * scale * weight) as f32;
    }
}

/// The logistic function `1 / (1 + exp(-x))`.
#[cfg(any(feature = "std", feature = "libm"))]
pub fn sigmoid(x: f32) -> f32 {
    (1.0 / (1.0 + math::exp(-f64::from(x)))) as f32
}

/// The sigmoid linear unit `x * sigmoid(x)`.
#[cfg(any(feature = "std", feature = "libm"))]
pub fn silu(x: f32) -> f32 {
    let x = f64::from(x);
    (x / (1.0 + math::exp(-x))) as f32
}

/// `exp(x - max x)`, normalised to sum 1.
#[cfg(any(feature = "std", feature = "libm"))]
pub fn softmax_in_place(x: &mut [f32]) {
    let max = x.iter().fold(f32::NEG_INFINITY, |max, x| max.max(*x));
    let term = |x: f32| math::exp(f64::from(x) - f64::from(max));
    let sum: f64 = x.iter().map(|x| term(*x)).sum();
    for x in x {
        *x = (term(*x) / sum) as f32;
    }
}

//! Block decoding: ggml blocks to f32.

use crate::blocks::{Q4_0, Q4_1, Q4K, Q5_0, Q5_1, Q5K, Q6K, Q8_0, bf16_to_f32, f16_to_f32, six_bit_scales};
use crate::{Error, ErrorKind, Result, Type};

/// Decodes `out.len()` elements stored as `ty` in `bytes` to f32.
///
/// The result has the exact bits of the dequantiser in ggml's Python package `gguf`, for every finite scale; a
/// non-finite scale gives the infinities and NaNs that IEEE arithmetic gives. Needs no heap; part of a large
/// tensor is decoded by passing the bytes of some of its rows.
///
/// # Errors
/// [`ErrorKind::PartialBlock`] when `out.len()` is not a whole number of blocks, [`ErrorKind::DataLength`] when
/// `bytes` is not exactly as long as they need.
pub fn decode(ty: Type, bytes: &[u8], out: &mut [f32]) -> Result<()> {
    let cols = out.len();
    if !cols.is_multiple_of(ty.block_len()) {
        return Err(Error::new(ErrorKind::PartialBlock { ty, cols }));
    }
    let expected = ty.row_bytes(cols).ok_or(Error::new(ErrorKind::TooLarge { ty, rows: 1, cols }))?;
    if bytes.len() != expected {
        return Err(Error::new(ErrorKind::DataLength { ty, expected, got: bytes.len() }));
    }
    decode_blocks(ty, bytes, out);
    Ok(())
}

/// Decodes whole blocks; lengths were checked by the caller.
#[inline(always)]
pub(crate) fn decode_blocks(ty: Type, bytes: &[u8], out: &mut [f32]) {
    match ty {
        Type::F32 => {
            for (x, b) in out.iter_mut().zip(bytes.as_chunks().0) {
                *x = f32::from_le_bytes(*b);
            }
        }
        Type::F16 => {
            for (x, b) in out.iter_mut().zip(bytes.as_chunks().0) {
                *x = f16_to_f32(*b);
            }
        }
        Type::BF16 => {
            for (x, b) in out.iter_mut().zip(bytes.as_chunks().0) {
                *x = bf16_to_f32(*b);
            }
        }
        Type::Q4_0 => each(bytes, out, q4_0),
        Type::Q4_1 => each(bytes, out, q4_1),
        Type::Q5_0 => each(bytes, out, q5_0),
        Type::Q5_1 => each(bytes, out, q5_1),
        Type::Q8_0 => each(bytes, out, q8_0),
        Type::Q4_K => each(bytes, out, q4_k),
        Type::Q5_K => each(bytes, out, q5_k),
        Type::Q6_K => each(bytes, out, q6_k),
    }
}

#[inline(always)]
fn each<B: bytemuck::Pod, const N: usize>(bytes: &[u8], out: &mut [f32], one: impl Fn(&B, &mut [f32; N])) {
    for (block, x) in bytemuck::cast_slice::<u8, B>(bytes).iter().zip(out.as_chunks_mut().0) {
        one(block, x);
    }
}

#[inline(always)]
fn q4_0(b: &Q4_0, x: &mut [f32; 32]) {
    let d = f16_to_f32(b.d);
    for i in 0..16 {
        x[i] = d * f32::from((b.qs[i] & 15) as i8 - 8);
        x[i + 16] = d * f32::from((b.qs[i] >> 4) as i8 - 8);
    }
}

#[inline(always)]
fn q4_1(b: &Q4_1, x: &mut [f32; 32]) {
    let (d, m) = (f16_to_f32(b.d), f16_to_f32(b.m));
    for i in 0..16 {
        x[i] = d * f32::from(b.qs[i] & 15) + m;
        x[i + 16] = d * f32::from(b.qs[i] >> 4) + m;
    }
}

/// The 5-bit codes of elements `i` and `i + 16`.
#[inline(always)]
fn five_bits(qs: &[u8; 16], qh: [u8; 4], i: usize) -> (u8, u8) {
    let high = u32::from_le_bytes(qh);
    let bit = |element: usize| ((high >> element) as u8 & 1) << 4;
    ((qs[i] & 15) | bit(i), (qs[i] >> 4) | bit(i + 16))
}

#[inline(always)]
fn q5_0(b: &Q5_0, x: &mut [f32; 32]) {
    let d = f16_to_f32(b.d);
    for i in 0..16 {
        let (low, high) = five_bits(&b.qs, b.qh, i);
        x[i] = d * f32::from(low as i8 - 16);
        x[i + 16] = d * f32::from(high as i8 - 16);
    }
}

#[inline(always)]
fn q5_1(b: &Q5_1, x: &mut [f32; 32]) {
    let (d, m) = (f16_to_f32(b.d), f16_to_f32(b.m));
    for i in 0..16 {
        let (low, high) = five_bits(&b.qs, b.qh, i);
        x[i] = d * f32::from(low) + m;
        x[i + 16] = d * f32::from(high) + m;
    }
}

#[inline(always)]
fn q8_0(b: &Q8_0, x: &mut [f32; 32]) {
    let d = f16_to_f32(b.d);
    for (x, q) in x.iter_mut().zip(b.qs) {
        *x = f32::from(q as i8) * d;
    }
}

#[inline(always)]
fn q4_k(b: &Q4K, x: &mut [f32; 256]) {
    let (d, dmin) = (f16_to_f32(b.d), f16_to_f32(b.dmin));
    let (scales, mins) = six_bit_scales(&b.scales);
    let (scales, mins) = (scales.to_le_bytes(), mins.to_le_bytes());
    for (j, x) in x.as_chunks_mut::<32>().0.iter_mut().enumerate() {
        let (scale, min) = (d * f32::from(scales[j]), dmin * f32::from(mins[j]));
        let run = &b.qs.as_chunks::<32>().0[j / 2];
        for (x, q) in x.iter_mut().zip(run) {
            *x = scale * f32::from((q >> (4 * (j % 2))) & 15) - min;
        }
    }
}

#[inline(always)]
fn q5_k(b: &Q5K, x: &mut [f32; 256]) {
    let (d, dmin) = (f16_to_f32(b.d), f16_to_f32(b.dmin));
    let (scales, mins) = six_bit_scales(&b.scales);
    let (scales, mins) = (scales.to_le_bytes(), mins.to_le_bytes());
    for (j, x) in x.as_chunks_mut::<32>().0.iter_mut().enumerate() {
        let (scale, min) = (d * f32::from(scales[j]), dmin * f32::from(mins[j]));
        let run = &b.qs.as_chunks::<32>().0[j / 2];
        for ((x, q), h) in x.iter_mut().zip(run).zip(&b.qh) {
            let code = ((q >> (4 * (j % 2))) & 15) | (((h >> j) & 1) << 4);
            *x = scale * f32::from(code) - min;
        }
    }
}

#[inline(always)]
fn q6_k(b: &Q6K, x: &mut [f32; 256]) {
    let d = f16_to_f32(b.d);
    for (j, x) in x.as_chunks_mut::<32>().0.iter_mut().enumerate() {
        let (half, part) = (j / 4, j % 4);
        let low = &b.ql.as_chunks::<32>().0[2 * half + part % 2];
        let high = &b.qh.as_chunks::<32>().0[half];
        for (i, x) in x.iter_mut().enumerate() {
            let scale = d * f32::from(b.scales[2 * j + i / 16] as i8);
            let code = ((low[i] >> (4 * (part / 2))) & 15) | (((high[i] >> (2 * part)) & 3) << 4);
            *x = scale * f32::from(code as i8 - 32);
        }
    }
}

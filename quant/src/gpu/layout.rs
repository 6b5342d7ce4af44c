//! The layout of weights on a device.

use crate::blocks::{f16_to_f32, six_bit_scales};
use crate::{Matrix, Type};
use alloc::vec;
use alloc::vec::Vec;

/// Planes of a row of `units` units of 32 weights.
#[derive(Debug, Clone, Copy)]
struct Planes {
    high: usize,
    scale: usize,
    scales: usize,
    supers: usize,
    stride: usize,
}

/// Bytes per unit of the planes, and whether one scale of scales serves 8 units.
struct Shape {
    low: usize,
    high: usize,
    scale: usize,
    supers: usize,
    wide: bool,
}

fn shape(ty: Type) -> Option<Shape> {
    let shape = |low, high, scale, supers, wide| Some(Shape { low, high, scale, supers, wide });
    match ty {
        Type::Q4_0 => shape(16, 0, 0, 2, false),
        Type::Q4_1 => shape(16, 0, 0, 4, false),
        Type::Q5_0 => shape(16, 4, 0, 2, false),
        Type::Q5_1 => shape(16, 4, 0, 4, false),
        Type::Q8_0 => shape(32, 0, 0, 2, false),
        Type::Q4_K => shape(16, 0, 2, 4, true),
        Type::Q5_K => shape(16, 4, 2, 4, true),
        Type::Q6_K => shape(16, 8, 2, 2, true),
        Type::F32 | Type::F16 | Type::BF16 => None,
    }
}

impl Planes {
    fn new(shape: &Shape, cols: usize) -> Self {
        let units = cols / 32;
        let high = shape.low * units;
        let scale = high + (shape.high * units).next_multiple_of(16);
        let scales = scale + (shape.scale * units).next_multiple_of(16);
        let supers = if shape.wide { units / 8 } else { units };
        let stride = scales + (shape.supers * supers).next_multiple_of(16);
        Self { high, scale, scales, supers: shape.supers, stride }
    }
}

/// Bytes from one row of `cols` weights to the next, a multiple of 16.
///
/// # Panics
/// If rows of this type cannot have this length.
pub fn stride(ty: Type, cols: usize) -> usize {
    let bytes = ty.row_bytes(cols).unwrap_or_else(|| panic!("rows of {cols} {ty} elements"));
    match shape(ty) {
        Some(shape) => Planes::new(&shape, cols).stride,
        None => bytes.next_multiple_of(16),
    }
}

/// Packs rows of a file for a device.
///
/// # Panics
/// If `rows` is not whole rows, or `packed` has not [`stride`] bytes for each of them.
pub fn pack(ty: Type, cols: usize, rows: &[u8], packed: &mut [u8]) {
    let stride = stride(ty, cols);
    let row_bytes = ty.row_bytes(cols).unwrap_or_default();
    assert!(row_bytes > 0 && rows.len().is_multiple_of(row_bytes), "rows of {cols} {ty} elements");
    assert_eq!(packed.len(), rows.len() / row_bytes * stride, "packed rows of {cols} {ty} elements");
    for (row, packed) in rows.chunks_exact(row_bytes).zip(packed.chunks_exact_mut(stride)) {
        match shape(ty) {
            None => {
                let (whole, rest) = packed.split_at_mut(row_bytes);
                whole.copy_from_slice(row);
                rest.fill(0);
            }
            Some(shape) => {
                let planes = Planes::new(&shape, cols);
                packed[shape.low * (cols / 32)..].fill(0);
                for (index, block) in row.chunks_exact(ty.block_bytes()).enumerate() {
                    if shape.wide {
                        pack256(ty, block, index, planes, packed);
                    } else {
                        pack32(ty, block, index, planes, packed);
                    }
                }
            }
        }
    }
}

fn pack32(ty: Type, block: &[u8], unit: usize, planes: Planes, packed: &mut [u8]) {
    // d, and m where there is one, come first in every such block, then the fifth bits, then the codes in the device's order.
    let supers = planes.supers;
    packed[planes.scales + supers * unit..][..supers].copy_from_slice(&block[..supers]);
    if ty == Type::Q8_0 {
        packed[16 * unit..][..16].copy_from_slice(&block[2..18]);
        packed[planes.high / 2 + 16 * unit..][..16].copy_from_slice(&block[18..34]);
        return;
    }
    packed[16 * unit..][..16].copy_from_slice(&block[block.len() - 16..]);
    if matches!(ty, Type::Q5_0 | Type::Q5_1) {
        let bits = word(&block[supers..]);
        let high = (0..4).fold(0, |high, byte| high | (every_fourth(bits >> byte) << (8 * byte)));
        packed[planes.high + 4 * unit..][..4].copy_from_slice(&high.to_le_bytes());
    }
}

fn pack256(ty: Type, block: &[u8], index: usize, planes: Planes, packed: &mut [u8]) {
    let supers = planes.supers;
    let units: [usize; 8] = core::array::from_fn(|part| 8 * index + part);
    let scale_at = planes.scale + 16 * index;
    if ty == Type::Q6_K {
        let (low, high, scales, d) = (&block[..128], &block[128..192], &block[192..208], &block[208..]);
        packed[planes.scales + supers * index..][..supers].copy_from_slice(d);
        packed[scale_at..][..16].copy_from_slice(scales);
        for (part, unit) in units.into_iter().enumerate() {
            let (half, part) = (part / 4, part % 4);
            nibbles(&low[64 * half + 32 * (part % 2)..][..32], part >= 2, &mut packed[16 * unit..][..16]);
            let pairs = &high[32 * half..][..32];
            for (to, from) in
                packed[planes.high + 8 * unit..][..8].chunks_exact_mut(4).zip(pairs.chunks_exact(16))
            {
                let bits = from.chunks_exact(4).enumerate().fold(0, |bits, (j, four)| {
                    bits | (((word(four) >> (2 * part)) & 0x0303_0303) << (2 * j))
                });
                to.copy_from_slice(&bits.to_le_bytes());
            }
        }
        return;
    }
    packed[planes.scales + supers * index..][..supers].copy_from_slice(&block[..supers]);
    let mut six_bits = [0; 12];
    six_bits.copy_from_slice(&block[4..16]);
    let (scales, mins) = six_bit_scales(&six_bits);
    for (to, (scale, min)) in packed[scale_at..][..16]
        .chunks_exact_mut(2)
        .zip(scales.to_le_bytes().into_iter().zip(mins.to_le_bytes()))
    {
        to.copy_from_slice(&[scale, min]);
    }
    let low = &block[block.len() - 128..];
    for (part, unit) in units.into_iter().enumerate() {
        nibbles(&low[32 * (part / 2)..][..32], part % 2 == 1, &mut packed[16 * unit..][..16]);
        if ty == Type::Q5_K {
            let bits = block[16..48]
                .chunks_exact(4)
                .enumerate()
                .fold(0, |bits, (j, four)| bits | (((word(four) >> part) & 0x0101_0101) << j));
            packed[planes.high + 4 * unit..][..4].copy_from_slice(&bits.to_le_bytes());
        }
    }
}

/// The codes of 32 weights in the low or the high nibbles of 32 bytes, in the device's order.
fn nibbles(from: &[u8], high: bool, to: &mut [u8]) {
    let (first, second) = from.split_at(16);
    if high {
        to.iter_mut().zip(first.iter().zip(second)).for_each(|(to, (a, b))| *to = (a >> 4) | (b & 0xF0));
    } else {
        to.iter_mut().zip(first.iter().zip(second)).for_each(|(to, (a, b))| *to = (a & 0x0F) | (b << 4));
    }
}

fn word(bytes: &[u8]) -> u32 {
    u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]])
}

/// Bits 0, 4, ... 28 of a word as its lowest 8.
fn every_fourth(bits: u32) -> u32 {
    let bits = bits & 0x1111_1111;
    let bits = (bits | (bits >> 3)) & 0x0303_0303;
    let bits = (bits | (bits >> 6)) & 0x000F_000F;
    (bits | (bits >> 12)) & 0xFF
}

/// The numbers of packed rows: what [`decode`](crate::decode) makes of the rows they were packed from.
///
/// # Panics
/// As [`pack`].
pub fn unpack(ty: Type, cols: usize, packed: &[u8]) -> Vec<f32> {
    let stride = stride(ty, cols);
    assert!(packed.len().is_multiple_of(stride), "packed rows of {cols} {ty} elements");
    packed.chunks_exact(stride).flat_map(|row| unpack_row(ty, cols, row)).collect()
}

fn unpack_row(ty: Type, cols: usize, row: &[u8]) -> Vec<f32> {
    let Some(shape) = shape(ty) else {
        let bytes = ty.row_bytes(cols).unwrap_or_default();
        let mut out = vec![0.0; cols];
        let matrix = Matrix::new(ty, 1, cols, &row[..bytes]).expect("a row of this type");
        crate::decode(ty, matrix.row(0), &mut out).expect("a row of this type");
        return out;
    };
    let planes = Planes::new(&shape, cols);
    let half = |at: usize| f16_to_f32([row[at], row[at + 1]]);
    let mut out = Vec::with_capacity(cols);
    for i in 0..cols {
        let (unit, i) = (i / 32, i % 32);
        let (word, byte) = (i / 4, i % 4);
        let super_at = planes.scales + planes.supers * if shape.wide { unit / 8 } else { unit };
        let d = half(super_at);
        let m = if planes.supers == 4 { half(super_at + 2) } else { 0.0 };
        if ty == Type::Q8_0 {
            out.push(d * f32::from(row[i / 16 * planes.high / 2 + 16 * unit + i % 16] as i8));
            continue;
        }
        let low = row[16 * unit + i % 16] >> (4 * (i / 16)) & 15;
        let high = |width: usize| {
            let at = planes.high + width * unit;
            let words: Vec<u32> = row[at..at + width]
                .chunks_exact(4)
                .map(|bytes| u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]))
                .collect();
            match width {
                4 => words[0] >> (8 * byte + word) & 1,
                _ => words[word / 4] >> (8 * byte + 2 * (word % 4)) & 3,
            }
        };
        let code = f32::from(low) + if shape.high > 0 { 16.0 * high(shape.high) as f32 } else { 0.0 };
        let scale = |half: usize| row[planes.scale + 2 * unit + half];
        out.push(match ty {
            Type::Q4_0 => d * (code - 8.0),
            Type::Q5_0 => d * (code - 16.0),
            Type::Q4_1 | Type::Q5_1 => d * code + m,
            Type::Q6_K => d * f32::from(scale(i / 16) as i8) * (code - 32.0),
            _ => d * f32::from(scale(0)) * code - m * f32::from(scale(1)),
        });
    }
    out
}

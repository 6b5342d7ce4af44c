//! Portable kernels. They define, operation by operation, the float arithmetic that the SIMD kernels repeat.

pub(crate) mod vec;

use core::array;

use crate::activations::{Q8K, Q8x8};
use crate::decode::decode_blocks;
use crate::matmul::Tile;
use crate::reference::{Unpacked32, Unpacked256, quantise, unpack32, unpack256};

pub(crate) fn quantise_256(x: &[f32], blocks: &mut [Q8K]) {
    for (x, block) in x.as_chunks::<256>().0.iter().zip(blocks) {
        block.d = quantise(x, &mut block.q);
        block.sums16 = array::from_fn(|i| block.q[16 * i..][..16].iter().map(|q| i16::from(*q)).sum());
        block.sums32 = array::from_fn(|i| block.sums16[2 * i] + block.sums16[2 * i + 1]);
    }
}

pub(crate) fn quantise_32(x: &[f32], groups: &mut [Q8x8]) {
    for (x, group) in x.chunks(256).zip(groups) {
        for (i, x) in x.as_chunks::<32>().0.iter().enumerate() {
            group.d[i] = quantise(x, &mut group.q[i]);
            group.sums[i] = group.q[i].iter().map(|q| i32::from(*q)).sum();
        }
    }
}

pub(crate) fn fast(tile: &mut Tile<'_>) {
    let ty = tile.w.ty();
    for row in 0..tile.w.rows() {
        let blocks = tile.w.row(row).chunks_exact(ty.block_bytes());
        for i in 0..tile.out.tokens() {
            let token = tile.tokens.get(i);
            let mut sum = 0.0;
            if ty.block_len() == 256 {
                for (block, y) in blocks.clone().zip(tile.acts.q8k_row(token)) {
                    sum += term_256(&unpack256(ty, block), y);
                }
            } else {
                let y = tile.acts.q8x8_row(token);
                for (b, block) in blocks.clone().enumerate() {
                    sum += term_32(&unpack32(ty, block), &y[b / 8], b % 8);
                }
            }
            tile.out.put(i, row, &[sum]);
        }
    }
}

/// The contribution of one super-block to a dot product.
fn term_256(w: &Unpacked256, y: &Q8K) -> f32 {
    let run = |i: usize| -> i32 {
        let products = w.q[16 * i..][..16].iter().zip(&y.q[16 * i..][..16]);
        products.map(|(w, y)| i32::from(*w) * i32::from(*y)).sum()
    };
    let codes: i32 = (0..16).map(|i| i32::from(w.scale[i]) * run(i)).sum();
    let mins: i32 = (0..8).map(|i| i32::from(w.min[i]) * i32::from(y.sums32[i])).sum();
    (w.d * y.d) * codes as f32 - (w.dmin * y.d) * mins as f32
}

/// The contribution of one block of 32 to a dot product.
fn term_32(w: &Unpacked32, y: &Q8x8, i: usize) -> f32 {
    let codes: i32 = w.q.iter().zip(&y.q[i]).map(|(w, y)| i32::from(*w) * i32::from(*y)).sum();
    (w.d * y.d[i]) * codes as f32 + (w.m * y.d[i]) * y.sums[i] as f32
}

/// Partial sums of a float dot product: element `i` belongs to sum `i % LANES`.
pub(crate) const LANES: usize = 32;

pub(crate) fn exact(tile: &mut Tile<'_>) {
    let ty = tile.w.ty();
    let chunk_bytes = 256 / ty.block_len() * ty.block_bytes();
    let mut decoded = [0.0; 256];
    for row in 0..tile.w.rows() {
        for i in 0..tile.out.tokens() {
            let x = tile.acts.f32_row(tile.tokens.get(i));
            let mut lanes = [0.0; LANES];
            for (bytes, x) in tile.w.row(row).chunks(chunk_bytes).zip(x.chunks(256)) {
                decode_blocks(ty, bytes, &mut decoded[..x.len()]);
                for (k, (w, x)) in decoded.iter().zip(x).enumerate() {
                    lanes[k % LANES] = w.mul_add(*x, lanes[k % LANES]);
                }
            }
            tile.out.put(i, row, &[reduce(lanes)]);
        }
    }
}

/// Adds the partial sums: halves onto halves.
pub(crate) fn reduce(mut lanes: [f32; LANES]) -> f32 {
    let mut len = LANES / 2;
    while len > 0 {
        for i in 0..len {
            lanes[i] += lanes[i + len];
        }
        len /= 2;
    }
    lanes[0]
}

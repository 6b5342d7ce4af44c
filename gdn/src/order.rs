//! Moving weights and activations between the two [`HeadOrder`]s.
//!
//! With `k_heads` key heads and `r = v_heads / k_heads`, the head at grouped position `i·r + ρ` is the one at tiled position
//! `ρ·k_heads + i`. The order concerns eight tensors of a layer **as one set**: the value rows of `attn_qkv`, the rows of `attn_gate`,
//! `ssm_beta` and `ssm_alpha`, the entries of `ssm_a` and `ssm_dt`, the value channels of `ssm_conv1d`, and the input *columns* of
//! `ssm_out`. The norm weight is shared by all heads and has no order. Moving only some of them gives fluent nonsense.
//!
//! [`mix`](crate::reference::mix) takes either order, so there is usually nothing to move: say which one the file has. These functions
//! are for converting files and for tests.
//!
//! Rows may be moved in any representation, packed blocks included, because a row is a whole number of bytes ([`heads`], [`qkv`]).
//! Columns may be moved only in decoded f32 ([`columns`]): a block of 256 packed values (Q4_K, Q5_K, Q6_K) spans two heads of 128
//! columns that share its scales, so a packed head cannot leave its block. To change the order without decoding `ssm_out`, permute
//! its input instead: the rows that [`mix`](crate::reference::mix) returns, also with [`columns`].

use alloc::vec::Vec;

use crate::error::{Error, ErrorKind, Result};
use crate::shape::{HeadOrder, Shape};

/// Where the head at position `head` of the other order stands in order `to`.
///
/// # Panics
/// When `head` is not less than the number of value heads.
#[must_use]
pub const fn position(shape: &Shape, to: HeadOrder, head: usize) -> usize {
    assert!(head < shape.v_heads(), "value head out of range");
    match to {
        HeadOrder::Grouped => (head % shape.k_heads()) * shape.ratio() + head / shape.k_heads(),
        HeadOrder::Tiled => (head % shape.ratio()) * shape.k_heads() + head / shape.ratio(),
    }
}

/// Data with one equal part per value head, brought from the other order to order `to`.
///
/// For the rows of `attn_gate` (parts of `head_v_dim` rows), of `ssm_beta` and `ssm_alpha` (one row), the entries of `ssm_a` and
/// `ssm_dt` (one entry). `T` is f32, or u8 for packed rows.
///
/// # Errors
/// [`ErrorKind::Length`] when the data is not a whole number of elements per value head.
pub fn heads<T: Copy>(shape: &Shape, to: HeadOrder, data: &[T]) -> Result<Vec<T>> {
    let part = part(shape, data.len())?;
    let mut moved = data.to_vec();
    if part > 0 {
        move_parts(shape, to, data, &mut moved, part);
    }
    Ok(moved)
}

/// Data with one row per convolution channel (`attn_qkv`, `ssm_conv1d`): the value rows brought to order `to`, the query and key rows
/// left in place. `T` is f32, or u8 for packed rows.
///
/// # Errors
/// [`ErrorKind::Length`] when the data is not a whole number of elements per channel.
pub fn qkv<T: Copy>(shape: &Shape, to: HeadOrder, data: &[T]) -> Result<Vec<T>> {
    let row = data.len() / shape.conv_dim();
    if row * shape.conv_dim() != data.len() {
        return Err(Error::new(
            "data",
            ErrorKind::Length { expected: shape.conv_dim() * row.max(1), found: data.len() },
        ));
    }
    let mut moved = data.to_vec();
    if row > 0 {
        let values = 2 * shape.key_dim() * row;
        move_parts(shape, to, &data[values..], &mut moved[values..], row * shape.head_v_dim());
    }
    Ok(moved)
}

/// Decoded rows of `value_dim` columns (`ssm_out`, or the rows that enter it) with their columns brought to order `to`.
///
/// # Errors
/// [`ErrorKind::Length`] when the data is not a whole number of rows.
pub fn columns(shape: &Shape, to: HeadOrder, data: &[f32]) -> Result<Vec<f32>> {
    let width = shape.value_dim();
    if !data.len().is_multiple_of(width) {
        let expected = data.len().next_multiple_of(width);
        return Err(Error::new("data", ErrorKind::Length { expected, found: data.len() }));
    }
    let mut moved = data.to_vec();
    for (row, moved) in data.chunks_exact(width).zip(moved.chunks_exact_mut(width)) {
        move_parts(shape, to, row, moved, shape.head_v_dim());
    }
    Ok(moved)
}

fn part(shape: &Shape, len: usize) -> Result<usize> {
    if len.is_multiple_of(shape.v_heads()) {
        Ok(len / shape.v_heads())
    } else {
        let expected = len.next_multiple_of(shape.v_heads());
        Err(Error::new("data", ErrorKind::Length { expected, found: len }))
    }
}

fn move_parts<T: Copy>(shape: &Shape, to: HeadOrder, from: &[T], into: &mut [T], part: usize) {
    for (head, from) in from.chunks_exact(part).enumerate() {
        into[position(shape, to, head) * part..][..part].copy_from_slice(from);
    }
}

#[cfg(test)]
mod tests {
    use alloc::vec;

    use super::*;

    #[test]
    fn heads_move_as_the_converter_moves_them() {
        // Three value heads for each of two key heads: the two directions are not the same permutation.
        let shape = Shape::new(2, 6, 1, 1, 1, HeadOrder::Grouped).unwrap();
        let grouped = ["k0a", "k0b", "k0c", "k1a", "k1b", "k1c"];
        let tiled = heads(&shape, HeadOrder::Tiled, &grouped).unwrap();
        assert_eq!(tiled, ["k0a", "k1a", "k0b", "k1b", "k0c", "k1c"]);
        assert_eq!(heads(&shape, HeadOrder::Grouped, &tiled).unwrap(), grouped);
        assert_ne!(heads(&shape, HeadOrder::Tiled, &tiled).unwrap(), grouped);
    }

    #[test]
    fn positions_are_bijective_and_keep_the_pairing() {
        for k_heads in 1..6 {
            for ratio in 1..5 {
                let tiled = Shape::new(k_heads, k_heads * ratio, 1, 1, 1, HeadOrder::Tiled).unwrap();
                let grouped = tiled.with_order(HeadOrder::Grouped);
                for head in 0..tiled.v_heads() {
                    let there = position(&tiled, HeadOrder::Grouped, head);
                    assert_eq!(position(&tiled, HeadOrder::Tiled, there), head);
                    assert_eq!(tiled.k_head_of(head), grouped.k_head_of(there));
                }
            }
        }
    }

    #[test]
    fn packed_rows_move_whole_and_queries_and_keys_stay() {
        let shape = Shape::new(2, 4, 2, 2, 1, HeadOrder::Tiled).unwrap();
        // 8 rows of queries and keys, 8 of values; three bytes each.
        let rows: Vec<u8> = (0..16).flat_map(|row| [row, 100 + row, 200 + row]).collect();
        let moved = qkv(&shape, HeadOrder::Grouped, &rows).unwrap();
        let firsts: Vec<u8> = moved.chunks_exact(3).map(|row| row[0]).collect();
        assert_eq!(firsts, [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15]);
        assert!(moved.chunks_exact(3).all(|row| row[1] == row[0] + 100 && row[2] == row[0] + 200));
        assert_eq!(qkv(&shape, HeadOrder::Tiled, &moved).unwrap(), rows);
    }

    #[test]
    fn moved_columns_meet_moved_activations() {
        let shape = Shape::new(2, 4, 1, 3, 1, HeadOrder::Tiled).unwrap();
        let matrix: Vec<f32> = (0..5 * 12).map(|x| (x * x % 17) as f32).collect();
        let activation: Vec<f32> = (0..12).map(|x| (x * 7 % 5) as f32).collect();
        let product = |matrix: &[f32], x: &[f32]| -> Vec<f32> {
            matrix.chunks_exact(12).map(|row| row.iter().zip(x).map(|(w, x)| w * x).sum()).collect()
        };
        let moved_matrix = columns(&shape, HeadOrder::Grouped, &matrix).unwrap();
        let moved_activation = columns(&shape, HeadOrder::Grouped, &activation).unwrap();
        let expected = product(&matrix, &activation);
        assert_eq!(product(&moved_matrix, &moved_activation), expected);
        assert_ne!(product(&matrix, &moved_activation), expected);
    }

    #[test]
    fn uneven_data_is_refused() {
        let shape = Shape::new(2, 4, 2, 2, 1, HeadOrder::Tiled).unwrap();
        assert!(heads(&shape, HeadOrder::Tiled, &[0u8; 6]).is_err());
        assert!(qkv(&shape, HeadOrder::Tiled, &[0u8; 17]).is_err());
        assert!(columns(&shape, HeadOrder::Tiled, &[0.0; 9]).is_err());
        assert_eq!(columns(&shape, HeadOrder::Tiled, &[]).unwrap(), vec![0.0; 0]);
        assert_eq!(heads::<u8>(&shape, HeadOrder::Tiled, &[]).unwrap(), [0; 0]);
    }
}

//! Portable vector operations.

use super::{LANES, reduce};
use crate::vec::{sigmoid, silu};

pub(crate) fn dot(a: &[f32], b: &[f32]) -> f32 {
    let mut lanes = [0.0; LANES];
    for (k, (a, b)) in a.iter().zip(b).enumerate() {
        lanes[k % LANES] = a.mul_add(*b, lanes[k % LANES]);
    }
    reduce(lanes)
}

pub(crate) fn rms_norm(x: &[f32], weight: Option<&[f32]>, eps: f32, out: &mut [f32]) {
    let sum: f64 = x.iter().map(|x| f64::from(*x) * f64::from(*x)).sum();
    scale_rows(x, weight, eps, sum, out);
}

/// The second half of `rms_norm`, from the sum of squares on.
#[inline(always)]
pub(crate) fn scale_rows(x: &[f32], weight: Option<&[f32]>, eps: f32, sum: f64, out: &mut [f32]) {
    let scale = (1.0 / (sum / x.len() as f64 + f64::from(eps)).sqrt()) as f32;
    match weight {
        Some(weight) => {
            for ((out, x), w) in out.iter_mut().zip(x).zip(weight) {
                *out = x * scale * w;
            }
        }
        None => {
            for (out, x) in out.iter_mut().zip(x) {
                *out = x * scale;
            }
        }
    }
}

pub(crate) fn sigmoid_in_place(x: &mut [f32]) {
    for x in x {
        *x = sigmoid(*x);
    }
}

pub(crate) fn silu_in_place(x: &mut [f32]) {
    for x in x {
        *x = silu(*x);
    }
}

pub(crate) fn silu_mul(gate: &[f32], up: &[f32], out: &mut [f32]) {
    for ((out, gate), up) in out.iter_mut().zip(gate).zip(up) {
        *out = silu(*gate) * up;
    }
}

pub(crate) fn softmax_in_place(x: &mut [f32]) {
    let max = x.iter().fold(f32::NEG_INFINITY, |max, x| max.max(*x));
    let mut sum = 0.0f64;
    for x in x.iter_mut() {
        *x = (*x - max).exp();
        sum += f64::from(*x);
    }
    let inverse = (1.0 / sum) as f32;
    for x in x {
        *x *= inverse;
    }
}

#[inline(always)]
pub(crate) fn axpy(a: f32, x: &[f32], y: &mut [f32]) {
    for (y, x) in y.iter_mut().zip(x) {
        *y = a.mul_add(*x, *y);
    }
}

//! Small f32 vector operations that surround the products.
//!
//! All run on the calling thread with the kernels of [`Isa::detect`](crate::Isa::detect), and panic when
//! `SKEP_ISA` is unusable. The value of one element never depends on its neighbours' positions in memory or on
//! the slice's alignment.

use crate::cpu::Kernels;

/// The dot product of `a` and `b`.
///
/// # Panics
/// When the lengths differ.
pub fn dot(a: &[f32], b: &[f32]) -> f32 {
    Kernels::active().dot(a, b)
}

/// Root-mean-square normalisation: `out = x / sqrt(mean(x^2) + eps)`, times `weight` where given
/// (Zhang and Sennrich, 2019). The mean is accumulated in f64.
///
/// # Panics
/// When the lengths differ.
pub fn rms_norm(x: &[f32], weight: Option<&[f32]>, eps: f32, out: &mut [f32]) {
    Kernels::active().rms_norm(x, weight, eps, out);
}

/// The logistic function `1 / (1 + exp(-x))`.
pub fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + (-x).exp())
}

/// The sigmoid linear unit `x * sigmoid(x)`.
pub fn silu(x: f32) -> f32 {
    x / (1.0 + (-x).exp())
}

/// Replaces each element by its [`sigmoid`].
pub fn sigmoid_in_place(x: &mut [f32]) {
    Kernels::active().sigmoid_in_place(x);
}

/// Replaces each element by its [`silu`].
pub fn silu_in_place(x: &mut [f32]) {
    Kernels::active().silu_in_place(x);
}

/// The gate of a SwiGLU layer (Shazeer, 2020): `out = silu(gate) * up`.
///
/// # Panics
/// When the lengths differ.
pub fn silu_mul(gate: &[f32], up: &[f32], out: &mut [f32]) {
    Kernels::active().silu_mul(gate, up, out);
}

/// Replaces `x` by `exp(x - max x)`, normalised to sum 1. An element of minus infinity becomes 0.
///
/// When there is no finite or infinite maximum to subtract (all elements minus infinity, or one of plus
/// infinity or NaN) the result is NaN. An empty slice stays empty.
pub fn softmax_in_place(x: &mut [f32]) {
    Kernels::active().softmax_in_place(x);
}

/// `y += a * x`, each element with one rounding.
///
/// # Panics
/// When the lengths differ.
pub fn axpy(a: f32, x: &[f32], y: &mut [f32]) {
    Kernels::active().axpy(a, x, y);
}

use super::{Conv, Kernels, Rule};
use crate::form::CHUNK;
use crate::reference;

/// The steps as [`reference`] has them.
#[derive(Clone, Copy)]
pub(crate) struct Scalar;

impl Kernels for Scalar {
    fn prefers_chunks(self, _tokens: usize) -> bool {
        false
    }

    fn transpose(self, taps: &[f32], kernel: usize, out: &mut [f32]) {
        let width = taps.len() / kernel;
        for (c, taps) in taps.chunks_exact(kernel).enumerate() {
            for (j, &tap) in taps.iter().enumerate() {
                out[j * width + c] = tap;
            }
        }
    }

    fn conv_silu(self, conv: &Conv<'_>, first: usize, out: &mut [f32]) {
        for (t, out) in out.chunks_exact_mut(conv.width).enumerate() {
            out.fill(0.0);
            for (j, taps) in conv.taps.chunks_exact(conv.width).enumerate() {
                for ((out, x), tap) in out.iter_mut().zip(conv.row(first + t, j)).zip(taps) {
                    *out += x * tap;
                }
            }
            out.iter_mut().for_each(|x| *x = reference::silu(*x));
        }
    }

    fn l2_normalise(self, rows: &mut [f32], width: usize, scale: f32) {
        rows.chunks_exact_mut(width).for_each(|row| reference::l2_normalise(row, scale));
    }

    fn scores(self, _q: &[f32], _k: &[f32], _d_k: usize, _scores: &mut [f32]) {}

    fn chunked(self, rule: &Rule<'_>, _scores: &[f32], s: &mut [f32], o: &mut [f32], _work: &mut [f32]) {
        reference::chunked(CHUNK, rule.q, rule.k, rule.v, rule.g, rule.beta, s, o);
    }

    fn recurrent(self, rule: &Rule<'_>, s: &mut [f32], o: &mut [f32], _work: &mut [f32]) {
        reference::recurrent(rule.q, rule.k, rule.v, rule.g, rule.beta, s, o);
    }

    fn gated_norm(self, o: &[f32], norm: &[f32], eps: f32, z: &[f32], out: &mut [f32]) {
        reference::gated_norm(o, norm, eps, z, out);
    }
}

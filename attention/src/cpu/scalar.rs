use core::ops::Range;

use half::f16;

use super::{Ahead, Isa, KEYS};
use crate::{cache, math, reference};

/// Plain Rust, for processors without one of the instruction sets.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Scalar;

impl Isa for Scalar {
    fn widen(self, from: &[u16], to: &mut [f32]) {
        to.iter_mut().zip(from).for_each(|(to, &from)| *to = f16::from_bits(from).to_f32());
    }

    fn narrow(self, from: &[f32], to: &mut [u16]) {
        to.iter_mut().zip(from).for_each(|(to, &from)| *to = cache::narrow(from));
    }

    fn rms_norm(self, head: &mut [f32], weight: Option<&[f32]>, eps: f32) {
        reference::rms_norm(head, weight, eps);
    }

    fn scores(
        self,
        q: &[f32],
        k: &[f32],
        dim: usize,
        keys: Range<usize>,
        scale: f32,
        scores: &mut [f32],
        _ahead: Ahead<'_>,
    ) {
        for (q, scores) in q.chunks_exact(dim).zip(scores.chunks_exact_mut(KEYS)) {
            for j in keys.clone() {
                let k = &k[j * dim..][..dim];
                // Eight sums side by side keep the error small and let the compiler use what vectors there are.
                let mut sums = [0.0f32; 8];
                for (q, k) in q.as_chunks::<8>().0.iter().zip(k.as_chunks::<8>().0) {
                    for lane in 0..8 {
                        sums[lane] += q[lane] * k[lane];
                    }
                }
                scores[j] = scale * sums.iter().sum::<f32>();
            }
        }
    }

    fn softmax(self, scores: &mut [f32; KEYS], seen: Range<usize>, max: &mut f32, sum: &mut f32) -> f32 {
        scores[..seen.start].fill(0.0);
        scores[seen.end..].fill(0.0);
        let scores = &mut scores[seen];
        let new = scores.iter().fold(*max, |max, &score| max.max(score));
        let factor = if *sum == 0.0 { 0.0 } else { math::exp(*max - new) };
        scores.iter_mut().for_each(|score| *score = math::exp(*score - new));
        *sum = *sum * factor + scores.iter().sum::<f32>();
        *max = new;
        factor
    }

    fn weigh(
        self,
        weights: &[f32],
        v: &[f32],
        dim: usize,
        keys: Range<usize>,
        acc: &mut [f32],
        _ahead: Ahead<'_>,
    ) {
        for (weights, acc) in weights.chunks_exact(KEYS).zip(acc.chunks_exact_mut(dim)) {
            for j in keys.clone() {
                let (weight, v) = (weights[j], &v[j * dim..][..dim]);
                acc.iter_mut().zip(v).for_each(|(acc, v)| *acc += weight * v);
            }
        }
    }

    fn scale(self, acc: &mut [f32], factor: f32) {
        acc.iter_mut().for_each(|acc| *acc *= factor);
    }

    fn merge(self, acc: &mut [f32], a: f32, part: &[f32], b: f32) {
        acc.iter_mut().zip(part).for_each(|(acc, part)| *acc = *acc * a + part * b);
    }

    fn finish(self, acc: &[f32], factor: f32, gate: Option<&[f32]>, out: &mut [f32]) {
        match gate {
            Some(gate) => {
                for ((out, acc), &gate) in out.iter_mut().zip(acc).zip(gate) {
                    *out = acc * factor * math::sigmoid(gate);
                }
            }
            None => out.iter_mut().zip(acc).for_each(|(out, acc)| *out = acc * factor),
        }
    }
}

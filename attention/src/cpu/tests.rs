//! Each instruction set called directly, against f64 and against the definition of exactness in [`Isa`].

use alloc::vec;
use alloc::vec::Vec;

use half::f16;

use super::*;
use crate::{cache, reference};

/// Floats in `-scale..scale` from a multiplicative generator.
fn floats(seed: u64, len: usize, scale: f32) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        ((state >> 40) as f32 / (1u64 << 23) as f32 - 1.0) * scale
    };
    (0..len).map(|_| next()).collect()
}

#[track_caller]
fn assert_near(a: f32, b: f64, relative: f64, absolute: f64) {
    assert!((f64::from(a) - b).abs() <= relative * b.abs() + absolute, "{a} is not {b}");
}

/// Dimensions of padded rows: one step of every kind, and none of some.
const DIMS: [usize; 6] = [16, 32, 48, 96, 256, 272];

#[test]
fn every_half_widens_exactly() {
    for_each_isa!(isa => {
        let bits = (0..=u16::MAX).collect::<Vec<_>>();
        let mut wide = vec![0.0; bits.len()];
        isa.widen(&bits, &mut wide);
        for (bits, wide) in bits.iter().zip(&wide) {
            let expected = f16::from_bits(*bits).to_f32();
            assert!(
                wide.to_bits() == expected.to_bits() || (wide.is_nan() && expected.is_nan()),
                "{bits:#x}"
            );
        }
        for len in 0..20 {
            let mut wide = vec![0.0; len];
            isa.widen(&bits[100..100 + len], &mut wide);
            assert!(wide.iter().zip(&bits[100..]).all(|(w, b)| *w == f16::from_bits(*b).to_f32()));
        }
    });
}

#[test]
fn narrowing_is_that_of_the_cache() {
    for_each_isa!(isa => {
        // All halves, the middles between neighbours and what lies beside these.
        let mut values = Vec::new();
        for bits in 0..=u16::MAX {
            let value = f16::from_bits(bits).to_f32();
            let middle = (value + f16::from_bits(bits.wrapping_add(1)).to_f32()) / 2.0;
            let above = f32::from_bits(middle.to_bits().wrapping_add(1));
            let below = f32::from_bits(middle.to_bits().wrapping_sub(1));
            values.extend([value, middle, above, below]);
        }
        values.extend([f32::MAX, f32::MIN, f32::MIN_POSITIVE, 1e-45, -1e-45, 65519.0, 65520.0, 65536.0]);
        values.extend(floats(1, 1003, 1e5));
        let mut bits = vec![0; values.len()];
        isa.narrow(&values, &mut bits);
        for (value, bits) in values.iter().zip(&bits) {
            let (half, expected) = (f16::from_bits(*bits), f16::from_bits(cache::narrow(*value)));
            assert!(half.to_bits() == expected.to_bits() || (half.is_nan() && value.is_nan()), "{value}");
            assert_eq!(half.is_finite(), value.is_finite(), "{value}");
        }
    });
}

#[test]
fn rms_norm_of_any_length() {
    for_each_isa!(isa => {
        for len in [1, 2, 7, 8, 9, 63, 64, 128, 256, 257] {
            for scale in [0.0, 1e-6, 1.0, 1e4] {
                let (head, weight) = (floats(len as u64, len, scale), floats(9, len, 2.0));
                let mean = head.iter().map(|&x| f64::from(x).powi(2)).sum::<f64>() / len as f64;
                let factor = 1.0 / (mean + f64::from(1e-6f32)).sqrt();
                let (mut with, mut without, mut plain) = (head.clone(), head.clone(), head.clone());
                isa.rms_norm(&mut with, Some(&weight), 1e-6);
                isa.rms_norm(&mut without, None, 1e-6);
                reference::rms_norm(&mut plain, Some(&weight), 1e-6);
                for i in 0..len {
                    let expected = f64::from(head[i]) * factor;
                    assert_near(without[i], expected, 2e-6, 1e-12);
                    assert_near(with[i], expected * f64::from(weight[i]), 2e-6, 1e-12);
                    assert_near(plain[i], expected * f64::from(weight[i]), 2e-6, 1e-12);
                }
            }
        }
    });
}

#[test]
fn scores_are_dot_products_and_do_not_depend_on_company() {
    for_each_isa!(isa => {
        for dim in DIMS {
            let k = floats(3, KEYS * dim, 2.0);
            let q = floats(4, 5 * dim, 2.0);
            let mut all = vec![0.0; 5 * KEYS];
            isa.scores(&q, &k, dim, 0..KEYS, 0.3, &mut all, Ahead::NONE);
            for (i, j) in (0..5).flat_map(|i| (0..KEYS).map(move |j| (i, j))) {
                let (q, k) = (&q[i * dim..][..dim], &k[j * dim..][..dim]);
                let products = q.iter().zip(k).map(|(a, b)| f64::from(*a) * f64::from(*b));
                let (sum, size) = products.fold((0.0, 0.0), |(sum, size), p| (sum + p, size + p.abs()));
                assert_near(all[i * KEYS + j], sum * f64::from(0.3f32), 1e-6, 1e-6 * size);
            }
            for n in 1..=5 {
                for keys in [0..1, 3..9, 31..32, 5..32] {
                    let mut some = vec![f32::NAN; n * KEYS];
                    isa.scores(&q[..n * dim], &k, dim, keys.clone(), 0.3, &mut some, Ahead::new(Values::F32(&k)));
                    for (i, j) in (0..n).flat_map(|i| keys.clone().map(move |j| (i, j))) {
                        assert_eq!(some[i * KEYS + j].to_bits(), all[i * KEYS + j].to_bits());
                    }
                }
            }
        }
    });
}

#[test]
fn softmax_follows_the_definition() {
    for_each_isa!(isa => {
        for scale in [1.0, 20.0, 200.0, 2e5] {
            let (mut max, mut sum) = (f32::NEG_INFINITY, 0.0);
            let mut past = Vec::<f32>::new();
            for (block, seen) in [0..KEYS, 5..6, 0..17, 9..KEYS, 0..KEYS].into_iter().enumerate() {
                let mut scores = [0.0; KEYS];
                scores.copy_from_slice(&floats(block as u64 + 1, KEYS, scale));
                let given = scores;
                // What is not seen may be anything.
                scores[..seen.start].fill(f32::NAN);
                scores[seen.end..].fill(f32::INFINITY);
                let before = max;
                let factor = isa.softmax(&mut scores, seen.clone(), &mut max, &mut sum);
                past.extend(&given[seen.clone()]);
                let top = past.iter().copied().fold(f32::NEG_INFINITY, f32::max);
                assert_eq!(max, top);
                assert_near(
                    factor,
                    if block == 0 { 0.0 } else { f64::from(before - top).exp() },
                    1e-6,
                    1e-37,
                );
                for j in 0..KEYS {
                    let expected = if seen.contains(&j) { f64::from(given[j] - top).exp() } else { 0.0 };
                    // Below the normal range the result may be zero.
                    assert_near(scores[j], expected, 3e-7, 1.2e-38);
                }
                assert_near(sum, past.iter().map(|&s| f64::from(s - top).exp()).sum(), 1e-6, 0.0);
            }
        }
    });
}

#[test]
fn softmax_shows_what_is_not_finite() {
    for_each_isa!(isa => {
        for bad in [f32::NAN, f32::INFINITY] {
            for at in [0, 7, 8, 31] {
                let mut scores = [1.0; KEYS];
                scores[at] = bad;
                let (mut max, mut sum) = (0.5, 2.0);
                isa.softmax(&mut scores, 0..KEYS, &mut max, &mut sum);
                assert!(sum.is_nan(), "{bad} at {at}");
                // The next, clean block does not wash it away.
                isa.softmax(&mut [1.0; KEYS], 0..KEYS, &mut max, &mut sum);
                assert!(sum.is_nan(), "{bad} at {at}");
            }
        }
        let (mut max, mut sum) = (f32::NEG_INFINITY, 0.0);
        isa.softmax(&mut [f32::NEG_INFINITY; KEYS], 0..KEYS, &mut max, &mut sum);
        assert!(sum.is_nan(), "no score is finite");
        // A single one of minus infinity is simply no weight.
        let mut scores = [0.0; KEYS];
        scores[3] = f32::NEG_INFINITY;
        let (mut max, mut sum) = (f32::NEG_INFINITY, 0.0);
        isa.softmax(&mut scores, 0..KEYS, &mut max, &mut sum);
        assert_eq!((scores[3], scores[4], sum), (0.0, 1.0, 31.0));
    });
}

#[test]
fn weighed_sums_do_not_touch_other_keys_or_depend_on_company() {
    for_each_isa!(isa => {
        for dim in DIMS {
            for keys in [0..KEYS, 0..1, 7..20, 31..32, 9..9] {
                let mut v = floats(5, KEYS * dim, 2.0);
                v[..keys.start * dim].fill(f32::NAN);
                v[keys.end * dim..].fill(f32::INFINITY);
                let weights = floats(6, 5 * KEYS, 1.0);
                let start = floats(7, 5 * dim, 1.0);
                let mut all = start.clone();
                isa.weigh(&weights, &v, dim, keys.clone(), &mut all, Ahead::NONE);
                for (i, d) in (0..5).flat_map(|i| (0..dim).map(move |d| (i, d))) {
                    let terms =
                        keys.clone().map(|j| f64::from(weights[i * KEYS + j]) * f64::from(v[j * dim + d]));
                    let expected = f64::from(start[i * dim + d]) + terms.sum::<f64>();
                    assert_near(all[i * dim + d], expected, 1e-6, 2e-5);
                }
                for n in 1..5 {
                    let mut some = start[..n * dim].to_vec();
                    isa.weigh(&weights[..n * KEYS], &v, dim, keys.clone(), &mut some, Ahead::new(Values::F32(&v)));
                    assert!(some.iter().zip(&all).all(|(a, b)| a.to_bits() == b.to_bits()));
                }
            }
        }
    });
}

#[test]
fn scaling_merging_finishing() {
    for_each_isa!(isa => {
        for dim in DIMS {
            let (acc, part) = (floats(1, dim, 3.0), floats(2, dim, 3.0));
            let mut scaled = acc.clone();
            isa.scale(&mut scaled, 0.3);
            let mut merged = acc.clone();
            isa.merge(&mut merged, 0.25, &part, 0.75);
            for i in 0..dim {
                assert_eq!(scaled[i], acc[i] * 0.3);
                assert_near(merged[i], f64::from(acc[i]) * 0.25 + f64::from(part[i]) * 0.75, 2e-7, 2e-7);
            }
            for len in [dim, dim - 1, dim - 7, dim - 9, 1] {
                let mut gate = floats(3, len, 20.0);
                for (gate, special) in gate.iter_mut().rev().zip([-0.0, 0.0, -200.0, 200.0, f32::INFINITY]) {
                    *gate = special;
                }
                let mut gated = vec![f32::NAN; len];
                isa.finish(&acc, 0.7, Some(&gate), &mut gated);
                let mut plain = vec![f32::NAN; len];
                isa.finish(&acc, 0.7, None, &mut plain);
                for i in 0..len {
                    assert_eq!(plain[i], acc[i] * 0.7);
                    let sigmoid = 1.0 / (1.0 + (-f64::from(gate[i])).exp());
                    assert_near(gated[i], f64::from(plain[i]) * sigmoid, 5e-7, 1e-37);
                }
            }
        }
        let mut out = [0.0; 16];
        let mut gate = [0.0; 16];
        (gate[2], gate[9]) = (f32::NAN, f32::NEG_INFINITY);
        isa.finish(&[2.0; 16], 1.0, Some(&gate), &mut out);
        assert!(out[2].is_nan() && out[9] == 0.0 && out[3] == 1.0);
    });
}

//! The vector operations of every instruction set against the scalar truth.

use crate::kernels;
use crate::samples::{KINDS, Kind, Random, activations};
use skep_quant::cpu::Kernels;
use skep_quant::{Isa, reference};

const LENGTHS: [usize; 9] = [0, 1, 7, 8, 15, 31, 32, 256, 1031];

/// Asserts `|a - b| <= relative * |b| + absolute`, and NaN for NaN.
fn assert_close(a: f32, b: f32, relative: f32, absolute: f32, what: &dyn core::fmt::Debug) {
    let same = a == b || (a.is_nan() && b.is_nan());
    assert!(same || (a - b).abs() <= relative * b.abs() + absolute, "{what:?}: {a:e} for {b:e}");
}

#[test]
fn dot_and_axpy_match() {
    let mut random = Random::new(3);
    for len in LENGTHS {
        let a = activations(Kind::HeavyTailed, len, &mut random);
        let b = activations(Kind::Normal, len, &mut random);
        let exact: f64 = a.iter().zip(&b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum();
        let magnitude: f64 = a.iter().zip(&b).map(|(a, b)| f64::from(a * b).abs()).sum();
        let scalar = Kernels::of(Isa::Scalar).unwrap();
        for k in kernels() {
            assert_close(k.dot(&a, &b), exact as f32, 0.0, magnitude as f32 * 1e-6, &(k.isa(), len));
            assert_eq!(k.dot(&a, &b).to_bits(), scalar.dot(&a, &b).to_bits());
            let mut y = b.clone();
            k.axpy(0.37, &a, &mut y);
            for ((y, a), b) in y.iter().zip(&a).zip(&b) {
                assert_eq!(*y, (0.37f32).mul_add(*a, *b));
            }
        }
    }
}

#[test]
fn rms_norm_matches() {
    let mut random = Random::new(4);
    for len in &LENGTHS[1..] {
        for kind in KINDS {
            let x = activations(kind, *len, &mut random);
            let weight = activations(Kind::Normal, *len, &mut random);
            for weight in [None, Some(&weight[..])] {
                let mut expected = vec![0.0; *len];
                reference::rms_norm(&x, weight, 1e-6, &mut expected);
                for k in kernels() {
                    let mut out = vec![f32::NAN; *len];
                    k.rms_norm(&x, weight, 1e-6, &mut out);
                    for (a, b) in out.iter().zip(&expected) {
                        assert_close(*a, *b, 2.5e-7, 0.0, &(k.isa(), len, kind));
                    }
                }
            }
        }
    }
}

/// Every 10,007th float in -110..110, and the special ones.
fn sweep() -> Vec<f32> {
    let mut x: Vec<f32> = (0..110f32.to_bits()).step_by(10_007).map(f32::from_bits).collect();
    x.extend(x.clone().iter().map(|x| -x));
    x.extend([f32::INFINITY, f32::NAN, f32::MAX, f32::MIN, -88.0, -103.9]);
    x
}

#[test]
fn sigmoid_and_silu_match_over_the_range() {
    let x = sweep();
    for k in kernels() {
        let (mut sigmoid, mut silu) = (x.clone(), x.clone());
        k.sigmoid_in_place(&mut sigmoid);
        k.silu_in_place(&mut silu);
        for (i, x) in x.iter().enumerate() {
            // Below exp(-87) the intermediate 1 + exp(-x) overflows: absolute error of the smallest normals.
            assert_close(sigmoid[i], reference::sigmoid(*x), 3e-7, 1.2e-38, &(k.isa(), "sigmoid", x));
            assert_close(silu[i], reference::silu(*x), 4e-7, 1.2e-36, &(k.isa(), "silu", x));
        }
        let up: Vec<f32> = x.iter().map(|x| x * 0.5 + 1.0).collect();
        let mut out = vec![0.0; x.len()];
        k.silu_mul(&x, &up, &mut out);
        for i in 0..x.len() {
            assert_close(out[i], silu[i] * up[i], 0.0, 0.0, &(k.isa(), "silu_mul", x[i]));
        }
    }
}

#[test]
fn exponentials_are_within_two_ulp() {
    // A softmax of (x, 0) with x <= 0 far below shows exp(x) itself: 1 / (1 + exp(x)) is 1 for x < -17.
    for k in kernels() {
        for x in sweep().into_iter().filter(|x| (-87.0..-17.4).contains(x)) {
            let mut pair = [x, 0.0];
            k.softmax_in_place(&mut pair);
            let expected = f64::from(x).exp() as f32;
            let ulps = (pair[0].to_bits() as i64 - expected.to_bits() as i64).abs();
            assert!(ulps <= 2, "{:?} exp({x}): {:e} for {expected:e}", k.isa(), pair[0]);
        }
        let mut pair = [-100.0, 0.0];
        k.softmax_in_place(&mut pair);
        assert_close(pair[0], (-100f32).exp(), 0.0, 3e-45, &k.isa());
    }
}

#[test]
fn softmax_matches() {
    let mut random = Random::new(5);
    for len in LENGTHS {
        for kind in KINDS {
            let x = activations(kind, len, &mut random);
            let mut expected = x.clone();
            reference::softmax_in_place(&mut expected);
            for k in kernels() {
                let mut out = x.clone();
                k.softmax_in_place(&mut out);
                for (a, b) in out.iter().zip(&expected) {
                    assert_close(*a, *b, 5e-7, 1e-44, &(k.isa(), len, kind));
                }
            }
        }
    }
    for k in kernels() {
        let mut masked = [1.0, f32::NEG_INFINITY, 1.0];
        k.softmax_in_place(&mut masked);
        assert_eq!(masked, [0.5, 0.0, 0.5]);
        for hostile in [[f32::NEG_INFINITY; 2], [f32::NAN, 0.0], [f32::INFINITY, 0.0]] {
            let mut x = hostile;
            k.softmax_in_place(&mut x);
            assert!(x.iter().all(|x| x.is_nan()), "{:?} {hostile:?}", k.isa());
        }
    }
}

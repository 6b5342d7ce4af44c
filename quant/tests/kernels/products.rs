//! Every kernel of every instruction set against the scalar truth.

use crate::kernels;
use crate::samples::{KINDS, Kind, Random, activations, weights};
use skep_quant::cpu::Kernels;
use skep_quant::{Activations, Forms, Isa, Matrix, Precision, Serial, Type, reference};

fn product(
    kernels: &Kernels,
    ty: Type,
    (rows, cols, tokens): (usize, usize, usize),
    data: &[u8],
    x: &[f32],
    precision: Precision,
) -> Vec<f32> {
    let w = Matrix::new(ty, rows, cols, data).unwrap();
    let mut acts = Activations::new();
    acts.fill_with(kernels, &Serial, x, cols, Forms::of(ty, precision));
    let list: Vec<u32> = (0..tokens as u32).collect();
    let mut out = vec![f32::NAN; tokens * rows];
    kernels.matmul_tile(w, 0..rows, &acts, &list, precision, &mut out);
    out
}

/// Column counts: one block, odd counts, and for the float types any tail.
fn columns(ty: Type) -> &'static [usize] {
    match ty.block_len() {
        256 => &[256, 768, 1024],
        32 => &[32, 42 * 32, 256, 9 * 32],
        _ => &[1, 31, 256, 300, 1027],
    }
}

#[test]
fn products_match_the_reference() {
    let mut random = Random::new(1);
    for ty in Type::ALL {
        for &cols in columns(ty) {
            for (rows, tokens) in [(1, 1), (7, 2), (8, 3), (13, 9)] {
                for kind in KINDS {
                    let data = weights(ty, rows, cols, &mut random);
                    let x = activations(kind, tokens * cols, &mut random);
                    let w = Matrix::new(ty, rows, cols, &data).unwrap();
                    for k in kernels() {
                        for precision in [Precision::Exact, Precision::Fast] {
                            let out = product(&k, ty, (rows, cols, tokens), &data, &x, precision);
                            for (i, x) in x.chunks(cols).enumerate() {
                                check_row(&w, i, x, &out[i * rows..][..rows], precision, (k.isa(), kind));
                            }
                        }
                    }
                }
            }
        }
    }
}

/// Compares the products of one token with the reference, within the error its arithmetic may have.
fn check_row(w: &Matrix<'_>, token: usize, x: &[f32], out: &[f32], precision: Precision, what: (Isa, Kind)) {
    for (r, out) in out.iter().enumerate() {
        let row = w.row(r);
        let mut decoded = vec![0.0; x.len()];
        skep_quant::decode(w.ty(), row, &mut decoded).unwrap();
        let expected = reference::dot(w.ty(), row, x);
        // Rounding of the sums, relative to the sum of magnitudes (K types: scale and minimum apart).
        let magnitude: f64 = decoded.iter().zip(x).map(|(w, x)| f64::from(w * x).abs()).sum();
        let spread = decoded.iter().fold(0.0f32, |max, w| max.max(w.abs())) as f64;
        let norm: f64 = x.iter().map(|x| f64::from(x.abs())).sum();
        let mut allowed = 1e-6 * magnitude + 4e-6 * spread * norm + 1e-30;
        if precision == Precision::Fast && w.ty().is_quantised() {
            // Each activation is off by at most half a step of its block.
            for (w, x) in decoded.chunks(w.ty().block_len()).zip(x.chunks(w.ty().block_len())) {
                let step = x.iter().fold(0.0f32, |max, x| max.max(x.abs())) / 127.0;
                allowed += w.iter().map(|w| f64::from(w.abs() * step * 0.5001)).sum::<f64>();
            }
        }
        let error = (f64::from(*out) - f64::from(expected)).abs();
        assert!(
            error <= allowed,
            "{} {what:?} {precision:?} row {r} of {} x {}, token {token}: {out} for {expected}, off {error:e} > {allowed:e}",
            w.ty(),
            w.rows(),
            w.cols()
        );
    }
}

#[test]
fn instruction_sets_agree_bit_for_bit() {
    let mut random = Random::new(2);
    for ty in Type::ALL {
        for &cols in columns(ty) {
            for tokens in 1..=9 {
                let rows = 19;
                let data = weights(ty, rows, cols, &mut random);
                let kind = KINDS[tokens % KINDS.len()];
                let x = activations(kind, tokens * cols, &mut random);
                for precision in [Precision::Exact, Precision::Fast] {
                    let truth = Kernels::of(Isa::Scalar).unwrap();
                    let shape = (rows, cols, tokens);
                    let expected = product(&truth, ty, shape, &data, &x, precision);
                    for k in kernels() {
                        let out = product(&k, ty, shape, &data, &x, precision);
                        for (i, (a, b)) in out.iter().zip(&expected).enumerate() {
                            assert!(
                                a.to_bits() == b.to_bits(),
                                "{ty} {:?} {precision:?} {kind:?} {shape:?} [{i}]: {a:e} for {b:e}",
                                k.isa()
                            );
                        }
                    }
                }
            }
        }
    }
}

/// Tiles, groups and blocks of tokens, spans of columns, and what is left over of each.
#[test]
fn instruction_sets_agree_on_large_float_products() {
    let mut random = Random::new(10);
    for (ty, cols) in [
        (Type::F32, 1601),
        (Type::F32, 3330),
        (Type::BF16, 33),
        (Type::BF16, 1600),
        (Type::F16, 3299),
        (Type::Q8_0, 1632),
        (Type::Q5_K, 3328),
    ] {
        for (rows, tokens) in [(16, 4), (17, 25), (23, 49), (40, 76)] {
            let data = weights(ty, rows, cols, &mut random);
            let mut x = activations(Kind::Normal, tokens * cols, &mut random);
            // Products that vanish leave zeros of either sign.
            x[..cols].fill(-1e-38);
            let shape = (rows, cols, tokens);
            let truth = Kernels::of(Isa::Scalar).unwrap();
            let expected = product(&truth, ty, shape, &data, &x, Precision::Exact);
            for k in kernels() {
                let out = product(&k, ty, shape, &data, &x, Precision::Exact);
                let same = out.iter().zip(&expected).all(|(a, b)| a.to_bits() == b.to_bits());
                assert!(same, "{ty} {:?} {shape:?}", k.isa());
            }
        }
    }
}

/// The value in every byte of the codes that brings sums of products to their largest magnitude.
#[test]
fn extreme_codes_do_not_saturate() {
    let mut random = Random::new(3);
    for ty in Type::ALL.into_iter().filter(|ty| ty.is_quantised()) {
        let (rows, cols) = (9, 2 * 256);
        for byte in [0x00, 0x7f, 0x80, 0x81, 0xff] {
            let mut data = weights(ty, rows, cols, &mut random);
            for block in data.chunks_mut(ty.block_bytes()) {
                let scales = match ty {
                    Type::Q6_K => 208..210,
                    Type::Q4_0 | Type::Q5_0 | Type::Q8_0 => 0..2,
                    _ => 0..4,
                };
                for (i, b) in block.iter_mut().enumerate() {
                    if !scales.contains(&i) {
                        *b = byte;
                    }
                }
            }
            for tokens in [1, 9] {
                for pattern in [[1.0, 1.0], [-1.0, -1.0], [1.0, -1.0]] {
                    let x: Vec<f32> = (0..tokens * cols).map(|i| pattern[i % 2]).collect();
                    let w = Matrix::new(ty, rows, cols, &data).unwrap();
                    let scalar = Kernels::of(Isa::Scalar).unwrap();
                    let shape = (rows, cols, tokens);
                    let expected = product(&scalar, ty, shape, &data, &x, Precision::Fast);
                    check_row(
                        &w,
                        0,
                        &x[..cols],
                        &expected[..rows],
                        Precision::Exact,
                        (Isa::Scalar, Kind::AllEqual),
                    );
                    for k in kernels() {
                        let out = product(&k, ty, shape, &data, &x, Precision::Fast);
                        assert_eq!(out, expected, "{ty} {:?} codes {byte:#x} {pattern:?}", k.isa());
                    }
                }
            }
        }
    }
}

#[test]
fn a_value_that_is_not_finite_makes_its_own_token_nan() {
    let mut random = Random::new(4);
    for ty in Type::ALL {
        let (rows, cols, tokens) = (10, 512, 9);
        let data = weights(ty, rows, cols, &mut random);
        let clean = activations(Kind::Normal, tokens * cols, &mut random);
        for hostile in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let mut x = clean.clone();
            x[3 * cols + 300] = hostile;
            for k in kernels() {
                for precision in [Precision::Exact, Precision::Fast] {
                    let shape = (rows, cols, tokens);
                    let before = product(&k, ty, shape, &data, &clean, precision);
                    let after = product(&k, ty, shape, &data, &x, precision);
                    for (i, (a, b)) in after.iter().zip(&before).enumerate() {
                        let what = (ty, k.isa(), precision, hostile);
                        if i / rows != 3 {
                            assert_eq!(a.to_bits(), b.to_bits(), "{what:?}");
                        } else if hostile.is_nan() || (precision == Precision::Fast && ty.is_quantised()) {
                            assert!(a.is_nan(), "{what:?} {a}");
                        } else {
                            assert!(!a.is_finite(), "{what:?} {a}");
                        }
                    }
                }
            }
        }
    }
}

#[test]
fn a_scale_that_is_not_finite_stays_in_its_row() {
    let mut random = Random::new(5);
    for ty in Type::ALL.into_iter().filter(|ty| ty.is_quantised()) {
        let (rows, cols) = (10, 512);
        let clean = weights(ty, rows, cols, &mut random);
        let scale = if ty == Type::Q6_K { 208 } else { 0 };
        for hostile in [0x7c00u16, 0x7e00, 0xfc00, 0xffff] {
            let mut data = clean.clone();
            data[4 * ty.row_bytes(cols).unwrap() + scale..][..2].copy_from_slice(&hostile.to_le_bytes());
            for tokens in [1, 9] {
                let x = activations(Kind::Normal, tokens * cols, &mut random);
                for k in kernels() {
                    for precision in [Precision::Exact, Precision::Fast] {
                        let shape = (rows, cols, tokens);
                        let before = product(&k, ty, shape, &clean, &x, precision);
                        let after = product(&k, ty, shape, &data, &x, precision);
                        for (i, (a, b)) in after.iter().zip(&before).enumerate() {
                            if i % rows == 4 {
                                assert!(!a.is_finite(), "{ty} {:?} {a}", k.isa());
                            } else {
                                assert_eq!(a.to_bits(), b.to_bits(), "{ty} {:?}", k.isa());
                            }
                        }
                    }
                }
            }
        }
    }
}

#[test]
fn huge_and_tiny_activations_stay_finite() {
    let mut random = Random::new(6);
    for ty in Type::ALL.into_iter().filter(|ty| ty.is_quantised()) {
        let data = weights(ty, 9, 512, &mut random);
        for scale in [1e-45f32, 1e-38, 1e-37, 1e30] {
            let x: Vec<f32> = (0..512).map(|i| scale * (1 + i % 7) as f32).collect();
            let w = Matrix::new(ty, 9, 512, &data).unwrap();
            for k in kernels() {
                let out = product(&k, ty, (9, 512, 1), &data, &x, Precision::Fast);
                for (r, out) in out.iter().enumerate() {
                    let expected = reference::dot(ty, w.row(r), &x);
                    // Below 4e-37 a block counts as zero.
                    let allowed = 0.02 * 512.0 * 7.0 * f64::from(scale) + 512.0 * 4e-37;
                    assert!(out.is_finite(), "{ty} {scale:e} {out}");
                    assert!(
                        (f64::from(*out) - f64::from(expected)).abs() < allowed,
                        "{ty} {scale:e}: {out:e} for {expected:e}"
                    );
                }
            }
        }
    }
}

#[test]
fn float_weights_may_lie_at_any_address() {
    let mut random = Random::new(8);
    for ty in [Type::F32, Type::F16, Type::BF16] {
        let data = weights(ty, 3, 77, &mut random);
        let x = activations(Kind::Normal, 77, &mut random);
        for k in kernels() {
            let expected = product(&k, ty, (3, 77, 1), &data, &x, Precision::Fast);
            for shift in 1..4 {
                let mut moved = vec![0; data.len() + shift];
                moved[shift..].copy_from_slice(&data);
                assert_eq!(product(&k, ty, (3, 77, 1), &moved[shift..], &x, Precision::Fast), expected);
            }
        }
    }
}

#[test]
#[should_panic(expected = "activations lack the form that Q4_K weights need")]
fn a_missing_form_is_named() {
    let data = [0; 144];
    let w = Matrix::new(Type::Q4_K, 1, 256, &data).unwrap();
    let mut acts = Activations::new();
    acts.fill(&Serial, &[0.0; 256], 256, Forms::F32 | Forms::Q8_0);
    skep_quant::matmul_tile(w, 0..1, &acts, &[0], Precision::Fast, &mut [0.0]);
}

#[test]
#[should_panic(expected = "token 1 of a batch of 1")]
fn a_token_outside_the_batch_is_refused() {
    let data = [0; 4];
    let w = Matrix::new(Type::F32, 1, 1, &data).unwrap();
    let mut acts = Activations::new();
    acts.fill(&Serial, &[0.0], 1, Forms::F32);
    skep_quant::matmul_tile(w, 0..1, &acts, &[1], Precision::Fast, &mut [0.0]);
}

/// The noise of signed-byte activations: a step of max / 127 of a block, uniform, is 0.66 % of normal values with
/// 256 to a block and 0.48 % with 32.
#[test]
fn fast_products_are_as_precise_as_their_activations() {
    let mut random = Random::new(9);
    for ty in Type::ALL.into_iter().filter(|ty| ty.is_quantised()) {
        let shape = (64, 2048, 4);
        let data = weights(ty, shape.0, shape.1, &mut random);
        let x = activations(Kind::Normal, shape.1 * shape.2, &mut random);
        for k in kernels() {
            let exact = product(&k, ty, shape, &data, &x, Precision::Exact);
            let fast = product(&k, ty, shape, &data, &x, Precision::Fast);
            let power: f32 = exact.iter().map(|x| x * x).sum();
            let noise: f32 = exact.iter().zip(&fast).map(|(a, b)| (a - b) * (a - b)).sum();
            let relative = (noise / power).sqrt();
            assert!((1e-4..9e-3).contains(&relative), "{ty} {:?}: {relative:e}", k.isa());
        }
    }
}

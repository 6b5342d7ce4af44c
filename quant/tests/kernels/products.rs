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

//! Kernels on devices, against the scalar reference.
#![cfg(feature = "gpu")]

use proptest::prelude::*;
use skep_hal::gpu::testing::devices;
use skep_hal::gpu::{Device, Memory, Stream};
use skep_quant::gpu::{Acts, Gate, Kernels, Matrix, Product, pack, stride, top_k_scratch, unpack};
use skep_quant::{Type, reference};

/// A generator of plain numbers, the same in every run.
struct Random(u64);

impl Random {
    fn bits(&mut self) -> u32 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as u32
    }

    fn number(&mut self) -> f32 {
        self.bits() as f32 / (1_u32 << 30) as f32 - 1.0
    }

    fn numbers(&mut self, n: usize) -> Vec<f32> {
        (0..n).map(|_| self.number()).collect()
    }

    /// Rows of any bytes, with the f16 and f32 numbers among them of ordinary size.
    fn weights(&mut self, ty: Type, rows: usize, cols: usize) -> Vec<u8> {
        let half = |x: f32| half::f16::from_f32(x).to_le_bytes();
        let mut bytes = Vec::new();
        while bytes.len() < rows * ty.row_bytes(cols).unwrap() {
            let mut block: Vec<u8> = (0..ty.block_bytes()).map(|_| self.bits() as u8).collect();
            let scale = half(0.01 * (1.5 + self.number()));
            let shift = half(0.02 * self.number());
            match ty {
                Type::F32 => block.copy_from_slice(&self.number().to_le_bytes()),
                Type::F16 => block.copy_from_slice(&half(self.number())),
                Type::BF16 => block.copy_from_slice(&half::bf16::from_f32(self.number()).to_le_bytes()),
                Type::Q6_K => block[208..].copy_from_slice(&scale),
                Type::Q4_1 | Type::Q5_1 | Type::Q4_K | Type::Q5_K => {
                    block[..2].copy_from_slice(&scale);
                    block[2..4].copy_from_slice(&shift);
                }
                _ => block[..2].copy_from_slice(&scale),
            }
            bytes.extend(block);
        }
        bytes
    }
}

fn rows_of(ty: Type, cols: usize, bytes: &[u8]) -> Vec<Vec<f32>> {
    bytes
        .chunks_exact(ty.row_bytes(cols).unwrap())
        .map(|row| {
            let mut out = vec![0.0; cols];
            skep_quant::decode(ty, row, &mut out).unwrap();
            out
        })
        .collect()
}

fn download(stream: &Stream, memory: &Memory, n: usize) -> Vec<f32> {
    let mut out = vec![0.0; n];
    memory.view().download(stream, &mut out).unwrap();
    out
}

struct Bench {
    device: Device,
    stream: Stream,
    kernels: Kernels,
}

fn everywhere(test: impl Fn(&Bench)) {
    for device in devices() {
        let stream = Stream::new(&device).unwrap();
        let kernels = Kernels::load(&device).unwrap();
        test(&Bench { device, stream, kernels });
    }
}

#[test]
fn packed_rows_hold_the_same_numbers_bit_for_bit() {
    let mut random = Random(1);
    for ty in Type::ALL {
        for cols in [ty.block_len().max(32), 512, 1280] {
            let mut bytes = random.weights(ty, 3, cols);
            // Whatever stands in the scales too: denormals, infinities, NaN.
            let wild: Vec<u8> = (0..bytes.len()).map(|_| random.bits() as u8).collect();
            bytes.extend(wild);
            let mut packed = vec![0xAA; 6 * stride(ty, cols)];
            pack(ty, cols, &bytes, &mut packed);
            let want = rows_of(ty, cols, &bytes).concat();
            let found = unpack(ty, cols, &packed);
            for (i, (want, found)) in want.iter().zip(&found).enumerate() {
                let same = want.to_bits() == found.to_bits() || want.is_nan() && found.is_nan();
                assert!(same, "{ty} {cols} {i}: {want} {found}");
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn any_bytes_of_any_type_are_packed_without_loss(
        which in 0..Type::ALL.len(),
        blocks in 1_usize..40,
        rows in 1_usize..4,
        seed in any::<u64>(),
    ) {
        let ty = Type::ALL[which];
        let cols = 32 * (blocks * ty.block_len()).div_ceil(32);
        let mut random = Random(seed);
        let bytes: Vec<u8> = (0..rows * ty.row_bytes(cols).unwrap()).map(|_| random.bits() as u8).collect();
        let mut packed = vec![0xAA; rows * stride(ty, cols)];
        pack(ty, cols, &bytes, &mut packed);
        let want = rows_of(ty, cols, &bytes).concat();
        let same = |(want, found): (&f32, &f32)| want.to_bits() == found.to_bits() || want.is_nan() && found.is_nan();
        prop_assert!(want.iter().zip(&unpack(ty, cols, &packed)).all(same), "{ty} {rows}x{cols}");
    }
}

#[test]
fn embeddings_are_decoded_bit_for_bit() {
    everywhere(|Bench { device, stream, kernels }| {
        let mut random = Random(2);
        for ty in Type::ALL {
            let (rows, cols) = (7, 512);
            let bytes = random.weights(ty, rows, cols);
            let table = Matrix::upload(stream, ty, rows, cols, 1, &bytes).unwrap();
            let ids = Memory::of(stream, &[6_u32, 0, 3, 3, 7]).unwrap();
            let out = Memory::new(device, 4 * 5 * cols).unwrap();
            kernels.embed(stream, table.view(), ids.view(), 5, 1.0, out.view()).unwrap();
            let found = download(stream, &out, 5 * cols);
            let want = rows_of(ty, cols, &bytes);
            for (found, id) in found.chunks_exact(cols).zip([6, 0, 3, 3]) {
                let bits = |row: &[f32]| row.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
                assert_eq!(bits(found), bits(&want[id]), "{ty} {:?}", device.driver().caps());
            }
            assert!(found[4 * cols..].iter().all(|x| x.is_nan()), "an id outside the table");
        }
    });
}

/// The largest difference to the reference in units of what the rounding of activations can make.
fn worst(want: &[f64], found: &[f32], spread: &[f64]) -> f64 {
    want.iter().zip(found).zip(spread).map(|((w, f), s)| (w - f64::from(*f)).abs() / s).fold(0.0, f64::max)
}

fn product_case(
    bench: &Bench,
    random: &mut Random,
    types: &[Type],
    rows: &[usize],
    cols: usize,
    n: usize,
    hostile: bool,
) {
    let Bench { device, stream, kernels } = bench;
    let mut x = random.numbers(n * cols);
    if hostile {
        for (t, row) in x.chunks_exact_mut(cols).enumerate() {
            match t % 4 {
                0 => row.fill(1.0),
                1 => row.iter_mut().step_by(37).for_each(|x| *x *= 1e4),
                2 => row.fill(0.0),
                _ => row.iter_mut().for_each(|x| *x *= 1e-30),
            }
        }
    }
    let input = Memory::of(stream, &x).unwrap();
    let acts = Acts::new(device, n, cols).unwrap();
    kernels.quantise(stream, input.view(), n, cols, &acts).unwrap();
    let weights: Vec<(Vec<u8>, Matrix, Memory)> = types
        .iter()
        .zip(rows)
        .map(|(&ty, &rows)| {
            let bytes = random.weights(ty, rows, cols);
            let matrix = Matrix::upload(stream, ty, rows, cols, 1, &bytes).unwrap();
            let out = Memory::new(device, 4 * n * rows).unwrap();
            // What is not written stays NaN.
            out.view().fill(stream, 0xFF).unwrap();
            (bytes, matrix, out)
        })
        .collect();
    for add in [false, true] {
        let products: Vec<Product<'_>> = weights
            .iter()
            .map(|(_, matrix, out)| Product { weight: matrix.view(), out: out.view(), add })
            .collect();
        kernels.matmul(stream, &products, &acts, n).unwrap();
        for ((&ty, &rows), (bytes, _, out)) in types.iter().zip(rows).zip(&weights) {
            let found = download(stream, out, n * rows);
            let decoded = rows_of(ty, cols, bytes);
            let (mut want, mut spread) = (Vec::new(), Vec::new());
            for x in x.chunks_exact(cols) {
                for row in &decoded {
                    let times = if add { 2.0 } else { 1.0 };
                    want.push(
                        times * row.iter().zip(x).map(|(w, x)| f64::from(*w) * f64::from(*x)).sum::<f64>(),
                    );
                    // Half a step of the codes for every activation, at random; f16 and f32 are finer.
                    let step = |x: &[f32]| x.iter().fold(0.0_f32, |most, x| most.max(x.abs())) / 127.0;
                    let squares: f64 = row
                        .chunks_exact(32)
                        .zip(x.chunks_exact(32))
                        .map(|(w, x)| {
                            let sum: f64 = w.iter().map(|w| f64::from(*w).powi(2)).sum();
                            sum * f64::from(step(x)).powi(2) / 12.0
                        })
                        .sum();
                    let size: f64 =
                        row.iter().zip(x).map(|(w, x)| (f64::from(*w) * f64::from(*x)).abs()).sum();
                    let rounding = match ty {
                        Type::F32 => size * 1e-6,
                        // Both factors are rounded.
                        _ if n > 32 => size * 1e-3,
                        Type::F16 | Type::BF16 => size * 1e-6,
                        _ => 6.0 * squares.sqrt() + size * 1e-6,
                    };
                    spread.push(times * rounding + 1e-37);
                }
            }
            let worst = worst(&want, &found, &spread);
            assert!(worst <= 1.0, "{ty} {rows}x{cols} n {n} add {add}: {worst} {:?}", device.driver().caps());
        }
    }
}

#[test]
fn products_with_few_rows_match_the_reference() {
    everywhere(|bench| {
        let mut random = Random(3);
        for (n, cols) in [(1, 2048), (2, 256), (3, 768), (5, 512), (8, 1280)] {
            for types in Type::ALL.chunks(4) {
                let rows: Vec<usize> = [33, 1, 130, 8][..types.len()].to_vec();
                product_case(bench, &mut random, types, &rows, cols, n, n == 5);
            }
        }
        // More than one group of rows of activations.
        for (n, cols, hostile) in [(9, 256, true), (17, 512, false), (32, 256, false)] {
            let types = [Type::Q4_K, Type::Q6_K, Type::Q8_0, Type::F32];
            product_case(bench, &mut random, &types, &[33, 1, 5, 8], cols, n, hostile);
        }
        // Rows so few that all waves of a block share them.
        for ty in Type::ALL {
            product_case(bench, &mut random, &[ty], &[3], 4096, 1, false);
            product_case(bench, &mut random, &[ty], &[2], 2048 + ty.block_len().max(32), 6, false);
        }
        // Rows of 32-element types may have any number of units.
        let types = [Type::Q4_0, Type::Q8_0, Type::Q5_1, Type::F16];
        product_case(bench, &mut random, &types, &[5, 6, 7, 8], 32, 1, false);
        product_case(bench, &mut random, &types, &[5, 6, 7, 8], 704, 4, true);
    });
}

#[test]
fn products_with_many_rows_match_the_reference() {
    everywhere(|bench| {
        let mut random = Random(4);
        for (n, cols, hostile) in [(33, 512, false), (40, 256, true), (70, 256, false)] {
            for ty in Type::ALL {
                product_case(bench, &mut random, &[ty], &[if n == 33 { 130 } else { 40 }], cols, n, hostile);
            }
        }
        let types = [Type::Q8_0, Type::Q5_0, Type::F32, Type::BF16, Type::F16, Type::Q4_1];
        product_case(bench, &mut random, &types, &[31, 129, 3, 1, 5, 64], 96, 35, false);
    });
}

#[test]
fn numbers_beyond_f16_do_not_overflow_in_tiles() {
    everywhere(|Bench { device, stream, kernels }| {
        let (n, cols) = (33, 64);
        let x: Vec<f32> = (0..n * cols).map(|i| 3e38 / (1 + i % cols) as f32 / 2e3).collect();
        let input = Memory::of(stream, &x).unwrap();
        let acts = Acts::new(device, n, cols).unwrap();
        kernels.quantise(stream, input.view(), n, cols, &acts).unwrap();
        let ones: Vec<u8> = (0..cols).flat_map(|_| half::f16::ONE.to_le_bytes()).collect();
        let weight = Matrix::upload(stream, Type::F16, 1, cols, 1, &ones).unwrap();
        let out = Memory::new(device, 4 * n).unwrap();
        let product = Product { weight: weight.view(), out: out.view(), add: false };
        kernels.matmul(stream, &[product], &acts, n).unwrap();
        let want: f64 = x[..cols].iter().map(|x| f64::from(*x)).sum();
        for found in download(stream, &out, n) {
            assert!((f64::from(found) / want - 1.0).abs() < 1e-3, "{found} {want}");
        }
    });
}

#[test]
fn activations_are_those_of_the_reference() {
    everywhere(|Bench { device, stream, kernels }| {
        let cols = 320;
        let mut random = Random(5);
        let mut x = random.numbers(4 * cols);
        x[cols] = f32::INFINITY;
        x[cols + 40] = f32::NAN;
        x[2 * cols..3 * cols].fill(1e-38);
        x[3 * cols..].fill(0.0);
        let input = Memory::of(stream, &x).unwrap();
        let acts = Acts::new(device, 4, cols).unwrap();
        kernels.quantise(stream, input.view(), 4, cols, &acts).unwrap();
        let (mut q, mut s) = (vec![0_i8; 4 * cols], vec![0.0_f32; 4 * cols / 16]);
        acts.q().download(stream, &mut q).unwrap();
        acts.s().download(stream, &mut s).unwrap();
        for (unit, x) in x.chunks_exact(32).enumerate() {
            let mut want = [0; 32];
            let d = reference::quantise(x, &mut want);
            assert_eq!(q[32 * unit..32 * unit + 32], want, "{unit}");
            let same = |a: f32, b: f32| a.is_nan() && b.is_nan() || a == b;
            assert!(same(s[2 * unit], d), "{unit}: {} {d}", s[2 * unit]);
            let sum: i32 = want.iter().map(|&q| i32::from(q)).sum();
            assert!(same(s[2 * unit + 1], d * sum as f32), "{unit}");
        }
    });
}

#[test]
fn norms_gates_and_sums_match_the_reference() {
    everywhere(|Bench { device, stream, kernels }| {
        let mut random = Random(6);
        for (n, cols) in [(1, 32), (3, 352), (9, 2080)] {
            let (x, delta) = (random.numbers(n * cols), random.numbers(n * cols));
            let weight = random.numbers(cols);
            let upload = |data: &[f32]| Memory::of(stream, data).unwrap();
            let (mx, md, mw) = (upload(&x), upload(&delta), upload(&weight));
            let out = Memory::new(device, 4 * n * cols).unwrap();
            let (delta_view, weight_view) = (Some(md.view()), Some(mw.view()));
            kernels
                .norm(stream, mx.view(), delta_view, weight_view, 1e-6, n, cols, Some(out.view()), None)
                .unwrap();
            let sums: Vec<f32> = x.iter().zip(&delta).map(|(x, d)| x + d).collect();
            assert_eq!(download(stream, &mx, n * cols), sums);
            let normed = download(stream, &out, n * cols);
            for (row, normed) in sums.chunks_exact(cols).zip(normed.chunks_exact(cols)) {
                let mean = row.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>() / cols as f64;
                let by = (mean + 1e-6).sqrt().recip();
                for ((x, w), found) in row.iter().zip(&weight).zip(normed) {
                    let want = f64::from(*x) * by * f64::from(*w);
                    assert!((want - f64::from(*found)).abs() <= 1e-6 * want.abs() + 1e-9);
                }
            }
            for (gate, function) in [
                (Gate::Silu, (|x| x / (1.0 + (-x).exp())) as fn(f64) -> f64),
                (Gate::Gelu, |x| {
                    0.5 * x * (1.0 + (0.797_884_560_802_865_4 * (x + 0.044_715 * x.powi(3))).tanh())
                }),
            ] {
                let gates: Vec<f32> = x.iter().map(|x| 20.0 * x).collect();
                let mg = upload(&gates);
                kernels
                    .gated(stream, gate, mg.view(), (md.view(), cols), n, cols, Some(out.view()), None)
                    .unwrap();
                for ((x, d), found) in gates.iter().zip(&delta).zip(download(stream, &out, n * cols)) {
                    let want = function(f64::from(*x)) * f64::from(*d);
                    assert!(
                        (want - f64::from(found)).abs() <= 3e-6 * want.abs() + 1e-6,
                        "{gate:?} {x} {want} {found}"
                    );
                }
            }
            let gates = random.numbers(n);
            let (mg, my) = (upload(&gates), upload(&x));
            kernels.add(stream, my.view(), md.view(), Some(mg.view()), 0.5, n, cols).unwrap();
            let found = download(stream, &my, n * cols);
            for (i, found) in found.iter().enumerate() {
                let by = 1.0 / (1.0 + (-f64::from(gates[i / cols])).exp());
                let want = (f64::from(x[i]) + by * f64::from(delta[i])) * 0.5;
                assert!((want - f64::from(*found)).abs() < 1e-6);
            }
            kernels.softcap(stream, my.view(), 0.3, n * cols).unwrap();
            for (capped, x) in download(stream, &my, n * cols).iter().zip(found) {
                assert!((f64::from(*capped) - 0.3 * (f64::from(x) / 0.3).tanh()).abs() < 1e-6);
            }
        }
    });
}

#[test]
fn the_largest_number_is_found_whatever_stands_beside_it() {
    everywhere(|Bench { device, stream, kernels }| {
        let cols = 9001;
        let mut random = Random(7);
        let mut logits = random.numbers(5 * cols);
        logits[8999] = 2.0;
        logits[17] = 2.0;
        logits[cols..2 * cols].fill(f32::NAN);
        logits[2 * cols..3 * cols].fill(f32::NEG_INFINITY);
        logits[3 * cols..4 * cols].iter_mut().for_each(|x| *x -= 10.0);
        logits[3 * cols + 4096] = -8.5;
        logits[3 * cols + 5] = f32::NAN;
        logits[4 * cols..].fill(-0.0);
        logits[4 * cols + 40] = 0.0;
        let input = Memory::of(stream, &logits).unwrap();
        let best = Memory::zeroed(stream, 8 * 5).unwrap();
        let ids = Memory::new(device, 4 * 5).unwrap();
        for _ in 0..2 {
            kernels.argmax(stream, input.view(), 5, cols, best.view(), ids.view()).unwrap();
            let mut found = [0_u32; 5];
            ids.view().download(stream, &mut found).unwrap();
            assert_eq!(found, [17, u32::MAX, 0, 4096, 0]);
        }
    });
}

#[test]
fn the_largest_numbers_are_found_in_order() {
    everywhere(|Bench { device, stream, kernels }| {
        let mut random = Random(9);
        for (n, cols, k) in [(2, 9001, 64), (1, 4097, 5), (3, 100, 7), (1, 40, 64), (1, 1, 1), (2, 4096, 1)] {
            // Few values, so that many are equal.
            let mut logits: Vec<f32> = (0..n * cols).map(|_| (random.number() * 500.0).round()).collect();
            logits.iter_mut().step_by(7).for_each(|x| *x = f32::NAN);
            if n == 3 {
                logits[..cols].fill(f32::NAN);
                logits[cols..2 * cols].fill(f32::NEG_INFINITY);
            }
            let input = Memory::of(stream, &logits).unwrap();
            let scratch = Memory::new(device, top_k_scratch(n, cols, k).max(1)).unwrap();
            let (values, ids) =
                (Memory::new(device, 4 * n * k).unwrap(), Memory::new(device, 4 * n * k).unwrap());
            kernels
                .top_k(stream, input.view(), n, cols, k, scratch.view(), values.view(), ids.view())
                .unwrap();
            let found = download(stream, &values, n * k);
            let mut found_ids = vec![0_u32; n * k];
            ids.view().download(stream, &mut found_ids).unwrap();
            for (row, logits) in logits.chunks_exact(cols).enumerate() {
                let mut want: Vec<usize> = (0..cols).filter(|&i| !logits[i].is_nan()).collect();
                want.sort_by(|&a, &b| logits[b].partial_cmp(&logits[a]).unwrap().then(a.cmp(&b)));
                for i in 0..k {
                    let (id, value) =
                        want.get(i).map_or((u32::MAX, f32::NEG_INFINITY), |&i| (i as u32, logits[i]));
                    assert_eq!((found_ids[row * k + i], found[row * k + i]), (id, value), "{cols} {row} {i}");
                }
            }
        }
    });
}

#[test]
fn a_stack_is_multiplied_matrix_by_matrix_and_in_parts() {
    everywhere(|Bench { device, stream, kernels }| {
        let mut random = Random(10);
        let (ty, rows, cols) = (Type::Q5_K, 6, 256);
        let bytes = random.weights(ty, 3 * rows, cols);
        let stack = Matrix::upload(stream, ty, rows, cols, 3, &bytes).unwrap();
        assert_eq!(stack.bytes(), 3 * rows * stack.stride());
        let x = random.numbers(cols);
        let input = Memory::of(stream, &x).unwrap();
        let acts = Acts::new(device, 1, cols).unwrap();
        kernels.quantise(stream, input.view(), 1, cols, &acts).unwrap();
        let whole = rows_of(ty, cols, &bytes);
        for (view, first) in
            [(stack.one(2), 12), (stack.view().slice(5..9), 5), (stack.one(1).slice(2..3), 8)]
        {
            let out = Memory::new(device, 4 * view.rows()).unwrap();
            let product = Product { weight: view, out: out.view(), add: false };
            kernels.matmul(stream, &[product], &acts, 1).unwrap();
            for (found, row) in download(stream, &out, view.rows()).iter().zip(&whole[first..]) {
                let want: f32 = row.iter().zip(&x).map(|(w, x)| w * x).sum();
                let size: f32 = row.iter().zip(&x).map(|(w, x)| (w * x).abs()).sum();
                assert!((want - found).abs() < 0.01 * size, "{first}: {want} {found}");
            }
        }
    });
}

#[test]
fn another_order_of_nibbles_is_seen() {
    everywhere(|Bench { device, stream, kernels }| {
        let mut random = Random(8);
        let bytes = random.weights(Type::Q4_0, 4, 64);
        let matrix = Matrix::upload(stream, Type::Q4_0, 4, 64, 1, &bytes).unwrap();
        let mut swapped = bytes.clone();
        for block in swapped.chunks_exact_mut(18) {
            block[2..].iter_mut().for_each(|byte| *byte = byte.rotate_left(4));
        }
        let x = random.numbers(64);
        let input = Memory::of(stream, &x).unwrap();
        let acts = Acts::new(device, 1, 64).unwrap();
        kernels.quantise(stream, input.view(), 1, 64, &acts).unwrap();
        let out = Memory::new(device, 16).unwrap();
        let product = Product { weight: matrix.view(), out: out.view(), add: false };
        kernels.matmul(stream, &[product], &acts, 1).unwrap();
        let found = download(stream, &out, 4);
        let far = |bytes: &[u8]| {
            bytes
                .chunks_exact(36)
                .zip(&found)
                .map(|(row, found)| (reference::dot(Type::Q4_0, row, &x) - found).abs())
                .fold(0.0, f32::max)
        };
        assert!(far(&bytes) < 0.02 && far(&swapped) > 0.1, "{} {}", far(&bytes), far(&swapped));
    });
}

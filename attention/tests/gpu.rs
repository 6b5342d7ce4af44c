//! The kernels against the scalar truth.
#![cfg(feature = "gpu")]

mod common;
#[path = "gpu/layer.rs"]
mod layer;

use common::Random;
use layer::{Gpu, Layer, Piece, bytes_of, everywhere, mirror};
use skep_attention::gpu::{self, MAX_DIM, Positions, RopeTable, Scratch};
use skep_attention::{Heads, KvType, Mask, Rope, reference};
use skep_hal::gpu::Memory;
use skep_quant::gpu::Acts;

/// What decoding may differ by: sums in another order, and the exponential of the device.
const F32: f32 = 1e-5;

/// What products of f16 may differ by, for values below 1 and scores of a few units.
const F16: f32 = 2e-3;

#[track_caller]
fn assert_near(found: &[f32], expected: &[f32], tolerance: f32, what: &str) {
    assert_eq!(found.len(), expected.len(), "{what}");
    for (i, (a, b)) in found.iter().zip(expected).enumerate() {
        assert!((a - b).abs() <= tolerance * (1.0 + b.abs()), "{what}: entry {i}: {a} is not {b}");
    }
}

/// Single rows after this many tokens.
fn rows_after(contexts: &[usize]) -> Vec<Piece> {
    contexts.iter().map(|&context| Piece::new(context - 1, 1)).collect()
}

#[test]
fn rope_tables_are_exact_at_any_position() {
    let positions = [0_u32, 1, 2, 3, 77, 4095, 65_537, 262_143, 262_144, 1 << 20, 123_456_789, u32::MAX];
    let n = positions.len();
    everywhere(|gpu| {
        for (dims, base, divided) in
            [(64, 1e7_f32, false), (64, 1e4, true), (2, 1e6, false), (510, 1e6, true)]
        {
            let divisors: Vec<f32> =
                (0..dims / 2).map(|i| if divided { 1.0 + i as f32 * 0.7 } else { 1.0 }).collect();
            let sections = [dims / 2 - dims / 2 / 3 * 2, dims / 2 / 3, dims / 2 / 3, 0];
            let rope = Rope::new(512, dims, base).unwrap().with_divisors(&divisors).unwrap();
            for axes in [false, true] {
                let rope = if axes { rope.clone().with_sections(sections).unwrap() } else { rope.clone() };
                let table = RopeTable::new(&gpu.stream, &rope, n).unwrap();
                let along = |axis: usize, row: usize| positions[(row + axis * 5) % n];
                let given: Vec<u32> = (0..if axes { 3 } else { 1 })
                    .flat_map(|axis| (0..n).map(move |row| along(axis, row)))
                    .collect();
                let memory = Memory::of(&gpu.stream, &given).unwrap();
                let given =
                    if axes { Positions::Axes(memory.view()) } else { Positions::Text(memory.view()) };
                table.fill(&gpu.kernels, &gpu.stream, given, n).unwrap();
                let found: Vec<f32> = gpu.download(table.view(), n * dims);
                for (i, pair) in found.chunks(2).enumerate() {
                    let (row, pair_index) = (i / (dims / 2), i % (dims / 2));
                    let axis = match pair_index % 3 {
                        1 if axes && pair_index < 3 * sections[1] => 1,
                        2 if axes && pair_index < 3 * sections[2] => 2,
                        _ => 0,
                    };
                    let freq = f64::from(base).powf(-2.0 * pair_index as f64 / dims as f64)
                        / f64::from(divisors[pair_index]);
                    let (sin, cos) = (f64::from(along(axis, row)) * freq).sin_cos();
                    for (found, truth) in [(pair[0], cos), (pair[1], sin)] {
                        let error = (f64::from(found) - truth).abs();
                        assert!(error < 2e-7, "row {row} pair {pair_index}: {found} is not {truth}");
                    }
                }
            }
        }
    });
}

#[test]
fn prepared_rows_are_those_of_the_reference() {
    let mut random = Random(3);
    let layers: Vec<Layer> = [
        // Like Qwen3.5: gates, partial rotation; like Gemma 4: values are keys, no weight; neither norm nor rotation.
        (Heads::new(8, 1, 64, 64, 0.125).unwrap(), KvType::F16, true, Some(16), false),
        (Heads::new(3, 3, 40, 40, 1.0).unwrap(), KvType::F16, false, Some(40), true),
        (Heads::new(4, 2, 512, 256, 1.0).unwrap(), KvType::F32, false, Some(512), false),
        (Heads::new(2, 1, 72, 8, 1.0).unwrap(), KvType::F32, false, None, false),
    ]
    .into_iter()
    .map(|(heads, ty, gated, rotated, shared)| {
        let rope = rotated.map(|dims| Rope::new(heads.head_dim(), dims, 1e4).unwrap());
        Layer { gated, rope, values_are_keys: shared, normed: rotated.is_some(), ..Layer::new(heads, ty) }
    })
    .collect();
    let pieces = [Piece::new(0, 3), Piece::new(62, 4), Piece::new(128, 1)];
    everywhere(|gpu| {
        for layer in &layers {
            let step = layer.step(&mut random, &pieces);
            let mut cache = step.past(layer);
            let batch = step.upload(gpu);
            let before = mirror(&cache, &step);
            let device = gpu.cache(&cache, &before);
            let inputs = step.inputs(layer);
            let mut q = vec![0.0; step.rows() * layer.heads.q_heads() * layer.heads.head_dim()];
            reference::prepare(
                &layer.heads,
                &inputs.projections(),
                &layer.norms(),
                layer.rope.as_ref(),
                &step.positions(),
                &step.spans(),
                &mut cache,
                &mut q,
            )
            .unwrap();
            let found = gpu.prepare(layer, &step, &batch, &device, false);
            assert_near(&found, &q, 2e-6, "queries");
            assert_near(&gpu.prepare(layer, &step, &batch, &device, true), &q, 2e-6, "queries alone");

            // Rows that nobody wrote keep their poison, the others agree to the last digit of their format.
            let written = mirror(&cache, &step.after());
            for (found, expected) in [(device.keys(), &written.k), (device.values(), &written.v)] {
                let len = expected.len();
                let (found, limit): (Vec<f32>, f32) = match layer.ty {
                    KvType::F16 => (layer::widened(&gpu.download::<u16>(found, len)), 1e-3),
                    _ => (gpu.download(found, len), 2e-6),
                };
                for (i, (a, b)) in found.iter().zip(expected).enumerate() {
                    let same = (a - b).abs() <= limit * b.abs() + 1e-6 || a.is_nan() && b.is_nan();
                    assert!(same, "cached value {i}: {a} is not {b}");
                }
            }
        }
    });
}

#[test]
fn decoded_rows_are_those_of_the_reference() {
    let mut random = Random(5);
    let pieces = rows_after(&[1, 63, 64, 65, 200, 700]);
    let mut number = 0;
    let mut cases = Vec::new();
    for dim in [32, 64, 128, 256, 512] {
        for group in [1, 2, 8] {
            number += 1;
            let kv_heads = if dim * group > 1024 { 1 } else { 2 };
            let heads =
                Heads::new(group * kv_heads, kv_heads, dim, dim, (dim as f32).sqrt().recip()).unwrap();
            let ty = if number % 2 == 0 { KvType::F16 } else { KvType::F32 };
            let mask = [Mask::Causal, Mask::Window(64), Mask::Window(100), Mask::Causal, Mask::Window(1)]
                [number % 5];
            cases.push((heads, ty, mask, number % 3 != 0, [1, 9, 100, 1000][number % 4]));
        }
    }
    // Sizes between the classes, groups that do not fill their blocks, more heads than a block takes.
    let odd = |q_heads, kv_heads, k, v| Heads::new(q_heads, kv_heads, k, v, 0.2).unwrap();
    cases.push((odd(3, 1, 40, 96), KvType::F16, Mask::Causal, false, 30));
    cases.push((odd(12, 2, 96, 96), KvType::F32, Mask::Window(130), true, 30));
    cases.push((odd(16, 1, 200, 136), KvType::F16, Mask::Causal, false, 30));
    cases.push((odd(6, 1, 264, 512), KvType::F16, Mask::Causal, false, 30));
    everywhere(|gpu| {
        for &(heads, ty, mask, gated, blocks) in &cases {
            let layer = Layer { gated, ..Layer::new(heads, ty) };
            let step = layer.step(&mut random, &pieces);
            let (found, expected) = gpu.attend_both(&layer, &step, mask, blocks);
            assert_near(&found, &expected, F32, &format!("{heads:?} {ty:?} {mask:?} {blocks}"));
        }
    });
}

#[test]
fn prefilled_rows_are_those_of_the_reference() {
    let mut random = Random(7);
    let few = [Piece::new(0, 1), Piece::new(60, 11), Piece::new(0, 5), Piece::new(200, 2)];
    let many = [Piece::new(0, 70), Piece::new(63, 3), Piece::new(129, 34)];
    let mut number = 0;
    let mut cases = Vec::new();
    for dim in [32, 64, 128, 256, 512] {
        for group in [1, 2, 8] {
            number += 1;
            let kv_heads = if dim * group > 256 { 1 } else { 2 };
            let heads =
                Heads::new(group * kv_heads, kv_heads, dim, dim, (dim as f32).sqrt().recip()).unwrap();
            let ty = if number % 4 == 0 { KvType::F32 } else { KvType::F16 };
            let mask = [Mask::Causal, Mask::Window(64), Mask::Causal, Mask::Window(3), Mask::Window(100)]
                [number % 5];
            let pieces: &[Piece] = if dim * group <= 256 { &many } else { &few };
            cases.push((heads, ty, mask, number % 3 != 0, pieces, [1, 40, 200][number % 3]));
        }
    }
    let odd = |q_heads, kv_heads, k, v| Heads::new(q_heads, kv_heads, k, v, 0.2).unwrap();
    cases.push((odd(6, 2, 40, 96), KvType::F16, Mask::Causal, false, &few, 60));
    cases.push((odd(5, 1, 264, 8), KvType::F16, Mask::Window(50), false, &few, 60));
    cases.push((odd(16, 1, 72, 72), KvType::F16, Mask::Causal, true, &few, 30));
    everywhere(|gpu| {
        for &(heads, ty, mask, gated, pieces, blocks) in &cases {
            let layer = Layer { gated, ..Layer::new(heads, ty) };
            let step = layer.step(&mut random, pieces);
            let (found, expected) = gpu.attend_both(&layer, &step, mask, blocks);
            assert_near(&found, &expected, F16, &format!("{heads:?} {ty:?} {mask:?} {blocks}"));
        }
    });
}

#[test]
fn rows_come_in_the_forms_that_products_take() {
    let mut random = Random(29);
    let heads = |q_heads, v_dim| Heads::new(q_heads, 1, 40, v_dim, 0.2).unwrap();
    let single = |rows: usize| rows_after(&(1..=rows).map(|row| 9 * row).collect::<Vec<_>>());
    let cases = [
        (heads(2, 64), single(3)),
        (heads(4, 40), single(2)),
        (heads(2, 32), single(9)),
        (heads(4, 8), vec![Piece::new(5, 11)]),
        (heads(3, 288), vec![Piece::new(5, 7)]),
    ];
    everywhere(|gpu| {
        for (heads, pieces) in &cases {
            let layer = Layer::new(*heads, KvType::F16);
            let step = layer.step(&mut random, pieces);
            let cols = heads.q_heads() * heads.v_dim();
            let acts = Acts::new(&gpu.device, step.rows() + 1, cols).unwrap();
            let expected = gpu.attend_into(&layer, &step, &acts);
            let len = expected.len();
            assert_eq!(gpu.download::<f32>(acts.x(), len), expected);
            if step.rows() <= 8 {
                let codes: Vec<i8> = gpu.download(acts.q(), len);
                let scales: Vec<f32> = gpu.download(acts.s(), len / 16);
                for ((x, q), s) in expected.chunks(32).zip(codes.chunks(32)).zip(scales.chunks(2)) {
                    let most = x.iter().fold(0.0_f32, |most, x| most.max(x.abs()));
                    assert!((s[0] - most / 127.0).abs() <= most * 1e-7);
                    let sum: i32 = q.iter().map(|&q| i32::from(q)).sum();
                    assert!((s[1] - s[0] * sum as f32).abs() <= s[0] * 1e-3);
                    for (x, &q) in x.iter().zip(q) {
                        assert!((x - s[0] * f32::from(q)).abs() <= 0.501 * s[0], "{x} is not {q} * {}", s[0]);
                    }
                }
            } else {
                let halves = layer::widened(&gpu.download::<u16>(acts.h(), len));
                let scales: Vec<f32> = gpu.download(acts.scale(), step.rows());
                for ((x, h), scale) in expected.chunks(cols).zip(halves.chunks(cols)).zip(scales) {
                    for (x, h) in x.iter().zip(h) {
                        assert!((x - h * scale).abs() <= x.abs() * 1e-3, "{x} is not {h} * {scale}");
                    }
                }
            }
        }
    });
}

#[test]
fn tokens_of_an_image_see_each_other() {
    let mut random = Random(11);
    let mut long = Piece::new(50, 30);
    long.together = vec![52..60, 63..80];
    let mut short = Piece::new(10, 6);
    short.together.push(11..15);
    everywhere(|gpu| {
        for (pieces, tolerance) in [(vec![long.clone(), short.clone()], F16), (vec![short.clone()], F32)] {
            for mask in [Mask::Causal, Mask::Window(5)] {
                let layer = Layer::new(Heads::new(4, 2, 64, 64, 0.125).unwrap(), KvType::F16);
                let step = layer.step(&mut random, &pieces);
                let (found, expected) = gpu.attend_both(&layer, &step, mask, 10);
                assert_near(&found, &expected, tolerance, &format!("{mask:?}"));
            }
        }
    });
}

#[test]
fn a_prompt_in_one_piece_is_the_prompt_token_by_token() {
    let mut random = Random(13);
    let heads = Heads::new(8, 1, 64, 64, 0.125).unwrap();
    let rope = Rope::new(64, 16, 1e7).unwrap();
    let layer = Layer { gated: true, rope: Some(rope), normed: true, ..Layer::new(heads, KvType::F16) };
    let n = 70;
    let whole = layer.step(&mut random, &[Piece::new(0, n)]);
    everywhere(|gpu| {
        for mask in [Mask::Causal, Mask::Window(20)] {
            let cache = gpu.cache(&whole.past(&layer), &mirror(&whole.past(&layer), &whole));
            let batch = whole.upload(gpu);
            let q = gpu.prepare(&layer, &whole, &batch, &cache, false);
            let at_once = gpu.attend(&layer, &whole, &batch, &cache, &q, mask, 10);

            let cache = gpu.cache(&whole.past(&layer), &mirror(&whole.past(&layer), &whole));
            let mut one_by_one = Vec::new();
            for row in 0..n {
                let step = whole.row(row);
                let batch = step.upload(gpu);
                let q = gpu.prepare(&layer, &step, &batch, &cache, false);
                one_by_one.extend(gpu.attend(&layer, &step, &batch, &cache, &q, mask, 10));
            }
            assert_near(&at_once, &one_by_one, F16, &format!("{mask:?}"));
        }
    });
}

#[test]
fn tables_and_slots_matter() {
    let mut random = Random(17);
    let layer = Layer::new(Heads::new(2, 1, 32, 32, 0.2).unwrap(), KvType::F32);
    everywhere(|gpu| {
        for pieces in [rows_after(&[100, 130, 90]), vec![Piece::new(70, 9), Piece::new(64, 4)]] {
            let mut step = layer.step(&mut random, &pieces);
            let (right, expected) = gpu.attend_both(&layer, &step, Mask::Causal, 10);
            assert_near(&right, &expected, F16, "before");
            step.sent[0].swap(0, 1);
            assert!(right != gpu.attend_with(&layer, &step, Mask::Causal, 10), "pages swapped");
            step.sent[0].swap(0, 1);
            step.slots.swap(0, 1);
            assert!(right != gpu.attend_with(&layer, &step, Mask::Causal, 10), "slots swapped");
        }
    });
}

#[test]
fn rows_of_no_sequence_leave_nothing() {
    let mut random = Random(19);
    let layer = Layer { gated: true, ..Layer::new(Heads::new(2, 1, 32, 32, 0.2).unwrap(), KvType::F16) };
    let mut step = layer.step(&mut random, &rows_after(&[70, 3]));
    step.slots[1] = u32::MAX;
    everywhere(|gpu| {
        let past = step.past(&layer);
        let before = mirror(&past, &step);
        let cache = gpu.cache(&past, &before);
        let batch = step.upload(gpu);
        let q = gpu.prepare(&layer, &step, &batch, &cache, false);
        let (second, page) = (step.tables[1][0] as usize, 64 * 32);
        let keys: Vec<u16> = gpu.download(cache.keys(), before.k.len());
        assert_eq!(keys[second * page..][..page], layer::narrowed(&before.k)[second * page..][..page]);
        let out = gpu.attend(&layer, &step, &batch, &cache, &q, Mask::Causal, 10);
        assert!(out[..64].iter().all(|x| x.is_finite() && *x != 0.0));
        assert_eq!(out[64..], [0.0; 64]);
    });
}

#[test]
fn a_recorded_step_follows_what_the_device_arrays_say() {
    let mut random = Random(23);
    let layer = Layer::new(Heads::new(4, 2, 64, 64, 0.125).unwrap(), KvType::F16);
    let step = layer.step(&mut random, &rows_after(&[400, 65]));
    everywhere(|gpu| {
        let past = step.past(&layer);
        let mut all = mirror(&past, &step);
        // Every token has a key and a value, so that any context length will do.
        all.k.iter_mut().chain(&mut all.v).for_each(|x| *x = if x.is_nan() { 0.25 } else { *x });
        let cache = gpu.cache(&past, &all);
        let q = Memory::of(&gpu.stream, &random.floats(2 * 4 * 64, 1.0)).unwrap();
        let out = Memory::new(&gpu.device, bytes_of::<f32>(2 * 4 * 64)).unwrap();
        let scratch = Scratch::with_blocks(&gpu.device, &[layer.heads], 2, 500, 30).unwrap();
        let batch = step.upload(gpu);
        let run = || {
            gpu.kernels.attend(
                &gpu.stream,
                &layer.heads,
                q.view(),
                None,
                &batch.batch(),
                &cache,
                Mask::Causal,
                &scratch,
                Some(out.view()),
                None,
            )
        };
        let graph = gpu.stream.capture(run).unwrap();
        for positions in [[399_u32, 64], [10, 3], [64, 0]] {
            batch.position.view().upload(&gpu.stream, &positions).unwrap();
            // SAFETY: everything the graph names lives.
            unsafe { graph.launch(&gpu.stream) }.unwrap();
            let replayed: Vec<f32> = gpu.download(out.view(), 2 * 4 * 64);
            run().unwrap();
            assert_eq!(replayed, gpu.download::<f32>(out.view(), 2 * 4 * 64));
        }
    });
}

#[test]
fn views_that_are_too_short_are_refused() {
    let gpu = Gpu::new(&skep_hal::gpu::testing::devices()[0]);
    let heads = Heads::new(2, 1, 32, 32, 0.2).unwrap();
    let layer = Layer::new(heads, KvType::F16);
    let step = layer.step(&mut Random(1), &rows_after(&[3]));
    let batch = step.upload(&gpu);
    let cache = gpu::Cache::new(&gpu.device, KvType::F16, 4, 1, 32, 32).unwrap();
    let short = Memory::new(&gpu.device, 16).unwrap();
    let scratch = Scratch::new(&gpu.device, &[heads], 1, 64).unwrap();
    let says = |heads: &Heads, mask| {
        let batch = batch.batch();
        let call = || {
            gpu.kernels.attend(
                &gpu.stream,
                heads,
                short.view(),
                None,
                &batch,
                &cache,
                mask,
                &scratch,
                Some(short.view()),
                None,
            )
        };
        let panic = std::panic::catch_unwind(std::panic::AssertUnwindSafe(call)).unwrap_err();
        panic
            .downcast_ref::<String>()
            .cloned()
            .or_else(|| panic.downcast_ref::<&str>().map(|s| (*s).to_owned()))
    };
    assert_eq!(says(&heads, Mask::Causal).unwrap(), "q has 16 bytes, but 64 words are needed");
    let odd = Heads::new(2, 1, 36, 32, 0.2).unwrap();
    assert_eq!(
        says(&odd, Mask::Causal).unwrap(),
        format!("head_dim 36 must be a multiple of 8, at most {MAX_DIM}")
    );
    let other = Heads::new(2, 2, 32, 32, 0.2).unwrap();
    assert!(says(&other, Mask::Causal).unwrap().contains("differ in kv_heads"));
}

//! The mixer on devices, against the scalar reference.
#![cfg(feature = "gpu")]

use skep_gdn::gpu::{DeviceInput, DeviceScratch, DeviceSpans, DeviceWeights, Kernels, States};
use skep_gdn::{Form, HeadOrder, Input, Shape, Span, State, Weights, reference};
use skep_hal::gpu::testing::devices;
use skep_hal::gpu::{Memory, Stream};
use skep_quant::gpu::Acts;

struct Random(u64);

impl Random {
    fn number(&mut self) -> f32 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 40) as f32 / (1_u64 << 23) as f32 - 1.0
    }

    fn numbers(&mut self, n: usize, scale: f32) -> Vec<f32> {
        (0..n).map(|_| scale * self.number()).collect()
    }
}

/// Weights and rows of a layer.
struct Layer {
    shape: Shape,
    conv: Vec<f32>,
    a: Vec<f32>,
    dt_bias: Vec<f32>,
    norm: Vec<f32>,
}

impl Layer {
    fn new(shape: Shape, random: &mut Random) -> Self {
        Self {
            shape,
            conv: random.numbers(shape.conv_dim() * shape.conv_kernel(), 0.6),
            a: random.numbers(shape.v_heads(), 1.0).iter().map(|a| -a.abs() - 1e-3).collect(),
            dt_bias: random.numbers(shape.v_heads(), 1.0),
            norm: random.numbers(shape.head_v_dim(), 1.0),
        }
    }

    fn weights(&self) -> Weights<'_> {
        Weights::new(&self.shape, &self.conv, &self.a, &self.dt_bias, &self.norm, 1e-6).unwrap()
    }
}

struct Rows {
    qkv: Vec<f32>,
    z: Vec<f32>,
    beta: Vec<f32>,
    alpha: Vec<f32>,
}

impl Rows {
    fn new(shape: &Shape, n: usize, random: &mut Random, hostile: bool) -> Self {
        let mut rows = Self {
            qkv: random.numbers(n * shape.conv_dim(), 1.0),
            z: random.numbers(n * shape.value_dim(), 3.0),
            beta: random.numbers(n * shape.v_heads(), 4.0),
            alpha: random.numbers(n * shape.v_heads(), 4.0),
        };
        if hostile {
            // The same key again and again with full strength, and decays near 0 and 1.
            let first = rows.qkv[..shape.conv_dim()].to_vec();
            rows.qkv.chunks_exact_mut(shape.conv_dim()).for_each(|row| row.copy_from_slice(&first));
            rows.beta.fill(20.0);
            rows.alpha.iter_mut().enumerate().for_each(|(i, a)| *a = if i % 3 == 0 { 60.0 } else { -60.0 });
        }
        rows
    }

    fn input(&self) -> Input<'_> {
        Input { qkv: &self.qkv, z: &self.z, beta: &self.beta, alpha: &self.alpha }
    }
}

fn close(found: &[f32], want: &[f32], what: &str) {
    for (i, (found, want)) in found.iter().zip(want).enumerate() {
        assert!((found - want).abs() <= 2e-5 * (1.0 + want.abs()), "{what} {i}: {found} {want}");
    }
}

/// Spans as (slot, rows), in steps; states go on from step to step.
fn run(shape: Shape, steps: &[&[(usize, usize)]], hostile: bool) {
    run_form(shape, steps, hostile, Form::Auto);
}

fn run_form(shape: Shape, steps: &[&[(usize, usize)]], hostile: bool, form: Form) {
    run_scaled(shape, steps, hostile, form, 1.0);
}

fn scale_values(shape: &Shape, rows: &mut [f32], scale: f32) {
    for row in rows.chunks_exact_mut(shape.conv_dim()) {
        row[2 * shape.key_dim()..].iter_mut().for_each(|v| *v *= scale);
    }
}

/// Values and states are about as large as `scale`.
fn run_scaled(shape: Shape, steps: &[&[(usize, usize)]], hostile: bool, form: Form, scale: f32) {
    let slots = 4;
    for device in devices() {
        let mut random = Random(9);
        let stream = Stream::new(&device).unwrap();
        let kernels = Kernels::load(&device).unwrap().with_form(form);
        let layer = Layer::new(shape, &mut random);
        let weights = DeviceWeights::upload(&stream, &shape, &layer.weights()).unwrap();
        let on_device = States::new(&stream, &shape, slots).unwrap();
        let mut states: Vec<State> = (0..slots).map(|_| State::new(&shape)).collect();
        for (slot, state) in states.iter_mut().enumerate() {
            state.conv_mut().fill_with(|| random.number());
            scale_values(&shape, state.conv_mut(), scale);
            state.s_mut().fill_with(|| 0.3 * scale * random.number());
            on_device.upload(&stream, slot, state).unwrap();
        }
        for step in steps {
            let n: usize = step.iter().map(|(_, rows)| rows).sum();
            let mut rows = Rows::new(&shape, n, &mut random, hostile);
            scale_values(&shape, &mut rows.qkv, scale);
            let scratch = DeviceScratch::new(&device, &shape, n).unwrap();
            let mut list = Vec::new();
            let mut first = 0;
            for &(slot, rows) in *step {
                list.extend([slot as u32, first as u32, rows as u32, 77]);
                first += rows;
            }
            let memory = |data: &[f32]| Memory::of(&stream, data).unwrap();
            let (qkv, z) = (memory(&rows.qkv), memory(&rows.z));
            let (beta, alpha) = (memory(&rows.beta), memory(&rows.alpha));
            let list = Memory::of(&stream, &list).unwrap();
            let out = Memory::new(&device, 4 * n * shape.value_dim()).unwrap();
            let input = DeviceInput { qkv: qkv.view(), z: z.view(), beta: beta.view(), alpha: alpha.view() };
            let spans = DeviceSpans { list: list.view(), len: step.len() };
            kernels
                .mix(&stream, &weights, &on_device, spans, n, &input, &scratch, Some(out.view()), None)
                .unwrap();
            let mut found = vec![0.0; n * shape.value_dim()];
            out.view().download(&stream, &mut found).unwrap();

            let mut want = vec![0.0; found.len()];
            let mut by_slot: Vec<Option<&mut State>> = states.iter_mut().map(Some).collect();
            let mut first = 0;
            let mut list: Vec<Span<'_>> = step
                .iter()
                .map(|&(slot, rows)| {
                    first += rows;
                    Span { tokens: first - rows..first, state: by_slot[slot].take().unwrap() }
                })
                .collect();
            reference::mix(&shape, &layer.weights(), &mut list, &rows.input(), Form::Recurrent, &mut want);
            close(&found, &want, "row");
        }
        for (slot, state) in states.iter().enumerate() {
            let mut found = State::new(&shape);
            on_device.download(&stream, slot, &mut found).unwrap();
            if steps.iter().all(|step| step.iter().all(|(other, _)| *other != slot)) {
                assert_eq!(
                    (found.conv(), found.s()),
                    (state.conv(), state.s()),
                    "slot {slot} is not in a step"
                );
            }
            let parts = |s: &[f32]| -> Vec<f32> { s.iter().map(|s| s / scale).collect() };
            close(&parts(found.s()), &parts(state.s()), "state");
            assert_eq!(found.conv(), state.conv(), "window of slot {slot}");
        }
    }
}

fn shape(k_heads: usize, v_heads: usize, d_k: usize, d_v: usize, order: HeadOrder) -> Shape {
    Shape::new(k_heads, v_heads, d_k, d_v, 4, order).unwrap()
}

#[test]
fn single_rows_match_the_reference_in_both_head_orders() {
    for order in [HeadOrder::Tiled, HeadOrder::Grouped] {
        run(shape(2, 4, 64, 64, order), &[&[(2, 1), (0, 1), (3, 1)], &[(0, 1)], &[(3, 1), (2, 1)]], false);
        run(shape(2, 6, 32, 128, order), &[&[(1, 1)], &[(1, 1)]], false);
    }
    run(shape(1, 2, 128, 32, HeadOrder::Tiled), &[&[(1, 1)], &[(1, 1)], &[(1, 1)], &[(1, 1)]], false);
}

#[test]
fn spans_of_any_length_match_the_reference() {
    let shape = shape(2, 4, 32, 64, HeadOrder::Tiled);
    run(shape, &[&[(3, 2), (0, 15), (2, 1)], &[(0, 16), (3, 3)], &[(2, 17)]], false);
    run(shape, &[&[(1, 70)], &[(1, 1), (0, 65)]], false);
}

#[test]
fn chunks_match_the_reference() {
    for order in [HeadOrder::Tiled, HeadOrder::Grouped] {
        let steps: [&[_]; 2] = [&[(3, 65), (0, 1), (1, 63)], &[(0, 15), (3, 64), (2, 2)]];
        run_form(shape(2, 4, 32, 32, order), &steps, false, Form::Chunked);
    }
    run_form(shape(1, 3, 64, 32, HeadOrder::Tiled), &[&[(1, 130)]], false, Form::Chunked);
    run_form(shape(1, 1, 128, 64, HeadOrder::Tiled), &[&[(1, 16)], &[(0, 2), (1, 70)]], false, Form::Chunked);
}

#[test]
fn heads_as_large_as_those_of_the_models_match_the_reference() {
    let shape = shape(1, 2, 128, 128, HeadOrder::Tiled);
    for form in [Form::Chunked, Form::Recurrent] {
        run_form(shape, &[&[(2, 66), (0, 1)], &[(2, 1), (0, 1)]], false, form);
    }
}

#[test]
fn convolutions_of_other_lengths_match_the_reference() {
    for kernel in [2, 3, 7] {
        let shape = Shape::new(1, 2, 32, 32, kernel, HeadOrder::Tiled).unwrap();
        run_form(shape, &[&[(1, 1), (2, 3)], &[(2, 1)], &[(1, 20), (0, 5)], &[(1, 2)]], false, Form::Chunked);
    }
}

#[test]
fn chunks_stay_accurate_for_repeated_keys_and_extreme_decays() {
    let steps: [&[_]; 2] = [&[(0, 64), (1, 100)], &[(0, 33), (1, 1)]];
    run_form(shape(2, 4, 64, 32, HeadOrder::Tiled), &steps, true, Form::Chunked);
}

#[test]
fn chunks_hold_numbers_that_f16_does_not() {
    for scale in [1e9, 1e-9] {
        run_scaled(shape(1, 2, 32, 32, HeadOrder::Tiled), &[&[(0, 70)]], false, Form::Chunked, scale);
    }
}

#[test]
fn cuts_of_a_sequence_and_its_neighbours_change_no_bit() {
    let shape = shape(2, 4, 32, 64, HeadOrder::Tiled);
    let (n, width, v_heads) = (140, shape.value_dim(), shape.v_heads());
    // Chunks are counted from the start of a span.
    let rowwise: [&[usize]; 4] = [&[140], &[1, 1, 138], &[5, 17, 100, 18], &[70, 70]];
    let chunked: [&[usize]; 3] = [&[140], &[64, 76], &[128, 12]];
    for device in devices() {
        let stream = Stream::new(&device).unwrap();
        for (form, cuts) in [(Form::Recurrent, &rowwise[..]), (Form::Chunked, &chunked[..])] {
            let kernels = Kernels::load(&device).unwrap().with_form(form);
            let mut random = Random(21);
            let layer = Layer::new(shape, &mut random);
            let weights = DeviceWeights::upload(&stream, &shape, &layer.weights()).unwrap();
            let (mine, other) =
                (Rows::new(&shape, n, &mut random, false), Rows::new(&shape, 3, &mut random, false));
            let scratch = DeviceScratch::new(&device, &shape, n + 3).unwrap();
            let mut results: Vec<Vec<u32>> = Vec::new();
            for (i, cuts) in cuts.iter().enumerate() {
                let states = States::new(&stream, &shape, 2).unwrap();
                let (mut first, mut all) = (0, Vec::new());
                for &rows in *cuts {
                    // Every other time a sequence of three rows comes along.
                    let company = if i % 2 == 1 { 3 } else { 0 };
                    let join = |own: &[f32], others: &[f32], width: usize| {
                        let own = &own[first * width..][..rows * width];
                        Memory::of(&stream, &[&others[..company * width], own].concat()).unwrap()
                    };
                    let qkv = join(&mine.qkv, &other.qkv, shape.conv_dim());
                    let (z, out) =
                        (join(&mine.z, &other.z, width), Memory::new(&device, 4 * (company + rows) * width));
                    let (beta, alpha) =
                        (join(&mine.beta, &other.beta, v_heads), join(&mine.alpha, &other.alpha, v_heads));
                    let out = out.unwrap();
                    let spans = [0, 0, company as u32, 0, 1, company as u32, rows as u32, 0];
                    let list = Memory::of(&stream, if company == 0 { &spans[4..] } else { &spans }).unwrap();
                    let spans = DeviceSpans { list: list.view(), len: if company == 0 { 1 } else { 2 } };
                    let input =
                        DeviceInput { qkv: qkv.view(), z: z.view(), beta: beta.view(), alpha: alpha.view() };
                    kernels
                        .mix(
                            &stream,
                            &weights,
                            &states,
                            spans,
                            company + rows,
                            &input,
                            &scratch,
                            Some(out.view()),
                            None,
                        )
                        .unwrap();
                    let mut found = vec![0.0_f32; (company + rows) * width];
                    out.view().download(&stream, &mut found).unwrap();
                    all.extend(found[company * width..].iter().map(|x| x.to_bits()));
                    first += rows;
                }
                let mut state = State::new(&shape);
                states.download(&stream, 1, &mut state).unwrap();
                all.extend(state.s().iter().chain(state.conv()).map(|x| x.to_bits()));
                results.push(all);
            }
            // A last piece below 16 rows goes row by row, so chunks are compared up to it.
            let same = if form == Form::Chunked { 128 * width } else { results[0].len() };
            assert!(results.iter().all(|result| result[..same] == results[0][..same]), "{form:?}");
        }
    }
}

#[test]
fn a_captured_step_reads_its_spans_anew() {
    let device = &devices()[0];
    let stream = Stream::new(device).unwrap();
    let kernels = Kernels::load(device).unwrap();
    let mut random = Random(31);
    let shape = shape(1, 2, 32, 32, HeadOrder::Tiled);
    let layer = Layer::new(shape, &mut random);
    let rows = Rows::new(&shape, 2, &mut random, false);
    let weights = DeviceWeights::upload(&stream, &shape, &layer.weights()).unwrap();
    let states = States::new(&stream, &shape, 3).unwrap();
    let scratch = DeviceScratch::new(device, &shape, 2).unwrap();
    let memory = |data: &[f32]| Memory::of(&stream, data).unwrap();
    let (qkv, z) = (memory(&rows.qkv), memory(&rows.z));
    let (beta, alpha) = (memory(&rows.beta), memory(&rows.alpha));
    let list = Memory::of(&stream, &[0_u32; 8]).unwrap();
    let out = Memory::new(device, 4 * 2 * shape.value_dim()).unwrap();
    let input = DeviceInput { qkv: qkv.view(), z: z.view(), beta: beta.view(), alpha: alpha.view() };
    let spans = DeviceSpans { list: list.view(), len: 2 };
    let graph = stream
        .capture::<skep_hal::Error>(|| {
            kernels.mix(&stream, &weights, &states, spans, 2, &input, &scratch, Some(out.view()), None)
        })
        .unwrap();
    let mut host: Vec<State> = (0..3).map(|_| State::new(&shape)).collect();
    for slots in [[0, 1], [0, 2], [1, 2]] {
        list.view().upload(&stream, &[slots[0], 0, 1, 0, slots[1], 1, 1, 0]).unwrap();
        // SAFETY: all that was captured lives.
        unsafe { graph.launch(&stream) }.unwrap();
        let mut found = vec![0.0; 2 * shape.value_dim()];
        out.view().download(&stream, &mut found).unwrap();
        let mut want = vec![0.0; found.len()];
        let [a, b] = host.get_disjoint_mut(slots.map(|slot| slot as usize)).unwrap();
        let mut list = [Span { tokens: 0..1, state: a }, Span { tokens: 1..2, state: b }];
        reference::mix(&shape, &layer.weights(), &mut list, &rows.input(), Form::Recurrent, &mut want);
        close(&found, &want, "row");
    }
    states.reset(&stream, 2).unwrap();
    for (slot, want) in host.iter().enumerate().take(2) {
        let mut found = State::new(&shape);
        states.download(&stream, slot, &mut found).unwrap();
        close(found.s(), want.s(), "state");
    }
    let mut found = State::new(&shape);
    states.download(&stream, 2, &mut found).unwrap();
    assert!(found.s().iter().chain(found.conv()).all(|&x| x == 0.0), "a slot that was reset");
}

#[test]
fn repeated_keys_and_extreme_decays_match_the_reference() {
    run(shape(2, 4, 64, 32, HeadOrder::Tiled), &[&[(0, 1), (1, 40)], &[(0, 3), (1, 1)]], true);
}

#[test]
fn the_other_head_order_is_another_model() {
    let device = &devices()[0];
    let stream = Stream::new(device).unwrap();
    let kernels = Kernels::load(device).unwrap();
    let mut results: Vec<Vec<f32>> = Vec::new();
    for order in [HeadOrder::Tiled, HeadOrder::Grouped] {
        let mut random = Random(3);
        let shape = shape(2, 4, 32, 32, order);
        let layer = Layer::new(shape, &mut random);
        let rows = Rows::new(&shape, 3, &mut random, false);
        let weights = DeviceWeights::upload(&stream, &shape, &layer.weights()).unwrap();
        let states = States::new(&stream, &shape, 1).unwrap();
        let scratch = DeviceScratch::new(device, &shape, 3).unwrap();
        let memory = |data: &[f32]| Memory::of(&stream, data).unwrap();
        let (qkv, z) = (memory(&rows.qkv), memory(&rows.z));
        let (beta, alpha) = (memory(&rows.beta), memory(&rows.alpha));
        let list = Memory::of(&stream, &[0_u32, 0, 3, 0]).unwrap();
        let out = Memory::new(device, 4 * 3 * shape.value_dim()).unwrap();
        let input = DeviceInput { qkv: qkv.view(), z: z.view(), beta: beta.view(), alpha: alpha.view() };
        let spans = DeviceSpans { list: list.view(), len: 1 };
        kernels.mix(&stream, &weights, &states, spans, 3, &input, &scratch, Some(out.view()), None).unwrap();
        let mut found = vec![0.0; 3 * shape.value_dim()];
        out.view().download(&stream, &mut found).unwrap();
        results.push(found);
    }
    let far = results[0].iter().zip(&results[1]).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
    assert!(far > 0.1, "{far}");
}

#[test]
fn rows_for_products_are_those_that_come_out() {
    for device in devices() {
        let stream = Stream::new(&device).unwrap();
        let kernels = Kernels::load(&device).unwrap();
        let mut random = Random(5);
        let shape = shape(2, 4, 32, 64, HeadOrder::Tiled);
        let layer = Layer::new(shape, &mut random);
        let weights = DeviceWeights::upload(&stream, &shape, &layer.weights()).unwrap();
        for n in [3, 12] {
            let rows = Rows::new(&shape, n, &mut random, false);
            let scratch = DeviceScratch::new(&device, &shape, n).unwrap();
            let memory = |data: &[f32]| Memory::of(&stream, data).unwrap();
            let (qkv, z) = (memory(&rows.qkv), memory(&rows.z));
            let (beta, alpha) = (memory(&rows.beta), memory(&rows.alpha));
            let list = Memory::of(&stream, &[0_u32, 0, n as u32, 0]).unwrap();
            let input = DeviceInput { qkv: qkv.view(), z: z.view(), beta: beta.view(), alpha: alpha.view() };
            let spans = DeviceSpans { list: list.view(), len: 1 };
            let len = n * shape.value_dim();
            let out = Memory::new(&device, 4 * len).unwrap();
            let acts = Acts::new(&device, n, shape.value_dim()).unwrap();
            for (out, acts) in [(Some(out.view()), None), (None, Some(&acts))] {
                let states = States::new(&stream, &shape, 1).unwrap();
                kernels.mix(&stream, &weights, &states, spans, n, &input, &scratch, out, acts).unwrap();
            }
            let mut want = vec![0.0; len];
            out.view().download(&stream, &mut want).unwrap();
            let mut found = vec![0.0; len];
            acts.x().download(&stream, &mut found).unwrap();
            assert_eq!(found, want);
            if n <= 8 {
                let (mut q, mut s) = (vec![0_i8; len], vec![0.0; len / 16]);
                acts.q().download(&stream, &mut q).unwrap();
                acts.s().download(&stream, &mut s).unwrap();
                for (i, want) in want.iter().enumerate() {
                    let d: f32 = s[i / 32 * 2];
                    assert!((d * f32::from(q[i]) - want).abs() <= 0.51 * d);
                }
            } else {
                let (mut h, mut scale) = (vec![0_u16; len], vec![0.0; n]);
                acts.h().download(&stream, &mut h).unwrap();
                acts.scale().download(&stream, &mut scale).unwrap();
                for (i, want) in want.iter().enumerate() {
                    let found = half::f16::from_bits(h[i]).to_f32() * scale[i / shape.value_dim()];
                    assert!((found - want).abs() <= 1e-3 * want.abs() + 1e-6);
                }
            }
        }
    }
}

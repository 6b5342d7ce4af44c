//! What may not change a result, and what must.

mod common;

use std::ops::Range;

use common::{Case, Random, assert_close, widen};
use proptest::prelude::*;
use skep_gdn::{CHUNK, Form, HeadOrder, Input, Scratch, Shape, Span, State, mix, order};
use skep_quant::{Parallel, Serial, Threads};

const FORMS: [Form; 3] = [Form::Auto, Form::Chunked, Form::Recurrent];

fn shape(order: HeadOrder) -> Shape {
    Shape::new(2, 4, 32, 40, 4, order).unwrap()
}

/// Runs a batch of several sequences.
fn run_batch(
    case: &Case,
    par: &dyn Parallel,
    form: Form,
    spans: impl IntoIterator<Item = Range<usize>>,
    states: &mut [State],
    scratch: &mut Scratch,
) -> Vec<f32> {
    let mut spans: Vec<Span<'_>> =
        spans.into_iter().zip(states).map(|(tokens, state)| Span { tokens, state }).collect();
    let mut out = vec![f32::NAN; case.n() * case.shape.value_dim()];
    mix(par, &case.shape, &case.weights(), &mut spans, &case.input(), scratch, form, &mut out);
    out
}

#[test]
fn cutting_a_sequence_changes_nothing() {
    for shape in [shape(HeadOrder::Tiled), Shape::new(1, 2, 5, 6, 3, HeadOrder::Tiled).unwrap()] {
        let case = Case::new(shape, 200, 7);
        let start = case.carried(7);
        for form in FORMS {
            let mut whole_state = start.clone();
            let whole = case.run(&Serial, form, &mut whole_state, &[200]);
            for cut in [1, 3, 7, 63, 64, 65, 128, 200] {
                let mut state = start.clone();
                let out = case.run(&Serial, form, &mut state, &vec![cut; 200usize.div_ceil(cut)]);
                assert_eq!(state.conv(), whole_state.conv(), "{form:?} in pieces of {cut}");
                if form == Form::Recurrent || form == Form::Chunked && cut % CHUNK == 0 {
                    assert_eq!(out, whole, "{form:?} in pieces of {cut}");
                    assert_eq!(state.s(), whole_state.s(), "{form:?} in pieces of {cut}");
                } else {
                    let what = format!("{form:?} in pieces of {cut}");
                    assert_close(&widen(&out), &widen(&whole), 1e-4, &what);
                    assert_close(&widen(state.s()), &widen(whole_state.s()), 1e-4, &what);
                }
            }
        }
    }
}

#[test]
fn neighbours_padding_and_workers_change_no_bit() {
    let shape = shape(HeadOrder::Tiled);
    let case = Case::new(shape, 150, 3);
    // Unequal lengths, an empty span, and rows before, between and behind that belong to nobody.
    let spans = [2..7, 7..8, 10..10, 10..74, 80..145];
    let mut scratch = Scratch::new();
    for form in FORMS {
        let starts: Vec<State> = (0..spans.len()).map(|i| case.carried(i as u64)).collect();
        let mut together: Vec<State> = starts.clone();
        let out = run_batch(&case, &Serial, form, spans.clone(), &mut together, &mut scratch);
        for workers in [2, 3, 7, 100] {
            let mut states = starts.clone();
            let again = run_batch(&case, &Threads(workers), form, spans.clone(), &mut states, &mut scratch);
            assert_eq!(out, again, "{workers} workers, {form:?}");
            assert!(states.iter().zip(&together).all(|(x, y)| x.s() == y.s() && x.conv() == y.conv()));
        }
        let mut poisoned = case.clone();
        let mut covered = vec![false; case.n()];
        for (span, (start, after)) in spans.iter().zip(starts.iter().zip(&together)) {
            let mut alone = start.clone();
            let mut piece = vec![f32::NAN; span.len() * shape.value_dim()];
            let input = case.input_of(span.clone());
            let mut one = [Span { tokens: 0..span.len(), state: &mut alone }];
            mix(&Serial, &shape, &case.weights(), &mut one, &input, &mut Scratch::new(), form, &mut piece);
            assert_eq!(piece, out[span.start * shape.value_dim()..span.end * shape.value_dim()]);
            assert_eq!(alone.s(), after.s());
            assert_eq!(alone.conv(), after.conv());
            span.clone().for_each(|row| covered[row] = true);
        }
        for row in (0..case.n()).filter(|&row| !covered[row]) {
            poisoned.qkv[row * shape.conv_dim()..][..shape.conv_dim()].fill(f32::NAN);
            poisoned.alpha[row * shape.v_heads()..][..shape.v_heads()].fill(f32::INFINITY);
            let padding = &out[row * shape.value_dim()..][..shape.value_dim()];
            assert!(padding.iter().all(|x| x.to_bits() == 0), "row {row}");
        }
        let mut states = starts.clone();
        assert_eq!(out, run_batch(&poisoned, &Serial, form, spans.clone(), &mut states, &mut scratch));
    }
}

#[test]
fn a_scratch_serves_layers_of_different_shapes() {
    let mut scratch = Scratch::new();
    for round in 0..2 {
        for (i, shape) in [
            shape(HeadOrder::Tiled),
            Shape::new(3, 3, 64, 8, 2, HeadOrder::Tiled).unwrap(),
            Shape::new(1, 5, 8, 128, 1, HeadOrder::Grouped).unwrap(),
        ]
        .into_iter()
        .enumerate()
        {
            let case = Case::new(shape, 70, i as u64);
            for form in FORMS {
                let mut states = [State::new(&shape)];
                let out = run_batch(&case, &Serial, form, Some(0..70), &mut states, &mut scratch);
                let fresh = case.run(&Serial, form, &mut State::new(&shape), &[70]);
                assert_eq!(out, fresh, "round {round}, {shape:?}");
            }
        }
    }
}

#[test]
fn zero_input_gives_zero_output_and_no_state() {
    let shape = shape(HeadOrder::Tiled);
    let mut case = Case::new(shape, 70, 1);
    case.qkv.fill(0.0);
    for form in FORMS {
        let mut state = State::new(&shape);
        let out = case.run(&Serial, form, &mut state, &[70]);
        assert!(out.iter().all(|&x| x == 0.0));
        assert!(state.s().iter().all(|&x| x == 0.0));
    }
}

#[test]
fn decay_is_a_times_softplus() {
    // With a zero key nothing is written, and the state shows the decay alone: a = [-0.5, -2], alpha = dt = 0.
    let shape = Shape::new(1, 2, 8, 8, 4, HeadOrder::Tiled).unwrap();
    let mut case = Case::new(shape, 1, 1);
    case.qkv.fill(0.0);
    case.a = vec![-0.5, -2.0];
    case.dt_bias.fill(0.0);
    case.alpha.fill(0.0);
    for form in FORMS {
        let mut state = State::new(&shape);
        state.s_mut().fill(1.0);
        case.run(&Serial, form, &mut state, &[1]);
        let ln_2 = f64::ln(2.0);
        for (head, a) in [-0.5, -2.0].into_iter().enumerate() {
            let expected = vec![f64::exp(a * ln_2); 64];
            assert_close(&widen(&state.s()[head * 64..][..64]), &expected, 1e-6, "decay");
        }
    }
}

#[test]
fn extreme_gates_neither_overflow_nor_leave_the_oracle() {
    let shape = shape(HeadOrder::Grouped);
    let mut random = Random::new(11);
    for (round, extremes) in
        [[-1e4, 1e4], [-100.0, 30.0], [-3e38, 3e38], [19.99, 20.01]].into_iter().enumerate()
    {
        let mut case = Case::new(shape, 130, round as u64);
        for x in case.alpha.iter_mut().chain(&mut case.beta) {
            if random.bits().is_multiple_of(4) {
                *x = extremes[random.bits() as usize % 2];
            }
        }
        let start = case.carried(5);
        let oracle = case.oracle(&start);
        for form in FORMS {
            let mut state = start.clone();
            let out = case.run(&Threads(2), form, &mut state, &[130]);
            oracle.check(&out, &state, 1e-4, &format!("{form:?}, gates of {extremes:?}"));
        }
    }
}

#[test]
fn repeated_keys_with_full_write_strength_stay_accurate() {
    // The hardest case for a triangular inverse: every key the same, every beta one, no decay.
    let shape = shape(HeadOrder::Tiled);
    let mut case = Case::new(shape, 192, 2);
    let row = case.qkv[..2 * shape.key_dim()].to_vec();
    for qkv in case.qkv.chunks_exact_mut(shape.conv_dim()) {
        qkv[..row.len()].copy_from_slice(&row);
    }
    case.beta.fill(50.0);
    case.alpha.fill(-50.0);
    let oracle = case.oracle(&State::new(&shape));
    for form in FORMS {
        let mut state = State::new(&shape);
        let out = case.run(&Serial, form, &mut state, &[192]);
        oracle.check(&out, &state, 1e-4, &format!("{form:?}"));
    }
}

#[test]
fn a_poisoned_state_is_seen_stays_with_its_sequence_and_is_cured_by_reset() {
    let shape = shape(HeadOrder::Tiled);
    let case = Case::new(shape, 80, 4);
    let mut scratch = Scratch::new();
    for form in FORMS {
        let mut states = [State::new(&shape), State::new(&shape)];
        let clean = run_batch(&case, &Serial, form, [0..40, 40..80], &mut states, &mut scratch);
        assert!(states.iter().all(State::is_finite));

        states.iter_mut().for_each(State::reset);
        states[0].s_mut()[17] = f32::NAN;
        assert!(!states[0].is_finite());
        let out = run_batch(&case, &Serial, form, [0..40, 40..80], &mut states, &mut scratch);
        assert!(!states[0].is_finite() && out[..40 * shape.value_dim()].iter().any(|x| x.is_nan()));
        assert_eq!(out[40 * shape.value_dim()..], clean[40 * shape.value_dim()..]);

        states.iter_mut().for_each(State::reset);
        assert_eq!(run_batch(&case, &Serial, form, [0..40, 40..80], &mut states, &mut scratch), clean);
    }
}

#[test]
fn a_snapshot_resumes_where_it_was_taken() {
    let shape = shape(HeadOrder::Tiled);
    let case = Case::new(shape, 100, 9);
    let mut state = State::new(&shape);
    let mut first = case.clone();
    first.qkv.truncate(64 * shape.conv_dim());
    first.z.truncate(64 * shape.value_dim());
    first.beta.truncate(64 * shape.v_heads());
    first.alpha.truncate(64 * shape.v_heads());
    first.run(&Serial, Form::Chunked, &mut state, &[64]);
    let mut resumed = State::new(&shape);
    resumed.copy_from(&state);
    assert_eq!(state.bytes(), 4 * (3 * shape.conv_dim() + 4 * 32 * 40));
    let mut out = vec![0.0; 36 * shape.value_dim()];
    let mut spans = [Span { tokens: 0..36, state: &mut resumed }];
    let input = case.input_of(64..100);
    mix(&Serial, &shape, &case.weights(), &mut spans, &input, &mut Scratch::new(), Form::Chunked, &mut out);
    let whole = case.run(&Serial, Form::Chunked, &mut State::new(&shape), &[100]);
    assert_eq!(out, whole[64 * shape.value_dim()..]);
}

#[test]
#[should_panic(expected = "spans overlap or do not ascend")]
fn overlapping_spans_are_refused() {
    let shape = shape(HeadOrder::Tiled);
    let case = Case::new(shape, 10, 1);
    let mut states = [State::new(&shape), State::new(&shape)];
    run_batch(&case, &Serial, Form::Auto, [0..6, 5..10], &mut states, &mut Scratch::new());
}

#[test]
#[should_panic(expected = "exceeds the batch of 10 tokens")]
fn spans_beyond_the_batch_are_refused() {
    let shape = shape(HeadOrder::Tiled);
    let case = Case::new(shape, 10, 1);
    run_batch(&case, &Serial, Form::Auto, Some(4..11), &mut [State::new(&shape)], &mut Scratch::new());
}

#[test]
#[should_panic(expected = "qkv is not [n, conv_dim]")]
fn short_inputs_are_refused() {
    let shape = shape(HeadOrder::Tiled);
    let mut case = Case::new(shape, 10, 1);
    case.qkv.pop();
    let input = Input { qkv: &case.qkv, z: &case.z, beta: &case.beta, alpha: &case.alpha };
    let mut state = State::new(&shape);
    let mut spans = [Span { tokens: 0..10, state: &mut state }];
    let mut out = vec![0.0; 10 * shape.value_dim()];
    mix(&Serial, &shape, &case.weights(), &mut spans, &input, &mut Scratch::new(), Form::Auto, &mut out);
}

/// The same layer with everything that has a value-head order moved to `to`.
fn reordered(case: &Case, to: HeadOrder) -> Case {
    let shape = &case.shape;
    let rows = |data: &[f32], width: usize, part: &dyn Fn(&[f32]) -> Vec<f32>| -> Vec<f32> {
        data.chunks_exact(width).flat_map(part).collect()
    };
    Case {
        shape: shape.with_order(to),
        conv: order::qkv(shape, to, &case.conv).unwrap(),
        a: order::heads(shape, to, &case.a).unwrap(),
        dt_bias: order::heads(shape, to, &case.dt_bias).unwrap(),
        qkv: rows(&case.qkv, shape.conv_dim(), &|row| order::qkv(shape, to, row).unwrap()),
        z: order::columns(shape, to, &case.z).unwrap(),
        beta: rows(&case.beta, shape.v_heads(), &|row| order::heads(shape, to, row).unwrap()),
        alpha: rows(&case.alpha, shape.v_heads(), &|row| order::heads(shape, to, row).unwrap()),
        ..case.clone()
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn tiled_weights_and_grouped_weights_are_one_layer(
        k_heads in 1usize..5, ratio in 1usize..4, d_k in 1usize..3, d_v in 1usize..3,
        n in 1usize..80, seed: u64, chunked: bool,
    ) {
        let shape = Shape::new(k_heads, k_heads * ratio, 8 * d_k, 8 * d_v, 4, HeadOrder::Grouped).unwrap();
        let form = if chunked { Form::Chunked } else { Form::Recurrent };
        let grouped = Case::new(shape, n, seed);
        let tiled = reordered(&grouped, HeadOrder::Tiled);
        let mut grouped_state = State::new(&grouped.shape);
        let mut tiled_state = State::new(&tiled.shape);
        let expected = grouped.run(&Serial, form, &mut grouped_state, &[n]);
        let out = tiled.run(&Threads(2), form, &mut tiled_state, &[n]);
        prop_assert_eq!(order::columns(&shape, HeadOrder::Grouped, &out).unwrap(), expected.clone());
        prop_assert_eq!(order::heads(&shape, HeadOrder::Grouped, tiled_state.s()).unwrap(), grouped_state.s());

        // And back again; and with the wrong pairing it is another layer, where there is a choice at all.
        let back = reordered(&tiled, HeadOrder::Grouped);
        prop_assert_eq!(&back.qkv, &grouped.qkv);
        prop_assert_eq!(&back.conv, &grouped.conv);
        let wrong = Case { shape: tiled.shape.with_order(HeadOrder::Grouped), ..tiled };
        let out = wrong.run(&Serial, form, &mut State::new(&wrong.shape), &[n]);
        let same = order::columns(&shape, HeadOrder::Grouped, &out).unwrap() == expected;
        prop_assert_eq!(same, k_heads == 1 || ratio == 1);
    }

    #[test]
    fn any_batch_equals_its_sequences_alone(
        lengths in proptest::collection::vec((0usize..70, 0usize..3), 1..6), seed: u64, workers in 1usize..5,
    ) {
        let shape = Shape::new(2, 4, 16, 24, 4, HeadOrder::Tiled).unwrap();
        let mut spans = Vec::new();
        let mut n = 0;
        for (length, gap) in lengths {
            spans.push(n + gap..n + gap + length);
            n += gap + length;
        }
        let case = Case::new(shape, n, seed);
        for form in FORMS {
            let mut states: Vec<State> = (0..spans.len()).map(|i| case.carried(i as u64)).collect();
            let out = run_batch(&case, &Threads(workers), form, spans.clone(), &mut states, &mut Scratch::new());
            for (i, span) in spans.iter().enumerate() {
                let mut alone = case.carried(i as u64);
                let mut piece = vec![0.0; span.len() * shape.value_dim()];
                let mut one = [Span { tokens: 0..span.len(), state: &mut alone }];
                let input = case.input_of(span.clone());
                mix(&Serial, &shape, &case.weights(), &mut one, &input, &mut Scratch::new(), form, &mut piece);
                prop_assert_eq!(&piece, &out[span.start * shape.value_dim()..span.end * shape.value_dim()]);
                prop_assert_eq!(alone.s(), states[i].s());
                prop_assert_eq!(alone.conv(), states[i].conv());
            }
        }
    }
}

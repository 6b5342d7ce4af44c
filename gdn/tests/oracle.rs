//! Every form against an f64 oracle with its own bookkeeping.

mod common;

use common::Case;
use skep_gdn::{Form, HeadOrder, Shape, Span, State, reference};
use skep_quant::{Serial, Threads};

/// Relative f32 rounding over a few hundred tokens; the RMS norm may magnify it for outputs near zero.
const TOLERANCE: f64 = 1e-4;

fn shapes() -> Vec<Shape> {
    let shape = |k, v, d_k, d_v, kernel, order| Shape::new(k, v, d_k, d_v, kernel, order).unwrap();
    vec![
        shape(2, 2, 16, 16, 4, HeadOrder::Tiled),
        shape(2, 4, 32, 48, 4, HeadOrder::Tiled),
        shape(2, 4, 32, 48, 4, HeadOrder::Grouped),
        shape(2, 6, 16, 8, 4, HeadOrder::Tiled),
        shape(2, 6, 8, 40, 2, HeadOrder::Grouped),
        shape(1, 3, 24, 72, 1, HeadOrder::Tiled),
        shape(1, 1, 128, 128, 4, HeadOrder::Grouped),
        // Head dims the vector kernels do not take.
        shape(2, 4, 5, 7, 3, HeadOrder::Tiled),
        shape(3, 3, 12, 4, 9, HeadOrder::Grouped),
    ]
}

#[test]
fn every_form_follows_the_oracle_from_a_carried_state() {
    for (i, shape) in shapes().into_iter().enumerate() {
        for n in [1, 2, 3, 63, 64, 65, 200] {
            let case = Case::new(shape, n, (i * 1000 + n) as u64);
            let start = case.carried(n as u64);
            let oracle = case.oracle(&start);
            for form in [Form::Auto, Form::Chunked, Form::Recurrent] {
                let what = format!("{shape:?}, {n} tokens, {form:?}");
                let mut state = start.clone();
                let out = case.run(&Threads(2), form, &mut state, &[n]);
                oracle.check(&out, &state, TOLERANCE, &what);

                let mut state = start.clone();
                let mut out = vec![f32::NAN; n * shape.value_dim()];
                let mut spans = [Span { tokens: 0..n, state: &mut state }];
                reference::mix(&shape, &case.weights(), &mut spans, &case.input(), form, &mut out);
                oracle.check(&out, &state, TOLERANCE, &format!("reference, {what}"));
            }
        }
    }
}

#[test]
fn the_pairing_of_heads_matters() {
    let tiled = Shape::new(2, 4, 16, 16, 4, HeadOrder::Tiled).unwrap();
    let case = Case::new(tiled, 10, 1);
    let oracle = case.oracle(&State::new(&tiled));
    let wrong = Case { shape: tiled.with_order(HeadOrder::Grouped), ..case };
    let out = wrong.run(&Serial, Form::Auto, &mut State::new(&wrong.shape), &[10]);
    let distance = common::distance(&common::widen(&out), &oracle.out);
    assert!(distance > 0.1, "grouped and tiled pairing agree to {distance}");
}

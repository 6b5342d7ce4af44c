//! The scalar functions, which are all there is without `std`, against the formulas in f64.

mod common;

use common::{Random, assert_close, oracle, wide};
use skep_attention::{
    Gate, Heads, KvCache, KvType, Mask, Norm, Norms, Position, Projections, Queries, Rope, Span, reference,
};

#[test]
fn a_layer_step_by_step() {
    let heads = Heads::new(4, 2, 12, 12, 0.3).unwrap();
    let rope = Rope::new(12, 8, 1e4).unwrap();
    let n = 21;
    let mut random = Random(12);
    let (q, k, v) =
        (random.floats(n * 4 * 24, 2.0), random.floats(n * 2 * 12, 2.0), random.floats(n * 2 * 12, 2.0));
    let (q_weight, k_weight) = (random.floats(12, 2.0), random.floats(12, 2.0));
    // Positions that are not the token index, as after an image.
    let position = |row: usize| if row < 9 { row as u32 } else { row as u32 + 1000 };
    let positions = (0..n).map(|row| Position::from(position(row))).collect::<Vec<_>>();

    let eps = 1e-5f32;
    let turned = |head: &[f32], weight: &[f32], row: usize| {
        let mean = head.iter().map(|&x| f64::from(x).powi(2)).sum::<f64>() / 12.0;
        let factor = (mean + f64::from(eps)).powf(-0.5);
        let mut out =
            head.iter().zip(weight).map(|(&x, &w)| f64::from(x) * factor * f64::from(w)).collect::<Vec<_>>();
        for i in 0..4 {
            let angle = f64::from(position(row)) * 1e4f64.powf(-(i as f64) / 4.0);
            let (x, y) = (out[i], out[i + 4]);
            (out[i], out[i + 4]) = (x * angle.cos() - y * angle.sin(), x * angle.sin() + y * angle.cos());
        }
        out
    };
    let expected_q =
        (0..n * 4).flat_map(|i| turned(&q[i * 24..][..12], &q_weight, i / 4)).collect::<Vec<_>>();
    let expected_k =
        (0..n * 2).flat_map(|i| turned(&k[i * 12..][..12], &k_weight, i / 2)).collect::<Vec<_>>();
    for (mask, window) in [(Mask::Causal, 1000), (Mask::Window(6), 6)] {
        let mut expected =
            oracle(&heads, &expected_q, &expected_k, &wide(&v), |t, j| j <= t && t - j < window);
        for (out, gate) in expected.chunks_mut(12).zip(q.chunks(24)) {
            out.iter_mut().zip(&gate[12..]).for_each(|(out, &gate)| *out /= 1.0 + (-f64::from(gate)).exp());
        }

        let mut cache = KvCache::new(KvType::F32, 4, 8, 2, 12, 12).unwrap();
        let norms = Norms { q: Norm::Weight(&q_weight), k: Norm::Weight(&k_weight), v: Norm::None, eps };
        let (mut queries, mut out) = (Vec::new(), Vec::new());
        for (start, len) in [(0, 13), (13, 1), (14, 7)] {
            let rows = start..start + len;
            let spans = [Span { tokens: 0..len, pages: &[2, 0, 3], start, together: &[] }];
            let q = &q[rows.start * 96..rows.end * 96];
            let projections = Projections {
                q: Queries::GateInterleaved(q),
                k: &k[rows.start * 24..rows.end * 24],
                v: &v[rows.start * 24..rows.end * 24],
            };
            let (mut q_part, mut out_part) = (vec![0.0; len * 48], vec![0.0; len * 48]);
            reference::prepare(
                &heads,
                &projections,
                &norms,
                Some(&rope),
                &positions[rows],
                &spans,
                &mut cache,
                &mut q_part,
            )
            .unwrap();
            reference::attend(
                &heads,
                &q_part,
                Some(Gate::Interleaved(q)),
                &spans,
                &cache,
                mask,
                &mut out_part,
            )
            .unwrap();
            queries.extend(q_part);
            out.extend(out_part);
        }
        assert_close(&queries, &expected_q, 1e-6);
        assert_close(&out, &expected, 2e-6);
        // Token 13 is in the second page of the table, slot 5.
        let mut key = [0.0; 12];
        cache.read_k(0, 5, 1, &mut key);
        assert_close(&key, &expected_k[(13 * 2 + 1) * 12..][..12], 1e-6);
        cache.read_v(0, 5, 1, &mut key);
        assert_eq!(key, v[(13 * 2 + 1) * 12..][..12]);
    }
}

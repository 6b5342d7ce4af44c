//! Rotations against the formula in f64.

mod common;

use common::{Random, assert_same};
use proptest::prelude::*;
use skep_attention::{ErrorKind, Position, Rope};

/// Rotates by the formula; `along(i)` is the position that pair `i` follows.
fn expected(head: &[f32], rot_dims: usize, base: f64, along: impl Fn(usize) -> u32) -> Vec<f64> {
    let mut out = head.iter().map(|&x| f64::from(x)).collect::<Vec<_>>();
    for i in 0..rot_dims / 2 {
        let angle = f64::from(along(i)) * base.powf(-2.0 * i as f64 / rot_dims as f64);
        let (x, y) = (out[i], out[i + rot_dims / 2]);
        out[i] = x * angle.cos() - y * angle.sin();
        out[i + rot_dims / 2] = x * angle.sin() + y * angle.cos();
    }
    out
}

#[track_caller]
fn assert_within(a: &[f32], b: &[f64], bound: f64) {
    for (i, (&a, &b)) in a.iter().zip(b).enumerate() {
        assert!((f64::from(a) - b).abs() < bound, "entry {i}: {a} is not {b}");
    }
}

#[test]
fn angles_are_exact_at_the_last_position() {
    let rope = Rope::new(256, 64, 1e7).unwrap();
    let mut random = Random(3);
    for position in [0, 1, 2, 1000, 131_071, 262_143, 1_048_576] {
        let head = random.floats(256, 1.0);
        let mut turned = head.clone();
        rope.apply(&mut turned, position.into());
        assert_within(&turned, &expected(&head, 64, 1e7, |_| position), 4e-7);
        // The rest of a partially rotated head passes to the bit.
        assert_same(&turned[64..], &head[64..]);
    }
    // Cosine and sine themselves.
    for i in 0..32 {
        let mut unit = vec![0.0; 256];
        unit[i] = 1.0;
        let before = unit.clone();
        rope.apply(&mut unit, 262_143.into());
        assert_within(&unit, &expected(&before, 64, 1e7, |_| 262_143), 1e-7);
    }
}

#[test]
fn sections_choose_the_axis_of_each_pair() {
    let plain = Rope::new(256, 64, 1e7).unwrap();
    let rope = plain.clone().with_sections([11, 11, 10, 0]).unwrap();
    let position = Position { t: 5, h: 7, w: 9 };
    // As the file format's authors list them: T at 0, 3, .. 30, H at 1, 4, .. 31, W at 2, 5, .. 29.
    let (h, w) = ([1, 4, 7, 10, 13, 16, 19, 22, 25, 28, 31], [2, 5, 8, 11, 14, 17, 20, 23, 26, 29]);
    let along = |i: usize| {
        if h.contains(&i) {
            7
        } else if w.contains(&i) {
            9
        } else {
            5
        }
    };
    assert_eq!((0..32).filter(|&i| along(i) == 5).count(), 11);
    let head = Random(6).floats(256, 1.0);
    let mut turned = head.clone();
    rope.apply(&mut turned, position);
    assert_within(&turned, &expected(&head, 64, 1e7, along), 4e-7);
    // The axes do differ.
    let mut text = head.clone();
    rope.apply(&mut text, 5.into());
    assert_ne!(turned, text);
    // A text position is plain rotation.
    let mut same = head;
    plain.apply(&mut same, 5.into());
    assert_same(&text, &same);
}

#[test]
fn uneven_sections() {
    // Height ends early: its later places go to time.
    let rope = Rope::new(12, 12, 100.0).unwrap().with_sections([4, 1, 1, 0]).unwrap();
    let head = Random(6).floats(12, 1.0);
    let mut turned = head.clone();
    rope.apply(&mut turned, Position { t: 1, h: 2, w: 3 });
    assert_within(&turned, &expected(&head, 12, 100.0, |i| [1, 2, 3, 1, 1, 1][i]), 4e-7);
}

#[test]
fn divisors_slow_or_stop_pairs() {
    // Of Gemma 4's global layers: the first quarter of the pairs turns, a divisor of 1e30 stops the rest.
    let divisors = (0..256).map(|i| if i < 64 { 1.0 } else { 1e30 }).collect::<Vec<_>>();
    let rope = Rope::new(512, 512, 1e6).unwrap().with_divisors(&divisors).unwrap();
    let head = Random(2).floats(512, 1.0);
    let mut turned = head.clone();
    rope.apply(&mut turned, 100_000.into());
    let mut all = expected(&head, 512, 1e6, |_| 100_000);
    for i in (64..256).chain(64 + 256..512) {
        all[i] = f64::from(head[i]);
    }
    assert_within(&turned, &all, 4e-7);
}

#[test]
fn bad_tables_are_refused() {
    let kind = |rope: skep_attention::Result<Rope>| rope.unwrap_err().kind();
    for (head_dim, rot_dims) in [(64, 0), (64, 7), (64, 66), (4096, 2048)] {
        assert_eq!(kind(Rope::new(head_dim, rot_dims, 1e4)), ErrorKind::RotaryDims { rot_dims, head_dim });
    }
    for base in [0.0, -1.0, f32::NAN, f32::INFINITY] {
        assert_eq!(kind(Rope::new(64, 64, base)), ErrorKind::Base);
    }
    for sections in [[11, 11, 10, 1], [11, 11, 9, 0], [11, 11, 9, 1], [32, 32, 32, 0], [usize::MAX, 33, 0, 0]]
    {
        let rope = Rope::new(64, 64, 1e4).unwrap();
        assert_eq!(kind(rope.with_sections(sections)), ErrorKind::Sections { sections, expected: 32 });
    }
    for divisors in [&[1.0; 31][..], &[1.0; 33], &[0.0; 32], &[-1.0; 32], &[f32::NAN; 32]] {
        let rope = Rope::new(64, 64, 1e4).unwrap();
        let expected = ErrorKind::Divisors { expected: 32, found: divisors.len() };
        assert_eq!(kind(rope.with_divisors(divisors)), expected);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Products of rotated queries and keys depend on their distance alone.
    #[test]
    fn only_distance_matters(seed in any::<u64>(), a in 0u32..3000, b in 0u32..3000, offset in 0u32..200_000) {
        let rope = Rope::new(96, 64, 1e4).unwrap();
        let mut random = Random(seed);
        let (q, k) = (random.floats(96, 1.0), random.floats(96, 1.0));
        let product = |a: u32, b: u32| {
            let (mut q, mut k) = (q.clone(), k.clone());
            rope.apply(&mut q, a.into());
            rope.apply(&mut k, b.into());
            q.iter().zip(&k).map(|(q, k)| f64::from(*q) * f64::from(*k)).sum::<f64>()
        };
        prop_assert!((product(a, b) - product(a + offset, b + offset)).abs() < 2e-5);
    }
}

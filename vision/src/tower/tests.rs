use alloc::string::{String, ToString};
use alloc::vec;
use alloc::vec::Vec;

use skep_quant::{Isa, Matrix, Precision, Serial, Threads, Type};

use super::*;
use crate::cpu::Kernels;
use crate::{Picture, reference};

/// A small tower of random weights.
struct Owned {
    config: Config,
    matrices: Vec<Vec<u8>>,
    positions: Vec<f32>,
    norms: Vec<Vec<f32>>,
}

const OUT: usize = 20;
const POSITIONS: usize = 40;

impl Owned {
    fn new(hidden: usize, heads: usize, ff: usize, patch: usize, pooling: usize) -> Self {
        let mut state = 7_u64;
        let mut vector = |len: usize, scale: f32, shift: f32| -> Vec<f32> {
            let mut next = || {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                (state >> 40) as f32 / (1 << 23) as f32 - 1.0
            };
            (0..len).map(|_| shift + scale * (next() + next() + next())).collect()
        };
        let mut matrices = Vec::new();
        let square = [(hidden, hidden); 4];
        let shapes = [(hidden, 3 * patch * patch), (ff, hidden), (ff, hidden), (hidden, ff), (OUT, hidden)];
        for (rows, cols) in square.into_iter().chain(shapes) {
            let values = vector(rows * cols, 1.0 / (cols as f32).sqrt(), 0.0);
            matrices.push(values.iter().flat_map(|x| x.to_le_bytes()).collect());
        }
        Self {
            config: Config {
                hidden,
                heads,
                ff,
                tiling: Tiling::new(patch, pooling).unwrap(),
                eps: 1e-6,
                rope_base: 100.0,
                activation: Activation::GeluTanh,
            },
            matrices,
            positions: vector(2 * POSITIONS * hidden, 0.3, 0.0),
            norms: (0..8).map(|_| vector(hidden, 0.1, 0.4)).collect(),
        }
    }

    fn weights(&self) -> Weights<'_> {
        let Config { hidden, heads, ff, tiling, .. } = self.config;
        let patch = 3 * tiling.patch() * tiling.patch();
        let m = |i: usize, rows, cols| {
            Linear::new(Matrix::new(Type::F32, rows, cols, &self.matrices[i]).unwrap())
        };
        let block = Block {
            attn_norm: &self.norms[0],
            q: m(0, hidden, hidden),
            k: m(1, hidden, hidden),
            v: m(2, hidden, hidden),
            q_norm: &self.norms[1][..hidden / heads],
            k_norm: &self.norms[2][..hidden / heads],
            out: m(3, hidden, hidden),
            attn_post_norm: &self.norms[3],
            ffn_norm: &self.norms[4],
            gate: m(5, ff, hidden),
            up: m(6, ff, hidden),
            down: m(7, hidden, ff),
            ffn_post_norm: &self.norms[5],
        };
        Weights {
            patches: m(4, hidden, patch),
            positions: &self.positions,
            blocks: vec![block; 2],
            standardise: Some(Standardise { bias: &self.norms[6], scale: &self.norms[7] }),
            projection: m(8, OUT, hidden),
        }
    }

    fn tower(&self) -> Tower<'_> {
        Tower::new(self.config, self.weights()).unwrap()
    }

    fn patches(&self, columns: usize, rows: usize) -> Patches {
        let patch = self.config.tiling.patch();
        let (width, height) = (columns * patch, rows * patch);
        let rgb = (0..width * height * 3).map(|i| (i * 7919 % 257) as u8).collect();
        Patches::new(&Picture::new(width, height, rgb).unwrap(), patch).unwrap()
    }
}

fn encode(tower: &Tower<'_>, patches: &Patches, isa: Isa) -> Vec<f32> {
    let mut out = vec![1.0; 3];
    tower
        .encode_with(&Kernels::of(isa), &Threads(2), patches, Precision::Exact, &mut Scratch::new(), &mut out)
        .unwrap();
    out
}

fn difference(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max)
}

#[test]
fn encoding_is_the_reference() {
    for (hidden, heads, ff, patch, pooling) in [(72, 1, 50, 4, 3), (96, 2, 40, 2, 2), (8, 2, 3, 1, 1)] {
        let owned = Owned::new(hidden, heads, ff, patch, pooling);
        for (columns, rows) in [(1, 1), (3, 2), (2, 6), (12, 11)] {
            let patches = owned.patches(columns * pooling, rows * pooling);
            let tower = owned.tower();
            let expected = reference::encode(&tower, &patches).unwrap();
            assert_eq!(expected.len(), columns * rows * OUT);
            for isa in Isa::ALL.iter().filter(|isa| isa.is_supported()) {
                let difference = difference(&encode(&tower, &patches, *isa), &expected);
                assert!(difference < 3e-5, "{isa:?} {hidden} {columns}x{rows}: {difference:e}");
            }
        }
    }
}

/// What the test above must tell from the truth.
#[test]
fn wrong_readings_differ() {
    let owned = Owned::new(72, 1, 50, 4, 3);
    let patches = owned.patches(12, 6);
    let expected = reference::encode(&owned.tower(), &patches).unwrap();
    let far = |what: &str, tower: &Tower<'_>| {
        let difference = difference(&encode(tower, &patches, Isa::Scalar), &expected);
        assert!(difference > 3e-3, "{what}: {difference:e}");
    };
    for activation in [Activation::GeluQuick, Activation::Silu] {
        far("activation", &Tower::new(Config { activation, ..owned.config }, owned.weights()).unwrap());
    }
    far("rope", &Tower::new(Config { rope_base: 1e4, ..owned.config }, owned.weights()).unwrap());
    far("standardise", &Tower::new(owned.config, Weights { standardise: None, ..owned.weights() }).unwrap());
    let mut swapped = owned.positions.clone();
    swapped.rotate_left(POSITIONS * 72);
    far("tables", &Tower::new(owned.config, Weights { positions: &swapped, ..owned.weights() }).unwrap());
    // Columns of the patch embedding in the order row, column, channel.
    let mut interleaved = owned.matrices[4].clone();
    for (new, old) in interleaved.chunks_exact_mut(48 * 4).zip(owned.matrices[4].chunks_exact(48 * 4)) {
        for i in 0..48 {
            new[(i % 3 * 16 + i / 3) * 4..][..4].copy_from_slice(&old[i * 4..][..4]);
        }
    }
    let patch = Linear::new(Matrix::new(Type::F32, 72, 48, &interleaved).unwrap());
    far("interleaved", &Tower::new(owned.config, Weights { patches: patch, ..owned.weights() }).unwrap());
}

#[test]
fn clipping_is_that_of_the_reference() {
    let owned = Owned::new(72, 1, 50, 4, 3);
    let patches = owned.patches(6, 3);
    let plain = reference::encode(&owned.tower(), &patches).unwrap();
    let clip = Clip { min: -0.1, max: 0.15 };
    let mut weights = owned.weights();
    for (i, (input, output)) in [(clip, Clip::NONE), (Clip::NONE, clip)].into_iter().enumerate() {
        let block = &mut weights.blocks[i];
        // One of the layers that share an input has bounds of its own, or all have the same.
        (block.q.input, block.q.output) = (input, output);
        (block.gate.input, block.up.input, block.gate.output) = (input, input, output);
        (block.down.input, block.out.output) = (input, output);
    }
    (weights.patches.output, weights.projection.input) = (clip, clip);
    let tower = Tower::new(owned.config, weights).unwrap();
    let expected = reference::encode(&tower, &patches).unwrap();
    assert!(difference(&expected, &plain) > 1e-2);
    for isa in Isa::ALL.iter().filter(|isa| isa.is_supported()) {
        let difference = difference(&encode(&tower, &patches, *isa), &expected);
        assert!(difference < 3e-5, "{isa:?}: {difference:e}");
    }
    assert_eq!((clip.apply(9.0), clip.apply(-9.0), clip.apply(0.01)), (0.15, -0.1, 0.01));
    assert!(clip.apply(f32::NAN).is_nan());
}

/// The second half of a head's dimensions knows rows only, the first columns only; turning keeps lengths, and products
/// of heads depend on the distance of their positions only.
#[test]
fn rope_turns_by_distance() {
    let head: Vec<f32> = (0..24).map(|i| (i * i % 11) as f32 - 4.0).collect();
    let turned = |column, row| {
        let mut head = head.clone();
        reference::rope(&mut head, column, row, 100.0);
        head
    };
    assert_eq!(turned(0, 0), head);
    assert_eq!(turned(5, 0)[12..], head[12..]);
    assert_eq!(turned(0, 5)[..12], head[..12]);
    let dot = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f32>();
    let apart = |a: (usize, usize), b: (usize, usize)| dot(&turned(a.0, a.1), &turned(b.0, b.1));
    assert!((apart((3, 4), (5, 1)) - apart((13, 24), (15, 21))).abs() < 1e-3);
    assert!((apart((3, 4), (5, 1)) - apart((3, 4), (1, 5))).abs() > 1e-1);
}

#[test]
fn results_do_not_depend_on_company() {
    let owned = Owned::new(96, 2, 40, 2, 2);
    let tower = owned.tower();
    let pictures = [owned.patches(30, 34), owned.patches(2, 2), owned.patches(8, 14)];
    let alone: Vec<Vec<f32>> = pictures
        .iter()
        .map(|patches| {
            let mut out = Vec::new();
            tower.encode(&Serial, patches, Precision::Fast, &mut Scratch::new(), &mut out).unwrap();
            out
        })
        .collect();
    let (mut scratch, mut out) = (Scratch::new(), Vec::new());
    for i in [0, 1, 2, 1, 0] {
        for threads in [1, 2, 5] {
            tower.encode(&Threads(threads), &pictures[i], Precision::Fast, &mut scratch, &mut out).unwrap();
            assert!(out == alone[i], "picture {i} with {threads} threads");
        }
    }
}

#[test]
#[should_panic(expected = "stage 1 of another picture, or out of turn")]
fn stages_follow_each_other() {
    let owned = Owned::new(96, 2, 40, 2, 2);
    let tower = owned.tower();
    let (mut scratch, mut out) = (Scratch::new(), Vec::new());
    for (stage, patches) in [(0, owned.patches(2, 2)), (1, owned.patches(8, 14))] {
        tower.encode_stage(&Serial, &patches, Precision::Fast, stage, &mut scratch, &mut out).unwrap();
    }
}

#[test]
fn grids_that_do_not_fit_are_refused() {
    let owned = Owned::new(72, 1, 50, 4, 3);
    let tower = owned.tower();
    let error = |patches: &Patches| -> String {
        let mut out = Vec::new();
        let scratch = &mut Scratch::new();
        let error = tower.encode(&Serial, patches, Precision::Exact, scratch, &mut out).unwrap_err();
        assert_eq!(reference::encode(&tower, patches).unwrap_err(), error);
        error.to_string()
    };
    assert_eq!(error(&owned.patches(42, 3)), "a grid of 42x3 patches: the tower has 40 positions a side");
    assert_eq!(error(&owned.patches(3, 42)), "a grid of 3x42 patches: the tower has 40 positions a side");
    assert_eq!(error(&owned.patches(3, 4)), "a grid of 3x4 patches: it cannot be pooled 3x3");
    let other = Owned::new(96, 2, 40, 2, 2).patches(6, 6);
    assert_eq!(error(&other), "a grid of 6x6 patches: they have 2 pixels a side, the tower takes 4");
    assert_eq!((tower.out_dim(), tower.positions(), tower.config().head_dim()), (OUT, POSITIONS, 72));
}

#[test]
fn weights_that_do_not_go_together_are_named() {
    let owned = Owned::new(72, 1, 50, 4, 3);
    let error = |change: &dyn Fn(&mut Config, &mut Weights<'_>)| {
        let (mut config, mut weights) = (owned.config, owned.weights());
        change(&mut config, &mut weights);
        Tower::new(config, weights).unwrap_err().to_string()
    };
    assert_eq!(
        error(&|config, _| config.heads = 36),
        "72 dimensions and 36 heads: a head must have a multiple of 4 dimensions"
    );
    assert_eq!(error(&|_, w| w.blocks[1].up = w.blocks[1].down), "up of block 1 is 72x50, not 50x72");
    assert_eq!(error(&|_, w| w.blocks[0].q_norm = &[1.0]), "query norm of block 0 has 1 numbers, not 72");
    assert_eq!(
        error(&|_, w| w.blocks[0].down.input.min = f32::NAN),
        "down of block 0 clips its input to NaN … inf"
    );
    assert_eq!(error(&|_, w| w.positions = &[0.0; 72]), "72 numbers of position embeddings of length 72");
    assert_eq!(error(&|config, _| config.eps = f32::NAN), "eps NaN and rope base 100");
}

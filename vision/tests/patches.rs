//! The order of pixels in patches and of patches in pictures, with the wrong orders as controls.

use proptest::prelude::*;
use skep_quant::Serial;
use skep_vision::{Budget, Patches, Picture, Tiling, resize};

fn picture(width: usize, height: usize, pixel: impl Fn(usize, usize) -> [u8; 3]) -> Picture {
    let pixels = (0..height).flat_map(|y| (0..width).map(move |x| (x, y)));
    Picture::new(width, height, pixels.flat_map(|(x, y)| pixel(x, y)).collect()).unwrap()
}

/// A picture in which no two values of a patch, and no two patches, are alike by order alone.
fn noise(width: usize, height: usize, seed: usize) -> Picture {
    picture(width, height, |x, y| {
        [0, 1, 2].map(|c| ((seed + (y * width + x) * 3 + c).wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 40) as u8)
    })
}

/// The patches by the definition: value `c * p * p + dy * p + dx` of patch `row * columns + column`.
fn planar(picture: &Picture, patch: usize) -> Vec<f32> {
    let (columns, rows) = (picture.width() / patch, picture.height() / patch);
    let mut out = vec![f32::NAN; picture.rgb().len()];
    for (at, value) in picture.rgb().iter().enumerate() {
        let (c, x, y) = (at % 3, at / 3 % picture.width(), at / 3 / picture.width());
        let place = (y / patch * columns + x / patch) * 3 * patch * patch;
        out[place + c * patch * patch + y % patch * patch + x % patch] = f32::from(*value) / 255.0;
    }
    assert!(rows * columns * 3 * patch * patch == out.len());
    out
}

/// Transformers' own order, for a weight that has not been permuted: red, green and blue of each pixel together.
fn interleaved(picture: &Picture, patch: usize) -> Vec<f32> {
    let area = patch * patch;
    let order = |vector: &[f32]| (0..3 * area).map(|i| vector[i % 3 * area + i / 3]).collect::<Vec<_>>();
    planar(picture, patch).chunks(3 * area).flat_map(order).collect()
}

/// Columns of patches first.
fn columns_first(picture: &Picture, patch: usize) -> Vec<f32> {
    let (columns, rows) = (picture.width() / patch, picture.height() / patch);
    let vectors = planar(picture, patch);
    let len = 3 * patch * patch;
    let order = (0..columns).flat_map(|column| (0..rows).map(move |row| row * columns + column));
    order.flat_map(|at| vectors[at * len..(at + 1) * len].to_vec()).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn vectors_are_planar_and_in_raster_order(
        columns in 2_usize..6, rows in 2_usize..6, patch in 2_usize..17, seed in any::<u32>(),
    ) {
        let picture = noise(columns * patch, rows * patch, seed as usize);
        let patches = Patches::new(&picture, patch).unwrap();
        prop_assert_eq!((patches.columns(), patches.rows(), patches.patch()), (columns, rows, patch));
        prop_assert_eq!(patches.data(), planar(&picture, patch));
        // The same values in another order are another answer.
        prop_assert_ne!(patches.data(), interleaved(&picture, patch));
        prop_assert_ne!(patches.data(), columns_first(&picture, patch));
    }

    #[test]
    fn sides_must_be_whole_patches(width in 1_usize..40, height in 1_usize..40, patch in 0_usize..20) {
        let whole = patch > 0 && width % patch == 0 && height % patch == 0;
        prop_assert_eq!(Patches::new(&noise(width, height, 0), patch).is_ok(), whole);
    }
}

#[test]
fn one_exact_vector() {
    // 4x2 pixels, patches of 2x2; pixel (x, y) is [10y + x, 100, 255].
    let patches = Patches::new(&picture(4, 2, |x, y| [(10 * y + x) as u8, 100, 255]), 2).unwrap();
    let vector = |red: [u8; 4]| red.into_iter().chain([100; 4]).chain([255; 4]).map(|v| f32::from(v) / 255.0);
    let expected: Vec<f32> = vector([0, 1, 10, 11]).chain(vector([2, 3, 12, 13])).collect();
    assert_eq!(patches.data(), expected);
}

/// Which of the four corner patches are red, of a picture cut as Gemma 4 does it.
fn red_corners(picture: &Picture) -> [bool; 4] {
    let patches = Tiling::GEMMA4V.cut(&Serial, picture, Budget::default()).unwrap();
    let (columns, rows) = (patches.columns(), patches.rows());
    [0, columns - 1, (rows - 1) * columns, rows * columns - 1].map(|at| {
        let vector = &patches.data()[at * 768..(at + 1) * 768];
        let (red, blue) = (&vector[..256], &vector[512..]);
        assert!(
            red.iter().all(|v| *v == red[0]) && blue.iter().all(|v| *v == blue[0]),
            "{:?}",
            &vector[..20]
        );
        assert_eq!(red[0] + blue[0], 1.0);
        red[0] == 1.0
    })
}

#[test]
fn colours_and_sides() {
    const RED: [u8; 3] = [255, 0, 0];
    const BLUE: [u8; 3] = [0, 0, 255];
    for (width, height) in [(47, 53), (96, 96), (640, 480), (200, 1000)] {
        let of = |is_red: &dyn Fn(usize, usize) -> bool| {
            red_corners(&picture(width, height, |x, y| if is_red(x, y) { RED } else { BLUE }))
        };
        assert_eq!(of(&|_, _| true), [true; 4]);
        assert_eq!(of(&|_, _| false), [false; 4]);
        assert_eq!(of(&|x, _| x < width / 2), [true, false, true, false]);
        assert_eq!(of(&|_, y| y < height / 2), [true, true, false, false]);
        assert_eq!(of(&|x, y| (x < width / 2) == (y < height / 2)), [true, false, false, true]);
    }
}

#[test]
fn fine_checkerboards_become_grey() {
    // 2-pixel fields at an eighth of the size are beyond what can be seen: the mean, not an alias.
    let board = picture(1600, 1600, |x, y| [if (x / 2 + y / 2) % 2 == 0 { 255 } else { 0 }; 3]);
    let small = resize(&Serial, &board, 192, 192).unwrap();
    assert!(small.rgb().iter().all(|value| (120..=135).contains(value)), "{:?}", &small.rgb()[..30]);
    // Not shrunk, the fields stay.
    let patches =
        Patches::new(&picture(48, 48, |x, y| [if (x / 2 + y / 2) % 2 == 0 { 255 } else { 0 }; 3]), 16)
            .unwrap();
    assert!(patches.data().iter().all(|value| *value == 0.0 || *value == 1.0));
}

#[test]
fn odd_sizes_fill_their_budget() {
    for (width, height, tokens) in [(1, 1, 256), (1, 2000, 280), (2000, 1, 280), (47, 53, 255)] {
        let cut = Tiling::GEMMA4V.cut(&Serial, &noise(width, height, 1), Budget::default()).unwrap();
        let counted = Tiling::GEMMA4V.soft_tokens(width, height, Budget::default()).unwrap();
        assert_eq!(counted, tokens, "{width}x{height}");
        assert_eq!(cut.columns() * cut.rows(), 9 * tokens);
        assert!(cut.data().iter().all(|value| (0.0..=1.0).contains(value)));
    }
}

/// A picture of the right size reaches the patches untouched.
#[test]
fn the_right_size_is_not_filtered() {
    let exact = noise(480, 336, 3);
    let cut = Tiling::GEMMA4V.cut(&Serial, &exact, Budget::new(70).unwrap()).unwrap();
    assert_eq!(cut, Patches::new(&exact, 16).unwrap());
}

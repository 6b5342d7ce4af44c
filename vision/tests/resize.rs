//! Resampling is Pillow's, bit for bit; the size rule is transformers'.

use std::fs;

use proptest::prelude::*;
use skep_quant::{Parallel, Serial};
use skep_vision::{Budget, Picture, Tiling, resize};

fn lines(name: &str) -> Vec<Vec<String>> {
    let path = format!("{}/tests/pictures/{name}", env!("CARGO_MANIFEST_DIR"));
    let text = fs::read_to_string(&path).unwrap_or_else(|error| panic!("{path}: {error}"));
    let lines = text.lines().filter(|line| !line.starts_with('#'));
    lines.map(|line| line.split(' ').map(str::to_owned).collect()).collect()
}

fn numbers(fields: &[String]) -> Vec<usize> {
    fields.iter().map(|field| field.parse().unwrap()).collect()
}

/// The pixels of `formula` in `make.py`.
fn formula(width: usize, height: usize) -> Picture {
    let value = |n: u64| {
        let noise = (n.wrapping_mul(2_654_435_761) >> 13) as u8;
        match n / 21 % 3 {
            0 => noise,
            1 if noise > 127 => 255,
            _ => 0,
        }
    };
    Picture::new(width, height, (0..(width * height * 3) as u64).map(value).collect()).unwrap()
}

fn hex(digest: [u8; 32]) -> String {
    digest.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Chunks in reverse order, told that there are several workers.
struct Backwards;

// SAFETY: every index is called once, and all have returned at the end of the loop.
unsafe impl Parallel for Backwards {
    fn workers(&self) -> usize {
        3
    }

    fn run(&self, chunks: usize, body: &(dyn Fn(usize) + Sync)) {
        (0..chunks).rev().for_each(body);
    }
}

#[test]
fn every_pixel_is_pillows() {
    let cases = lines("resize.txt");
    assert!(cases.len() >= 18);
    for case in cases {
        let sizes = numbers(&case[..4]);
        let picture = formula(sizes[0], sizes[1]);
        for par in [&Serial as &dyn Parallel, &Backwards] {
            let resized = resize(par, &picture, sizes[2], sizes[3]).unwrap();
            assert_eq!(hex(resized.digest()), case[4], "{sizes:?}");
        }
    }
}

#[test]
fn every_size_is_transformers() {
    let cases = lines("fit.txt");
    assert!(cases.len() >= 600);
    for case in cases {
        let numbers = numbers(&case);
        let budget = Budget::new(numbers[0]).unwrap();
        let fit = Tiling::GEMMA4V.fit(numbers[1], numbers[2], budget).unwrap();
        assert_eq!(fit, (numbers[3], numbers[4]), "{numbers:?}");
    }
}

#[test]
fn impossible_sizes() {
    let picture = formula(3, 2);
    for (width, height) in [(0, 1), (1, 0), (usize::MAX, 2), (usize::MAX / 6, 2)] {
        let error = resize(&Serial, &picture, width, height).unwrap_err();
        assert!(error.to_string().contains(&format!("{width}x{height}")), "{error}");
    }
}

/// The digest knows the pixels and the sides, not only the bytes.
#[test]
fn digests_differ() {
    let rgb: Vec<u8> = (0..18).collect();
    let of = |width, height, rgb: &[u8]| Picture::new(width, height, rgb.to_vec()).unwrap().digest();
    assert_eq!(of(3, 2, &rgb), of(3, 2, &rgb));
    assert_ne!(of(3, 2, &rgb), of(2, 3, &rgb));
    assert_ne!(of(3, 2, &rgb), of(6, 1, &rgb));
    let mut other = rgb.clone();
    other[17] ^= 1;
    assert_ne!(of(3, 2, &rgb), of(3, 2, &other));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn a_flat_picture_stays_flat(
        pixel in any::<[u8; 3]>(), width in 1_usize..60, height in 1_usize..60, to_width in 1_usize..90, to_height in 1_usize..90,
    ) {
        let picture = Picture::new(width, height, pixel.repeat(width * height)).unwrap();
        let resized = resize(&Serial, &picture, to_width, to_height).unwrap();
        prop_assert!(resized.rgb().chunks(3).all(|out| out == pixel));
    }

    /// Mirroring first or last is the same, which a filter off by a fraction of a pixel fails.
    #[test]
    fn mirrors_commute(seed in any::<u8>(), width in 1_usize..40, height in 1_usize..40, to_width in 1_usize..60, to_height in 1_usize..60) {
        let mirrored = |picture: &Picture| {
            let row = picture.width() * 3;
            let rgb = picture.rgb().chunks(row).flat_map(|row| row.chunks(3).rev().flatten().copied());
            Picture::new(picture.width(), picture.height(), rgb.collect()).unwrap()
        };
        let mut rgb = formula(width, height).rgb().to_vec();
        rgb.iter_mut().for_each(|value| *value = value.wrapping_add(seed));
        let picture = Picture::new(width, height, rgb).unwrap();
        let last = mirrored(&resize(&Serial, &picture, to_width, to_height).unwrap());
        let first = resize(&Serial, &mirrored(&picture), to_width, to_height).unwrap();
        // Sums of coefficients run in the other order: one step of rounding in each pass.
        prop_assert!(first.rgb().iter().zip(last.rgb()).all(|(a, b)| a.abs_diff(*b) <= 2));
    }
}

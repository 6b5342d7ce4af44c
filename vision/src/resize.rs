//! Bicubic resampling with antialiasing, bit for bit as Pillow does it for 8-bit channels: a horizontal pass, then a vertical one, with fixed-point coefficients and 8 bits in between.

mod mix;

use alloc::vec;
use alloc::vec::Vec;

use skep_quant::{Parallel, for_each_chunk_mut};

use self::mix::{FRACTION, LANES, clip};
use crate::math::ceil;
use crate::{ErrorKind, Picture, Result};

/// Rows that the horizontal pass takes together.
const BAND: usize = LANES / 3;
/// Output rows per chunk of the vertical pass.
const ROWS: usize = 8;

/// Brings a picture to `width` x `height` pixels: bicubic (a = -0.5), antialiased when it shrinks.
///
/// Equal to `Image.resize(size, Image.Resampling.BICUBIC)` of Pillow up to 12 bit for bit, and of Pillow 13 as long as the
/// aspect ratio is about kept (otherwise that filters vertically first). A direction whose size does not change is not
/// filtered. The result does not depend on `par`.
///
/// # Errors
/// When a side is 0 or the size of the result overflows.
pub fn resize(par: &dyn Parallel, picture: &Picture, width: usize, height: usize) -> Result<Picture> {
    let bytes = |width: usize, height: usize| {
        let bytes = width.checked_mul(height).and_then(|pixels| pixels.checked_mul(3));
        bytes.filter(|bytes| *bytes > 0 && isize::try_from(*bytes).is_ok())
    };
    let refused = || ErrorKind::Empty { width, height };
    let out_bytes = bytes(width, height).ok_or_else(refused)?;
    let wide;
    let source = if width == picture.width() {
        picture.rgb()
    } else {
        let mut rows = vec![0; bytes(width, picture.height()).ok_or_else(refused)?];
        horizontal(par, picture, width, &mut rows);
        wide = rows;
        &wide
    };
    if height == picture.height() {
        return Picture::new(width, height, source.to_vec());
    }
    let mut out = vec![0; out_bytes];
    vertical(par, source, picture.height(), width, height, &mut out);
    Picture::new(width, height, out)
}

/// Filters along rows, from `[height, picture.width, 3]` to `[height, width, 3]`.
///
/// A band of rows is transposed first, so that one weight meets a column of bytes that lie side by side.
fn horizontal(par: &dyn Parallel, picture: &Picture, width: usize, out: &mut [u8]) {
    let taps = Taps::new(picture.width(), width);
    let mix = mix::detect();
    let from = picture.width() * 3;
    for_each_chunk_mut(par, out, BAND * width * 3, |band, out| {
        let rows = out.len() / (width * 3);
        let source = &picture.rgb()[band * BAND * from..][..rows * from];
        let mut columns = vec![0; picture.width() * LANES];
        for (row, pixels) in source.chunks_exact(from).enumerate() {
            for (column, pixel) in columns.chunks_exact_mut(LANES).zip(pixels.chunks_exact(3)) {
                column[row * 3..row * 3 + 3].copy_from_slice(pixel);
            }
        }
        let mut mixed = [0; LANES];
        for x in 0..width {
            let (first, weights) = taps.of(x);
            mix(weights, &columns[first * LANES..], LANES, &mut mixed);
            for (row, pixel) in mixed.chunks_exact(3).take(rows).enumerate() {
                out[(row * width + x) * 3..][..3].copy_from_slice(pixel);
            }
        }
    });
}

/// Filters along columns, from `[from, width, 3]` to `[height, width, 3]`.
fn vertical(par: &dyn Parallel, source: &[u8], from: usize, width: usize, height: usize, out: &mut [u8]) {
    let taps = Taps::new(from, height);
    let mix = mix::detect();
    let row_len = width * 3;
    for_each_chunk_mut(par, out, ROWS * row_len, |chunk, out| {
        for (row, out) in out.chunks_exact_mut(row_len).enumerate() {
            let (first, weights) = taps.of(chunk * ROWS + row);
            let lines = &source[first * row_len..];
            let (strips, rest) = out.as_chunks_mut::<LANES>();
            for (strip, out) in strips.iter_mut().enumerate() {
                mix(weights, &lines[strip * LANES..], row_len, out);
            }
            for (at, out) in (strips.len() * LANES..).zip(rest) {
                let values = lines[at..].iter().step_by(row_len);
                let products = weights.iter().zip(values).map(|(weight, value)| weight * i32::from(*value));
                *out = clip(products.sum::<i32>() + (1 << (FRACTION - 1)));
            }
        }
    });
}

/// Which input pixels an output pixel is made of, along one direction.
struct Taps {
    /// The first input pixel of each output pixel, and where its weights start.
    starts: Vec<(usize, usize)>,
    weights: Vec<i32>,
}

impl Taps {
    fn new(from: usize, to: usize) -> Self {
        let scale = from as f64 / to as f64;
        // Shrinking widens the filter to the distance of output pixels.
        let stretch = if scale < 1.0 { 1.0 } else { scale };
        let support = 2.0 * stretch;
        let mut starts = Vec::with_capacity(to + 1);
        let mut weights = Vec::with_capacity(to * (2 * ceil(support) as usize + 1).min(from));
        let mut exact = Vec::new();
        for pixel in 0..to {
            let center = (pixel as f64 + 0.5) * scale;
            // Float to integer conversion stops at 0 and cuts the fraction.
            let first = (center - support + 0.5) as usize;
            let end = ((center + support + 0.5) as usize).min(from);
            exact.clear();
            exact.extend((first..end).map(|at| cubic((at as f64 - center + 0.5) * (1.0 / stretch))));
            let total: f64 = exact.iter().sum();
            starts.push((first, weights.len()));
            weights.extend(
                exact.iter().map(|weight| fixed(if total == 0.0 { *weight } else { weight / total })),
            );
        }
        starts.push((from, weights.len()));
        Self { starts, weights }
    }

    /// The first input pixel of an output pixel, and the weights from there on.
    fn of(&self, pixel: usize) -> (usize, &[i32]) {
        let (first, start) = self.starts[pixel];
        (first, &self.weights[start..self.starts[pixel + 1].1])
    }
}

/// Keys' cubic convolution kernel with a = -0.5.
fn cubic(x: f64) -> f64 {
    const A: f64 = -0.5;
    let x = if x < 0.0 { -x } else { x };
    if x < 1.0 {
        ((A + 2.0) * x - (A + 3.0)) * x * x + 1.0
    } else if x < 2.0 {
        (((x - 5.0) * x + 8.0) * x - 4.0) * A
    } else {
        0.0
    }
}

/// The nearest fixed-point number, halves away from zero.
fn fixed(weight: f64) -> i32 {
    let scaled = weight * f64::from(1_i32 << FRACTION);
    if weight < 0.0 { (scaled - 0.5) as i32 } else { (scaled + 0.5) as i32 }
}

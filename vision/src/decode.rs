//! Picture files become [`Picture`]s.

mod jpeg;
mod webp;

use alloc::string::ToString;
use alloc::vec;
use alloc::vec::Vec;
use core::fmt::Display;
use core::panic::AssertUnwindSafe;
use std::io::Cursor;
use std::panic::catch_unwind;

use image::metadata::Orientation;
use image::{ColorType, ImageDecoder, ImageError, ImageFormat, ImageReader};

use crate::{Error, ErrorKind, Picture, Result};

/// Bytes that a decoder may take for metadata before the size of the picture is known.
const METADATA: u64 = 16 << 20;

/// What a picture file may ask for.
///
/// Decoding takes at most about 16 bytes of memory a pixel (a 16-bit or animated picture with transparency; 6 to 9 is
/// usual), the file apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Limits {
    /// Bytes of the file.
    pub bytes: usize,
    /// Pixels of the picture.
    pub pixels: usize,
    /// Pixels of its longer side.
    pub side: usize,
}

impl Default for Limits {
    /// 32 MiB, 64 million pixels, 65535 pixels a side.
    fn default() -> Self {
        Self { bytes: 32 << 20, pixels: 64_000_000, side: 65535 }
    }
}

impl Limits {
    fn check(&self, width: u32, height: u32) -> Result<()> {
        let (width, height) = (width as usize, height as usize);
        if width == 0 || height == 0 {
            return Err(ErrorKind::Empty { width, height }.into());
        }
        if width.max(height) > self.side {
            return Err(ErrorKind::Side { width, height, limit: self.side }.into());
        }
        if width.checked_mul(height).is_none_or(|pixels| pixels > self.pixels) {
            return Err(ErrorKind::Pixels { width, height, limit: self.pixels }.into());
        }
        Ok(())
    }
}

/// Decodes a PNG, JPEG, WebP or GIF file, told apart by its content.
///
/// The size is checked before pixels are decoded. Of an animation the first frame is taken. The picture is turned as
/// its EXIF orientation says. Transparency is composited over white. 16-bit channels are rounded to 8 bits, grey becomes
/// red = green = blue, and CMYK is read as Adobe's inverted CMYK (as all common readers do). Colour profiles are
/// ignored.
///
/// # Errors
/// When the file is of another format, over the limits, damaged or cut short.
pub fn decode(bytes: &[u8], limits: &Limits) -> Result<Picture> {
    if bytes.len() > limits.bytes {
        return Err(ErrorKind::File { bytes: bytes.len(), limit: limits.bytes }.into());
    }
    let format = format(bytes)?;
    // The decoders are made by others; should one panic, that is this file's error and nobody else's.
    catch_unwind(AssertUnwindSafe(|| decode_as(format, bytes, limits)))
        .unwrap_or_else(|_| Err(damaged(format, "the decoder gave up on it")))
}

fn format(bytes: &[u8]) -> Result<ImageFormat> {
    let found = match image::guess_format(bytes) {
        Ok(format @ (ImageFormat::Png | ImageFormat::Jpeg | ImageFormat::WebP | ImageFormat::Gif)) => {
            return Ok(format);
        }
        Ok(other) => name(other),
        Err(_) if bytes.is_empty() => "an empty",
        Err(_) => "an unknown",
    };
    Err(ErrorKind::Format { found }.into())
}

fn decode_as(format: ImageFormat, mut bytes: &[u8], limits: &Limits) -> Result<Picture> {
    let failed = |error: ImageError| damaged(format, error);
    match format {
        ImageFormat::Jpeg => jpeg::check(bytes).map_err(|reason| damaged(format, reason))?,
        ImageFormat::WebP => bytes = webp::check(bytes, limits)?.map_err(|reason| damaged(format, reason))?,
        _ => {}
    }
    let mut reader = ImageReader::with_format(Cursor::new(bytes), format);
    let mut allowed = image::Limits::default();
    allowed.max_alloc = Some(METADATA);
    reader.limits(allowed.clone());
    let mut decoder = reader.into_decoder().map_err(failed)?;

    let (width, height) = decoder.dimensions();
    limits.check(width, height)?;
    let total = decoder.total_bytes();
    allowed.max_alloc = Some(METADATA + 2 * total);
    decoder.set_limits(allowed).map_err(failed)?;

    let color = decoder.color_type();
    // Damaged metadata do not make the pixels unreadable.
    let orientation = decoder.orientation().unwrap_or(Orientation::NoTransforms);
    let total = usize::try_from(total).map_err(|_| damaged(format, "too large for this machine"))?;
    let mut raw = vec![0; total];
    decoder.read_image(&mut raw).map_err(failed)?;
    let rgb = rgb(raw, color).ok_or_else(|| damaged(format, "of an unknown pixel format"))?;
    turned(Picture::new(width as usize, height as usize, rgb)?, orientation)
}

fn damaged(format: ImageFormat, reason: impl Display) -> Error {
    ErrorKind::Damaged { format: name(format), reason: reason.to_string() }.into()
}

fn name(format: ImageFormat) -> &'static str {
    match format {
        ImageFormat::Png => "a PNG",
        ImageFormat::Jpeg => "a JPEG",
        ImageFormat::WebP => "a WebP",
        ImageFormat::Gif => "a GIF",
        ImageFormat::Avif => "an AVIF",
        ImageFormat::Bmp => "a BMP",
        ImageFormat::Ico => "an ICO",
        ImageFormat::Tiff => "a TIFF",
        _ => "another picture",
    }
}

/// Red, green and blue of pixels as a decoder gives them, channels of 16 bits in the machine's byte order.
fn rgb(raw: Vec<u8>, color: ColorType) -> Option<Vec<u8>> {
    let wide = |at: &[u8]| u16::from_ne_bytes([at[0], at[1]]);
    Some(match color {
        ColorType::Rgb8 => raw,
        ColorType::L8 => raw.iter().flat_map(|grey| [*grey; 3]).collect(),
        ColorType::La8 => map(&raw, |[grey, alpha]: [u8; 2]| [over_white8(grey, alpha); 3]),
        ColorType::Rgba8 => map(&raw, |[r, g, b, alpha]| [r, g, b].map(|value| over_white8(value, alpha))),
        ColorType::L16 => map(&raw, |pixel: [u8; 2]| [over_white16(wide(&pixel), u16::MAX); 3]),
        ColorType::La16 => map(&raw, |pixel: [u8; 4]| [over_white16(wide(&pixel), wide(&pixel[2..])); 3]),
        ColorType::Rgb16 => {
            map(&raw, |pixel: [u8; 6]| [0, 2, 4].map(|at| over_white16(wide(&pixel[at..]), u16::MAX)))
        }
        ColorType::Rgba16 => map(&raw, |pixel: [u8; 8]| {
            [0, 2, 4].map(|at| over_white16(wide(&pixel[at..]), wide(&pixel[6..])))
        }),
        _ => return None,
    })
}

fn map<const N: usize>(raw: &[u8], pixel: impl Fn([u8; N]) -> [u8; 3]) -> Vec<u8> {
    let mut rgb = Vec::with_capacity(raw.len() / N * 3);
    for chunk in raw.as_chunks::<N>().0 {
        rgb.extend(pixel(*chunk));
    }
    rgb
}

fn over_white8(value: u8, alpha: u8) -> u8 {
    let (value, alpha) = (u32::from(value), u32::from(alpha));
    ((value * alpha + 255 * (255 - alpha) + 127) / 255) as u8
}

/// Composited in 16 bits and rounded to 8 once.
fn over_white16(value: u16, alpha: u16) -> u8 {
    const MAX: u64 = u16::MAX as u64;
    let (value, alpha) = (u64::from(value), u64::from(alpha));
    let sum = value * alpha + MAX * (MAX - alpha);
    ((sum * 255 + MAX * MAX / 2) / (MAX * MAX)) as u8
}

/// The picture as it is to be seen.
fn turned(picture: Picture, orientation: Orientation) -> Result<Picture> {
    let (width, height) = (picture.width(), picture.height());
    let (right, bottom) = (width - 1, height - 1);
    // Where the pixel at (x, y) of the result comes from.
    let from: fn(usize, usize, usize, usize) -> (usize, usize) = match orientation {
        Orientation::NoTransforms => return Ok(picture),
        Orientation::FlipHorizontal => |x, y, right, _| (right - x, y),
        Orientation::Rotate180 => |x, y, right, bottom| (right - x, bottom - y),
        Orientation::FlipVertical => |x, y, _, bottom| (x, bottom - y),
        Orientation::Rotate90FlipH => |x, y, _, _| (y, x),
        Orientation::Rotate90 => |x, y, _, bottom| (y, bottom - x),
        Orientation::Rotate270FlipH => |x, y, right, bottom| (right - y, bottom - x),
        Orientation::Rotate270 => |x, y, right, _| (right - y, x),
    };
    let sideways = orientation.to_exif() >= 5;
    let (out_width, out_height) = if sideways { (height, width) } else { (width, height) };
    let mut rgb = Vec::with_capacity(picture.rgb().len());
    for y in 0..out_height {
        for x in 0..out_width {
            let (x, y) = from(x, y, right, bottom);
            rgb.extend_from_slice(&picture.rgb()[(y * width + x) * 3..][..3]);
        }
    }
    Picture::new(out_width, out_height, rgb)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn transparency_over_white() {
        assert_eq!(over_white8(0, 0), 255);
        assert_eq!(over_white8(17, 255), 17);
        for value in 0..=255_u8 {
            for alpha in 0..=255_u8 {
                let exact =
                    (f64::from(value) * f64::from(alpha) + 255.0 * (255.0 - f64::from(alpha))) / 255.0;
                assert_eq!(over_white8(value, alpha), exact.round() as u8);
            }
        }
    }

    #[test]
    fn sixteen_bits_are_rounded() {
        for value in 0..=u16::MAX {
            let exact = f64::from(value) / 257.0;
            assert_eq!(over_white16(value, u16::MAX), exact.round() as u8, "{value}");
            assert_eq!(over_white16(value, 0), 255);
        }
        // Cutting the low byte off would give 0.
        assert_eq!(over_white16(0x00FF, u16::MAX), 1);
    }
}

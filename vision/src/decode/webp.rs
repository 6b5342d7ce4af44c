use super::Limits;
use crate::Result;

const CUT: &str = "it is cut short";

/// The RIFF file itself, without what may follow it, once its chunks are known to lie within it and no bitstream is
/// larger than the canvas that the header speaks of: the decoder would take memory for both before it looks.
///
/// Outer errors are limits, inner ones damages. Follows the container specification of WebP (RFC 9649).
pub(super) fn check<'a>(bytes: &'a [u8], limits: &Limits) -> Result<Result<&'a [u8], &'static str>> {
    let Some(size) = bytes.get(4..8).and_then(|size| size.first_chunk()) else { return Ok(Err(CUT)) };
    let Some(file) = bytes.get(..(u32::from_le_bytes(*size) as usize).saturating_add(8)) else {
        return Ok(Err(CUT));
    };
    let Some(body) = file.get(12..) else { return Ok(Err(CUT)) };
    let mut canvas = None;
    if let Err(reason) = chunks(body, &mut |name, data| bitstream(name, data, &mut canvas)) {
        return Ok(Err(reason));
    }
    match canvas {
        Some((width, height)) => limits.check(width, height).map(|()| Ok(file)),
        None => Ok(Err("it holds no picture")),
    }
}

/// Calls `visit` with every chunk's name and data.
fn chunks<'a>(
    mut rest: &'a [u8],
    visit: &mut impl FnMut(&[u8], &'a [u8]) -> Result<(), &'static str>,
) -> Result<(), &'static str> {
    while let Some((header, data)) = rest.split_first_chunk::<8>() {
        let size = u32::from_le_bytes([header[4], header[5], header[6], header[7]]) as usize;
        visit(&header[..4], data.get(..size).ok_or(CUT)?)?;
        rest = data.get(size + size % 2..).unwrap_or_default();
    }
    Ok(())
}

fn bitstream(name: &[u8], data: &[u8], canvas: &mut Option<(u32, u32)>) -> Result<(), &'static str> {
    let three = |at: usize| match data.get(at..at + 3) {
        Some(bytes) => Ok(u32::from_le_bytes([bytes[0], bytes[1], bytes[2], 0])),
        None => Err(CUT),
    };
    let (width, height) = match name {
        b"VP8X" => (three(4)? + 1, three(7)? + 1),
        // A frame's header of 16 bytes, then chunks.
        b"ANMF" => {
            return chunks(data.get(16..).ok_or(CUT)?, &mut |name, data| bitstream(name, data, canvas));
        }
        b"VP8 " => (three(6)? & 0x3FFF, three(7)? >> 8 & 0x3FFF),
        b"VP8L" => {
            let sizes = data.get(1..5).and_then(|bytes| bytes.first_chunk()).ok_or(CUT)?;
            let sizes = u32::from_le_bytes(*sizes);
            ((sizes & 0x3FFF) + 1, (sizes >> 14 & 0x3FFF) + 1)
        }
        _ => return Ok(()),
    };
    let (canvas_width, canvas_height) = *canvas.get_or_insert((width, height));
    if width > canvas_width || height > canvas_height {
        return Err("a frame is larger than the canvas");
    }
    Ok(())
}

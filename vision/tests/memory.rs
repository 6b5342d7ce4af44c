//! What decoding takes of memory, for honest files and hostile ones.
#![cfg(feature = "decode")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::fs;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use skep_vision::{ErrorKind, Limits, Result, decode};

/// Counts the bytes held, and the most that were.
struct Counting;

static HELD: AtomicUsize = AtomicUsize::new(0);
static MOST: AtomicUsize = AtomicUsize::new(0);
static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

// SAFETY: everything is left to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let held = HELD.fetch_add(layout.size(), Ordering::Relaxed) + layout.size();
        MOST.fetch_max(held, Ordering::Relaxed);
        // SAFETY: the caller keeps the contract.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        let held = HELD.fetch_add(layout.size(), Ordering::Relaxed) + layout.size();
        MOST.fetch_max(held, Ordering::Relaxed);
        // SAFETY: the caller keeps the contract.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        HELD.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: the caller keeps the contract.
        unsafe { System.dealloc(at, layout) }
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;

/// The result, without its pixels, and the most bytes held on the way.
fn measured(bytes: &[u8], limits: &Limits) -> (Result<(usize, usize)>, usize) {
    let _alone = ONE_AT_A_TIME.lock().unwrap();
    let before = HELD.load(Ordering::Relaxed);
    MOST.store(before, Ordering::Relaxed);
    let result = decode(bytes, limits).map(|picture| (picture.width(), picture.height()));
    (result, MOST.load(Ordering::Relaxed) - before)
}

fn file(name: &str) -> Vec<u8> {
    let path = format!("{}/tests/pictures/{name}", env!("CARGO_MANIFEST_DIR"));
    fs::read(&path).unwrap_or_else(|error| panic!("{path}: {error}"))
}

fn crc(bytes: &[u8]) -> u32 {
    !bytes.iter().fold(!0_u32, |mut crc, byte| {
        crc ^= u32::from(*byte);
        for _ in 0..8 {
            crc = crc >> 1 ^ 0xEDB8_8320 & (crc & 1).wrapping_neg();
        }
        crc
    })
}

fn png(chunks: &[(&[u8; 4], Vec<u8>)]) -> Vec<u8> {
    let mut bytes = b"\x89PNG\r\n\x1a\n".to_vec();
    for (name, data) in chunks {
        bytes.extend((data.len() as u32).to_be_bytes());
        let named = [name.as_slice(), data].concat();
        bytes.extend(&named);
        bytes.extend(crc(&named).to_be_bytes());
    }
    bytes
}

fn header(width: u32, height: u32, depth: u8, color: u8) -> Vec<u8> {
    let mut header = [width.to_be_bytes(), height.to_be_bytes()].concat();
    header.extend([depth, color, 0, 0, 0]);
    header
}

/// A zlib stream of about `1030 * packed` zeros: a dynamic block that says "the last byte 258 times" with 2 bits.
fn zeros(packed: usize) -> Vec<u8> {
    let mut bits = Bits::default();
    bits.put(1, 1);
    bits.put(2, 2);
    // 258 literal and length codes (literal 0 and end of block unused but for the end, 285 is needed): 286; 1 distance.
    bits.put(29, 5);
    bits.put(0, 5);
    bits.put(14, 4);
    // Lengths of the code length code, in the order of RFC 1951: 18 and 1 and 2 are used.
    for length in [0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 2, 0, 2] {
        bits.put(length, 3);
    }
    // Codes: 18 is 0; 1 is 10; 2 is 11 (most significant bit first).
    let (zeros, one, two) = ((0, 1), (0b01, 2), (0b11, 2));
    let run = |bits: &mut Bits, count: u32| {
        bits.put(zeros.0, zeros.1);
        bits.put(count - 11, 7);
    };
    bits.put(two.0, two.1); // literal 0: 2 bits
    run(&mut bits, 138);
    run(&mut bits, 117);
    bits.put(two.0, two.1); // 256: 2 bits
    run(&mut bits, 28);
    bits.put(one.0, one.1); // 285: 1 bit
    bits.put(one.0, one.1); // distance 1: 1 bit
    // Codes: 285 is 0, literal 0 is 10, end is 11.
    bits.put(0b01, 2);
    for _ in 0..packed * 4 {
        bits.put(0, 2);
    }
    bits.put(0b11, 2);
    let mut stream = vec![0x78, 0x9C];
    stream.extend(bits.bytes);
    // The check sum is not looked at before the end of the stream.
    stream.extend([0; 5]);
    stream
}

#[derive(Default)]
struct Bits {
    bytes: Vec<u8>,
    used: u32,
}

impl Bits {
    fn put(&mut self, value: u32, count: u32) {
        for bit in 0..count {
            if self.used.is_multiple_of(8) {
                self.bytes.push(0);
            }
            *self.bytes.last_mut().unwrap() |= ((value >> bit & 1) as u8) << (self.used % 8);
            self.used += 1;
        }
    }
}

#[test]
fn sizes_are_checked_before_memory_is_taken() {
    let limits = Limits::default();
    for (width, height) in [(20_000, 20_000), (1, 100_000), (65_535, 65_535), (u32::MAX / 2, u32::MAX / 2)] {
        let bytes =
            png(&[(b"IHDR", header(width, height, 16, 6)), (b"IDAT", zeros(100)), (b"IEND", Vec::new())]);
        let (result, most) = measured(&bytes, &limits);
        assert!(matches!(
            result.unwrap_err().kind(),
            ErrorKind::Pixels { .. } | ErrorKind::Side { .. } | ErrorKind::Damaged { .. }
        ));
        assert!(most < 2 << 20, "{width}x{height}: {most} bytes");
    }
    // The same in the other formats: sizes of their headers raised.
    let mut gif = file("still.gif");
    gif[6..10].fill(0xFF);
    let mut jpeg = file("rgb.jpg");
    let at = jpeg.windows(2).position(|pair| pair == [0xFF, 0xC0]).unwrap();
    jpeg[at + 5..at + 9].fill(0xFF);
    let mut webp = file("lossy.webp");
    webp[26..30].fill(0x3F);
    for bytes in [gif, jpeg, webp] {
        let (result, most) = measured(&bytes, &limits);
        assert!(matches!(result.as_ref().unwrap_err().kind(), ErrorKind::Pixels { .. }), "{result:?}");
        assert!(most < 2 << 20, "{most} bytes");
    }
}

/// The stream is a real bomb: as image data of the right size it decodes.
#[test]
fn compressed_metadata_do_not_count_as_pixels() {
    let rows = |bytes: usize| bytes / (1 + 4000);
    let packed = 20_000;
    let height = rows(packed * 4 * 258) as u32;
    let plain =
        png(&[(b"IHDR", header(4000, height, 8, 0)), (b"IDAT", zeros(packed)), (b"IEND", Vec::new())]);
    assert_eq!(measured(&plain, &Limits::default()).0, Ok((4000, height as usize)));

    // A profile of 500 MB behind a picture of one pixel.
    let profile = [b"name\0\0".to_vec(), zeros(500_000)].concat();
    let tiny = [b"\x78\x01\x01\x02\0\xFD\xFF\0\x07".to_vec(), 9_u32.to_be_bytes().to_vec()].concat();
    let bytes =
        png(&[(b"IHDR", header(1, 1, 8, 0)), (b"iCCP", profile), (b"IDAT", tiny), (b"IEND", Vec::new())]);
    let (result, most) = measured(&bytes, &Limits::default());
    assert_eq!(result, Ok((1, 1)));
    assert!(most < 40 << 20, "{most} bytes");
}

#[test]
fn chunks_that_lie_about_their_length() {
    // A WebP whose EXIF chunk says 4 GB.
    let mut bytes = file("turned-webp.webp");
    let at = bytes.windows(4).position(|name| name == b"EXIF").unwrap();
    bytes[at + 4..at + 8].copy_from_slice(&0xFFFF_FFF0_u32.to_le_bytes());
    let (result, most) = measured(&bytes, &Limits::default());
    assert!(matches!(result.unwrap_err().kind(), ErrorKind::Damaged { .. }));
    assert!(most < 2 << 20, "{most} bytes");
    // A bitstream of 16383x16383 on a canvas of 13x9.
    let mut bytes = file("lossy-alpha.webp");
    let at = bytes.windows(4).position(|name| name == b"VP8 ").unwrap();
    bytes[at + 14..at + 18].copy_from_slice(&[0xFF, 0x3F, 0xFF, 0x3F]);
    let (result, most) = measured(&bytes, &Limits::default());
    assert_eq!(
        result.unwrap_err().to_string(),
        "a WebP file that cannot be decoded: a frame is larger than the canvas"
    );
    assert!(most < 2 << 20, "{most} bytes");
    // A GIF frame of 65535x65535 on a canvas of 13x9.
    let mut bytes = file("still.gif");
    let at = bytes.windows(10).position(|part| part == [0x2C, 0, 0, 0, 0, 13, 0, 9, 0, 0x00]);
    let at =
        at.or_else(|| bytes.windows(9).position(|part| part == [0x2C, 0, 0, 0, 0, 13, 0, 9, 0])).unwrap();
    bytes[at + 5..at + 9].fill(0xFF);
    let (result, most) = measured(&bytes, &Limits::default());
    assert!(matches!(result.unwrap_err().kind(), ErrorKind::Damaged { .. }));
    assert!(most < 20 << 20, "{most} bytes");
}

/// The promise of [`Limits`]: 16 bytes a pixel beside the file, and a little for tables.
#[test]
fn memory_is_bounded_by_pixels() {
    let mut wide = Vec::new();
    for depth_color in [(8, 0), (8, 2), (8, 6), (16, 0), (16, 2), (16, 6)] {
        let (depth, color) = depth_color;
        let channels = [1, 0, 3, 0, 2, 0, 4][usize::from(color)];
        let row = 1 + 1000 * channels * usize::from(depth) / 8;
        let packed = (row * 1000).div_ceil(4 * 258);
        wide.push(png(&[
            (b"IHDR", header(1000, 1000, depth, color)),
            (b"IDAT", zeros(packed)),
            (b"IEND", Vec::new()),
        ]));
    }
    let large = format!("{}/tests/pictures/large", env!("CARGO_MANIFEST_DIR"));
    let files = fs::read_dir(large).unwrap();
    wide.extend(files.map(|entry| fs::read(entry.unwrap().path()).unwrap()));
    assert_eq!(wide.len(), 6 + 6);
    for bytes in wide {
        let (result, most) = measured(&bytes, &Limits::default());
        assert_eq!(result, Ok((1000, 1000)));
        assert!(most < 16_000_000 + bytes.len() + (1 << 20), "{most} bytes");
    }
}

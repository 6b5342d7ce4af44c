//! Float products with many tokens: a tile of rows and tokens at a time in registers, rows decoded to f32 once for a
//! block of tokens.
//!
//! The sums are those of the portable kernel, operation by operation: 32 partial sums per value, element `k` in sum
//! `k % 32`. Rows and tokens are packed by planes, each the elements of one vector of partial sums, so that a tile has one
//! register per value; all planes of a tile's values are added up at the end.

use alloc::vec::Vec;
use core::arch::x86_64::{_MM_HINT_T1, _mm_prefetch};
use core::cell::RefCell;

use super::scalar::LANES;
use crate::matmul::{GROUP_TOKENS, Tile, block_tokens};
use crate::{Matrix, Type};

/// Floats of a plane taken at a time: for the rows of a tile they stay in the first-level cache.
const SPAN: usize = 768;
/// Tokens whose partial sums are held at once; a multiple of the tokens of every tile.
const GROUP: usize = GROUP_TOKENS;
/// Fewer tokens or rows do not repay the packing.
const LEAST_TOKENS: usize = 4;
const LEAST_ROWS: usize = 16;
/// Values of the largest tile.
const MOST_VALUES: usize = 24;

/// The inner tile of an instruction set. To be used on processors with its features only, which is what the functions
/// require.
pub(super) struct Micro {
    /// Floats of a vector.
    pub(super) width: usize,
    /// Rows and tokens of the tile.
    pub(super) rows: usize,
    pub(super) tokens: usize,
    /// Splits numbers into planes this far apart; the rest of the last lanes is as given.
    pub(super) split: unsafe fn(&[f32], f32, &mut [f32], usize),
    /// Decodes blocks of a type to planes this far apart; the rest of the last lanes is 0.
    pub(super) decode: unsafe fn(Type, &[u8], &mut [f32], usize),
    pub(super) step: Step,
    /// Adds up the planes of partial sums, and then the partial sums, of each value of a tile.
    pub(super) reduce: unsafe fn(&[f32], &mut [f32; MOST_VALUES]),
}

/// `step(w, w_row, x, x_row, sums, fresh, vectors)`: `sums[t * rows + r] += w[r] * x[t]`, vector by vector, from zero if
/// `fresh`: of a plane of rows and one of tokens, each with the distance from one row or token to the next.
type Step = unsafe fn(&[f32], usize, &[f32], usize, &mut [f32], bool, usize);

/// How a row of this many elements is packed.
#[derive(Clone, Copy)]
struct Planes {
    count: usize,
    /// Floats of a plane.
    len: usize,
    /// Distance of planes: a cache line more, lest rows lie a power of two apart.
    stride: usize,
}

impl Planes {
    fn new(cols: usize, width: usize) -> Self {
        let len = cols.div_ceil(LANES) * width;
        Self { count: LANES / width, len, stride: len.next_multiple_of(16) + 16 }
    }

    /// Floats of a packed row.
    fn row(self) -> usize {
        self.count * self.stride
    }
}

/// Whether [`exact`] is faster than one row after the other.
pub(super) fn pays(tile: &Tile<'_>) -> bool {
    tile.out.tokens() >= LEAST_TOKENS && tile.w.rows() >= LEAST_ROWS
}

/// A cache line of floats.
#[derive(Clone, Copy, bytemuck::Zeroable, bytemuck::Pod)]
#[repr(C, align(64))]
struct Line([f32; 16]);

/// Memory of a thread.
#[derive(Default)]
struct Space {
    /// Packed tokens of a block.
    x: Vec<Line>,
    /// Packed rows of a tile.
    w: Vec<Line>,
    /// Partial sums of a group: by tile, plane, token and row.
    sums: Vec<Line>,
}

/// `len` floats of a buffer that grows.
fn floats(lines: &mut Vec<Line>, len: usize) -> &mut [f32] {
    let n = len.div_ceil(16);
    if lines.len() < n {
        lines.resize(n, Line([0.0; 16]));
    }
    &mut bytemuck::must_cast_slice_mut(lines)[..len]
}

std::thread_local! {
    static SPACE: RefCell<Space> = RefCell::default();
}

/// # Safety
/// The processor must have the features of `micro`.
pub(super) unsafe fn exact(micro: &Micro, tile: &mut Tile<'_>) {
    let planes = Planes::new(tile.w.cols(), micro.width);
    SPACE.with_borrow_mut(|space| {
        let n_tokens = tile.out.tokens();
        let block = block_tokens(tile.w.cols());
        for first in (0..n_tokens).step_by(block) {
            let n = block.min(n_tokens - first);
            let x = floats(&mut space.x, n.next_multiple_of(micro.tokens) * planes.row());
            for (i, packed) in x.chunks_exact_mut(planes.row()).enumerate() {
                if i < n {
                    let row = tile.acts.f32_row(tile.tokens.get(first + i));
                    // Times a weight of zero -0 stays -0, which changes no sum.
                    // SAFETY: the processor has the features, by contract; so below.
                    unsafe { (micro.split)(row, -0.0, packed, planes.stride) };
                } else {
                    packed.fill(0.0);
                }
            }
            for row in (0..tile.w.rows()).step_by(micro.rows) {
                // Rows past the last hold what was there before; their values are not used.
                let w = floats(&mut space.w, micro.rows * planes.row());
                for (r, w) in w.chunks_exact_mut(planes.row()).enumerate().take(tile.w.rows() - row) {
                    // SAFETY: as above.
                    unsafe { (micro.decode)(tile.w.ty(), tile.w.row(row + r), w, planes.stride) };
                }
                let mut ahead = Ahead::new(&tile.w, row + micro.rows, micro.rows, n.div_ceil(micro.tokens));
                for from in (0..n).step_by(GROUP) {
                    let n = GROUP.min(n - from);
                    // SAFETY: as above.
                    unsafe { group(micro, planes, space, from, n, &mut ahead) };
                    // SAFETY: as above.
                    unsafe { put(micro, tile, &space.sums, first + from, n, row) };
                }
            }
        }
    });
}

/// The bytes of the rows to be decoded next, brought closer bit by bit while these are at work.
struct Ahead {
    next: *const u8,
    lines: usize,
    /// Lines per tile.
    share: usize,
}

impl Ahead {
    const LINE: usize = 64;

    fn new(w: &Matrix<'_>, row: usize, rows: usize, tiles: usize) -> Self {
        let bytes = &w.data()
            [w.data().len().min(row * w.row_bytes())..w.data().len().min((row + rows) * w.row_bytes())];
        let lines = bytes.len().div_ceil(Self::LINE);
        Self { next: bytes.as_ptr(), lines, share: lines.div_ceil(tiles) }
    }

    #[inline]
    #[allow(unused_unsafe)] // Safe in newer compilers than the oldest supported.
    fn tile(&mut self) {
        for _ in 0..self.share.min(self.lines) {
            // SAFETY: a prefetch does not access memory architecturally, so any address will do.
            unsafe { _mm_prefetch::<_MM_HINT_T1>(self.next.cast()) };
            self.next = self.next.wrapping_add(Self::LINE);
            self.lines -= 1;
        }
    }
}

/// The partial sums of the packed rows with `n` tokens from `from` on.
///
/// # Safety
/// As [`exact`].
unsafe fn group(micro: &Micro, planes: Planes, space: &mut Space, from: usize, n: usize, ahead: &mut Ahead) {
    let Space { x, w, sums } = space;
    let values = micro.rows * micro.tokens * micro.width;
    let n_tiles = n.div_ceil(micro.tokens);
    let x = floats(x, (from + n_tiles * micro.tokens) * planes.row());
    let w = floats(w, micro.rows * planes.row());
    let sums = floats(sums, n_tiles * values * planes.count);
    for plane in 0..planes.count {
        for at in (0..planes.len).step_by(SPAN) {
            let vectors = SPAN.min(planes.len - at) / micro.width;
            let fresh = at == 0;
            let at = plane * planes.stride + at;
            for (i, sums) in sums.chunks_exact_mut(values * planes.count).enumerate() {
                let x = &x[(from + i * micro.tokens) * planes.row()..][at..];
                let sums = &mut sums[plane * values..][..values];
                // SAFETY: the processor has the features, by contract.
                unsafe { (micro.step)(&w[at..], planes.row(), x, planes.row(), sums, fresh, vectors) };
                if plane == 0 && fresh {
                    ahead.tile();
                }
            }
        }
    }
}

/// Adds up the partial sums of a group and writes its values.
///
/// # Safety
/// As [`exact`].
unsafe fn put(micro: &Micro, tile: &mut Tile<'_>, sums: &[Line], first: usize, n: usize, row: usize) {
    let mut out = [0.0; MOST_VALUES];
    let rows = micro.rows.min(tile.w.rows() - row);
    let sums: &[f32] = bytemuck::must_cast_slice(sums);
    for (i, sums) in sums.chunks_exact(micro.rows * micro.tokens * LANES).enumerate() {
        let at = i * micro.tokens;
        if at >= n {
            break;
        }
        // SAFETY: the processor has the features, by contract.
        unsafe { (micro.reduce)(sums, &mut out) };
        for (t, out) in out.chunks_exact(micro.rows).enumerate().take(micro.tokens.min(n - at)) {
            match &out[..rows] {
                // A length known to the compiler is a store, any other a call.
                out if out.len() == 8 => tile.out.put(first + at + t, row, &out[..8]),
                out if out.len() == 4 => tile.out.put(first + at + t, row, &out[..4]),
                out => tile.out.put(first + at + t, row, out),
            }
        }
    }
}

/// Splits numbers into planes of vectors of `WIDTH`.
#[inline(always)]
pub(super) fn split<const WIDTH: usize>(x: &[f32], pad: f32, out: &mut [f32], stride: usize) {
    split_at::<WIDTH>(x, pad, out, stride, 0);
}

/// [`split`], from vector `first` of the planes on.
#[inline(always)]
fn split_at<const WIDTH: usize>(x: &[f32], pad: f32, out: &mut [f32], stride: usize, first: usize) {
    let (whole, tail) = x.as_chunks::<LANES>();
    let mut last = [pad; LANES];
    last[..tail.len()].copy_from_slice(tail);
    let last = if tail.is_empty() { &[][..] } else { core::slice::from_ref(&last) };
    for (plane, out) in out.chunks_exact_mut(stride).enumerate().take(LANES / WIDTH) {
        let lanes = whole.iter().chain(last);
        for (x, out) in lanes.zip(&mut out.as_chunks_mut::<WIDTH>().0[first..]) {
            *out = x.as_chunks().0[plane];
        }
    }
}

/// Decodes blocks by way of a buffer, for types without a faster way.
#[inline(always)]
pub(super) fn decode_split<const WIDTH: usize>(
    bytes: &[u8],
    ty: Type,
    out: &mut [f32],
    stride: usize,
    decode: impl Fn(&[u8], &mut [f32]),
) {
    const CHUNK: usize = 512;
    let mut buffer = [0.0; CHUNK];
    let chunk_bytes = CHUNK / ty.block_len() * ty.block_bytes();
    for (i, bytes) in bytes.chunks(chunk_bytes).enumerate() {
        let decoded = &mut buffer[..bytes.len() / ty.block_bytes() * ty.block_len()];
        decode(bytes, decoded);
        split_at::<WIDTH>(decoded, 0.0, out, stride, i * CHUNK / LANES);
    }
}

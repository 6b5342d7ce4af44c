use super::{Batch, Cache, DIMS, GROUPS, Gate, Kernels, PAGE, WORD, check_heads, size_class, words};
use crate::{Heads, Mask};
use skep_hal::Result;
use skep_hal::gpu::{Args, Device, Memory, Stream, View};

/// Steps of up to this many rows are decoded row by row, whatever their spans.
const FEW_ROWS: usize = 8;

/// Most splits of a row's pages; a block merges them.
const MAX_SPLITS: usize = 128;

/// Multiprocessors assumed of a device that does not say.
const UNITS: usize = 128;

/// Room for what the splits of a row's pages find before they are merged, shared by the layers of a model.
///
/// The number of splits of a step depends on its number of rows and on the sizes given here, never on context lengths.
#[derive(Debug)]
pub struct Scratch {
    sums: Memory,
    stats: Memory,
    rows: usize,
    tokens: usize,
    /// Blocks that fill the device.
    blocks: usize,
}

impl Scratch {
    /// Room for steps of up to `rows` rows that are decoded (spans of one row), of layers with `heads`, over contexts of up
    /// to `tokens` tokens.
    ///
    /// # Errors
    /// When the device has no memory for it.
    pub fn new(device: &Device, heads: &[Heads], rows: usize, tokens: usize) -> Result<Self> {
        let units = match device.driver().caps().units {
            0 | 1 => UNITS,
            units => units as usize,
        };
        Self::with_blocks(device, heads, rows, tokens, 2 * units)
    }

    /// The same for a device that is filled by `blocks` blocks of 256 threads.
    ///
    /// # Errors
    /// When the device has no memory for it.
    pub fn with_blocks(
        device: &Device,
        heads: &[Heads],
        rows: usize,
        tokens: usize,
        blocks: usize,
    ) -> Result<Self> {
        let rows = rows.max(1);
        let most = |per_head: &dyn Fn(&Heads) -> usize| {
            let step = |heads: &Heads, rows: usize| {
                rows * splits(heads, rows, tokens, Mask::Causal, blocks) * heads.q_heads() * per_head(heads)
            };
            heads.iter().flat_map(|heads| (1..=rows).map(move |rows| step(heads, rows))).max().unwrap_or(0)
        };
        Ok(Self {
            sums: Memory::new(device, most(&Heads::v_dim) * WORD)?,
            stats: Memory::new(device, most(&|_| 2) * WORD)?,
            rows,
            tokens,
            blocks,
        })
    }

    /// Bytes of device memory.
    pub fn bytes(&self) -> usize {
        self.sums.bytes() + self.stats.bytes()
    }
}

/// Index of the query heads of a block, and blocks of a group.
fn blocks_of_group(heads: &Heads) -> (usize, usize) {
    let widest = if DIMS[size_class(heads)] > 256 { 1 } else { 2 };
    let index = GROUPS
        .iter()
        .position(|&heads_of_block| heads.group() <= heads_of_block)
        .unwrap_or(widest)
        .min(widest);
    (index, heads.group().div_ceil(GROUPS[index]))
}

/// Splits of each row's pages in a step of `rows` rows.
fn splits(heads: &Heads, rows: usize, tokens: usize, mask: Mask, blocks: usize) -> usize {
    let seen = match mask {
        Mask::Causal => tokens,
        Mask::Window(window) => tokens.min(window),
    };
    // A window need not begin where a page does.
    let pages = (seen.div_ceil(PAGE) + 1).min(tokens.div_ceil(PAGE));
    let blocks_of_split = rows * heads.kv_heads() * blocks_of_group(heads).1;
    blocks.div_ceil(blocks_of_split).clamp(1, MAX_SPLITS.min(pages.max(1)))
}

impl Kernels {
    /// Softmax attention of every row over the keys its sequence has in the cache, then the output gate, as [`attend`](crate::attend()).
    ///
    /// * `q`: floats `[rows, q_heads, head_dim]`, as [`prepare`](Self::prepare) leaves them;
    /// * `out`: floats `[rows, q_heads, v_dim]`.
    ///
    /// Few rows, and spans of one row, are computed in f32, their pages spread over the device. Longer spans go through matrix products of
    /// f16 (queries times scale, keys, weights and values are rounded to it) with sums in f32. Rows of no sequence become 0 in the first
    /// form, and are not written in the second.
    ///
    /// # Errors
    /// What the driver says.
    ///
    /// # Panics
    /// When a view is too short, the heads and cache do not fit each other, the window is zero, or the scratch was made for other
    /// layers.
    pub fn attend(
        &self,
        stream: &Stream,
        heads: &Heads,
        q: View<'_>,
        gate: Option<Gate<'_>>,
        batch: &Batch<'_>,
        cache: &Cache,
        mask: Mask,
        scratch: &Scratch,
        out: View<'_>,
    ) -> Result<()> {
        check_heads(heads);
        cache.check(heads);
        batch.check();
        let (rows, q_heads, head_dim, v_dim) = (batch.rows, heads.q_heads(), heads.head_dim(), heads.v_dim());
        words("q", q, rows * q_heads * head_dim);
        words("out", out, rows * q_heads * v_dim);
        assert!(q.pointer().0.is_multiple_of(16), "q must be aligned to 16 bytes");
        let window = match mask {
            Mask::Causal => 0,
            Mask::Window(window) => {
                assert!(window > 0, "the attention window is zero");
                u32::try_from(window).unwrap_or(u32::MAX)
            }
        };
        let call = Call {
            stream,
            heads,
            q,
            gate: gate.map(|gate| gate.check(heads, rows)),
            batch,
            cache,
            window,
            out,
        };
        if rows <= scratch.rows && (rows <= FEW_ROWS || batch.spans == rows) {
            self.decode(&call, mask, scratch)
        } else {
            self.prefill(&call)
        }
    }

    fn decode(&self, call: &Call<'_>, mask: Mask, scratch: &Scratch) -> Result<()> {
        let Call { stream, heads, q, gate, batch, cache, window, out } = *call;
        let (rows, q_heads, v_dim) = (batch.rows, heads.q_heads(), heads.v_dim());
        let splits = splits(heads, rows, scratch.tokens, mask, scratch.blocks);
        words("scratch", scratch.sums.view(), rows * splits * q_heads * v_dim);
        words("scratch", scratch.stats.view(), rows * splits * q_heads * 2);
        let (index, blocks) = blocks_of_group(heads);
        let kernel = self.typed(cache).decode[size_class(heads)][index].as_ref();
        let kernel = kernel.expect("a kernel for every size of a block");
        let args = Args::new()
            .view(q)
            .view(cache.keys())
            .view(cache.values())
            .view(batch.slot)
            .view(batch.position)
            .maybe(batch.end)
            .view(batch.pages)
            .view(scratch.sums.view())
            .view(scratch.stats.view())
            .len(q_heads)
            .len(heads.kv_heads())
            .len(heads.head_dim())
            .len(v_dim)
            .len(batch.slots)
            .len(batch.max_pages)
            .len(cache.n_pages())
            .u32(window)
            .len(splits)
            .f32(heads.scale());
        let grid = [heads.kv_heads() * blocks, rows, splits].map(|n| u32::try_from(n).expect("a grid"));
        // SAFETY: the views were checked against the shapes; slots, table entries and pages are kept within theirs by the kernel.
        unsafe { kernel.launch(stream, grid, &args) }?;

        let (gate, stride, head_stride) = gate.map_or((None, 0, 0), |gate| (Some(gate.0), gate.1, gate.2));
        let args = Args::new()
            .view(scratch.sums.view())
            .view(scratch.stats.view())
            .view(batch.slot)
            .view(batch.position)
            .maybe(batch.end)
            .maybe(gate)
            .view(out)
            .len(stride)
            .len(head_stride)
            .len(q_heads)
            .len(v_dim)
            .len(batch.slots)
            .u32(window)
            .len(splits);
        // SAFETY: as above.
        unsafe { self.merge.launch(stream, [q_heads as u32, rows as u32, 1], &args) }
    }

    fn prefill(&self, call: &Call<'_>) -> Result<()> {
        let Call { stream, heads, q, gate, batch, cache, window, out } = *call;
        let class = size_class(heads);
        let rows_of_tile = if DIMS[class] > 256 { 16 } else { 32 } / heads.group();
        // Every span may end in a tile that is not full.
        let tiles = batch.rows / rows_of_tile + batch.spans.min(batch.rows);
        let (gate, stride, head_stride) = gate.map_or((None, 0, 0), |gate| (Some(gate.0), gate.1, gate.2));
        let args = Args::new()
            .view(q)
            .view(cache.keys())
            .view(cache.values())
            .view(batch.span)
            .maybe(batch.end)
            .view(batch.pages)
            .maybe(gate)
            .view(out)
            .len(batch.spans)
            .len(batch.rows)
            .len(stride)
            .len(head_stride)
            .len(heads.q_heads())
            .len(heads.kv_heads())
            .len(heads.head_dim())
            .len(heads.v_dim())
            .len(batch.slots)
            .len(batch.max_pages)
            .len(cache.n_pages())
            .u32(window)
            .f32(heads.scale());
        let grid = [tiles, heads.kv_heads(), 1].map(|n| u32::try_from(n).expect("a grid"));
        // SAFETY: the views were checked against the shapes; spans, slots, table entries and pages are kept within theirs by the kernel.
        unsafe { self.typed(cache).prefill[class].launch(stream, grid, &args) }
    }
}

/// What both forms work on.
#[derive(Clone, Copy)]
struct Call<'c> {
    stream: &'c Stream,
    heads: &'c Heads,
    q: View<'c>,
    /// Gates, floats from row to row and from head to head.
    gate: Option<(View<'c>, usize, usize)>,
    batch: &'c Batch<'c>,
    cache: &'c Cache,
    window: u32,
    out: View<'c>,
}

impl<'m> Gate<'m> {
    /// The first gate, floats from row to row and from head to head.
    fn check(self, heads: &Heads, rows: usize) -> (View<'m>, usize, usize) {
        let (q_heads, head_dim, v_dim) = (heads.q_heads(), heads.head_dim(), heads.v_dim());
        match self {
            Gate::Plain(gate) => {
                gate.check("gate", rows, q_heads * v_dim);
                (gate.view, gate.stride, v_dim)
            }
            Gate::Interleaved(gate) => {
                assert_eq!(v_dim, head_dim, "an interleaved gate needs v_dim == head_dim");
                gate.check("gate", rows, q_heads * 2 * head_dim);
                let skipped = if rows == 0 { 0 } else { head_dim * WORD };
                (gate.view.slice(skipped..gate.view.bytes()), gate.stride, 2 * head_dim)
            }
        }
    }
}

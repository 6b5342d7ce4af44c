use super::{Batch, Cache, DIMS, GROUPS, Gate, Kernels, PAGE, WORD, check_heads, size_class, words};
use crate::{Heads, Mask};
use skep_hal::Result;
use skep_hal::gpu::{Args, Device, Memory, Stream, View};
use skep_quant::gpu::{Acts, outputs};

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
        let most = heads.iter().map(|heads| {
            let decoded = (1..=rows).map(|rows| rows * splits(heads, rows, tokens, Mask::Causal, blocks));
            // Tiles are cut while they fill less than the device, into so many that they fill less than twice the device.
            let tiled = 2 * blocks.div_ceil(heads.kv_heads()) * rows_of_tile(heads);
            let parts = decoded.max().unwrap_or(0).max(tiled) * heads.q_heads();
            (parts * heads.v_dim(), parts)
        });
        let (sums, stats) = most.fold((0, 0), |a, b| (a.0.max(b.0), a.1.max(b.1)));
        Ok(Self {
            sums: Memory::new(device, sums * WORD)?,
            stats: Memory::new(device, stats * 2 * WORD)?,
            rows,
            tokens,
            blocks,
        })
    }

    /// Bytes of device memory.
    pub fn bytes(&self) -> usize {
        self.sums.bytes() + self.stats.bytes()
    }

    /// Splits of rows that fit.
    fn room(&self, heads: &Heads) -> usize {
        let sums = self.sums.bytes() / WORD / heads.v_dim();
        sums.min(self.stats.bytes() / WORD / 2) / heads.q_heads()
    }

    fn check(&self, parts: usize, heads: &Heads) {
        assert!(
            parts <= self.room(heads),
            "{parts} splits of rows, but the scratch was made for other layers"
        );
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

/// Rows whose query heads of a key/value head make up a tile.
fn rows_of_tile(heads: &Heads) -> usize {
    if DIMS[size_class(heads)] > 256 { 16 / heads.group() } else { 32 / heads.group() }
}

/// Splits of each row's pages in a step of `rows` single rows.
fn splits(heads: &Heads, rows: usize, tokens: usize, mask: Mask, blocks: usize) -> usize {
    let blocks_of_split = rows * heads.kv_heads() * blocks_of_group(heads).1;
    blocks.div_ceil(blocks_of_split).clamp(1, most_splits(tokens, mask))
}

/// Splits beyond which some are always empty.
fn most_splits(tokens: usize, mask: Mask) -> usize {
    let seen = match mask {
        Mask::Causal => tokens,
        Mask::Window(window) => tokens.min(window),
    };
    // A window need not begin where a page does.
    (seen.div_ceil(PAGE) + 1).min(tokens.div_ceil(PAGE)).clamp(1, MAX_SPLITS)
}

impl Kernels {
    /// Softmax attention of every row over the keys its sequence has in the cache, then the output gate, as [`attend`](crate::attend()).
    ///
    /// * `q`: floats `[rows, q_heads, head_dim]`, as [`prepare`](Self::prepare) leaves them;
    /// * `out`, `acts`: where the rows `[rows, q_heads * v_dim]` go, either as floats or in the forms that products of so many rows
    ///   take.
    ///
    /// Up to 8 rows, and spans of one row, are computed in f32, their pages spread over the device. Longer spans go through matrix
    /// products of f16 (queries times scale, keys, weights and values are rounded to it) with sums in f32; there, numbers that are not
    /// finite may reach rows up to 31 tokens before those that see them. Rows of no sequence become 0 in the first form, and are not
    /// written in the second.
    ///
    /// # Errors
    /// What the driver says.
    ///
    /// # Panics
    /// When a view is too short, the heads and cache do not fit each other, the window is zero, the scratch was made for other
    /// layers, or both or none of `out` and `acts` are given.
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
        out: Option<View<'_>>,
        acts: Option<&Acts>,
    ) -> Result<()> {
        check_heads(heads);
        cache.check(heads);
        batch.check();
        let (rows, head_dim, width) = (batch.rows, heads.head_dim(), heads.q_heads() * heads.v_dim());
        words("q", q, rows * heads.q_heads() * head_dim);
        assert!(q.pointer().0.is_multiple_of(16), "q must be aligned to 16 bytes");
        assert!(out.is_some() != acts.is_some(), "rows go to one place: `out` or `acts`");
        if let Some(out) = out {
            words("out", out, rows * width);
        }
        let window = match mask {
            Mask::Causal => 0,
            Mask::Window(window) => {
                assert!(window > 0, "the attention window is zero");
                u32::try_from(window).unwrap_or(u32::MAX)
            }
        };
        let gate = gate.map(|gate| gate.check(heads, rows));
        let single = rows <= scratch.rows && (rows <= FEW_ROWS || batch.spans == rows);
        // Codes of a unit come from one head; f16 needs the greatest number of a row.
        let at_once = single && rows <= FEW_ROWS && heads.v_dim().is_multiple_of(32);
        let x = out.or(acts.map(Acts::x)).expect("a place, by the assertion");
        let call = Call { stream, heads, q, gate, batch, cache, mask, window, scratch, x };
        let forms = |args: Args| outputs(args, rows, width, None, acts);
        if single {
            let plain = call.plain();
            self.decode(&call, if at_once && acts.is_some() { &forms } else { &plain })?;
        } else {
            self.prefill(&call)?;
        }
        if acts.is_none() || at_once {
            return Ok(());
        }
        let args = forms(Args::new().view(x).len(width));
        // SAFETY: `outputs` has checked that the rows fit.
        unsafe { self.forms.launch(stream, [rows as u32, 1, 1], &args) }
    }

    fn decode(&self, call: &Call<'_>, outputs: &dyn Fn(Args) -> Args) -> Result<()> {
        let Call { stream, heads, q, batch, cache, window, scratch, .. } = *call;
        let (rows, q_heads, v_dim) = (batch.rows, heads.q_heads(), heads.v_dim());
        let splits = splits(heads, rows, scratch.tokens, call.mask, scratch.blocks);
        scratch.check(rows * splits, heads);
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
        self.merge(call, splits, false, outputs)
    }

    fn merge(
        &self,
        call: &Call<'_>,
        splits: usize,
        every: bool,
        outputs: &dyn Fn(Args) -> Args,
    ) -> Result<()> {
        let Call { stream, heads, batch, scratch, .. } = *call;
        let (gate, stride, head_stride) = call.gate_arguments();
        let args = Args::new()
            .view(scratch.sums.view())
            .view(scratch.stats.view())
            .view(batch.slot)
            .view(batch.position)
            .maybe(batch.end)
            .maybe(gate)
            .len(stride)
            .len(head_stride)
            .len(heads.q_heads())
            .len(heads.v_dim())
            .len(batch.slots)
            .u32(call.window)
            .len(splits)
            .u32(every.into());
        let grid = [heads.q_heads(), batch.rows, 1].map(|n| u32::try_from(n).expect("a grid"));
        // SAFETY: the views were checked against the shapes, the scratch against the splits.
        unsafe { self.merge.launch(stream, grid, &outputs(args)) }
    }

    fn prefill(&self, call: &Call<'_>) -> Result<()> {
        let Call { stream, heads, q, batch, cache, window, scratch, x, .. } = *call;
        let (rows, q_heads, kv_heads) = (batch.rows, heads.q_heads(), heads.kv_heads());
        // Every span may end in a tile that is not full.
        let tiles = rows / rows_of_tile(heads) + batch.spans.min(rows);
        let splits = scratch
            .blocks
            .div_ceil((tiles * kv_heads).max(1))
            .min(most_splits(scratch.tokens, call.mask))
            .min(scratch.room(heads) / rows.max(1))
            .max(1);
        let (gate, stride, head_stride) = call.gate_arguments();
        let args = Args::new()
            .view(q)
            .view(cache.keys())
            .view(cache.values())
            .view(batch.span)
            .maybe(batch.end)
            .view(batch.pages)
            .maybe(gate)
            .view(x)
            .view(scratch.sums.view())
            .view(scratch.stats.view())
            .len(batch.spans)
            .len(rows)
            .len(stride)
            .len(head_stride)
            .len(q_heads)
            .len(kv_heads)
            .len(heads.head_dim())
            .len(heads.v_dim())
            .len(batch.slots)
            .len(batch.max_pages)
            .len(cache.n_pages())
            .u32(window)
            .len(splits)
            .f32(heads.scale());
        let grid = [tiles, kv_heads, splits].map(|n| u32::try_from(n).expect("a grid"));
        // SAFETY: the views were checked against the shapes, the scratch against the splits; spans, slots, table entries and pages are
        // kept within theirs by the kernel.
        unsafe { self.typed(cache).prefill[size_class(heads)].launch(stream, grid, &args) }?;
        if splits == 1 { Ok(()) } else { self.merge(call, splits, true, &call.plain()) }
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
    mask: Mask,
    window: u32,
    scratch: &'c Scratch,
    /// Where the rows go as floats.
    x: View<'c>,
}

impl Call<'_> {
    fn gate_arguments(&self) -> (Option<View<'_>>, usize, usize) {
        self.gate.map_or((None, 0, 0), |(gate, stride, head_stride)| (Some(gate), stride, head_stride))
    }

    /// The arguments of rows that go nowhere but to `x`.
    fn plain(&self) -> impl Fn(Args) -> Args {
        |args| args.view(self.x).maybe(None).maybe(None).maybe(None).maybe(None)
    }
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

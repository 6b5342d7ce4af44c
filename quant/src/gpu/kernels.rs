use super::{Acts, BLOCKS, MatrixView, ROWS, TILES};
use crate::Type;
use alloc::vec::Vec;
use skep_hal::Result;
use skep_hal::gpu::{Arch, Args, Device, Entry, Kernel, Source, Stream, View};

const fn entry(name: &'static str) -> Entry {
    Entry { name, threads: THREADS }
}

const THREADS: u32 = 256;

const MATVEC: [&str; 4] = ["quant_matvec_1", "quant_matvec_2", "quant_matvec_4", "quant_matvec_8"];

/// By the longest row they take.
const NORM: [&str; 3] = ["quant_norm_2", "quant_norm_4", "quant_norm_12"];
/// The first by parts of a row.
const GATED: [&str; 3] = ["quant_gated_1", "quant_gated_4", "quant_gated_12"];

/// Numbers that the threads of a block hold at a time in the kernels of rows.
const PIECE: usize = 4 * THREADS as usize;

/// The kernels of this crate.
pub const SOURCE: Source = Source {
    name: "quant",
    parts: &[
        BLOCKS,
        ROWS,
        include_str!("../../kernels/row_kernels.gpu.h"),
        include_str!("../../kernels/jobs.gpu.h"),
        include_str!("../../kernels/matvec.gpu.h"),
        TILES,
        include_str!("../../kernels/products.gpu.h"),
    ],
    entries: &[
        entry(MATVEC[0]),
        entry(MATVEC[1]),
        entry(MATVEC[2]),
        entry(MATVEC[3]),
        entry("quant_tiles_narrow"),
        entry("quant_tiles_wide"),
        entry("quant_tiles_f32"),
        entry(NORM[0]),
        entry(NORM[1]),
        entry(NORM[2]),
        entry(GATED[0]),
        entry(GATED[1]),
        entry(GATED[2]),
        entry("quant_embed"),
        entry("quant_add"),
        entry("quant_softcap"),
        entry("quant_argmax"),
        Entry { name: "quant_argmax_ids", threads: 64 },
        Entry { name: "quant_top", threads: 512 },
    ],
};

/// The longest row that [`Kernels::norm`] and [`Kernels::gated`] take.
pub const MOST_COLS: usize = 12 * PIECE;

/// The most numbers that [`Kernels::top_k`] finds in a row.
pub const MOST_TOP: usize = 64;

/// Numbers of a row that one block of the search for the largest ones takes, and the most it can take.
const TOP_PART: usize = 2048;
const TOP_MOST: usize = 4096;

/// Products of one launch.
const JOBS: usize = 4;

/// Rows of weights of a tile.
const TILE_ROWS: usize = 128;

/// Rows of activations up to which products take 8 bits only ([`Acts::q`]); of more they can take f16 ([`Acts::h`]).
pub const FEW: usize = 8;

/// Rows of activations up to which matrices are multiplied row by row: tiles would leave most of a device idle.
const ROW_BY_ROW: usize = 32;

/// The function of a gate.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Gate {
    /// `x * sigmoid(x)`.
    Silu,
    /// GELU in its tanh form.
    Gelu,
}

/// One product: `out = weight · acts`, or `out += weight · acts`.
#[derive(Debug, Clone, Copy)]
#[expect(clippy::exhaustive_structs, reason = "built by callers as a literal")]
pub struct Product<'a> {
    /// `[rows, cols]`.
    pub weight: MatrixView<'a>,
    /// f32 `[n, rows]`.
    pub out: View<'a>,
    /// Whether to add to what `out` holds.
    pub add: bool,
}

/// The kernels of this crate on one device. All functions only enqueue.
#[derive(Debug)]
pub struct Kernels {
    matvec: [Kernel; 4],
    tiles_narrow: Kernel,
    tiles_wide: Kernel,
    tiles_f32: Kernel,
    norm: [Kernel; 3],
    gated: [Kernel; 3],
    embed: Kernel,
    add: Kernel,
    softcap: Kernel,
    argmax: Kernel,
    argmax_ids: Kernel,
    top: Kernel,
    /// Rows of activations of a wide tile.
    wide: usize,
    /// Rows of weights that lanes take at a time where 8 rows of activations are multiplied.
    rows_of_eight: usize,
    wave: usize,
    units: usize,
}

impl Kernels {
    /// Loads the kernels.
    ///
    /// # Errors
    /// What the device says of compiling and loading.
    pub fn load(device: &Device) -> Result<Self> {
        let module = device.module(&SOURCE)?;
        let kernel = |name| module.kernel(name);
        let caps = device.driver().caps();
        Ok(Self {
            matvec: [kernel(MATVEC[0])?, kernel(MATVEC[1])?, kernel(MATVEC[2])?, kernel(MATVEC[3])?],
            tiles_narrow: kernel("quant_tiles_narrow")?,
            tiles_wide: kernel("quant_tiles_wide")?,
            tiles_f32: kernel("quant_tiles_f32")?,
            norm: [kernel(NORM[0])?, kernel(NORM[1])?, kernel(NORM[2])?],
            gated: [kernel(GATED[0])?, kernel(GATED[1])?, kernel(GATED[2])?],
            embed: kernel("quant_embed")?,
            add: kernel("quant_add")?,
            softcap: kernel("quant_softcap")?,
            argmax: kernel("quant_argmax")?,
            argmax_ids: kernel("quant_argmax_ids")?,
            top: kernel("quant_top")?,
            wide: if matches!(caps.arch, Arch::Nvidia(_)) { 128 } else { 64 },
            wave: caps.wave as usize,
            rows_of_eight: if matches!(caps.arch, Arch::Amd(_)) { 1 } else { 2 },
            units: caps.units as usize,
        })
    }

    /// `out[i] = scale * table[ids[i]]` for `n` rows: `ids` u32 `[n]`, `out` f32 `[n, cols]`. An id outside the table gives NaN.
    ///
    /// # Errors
    /// What the driver says.
    ///
    /// # Panics
    /// If a view is too short.
    pub fn embed(
        &self,
        stream: &Stream,
        table: MatrixView<'_>,
        ids: View<'_>,
        n: usize,
        scale: f32,
        out: View<'_>,
    ) -> Result<()> {
        let cols = table.cols();
        check("ids", ids, n);
        check("out", out, n * cols);
        let args = Args::new()
            .view(table.memory())
            .u32(table.ty().id())
            .len(table.rows())
            .view(ids)
            .f32(scale)
            .len(cols)
            .view(out);
        // SAFETY: the views are as long as the kernel goes, and it keeps ids within the table.
        unsafe { self.embed.launch(stream, [n as u32, 1, 1], &args) }
    }

    /// Row by row: `x += delta` where there is a delta, then RMS normalisation times `weight` where there is one. Rows are
    /// f32 `[n, cols]`. What comes out goes to `out` and, in the forms that products of `n` rows take, to `acts`; `x` keeps the
    /// sum.
    ///
    /// # Errors
    /// What the driver says.
    ///
    /// # Panics
    /// If a view is too short, or `cols` is not a multiple of 32 up to [`MOST_COLS`].
    pub fn norm(
        &self,
        stream: &Stream,
        x: View<'_>,
        delta: Option<View<'_>>,
        weight: Option<View<'_>>,
        eps: f32,
        n: usize,
        cols: usize,
        out: Option<View<'_>>,
        acts: Option<&Acts>,
    ) -> Result<()> {
        if let Some(weight) = weight {
            check("weight", weight, cols);
        }
        self.rows(stream, x, delta, weight, Some(eps), n, cols, out, acts)
    }

    /// Rows as they are, f32 `[n, cols]`, in the forms that products of `n` rows take.
    ///
    /// # Errors
    /// What the driver says.
    ///
    /// # Panics
    /// As [`norm`](Self::norm).
    pub fn quantise(&self, stream: &Stream, x: View<'_>, n: usize, cols: usize, acts: &Acts) -> Result<()> {
        self.rows(stream, x, None, None, None, n, cols, None, Some(acts))
    }

    fn rows(
        &self,
        stream: &Stream,
        x: View<'_>,
        delta: Option<View<'_>>,
        weight: Option<View<'_>>,
        eps: Option<f32>,
        n: usize,
        cols: usize,
        out: Option<View<'_>>,
        acts: Option<&Acts>,
    ) -> Result<()> {
        check("x", x, n * cols);
        if let Some(delta) = delta {
            check("delta", delta, n * cols);
        }
        let args = Args::new()
            .view(x)
            .maybe(delta)
            .maybe(weight)
            .f32(eps.unwrap_or(0.0))
            .u32(eps.is_some().into())
            .len(cols);
        let args = outputs(args, n, cols, out, acts);
        let norm = &self.norm[usize::from(cols > 2 * PIECE) + usize::from(cols > 4 * PIECE)];
        // SAFETY: the views are as long as the kernel goes.
        unsafe { norm.launch(stream, [n as u32, 1, 1], &args) }
    }

    /// `gate(g) * u` row by row, `g` and `u` f32 `[n, cols]`, `u` with `up_stride` numbers from row to row.
    ///
    /// # Errors
    /// What the driver says.
    ///
    /// # Panics
    /// As [`norm`](Self::norm).
    pub fn gated(
        &self,
        stream: &Stream,
        gate: Gate,
        g: View<'_>,
        u: (View<'_>, usize),
        n: usize,
        cols: usize,
        out: Option<View<'_>>,
        acts: Option<&Acts>,
    ) -> Result<()> {
        let (up, up_stride) = u;
        check("gate", g, n * cols);
        if n > 0 {
            check("up", up, (n - 1) * up_stride + cols);
        }
        assert!(up_stride.is_multiple_of(4), "rows of up {up_stride} numbers apart, not a multiple of 4");
        let args = Args::new().view(g).view(up).u32((gate == Gate::Gelu).into()).len(cols).len(up_stride);
        let args = outputs(args, n, cols, out, acts);
        // A scale for the whole row is asked for only with many rows.
        let (gated, parts) = match n {
            ..=FEW => (&self.gated[0], blocks(cols, PIECE)),
            _ => (&self.gated[1 + usize::from(cols > 4 * PIECE)], 1),
        };
        // SAFETY: the views are as long as the kernel goes.
        unsafe { gated.launch(stream, [n as u32, parts, 1], &args) }
    }

    /// `x = (x + by * delta) * scale` with `by` 1 or the sigmoid of the row's gate: `x`, `delta` f32 `[n, cols]`, `gates` f32 `[n]`.
    ///
    /// # Errors
    /// What the driver says.
    ///
    /// # Panics
    /// If a view is too short.
    pub fn add(
        &self,
        stream: &Stream,
        x: View<'_>,
        delta: View<'_>,
        gates: Option<View<'_>>,
        scale: f32,
        n: usize,
        cols: usize,
    ) -> Result<()> {
        check("x", x, n * cols);
        check("delta", delta, n * cols);
        if let Some(gates) = gates {
            check("gates", gates, n);
        }
        let args = Args::new().view(x).view(delta).maybe(gates).f32(scale).len(cols).len(n);
        // SAFETY: the views are as long as the kernel goes.
        unsafe { self.add.launch(stream, [blocks(n * cols, THREADS as usize), 1, 1], &args) }
    }

    /// `x = cap * tanh(x / cap)` for `n` numbers.
    ///
    /// # Errors
    /// What the driver says.
    ///
    /// # Panics
    /// If the view is too short.
    pub fn softcap(&self, stream: &Stream, x: View<'_>, cap: f32, n: usize) -> Result<()> {
        check("x", x, n);
        let args = Args::new().view(x).f32(cap).len(n);
        // SAFETY: the view is as long as the kernel goes.
        unsafe { self.softcap.launch(stream, [blocks(n, THREADS as usize), 1, 1], &args) }
    }

    /// The index of the largest number of each of `n` rows, the lowest of equals: `logits` f32 `[n, cols]`, `ids` u32 `[n]`. NaN is
    /// passed over; a row of nothing else gives `u32::MAX`. `best` u64 `[n]` is zeros before and after.
    ///
    /// # Errors
    /// What the driver says.
    ///
    /// # Panics
    /// If a view is too short.
    pub fn argmax(
        &self,
        stream: &Stream,
        logits: View<'_>,
        n: usize,
        cols: usize,
        best: View<'_>,
        ids: View<'_>,
    ) -> Result<()> {
        check("logits", logits, n * cols);
        check("best", best, 2 * n);
        check("ids", ids, n);
        let args = Args::new().view(logits).len(cols).view(best);
        // SAFETY: the views are as long as the kernel goes.
        unsafe { self.argmax.launch(stream, [blocks(cols, 2048), n as u32, 1], &args) }?;
        let args = Args::new().view(best).len(n).view(ids);
        // SAFETY: as above.
        unsafe { self.argmax_ids.launch(stream, [blocks(n, 64), 1, 1], &args) }
    }

    /// The `k` largest numbers of each of `n` rows and their indices, largest first, of equals the lowest index first: `logits` f32
    /// `[n, cols]`, `values` f32 `[n, k]`, `ids` u32 `[n, k]`. NaN is passed over; where numbers run out, values are negative infinity
    /// and ids `u32::MAX`. `scratch` has [`top_k_scratch`] bytes.
    ///
    /// # Errors
    /// What the driver says.
    ///
    /// # Panics
    /// If a view is too short, or `k` above [`MOST_TOP`].
    pub fn top_k(
        &self,
        stream: &Stream,
        logits: View<'_>,
        n: usize,
        cols: usize,
        k: usize,
        scratch: View<'_>,
        values: View<'_>,
        ids: View<'_>,
    ) -> Result<()> {
        assert!(k <= MOST_TOP, "the {k} largest numbers, at most {MOST_TOP}");
        check("logits", logits, n * cols);
        check("scratch", scratch, top_k_scratch(n, cols, k) / 4);
        check("values", values, n * k);
        check("ids", ids, n * k);
        if k == 0 {
            return Ok(());
        }
        // Keys of all parts of a row, then those of the parts of these, until there is one part.
        let (mut from, mut len, mut start) = (None, cols, 0);
        while len > TOP_MOST {
            let parts = len.div_ceil(TOP_PART);
            let kept = scratch.slice(start..start + 8 * n * parts * k);
            self.top(stream, logits, from, (n, len, TOP_PART), k, Some(kept), None)?;
            (from, len, start) = (Some(kept), parts * k, start + kept.bytes());
        }
        self.top(stream, logits, from, (n, len, TOP_MOST), k, None, Some((values, ids)))
    }

    fn top(
        &self,
        stream: &Stream,
        logits: View<'_>,
        from: Option<View<'_>>,
        (n, len, part): (usize, usize, usize),
        k: usize,
        kept: Option<View<'_>>,
        found: Option<(View<'_>, View<'_>)>,
    ) -> Result<()> {
        let args = Args::new()
            .maybe(from.is_none().then_some(logits))
            .maybe(from)
            .len(len)
            .len(part)
            .len(k)
            .maybe(kept)
            .maybe(found.map(|(values, _)| values))
            .maybe(found.map(|(_, ids)| ids));
        // SAFETY: the views are as long as the kernel goes.
        unsafe { self.top.launch(stream, [blocks(len, part).max(1), n as u32, 1], &args) }
    }

    /// Products with `n` rows of activations, which [`norm`](Self::norm) or another function has left in `acts` with the length of
    /// the weights' rows. Every four products are one launch.
    ///
    /// # Errors
    /// What the driver says.
    ///
    /// # Panics
    /// If weights differ in columns or an `out` is too short.
    pub fn matmul(&self, stream: &Stream, products: &[Product<'_>], acts: &Acts, n: usize) -> Result<()> {
        let Some(cols) = products.first().map(|product| product.weight.cols()) else { return Ok(()) };
        acts.check(n, cols);
        for product in products {
            assert_eq!(product.weight.cols(), cols, "columns of weights that share activations");
            check("out", product.out, n * product.weight.rows());
        }
        if n <= ROW_BY_ROW {
            return products.chunks(JOBS).try_for_each(|products| self.few(stream, products, acts, n, cols));
        }
        let (f32s, others): (Vec<_>, Vec<_>) =
            products.iter().copied().partition(|product| product.weight.ty() == Type::F32);
        f32s.iter().try_for_each(|product| self.many_f32(stream, product, acts, n))?;
        others.chunks(JOBS).try_for_each(|products| self.many(stream, products, acts, n, cols))
    }

    fn few(
        &self,
        stream: &Stream,
        products: &[Product<'_>],
        acts: &Acts,
        n: usize,
        cols: usize,
    ) -> Result<()> {
        let size = n.min(8).next_power_of_two();
        // Blocks that fit a multiprocessor by their registers, and rows that a lane takes at a time.
        let (resident, rows) = match size {
            1 => (4, 2),
            8 => (2, self.rows_of_eight),
            _ => (3, 2),
        };
        // Eight lanes share a row, or those of `split` waves: the more, the more blocks there are, and the more each costs beside
        // what it multiplies, measured as a sixteenth.
        let per_block = |split: usize| THREADS as usize / 8 * rows / split;
        let cost = |split: usize| {
            let blocks: usize =
                products.iter().map(|product| product.weight.rows().div_ceil(per_block(split))).sum();
            (blocks * n.div_ceil(8)).div_ceil(self.units * resident) * (16 / split + 1)
        };
        let split = [1, 2, 4, 8]
            .into_iter()
            .filter(|&split| split == 1 || split <= THREADS as usize / self.wave && 8 * split <= cols / 32)
            .min_by_key(|&split| cost(split))
            .unwrap_or(1);
        let per_block = per_block(split);
        let args = Args::new().view(acts.q()).view(acts.s()).view(acts.x()).len(cols).len(n).len(split);
        let (args, grid) = jobs(args, products, per_block);
        let kernel = &self.matvec[size.trailing_zeros() as usize];
        // SAFETY: the views are as long as the kernel goes: rows of weights by their type, outs by the check of the caller.
        unsafe { kernel.launch(stream, [grid, blocks(n, 8), 1], &args) }
    }

    fn many(
        &self,
        stream: &Stream,
        products: &[Product<'_>],
        acts: &Acts,
        n: usize,
        cols: usize,
    ) -> Result<()> {
        let rows: usize = products.iter().map(|product| product.weight.rows()).sum();
        // Narrow tiles while wide ones would leave multiprocessors idle.
        let wide = rows.div_ceil(TILE_ROWS) * n.div_ceil(self.wide) >= self.units;
        let (kernel, width) = if wide { (&self.tiles_wide, self.wide) } else { (&self.tiles_narrow, 64) };
        let args = Args::new().len(cols).view(acts.h()).view(acts.scale()).len(n);
        let (args, grid) = jobs(args, products, TILE_ROWS);
        // SAFETY: the views are as long as the kernel goes.
        unsafe { kernel.launch(stream, [grid, blocks(n, width), 1], &args) }
    }

    fn many_f32(&self, stream: &Stream, product: &Product<'_>, acts: &Acts, n: usize) -> Result<()> {
        let Product { weight, out, add } = *product;
        let args = Args::new()
            .view(weight.memory())
            .len(weight.rows())
            .len(weight.cols())
            .view(acts.x())
            .len(n)
            .view(out)
            .u32(add.into());
        // SAFETY: the views are as long as the kernel goes.
        unsafe { self.tiles_f32.launch(stream, [blocks(weight.rows(), 64), blocks(n, 64), 1], &args) }
    }
}

/// Adds up to four products to the arguments of a kernel whose blocks have `per_block` rows; with the blocks of them all.
fn jobs(mut args: Args, products: &[Product<'_>], per_block: usize) -> (Args, u32) {
    let mut grid = 0;
    for index in 0..JOBS {
        args = match products.get(index) {
            Some(product) => {
                grid += blocks(product.weight.rows(), per_block);
                args.view(product.weight.memory())
                    .view(product.out)
                    .len(product.weight.rows())
                    .u32(product.weight.ty().id())
                    .u32(product.add.into())
            }
            None => args.maybe(None).maybe(None).u32(0).u32(0).u32(0),
        };
    }
    (args, grid)
}

/// Bytes of scratch for [`Kernels::top_k`].
pub const fn top_k_scratch(n: usize, cols: usize, k: usize) -> usize {
    let (mut len, mut bytes) = (cols, 0);
    while len > TOP_MOST {
        let parts = len.div_ceil(TOP_PART);
        bytes += 8 * n * parts * k;
        len = parts * k;
    }
    bytes
}

/// Adds the five arguments of a `QuantOut` ([`ROWS`]) to those of a kernel that writes `n` rows of `cols` numbers: to `out`, or to
/// `acts` in the forms that products of `n` rows take.
///
/// # Panics
/// If the rows do not fit, `cols` is not a multiple of 32 up to [`MOST_COLS`], or both or none are given.
pub fn outputs(args: Args, n: usize, cols: usize, out: Option<View<'_>>, acts: Option<&Acts>) -> Args {
    assert!(
        cols.is_multiple_of(32) && cols <= MOST_COLS,
        "rows of {cols} numbers, not a multiple of 32 up to {MOST_COLS}"
    );
    if let Some(out) = out {
        check("out", out, n * cols);
    }
    let Some(acts) = acts else { return args.maybe(out).maybe(None).maybe(None).maybe(None).maybe(None) };
    acts.check(n, cols);
    assert!(out.is_none(), "rows go to one place: `out` or `acts`");
    let (few, many) = (n <= ROW_BY_ROW, n > FEW);
    args.view(acts.x())
        .maybe(few.then(|| acts.q()))
        .maybe(few.then(|| acts.s()))
        .maybe(many.then(|| acts.h()))
        .maybe(many.then(|| acts.scale()))
}

fn blocks(n: usize, per_block: usize) -> u32 {
    u32::try_from(n.div_ceil(per_block)).expect("a grid that kernels count in 32 bits")
}

/// Views hold numbers of 4 bytes.
fn check(name: &str, view: View<'_>, numbers: usize) {
    assert!(view.bytes() >= 4 * numbers, "{name} has {} bytes for {numbers} numbers", view.bytes());
}

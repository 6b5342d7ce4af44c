use super::{Acts, BLOCKS, MatrixView, ROWS, TILES};
use crate::Type;
use skep_hal::Result;
use skep_hal::gpu::{Arch, Args, Device, Entry, Kernel, Source, Stream, View};

const fn entry(name: &'static str) -> Entry {
    Entry { name, threads: THREADS }
}

const THREADS: u32 = 256;

const MATVEC: [&str; 4] = ["quant_matvec_1", "quant_matvec_2", "quant_matvec_4", "quant_matvec_8"];

/// The kernels of this crate.
pub const SOURCE: Source = Source {
    name: "quant",
    parts: &[
        BLOCKS,
        ROWS,
        include_str!("../../kernels/row_kernels.gpu.h"),
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
        entry("quant_norm"),
        entry("quant_gated"),
        entry("quant_embed"),
        entry("quant_add"),
        entry("quant_softcap"),
        entry("quant_argmax"),
        Entry { name: "quant_argmax_ids", threads: 64 },
    ],
};

/// The longest row that [`Kernels::norm`] and [`Kernels::gated`] take.
pub const MOST_COLS: usize = 48 * THREADS as usize;

/// Rows of activations up to which products take 8 bits ([`Acts::q`]); of more they take f16 ([`Acts::h`]).
pub const FEW: usize = 8;

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
    norm: Kernel,
    gated: Kernel,
    embed: Kernel,
    add: Kernel,
    softcap: Kernel,
    argmax: Kernel,
    argmax_ids: Kernel,
    /// Rows of activations of a wide tile.
    wide: usize,
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
            norm: kernel("quant_norm")?,
            gated: kernel("quant_gated")?,
            embed: kernel("quant_embed")?,
            add: kernel("quant_add")?,
            softcap: kernel("quant_softcap")?,
            argmax: kernel("quant_argmax")?,
            argmax_ids: kernel("quant_argmax_ids")?,
            wide: if matches!(caps.arch, Arch::Nvidia(_)) { 128 } else { 64 },
            wave: caps.wave as usize,
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
        // SAFETY: the views are as long as the kernel goes.
        unsafe { self.norm.launch(stream, [n as u32, 1, 1], &args) }
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
        let args = Args::new().view(g).view(up).u32((gate == Gate::Gelu).into()).len(cols).len(up_stride);
        let args = outputs(args, n, cols, out, acts);
        // SAFETY: the views are as long as the kernel goes.
        unsafe { self.gated.launch(stream, [n as u32, 1, 1], &args) }
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
    /// If a view is too short, or `n` above 64.
    pub fn argmax(
        &self,
        stream: &Stream,
        logits: View<'_>,
        n: usize,
        cols: usize,
        best: View<'_>,
        ids: View<'_>,
    ) -> Result<()> {
        assert!(n <= 64, "{n} rows, at most 64");
        check("logits", logits, n * cols);
        check("best", best, 2 * n);
        check("ids", ids, n);
        let args = Args::new().view(logits).len(cols).view(best);
        // SAFETY: the views are as long as the kernel goes.
        unsafe { self.argmax.launch(stream, [blocks(cols, 4096), n as u32, 1], &args) }?;
        let args = Args::new().view(best).len(n).view(ids);
        // SAFETY: as above.
        unsafe { self.argmax_ids.launch(stream, [u32::from(n > 0), 1, 1], &args) }
    }

    /// Products with `n` rows of activations, which [`norm`](Self::norm) or another function has left in `acts` with the length of
    /// the weights' rows. Few rows take all products by one launch for every four.
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
        match n {
            0 => Ok(()),
            1..=FEW => products.chunks(4).try_for_each(|products| self.few(stream, products, acts, n, cols)),
            _ => products.iter().try_for_each(|product| self.many(stream, product, acts, n)),
        }
    }

    fn few(
        &self,
        stream: &Stream,
        products: &[Product<'_>],
        acts: &Acts,
        n: usize,
        cols: usize,
    ) -> Result<()> {
        // Lanes that share a row have a unit each, or a wave goes over it more than once.
        let units = cols / 32;
        let lanes = units.next_power_of_two().clamp(8, self.wave);
        let rows: usize = products.iter().map(|product| product.weight.rows()).sum();
        // Several waves share a row while there are too few rows to keep the device busy.
        let mut split = 1;
        while split < THREADS as usize / self.wave
            && rows * split * lanes < self.units * 1024
            && units >= 2 * split * lanes
        {
            split *= 2;
        }
        let per_block = THREADS as usize / lanes / split;
        let mut args =
            Args::new().view(acts.q()).view(acts.s()).view(acts.x()).len(cols).len(n).len(lanes).len(split);
        let mut grid = 0;
        for index in 0..4 {
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
        let kernel = &self.matvec[n.next_power_of_two().trailing_zeros() as usize];
        // SAFETY: the views are as long as the kernel goes: rows of weights by their type, outs by the check of the caller.
        unsafe { kernel.launch(stream, [grid, 1, 1], &args) }
    }

    fn many(&self, stream: &Stream, product: &Product<'_>, acts: &Acts, n: usize) -> Result<()> {
        let Product { weight, out, add } = *product;
        if weight.ty() == Type::F32 {
            let args = Args::new()
                .view(weight.memory())
                .len(weight.rows())
                .len(weight.cols())
                .view(acts.x())
                .len(n)
                .view(out)
                .u32(add.into());
            // SAFETY: the views are as long as the kernel goes.
            return unsafe {
                self.tiles_f32.launch(stream, [blocks(weight.rows(), 64), blocks(n, 64), 1], &args)
            };
        }
        let args = Args::new()
            .view(weight.memory())
            .u32(weight.ty().id())
            .len(weight.rows())
            .len(weight.cols())
            .view(acts.h())
            .view(acts.scale())
            .len(n)
            .view(out)
            .u32(add.into());
        let (kernel, width) = if n <= 32 { (&self.tiles_narrow, 32) } else { (&self.tiles_wide, self.wide) };
        // SAFETY: the views are as long as the kernel goes.
        unsafe { kernel.launch(stream, [blocks(weight.rows(), 128), blocks(n, width), 1], &args) }
    }
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
    let (few, many) = (n <= FEW, n > FEW);
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

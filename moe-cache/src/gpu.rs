//! Routing and the experts' feed-forward on a device (feature `gpu`), through skep-hal.
//!
//! Few tokens go through two kernels: one makes 32 numbers of a hidden row of one route a block and leaves them quantised, the
//! other sums over a token's routes. Many tokens are sorted by expert and go through tiles on the matrix units.

use crate::router::{Norm, Options};
use skep_hal::Result;
use skep_hal::gpu::{Args, Device, Entry, Kernel, Memory, Source, Stream, View};
use skep_quant::gpu::{Acts, BLOCKS, Gate, Matrix, ROWS, TILES};

/// The kernels of this crate.
pub const SOURCE: Source = Source {
    name: "moe",
    parts: &[BLOCKS, ROWS, TILES, include_str!("../kernels/moe.gpu.h")],
    entries: &[
        Entry { name: "moe_route", threads: 64 },
        Entry { name: "moe_up", threads: 1024 },
        Entry { name: "moe_down", threads: 256 },
        Entry { name: "moe_group", threads: 256 },
        Entry { name: "moe_tiles_narrow", threads: 256 },
        Entry { name: "moe_tiles_wide", threads: 256 },
        Entry { name: "moe_reduce", threads: 256 },
    ],
};

/// Most experts of a layer.
pub const MOST_EXPERTS: usize = 512;

/// Most experts of a token.
pub const MOST_ROUTES: usize = 32;

/// Rows of activations that the kernels of single rows take; more go through tiles.
const FEW: usize = 8;

/// Routes of a narrow and of a wide tile.
const NARROW: usize = 32;
const WIDE: usize = 64;

/// The experts of a batch of tokens and their weights, on a device.
#[derive(Debug)]
pub struct DeviceRoutes {
    capacity: usize,
    /// u32 `[n_tokens, top_k]`
    ids: Memory,
    /// f32 `[n_tokens, top_k]`
    weights: Memory,
}

impl DeviceRoutes {
    /// For up to `capacity` tokens with `top_k` experts each.
    ///
    /// # Errors
    /// What the device says of memory.
    pub fn new(device: &Device, capacity: usize, top_k: usize) -> Result<Self> {
        let memory = || Memory::new(device, 4 * capacity * top_k);
        Ok(Self { capacity: capacity * top_k, ids: memory()?, weights: memory()? })
    }

    /// Experts, u32 `[n_tokens, top_k]`, best first.
    pub fn ids(&self) -> View<'_> {
        self.ids.view()
    }

    /// Weights, f32 `[n_tokens, top_k]`.
    pub fn weights(&self) -> View<'_> {
        self.weights.view()
    }
}

/// Gate and up projections of all experts of a layer.
#[derive(Debug)]
#[expect(clippy::exhaustive_enums, reason = "the two forms that files have")]
pub enum GateUp {
    /// `[n_experts, 2 * ff, hidden]`, of each expert the gate rows first.
    Fused(Matrix),
    /// Twice `[n_experts, ff, hidden]`.
    Split {
        /// The gate projections.
        gate: Matrix,
        /// The up projections.
        up: Matrix,
    },
}

/// The experts of a layer on a device.
#[derive(Debug)]
pub struct DeviceExperts {
    gate_up: GateUp,
    down: Matrix,
    gate: Gate,
}

/// A role's matrix, the rows from expert to expert, and the first row of the role.
struct Bank<'a> {
    matrix: &'a Matrix,
    first: usize,
}

impl DeviceExperts {
    /// From gate and up projections and `down` `[n_experts, hidden, ff]`; types may differ.
    ///
    /// # Panics
    /// If the shapes do not go together.
    pub fn new(gate_up: GateUp, down: Matrix, gate: Gate) -> Self {
        let experts = Self { gate_up, down, gate };
        let (n, ff, hidden) = (experts.down.count(), experts.ff(), experts.hidden());
        match &experts.gate_up {
            GateUp::Fused(both) => assert_shape(both, n, 2 * ff, hidden),
            GateUp::Split { gate, up } => {
                assert_shape(gate, n, ff, hidden);
                assert_shape(up, n, ff, hidden);
            }
        }
        experts
    }

    /// Width of the model.
    pub fn hidden(&self) -> usize {
        self.down.rows()
    }

    /// Width of an expert.
    pub fn ff(&self) -> usize {
        self.down.cols()
    }

    fn banks(&self) -> [Bank<'_>; 2] {
        match &self.gate_up {
            GateUp::Fused(both) => [Bank { matrix: both, first: 0 }, Bank { matrix: both, first: self.ff() }],
            GateUp::Split { gate, up } => [Bank { matrix: gate, first: 0 }, Bank { matrix: up, first: 0 }],
        }
    }
}

fn assert_shape(matrix: &Matrix, n: usize, rows: usize, cols: usize) {
    assert_eq!(
        (matrix.count(), matrix.rows(), matrix.cols()),
        (n, rows, cols),
        "experts, rows and columns of a bank"
    );
}

/// Working memory of [`Kernels::experts`], for layers of one size.
#[derive(Debug)]
pub struct DeviceScratch {
    capacity: usize,
    top_k: usize,
    /// Hidden rows of all routes, `[capacity * top_k, ff]`.
    hidden: Acts,
    /// f32 `[capacity * top_k, ff]`, twice.
    gate: Memory,
    up: Memory,
    /// f32 `[capacity * top_k, hidden]`
    results: Memory,
    sorted: Memory,
    tiles: Memory,
}

impl DeviceScratch {
    /// For up to `capacity` tokens with `top_k` of `experts` experts each, of sizes up to `ff` and `hidden`.
    ///
    /// # Errors
    /// What the device says of memory.
    pub fn new(
        device: &Device,
        capacity: usize,
        top_k: usize,
        experts: usize,
        ff: usize,
        hidden: usize,
    ) -> Result<Self> {
        let routes = capacity * top_k;
        let memory = |numbers: usize| Memory::new(device, 4 * numbers);
        let many = if capacity > FEW { routes } else { 0 };
        Ok(Self {
            capacity,
            top_k,
            hidden: Acts::new(device, routes, ff)?,
            gate: memory(many * ff)?,
            up: memory(many * ff)?,
            results: memory(many * hidden)?,
            sorted: memory(routes)?,
            tiles: memory(4 * most_tiles(routes, experts, NARROW))?,
        })
    }
}

fn most_tiles(routes: usize, experts: usize, width: usize) -> usize {
    routes / width + experts.min(routes)
}

/// The kernels of this crate on one device. All functions only enqueue.
#[derive(Debug)]
pub struct Kernels {
    route: Kernel,
    up: Kernel,
    down: Kernel,
    group: Kernel,
    narrow: Kernel,
    wide: Kernel,
    reduce: Kernel,
    wave: usize,
}

impl Kernels {
    /// Loads the kernels.
    ///
    /// # Errors
    /// What the device says of compiling and loading.
    pub fn load(device: &Device) -> Result<Self> {
        let module = device.module(&SOURCE)?;
        let kernel = |name| module.kernel(name);
        Ok(Self {
            route: kernel("moe_route")?,
            up: kernel("moe_up")?,
            down: kernel("moe_down")?,
            group: kernel("moe_group")?,
            narrow: kernel("moe_tiles_narrow")?,
            wide: kernel("moe_tiles_wide")?,
            reduce: kernel("moe_reduce")?,
            wave: device.driver().caps().wave as usize,
        })
    }

    /// Routes `n` tokens by `logits` f32 `[n, experts]`, as [`route`](crate::route): ranked by logit, ties to the lower number. `scale`
    /// f32 `[experts]` stands for the options' own. A token with a logit that is not finite gets weights that are NaN, so that
    /// whatever comes of it shows.
    ///
    /// # Errors
    /// What the driver says.
    ///
    /// # Panics
    /// If a view is too short, or `top_k` of `experts` is not within [`MOST_ROUTES`] and [`MOST_EXPERTS`].
    pub fn route(
        &self,
        stream: &Stream,
        logits: View<'_>,
        n: usize,
        experts: usize,
        top_k: usize,
        options: &Options<'_>,
        scale: Option<View<'_>>,
        routes: &DeviceRoutes,
    ) -> Result<()> {
        assert!(
            experts <= MOST_EXPERTS && (1..=MOST_ROUTES.min(experts)).contains(&top_k),
            "{top_k} of {experts} experts"
        );
        assert!(
            n * top_k <= routes.capacity,
            "{n} tokens with {top_k} experts in routes for {}",
            routes.capacity
        );
        check("logits", logits, n * experts);
        if let Some(scale) = scale {
            check("expert scale", scale, experts);
        }
        let args = Args::new()
            .view(logits)
            .len(n)
            .len(experts)
            .len(top_k)
            .u32((options.norm == Norm::Full).into())
            .maybe(scale)
            .view(routes.ids())
            .view(routes.weights());
        let per_block = 64 / self.wave;
        // SAFETY: the views are as long as the kernel goes.
        unsafe { self.route.launch(stream, [blocks(n, per_block), 1, 1], &args) }
    }

    /// `out (+)= Σ weight · down(gate(gate · x) ⊙ (up · x))` over the routes of each of `n` tokens: `acts` hold the tokens in the
    /// form of `n` rows, `out` is f32 `[n, hidden]`. `slots` u32 `[experts]` says which matrix of the stacks an expert has; its own
    /// number without.
    ///
    /// # Errors
    /// What the driver says.
    ///
    /// # Panics
    /// If a view is too short or the scratch too small.
    pub fn experts(
        &self,
        stream: &Stream,
        quant: &skep_quant::gpu::Kernels,
        experts: &DeviceExperts,
        slots: Option<View<'_>>,
        acts: &Acts,
        routes: &DeviceRoutes,
        n: usize,
        scratch: &DeviceScratch,
        out: View<'_>,
        add: bool,
    ) -> Result<()> {
        assert!(
            n <= scratch.capacity && n <= acts.capacity(),
            "{n} tokens in a scratch for {}",
            scratch.capacity
        );
        check("out", out, n * experts.hidden());
        match n {
            0 => Ok(()),
            1..=FEW => self.few(stream, experts, slots, acts, routes, n, scratch, out, add),
            _ => self.many(stream, quant, experts, slots, acts, routes, n, scratch, out, add),
        }
    }

    fn few(
        &self,
        stream: &Stream,
        experts: &DeviceExperts,
        slots: Option<View<'_>>,
        acts: &Acts,
        routes: &DeviceRoutes,
        n: usize,
        scratch: &DeviceScratch,
        out: View<'_>,
        add: bool,
    ) -> Result<()> {
        let DeviceScratch { top_k, hidden, .. } = scratch;
        let ff = experts.ff();
        let [gate, up] = experts.banks();
        let args = Args::new()
            .view(gate.matrix.memory().view())
            .u32(gate.matrix.ty().id())
            .len(gate.matrix.rows())
            .view(up.matrix.memory().view())
            .u32(up.matrix.ty().id())
            .len(up.matrix.rows())
            .len(up.first)
            .maybe(slots)
            .view(routes.ids())
            .len(*top_k)
            .len(experts.hidden())
            .len(ff)
            .u32((experts.gate == Gate::Gelu).into())
            .view(acts.q())
            .view(acts.s())
            .view(acts.x())
            .view(hidden.x())
            .view(hidden.q())
            .view(hidden.s());
        // SAFETY: the views are as long as the kernel goes; ids are those of `route`, and slots within the stacks are the
        // caller's.
        unsafe { self.up.launch(stream, [blocks(ff, 32), (n * top_k) as u32, 1], &args) }?;

        let down = &experts.down;
        let lanes = (ff / 32).next_power_of_two().clamp(8, self.wave);
        let args = Args::new()
            .view(down.memory().view())
            .u32(down.ty().id())
            .len(down.rows())
            .maybe(slots)
            .view(routes.ids())
            .view(routes.weights())
            .len(*top_k)
            .len(ff)
            .len(lanes)
            .view(hidden.x())
            .view(hidden.q())
            .view(hidden.s())
            .u32(add.into())
            .view(out);
        // SAFETY: as above.
        unsafe { self.down.launch(stream, [blocks(down.rows(), 256 / self.wave), n as u32, 1], &args) }
    }

    fn many(
        &self,
        stream: &Stream,
        quant: &skep_quant::gpu::Kernels,
        experts: &DeviceExperts,
        slots: Option<View<'_>>,
        acts: &Acts,
        routes: &DeviceRoutes,
        n: usize,
        scratch: &DeviceScratch,
        out: View<'_>,
        add: bool,
    ) -> Result<()> {
        let (n_experts, k) = (experts.down.count(), scratch.top_k);
        let (all, ff, hidden) = (n * k, experts.ff(), experts.hidden());
        let (kernel, width) =
            if all <= NARROW * n_experts { (&self.narrow, NARROW) } else { (&self.wide, WIDE) };
        let tiles = most_tiles(all, n_experts, width);
        let args = Args::new()
            .view(routes.ids())
            .len(all)
            .len(n_experts)
            .len(width)
            .view(scratch.sorted.view())
            .view(scratch.tiles.view())
            .len(tiles);
        // SAFETY: the views are as long as the kernel goes; ids are those of `route`.
        unsafe { self.group.launch(stream, [1, 1, 1], &args) }?;

        let [gate, up] = experts.banks();
        let down = Bank { matrix: &experts.down, first: 0 };
        let product = |bank: Bank<'_>, rows: usize, acts: &Acts, per: usize, out: View<'_>| {
            let args = Args::new()
                .view(bank.matrix.memory().view())
                .u32(bank.matrix.ty().id())
                .len(bank.matrix.rows())
                .len(bank.first)
                .len(rows)
                .len(bank.matrix.cols())
                .maybe(slots)
                .view(scratch.tiles.view())
                .view(scratch.sorted.view())
                .view(acts.h())
                .view(acts.scale())
                .len(per)
                .view(out);
            // SAFETY: as above.
            unsafe { kernel.launch(stream, [blocks(rows, 128), tiles as u32, 1], &args) }
        };
        product(gate, ff, acts, k, scratch.gate.view())?;
        product(up, ff, acts, k, scratch.up.view())?;
        let (gates, ups) = (scratch.gate.view(), (scratch.up.view(), ff));
        quant.gated(stream, experts.gate, gates, ups, all, ff, None, Some(&scratch.hidden))?;
        product(down, hidden, &scratch.hidden, 1, scratch.results.view())?;
        let args = Args::new()
            .view(scratch.results.view())
            .view(routes.weights())
            .len(n)
            .len(k)
            .len(hidden)
            .u32(add.into())
            .view(out);
        // SAFETY: as above.
        unsafe { self.reduce.launch(stream, [blocks(n * hidden, 256), 1, 1], &args) }
    }
}

fn blocks(n: usize, per_block: usize) -> u32 {
    u32::try_from(n.div_ceil(per_block)).expect("a grid that kernels count in 32 bits")
}

/// Views hold numbers of 4 bytes.
fn check(name: &str, view: View<'_>, numbers: usize) {
    assert!(view.bytes() >= 4 * numbers, "{name} has {} bytes for {numbers} numbers", view.bytes());
}

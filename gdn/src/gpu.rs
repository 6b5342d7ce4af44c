//! The mixer on a device (feature `gpu`), through skep-hal.
//!
//! The same map as [`mix`](crate::mix), with everything the CPU keeps per sequence in device memory at fixed addresses, so that
//! a step can be captured and replayed: [`States`] holds convolution windows and recurrent states of all slots of a layer.

use crate::shape::HeadOrder;
use crate::{CHUNK, Form, Shape, State, Weights};
use alloc::vec;
use alloc::vec::Vec;
use skep_hal::Result;
use skep_hal::gpu::{Args, Device, Entry, Kernel, Matrix, Memory, Source, Stream, View};
use skep_quant::gpu::{Acts, FEW, ROWS, outputs};

/// Names of kernels for heads of 32, 64 and 128 numbers.
type Names = [(usize, &'static str); 3];

const STEPS: Names = [(32, "gdn_step_32"), (64, "gdn_step_64"), (128, "gdn_step_128")];
const RULES: Names = [(32, "gdn_rule_32"), (64, "gdn_rule_64"), (128, "gdn_rule_128")];
const CHUNKS: Names = [(32, "gdn_chunk_32"), (64, "gdn_chunk_64"), (128, "gdn_chunk_128")];
const SCANS: Names = [(32, "gdn_scan_32"), (64, "gdn_scan_64"), (128, "gdn_scan_128")];
const NORMS: Names = [(32, "gdn_norm_1"), (64, "gdn_norm_2"), (128, "gdn_norm_4")];

/// Columns of the state that a block has.
const COLUMNS: usize = 32;
/// Heads that a block of the norm has, when it need not have them all.
const HEADS: usize = 8;
/// Channels of the window that a block moves.
const WINDOW_CHANNELS: usize = 4 * THREADS as usize;
/// Rows that a block convolves.
const CONV_ROWS: usize = 4;
/// Threads of all blocks.
const THREADS: u32 = 256;
/// Rows per span, on average, up to which every block convolves what it needs: a launch less.
const FUSED_ROWS: usize = 4;
/// Rows from which a span may be chunked: with fewer the parts of a chunk are mostly padding.
const LEAST: usize = 16;

const fn entry(name: &'static str) -> Entry {
    Entry { name, threads: THREADS }
}

/// The kernels of this crate.
pub const SOURCE: Source = Source {
    name: "gdn",
    parts: &[
        ROWS,
        include_str!("../kernels/conv.gpu.h"),
        include_str!("../kernels/rule.gpu.h"),
        include_str!("../kernels/chunk.gpu.h"),
        include_str!("../kernels/norm.gpu.h"),
    ],
    entries: &[
        entry("gdn_prepare"),
        entry(STEPS[0].1),
        entry(STEPS[1].1),
        entry(STEPS[2].1),
        entry(RULES[0].1),
        entry(RULES[1].1),
        entry(RULES[2].1),
        entry(CHUNKS[0].1),
        entry(CHUNKS[1].1),
        entry(CHUNKS[2].1),
        entry(SCANS[0].1),
        entry(SCANS[1].1),
        entry(SCANS[2].1),
        entry(NORMS[0].1),
        entry(NORMS[1].1),
        entry(NORMS[2].1),
    ],
};

/// What is carried from token to token in one layer, for a number of slots: a sequence has one of them.
#[derive(Debug)]
pub struct States {
    shape: Shape,
    slots: usize,
    /// f32 `[slots, conv_kernel - 1, conv_dim]`
    window: Memory,
    /// f32 `[slots, v_heads, head_v_dim, head_k_dim]`
    s: Memory,
}

impl States {
    /// Zeros for `slots` sequences, once the stream has come to them.
    ///
    /// # Errors
    /// What the device says of memory.
    pub fn new(stream: &Stream, shape: &Shape, slots: usize) -> Result<Self> {
        let window = 4 * slots * window_len(shape);
        let s = 4 * slots * shape.v_heads() * shape.head_state();
        Ok(Self {
            shape: *shape,
            slots,
            window: Memory::zeroed(stream, window)?,
            s: Memory::zeroed(stream, s)?,
        })
    }

    /// Bytes of one slot.
    #[must_use]
    pub fn slot_bytes(shape: &Shape) -> usize {
        4 * (window_len(shape) + shape.v_heads() * shape.head_state())
    }

    /// Brings a slot back to the state before the first token.
    ///
    /// # Errors
    /// What the driver says.
    ///
    /// # Panics
    /// If there is no such slot.
    pub fn reset(&self, stream: &Stream, slot: usize) -> Result<()> {
        let (window, s) = self.slot(slot);
        window.fill(stream, 0)?;
        s.fill(stream, 0)
    }

    /// Overwrites a slot.
    ///
    /// # Errors
    /// What the driver says.
    ///
    /// # Panics
    /// If there is no such slot, or the state is of another shape.
    pub fn upload(&self, stream: &Stream, slot: usize, state: &State) -> Result<()> {
        assert_eq!(state.shape(), &self.shape, "a state of another shape");
        let (window, s) = self.slot(slot);
        window.upload(stream, state.conv())?;
        s.upload(stream, &transposed(state.s(), self.shape.head_k_dim(), self.shape.head_v_dim()))
    }

    /// Reads a slot, when all work of the stream is done.
    ///
    /// # Errors
    /// What the driver says.
    ///
    /// # Panics
    /// If there is no such slot, or the state is of another shape.
    pub fn download(&self, stream: &Stream, slot: usize, state: &mut State) -> Result<()> {
        assert_eq!(state.shape(), &self.shape, "a state of another shape");
        let (window, s) = self.slot(slot);
        window.download(stream, state.conv_mut())?;
        let mut found = vec![0.0; state.s().len()];
        s.download(stream, &mut found)?;
        let found = transposed(&found, self.shape.head_v_dim(), self.shape.head_k_dim());
        state.s_mut().copy_from_slice(&found);
        Ok(())
    }

    fn slot(&self, slot: usize) -> (View<'_>, View<'_>) {
        assert!(slot < self.slots, "slot {slot} of {}", self.slots);
        let part = |memory: &'_ Memory| {
            let bytes = memory.bytes() / self.slots;
            slot * bytes..(slot + 1) * bytes
        };
        (self.window.slice(part(&self.window)), self.s.slice(part(&self.s)))
    }
}

fn window_len(shape: &Shape) -> usize {
    (shape.conv_kernel() - 1) * shape.conv_dim()
}

/// Matrices `[rows, cols]`, each turned.
fn transposed(s: &[f32], rows: usize, cols: usize) -> Vec<f32> {
    s.chunks_exact(rows * cols)
        .flat_map(|s| (0..rows * cols).map(move |i| s[i % rows * cols + i / rows]))
        .collect()
}

/// The small weights of a layer on a device, as [`Weights`].
#[derive(Debug)]
pub struct DeviceWeights {
    shape: Shape,
    conv: Memory,
    a: Memory,
    dt_bias: Memory,
    norm: Memory,
    eps: f32,
}

impl DeviceWeights {
    /// Uploads weights.
    ///
    /// # Errors
    /// What the device says of memory.
    ///
    /// # Panics
    /// If they do not fit the shape.
    pub fn upload(stream: &Stream, shape: &Shape, weights: &Weights<'_>) -> Result<Self> {
        weights.assert_fits(shape);
        Ok(Self {
            shape: *shape,
            conv: Memory::of(stream, weights.conv())?,
            a: Memory::of(stream, weights.a())?,
            dt_bias: Memory::of(stream, weights.dt_bias())?,
            norm: Memory::of(stream, weights.norm())?,
            eps: weights.eps(),
        })
    }
}

/// Working memory of [`Kernels::mix`], for layers of one shape.
#[derive(Debug)]
pub struct DeviceScratch {
    capacity: usize,
    /// f32 `[capacity, conv_dim]`
    mixed: Memory,
    /// f32 `[capacity, value_dim]`
    out: Memory,
    /// What a chunk needs, if there can be one.
    chunks: Option<ChunkScratch>,
}

#[derive(Debug)]
struct ChunkScratch {
    /// f16 `[capacity, v_heads, 2, 2, CHUNK]`: a row of `T diag(β)` and of `P`, upper parts and lower parts.
    matrices: Memory,
    /// f32 `[capacity, v_heads, 2]`: decay from before the chunk to the row, and from it to the end of the chunk.
    decays: Memory,
}

impl DeviceScratch {
    /// For batches of up to `capacity` rows.
    ///
    /// # Errors
    /// What the device says of memory.
    pub fn new(device: &Device, shape: &Shape, capacity: usize) -> Result<Self> {
        let memory = |numbers: usize| Memory::new(device, 4 * capacity * numbers);
        let chunks = if capacity < LEAST {
            None
        } else {
            let matrices = memory(2 * CHUNK * shape.v_heads())?;
            Some(ChunkScratch { matrices, decays: memory(2 * shape.v_heads())? })
        };
        Ok(Self { capacity, mixed: memory(shape.conv_dim())?, out: memory(shape.value_dim())?, chunks })
    }
}

/// Rows of a batch on a device, as [`Input`](crate::Input): f32 `[n, conv_dim]`, `[n, value_dim]` and twice `[n, v_heads]`.
#[derive(Debug, Clone, Copy)]
#[expect(clippy::exhaustive_structs, reason = "built by callers as a literal")]
pub struct DeviceInput<'a> {
    /// Queries, keys and values as projected.
    pub qkv: View<'a>,
    /// Inputs of the output gate.
    pub z: View<'a>,
    /// Inputs of the write strength.
    pub beta: View<'a>,
    /// Inputs of the decay.
    pub alpha: View<'a>,
}

/// Where the rows of a batch belong: u32 `[n_spans, 4]` on the device, each span as slot, first row, number of rows, and a number
/// that is not read here. Spans ascend, cover all rows, and have a row at least.
#[derive(Debug, Clone, Copy)]
#[expect(clippy::exhaustive_structs, reason = "built by callers as a literal")]
pub struct DeviceSpans<'a> {
    /// The list.
    pub list: View<'a>,
    /// Its length.
    pub len: usize,
}

/// The kernels of this crate on one device. All functions only enqueue.
#[derive(Debug)]
pub struct Kernels {
    prepare: Kernel,
    steps: [Kernel; 3],
    rules: [Kernel; 3],
    chunks: [Kernel; 3],
    scans: [Kernel; 3],
    norms: [Kernel; 3],
    matrix: Matrix,
    /// Rows from which a span is chunked.
    least: usize,
}

impl Kernels {
    /// Loads the kernels.
    ///
    /// # Errors
    /// What the device says of compiling and loading.
    pub fn load(device: &Device) -> Result<Self> {
        let module = device.module(&SOURCE)?;
        let kernel = |name| module.kernel(name);
        let three = |[a, b, c]: Names| Ok([kernel(a.1)?, kernel(b.1)?, kernel(c.1)?]);
        Ok(Self {
            prepare: kernel("gdn_prepare")?,
            steps: three(STEPS)?,
            rules: three(RULES)?,
            chunks: three(CHUNKS)?,
            scans: three(SCANS)?,
            norms: three(NORMS)?,
            matrix: device.driver().caps().matrix,
            least: least(Form::Auto, device.driver().caps().matrix),
        })
    }

    /// The same kernels with another choice of the form of a span. [`Form::Auto`], which [`load`](Self::load) begins with, chunks
    /// spans of [`CHUNK`] rows and more where there are matrix units; [`Form::Chunked`] those of 16 rows and more.
    #[must_use]
    pub fn with_form(mut self, form: Form) -> Self {
        self.least = least(form, self.matrix);
        self
    }

    /// Whether there are kernels for a shape: heads of 32, 64 or 128 numbers.
    #[must_use]
    pub fn supports(shape: &Shape) -> bool {
        let known = |dim: usize| RULES.iter().any(|(other, _)| *other == dim);
        known(shape.head_k_dim()) && known(shape.head_v_dim())
    }

    /// The mixer for `n` rows, as [`mix`](crate::mix): `[n, value_dim]` to `out`, or to `acts` for the product that follows. The
    /// states of the spans' slots move forward.
    ///
    /// # Errors
    /// What the driver says.
    ///
    /// # Panics
    /// If a shape is not [supported](Self::supports), weights, states or scratch are of another one, or a view is too short.
    pub fn mix(
        &self,
        stream: &Stream,
        weights: &DeviceWeights,
        states: &States,
        spans: DeviceSpans<'_>,
        n: usize,
        input: &DeviceInput<'_>,
        scratch: &DeviceScratch,
        out: Option<View<'_>>,
        acts: Option<&Acts>,
    ) -> Result<()> {
        let shape = &weights.shape;
        assert_eq!(shape, &states.shape, "states of another shape");
        let DeviceSpans { list, len } = spans;
        check("spans", list, 4 * len);
        check("qkv", input.qkv, n * shape.conv_dim());
        check("z", input.z, n * shape.value_dim());
        check("beta", input.beta, n * shape.v_heads());
        check("alpha", input.alpha, n * shape.v_heads());
        check("scratch", scratch.mixed.view(), n * shape.conv_dim());
        check("scratch", scratch.out.view(), n * shape.value_dim());
        assert!(n <= scratch.capacity, "{n} rows in a scratch for {}", scratch.capacity);
        if n == 0 || len == 0 {
            return Ok(());
        }
        let (k_place, v_place) = (place(shape.head_k_dim()), place(shape.head_v_dim()));
        if let Some(chunks) = &scratch.chunks {
            check("scratch", chunks.matrices.view(), n * shape.v_heads() * 2 * CHUNK);
        }
        let step = Step { stream, weights, states, spans, n, input, scratch, shape };
        // No span is longer than what the others, of a row each, leave to it.
        let chunks = scratch.chunks.as_ref().filter(|_| n.saturating_sub(len - 1) >= self.least);
        let fused = chunks.is_none() && n <= FUSED_ROWS * len;
        if !fused {
            step.prepare(&self.prepare)?;
        }
        let below = if chunks.is_some() { self.least } else { u32::MAX as usize };
        let rule = if fused { &self.steps[k_place] } else { &self.rules[k_place] };
        step.row_by_row(rule, if fused { input.qkv } else { scratch.mixed.view() }, below)?;
        if let Some(chunks) = chunks {
            step.chunked(&self.chunks[k_place], &self.scans[k_place], chunks, self.least)?;
        }
        step.finish(&self.norms[v_place], out, acts)
    }
}

/// The arguments of [`Kernels::mix`], checked.
struct Step<'a> {
    stream: &'a Stream,
    weights: &'a DeviceWeights,
    states: &'a States,
    spans: DeviceSpans<'a>,
    n: usize,
    input: &'a DeviceInput<'a>,
    scratch: &'a DeviceScratch,
    shape: &'a Shape,
}

impl Step<'_> {
    fn prepare(&self, kernel: &Kernel) -> Result<()> {
        let Self { shape, spans: DeviceSpans { list, len }, n, .. } = *self;
        let args = Args::new()
            .view(self.input.qkv)
            .view(self.weights.conv.view())
            .view(self.states.window.view())
            .view(list)
            .len(len)
            .len(n)
            .len(shape.conv_dim())
            .len(shape.conv_kernel())
            .view(self.scratch.mixed.view());
        let grid = [blocks(shape.conv_dim(), THREADS as usize), blocks(n, CONV_ROWS), 1];
        // SAFETY: by the checks of `mix` the views are as long as the kernel goes; slots are the caller's, within the states.
        unsafe { kernel.launch(self.stream, grid, &args) }
    }

    /// Spans of fewer than `below` rows.
    fn row_by_row(&self, kernel: &Kernel, from: View<'_>, below: usize) -> Result<()> {
        let Self { shape, spans: DeviceSpans { list, len }, .. } = *self;
        let args = Args::new()
            .view(from)
            .view(self.input.beta)
            .view(self.input.alpha)
            .view(self.weights.conv.view())
            .view(self.weights.a.view())
            .view(self.weights.dt_bias.view())
            .view(self.states.window.view())
            .view(list)
            .len(below)
            .len(shape.k_heads())
            .len(shape.v_heads())
            .len(shape.head_v_dim())
            .len(shape.conv_kernel())
            .u32(grouped(shape))
            .view(self.states.s.view())
            .view(self.scratch.out.view());
        let grid = [blocks(shape.value_dim(), COLUMNS), blocks(len, 1), 1];
        // SAFETY: as in `prepare`.
        unsafe { kernel.launch(self.stream, grid, &args) }
    }

    /// Spans of at least `least` rows. What `prepare` left of their queries and keys is overwritten.
    fn chunked(&self, chunk: &Kernel, scan: &Kernel, chunks: &ChunkScratch, least: usize) -> Result<()> {
        let Self { shape, spans: DeviceSpans { list, len }, n, .. } = *self;
        let args = Args::new()
            .view(self.input.beta)
            .view(self.input.alpha)
            .view(self.weights.a.view())
            .view(self.weights.dt_bias.view())
            .view(list)
            .len(len)
            .len(least)
            .len(shape.k_heads())
            .len(shape.v_heads())
            .len(shape.head_v_dim())
            .u32(grouped(shape))
            .view(self.scratch.mixed.view())
            .view(chunks.matrices.view())
            .view(chunks.decays.view());
        // Full chunks, and a last one of every span that has chunks.
        let most = n / CHUNK + len.min(n / least);
        // SAFETY: as in `prepare`; chunks beyond the last one do nothing.
        unsafe { chunk.launch(self.stream, [blocks(shape.k_heads(), 1), blocks(most, 1), 1], &args) }?;

        let args = Args::new()
            .view(self.scratch.mixed.view())
            .view(chunks.matrices.view())
            .view(chunks.decays.view())
            .view(list)
            .len(least)
            .len(shape.k_heads())
            .len(shape.v_heads())
            .len(shape.head_v_dim())
            .u32(grouped(shape))
            .view(self.states.s.view())
            .view(self.scratch.out.view());
        let grid = [blocks(shape.value_dim(), COLUMNS), blocks(len, 1), 1];
        // SAFETY: as in `prepare`.
        unsafe { scan.launch(self.stream, grid, &args) }
    }

    fn finish(&self, kernel: &Kernel, out: Option<View<'_>>, acts: Option<&Acts>) -> Result<()> {
        let Self { shape, spans: DeviceSpans { list, len }, n, .. } = *self;
        // Rows in f16 have a scale of their own, so all heads of a row are one block's.
        let heads = if acts.is_some() && n > FEW { shape.v_heads() } else { HEADS };
        let per_row = blocks(shape.v_heads(), heads);
        let per_span = blocks(shape.conv_dim(), WINDOW_CHANNELS);
        let args = Args::new()
            .view(self.scratch.out.view())
            .view(self.input.z)
            .view(self.weights.norm.view())
            .f32(self.weights.eps)
            .len(shape.v_heads())
            .len(heads)
            .u32(per_row)
            .len(n)
            .view(self.input.qkv)
            .view(list)
            .u32(per_span)
            .len(shape.conv_dim())
            .len(shape.conv_kernel())
            .view(self.states.window.view());
        let args = outputs(args, n, shape.value_dim(), out, acts);
        let grid = [blocks(per_row as usize * n + per_span as usize * len, 1), 1, 1];
        // SAFETY: as in `prepare`.
        unsafe { kernel.launch(self.stream, grid, &args) }
    }
}

/// Rows from which a span is chunked.
fn least(form: Form, matrix: Matrix) -> usize {
    match form {
        Form::Chunked => LEAST,
        Form::Auto if matrix != Matrix::None => CHUNK,
        Form::Auto | Form::Recurrent => usize::MAX,
    }
}

fn grouped(shape: &Shape) -> u32 {
    (shape.order() == HeadOrder::Grouped).into()
}

fn place(dim: usize) -> usize {
    RULES
        .iter()
        .position(|(other, _)| *other == dim)
        .unwrap_or_else(|| panic!("heads of {dim} numbers: there are kernels for 32, 64 and 128"))
}

fn blocks(n: usize, per_block: usize) -> u32 {
    u32::try_from(n.div_ceil(per_block)).expect("a grid that kernels count in 32 bits")
}

/// Views hold numbers of 4 bytes.
fn check(name: &str, view: View<'_>, numbers: usize) {
    assert!(view.bytes() >= 4 * numbers, "{name} has {} bytes for {numbers} numbers", view.bytes());
}

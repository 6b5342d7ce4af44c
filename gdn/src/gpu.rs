//! The mixer on a device (feature `gpu`), through skep-hal.
//!
//! The same map as [`mix`](crate::mix), with everything the CPU keeps per sequence in device memory at fixed addresses, so that
//! a step can be captured and replayed: [`States`] holds convolution windows and recurrent states of all slots of a layer.

use crate::shape::HeadOrder;
use crate::{Shape, State, Weights};
use alloc::vec;
use alloc::vec::Vec;
use skep_hal::Result;
use skep_hal::gpu::{Args, Device, Entry, Kernel, Memory, Source, Stream, View};
use skep_quant::gpu::{Acts, ROWS, outputs};

const RULES: [(usize, &str); 3] = [(32, "gdn_rule_32"), (64, "gdn_rule_64"), (128, "gdn_rule_128")];
const NORMS: [(usize, &str); 3] = [(32, "gdn_norm_1"), (64, "gdn_norm_2"), (128, "gdn_norm_4")];

/// Columns of the state that a block has.
const COLUMNS: usize = 32;

/// The kernels of this crate.
pub const SOURCE: Source = Source {
    name: "gdn",
    parts: &[ROWS, include_str!("../kernels/gdn.gpu.h")],
    entries: &[
        Entry { name: "gdn_prepare", threads: 128 },
        Entry { name: RULES[0].1, threads: 128 },
        Entry { name: RULES[1].1, threads: 128 },
        Entry { name: RULES[2].1, threads: 128 },
        Entry { name: NORMS[0].1, threads: 256 },
        Entry { name: NORMS[1].1, threads: 256 },
        Entry { name: NORMS[2].1, threads: 256 },
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
    /// f32 `[capacity, v_heads, 2]`: decay and write strength.
    gates: Memory,
    /// f32 `[capacity, value_dim]`
    out: Memory,
}

impl DeviceScratch {
    /// For batches of up to `capacity` rows.
    ///
    /// # Errors
    /// What the device says of memory.
    pub fn new(device: &Device, shape: &Shape, capacity: usize) -> Result<Self> {
        let memory = |numbers: usize| Memory::new(device, 4 * capacity * numbers);
        Ok(Self {
            capacity,
            mixed: memory(shape.conv_dim())?,
            gates: memory(2 * shape.v_heads())?,
            out: memory(shape.value_dim())?,
        })
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
/// that is not read here. Spans ascend and cover all rows.
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
    rules: [Kernel; 3],
    norms: [Kernel; 3],
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
            prepare: kernel("gdn_prepare")?,
            rules: [kernel(RULES[0].1)?, kernel(RULES[1].1)?, kernel(RULES[2].1)?],
            norms: [kernel(NORMS[0].1)?, kernel(NORMS[1].1)?, kernel(NORMS[2].1)?],
        })
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
        let (d_k, d_v) = (shape.head_k_dim(), shape.head_v_dim());
        let place = |list: &[(usize, &str); 3], dim: usize| {
            let place = list.iter().position(|(other, _)| *other == dim);
            place.unwrap_or_else(|| panic!("heads of {dim} numbers: there are kernels for 32, 64 and 128"))
        };
        let (rule, norm) = (&self.rules[place(&RULES, d_k)], &self.norms[place(&NORMS, d_v)]);

        let args = Args::new()
            .view(input.qkv)
            .view(input.beta)
            .view(input.alpha)
            .view(weights.conv.view())
            .view(weights.a.view())
            .view(weights.dt_bias.view())
            .view(states.window.view())
            .view(list)
            .len(len)
            .len(shape.k_heads())
            .len(shape.v_heads())
            .len(d_k)
            .len(d_v)
            .len(shape.conv_kernel())
            .view(scratch.mixed.view())
            .view(scratch.gates.view());
        let heads = (2 * shape.k_heads() + shape.v_heads()) as u32;
        // SAFETY: the views are as long as the kernel goes, by the checks above; slots are the caller's, within the states.
        unsafe { self.prepare.launch(stream, [heads, n as u32, 1], &args) }?;

        let args = Args::new()
            .view(input.qkv)
            .view(scratch.mixed.view())
            .view(scratch.gates.view())
            .view(list)
            .len(shape.k_heads())
            .len(shape.v_heads())
            .len(d_v)
            .len(shape.conv_kernel())
            .u32((shape.order() == HeadOrder::Grouped).into())
            .view(states.window.view())
            .view(states.s.view())
            .view(scratch.out.view());
        let blocks = (shape.v_heads() * d_v / COLUMNS) as u32;
        // SAFETY: as above.
        unsafe { rule.launch(stream, [blocks, len as u32, 1], &args) }?;

        let args = Args::new()
            .view(scratch.out.view())
            .view(input.z)
            .view(weights.norm.view())
            .f32(weights.eps)
            .len(shape.v_heads());
        let args = outputs(args, n, shape.value_dim(), out, acts);
        // SAFETY: as above.
        unsafe { norm.launch(stream, [n as u32, 1, 1], &args) }
    }
}

/// Views hold numbers of 4 bytes.
fn check(name: &str, view: View<'_>, numbers: usize) {
    assert!(view.bytes() >= 4 * numbers, "{name} has {} bytes for {numbers} numbers", view.bytes());
}

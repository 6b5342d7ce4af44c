use alloc::vec::Vec;
use core::sync::atomic::{AtomicUsize, Ordering};

use skep_quant::Parallel;

use crate::buffer::Floats;
use crate::cpu::{Conv, Isa, Kernels, Rule, Scalar};
use crate::form::{CHUNK, Form};
use crate::math::{exp, sqrt};
use crate::raw::RawRows;
use crate::reference::{log_decay, sigmoid};
use crate::shape::{Input, Shape, Weights};
use crate::state::{Span, assert_spans};

/// Working memory of [`mix`], reused from call to call: once it has seen the largest batch, nothing is allocated
/// (the scalar kernels, for machines and shapes without vector kernels, still do).
///
/// A scratch may serve layers of different shapes, but only layers of one shape keep it from being rebuilt.
#[derive(Debug, Default)]
pub struct Scratch {
    shape: Option<Shape>,
    lanes: Vec<Lane>,
    desks: Vec<Desk>,
}

impl Scratch {
    /// An empty scratch.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    fn prepare(&mut self, shape: &Shape, workers: usize) {
        if self.shape != Some(*shape) {
            self.desks.clear();
            self.shape = Some(*shape);
        }
        while self.desks.len() < workers {
            self.desks.push(Desk::new(shape));
        }
    }
}

/// The whole mixer between the input projections and the output projection, for a batch of `n` tokens of several sequences.
///
/// For every span: causal convolution and SiLU over `qkv`; l2 normalisation of queries and keys (1e-6 inside the sum of squares)
/// and scaling of the queries by `head_k_dim^-½`; `g = a · softplus(alpha + dt_bias)` and `β = sigmoid(beta)`; the gated delta rule
/// on the span's state; RMS norm of the result per head, then its gate `silu(z)`. The states move forward past their span.
///
/// `out` is `[n, value_dim]`, value heads in the order of `shape`. Rows that belong to no span (padding) are not read, enter no state,
/// and come out as zeros.
///
/// The result of a span depends on nothing but its rows, its state and `form`: neighbours in the batch and the number of workers do
/// not change a bit of it. On x86-64 with AVX2 and FMA, and head dims that are multiples of 8, the vector kernels run, otherwise the
/// scalar ones of [`reference`](crate::reference), both spread over `par` by span and key head.
///
/// # Panics
/// When a slice does not fit the shape, `weights` were made for another one, or the spans do not ascend without overlap inside the
/// batch. A panic of this kind comes before anything is written.
pub fn mix(
    par: &dyn Parallel,
    shape: &Shape,
    weights: &Weights<'_>,
    spans: &mut [Span<'_>],
    input: &Input<'_>,
    scratch: &mut Scratch,
    form: Form,
    out: &mut [f32],
) {
    match Isa::for_shape(shape) {
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2(kernels) => mix_with(kernels, par, shape, weights, spans, input, scratch, form, out),
        Isa::Scalar => mix_with(Scalar, par, shape, weights, spans, input, scratch, form, out),
    }
}

/// [`mix`] with chosen kernels.
pub(crate) fn mix_with<K: Kernels>(
    kernels: K,
    par: &dyn Parallel,
    shape: &Shape,
    weights: &Weights<'_>,
    spans: &mut [Span<'_>],
    input: &Input<'_>,
    scratch: &mut Scratch,
    form: Form,
    out: &mut [f32],
) {
    weights.assert_fits(shape);
    let n = input.assert_fits(shape);
    assert_eq!(out.len(), n * shape.value_dim(), "out is not [n, value_dim]");
    assert_spans(shape, spans, n);

    let mut covered = 0;
    for span in spans.iter() {
        out[covered * shape.value_dim()..span.tokens.start * shape.value_dim()].fill(0.0);
        covered = span.tokens.end;
    }
    out[covered * shape.value_dim()..].fill(0.0);

    scratch.lanes.clear();
    scratch.lanes.extend(spans.iter_mut().filter(|span| !span.tokens.is_empty()).map(|span| {
        let (window, states) = span.state.parts_mut();
        Lane {
            first: span.tokens.start,
            tokens: span.tokens.len(),
            chunked: match form {
                Form::Auto => kernels.prefers_chunks(span.tokens.len()),
                Form::Chunked => true,
                Form::Recurrent => false,
            },
            window: RawRows::new(window, shape.conv_dim()),
            states: RawRows::new(states, shape.head_state()),
        }
    }));
    // Long spans first, so that none is left alone at the end.
    scratch.lanes.sort_unstable_by_key(|lane| core::cmp::Reverse(lane.tokens));

    let jobs = scratch.lanes.len() * shape.k_heads();
    let workers = par.workers().clamp(1, jobs.max(1));
    scratch.prepare(shape, workers);
    let batch = Batch { shape, weights, input, out: RawRows::new(out, shape.value_dim()) };
    let lanes = &scratch.lanes;
    let next = AtomicUsize::new(0);
    skep_quant::for_each_chunk_mut(par, &mut scratch.desks[..workers], 1, |_, desks| {
        loop {
            let job = next.fetch_add(1, Ordering::Relaxed);
            if job >= jobs {
                break;
            }
            // SAFETY: the counter gives every pair of lane and key head to one thread, and all memory behind the lanes and the
            // output is borrowed by this function until every chunk has returned.
            unsafe {
                batch.run(kernels, &lanes[job / shape.k_heads()], job % shape.k_heads(), &mut desks[0])
            };
        }
    });
    scratch.lanes.clear();
}

/// A span with its state taken apart, so that heads can be worked on by different threads.
#[derive(Debug)]
struct Lane {
    first: usize,
    tokens: usize,
    chunked: bool,
    /// `[conv_kernel - 1, conv_dim]`
    window: RawRows,
    /// `[v_heads, head_k_dim * head_v_dim]`
    states: RawRows,
}

/// One worker's memory, for one key head and the value heads that read it, a chunk of tokens at a time.
#[derive(Debug)]
struct Desk {
    /// The query head, the key head, then the value heads.
    heads: Vec<HeadConv>,
    q: Floats,
    k: Floats,
    v: Floats,
    o: Floats,
    g: Floats,
    decay: Floats,
    beta: Floats,
    scores: Floats,
    work: Floats,
}

/// What the convolution of one head needs besides the batch.
#[derive(Debug)]
struct HeadConv {
    /// `[conv_kernel - 1, dim]`: the window before the span.
    history: Floats,
    /// `[conv_kernel, dim]`: the taps, transposed.
    taps: Floats,
}

impl Desk {
    fn new(shape: &Shape) -> Self {
        let (d_k, d_v) = (shape.head_k_dim(), shape.head_v_dim());
        let head = |dim: usize| HeadConv {
            history: Floats::zeroed((shape.conv_kernel() - 1) * dim),
            taps: Floats::zeroed(shape.conv_kernel() * dim),
        };
        let mut heads = Vec::with_capacity(2 + shape.ratio());
        heads.extend([head(d_k), head(d_k)]);
        heads.extend((0..shape.ratio()).map(|_| head(d_v)));
        let sizes = crate::cpu::sizes(d_k, d_v);
        Self {
            heads,
            q: Floats::zeroed(CHUNK * d_k),
            k: Floats::zeroed(CHUNK * d_k),
            v: Floats::zeroed(CHUNK * d_v),
            o: Floats::zeroed(CHUNK * d_v),
            g: Floats::zeroed(CHUNK),
            decay: Floats::zeroed(CHUNK),
            beta: Floats::zeroed(CHUNK),
            scores: Floats::zeroed(sizes.scores),
            work: Floats::zeroed(sizes.work),
        }
    }
}

struct Batch<'a> {
    shape: &'a Shape,
    weights: &'a Weights<'a>,
    input: &'a Input<'a>,
    /// `[n, value_dim]`
    out: RawRows,
}

impl Batch<'_> {
    /// Runs one key head, and the value heads that read it, over one lane.
    ///
    /// # Safety
    /// The memory behind the lane and `self.out` is alive and not accessed by anyone else as far as it belongs to these heads:
    /// their channels of the window, their states, their columns of the lane's rows of the output.
    unsafe fn run<K: Kernels>(&self, kernels: K, lane: &Lane, k_head: usize, desk: &mut Desk) {
        let shape = self.shape;
        let (d_k, d_v) = (shape.head_k_dim(), shape.head_v_dim());
        for (i, head) in desk.heads.iter_mut().enumerate() {
            let channels = self.channels(k_head, i);
            let kernel = shape.conv_kernel();
            let taps = &self.weights.conv()[channels.start * kernel..channels.end * kernel];
            kernels.transpose(taps, kernel, &mut head.taps);
            // SAFETY: these channels of the window belong to these heads.
            unsafe { self.turn_window(lane, channels, &mut head.history) };
        }
        let Desk { heads, q, k, v, o, g, decay, beta, scores, work } = desk;
        let scale = 1.0 / sqrt(d_k as f32);
        for first in (0..lane.tokens).step_by(CHUNK) {
            let count = CHUNK.min(lane.tokens - first);
            let (q, k) = (&mut q[..count * d_k], &mut k[..count * d_k]);
            let (v, o) = (&mut v[..count * d_v], &mut o[..count * d_v]);
            let (g, decay, beta) = (&mut g[..count], &mut decay[..count], &mut beta[..count]);
            kernels.conv_silu(&self.conv(lane, k_head, 0, &heads[0]), first, q);
            kernels.conv_silu(&self.conv(lane, k_head, 1, &heads[1]), first, k);
            kernels.l2_normalise(q, d_k, scale);
            kernels.l2_normalise(k, d_k, 1.0);
            if lane.chunked {
                kernels.scores(q, k, d_k, scores);
            }
            for (member, head) in heads[2..].iter().enumerate() {
                let v_head = shape.v_head_of(k_head, member);
                kernels.conv_silu(&self.conv(lane, k_head, 2 + member, head), first, v);
                for (t, ((g, decay), beta)) in g.iter_mut().zip(&mut *decay).zip(&mut *beta).enumerate() {
                    let at = (lane.first + first + t) * shape.v_heads() + v_head;
                    *g = log_decay(
                        self.weights.a()[v_head],
                        self.input.alpha[at],
                        self.weights.dt_bias()[v_head],
                    );
                    *decay = exp(*g);
                    *beta = sigmoid(self.input.beta[at]);
                }
                // SAFETY: the state of this value head belongs to these heads, and no other reference to it is alive.
                let s = unsafe { lane.states.part(v_head, 0..shape.head_state()) };
                let rule = Rule { d_k, d_v, q, k, v, g, decay, beta };
                if lane.chunked {
                    kernels.chunked(&rule, scores, s, o, work);
                } else {
                    kernels.recurrent(&rule, s, o, work);
                }
                for (t, o) in o.chunks_exact(d_v).enumerate() {
                    let row = lane.first + first + t;
                    let columns = v_head * d_v..(v_head + 1) * d_v;
                    let z = &self.input.z[row * shape.value_dim()..][columns.clone()];
                    // SAFETY: these columns of a row of the lane belong to these heads, and no other reference to them is alive.
                    let out = unsafe { self.out.part(row, columns) };
                    kernels.gated_norm(o, self.weights.norm(), self.weights.eps(), z, out);
                }
            }
        }
    }

    /// Channels of the query head (0), the key head (1), or a value head (2 and up) that belongs to `k_head`.
    fn channels(&self, k_head: usize, i: usize) -> core::ops::Range<usize> {
        match i {
            0 => self.shape.q_channels(k_head),
            1 => self.shape.k_channels(k_head),
            _ => self.shape.v_channels(self.shape.v_head_of(k_head, i - 2)),
        }
    }

    fn conv<'c>(&'c self, lane: &Lane, k_head: usize, i: usize, head: &'c HeadConv) -> Conv<'c> {
        let channels = self.channels(k_head, i);
        Conv {
            kernel: self.shape.conv_kernel(),
            width: channels.len(),
            history: &head.history,
            taps: &head.taps,
            rows: &self.input.qkv[lane.first * self.shape.conv_dim()..],
            stride: self.shape.conv_dim(),
            column: channels.start,
        }
    }

    /// Copies the window before the span into `history`, and moves the window past the span.
    ///
    /// # Safety
    /// These channels of the lane's window are alive and not accessed by anyone else.
    unsafe fn turn_window(&self, lane: &Lane, channels: core::ops::Range<usize>, history: &mut [f32]) {
        let (rows, width) = (self.shape.conv_kernel() - 1, channels.len());
        for (i, old) in history.chunks_exact_mut(width).enumerate() {
            // SAFETY: passed on to the caller.
            old.copy_from_slice(unsafe { lane.window.part(i, channels.clone()) });
        }
        for i in 0..rows {
            // Of the window's rows followed by the span's, the last ones stay.
            let source = match (lane.tokens + i).checked_sub(rows) {
                Some(t) => &self.input.qkv[(lane.first + t) * self.shape.conv_dim()..][channels.clone()],
                None => &history[(lane.tokens + i) * width..][..width],
            };
            // SAFETY: passed on to the caller.
            unsafe { lane.window.part(i, channels.clone()) }.copy_from_slice(source);
        }
    }
}

use super::inputs::Inputs;
use super::{Rows, Run, runs};
use crate::batch::Batch;
use crate::error::Result;
use crate::memory::Memory as Sequences;
use skep_hal::gpu::{Device, Graph, HostMemory, Memory, Stream, View};
use std::collections::HashMap;
use std::sync::Arc;

/// A device with the kernels of all operations, and the stream of the steps. Clones are the same.
#[derive(Clone)]
pub(crate) struct Context {
    shared: Arc<Shared>,
}

pub(crate) struct Shared {
    pub(crate) device: Device,
    pub(crate) stream: Stream,
    pub(crate) quant: skep_quant::gpu::Kernels,
    pub(crate) attention: skep_attention::gpu::Kernels,
    pub(crate) gdn: skep_gdn::gpu::Kernels,
    pub(crate) moe: skep_moe_cache::gpu::Kernels,
}

impl std::ops::Deref for Context {
    type Target = Shared;

    fn deref(&self) -> &Shared {
        &self.shared
    }
}

impl Context {
    pub(crate) fn new(device: Device) -> Result<Self> {
        let stream = Stream::new(&device)?;
        let shared = Shared {
            quant: skep_quant::gpu::Kernels::load(&device)?,
            attention: skep_attention::gpu::Kernels::load(&device)?,
            gdn: skep_gdn::gpu::Kernels::load(&device)?,
            moe: skep_moe_cache::gpu::Kernels::load(&device)?,
            stream,
            device,
        };
        Ok(Self { shared: Arc::new(shared) })
    }
}

/// The rows of a run, as attention wants them.
pub(crate) fn attention_batch<'i>(
    inputs: &'i Inputs,
    rows: &Rows,
    tables: View<'i>,
    slots: usize,
) -> skep_attention::gpu::Batch<'i> {
    skep_attention::gpu::Batch {
        rows: rows.ids.len(),
        slot: inputs.slots(),
        position: inputs.positions(),
        end: None,
        spans: rows.spans.len(),
        span: inputs.spans(),
        slots,
        max_pages: inputs.most_pages(),
        pages: tables,
    }
}

/// What a model does with the rows of one run; every call enqueues the same work for the same number of rows and spans.
pub(crate) trait Forward {
    /// Enqueues everything from token numbers to the residual stream after the last layer.
    fn layers(&self, gpu: &Context, inputs: &Inputs, run: &Run<'_>) -> Result<()>;

    /// Enqueues the logits of `n` rows from the `first` of those wanted.
    fn head(&self, gpu: &Context, inputs: &Inputs, first: usize, n: usize) -> Result<()>;

    /// The device's `[HEAD_ROWS, n_vocab]` logits.
    fn logits(&self) -> &Memory;

    /// Forgets the recurrent state of a slot.
    fn reset(&self, gpu: &Context, slot: usize) -> Result<()>;
}

/// Rows of logits that are made at once.
pub(crate) const HEAD_ROWS: usize = 16;

/// Rows whose steps are recorded and replayed.
const REPLAYED_ROWS: usize = 16;

/// Runs steps of a model: cuts batches into runs, replays what repeats, brings logits to the host.
pub(crate) struct Steps {
    inputs: Inputs,
    capacity: usize,
    hidden: usize,
    vocab: usize,
    /// `[HEAD_ROWS, n_vocab]`
    staged: HostMemory,
    /// Rows of the last step, if all of them are where they were staged.
    direct: Option<usize>,
    logits: Vec<f32>,
    /// Recorded steps by their number of rows; `None` when a step has run, but was not recorded.
    recorded: HashMap<usize, Option<Graph>>,
}

impl Steps {
    pub(crate) fn new(
        gpu: &Context,
        capacity: usize,
        sequences: usize,
        context: usize,
        hidden: usize,
        vocab: usize,
    ) -> Result<Self> {
        Ok(Self {
            inputs: Inputs::new(&gpu.device, &gpu.stream, capacity, sequences, context)?,
            capacity,
            hidden,
            vocab,
            staged: HostMemory::new(&gpu.device, 4 * HEAD_ROWS * vocab)?,
            direct: Some(0),
            logits: Vec::new(),
            recorded: HashMap::new(),
        })
    }

    /// The logits of the last batch.
    pub(crate) fn logits(&self) -> &[f32] {
        match self.direct {
            Some(rows) => self.staged_rows(rows),
            None => &self.logits,
        }
    }

    /// Runs a batch; the logits are on the host then.
    pub(crate) fn forward(
        &mut self,
        gpu: &Context,
        model: &dyn Forward,
        sequences: &Sequences,
        batch: &Batch<'_>,
    ) -> Result<()> {
        self.logits.clear();
        self.direct = Some(0);
        // Chunks of recurrent layers begin at multiples of 64, so that a cut changes nothing.
        let runs = runs(batch, sequences, self.hidden, self.capacity, 64)?;
        let direct = runs.len() == 1 && batch.n_logits() <= HEAD_ROWS;
        for run in runs {
            for &[slot, _, _, start] in &run.rows.spans {
                if start == 0 {
                    model.reset(gpu, slot as usize)?;
                }
            }
            self.inputs.fill(&gpu.stream, &run.rows, sequences)?;
            if run.rows.decodes() && run.rows.ids.len() <= REPLAYED_ROWS && run.images.is_empty() {
                let n = self.decode(gpu, model, &run)?;
                self.collect(gpu, n, direct)?;
            } else {
                self.inputs.upload(&gpu.stream)?;
                model.layers(gpu, &self.inputs, &run)?;
                let wanted = run.rows.wanted.len();
                for first in (0..wanted).step_by(HEAD_ROWS) {
                    let n = HEAD_ROWS.min(wanted - first);
                    self.head(gpu, model, first, n)?;
                    self.collect(gpu, n, direct)?;
                }
                gpu.stream.synchronize()?;
            }
        }
        Ok(())
    }

    /// A step that is recorded the second time it comes, and replayed from then on.
    fn decode(&mut self, gpu: &Context, model: &dyn Forward, run: &Run<'_>) -> Result<usize> {
        let n = run.rows.ids.len();
        let enqueue = |steps: &Self| -> Result<()> {
            steps.inputs.upload(&gpu.stream)?;
            model.layers(gpu, &steps.inputs, run)?;
            steps.head(gpu, model, 0, n)
        };
        match self.recorded.get(&n) {
            None => {
                enqueue(self)?;
                self.recorded.insert(n, None);
            }
            Some(None) => {
                let graph = gpu.stream.capture(|| enqueue(self))?;
                // SAFETY: everything that was recorded lives as long as the model, which is dropped with its steps.
                unsafe { graph.launch(&gpu.stream) }?;
                self.recorded.insert(n, Some(graph));
            }
            Some(Some(graph)) => {
                // SAFETY: as above.
                unsafe { graph.launch(&gpu.stream) }?;
            }
        }
        Ok(n)
    }

    fn head(&self, gpu: &Context, model: &dyn Forward, first: usize, n: usize) -> Result<()> {
        model.head(gpu, &self.inputs, first, n)?;
        let bytes = 4 * n * self.vocab;
        // SAFETY: the staged logits are read after the stream has been waited for.
        unsafe { model.logits().slice(0..bytes).download_pinned(&gpu.stream, &self.staged, 0..bytes) }?;
        Ok(())
    }

    /// Waits for rows of logits; they stay where they are, or join those that came before.
    fn collect(&mut self, gpu: &Context, n: usize, direct: bool) -> Result<()> {
        gpu.stream.synchronize()?;
        self.direct = direct.then_some(n);
        if !direct {
            let mut logits = std::mem::take(&mut self.logits);
            logits.extend_from_slice(self.staged_rows(n));
            self.logits = logits;
        }
        Ok(())
    }

    fn staged_rows(&self, n: usize) -> &[f32] {
        // SAFETY: `collect` has waited for the stream, and the next work begins with a call that borrows us for itself.
        let bytes = unsafe { self.staged.as_slice() };
        bytemuck::cast_slice(&bytes[..4 * n * self.vocab])
    }
}

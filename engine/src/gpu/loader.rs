use super::Context;
use crate::error::{Error, Result};
use crate::store::{Store, Weight};
use skep_hal::gpu::{Event, HostMemory, Memory};
use skep_quant::gpu::{Matrix, pack, stride};
use skep_quant::{Parallel, for_each_chunk_mut};

/// Bytes of each of the two pinned buffers between file and device.
const STAGE: usize = 32 << 20;

/// Brings the weights of a file to a device: rows are packed on the host's threads into pinned memory, while the piece
/// before is on its way.
pub(crate) struct Loader<'l> {
    pub(crate) gpu: &'l Context,
    pub(crate) store: &'l Store,
    par: &'l dyn Parallel,
    progress: &'l mut dyn FnMut(u64),
    stages: [(HostMemory, Event); 2],
    next: usize,
}

impl<'l> Loader<'l> {
    pub(crate) fn new(
        gpu: &'l Context,
        store: &'l Store,
        par: &'l dyn Parallel,
        progress: &'l mut dyn FnMut(u64),
    ) -> Result<Self> {
        let stage = || -> Result<_> {
            let event = Event::new(&gpu.device)?;
            event.record(&gpu.stream)?;
            Ok((HostMemory::new(&gpu.device, STAGE)?, event))
        };
        Ok(Self { gpu, store, par, progress, stages: [stage()?, stage()?], next: 0 })
    }

    /// A weight, or a stack of experts, in the layout of the device's kernels.
    pub(crate) fn matrix(&mut self, weight: &Weight) -> Result<Matrix> {
        let bytes = self.store.weight_bytes(weight);
        let rows = weight.count * weight.rows;
        let row_bytes = bytes.len() / rows.max(1);
        let stride = stride(weight.ty, weight.cols);
        let matrix = Matrix::new(&self.gpu.device, weight.ty, weight.rows, weight.cols, weight.count)?;
        let most = (STAGE / stride).max(1);
        for first in (0..rows).step_by(most) {
            let n = most.min(rows - first);
            let (stage, sent) = &mut self.stages[self.next];
            self.next ^= 1;
            sent.synchronize()?;
            // SAFETY: the copy out of this buffer is done, by the event.
            let packed = &mut unsafe { stage.as_mut_slice() }[..n * stride];
            let source = &bytes[first * row_bytes..(first + n) * row_bytes];
            let chunk = n.div_ceil(4 * self.par.workers()).max(1);
            for_each_chunk_mut(self.par, packed, chunk * stride, |index, packed| {
                let rows = packed.len() / stride;
                let start = index * chunk * row_bytes;
                pack(weight.ty, weight.cols, &source[start..start + rows * row_bytes], packed);
            });
            let to = matrix.memory().slice(first * stride..(first + n) * stride);
            // SAFETY: the buffer is written next when the event has been waited for.
            unsafe { to.upload_pinned(&self.gpu.stream, stage, 0..n * stride) }?;
            sent.record(&self.gpu.stream)?;
            (self.progress)((n * row_bytes) as u64);
        }
        self.store.release(weight);
        Ok(matrix)
    }

    /// Numbers as they are.
    pub(crate) fn vector(&self, values: &[f32]) -> Result<Memory> {
        Ok(Memory::of(&self.gpu.stream, values)?)
    }

    /// Waits until everything is on the device.
    pub(crate) fn finish(self) -> Result<()> {
        self.gpu.stream.synchronize().map_err(Error::from)
    }
}

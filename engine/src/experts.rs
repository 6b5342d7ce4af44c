//! The routed experts of a layer, as files hold them.

use crate::error::{Error, Result};
use crate::gpu::{Context, Loader};
use crate::store::{Claims, Store, Weight};
use skep_hal::gpu::View;
use skep_moe_cache::cpu::{self, Activation};
use skep_moe_cache::gpu::{DeviceExperts, DeviceRoutes, DeviceScratch};
use skep_quant::gpu::{Acts, Gate};

/// The routed experts of one layer: `[experts, rows, cols]` stacks.
pub(crate) struct ExpertWeights {
    gate_up: GateUp,
    down: Weight,
}

/// How the file holds the gate and up projections.
enum GateUp {
    /// One tensor, of each expert the gate rows first.
    Fused(Weight),
    Split {
        gate: Weight,
        up: Weight,
    },
}

impl ExpertWeights {
    /// Claims `experts` experts of width `ff` under the names of one block.
    pub(crate) fn claim<B: AsRef<[u8]>>(
        claims: &mut Claims<'_, B>,
        name: &dyn Fn(&str) -> String,
        experts: usize,
        ff: usize,
        hidden: usize,
    ) -> Result<Self> {
        let fused = name("ffn_gate_up_exps.weight");
        let gate_up = match claims.has(&fused) {
            true => GateUp::Fused(claims.stack(&fused, experts, 2 * ff, hidden)?),
            false => GateUp::Split {
                gate: claims.stack(&name("ffn_gate_exps.weight"), experts, ff, hidden)?,
                up: claims.stack(&name("ffn_up_exps.weight"), experts, ff, hidden)?,
            },
        };
        Ok(Self { gate_up, down: claims.stack(&name("ffn_down_exps.weight"), experts, hidden, ff)? })
    }

    /// Bytes of `used` experts of `experts`.
    pub(crate) fn active_bytes(&self, experts: usize, used: usize) -> u64 {
        let (first, second) = match &self.gate_up {
            GateUp::Fused(both) => (both, None),
            GateUp::Split { gate, up } => (gate, Some(up)),
        };
        let banks = [Some(first), second, Some(&self.down)].into_iter().flatten();
        banks.map(|bank| bank.bytes() / experts.max(1) as u64 * used as u64).sum()
    }

    /// The experts on a device.
    pub(crate) fn load(&self, loader: &mut Loader<'_>, activation: Activation) -> Result<DeviceFeedForward> {
        let gate_up = match &self.gate_up {
            GateUp::Fused(both) => skep_moe_cache::gpu::GateUp::Fused(loader.matrix(both)?),
            GateUp::Split { gate, up } => {
                skep_moe_cache::gpu::GateUp::Split { gate: loader.matrix(gate)?, up: loader.matrix(up)? }
            }
        };
        let gate = match activation {
            Activation::Silu => Gate::Silu,
            Activation::GeluTanh => Gate::Gelu,
            other => {
                return Err(Error::model(format_args!("experts with {other:?} have no kernels on devices")));
            }
        };
        Ok(DeviceFeedForward { experts: DeviceExperts::new(gate_up, loader.matrix(&self.down)?, gate) })
    }

    /// The experts where their weights lie.
    pub(crate) fn open<'s>(&self, store: &'s Store, activation: Activation) -> Result<cpu::Experts<'s>> {
        let down = store.bank(&self.down)?;
        match &self.gate_up {
            GateUp::Fused(both) => cpu::Experts::fused(store.bank(both)?, down, activation),
            GateUp::Split { gate, up } => {
                cpu::Experts::new(store.bank(gate)?, store.bank(up)?, down, activation)
            }
        }
        .map_err(Error::model)
    }
}

/// The routed experts of one layer on a device.
pub(crate) struct DeviceFeedForward {
    experts: DeviceExperts,
}

impl DeviceFeedForward {
    /// Adds the weighted results of the routes of `n` rows to `out`, f32 `[n, hidden]`.
    pub(crate) fn add(
        &self,
        gpu: &Context,
        acts: &Acts,
        routes: &DeviceRoutes,
        n: usize,
        scratch: &DeviceScratch,
        out: View<'_>,
    ) -> Result<()> {
        let (stream, quant) = (&gpu.stream, &gpu.quant);
        Ok(gpu.moe.experts(stream, quant, &self.experts, None, acts, routes, n, scratch, out, true)?)
    }
}

//! The routed experts of a layer, as files hold them.

use crate::error::{Error, Result};
use crate::store::{Claims, Store, Weight};
use skep_moe_cache::cpu::{self, Activation};

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

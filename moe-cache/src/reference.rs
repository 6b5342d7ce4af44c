//! The plain truth that the rest of the crate is tested against: slow, and readable beside the description.

use alloc::vec;
use alloc::vec::Vec;

/// The slot cache as it is described: maps, the step of last use per slot, and a scan of all slots per miss.
///
/// A step: count it; look the distinct ids up; mark the hits as used in this step; then, for the missing ids in
/// ascending order, take the slot with the least (step of last use, slot number) among those not used in this step.
#[derive(Clone, Debug)]
pub struct SlotCache {
    n_experts: usize,
    /// `[n_slots]`: flat id held, and step of last use, 0 when empty.
    slots: Vec<(Option<usize>, u64)>,
    step: u64,
}

/// The slot of each position, and the copies `(expert, slot)`.
pub type Answer = (Vec<u32>, Vec<(u32, u32)>);

impl SlotCache {
    /// An empty cache of `n_slots` slots, for layers of `n_experts` experts.
    pub fn new(n_experts: usize, n_slots: usize) -> Self {
        Self { n_experts, slots: vec![(None, 0); n_slots], step: 0 }
    }

    /// The slot of each id and the copies (expert, slot); `None` when there are more distinct ids than slots.
    pub fn step(&mut self, layer: usize, ids: &[u32]) -> Option<Answer> {
        let mut distinct = ids.to_vec();
        distinct.sort_unstable();
        distinct.dedup();
        if distinct.len() > self.slots.len() {
            return None;
        }
        self.step += 1;
        for &id in &distinct {
            if let Some(slot) = self.slot_of(layer, id) {
                self.slots[slot].1 = self.step;
            }
        }
        let mut copies = Vec::new();
        for &id in &distinct {
            if self.slot_of(layer, id).is_some() {
                continue;
            }
            let unused = (0..self.slots.len()).filter(|&slot| self.slots[slot].1 < self.step);
            let victim = unused.min_by_key(|&slot| (self.slots[slot].1, slot))?;
            self.slots[victim] = (Some(layer * self.n_experts + id as usize), self.step);
            copies.push((id, victim as u32));
        }
        let slots =
            ids.iter().map(|&id| self.slot_of(layer, id).map(|slot| slot as u32)).collect::<Option<_>>()?;
        Some((slots, copies))
    }

    /// Empties a range of slots.
    pub fn invalidate(&mut self, slots: core::ops::Range<usize>) {
        self.slots[slots].fill((None, 0));
    }

    /// The slot that holds an expert.
    pub fn slot_of(&self, layer: usize, expert: u32) -> Option<usize> {
        let id = layer * self.n_experts + expert as usize;
        self.slots.iter().position(|slot| slot.0 == Some(id))
    }
}

/// One token's best `top_k` experts and weights: softmax over all logits, a full sort by (probability, then logit,
/// then lower number), the best k, divided by their sum.
///
/// # Panics
/// On NaN.
#[cfg(any(feature = "std", feature = "libm"))]
pub fn route(logits: &[f32], top_k: usize) -> Vec<(u32, f32)> {
    let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let exps: Vec<f32> = logits.iter().map(|&logit| crate::math::exp(logit - max)).collect();
    let total: f32 = exps.iter().sum();
    let mut ranked: Vec<(u32, f32)> = (0..).zip(exps.iter().map(|&e| e / total)).collect();
    ranked.sort_by(|a, b| {
        let key = |of: &(u32, f32)| (of.1, logits[of.0 as usize]);
        key(b).partial_cmp(&key(a)).expect("finite logits").then(a.0.cmp(&b.0))
    });
    ranked.truncate(top_k);
    let sum: f32 = ranked.iter().map(|&(_, p)| p).sum();
    ranked.iter().map(|&(expert, p)| (expert, p / sum)).collect()
}

/// The expert feed-forward, one token, expert and element after the other: weights decoded to f32, and
/// Σ w · down(act(gate · x) ⊙ (up · x)) over the token's routes. `x` is `[n_tokens, hidden]`, and so is the result.
///
/// # Panics
/// When the shapes disagree.
#[cfg(feature = "cpu")]
pub fn experts(experts: &crate::cpu::Experts<'_>, x: &[f32], routes: &crate::Routes) -> Vec<f32> {
    use crate::cpu::Activation;
    let (hidden, top_k) = (experts.hidden(), routes.top_k());
    let mut out = vec![0.0; x.len()];
    for (pair, (&expert, &weight)) in routes.experts().iter().zip(routes.weights()).enumerate() {
        let at = pair / top_k * hidden;
        let x = &x[at..at + hidden];
        let expert = expert as usize;
        let mut unit = product(experts.gate(expert), x);
        for (unit, up) in unit.iter_mut().zip(product(experts.up(expert), x)) {
            let x = *unit;
            let gate = match experts.activation() {
                Activation::GeluTanh => {
                    let u = (2.0 / core::f32::consts::PI).sqrt() * (x + 0.044715 * x * x * x);
                    0.5 * x * (1.0 + u.tanh())
                }
                Activation::Silu => x / (1.0 + (-x).exp()),
            };
            *unit = gate * up;
        }
        for (out, value) in out[at..].iter_mut().zip(product(experts.down(expert), &unit)) {
            *out += weight * value;
        }
    }
    out
}

#[cfg(feature = "cpu")]
fn product(weight: skep_quant::Matrix<'_>, x: &[f32]) -> Vec<f32> {
    let mut row = vec![0.0; weight.cols()];
    (0..weight.rows())
        .map(|i| {
            skep_quant::decode(weight.ty(), weight.row(i), &mut row).expect("a matrix holds whole rows");
            row.iter().zip(x).map(|(w, x)| w * x).sum()
        })
        .collect()
}

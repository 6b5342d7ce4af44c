//! Replaying recorded or synthetic routing through a [`SlotCache`], to choose a number of slots or judge a policy.
//!
//! A trace is a text file. The first line is `skep-trace 1 N_LAYERS N_EXPERTS`; every further line is one step, the
//! layer and then the experts, repetitions included, separated by blanks; empty lines and lines that start with `#`
//! are skipped:
//!
//! ```text
//! skep-trace 1 40 256
//! # token 0
//! 0 12 200 7 33 91 5 140 18
//! 1 3 77 250 41 9 162 30 101
//! ```

use alloc::collections::BTreeSet;
use alloc::vec;
use alloc::vec::Vec;
use core::cmp::Reverse;
use core::fmt;
use core::ops::Range;

use crate::math::powf;
use crate::policy::{Policy, Used};
use crate::{ErrorKind, LayerStats, Result, SlotCache};

/// The steps of a run: which experts each layer used, in order.
///
/// [`Display`](fmt::Display) writes the format that [`parse`](Trace::parse) reads.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Trace {
    n_layers: usize,
    n_experts: usize,
    /// Per step: layer, and where its ids end in `ids`.
    steps: Vec<(usize, usize)>,
    ids: Vec<u32>,
}

/// Seeded routing with the two properties real routers have: some experts are more popular than others, and a token
/// often uses experts of the token before.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Synthetic {
    /// Layers.
    pub n_layers: usize,
    /// Experts per layer.
    pub n_experts: usize,
    /// Experts per token.
    pub top_k: usize,
    /// Tokens, hence steps of each layer.
    pub n_tokens: usize,
    /// Exponent of the popularity of the r-th expert, r^−zipf: 0 is uniform, 1 is skewed.
    pub zipf: f64,
    /// Probability, 0 to 1, that an expert is the one the token before had at this rank.
    pub repeat: f64,
    /// Start of the random sequence.
    pub seed: u64,
}

impl Trace {
    /// An empty trace.
    pub fn new(n_layers: usize, n_experts: usize) -> Self {
        Self { n_layers, n_experts, steps: Vec::new(), ids: Vec::new() }
    }

    /// Appends a step.
    ///
    /// # Errors
    /// [`ErrorKind::LayerOutOfRange`] and [`ErrorKind::ExpertOutOfRange`].
    pub fn push(&mut self, layer: usize, experts: &[u32]) -> Result<()> {
        let (n_layers, n_experts) = (self.n_layers, self.n_experts);
        if layer >= n_layers {
            return Err(ErrorKind::LayerOutOfRange { layer, n_layers }.into());
        }
        if let Some(&expert) = experts.iter().find(|&&expert| expert as usize >= n_experts) {
            return Err(ErrorKind::ExpertOutOfRange { layer, expert, n_experts }.into());
        }
        self.ids.extend_from_slice(experts);
        self.steps.push((layer, self.ids.len()));
        Ok(())
    }

    /// Reads the text format.
    ///
    /// # Errors
    /// [`ErrorKind::Trace`] with the line, or the errors of [`push`](Trace::push).
    pub fn parse(text: &str) -> Result<Self> {
        let refuse = |line, what| ErrorKind::Trace { line: line + 1, what };
        let mut lines = text.lines().enumerate();
        let head: Vec<&str> =
            lines.next().map(|(_, line)| line.split_whitespace().collect()).unwrap_or_default();
        let &["skep-trace", "1", n_layers, n_experts] = &*head else {
            return Err(refuse(0, "not a header `skep-trace 1 N_LAYERS N_EXPERTS`").into());
        };
        let (Ok(n_layers), Ok(n_experts)) = (n_layers.parse(), n_experts.parse()) else {
            return Err(refuse(0, "layers or experts are not a number").into());
        };
        let mut trace = Self::new(n_layers, n_experts);
        let mut experts = Vec::new();
        for (number, line) in lines {
            let mut words = line.split_whitespace();
            let Some(layer) = words.next().filter(|word| !word.starts_with('#')) else { continue };
            let layer = layer.parse().map_err(|_| refuse(number, "the layer is not a number"))?;
            experts.clear();
            for word in words {
                experts.push(word.parse().map_err(|_| refuse(number, "an expert is not a number"))?);
            }
            trace.push(layer, &experts)?;
        }
        Ok(trace)
    }

    /// Makes a trace up.
    ///
    /// # Errors
    /// [`ErrorKind::TopK`] unless 1 ≤ `top_k` ≤ `n_experts`.
    pub fn synthetic(of: &Synthetic) -> Result<Self> {
        if of.top_k == 0 || of.top_k > of.n_experts {
            return Err(ErrorKind::TopK { top_k: of.top_k, n_experts: of.n_experts }.into());
        }
        let mut random = Random(of.seed);
        let mut below = 0.0;
        let cumulative: Vec<f64> = (1..=of.n_experts)
            .map(|rank| {
                below += powf(rank as f64, -of.zipf);
                below
            })
            .collect();
        let popular: Vec<Vec<u32>> = (0..of.n_layers).map(|_| random.shuffled(of.n_experts)).collect();
        let mut last: Vec<Vec<u32>> = vec![Vec::new(); of.n_layers];
        let mut trace = Self::new(of.n_layers, of.n_experts);
        for _ in 0..of.n_tokens {
            for (layer, last) in last.iter_mut().enumerate() {
                let mut experts: Vec<u32> = Vec::with_capacity(of.top_k);
                for rank in 0..of.top_k {
                    let kept = last.get(rank).filter(|_| random.unit() < of.repeat).copied();
                    let mut expert = kept.filter(|expert| !experts.contains(expert));
                    while expert.is_none() {
                        let point = random.unit() * below;
                        let place = cumulative.partition_point(|&c| c <= point);
                        let drawn = popular[layer][place.min(of.n_experts - 1)];
                        expert = Some(drawn).filter(|drawn| !experts.contains(drawn));
                    }
                    experts.extend(expert);
                }
                trace.push(layer, &experts)?;
                *last = experts;
            }
        }
        Ok(trace)
    }

    /// Layers.
    pub fn n_layers(&self) -> usize {
        self.n_layers
    }

    /// Experts per layer.
    pub fn n_experts(&self) -> usize {
        self.n_experts
    }

    /// The steps in order: layer and experts.
    pub fn steps(&self) -> impl ExactSizeIterator<Item = (usize, &[u32])> {
        let mut start = 0;
        self.steps.iter().map(move |&(layer, end)| {
            let ids = &self.ids[start..end];
            start = end;
            (layer, ids)
        })
    }
}

impl fmt::Display for Trace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "skep-trace 1 {} {}", self.n_layers, self.n_experts)?;
        for (layer, experts) in self.steps() {
            write!(f, "{layer}")?;
            for expert in experts {
                write!(f, " {expert}")?;
            }
            writeln!(f)?;
        }
        Ok(())
    }
}

/// Runs a trace through a cache of `n_slots` slots that starts empty, and counts.
///
/// # Errors
/// Those of [`SlotCache::with_policy`] and [`SlotCache::step`].
pub fn replay<P: Policy>(trace: &Trace, n_slots: usize, policy: P) -> Result<LayerStats> {
    let mut cache = SlotCache::with_policy(trace.n_layers, trace.n_experts, n_slots, policy)?;
    let mut slots = Vec::new();
    for (layer, experts) in trace.steps() {
        slots.resize(experts.len(), 0);
        cache.step(layer, experts, &mut slots)?;
    }
    Ok(cache.total())
}

/// Belady's rule: give up the slot whose expert is needed again last. It knows the trace, so it serves as the bound
/// that no real policy exceeds; it works only for the steps of that trace, in order.
#[derive(Clone, Debug)]
pub struct Belady {
    /// Per flat id: the steps that use it, counted from 1, latest first.
    uses: Vec<Vec<u64>>,
    /// (next use, slot) of the candidates; empty slots count as never used again.
    candidates: BTreeSet<(u64, Reverse<u32>)>,
    /// `[n_slots]`.
    next_use: Vec<u64>,
}

impl Belady {
    /// Next use of an expert that the trace does not use again, and of an empty slot, which goes first.
    const NEVER: u64 = u64::MAX - 1;
    const EMPTY: u64 = u64::MAX;

    /// The rule for the steps of `trace`.
    pub fn new(trace: &Trace) -> Self {
        let mut uses = vec![Vec::new(); trace.n_layers * trace.n_experts];
        for (step, (layer, experts)) in (1..).zip(trace.steps()) {
            for &expert in experts {
                let uses: &mut Vec<u64> = &mut uses[layer * trace.n_experts + expert as usize];
                if uses.last() != Some(&step) {
                    uses.push(step);
                }
            }
        }
        uses.iter_mut().for_each(|uses| uses.reverse());
        Self { uses, candidates: BTreeSet::new(), next_use: Vec::new() }
    }

    fn key(&self, slot: u32) -> (u64, Reverse<u32>) {
        (self.next_use[slot as usize], Reverse(slot))
    }
}

impl Policy for Belady {
    fn reset(&mut self, n_slots: usize) {
        self.next_use = vec![Self::EMPTY; n_slots];
        self.candidates = (0..n_slots as u32).map(|slot| (Self::EMPTY, Reverse(slot))).collect();
    }

    fn pin(&mut self, slot: u32) {
        let key = self.key(slot);
        self.candidates.remove(&key);
    }

    fn victim(&mut self) -> Option<u32> {
        self.candidates.pop_last().map(|(_, Reverse(slot))| slot)
    }

    fn settle(&mut self, step: u64, used: &[Used]) {
        for &Used { slot, id } in used {
            let uses = &mut self.uses[id as usize];
            while uses.last().is_some_and(|&next| next <= step) {
                uses.pop();
            }
            self.next_use[slot as usize] = uses.last().copied().unwrap_or(Self::NEVER);
            self.candidates.insert(self.key(slot));
        }
    }

    fn release(&mut self, slots: Range<u32>) {
        for slot in slots {
            self.pin(slot);
            self.next_use[slot as usize] = Self::EMPTY;
            self.candidates.insert(self.key(slot));
        }
    }
}

/// SplitMix64 (Steele, Lea, Flood 2014).
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// In [0, 1).
    fn unit(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1_u64 << 53) as f64
    }

    fn shuffled(&mut self, n: usize) -> Vec<u32> {
        let mut all: Vec<u32> = (0..n as u32).collect();
        for i in (1..n).rev() {
            all.swap(i, (self.next() % (i as u64 + 1)) as usize);
        }
        all
    }
}

#[cfg(test)]
mod tests {
    use alloc::string::ToString;

    use super::*;
    use crate::Lru;

    const SMALL: Synthetic =
        Synthetic { n_layers: 3, n_experts: 16, top_k: 4, n_tokens: 50, zipf: 1.0, repeat: 0.4, seed: 7 };

    #[test]
    fn a_trace_survives_its_text_form() {
        let trace = Trace::synthetic(&SMALL).unwrap();
        assert_eq!(trace.steps().len(), 150);
        assert_eq!(Trace::parse(&trace.to_string()).unwrap(), trace);
        let parsed = Trace::parse("skep-trace 1 2 8\n\n# a comment\n 1 7 7 0\n0\n").unwrap();
        assert_eq!(parsed.steps().collect::<Vec<_>>(), [(1, &[7, 7, 0][..]), (0, &[])]);
    }

    #[test]
    fn bad_traces_are_errors_with_the_line() {
        let text = |input| Trace::parse(input).unwrap_err().to_string();
        assert_eq!(text(""), "trace line 1: not a header `skep-trace 1 N_LAYERS N_EXPERTS`");
        assert_eq!(text("skep-trace 2 1 1"), "trace line 1: not a header `skep-trace 1 N_LAYERS N_EXPERTS`");
        assert_eq!(text("skep-trace 1 x 1"), "trace line 1: layers or experts are not a number");
        assert_eq!(text("skep-trace 1 1 4\n0 1\n0 1 -2"), "trace line 3: an expert is not a number");
        assert_eq!(text("skep-trace 1 1 4\nx 1"), "trace line 2: the layer is not a number");
        assert_eq!(text("skep-trace 1 1 4\n1 1"), "layer 1 is out of range, there are 1 layers");
        assert_eq!(text("skep-trace 1 1 4\n0 4"), "layer 0: expert 4 is out of range, there are 4 experts");
    }

    #[test]
    fn synthetic_routing_is_seeded_distinct_and_skewed() {
        let trace = Trace::synthetic(&SMALL).unwrap();
        assert_eq!(Trace::synthetic(&SMALL).unwrap(), trace);
        assert_ne!(Trace::synthetic(&Synthetic { seed: 8, ..SMALL }).unwrap(), trace);
        for (_, experts) in trace.steps() {
            let distinct: BTreeSet<_> = experts.iter().collect();
            assert_eq!(distinct.len(), 4);
        }
        let share = |zipf| {
            let trace = Trace::synthetic(&Synthetic { zipf, n_tokens: 500, repeat: 0.0, ..SMALL }).unwrap();
            let mut counts = [0; 16];
            trace
                .steps()
                .filter(|step| step.0 == 1)
                .for_each(|s| s.1.iter().for_each(|&e| counts[e as usize] += 1));
            *counts.iter().max().unwrap() as f64 / 500.0
        };
        assert!(share(0.0) < 0.35 && share(1.2) > 0.6, "{} {}", share(0.0), share(1.2));
        assert!(Trace::synthetic(&Synthetic { top_k: 17, ..SMALL }).is_err());
    }

    #[test]
    fn belady_bounds_lru_and_both_only_miss_once_when_all_fits() {
        let trace = Trace::synthetic(&Synthetic { n_tokens: 300, ..SMALL }).unwrap();
        let mut last = 0.0;
        for n_slots in [4, 8, 16, 24, 40, 48] {
            let lru = replay(&trace, n_slots, Lru::new()).unwrap();
            let best = replay(&trace, n_slots, Belady::new(&trace)).unwrap();
            assert_eq!((lru.active, lru.calls), (best.active, best.calls));
            assert!(best.misses <= lru.misses, "{n_slots}: {best:?} {lru:?}");
            assert!(best.hit_rate() >= Some(last));
            last = best.hit_rate().unwrap();
        }
        assert_eq!(replay(&trace, 48, Lru::new()).unwrap().misses, 48);
        assert!(replay(&trace, 3, Lru::new()).is_err());
    }

    #[test]
    fn belady_keeps_what_is_needed_soonest() {
        // Two slots; after 1 and 2, expert 3 comes in: 1 is needed next, 2 last.
        let mut trace = Trace::new(1, 4);
        for expert in [1, 2, 3, 1, 3, 2] {
            trace.push(0, &[expert]).unwrap();
        }
        assert_eq!(replay(&trace, 2, Belady::new(&trace)).unwrap().misses, 4);
        assert_eq!(replay(&trace, 2, Lru::new()).unwrap().misses, 5);
    }

    #[test]
    fn belady_fills_empty_slots_first_in_order() {
        let mut trace = Trace::new(1, 4);
        trace.push(0, &[2, 1]).unwrap();
        trace.push(0, &[3]).unwrap();
        let mut cache = SlotCache::with_policy(1, 4, 4, Belady::new(&trace)).unwrap();
        let mut slots = [9; 2];
        cache.step(0, &[2, 1], &mut slots).unwrap();
        assert_eq!(slots, [1, 0]);
        cache.invalidate(0..1).unwrap();
        cache.step(0, &[3], &mut slots[..1]).unwrap();
        assert_eq!(slots[0], 0);
        cache.check_invariants().unwrap();
    }
}

//! What sequences leave behind: pages of keys and values, and recurrent states.

use crate::batch::{Batch, SequenceId};
use crate::error::{Error, ErrorKind, Result};
use skep_attention::{KvCache, KvType};
use skep_gdn::State;

/// Tokens of a KV page.
pub(crate) const PAGE: usize = 64;

/// Most tokens of one piece when a model has sliding layers: a window's pool holds the window and one piece.
pub(crate) const PIECE: usize = 2048;

/// What one sequence of a model needs.
#[derive(Debug, Clone, Default)]
pub(crate) struct Layout {
    /// Layers that see every earlier token.
    pub(crate) full: Vec<KvShape>,
    /// Layers that see the last `window` tokens.
    pub(crate) sliding: Vec<KvShape>,
    pub(crate) window: usize,
    /// Layers with a recurrent state.
    pub(crate) recurrent: Vec<skep_gdn::Shape>,
}

/// Keys and values of one layer: `[kv_heads, head_dim]` each, per token.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct KvShape {
    pub(crate) heads: usize,
    pub(crate) dim: usize,
}

/// Where keys, values and states are kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Storage {
    /// Here, in `caches` and `states`.
    Host(KvType),
    /// With the graph, on its device: only the page numbers are kept here.
    Device,
}

/// The memory of all sequences of a runner.
pub(crate) struct Memory {
    /// Layers that see every earlier token.
    pub(crate) full: Pool,
    /// Layers that see a window; pages behind it go back to the pool.
    pub(crate) sliding: Pool,
    window: usize,
    sequences: Vec<Sequence>,
    context: usize,
}

/// Pages that the caches of several layers have in common.
pub(crate) struct Pool {
    /// One per layer; none where the device keeps them.
    pub(crate) caches: Vec<KvCache>,
    /// Pages in all; 0 if there are no layers of this kind.
    pages: usize,
    free: Vec<u32>,
}

/// One sequence: its page tables and the states of its recurrent layers.
pub(crate) struct Sequence {
    pub(crate) open: bool,
    pub(crate) len: usize,
    pub(crate) pages: Vec<u32>,
    /// As `pages`, but entries that the window has left behind are [`Self::LEFT`].
    pub(crate) window_pages: Vec<u32>,
    /// One per recurrent layer; none where the device keeps them.
    pub(crate) states: Vec<State>,
}

impl Layout {
    /// Bytes that one token adds to the KV caches for good.
    pub(crate) fn bytes_per_token(&self, kv: KvType) -> u64 {
        self.full.iter().map(|shape| shape.bytes(kv)).sum()
    }

    /// Bytes of the windows of one sequence.
    pub(crate) fn window_bytes(&self, kv: KvType, context: usize) -> u64 {
        let tokens = (self.window_pages(context) * PAGE) as u64;
        tokens * self.sliding.iter().map(|shape| shape.bytes(kv)).sum::<u64>()
    }

    /// Pages of the layers that see everything, for `sequences` sequences.
    pub(crate) fn full_pool(&self, sequences: usize, context: usize) -> usize {
        if self.full.is_empty() { 0 } else { sequences * context.div_ceil(PAGE) }
    }

    /// Pages of the layers that see a window, for `sequences` sequences.
    pub(crate) fn sliding_pool(&self, sequences: usize, context: usize) -> usize {
        sequences * self.window_pages(context)
    }

    /// Most pages that the window of one sequence takes at once.
    fn window_pages(&self, context: usize) -> usize {
        if self.sliding.is_empty() {
            return 0;
        }
        // Neither end of what is held need lie on a border.
        let tokens = self.window.saturating_add(PIECE).min(context);
        (tokens.div_ceil(PAGE) + 1).min(context.div_ceil(PAGE))
    }
}

impl KvShape {
    /// Bytes of one token.
    fn bytes(self, kv: KvType) -> u64 {
        let width = match kv {
            KvType::F16 => 2,
            _ => 4,
        };
        (2 * self.heads * self.dim * width) as u64
    }
}

impl Memory {
    /// Memory for `sequences` sequences of up to `context` tokens each.
    pub(crate) fn new(layout: &Layout, storage: Storage, sequences: usize, context: usize) -> Result<Self> {
        let states = || match storage {
            Storage::Host(_) => layout.recurrent.iter().map(State::new).collect(),
            Storage::Device => Vec::new(),
        };
        let list = (0..sequences)
            .map(|_| Sequence {
                open: false,
                len: 0,
                pages: Vec::new(),
                window_pages: Vec::new(),
                states: states(),
            })
            .collect();
        Ok(Self {
            full: Pool::new(&layout.full, storage, layout.full_pool(sequences, context))?,
            sliding: Pool::new(&layout.sliding, storage, layout.sliding_pool(sequences, context))?,
            window: layout.window,
            sequences: list,
            context,
        })
    }

    /// Opens an empty sequence.
    pub(crate) fn open(&mut self) -> Result<SequenceId> {
        let slot = self.sequences.iter().position(|sequence| !sequence.open).ok_or_else(|| {
            Error::new(ErrorKind::Busy, format!("all {} sequences are in use", self.sequences.len()))
        })?;
        let sequence = &mut self.sequences[slot];
        sequence.open = true;
        sequence.len = 0;
        sequence.states.iter_mut().for_each(State::reset);
        Ok(SequenceId(slot))
    }

    /// Ends a sequence; its pages are free again.
    pub(crate) fn close(&mut self, id: SequenceId) {
        let sequence = &mut self.sequences[id.0];
        sequence.open = false;
        sequence.len = 0;
        self.full.free.append(&mut sequence.pages);
        let held = sequence.window_pages.drain(..).filter(|&page| page != Sequence::LEFT);
        self.sliding.free.extend(held);
    }

    /// Tokens that the sequence holds.
    pub(crate) fn len(&self, id: SequenceId) -> usize {
        self.sequences[id.0].len
    }

    pub(crate) fn sequence(&self, id: SequenceId) -> &Sequence {
        &self.sequences[id.0]
    }

    /// The sequence in a slot, open or not.
    pub(crate) fn slot(&self, slot: usize) -> &Sequence {
        &self.sequences[slot]
    }

    pub(crate) fn sequences_mut(&mut self) -> &mut [Sequence] {
        &mut self.sequences
    }

    /// Counts the tokens of a batch that has run.
    pub(crate) fn advance(&mut self, batch: &Batch<'_>) {
        for piece in batch.pieces() {
            self.sequences[piece.sequence.0].len += piece.tokens.len();
        }
    }

    /// Makes room for `tokens` more tokens, or changes nothing.
    pub(crate) fn reserve(&mut self, id: SequenceId, tokens: usize) -> Result<()> {
        let sequence = self
            .sequences
            .get_mut(id.0)
            .filter(|sequence| sequence.open)
            .ok_or_else(|| Error::new(ErrorKind::Request, format!("sequence {} is not open", id.0)))?;
        let len = sequence.len + tokens;
        if len > self.context {
            return Err(Error::new(
                ErrorKind::ContextLength { prompt: len, limit: self.context },
                format!("{len} tokens do not fit the context of {}", self.context),
            ));
        }
        let slides = self.sliding.pages > 0;
        if slides && tokens > PIECE {
            let message = format!("a piece of {tokens} tokens is longer than the {PIECE} that fit one step");
            return Err(Error::new(ErrorKind::Request, message));
        }
        if self.full.pages > 0 {
            self.full.grow(&mut sequence.pages, len)?;
        }
        if slides {
            // The first new token sees this one and what follows.
            let first = (sequence.len + 1).saturating_sub(self.window);
            for page in sequence.window_pages.iter_mut().take(first / PAGE) {
                if *page != Sequence::LEFT {
                    self.sliding.free.push(std::mem::replace(page, Sequence::LEFT));
                }
            }
            self.sliding.grow(&mut sequence.window_pages, len)?;
        }
        Ok(())
    }
}

impl Pool {
    fn new(shapes: &[KvShape], storage: Storage, pages: usize) -> Result<Self> {
        let caches = match storage {
            Storage::Device => Vec::new(),
            Storage::Host(kv) => {
                let cache = |shape: &KvShape| {
                    KvCache::new(kv, pages, PAGE, shape.heads, shape.dim, shape.dim)
                        .map_err(|error| Error::new(ErrorKind::Device, format!("kv cache: {error}")))
                };
                shapes.iter().map(cache).collect::<Result<_>>()?
            }
        };
        Ok(Self { caches, pages, free: (0..pages as u32).rev().collect() })
    }

    /// Lengthens a page table to hold `len` tokens.
    fn grow(&mut self, table: &mut Vec<u32>, len: usize) -> Result<()> {
        while table.len() * PAGE < len {
            // Every sequence has its share of the pool, so the list cannot run dry before the checks above fail.
            let page =
                self.free.pop().ok_or_else(|| Error::new(ErrorKind::Device, "no free kv page is left"))?;
            table.push(page);
        }
        Ok(())
    }
}

impl Sequence {
    /// A page that the window has left behind.
    pub(crate) const LEFT: u32 = u32::MAX;
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHAPE: KvShape = KvShape { heads: 1, dim: 4 };

    fn sliding(window: usize, sequences: usize, context: usize) -> Memory {
        let layout = Layout { full: vec![SHAPE], sliding: vec![SHAPE; 2], window, recurrent: Vec::new() };
        Memory::new(&layout, Storage::Host(KvType::F16), sequences, context).unwrap()
    }

    #[test]
    fn a_window_takes_no_more_pages_however_long_the_sequence() {
        for (window, steps) in [(1, [1; 9]), (512, [1, 63, 64, 65, 500, 2048, 1, 1, 2047]), (1000, [2048; 9])]
        {
            let mut memory = sliding(window, 2, 40_000);
            let ids = [memory.open().unwrap(), memory.open().unwrap()];
            for step in steps.iter().cycle().take(90) {
                for id in ids {
                    if memory.len(id) + step > 40_000 {
                        continue;
                    }
                    memory.reserve(id, *step).unwrap();
                    let sequence = memory.sequence(id);
                    // Everything that the step's tokens see has a page.
                    let first = (sequence.len + 1).saturating_sub(window) / PAGE;
                    let last = (sequence.len + step - 1) / PAGE;
                    assert!(sequence.window_pages[first..=last].iter().all(|&page| page != Sequence::LEFT));
                    memory.sequences[id.0].len += step;
                }
            }
            for id in ids {
                memory.close(id);
            }
            let mut free = memory.sliding.free.clone();
            free.sort_unstable();
            let pages = 2 * (window + PIECE).div_ceil(PAGE) + 2;
            assert_eq!(free, (0..pages as u32).collect::<Vec<_>>());
        }
    }

    #[test]
    fn pieces_are_bounded_by_the_window_pool_and_nothing_else() {
        let mut memory = sliding(64, 1, 10_000);
        let id = memory.open().unwrap();
        let error = memory.reserve(id, PIECE + 1).unwrap_err();
        assert_eq!(error.to_string(), "a piece of 2049 tokens is longer than the 2048 that fit one step");
        let layout = Layout { full: vec![SHAPE], ..Layout::default() };
        let mut memory = Memory::new(&layout, Storage::Host(KvType::F16), 1, 10_000).unwrap();
        let id = memory.open().unwrap();
        memory.reserve(id, 10_000).unwrap();
    }

    #[test]
    fn a_short_context_needs_no_more_than_its_own_pages() {
        let layout = Layout { sliding: vec![SHAPE], window: 1024, ..Layout::default() };
        assert_eq!(layout.window_pages(100), 2);
        assert_eq!(layout.window_bytes(KvType::F16, 100), 2 * 64 * 16);
        assert_eq!(layout.bytes_per_token(KvType::F16), 0);
    }
}

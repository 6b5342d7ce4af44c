//! What sequences leave behind: pages of keys and values, and recurrent states.

use crate::batch::SequenceId;
use crate::error::{Error, ErrorKind, Result};
use crate::qwen35moe::Config;
use skep_attention::{KvCache, KvType};
use skep_gdn::State;

/// Tokens of a KV page.
pub(crate) const PAGE: usize = 64;

/// The memory of all sequences of a runner.
pub(crate) struct Memory {
    /// One cache per full-attention layer; they share page numbers.
    pub(crate) caches: Vec<KvCache>,
    free_pages: Vec<u32>,
    sequences: Vec<Sequence>,
    context: usize,
}

/// One sequence: its page table and the states of its recurrent layers.
pub(crate) struct Sequence {
    pub(crate) open: bool,
    pub(crate) len: usize,
    pub(crate) pages: Vec<u32>,
    pub(crate) states: Vec<State>,
}

impl Memory {
    /// Memory for `sequences` sequences of up to `context` tokens each.
    pub(crate) fn new(config: &Config, kv: KvType, sequences: usize, context: usize) -> Result<Self> {
        let device =
            |error: &dyn std::fmt::Display| Error::new(ErrorKind::Device, format!("kv cache: {error}"));
        let pages = sequences * context.div_ceil(PAGE);
        let recurrent = config.recurrent.iter().filter(|&&kind| kind).count();
        let caches = (recurrent..config.layers)
            .map(|_| {
                KvCache::new(kv, pages, PAGE, config.kv_heads, config.head_dim, config.head_dim)
                    .map_err(|error| device(&error))
            })
            .collect::<Result<_>>()?;
        let sequences = (0..sequences)
            .map(|_| Sequence {
                open: false,
                len: 0,
                pages: Vec::new(),
                states: (0..recurrent).map(|_| State::new(&config.gdn)).collect(),
            })
            .collect();
        Ok(Self { caches, free_pages: (0..pages as u32).rev().collect(), sequences, context })
    }

    /// Bytes that one token adds to the KV caches.
    pub(crate) fn kv_bytes_per_token(config: &Config, kv: KvType) -> u64 {
        let width = match kv {
            KvType::F16 => 2,
            _ => 4,
        };
        let layers = config.recurrent.iter().filter(|&&kind| !kind).count();
        (layers * 2 * config.kv_heads * config.head_dim * width) as u64
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
        self.free_pages.append(&mut sequence.pages);
    }

    /// Tokens that the sequence holds.
    pub(crate) fn len(&self, id: SequenceId) -> usize {
        self.sequences[id.0].len
    }

    pub(crate) fn sequence(&self, id: SequenceId) -> &Sequence {
        &self.sequences[id.0]
    }

    pub(crate) fn sequences_mut(&mut self) -> &mut [Sequence] {
        &mut self.sequences
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
        while sequence.pages.len() * PAGE < len {
            // Every sequence has its share of the pool, so the list cannot run dry before the check above fails.
            let page = self
                .free_pages
                .pop()
                .ok_or_else(|| Error::new(ErrorKind::Device, "no free kv page is left"))?;
            sequence.pages.push(page);
        }
        Ok(())
    }
}

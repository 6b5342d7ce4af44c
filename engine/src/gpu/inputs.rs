//! What a run of rows over the device reads of its batch: token numbers, positions, spans, page tables.

use crate::batch::{Batch, ImageRows, Piece, Want};
use crate::error::{Error, ErrorKind, Result};
use crate::memory::{Memory as Sequences, PAGE};
use skep_hal::gpu::{Device, HostMemory, Memory, Stream, View};
use std::ops::Range;

/// Rows that go over the device together, in the order of a batch.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct Rows {
    pub(crate) ids: Vec<u32>,
    pub(crate) slots: Vec<u32>,
    pub(crate) positions: Vec<u32>,
    /// Slot, first row, rows and position of the first row of every sequence.
    pub(crate) spans: Vec<[u32; 4]>,
    /// Rows whose logits are wanted.
    pub(crate) wanted: Vec<u32>,
}

impl Rows {
    /// Whether every sequence goes on by one token and shows its logits: a step that can be replayed.
    pub(crate) fn decodes(&self) -> bool {
        self.spans.len() == self.ids.len() && self.wanted.len() == self.ids.len()
    }
}

/// Rows of one run with what is not the same from step to step.
pub(crate) struct Run<'b> {
    pub(crate) rows: Rows,
    /// Embeddings that stand in place of tokens, by their first row.
    pub(crate) images: Vec<(usize, &'b [f32])>,
    /// Per span, the tokens of images that see each other, as positions in the sequence.
    pub(crate) together: Vec<Vec<Range<usize>>>,
}

/// Cuts a batch into runs of at most `capacity` rows. Pieces without images are cut where `unit` divides a position.
pub(crate) fn runs<'b>(
    batch: &'b Batch<'b>,
    sequences: &Sequences,
    hidden: usize,
    capacity: usize,
    unit: usize,
) -> Result<Vec<Run<'b>>> {
    let mut runs: Vec<Run<'b>> = Vec::new();
    for piece in batch.pieces() {
        let start = sequences.len(piece.sequence);
        if !piece.images.is_empty() && piece.tokens.len() > capacity {
            let len = piece.tokens.len();
            let message =
                format!("a piece of {len} tokens with images is longer than the {capacity} of one run");
            return Err(Error::new(ErrorKind::Request, message));
        }
        let mut done = 0;
        while done < piece.tokens.len() {
            let room = capacity - runs.last().map_or(capacity, |run| run.rows.ids.len());
            let left = piece.tokens.len() - done;
            let take = match left <= room {
                true => left,
                false if piece.images.is_empty() => {
                    let end = (start + done + room) / unit * unit;
                    end.saturating_sub(start + done)
                }
                false => 0,
            };
            if take == 0 {
                runs.push(Run { rows: Rows::default(), images: Vec::new(), together: Vec::new() });
                continue;
            }
            if let Some(run) = runs.last_mut() {
                run.push(piece, start, done..done + take, hidden);
            }
            done += take;
        }
    }
    Ok(runs)
}

impl<'b> Run<'b> {
    fn push(&mut self, piece: &'b Piece<'b>, start: usize, tokens: Range<usize>, hidden: usize) {
        let (rows, slot) = (&mut self.rows, piece.sequence.0 as u32);
        let first = rows.ids.len();
        rows.spans.push([slot, first as u32, tokens.len() as u32, (start + tokens.start) as u32]);
        rows.ids.extend_from_slice(&piece.tokens[tokens.clone()]);
        rows.slots.extend(tokens.clone().map(|_| slot));
        rows.positions.extend(tokens.clone().map(|token| (start + token) as u32));
        let last = piece.tokens.len() - 1;
        let wanted = tokens.clone().filter(|&token| match piece.want {
            Want::All => true,
            Want::Last => token == last,
            Want::Nothing => false,
        });
        rows.wanted.extend(wanted.map(|token| (first + token - tokens.start) as u32));
        // A piece with images is never cut, so that `at` counts from the run's first row of the piece.
        let place = |image: &ImageRows<'b>| (first + image.at, image.rows);
        self.images.extend(piece.images.iter().map(place));
        let seen = |image: &ImageRows<'b>| start + image.at..start + image.at + image.rows.len() / hidden;
        self.together.push(piece.images.iter().map(seen).collect());
    }
}

/// The batch on the device, at addresses that never change.
pub(crate) struct Inputs {
    host: HostMemory,
    device: Memory,
    capacity: usize,
    sequences: usize,
    full: Tables,
}

/// Page tables `[sequences, most]`.
struct Tables {
    device: Memory,
    shadow: Vec<u32>,
    most: usize,
}

impl Inputs {
    /// For runs of up to `capacity` rows of up to `sequences` sequences of `context` tokens.
    pub(crate) fn new(
        device: &Device,
        stream: &Stream,
        capacity: usize,
        sequences: usize,
        context: usize,
    ) -> Result<Self> {
        let bytes = 4 * (4 * capacity + 4 * sequences.max(capacity));
        let most = context.div_ceil(PAGE);
        Ok(Self {
            host: HostMemory::new(device, bytes)?,
            device: Memory::zeroed(stream, bytes)?,
            capacity,
            sequences: sequences.max(capacity),
            full: Tables::new(stream, sequences, most)?,
        })
    }

    /// Puts the rows where [`upload`](Self::upload) takes them from, and brings the page tables up to date. The stream must
    /// have nothing under way.
    pub(crate) fn fill(&mut self, stream: &Stream, rows: &Rows, sequences: &Sequences) -> Result<()> {
        let Self { host, capacity, .. } = self;
        let mut put = |at: usize, values: &mut dyn Iterator<Item = u32>| {
            // SAFETY: the caller has waited for the stream, so that no copy reads the memory.
            let bytes = unsafe { host.as_mut_slice() };
            for (place, value) in bytes[4 * at..].chunks_exact_mut(4).zip(values) {
                place.copy_from_slice(&value.to_le_bytes());
            }
        };
        put(0, &mut rows.ids.iter().copied());
        put(*capacity, &mut rows.slots.iter().copied());
        put(2 * *capacity, &mut rows.positions.iter().copied());
        put(3 * *capacity, &mut rows.wanted.iter().copied());
        put(4 * *capacity, &mut rows.spans.iter().flatten().copied());
        for &[slot, ..] in &rows.spans {
            self.full.update(stream, slot as usize, &sequences.slot(slot as usize).pages)?;
        }
        Ok(())
    }

    /// Enqueues the copy of the rows to the device.
    pub(crate) fn upload(&self, stream: &Stream) -> Result<()> {
        // SAFETY: `fill` is called when the stream has nothing under way.
        Ok(unsafe { self.device.view().upload_pinned(stream, &self.host, 0..self.device.bytes()) }?)
    }

    pub(crate) fn ids(&self) -> View<'_> {
        self.part(0, self.capacity)
    }

    pub(crate) fn slots(&self) -> View<'_> {
        self.part(self.capacity, self.capacity)
    }

    pub(crate) fn positions(&self) -> View<'_> {
        self.part(2 * self.capacity, self.capacity)
    }

    pub(crate) fn wanted(&self) -> View<'_> {
        self.part(3 * self.capacity, self.capacity)
    }

    pub(crate) fn spans(&self) -> View<'_> {
        self.part(4 * self.capacity, 4 * self.sequences)
    }

    /// The page tables of the layers that see everything, `[sequences, most_pages]`.
    pub(crate) fn full_tables(&self) -> View<'_> {
        self.full.device.view()
    }

    /// Pages of a row of the tables.
    pub(crate) fn most_pages(&self) -> usize {
        self.full.most
    }

    fn part(&self, at: usize, len: usize) -> View<'_> {
        self.device.slice(4 * at..4 * (at + len))
    }
}

impl Tables {
    fn new(stream: &Stream, sequences: usize, most: usize) -> Result<Self> {
        let device = Memory::zeroed(stream, 4 * sequences * most)?;
        Ok(Self { device, shadow: vec![0; sequences * most], most })
    }

    /// Uploads the entries of a sequence that are not as they were.
    fn update(&mut self, stream: &Stream, slot: usize, pages: &[u32]) -> Result<()> {
        let row = slot * self.most..(slot + 1) * self.most;
        let shadow = &mut self.shadow[row.clone()];
        let differs = |(at, page): (usize, &u32)| (shadow[at] != *page).then_some(at);
        let Some(first) = pages.iter().enumerate().find_map(differs) else { return Ok(()) };
        shadow[first..pages.len()].copy_from_slice(&pages[first..]);
        let start = 4 * (row.start + first);
        let changed = &shadow[first..pages.len()];
        self.device.slice(start..start + size_of_val(changed)).upload(stream, changed)?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::batch::SequenceId;
    use crate::memory::{KvShape, Layout, Storage};

    #[test]
    fn long_pieces_are_cut_at_whole_chunks_and_nothing_is_lost() {
        let layout = Layout { full: vec![KvShape { heads: 1, dim: 4 }], ..Layout::default() };
        let mut memory = Sequences::new(&layout, Storage::Device, 3, 1000).unwrap();
        let ids: Vec<SequenceId> = (0..3).map(|_| memory.open().unwrap()).collect();
        let tokens: Vec<u32> = (0..300).collect();
        let mut batch = Batch::new();
        for (&sequence, (len, want)) in
            ids.iter().zip([(1, Want::Last), (300, Want::All), (70, Want::Nothing)])
        {
            batch.push(Piece { sequence, tokens: &tokens[..len], images: &[], want });
        }
        let runs = runs(&batch, &memory, 4, 128, 64).unwrap();
        let all: Vec<Vec<[u32; 4]>> = runs.iter().map(|run| run.rows.spans.clone()).collect();
        assert_eq!(
            all,
            [
                vec![[0, 0, 1, 0], [1, 1, 64, 0]],
                vec![[1, 0, 128, 64]],
                vec![[1, 0, 108, 192]],
                vec![[2, 0, 70, 0]],
            ]
        );
        let wanted: usize = runs.iter().map(|run| run.rows.wanted.len()).sum();
        assert_eq!(wanted, 301);
        assert_eq!(runs[0].rows.wanted[..2], [0, 1]);
        assert!(!runs[0].rows.decodes());
    }

    #[test]
    fn images_are_not_cut() {
        let mut memory = Sequences::new(&Layout::default(), Storage::Device, 2, 1000).unwrap();
        let ids = [memory.open().unwrap(), memory.open().unwrap()];
        let rows = [0.0; 4 * 30];
        let images = [ImageRows { at: 40, rows: &rows }];
        let tokens = [7; 100];
        let mut batch = Batch::new();
        batch.push(Piece { sequence: ids[0], tokens: &tokens[..50], images: &[], want: Want::Last });
        batch.push(Piece { sequence: ids[1], tokens: &tokens, images: &images, want: Want::Last });
        let runs = runs(&batch, &memory, 4, 128, 64).unwrap();
        assert_eq!(runs.len(), 2);
        assert_eq!(runs[1].rows.spans, [[1, 0, 100, 0]]);
        assert_eq!(runs[1].images[0].0, 40);
        assert_eq!(
            runs[1].together.concat().iter().map(|r| (r.start, r.end)).collect::<Vec<_>>(),
            [(40, 70)]
        );
    }
}

use super::{Event, FinishReason, Sink, Timings, Usage, shutting_down};
use crate::batch::{Batch, ImageRows, Piece, SequenceId, Want};
use crate::constraint::OneOf;
use crate::error::{Error, Result};
use crate::images::Placed;
use crate::runner::Runner;
use crate::sampler::Sampler;
use crate::stream::{Delta, Stream};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

/// Tokens of a prefill chunk: a multiple of the DeltaNet chunk, short enough that running answers do not stall for long.
const CHUNK: usize = 512;

/// A request that was checked, tokenized and queued.
pub(super) struct Job {
    /// The prompt, then the answer: what was forced (the opening of a tool call) and what was generated.
    pub(super) tokens: Vec<u32>,
    pub(super) prompt_tokens: usize,
    /// The images of the prompt in order.
    pub(super) images: Vec<Placed>,
    pub(super) max_tokens: usize,
    pub(super) ignore_eos: bool,
    pub(super) sampler: Sampler,
    pub(super) constraint: Option<OneOf>,
    pub(super) stream: Stream,
    pub(super) sink: Box<dyn Sink>,
    pub(super) queued: Instant,
}

/// A job that has a sequence.
struct Active {
    job: Job,
    sequence: SequenceId,
    /// Tokens that the model has seen.
    done: usize,
    /// Embeddings of the job's images, from when they are encoded until the model has seen them.
    rows: Vec<Option<Arc<[f32]>>>,
    started: Instant,
    first_token: Option<Instant>,
}

/// What became of a job in a step.
enum Outcome {
    Running,
    Finished(FinishReason),
    Failed(Error),
    /// Nobody listens.
    Gone,
}

/// The loop of the engine thread: until `stop` is set or every sender is gone.
pub(super) fn run(mut runner: Runner, queue: &Receiver<Job>, stop: &AtomicBool) {
    // The one that is next; the rest stay in the channel, which bounds them.
    let mut waiting = None;
    let mut active = Vec::new();
    let mut logits = Vec::new();
    while !stop.load(Ordering::Acquire) {
        if waiting.is_none() {
            match receive(queue, active.is_empty()) {
                Ok(job) => waiting = job,
                Err(Gone) if active.is_empty() => return,
                Err(Gone) => {}
            }
        }
        waiting.take_if(|job| job.sink.closed());
        admit(&mut runner, &mut waiting, &mut active);
        let gone: Vec<usize> = (0..active.len()).filter(|&index| active[index].job.sink.closed()).collect();
        for index in gone.into_iter().rev() {
            runner.close(active.remove(index).sequence);
        }
        if !active.is_empty() {
            step(&mut runner, &mut active, &mut logits);
        }
    }
    let jobs = active.into_iter().map(|active| active.job).chain(waiting).chain(queue.try_iter());
    for mut job in jobs {
        job.sink.send(Event::Failed(shutting_down()));
    }
}

/// Every sender is gone.
struct Gone;

/// Takes a job from the queue, if there is one; an idle engine waits a little for it.
fn receive(queue: &Receiver<Job>, idle: bool) -> Result<Option<Job>, Gone> {
    const POLL: Duration = Duration::from_millis(50);
    match queue.recv_timeout(if idle { POLL } else { Duration::ZERO }) {
        Ok(job) => Ok(Some(job)),
        Err(RecvTimeoutError::Timeout) => Ok(None),
        Err(RecvTimeoutError::Disconnected) => Err(Gone),
    }
}

/// Gives the waiting job a sequence, if one is free.
fn admit(runner: &mut Runner, waiting: &mut Option<Job>, active: &mut Vec<Active>) {
    if waiting.is_some()
        && let Ok(sequence) = runner.open()
    {
        let job = waiting.take();
        active.extend(job.map(|job| Active {
            rows: vec![None; job.images.len()],
            job,
            sequence,
            done: 0,
            started: Instant::now(),
            first_token: None,
        }));
    }
}

/// One step: a token of every running answer, and a chunk of the prompt that has waited longest.
fn step(runner: &mut Runner, active: &mut Vec<Active>, logits: &mut Vec<f32>) {
    let mut prefilling = active.iter().position(|active| active.remaining() > 1);
    if let Some(index) = prefilling {
        match active[index].look(runner) {
            Ok(true) => {}
            // The other answers go on meanwhile.
            Ok(false) => prefilling = None,
            Err(error) => {
                active[index].conclude(Outcome::Failed(error));
                runner.close(active.remove(index).sequence);
                return;
            }
        }
    }
    let members: Vec<usize> = (0..active.len())
        .filter(|&index| active[index].remaining() == 1 || Some(index) == prefilling)
        .collect();
    let images: Vec<Vec<ImageRows<'_>>> = members.iter().map(|&index| active[index].image_rows()).collect();
    let mut batch = Batch::new();
    for (&index, images) in members.iter().zip(&images) {
        batch.push(active[index].piece(images));
    }
    if batch.pieces().is_empty() {
        return;
    }
    let fed: Vec<(usize, bool)> =
        batch.pieces().iter().map(|piece| (piece.tokens.len(), piece.want == Want::Last)).collect();
    let result = runner.step(&batch).map(|rows| {
        logits.clear();
        logits.extend_from_slice(rows);
    });
    let vocab = runner.info().n_vocab;
    let mut rows = logits.chunks_exact_mut(vocab);
    let mut ended = Vec::new();
    for (&index, (tokens, wanted)) in members.iter().zip(fed) {
        let active = &mut active[index];
        let outcome = match &result {
            Err(error) => Outcome::Failed(error.clone()),
            Ok(()) => {
                active.advance_by(tokens);
                match wanted.then(|| rows.next()).flatten() {
                    Some(row) => active.advance(runner, row),
                    None => Outcome::Running,
                }
            }
        };
        if active.conclude(outcome) {
            ended.push(index);
        }
    }
    for index in ended.into_iter().rev() {
        runner.close(active.remove(index).sequence);
    }
}

impl Active {
    /// Tokens that the model has not seen yet.
    fn remaining(&self) -> usize {
        self.job.tokens.len() - self.done
    }

    /// The tokens of the next piece. An image is never split: a piece ends before one that does not fit, or is as long as the
    /// one it begins with.
    fn next(&self) -> Range<usize> {
        let mut end = self.job.tokens.len().min(self.done + CHUNK);
        for image in &self.job.images {
            let stop = image.at + image.len;
            if image.at < end && stop > end && stop > self.done {
                end = if image.at > self.done { image.at } else { stop };
            }
        }
        self.done..end
    }

    /// The images in the next piece.
    fn in_next(&self) -> Range<usize> {
        let next = self.next();
        let images = &self.job.images;
        images.partition_point(|image| image.at < next.start)
            ..images.partition_point(|image| image.at < next.end)
    }

    /// Comes nearer to the images of the next piece, and says whether all are there.
    fn look(&mut self, runner: &mut Runner) -> Result<bool> {
        let images = self.in_next();
        for index in images.clone() {
            if self.rows[index].is_none() {
                self.rows[index] = runner.look(&self.job.images[index])?;
                break;
            }
        }
        Ok(self.rows[images].iter().all(Option::is_some))
    }

    fn image_rows(&self) -> Vec<ImageRows<'_>> {
        let images = self.in_next();
        let placed = self.job.images[images.clone()].iter().zip(&self.rows[images]);
        placed
            .filter_map(|(image, rows)| Some(ImageRows { at: image.at - self.done, rows: rows.as_deref()? }))
            .collect()
    }

    fn piece<'a>(&'a self, images: &'a [ImageRows<'a>]) -> Piece<'a> {
        let next = self.next();
        let want = if next.end == self.job.tokens.len() { Want::Last } else { Want::Nothing };
        Piece { sequence: self.sequence, tokens: &self.job.tokens[next], images, want }
    }

    fn advance_by(&mut self, tokens: usize) {
        let seen = self.in_next();
        self.rows[seen].fill(None);
        self.done += tokens;
    }

    /// Chooses the next token and sends what it says.
    fn advance(&mut self, runner: &Runner, logits: &mut [f32]) -> Outcome {
        let mut deltas = Vec::new();
        if self.first_token.is_none() {
            self.first_token = Some(Instant::now());
            let forced = &self.job.tokens[self.job.prompt_tokens..];
            for &token in forced {
                self.job.stream.push(token, &mut deltas);
            }
        }
        match self.choose(runner, logits, &mut deltas) {
            Ok(outcome) => {
                if matches!(outcome, Outcome::Finished(_)) {
                    self.job.stream.finish(&mut deltas);
                }
                if self.send(deltas) { outcome } else { Outcome::Gone }
            }
            Err(error) => Outcome::Failed(error),
        }
    }

    fn choose(&mut self, runner: &Runner, logits: &mut [f32], deltas: &mut Vec<Delta>) -> Result<Outcome> {
        let tokenizer = runner.tokenizer();
        let job = &mut self.job;
        for &id in tokenizer.suppressed() {
            logits[id as usize] = f32::NEG_INFINITY;
        }
        if let Some(constraint) = &job.constraint {
            constraint.mask(tokenizer, logits);
        } else if job.ignore_eos {
            for &id in tokenizer.ends() {
                logits[id as usize] = f32::NEG_INFINITY;
            }
        }
        let token = job.sampler.sample(logits, &job.tokens)?;
        job.tokens.push(token);
        if tokenizer.is_end(token) {
            return Ok(Outcome::Finished(FinishReason::Stop));
        }
        if let Some(constraint) = &mut job.constraint {
            constraint.advance(tokenizer.token_bytes(token));
            if constraint.done() {
                job.constraint = None;
            }
        }
        if job.stream.push(token, deltas) {
            return Ok(Outcome::Finished(FinishReason::Stop));
        }
        let generated = job.tokens.len() - job.prompt_tokens;
        if generated >= job.max_tokens || job.tokens.len() >= runner.info().context {
            return Ok(Outcome::Finished(FinishReason::Length));
        }
        Ok(Outcome::Running)
    }

    fn send(&mut self, deltas: Vec<Delta>) -> bool {
        deltas.into_iter().all(|delta| self.job.sink.send(Event::Delta(delta)))
    }

    /// Sends the last event of a job that has ended, and says whether it has.
    fn conclude(&mut self, outcome: Outcome) -> bool {
        let event = match outcome {
            Outcome::Running => return false,
            Outcome::Gone => return true,
            Outcome::Failed(error) => Event::Failed(error),
            Outcome::Finished(reason) => Event::Finished {
                reason: match reason {
                    FinishReason::Stop if self.job.stream.tool_calls() > 0 => FinishReason::ToolCalls,
                    reason => reason,
                },
                usage: Usage {
                    prompt_tokens: self.job.prompt_tokens,
                    completion_tokens: self.job.tokens.len() - self.job.prompt_tokens,
                },
                timings: self.timings(),
            },
        };
        self.job.sink.send(event);
        true
    }

    fn timings(&self) -> Timings {
        let first = self.first_token.unwrap_or_else(Instant::now);
        Timings {
            queued_seconds: (self.started - self.job.queued).as_secs_f64(),
            prefill_seconds: (first - self.started).as_secs_f64(),
            decode_seconds: first.elapsed().as_secs_f64(),
        }
    }
}

//! The engine thread: takes requests, runs them together step by step, and sends what comes out.

mod job;
mod prompt;

use crate::chat::Message;
use crate::error::{Error, ErrorKind, Result};
use crate::runner::{ModelInfo, Runner};
use crate::sampler::Sampling;
use crate::stream::Delta;
use job::Job;
use prompt::Prompter;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, SyncSender, TrySendError};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

/// What to continue.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub enum Prompt {
    /// A conversation, rendered by the model's own chat template.
    Chat {
        /// The turns so far.
        messages: Vec<Message>,
        /// Function declarations in OpenAI's form.
        tools: Vec<serde_json::Value>,
        /// Whether a function is to be called.
        tool_choice: ToolChoice,
        /// Further variables of the template, `enable_thinking` for one.
        kwargs: serde_json::Map<String, serde_json::Value>,
    },
    /// Text to go on from; control tokens in it are recognised.
    Text(String),
    /// Token ids to go on from.
    Tokens(Vec<u32>),
}

/// Whether the answer is to call a function.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum ToolChoice {
    /// The model decides.
    #[default]
    Auto,
    /// No call: the model is not told of the tools.
    None,
    /// Some call: the answer is made to begin with one, without thinking first.
    Required,
    /// A call of this function, likewise.
    Function(String),
}

/// One generation.
#[derive(Debug, Clone)]
pub struct Request {
    /// What to continue.
    pub prompt: Prompt,
    /// How tokens are chosen.
    pub sampling: Sampling,
    /// Tokens at most; by default as many as fit the context. A larger number than fits is lowered.
    pub max_tokens: Option<usize>,
    /// Strings that end the answer; they are not part of it.
    pub stop: Vec<String>,
    /// Goes on after an end-of-generation token.
    pub ignore_eos: bool,
}

/// Takes the events of one request. Called on the engine's thread, so it must not block.
pub trait Sink: Send {
    /// Takes an event; false means that nobody listens any more, and the request ends.
    fn send(&mut self, event: Event) -> bool;

    /// Whether nobody listens any more; asked before every step, and while the request waits.
    fn closed(&self) -> bool;
}

/// What a request sends.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub enum Event {
    /// A piece of the answer.
    Delta(Delta),
    /// The request failed; the last event.
    Failed(Error),
    /// The answer is complete; the last event.
    Finished {
        /// Why it ended.
        reason: FinishReason,
        /// Tokens counted.
        usage: Usage,
        /// Seconds spent.
        timings: Timings,
    },
}

/// Why an answer ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum FinishReason {
    /// The token limit or the end of the context was reached.
    Length,
    /// The model ended its turn, or a stop string came.
    Stop,
    /// The model called functions.
    ToolCalls,
}

/// Tokens of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Usage {
    /// Tokens of the rendered prompt.
    pub prompt_tokens: usize,
    /// Tokens generated, the end token included.
    pub completion_tokens: usize,
}

/// Where the time of a request went, in seconds.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
#[non_exhaustive]
pub struct Timings {
    /// Waiting for a free sequence.
    pub queued_seconds: f64,
    /// From the start of the prefill to the first token.
    pub prefill_seconds: f64,
    /// From the first token to the last.
    pub decode_seconds: f64,
}

/// What is known of a request when it is accepted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Submitted {
    /// Tokens of the rendered prompt.
    pub prompt_tokens: usize,
}

/// Settings of an engine.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct EngineOptions {
    /// Requests that may wait; more are refused as busy.
    pub queue: usize,
}

impl Default for EngineOptions {
    fn default() -> Self {
        Self { queue: 64 }
    }
}

/// A model that serves requests from a thread of its own.
///
/// Requests are taken in the order of their arrival; as many run together as the runner has sequences.
pub struct Engine {
    info: ModelInfo,
    sampling: Sampling,
    prompter: Prompter,
    jobs: SyncSender<Job>,
    stop: Arc<AtomicBool>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl Engine {
    /// Starts the thread.
    ///
    /// # Errors
    /// [`ErrorKind::Device`] if the system refuses a thread.
    pub fn start(runner: Runner, options: EngineOptions) -> Result<Self> {
        let info = runner.info().clone();
        let sampling = runner.sampling().clone();
        let prompter = Prompter::new(&runner);
        let (jobs, queue) = mpsc::sync_channel(options.queue.max(1));
        let stop = Arc::new(AtomicBool::new(false));
        let stopping = Arc::clone(&stop);
        let thread = std::thread::Builder::new()
            .name("skep-engine".into())
            .spawn(move || job::run(runner, &queue, &stopping))
            .map_err(|error| Error::new(ErrorKind::Device, format!("no thread for the engine: {error}")))?;
        Ok(Self { info, sampling, prompter, jobs, stop, thread: Mutex::new(Some(thread)) })
    }

    /// Facts of the model.
    pub fn info(&self) -> &ModelInfo {
        &self.info
    }

    /// Sampling settings that the model's file recommends.
    pub fn sampling_defaults(&self) -> &Sampling {
        &self.sampling
    }

    /// Renders and tokenizes the prompt, checks the request, and puts it in the queue.
    ///
    /// Does real work on the calling thread, for long prompts some milliseconds.
    ///
    /// # Errors
    /// [`ErrorKind::Request`], [`ErrorKind::Template`] and [`ErrorKind::ContextLength`] for requests that cannot be run,
    /// [`ErrorKind::Busy`] if the queue is full, [`ErrorKind::Cancelled`] once the engine is shutting down.
    pub fn submit(&self, request: Request, sink: Box<dyn Sink>) -> Result<Submitted> {
        let job = self.prompter.job(request, sink, self.info.context)?;
        let submitted = Submitted { prompt_tokens: job.prompt_tokens };
        if self.stop.load(Ordering::Acquire) {
            return Err(shutting_down());
        }
        self.jobs.try_send(job).map_err(|error| match error {
            TrySendError::Full(_) => Error::new(ErrorKind::Busy, "the queue is full"),
            TrySendError::Disconnected(_) => shutting_down(),
        })?;
        Ok(submitted)
    }

    /// Stops taking requests, cancels those that wait or run, and waits for the thread to end.
    pub fn shutdown(&self) {
        self.stop.store(true, Ordering::Release);
        let thread = self.thread.lock().unwrap_or_else(std::sync::PoisonError::into_inner).take();
        if let Some(thread) = thread {
            // A panic there was reported on stderr; there is nothing left to do for it.
            let _ = thread.join();
        }
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        self.shutdown();
    }
}

fn shutting_down() -> Error {
    Error::new(ErrorKind::Cancelled, "the engine is shutting down")
}

//! `skep run`: one answer, or a chat, on the terminal.

use std::io::{self, BufRead, IsTerminal, Write};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Sender};
use std::thread;

use serde_json::{Map, Value};
use skep_engine::chat::{Content, Image, Message, Part, Role};
use skep_engine::{
    Delta, Engine, EngineOptions, Event, FinishReason, Prompt, Request, Sampling, Sink, Timings, ToolChoice,
    Usage,
};

use crate::failure::Failure;
use crate::model::{ModelArgs, SamplingArgs, positive};
use crate::picture;

/// Answers one prompt, or chats when none is given
///
/// The answer goes to stdout, everything else to stderr. Ctrl-C stops an answer; the end of the input ends the chat.
#[derive(clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    model: ModelArgs,
    /// Answer without thinking first
    #[arg(long)]
    no_think: bool,
    /// Instructions for the whole conversation
    #[arg(long, value_name = "TEXT")]
    system: Option<String>,
    /// Picture that the prompt, or the first line of a chat, is about; may be repeated
    #[arg(long, value_name = "FILE")]
    image: Vec<PathBuf>,
    /// Tokens of an answer [default: as many as fit]
    #[arg(long, value_name = "N", value_parser = positive)]
    max_tokens: Option<usize>,
    #[command(flatten)]
    sampling: SamplingArgs,
    /// The one prompt to answer
    prompt: Option<String>,
}

pub(crate) fn run(args: Args) -> Result<(), Failure> {
    let images = picture::read_all(&args.image)?;
    let runner = args.model.load(|options| options.sequences = 1)?;
    if runner.info().images.is_none() && !images.is_empty() {
        return Err(Failure::other("the model takes no images: name its projector with --mmproj"));
    }
    let sampling = args.sampling.apply(runner.sampling().clone())?;
    let mut options = EngineOptions::default();
    options.queue = 1;
    let engine = Engine::start(runner, options)?;
    let interrupt = Arc::new(Interrupt::default());
    interrupt.watch().map_err(|error| Failure::other(format!("cannot watch for Ctrl-C: {error}")))?;

    let mut chat = Chat { engine, interrupt, sampling, args, messages: Vec::new(), images };
    if let Some(system) = chat.args.system.take() {
        chat.messages.push(Message::text(Role::System, system));
    }
    match chat.args.prompt.take() {
        Some(prompt) => chat.turn(prompt).map(drop),
        None => chat.interact(),
    }
}

/// A conversation on the terminal.
struct Chat {
    engine: Engine,
    interrupt: Arc<Interrupt>,
    sampling: Sampling,
    args: Args,
    /// The turns so far.
    messages: Vec<Message>,
    /// Pictures that the next turn is about.
    images: Vec<Image>,
}

impl Chat {
    fn interact(&mut self) -> Result<(), Failure> {
        let watched = io::stdin().is_terminal() && io::stderr().is_terminal();
        let mut line = String::new();
        loop {
            if watched {
                note(format_args!("> "));
            }
            line.clear();
            let read = io::stdin().lock().read_line(&mut line);
            match read.map_err(|error| Failure::other(format!("cannot read the input: {error}")))? {
                0 => return Ok(()),
                _ if line.trim().is_empty() => continue,
                _ => {}
            }
            let before = self.messages.len();
            match self.turn(line.trim_end_matches(['\r', '\n']).to_owned()) {
                Ok((usage, timings)) if watched => {
                    let speed = usage.completion_tokens.saturating_sub(1) as f64 / timings.decode_seconds;
                    if speed.is_finite() {
                        note(format_args!(
                            "\x1b[2m{} tokens, {speed:.1} per second\x1b[0m\n",
                            usage.completion_tokens
                        ));
                    }
                }
                Ok(_) => {}
                // A chat goes on after what it cannot answer, but a script must learn of it.
                Err(Failure::Other(message)) if watched => {
                    self.messages.truncate(before);
                    note(format_args!("skep: error: {message}\n"));
                }
                Err(failure) => return Err(failure),
            }
        }
    }

    /// Asks, writes the answer as it comes, and keeps both for the next turn.
    fn turn(&mut self, text: String) -> Result<(Usage, Timings), Failure> {
        self.messages.push(self.message(text));
        let mut kwargs = Map::new();
        if self.args.no_think {
            kwargs.insert("enable_thinking".into(), Value::Bool(false));
        }
        let request = Request {
            prompt: Prompt::Chat {
                messages: self.messages.clone(),
                tools: Vec::new(),
                tool_choice: ToolChoice::None,
                kwargs,
            },
            sampling: self.sampling.clone(),
            max_tokens: self.args.max_tokens,
            stop: Vec::new(),
            ignore_eos: false,
        };

        let (sender, events) = mpsc::channel();
        let _answering = self.interrupt.answering();
        let pipe = Pipe { events: sender, interrupt: Arc::clone(&self.interrupt) };
        self.engine.submit(request, Box::new(pipe))?;
        let mut page = Page::default();
        for event in events {
            match event {
                Event::Delta(delta) => page.write(delta),
                Event::Failed(error) => {
                    page.end();
                    return Err(error.into());
                }
                Event::Finished { reason, usage, timings } => {
                    page.end();
                    if reason == FinishReason::Length {
                        note(format_args!("(cut off: no room for more tokens)\n"));
                    }
                    self.images.clear();
                    self.messages.push(page.into_message());
                    return Ok((usage, timings));
                }
                _ => {}
            }
        }
        page.end();
        if !self.interrupt.asked() {
            return Err(Failure::other("the engine stopped before the answer was finished"));
        }
        if page.content.is_empty() {
            // Stopped before it began: as if never asked.
            self.messages.pop();
        } else {
            self.images.clear();
            self.messages.push(page.into_message());
        }
        Ok((Usage::default(), Timings::default()))
    }

    /// What the user says next, with the pictures before it.
    fn message(&self, text: String) -> Message {
        if self.images.is_empty() {
            return Message::text(Role::User, text);
        }
        let mut message = Message::text(Role::User, "");
        let images = self.images.iter().cloned().map(Part::Image);
        message.content = Content::Parts(images.chain([Part::Text(text)]).collect());
        message
    }
}

/// The engine's end of an answer. What waits for a stopped terminal is bounded by the context.
struct Pipe {
    events: Sender<Event>,
    interrupt: Arc<Interrupt>,
}

impl Sink for Pipe {
    fn send(&mut self, event: Event) -> bool {
        self.events.send(event).is_ok()
    }

    fn closed(&self) -> bool {
        self.interrupt.asked()
    }
}

/// The answer as it appears: thoughts dimmed on stderr, the answer itself on stdout.
#[derive(Default)]
struct Page {
    thoughts: String,
    content: String,
}

impl Page {
    fn write(&mut self, delta: Delta) {
        match delta {
            Delta::Reasoning(text) => {
                let dim = io::stderr().is_terminal();
                let (on, off) = if dim { ("\x1b[2m", "\x1b[0m") } else { ("", "") };
                note(format_args!("{on}{}{off}", printable(&text, dim)));
                self.thoughts.push_str(&text);
            }
            Delta::Content(text) => {
                if self.content.is_empty() && !self.thoughts.is_empty() {
                    note(format_args!("\n"));
                }
                show(&printable(&text, io::stdout().is_terminal()));
                self.content.push_str(&text);
            }
            // No tools are offered, so no call is made.
            _ => {}
        }
    }

    fn end(&self) {
        show("\n");
    }

    fn into_message(self) -> Message {
        let mut message = Message::text(Role::Assistant, self.content);
        message.reasoning_content = Some(self.thoughts).filter(|thoughts| !thoughts.is_empty());
        message
    }
}

/// Text as a terminal may get it: a model must not steer it.
fn printable(text: &str, terminal: bool) -> String {
    let steers = |c: char| terminal && c.is_control() && c != '\n' && c != '\t';
    text.chars().filter(|&c| !steers(c)).collect()
}

/// Writes to stdout at once. Nobody is left to tell that it is closed.
fn show(text: &str) {
    let mut out = io::stdout().lock();
    let _ = out.write_all(text.as_bytes()).and_then(|()| out.flush());
}

/// Writes to stderr.
fn note(text: std::fmt::Arguments<'_>) {
    let _ = io::stderr().write_fmt(text);
}

/// Ctrl-C: stops the answer that is being written, else ends the program.
#[derive(Default)]
struct Interrupt {
    answering: AtomicBool,
    asked: AtomicBool,
}

impl Interrupt {
    fn watch(self: &Arc<Self>) -> io::Result<()> {
        let interrupt = Arc::clone(self);
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        thread::Builder::new().name("interrupt".into()).spawn(move || {
            runtime.block_on(async {
                while tokio::signal::ctrl_c().await.is_ok() {
                    let again = interrupt.asked.swap(true, Ordering::Relaxed);
                    if again || !interrupt.answering.load(Ordering::Relaxed) {
                        std::process::exit(130);
                    }
                }
            });
        })?;
        Ok(())
    }

    /// Until the result is dropped, Ctrl-C stops the answer.
    fn answering(self: &Arc<Self>) -> Answering {
        self.asked.store(false, Ordering::Relaxed);
        self.answering.store(true, Ordering::Relaxed);
        Answering(Arc::clone(self))
    }

    fn asked(&self) -> bool {
        self.asked.load(Ordering::Relaxed)
    }
}

struct Answering(Arc<Interrupt>);

impl Drop for Answering {
    fn drop(&mut self) {
        self.0.answering.store(false, Ordering::Relaxed);
    }
}

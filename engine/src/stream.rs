//! From generated tokens to what a client reads, piece by piece.
//!
//! [`Stream`] takes one token after the other and gives [`Delta`]s. Three stages stand behind each other, each of which
//! holds back only what it cannot decide yet, so that the joined deltas do not depend on how the text was cut:
//!
//! 1. [`Detokenizer`]: bytes to UTF-8;
//! 2. [`Splitter`]: reasoning, content and tool calls apart, markup removed;
//! 3. [`StopStrings`]: the end of the visible text (reasoning and content; markup and arguments of calls do not count).

mod detokenizer;
mod gemma;
mod gemma_call;
mod markup;
mod qwen;
mod splitter;
mod stop;
mod tools;

pub use self::detokenizer::Detokenizer;
pub use self::markup::Markup;
pub use self::splitter::Splitter;
pub use self::stop::{MAX_STOP_BYTES, MAX_STOP_STRINGS, StopStrings};
pub use self::tools::Tools;

use std::sync::Arc;

use serde_json::Value;

use crate::error::Result;
use crate::tokenizer::Tokenizer;

/// A piece of what the model says.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Delta {
    /// Thought before the answer.
    Reasoning(String),
    /// The answer.
    Content(String),
    /// A call of a function begins.
    ToolCallStart {
        /// The number of the call in this answer, from 0.
        index: usize,
        /// A name for the call that no other call has.
        id: String,
        /// The function.
        name: String,
    },
    /// A piece of a call's arguments; joined, the text of a JSON object.
    ToolCallArguments {
        /// The number of the call.
        index: usize,
        /// The piece.
        text: String,
    },
}

/// How a [`Stream`] reads what the model writes.
#[derive(Debug, Clone, Default)]
pub struct StreamOptions {
    /// The prompt ends inside a thought, see [`Rendered`](crate::chat::Rendered).
    pub starts_in_reasoning: bool,
    /// The prompt asks for an answer without a thought, see [`Splitter::without_thought`].
    pub without_thought: bool,
    /// The tools of the request; without any, the markup of calls is content.
    pub tools: Vec<Value>,
    /// Texts that end the answer and are not part of it.
    pub stop: Vec<String>,
}

/// The way from tokens to deltas for one answer.
#[derive(Debug)]
pub struct Stream {
    tokenizer: Arc<Tokenizer>,
    detokenizer: Detokenizer,
    splitter: Splitter,
    stop: StopStrings,
    split: Vec<Delta>,
    /// Whether the visible text now is reasoning; a stop string does not reach over the border.
    in_reasoning: bool,
}

impl Stream {
    /// A stream at its beginning.
    ///
    /// # Errors
    ///
    /// As [`StopStrings::new`] and [`Tools::new`].
    pub fn new(tokenizer: Arc<Tokenizer>, options: StreamOptions) -> Result<Self> {
        let tools = match options.tools.is_empty() {
            true => None,
            false => Some(Tools::new(&options.tools)?),
        };
        let mut splitter = Splitter::new(Markup::of(&tokenizer), options.starts_in_reasoning, tools);
        if options.without_thought {
            splitter = splitter.without_thought();
        }
        Ok(Self {
            tokenizer,
            detokenizer: Detokenizer::default(),
            splitter,
            stop: StopStrings::new(options.stop)?,
            split: Vec::new(),
            in_reasoning: options.starts_in_reasoning,
        })
    }

    /// Lets the answer open reasoning, too: for chats whose prompt does not open it, not for plain completions. Call it
    /// before the first token.
    pub fn detect_reasoning(mut self) -> Self {
        self.splitter = self.splitter.detect_reasoning();
        self
    }

    /// Takes a token, appends what it makes visible to `deltas`, and says whether a stop string ended the answer.
    ///
    /// Control tokens show nothing. Once [`stopped`](Self::stopped), tokens are ignored.
    pub fn push(&mut self, token: u32, deltas: &mut Vec<Delta>) -> bool {
        let mut text = String::new();
        if self.tokenizer.is_control(token) {
            self.detokenizer.flush(&mut text);
        } else {
            self.detokenizer.push(self.tokenizer.token_bytes(token), &mut text);
        }
        self.push_text(&text, deltas);
        self.stopped()
    }

    /// Whether a stop string ended the answer.
    pub fn stopped(&self) -> bool {
        self.stop.stopped()
    }

    /// How many tool calls there are so far.
    pub fn tool_calls(&self) -> usize {
        self.splitter.tool_calls()
    }

    /// Whether the text is inside a thought now, as far as it is decided.
    pub fn in_reasoning(&self) -> bool {
        self.splitter.in_reasoning()
    }

    /// Ends the answer: appends everything held back to `deltas`.
    pub fn finish(&mut self, deltas: &mut Vec<Delta>) {
        let mut text = String::new();
        self.detokenizer.flush(&mut text);
        self.push_text(&text, deltas);
        if !self.stopped() {
            self.splitter.finish(&mut self.split);
            self.emit(deltas);
        }
        self.flush_visible(deltas);
    }

    fn push_text(&mut self, text: &str, deltas: &mut Vec<Delta>) {
        if text.is_empty() || self.stopped() {
            return;
        }
        self.splitter.push(text, &mut self.split);
        self.emit(deltas);
    }

    /// Passes on what the splitter gave, visible text through the stop strings.
    fn emit(&mut self, deltas: &mut Vec<Delta>) {
        for delta in std::mem::take(&mut self.split) {
            if self.stopped() {
                return;
            }
            let (reasoning, text) = match delta {
                Delta::Reasoning(text) => (true, text),
                Delta::Content(text) => (false, text),
                call => {
                    self.flush_visible(deltas);
                    deltas.push(call);
                    continue;
                }
            };
            if reasoning != self.in_reasoning {
                self.flush_visible(deltas);
                self.in_reasoning = reasoning;
            }
            let mut shown = String::new();
            self.stop.push(&text, &mut shown);
            self.show(shown, deltas);
        }
    }

    fn flush_visible(&mut self, deltas: &mut Vec<Delta>) {
        let mut shown = String::new();
        self.stop.flush(&mut shown);
        self.show(shown, deltas);
    }

    fn show(&self, text: String, deltas: &mut Vec<Delta>) {
        if text.is_empty() {
            return;
        }
        deltas.push(if self.in_reasoning { Delta::Reasoning(text) } else { Delta::Content(text) });
    }
}

//! Reasoning, content and tool calls apart, in the markup of Gemma 4.

use super::Delta;
use super::gemma_call::{CALL, CALL_END, Reader, Reading};
use super::tools::{Tools, emit};

const CHANNEL: &str = "<|channel>";
const CHANNEL_END: &str = "<channel|>";
/// The channel that is reasoning.
const THOUGHT: &str = "thought";
/// Bytes of a channel's name; what has more is text.
const MAX_NAME: usize = 32;

/// Splits the text of models with the markup of Gemma 4; see [`Splitter`](super::Splitter).
#[derive(Debug, Clone)]
pub(super) struct Splitter {
    state: State,
    tools: Option<Tools>,
    /// Whether channels are markup.
    channels: bool,
    /// Whether a thought may be the answer, see [`Splitter::without_thought`](super::Splitter::without_thought).
    without_thought: bool,
    /// Text of which all before `done` is decided.
    held: String,
    done: usize,
    /// Whether any content, any reasoning was shown.
    answered: bool,
    reasoned: bool,
    calls: usize,
}

#[derive(Debug, Clone)]
enum State {
    /// In content; `true` while whitespace is dropped.
    Content(bool),
    /// Behind `<|channel>`, in or before the name.
    Header,
    /// In reasoning; `true` until a visible character.
    Thought(bool),
    /// In a thought nobody asked for, searched for its end up to this place of the held text.
    Unasked(usize),
    /// Behind `<|tool_call>`.
    Call {
        /// Whitespace before the mark, which is content again if this is no call.
        before: String,
        reader: Reader,
    },
    /// Behind a call, before its last mark.
    AfterCall,
}

impl Splitter {
    pub(super) fn new(starts_in_reasoning: bool, tools: Option<Tools>) -> Self {
        Self {
            state: if starts_in_reasoning { State::Thought(true) } else { State::Content(false) },
            tools,
            channels: starts_in_reasoning,
            without_thought: false,
            held: String::new(),
            done: 0,
            answered: false,
            reasoned: false,
            calls: 0,
        }
    }

    pub(super) fn detect_reasoning(mut self) -> Self {
        self.channels = true;
        self
    }

    pub(super) fn without_thought(mut self) -> Self {
        self.without_thought = true;
        self
    }

    pub(super) fn push(&mut self, text: &str, deltas: &mut Vec<Delta>) {
        self.held.push_str(text);
        self.run(deltas);
        self.held.drain(..self.done);
        if let State::Unasked(searched) = &mut self.state {
            *searched -= self.done;
        }
        self.done = 0;
    }

    pub(super) fn finish(&mut self, deltas: &mut Vec<Delta>) {
        // Each round decides at least one mark of the held text.
        loop {
            match self.state {
                State::Call { .. } => self.reject(deltas),
                State::Unasked(_) if !self.answered && self.calls == 0 => self.state = State::Content(true),
                _ => break,
            }
            self.run(deltas);
        }
        let rest = self.held.split_off(self.done);
        self.held.clear();
        self.done = 0;
        match self.state {
            State::Content(true) => self.show(rest.trim_start(), deltas),
            State::Content(false) => self.show(&rest, deltas),
            State::Thought(first) => _ = self.think(&rest, first, deltas),
            State::Unasked(_) => _ = self.think(rest.trim_end(), true, deltas),
            State::Header if !THOUGHT.starts_with(&rest) => _ = self.think(&rest, true, deltas),
            // The beginning of a mark or a name at most.
            State::Header | State::AfterCall | State::Call { .. } => {}
        }
    }

    pub(super) fn tool_calls(&self) -> usize {
        self.calls
    }

    pub(super) fn in_reasoning(&self) -> bool {
        matches!(self.state, State::Thought(_) | State::Unasked(_))
    }

    fn run(&mut self, deltas: &mut Vec<Delta>) {
        while self.step(deltas) {}
    }

    /// Decides what can be decided and says whether it got further.
    fn step(&mut self, deltas: &mut Vec<Delta>) -> bool {
        match self.state {
            State::Content(_) => self.content(deltas),
            State::Header => self.header(),
            State::Thought(_) => self.thought(deltas),
            State::Unasked(_) => self.unasked(deltas),
            State::Call { .. } => self.call(deltas),
            State::AfterCall => self.after_call(),
        }
    }

    fn rest(&self) -> &str {
        &self.held[self.done..]
    }

    fn content(&mut self, deltas: &mut Vec<Delta>) -> bool {
        if matches!(self.state, State::Content(true)) {
            self.done = self.held.len() - self.rest().trim_start().len();
        }
        let marks = [
            Some(CHANNEL).filter(|_| self.channels),
            Some(CHANNEL_END).filter(|_| self.channels),
            Some(CALL).filter(|_| self.tools.is_some()),
        ];
        let rest = self.rest();
        let (mark, at) = find(rest, marks.into_iter().flatten());
        let before = &rest[..at];
        let shown = match mark {
            // Whitespace is the answer's own, unless nothing else is before the thought.
            Some(CHANNEL | CHANNEL_END) if self.answered || !before.trim_start().is_empty() => before,
            // Without marks to come there is nothing to wait for.
            None if !self.channels && self.tools.is_none() => before,
            _ => before.trim_end(),
        };
        let (shown, whitespace) = (shown.to_owned(), before[shown.len()..].to_owned());
        self.show(&shown, deltas);
        if !shown.is_empty() {
            self.state = State::Content(false);
        }
        let Some(mark) = mark else {
            self.done += shown.len();
            return false;
        };
        self.done += at + mark.len();
        match mark {
            CHANNEL => self.state = State::Header,
            CALL => self.state = State::Call { before: whitespace, reader: Reader::default() },
            _ => self.state = State::Content(!self.answered),
        }
        true
    }

    /// Reads the name of a channel: up to the end of its line, or of an empty channel.
    fn header(&mut self) -> bool {
        let rest = self.rest();
        let is_name = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'_' || byte == b'-';
        let len = rest.bytes().take_while(|&byte| is_name(byte)).count();
        let (name, after) = rest.split_at(len);
        if len <= MAX_NAME && CHANNEL_END.starts_with(after) && after.len() < CHANNEL_END.len() {
            return false;
        }
        let ends = after.starts_with('\n') || after.starts_with(CHANNEL_END);
        let named = len <= MAX_NAME && ends;
        let thought = !named || name.is_empty() || name == THOUGHT;
        if named {
            self.done += len;
        }
        self.state = match (thought, self.without_thought) {
            (true, true) => State::Unasked(self.done),
            (true, false) => State::Thought(true),
            (false, _) => State::Content(true),
        };
        true
    }

    fn thought(&mut self, deltas: &mut Vec<Delta>) -> bool {
        let first = matches!(self.state, State::Thought(true));
        let (mark, at) = find(self.rest(), [CHANNEL, CHANNEL_END].into_iter());
        let body = self.rest()[..at].trim_end().to_owned();
        let shown = self.think(&body, first, deltas);
        if let Some(mark) = mark {
            self.done += at + mark.len();
            self.state = if mark == CHANNEL { State::Header } else { State::Content(true) };
            return true;
        }
        if shown {
            self.done += body.len();
            self.state = State::Thought(false);
        }
        false
    }

    fn unasked(&mut self, deltas: &mut Vec<Delta>) -> bool {
        let State::Unasked(searched) = self.state else { return false };
        let (mark, at) = find(&self.held[searched..], [CHANNEL_END].into_iter());
        let end = searched + at;
        if mark.is_none() {
            self.state = State::Unasked(end);
            return false;
        }
        let body = self.held[self.done..end].trim_end().to_owned();
        self.think(&body, true, deltas);
        self.done = end + CHANNEL_END.len();
        self.state = State::Content(true);
        true
    }

    fn call(&mut self, deltas: &mut Vec<Delta>) -> bool {
        let (Some(tools), State::Call { reader, .. }) = (&self.tools, &mut self.state) else {
            return false;
        };
        match reader.read(tools, &self.held[self.done..]) {
            Reading::Broken => self.reject(deltas),
            Reading::Complete { call, len } => {
                call.announce(self.calls, deltas);
                self.calls += 1;
                self.done += len;
                self.state = State::AfterCall;
            }
            Reading::Open => return false,
        }
        true
    }

    fn after_call(&mut self) -> bool {
        let text = self.rest().trim_start();
        if text.len() < CALL_END.len() && CALL_END.starts_with(text) {
            return false;
        }
        self.done = self.held.len() - text.strip_prefix(CALL_END).unwrap_or(text).len();
        self.state = State::Content(true);
        true
    }

    /// Makes the mark of what is no call content.
    fn reject(&mut self, deltas: &mut Vec<Delta>) {
        if let State::Call { before, .. } = &self.state {
            let text = format!("{before}{CALL}");
            self.show(&text, deltas);
        }
        self.state = State::Content(false);
    }

    fn show(&mut self, text: &str, deltas: &mut Vec<Delta>) {
        self.answered |= !text.is_empty();
        emit(deltas, Delta::Content, text);
    }

    /// Shows a piece of a thought, which is the first of its thought or not, and says whether there was anything to show.
    fn think(&mut self, text: &str, first: bool, deltas: &mut Vec<Delta>) -> bool {
        let text = if first { text.trim_start() } else { text };
        if text.is_empty() {
            return false;
        }
        if first && self.reasoned {
            emit(deltas, Delta::Reasoning, "\n");
        }
        self.reasoned = true;
        emit(deltas, Delta::Reasoning, text);
        true
    }
}

/// The first mark in a text, and the place where it begins, or where one could begin if more text came, or else the end.
fn find<'m>(text: &str, marks: impl Iterator<Item = &'m str> + Clone) -> (Option<&'m str>, usize) {
    for (at, _) in text.match_indices('<') {
        let rest = &text[at..];
        if let Some(mark) = marks.clone().find(|mark| rest.starts_with(mark)) {
            return (Some(mark), at);
        }
        if marks.clone().any(|mark| mark.starts_with(rest)) {
            return (None, at);
        }
    }
    (None, text.len())
}

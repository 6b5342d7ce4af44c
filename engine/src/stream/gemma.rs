//! Reasoning, content and tool calls apart, in the markup of Gemma 4.

use super::Delta;
use super::gemma_call::{CALL, CALL_END, PREFIX, Reader, Reading};
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

#[derive(Debug, Clone, Copy)]
enum State {
    /// In content; `true` while whitespace is dropped.
    Content(bool),
    /// Behind `<|channel>`, in or before the name.
    Header,
    /// In reasoning; `true` until a visible character.
    Thought(bool),
    /// In a thought nobody asked for, searched for its end up to this place of the held text.
    Unasked(usize),
    /// In what may be a call.
    Call {
        inside: Inside,
        /// Where the mark begins in the held text, and its length: none where the model left it out.
        start: usize,
        mark: usize,
        reader: Reader,
    },
    /// Behind a call, before its last mark.
    AfterCall,
}

/// What a call comes in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Inside {
    Content,
    Thought(bool),
    Unasked,
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
        if let State::Unasked(place) | State::Call { start: place, .. } = &mut self.state {
            *place -= self.done;
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
        match self.state {
            State::Thought(_) | State::Unasked(_) => true,
            State::Call { inside, .. } => inside != Inside::Content,
            State::Content(_) | State::Header | State::AfterCall => false,
        }
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
        let fresh = matches!(self.state, State::Content(true));
        let text = self.rest().trim_start();
        let start = self.held.len() - text.len();
        if fresh {
            self.done = start;
        }
        let text = &self.held[start..];
        let begins = self.channels && (fresh || !self.answered);
        // Models leave out the mark of a thought ...
        if begins && let Some(after) = text.strip_prefix(THOUGHT) {
            if after.starts_with('\n') || after.starts_with(CHANNEL_END) {
                self.done = start;
                self.state = State::Header;
                return true;
            }
            if CHANNEL_END.starts_with(after) {
                return false;
            }
        }
        // ... and of a call, behind a thought, which may be the prompt's, and behind a call.
        let calls = begins && self.tools.is_some();
        if calls && text.starts_with(PREFIX) {
            let inside = Inside::Content;
            self.state = State::Call { inside, start, mark: 0, reader: Reader::of_tools() };
            return true;
        }
        if (begins && THOUGHT.starts_with(text)) || (calls && PREFIX.starts_with(text)) {
            return false;
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
        let (shown, start) = (shown.to_owned(), self.done + at);
        self.show(&shown, deltas);
        if !shown.is_empty() {
            self.state = State::Content(false);
        }
        self.done += shown.len();
        let Some(mark) = mark else { return false };
        self.state = match mark {
            CALL => {
                let inside = Inside::Content;
                State::Call { inside, start, mark: CALL.len(), reader: Reader::default() }
            }
            CHANNEL => State::Header,
            _ => State::Content(!self.answered),
        };
        if mark != CALL {
            self.done = start + mark.len();
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
        let marks = [Some(CHANNEL), Some(CHANNEL_END), Some(CALL).filter(|_| self.tools.is_some())];
        let (mark, at) = find(self.rest(), marks.into_iter().flatten());
        let start = self.done + at;
        let body = self.rest()[..at].trim_end().to_owned();
        let shown = self.think(&body, first, deltas);
        if shown {
            self.done += body.len();
            self.state = State::Thought(false);
        }
        match mark {
            None => return false,
            Some(CALL) => {
                let inside = Inside::Thought(first && !shown);
                self.state = State::Call { inside, start, mark: CALL.len(), reader: Reader::of_tools() };
                return true;
            }
            Some(CHANNEL) => self.state = State::Header,
            Some(_) => self.state = State::Content(true),
        }
        self.done = start + mark.map_or(0, str::len);
        true
    }

    fn unasked(&mut self, deltas: &mut Vec<Delta>) -> bool {
        let State::Unasked(searched) = self.state else { return false };
        let marks = [Some(CHANNEL_END), Some(CALL).filter(|_| self.tools.is_some())];
        let (mark, at) = find(&self.held[searched..], marks.into_iter().flatten());
        let start = searched + at;
        match mark {
            None => {
                self.state = State::Unasked(start);
                return false;
            }
            Some(CALL) => {
                let inside = Inside::Unasked;
                self.state = State::Call { inside, start, mark: CALL.len(), reader: Reader::of_tools() };
            }
            Some(mark) => {
                self.close_unasked(start, deltas);
                self.done = start + mark.len();
                self.state = State::Content(true);
            }
        }
        true
    }

    /// Shows a thought held back, which ends here.
    fn close_unasked(&mut self, end: usize, deltas: &mut Vec<Delta>) {
        let body = self.held[self.done..end].trim_end().to_owned();
        self.think(&body, true, deltas);
    }

    fn call(&mut self, deltas: &mut Vec<Delta>) -> bool {
        let (Some(tools), State::Call { inside, start, mark, reader }) = (&self.tools, &mut self.state)
        else {
            return false;
        };
        let (inside, start, mark) = (*inside, *start, *mark);
        match reader.read(tools, &self.held[start + mark..]) {
            Reading::Broken => self.reject(deltas),
            Reading::Complete { call, len } => {
                if inside == Inside::Unasked {
                    self.close_unasked(start, deltas);
                }
                call.announce(self.calls, deltas);
                self.calls += 1;
                self.done = start + mark + len;
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

    /// Makes the mark of what is no call a piece of what it comes in.
    fn reject(&mut self, deltas: &mut Vec<Delta>) {
        let State::Call { inside, start, mark, .. } = self.state else { return };
        // Of a prefix without a mark at least one letter is decided, or the next step would find it again.
        let end = start + if mark == 0 { 1 } else { mark };
        let text = self.held[self.done..end].to_owned();
        match inside {
            Inside::Content => {
                self.show(&text, deltas);
                self.state = State::Content(false);
            }
            Inside::Thought(first) => {
                self.think(&text, first, deltas);
                self.state = State::Thought(false);
            }
            Inside::Unasked => {
                self.state = State::Unasked(end);
                return;
            }
        }
        self.done = end;
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

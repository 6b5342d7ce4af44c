//! Reasoning, content and tool calls apart, in the markup of Qwen.

use super::Delta;
use super::tools::{Call, Tools, emit, parse_json, parse_xml};

const THINK: &str = "<think>";
const THINK_END: &str = "</think>";
const CALL: &str = "<tool_call>";
const CALL_END: &str = "</tool_call>";
const FUNCTION: &str = "<function=";
const FUNCTION_END: &str = "</function>";

/// Splits the text of models with the markup of Qwen; see [`Splitter`](super::Splitter).
#[derive(Debug, Clone)]
pub(super) struct Splitter {
    state: State,
    tools: Option<Tools>,
    /// Text not decided yet.
    held: String,
    calls: usize,
}

#[derive(Debug, Clone)]
enum State {
    /// Nothing but whitespace so far, a `<think>` may come.
    Start,
    /// In reasoning; `true` until a visible character.
    Reasoning(bool),
    /// In content; `true` while whitespace is dropped.
    Content(bool),
    /// Behind `<tool_call>`.
    Call {
        /// Whitespace before the tag, which is content again if this is no call.
        before: String,
        /// Up to where the held text was searched for an end.
        searched: usize,
    },
    /// Behind a function in a call.
    AfterFunction,
}

impl Splitter {
    /// A splitter at the beginning of a text, which may begin inside a `<think>` block. Without tools, the markup of calls is
    /// content.
    pub(super) fn new(starts_in_reasoning: bool, tools: Option<Tools>) -> Self {
        let state = if starts_in_reasoning { State::Reasoning(true) } else { State::Content(false) };
        Self { state, tools, held: String::new(), calls: 0 }
    }

    /// Lets a `<think>` at the very beginning open reasoning. Call it before the first text.
    pub(super) fn detect_reasoning(mut self) -> Self {
        if matches!(self.state, State::Content(_)) {
            self.state = State::Start;
        }
        self
    }

    /// Takes text and appends what is decided to `deltas`.
    pub(super) fn push(&mut self, text: &str, deltas: &mut Vec<Delta>) {
        self.held.push_str(text);
        while self.step(deltas) {}
    }

    /// Appends the rest to `deltas`, as the text ends here.
    pub(super) fn finish(&mut self, deltas: &mut Vec<Delta>) {
        while let State::Call { .. } = self.state {
            self.end_call(deltas);
            while self.step(deltas) {}
        }
        let held = std::mem::take(&mut self.held);
        match self.state {
            State::Reasoning(false) => emit(deltas, Delta::Reasoning, &held),
            State::Start | State::Content(false) => emit(deltas, Delta::Content, &held),
            State::Reasoning(true) => emit(deltas, Delta::Reasoning, held.trim_start()),
            State::Content(true) => emit(deltas, Delta::Content, held.trim_start()),
            // The beginning of a closing tag at most.
            State::AfterFunction | State::Call { .. } => {}
        }
    }

    /// How many calls there were so far.
    pub(super) fn tool_calls(&self) -> usize {
        self.calls
    }

    /// Whether the text is inside a `<think>` block now.
    pub(super) fn in_reasoning(&self) -> bool {
        matches!(self.state, State::Reasoning(_))
    }

    /// Decides what can be decided and says whether it got further.
    fn step(&mut self, deltas: &mut Vec<Delta>) -> bool {
        match &mut self.state {
            State::Start => self.start(),
            State::Reasoning(_) => self.reasoning(deltas),
            State::Content(_) => self.content(deltas),
            State::Call { .. } => self.call(deltas),
            State::AfterFunction => self.after_function(),
        }
    }

    fn start(&mut self) -> bool {
        let text = self.held.trim_start();
        if text.len() < THINK.len() && THINK.starts_with(text) {
            return false;
        }
        match text.strip_prefix(THINK) {
            Some(after) => {
                self.held = after.to_owned();
                self.state = State::Reasoning(true);
            }
            None => self.state = State::Content(false),
        }
        true
    }

    fn reasoning(&mut self, deltas: &mut Vec<Delta>) -> bool {
        let at_start = matches!(self.state, State::Reasoning(true));
        let (found, undecided) = find(&self.held, THINK_END);
        let body = self.held[..undecided].trim_end().len();
        let text = match at_start {
            true => self.held[..body].trim_start(),
            false => &self.held[..body],
        };
        let shown = !text.is_empty();
        emit(deltas, Delta::Reasoning, text);
        if found {
            self.held.drain(..undecided + THINK_END.len());
            self.state = State::Content(true);
            return true;
        }
        if shown {
            self.held.drain(..body);
            self.state = State::Reasoning(false);
        }
        false
    }

    fn content(&mut self, deltas: &mut Vec<Delta>) -> bool {
        if matches!(self.state, State::Content(true)) {
            let whitespace = self.held.len() - self.held.trim_start().len();
            self.held.drain(..whitespace);
            if self.held.is_empty() {
                return false;
            }
        }
        if self.tools.is_none() {
            emit(deltas, Delta::Content, &self.held);
            if !self.held.is_empty() {
                self.state = State::Content(false);
            }
            self.held.clear();
            return false;
        }
        let (found, undecided) = find(&self.held, CALL);
        let body = self.held[..undecided].trim_end().len();
        emit(deltas, Delta::Content, &self.held[..body]);
        if body > 0 {
            self.state = State::Content(false);
        }
        if found {
            let before = self.held[body..undecided].to_owned();
            self.held.drain(..undecided + CALL.len());
            self.state = State::Call { before, searched: 0 };
            return true;
        }
        self.held.drain(..body);
        false
    }

    fn call(&mut self, deltas: &mut Vec<Delta>) -> bool {
        let (Some(tools), State::Call { searched, .. }) = (&self.tools, &mut self.state) else {
            return false;
        };
        let text = self.held.trim_start();
        if text.len() < FUNCTION.len() && FUNCTION.starts_with(text) {
            return false;
        }
        let xml = text.starts_with(FUNCTION);
        if !xml && !text.starts_with('{') {
            self.reject(deltas);
            return true;
        }
        let close = if xml { FUNCTION_END } else { CALL_END };
        while let Some(at) = self.held[*searched..].find(close) {
            let end = *searched + at + close.len();
            let call = match xml {
                true => parse_xml(tools, &self.held[..end]),
                false => parse_json(&self.held[..end - close.len()]),
            };
            if let Some(call) = call {
                self.held.drain(..end);
                self.state = if xml { State::AfterFunction } else { State::Content(true) };
                self.announce(call, deltas);
                return true;
            }
            // The tag belongs to an argument.
            *searched = end;
        }
        // A tag cut at the end begins at most this far back.
        let mut from = self.held.len().saturating_sub(close.len() - 1).max(*searched);
        while !self.held.is_char_boundary(from) {
            from += 1;
        }
        *searched = from;
        false
    }

    /// Skips the closing tag of a call; another function may come before it.
    fn after_function(&mut self) -> bool {
        let text = self.held.trim_start();
        let undecided = |tag: &str| text.len() < tag.len() && tag.starts_with(text);
        if undecided(CALL_END) || undecided(FUNCTION) {
            return false;
        }
        if text.starts_with(FUNCTION) {
            self.state = State::Call { before: String::new(), searched: 0 };
            return true;
        }
        self.held = text.strip_prefix(CALL_END).unwrap_or(text).to_owned();
        self.state = State::Content(true);
        true
    }

    /// Decides an open call at the end of the text.
    fn end_call(&mut self, deltas: &mut Vec<Delta>) {
        match parse_json(&self.held) {
            Some(call) => {
                self.held.clear();
                self.state = State::Content(true);
                self.announce(call, deltas);
            }
            None => self.reject(deltas),
        }
    }

    /// Makes the tag of what is no call content.
    fn reject(&mut self, deltas: &mut Vec<Delta>) {
        if let State::Call { before, .. } = &self.state {
            emit(deltas, Delta::Content, &format!("{before}{CALL}"));
        }
        self.state = State::Content(false);
    }

    fn announce(&mut self, call: Call, deltas: &mut Vec<Delta>) {
        call.announce(self.calls, deltas);
        self.calls += 1;
    }
}

/// Whether `tag` is in `text`, and the place where it begins, or could begin if more text came, or else the end.
fn find(text: &str, tag: &str) -> (bool, usize) {
    if let Some(at) = text.find(tag) {
        return (true, at);
    }
    let cut = (1..tag.len()).rev().find(|&len| text.ends_with(&tag[..len]));
    (false, text.len() - cut.unwrap_or(0))
}

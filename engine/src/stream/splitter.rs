//! Reasoning, content and tool calls apart.

use super::{Delta, Markup, Tools, gemma, qwen};

/// Splits the text of a model into reasoning, content and tool calls.
///
/// Whatever the [`Markup`]:
///
/// - Whitespace at both ends of reasoning, and before the content behind it, is dropped. If the text ends in reasoning, all
///   of it is reasoning.
/// - Whitespace before, between and behind calls is dropped. A call appears as a whole, once it is closed; its last tag may
///   be missing then. What begins like a call and is none is content, unchanged.
/// - Pieces come as soon as they are decided. Joined, they do not depend on how the text was cut.
///
/// [`Markup::Qwen`]: a `<think>` is reasoning only at the beginning, and ends at `</think>`. A call is `<tool_call>` with a
/// `<function=NAME>` block of `<parameter=KEY>` values (as Qwen writes it), or with a JSON object of `name` and `arguments`
/// (as Hermes does), then `</tool_call>`. A call inside reasoning is no call.
///
/// [`Markup::Gemma`]: a channel may come anywhere, and its marks are never shown. The channel `thought`, or one without a name,
/// is reasoning; a channel of another name is content, without the name. A call is `<|tool_call>call:NAME{...}<tool_call|>`
/// with bare keys, strings between `<|"|>`, numbers, `true`, `false`, `null`, and lists and objects of these; only `<|"|>`
/// ends a string.
///
/// What Gemma models are known to get wrong is taken as it was meant: strings and keys in JSON's quotes; last braces missing
/// before `<tool_call|>`; for functions among the tools, a call in a thought that was not closed; and, at the beginning, behind
/// a thought or behind a call, a thought without `<|channel>` and a call without `<|tool_call>`.
#[derive(Debug, Clone)]
pub struct Splitter {
    form: Form,
}

#[derive(Debug, Clone)]
enum Form {
    Gemma(gemma::Splitter),
    Qwen(qwen::Splitter),
}

impl Splitter {
    /// A splitter at the beginning of a text, which may begin inside a thought. Without tools, the markup of calls is
    /// content.
    pub fn new(markup: Markup, starts_in_reasoning: bool, tools: Option<Tools>) -> Self {
        let form = match markup {
            Markup::Gemma => Form::Gemma(gemma::Splitter::new(starts_in_reasoning, tools)),
            Markup::Qwen => Form::Qwen(qwen::Splitter::new(starts_in_reasoning, tools)),
        };
        Self { form }
    }

    /// Lets the text open reasoning, too. Call it before the first text.
    pub fn detect_reasoning(self) -> Self {
        let form = match self.form {
            Form::Gemma(splitter) => Form::Gemma(splitter.detect_reasoning()),
            Form::Qwen(splitter) => Form::Qwen(splitter.detect_reasoning()),
        };
        Self { form }
    }

    /// Expects an answer without a thought ([`Markup::Gemma`]): a thought that the text opens all the same is held back until
    /// it is closed. If the text ends first and there was no content and no call, it is the answer. Call it before the first
    /// text.
    pub fn without_thought(self) -> Self {
        let form = match self.form {
            Form::Gemma(splitter) => Form::Gemma(splitter.without_thought()),
            form @ Form::Qwen(_) => form,
        };
        Self { form }
    }

    /// Takes text and appends what is decided to `deltas`.
    pub fn push(&mut self, text: &str, deltas: &mut Vec<Delta>) {
        match &mut self.form {
            Form::Gemma(splitter) => splitter.push(text, deltas),
            Form::Qwen(splitter) => splitter.push(text, deltas),
        }
    }

    /// Appends the rest to `deltas`, as the text ends here.
    pub fn finish(&mut self, deltas: &mut Vec<Delta>) {
        match &mut self.form {
            Form::Gemma(splitter) => splitter.finish(deltas),
            Form::Qwen(splitter) => splitter.finish(deltas),
        }
    }

    /// How many calls there were so far.
    pub fn tool_calls(&self) -> usize {
        match &self.form {
            Form::Gemma(splitter) => splitter.tool_calls(),
            Form::Qwen(splitter) => splitter.tool_calls(),
        }
    }

    /// Whether the text is inside a thought now.
    pub fn in_reasoning(&self) -> bool {
        match &self.form {
            Form::Gemma(splitter) => splitter.in_reasoning(),
            Form::Qwen(splitter) => splitter.in_reasoning(),
        }
    }
}

use crate::tokenizer::Tokenizer;

/// How a family of models marks thoughts and calls in what it writes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Markup {
    /// `<|channel>thought\n...<channel|>` and `<|tool_call>call:NAME{KEY:VALUE,...}<tool_call|>`.
    Gemma,
    /// `<think>...</think>` and `<tool_call>...</tool_call>` around XML or JSON.
    Qwen,
}

impl Markup {
    /// The markup whose tokens a vocabulary has; [`Qwen`](Self::Qwen) if it has none.
    pub fn of(tokenizer: &Tokenizer) -> Self {
        let has = |token| tokenizer.id_of(token).is_some();
        if has("<|channel>") && has("<channel|>") { Self::Gemma } else { Self::Qwen }
    }

    /// What a prompt ends with whose thought is open, whitespace aside.
    pub(crate) const fn open_thought(self) -> &'static str {
        match self {
            Self::Gemma => "<|channel>thought",
            Self::Qwen => "<think>",
        }
    }

    /// What closes a thought that nothing was thought in.
    pub(crate) const fn end_of_thought(self) -> &'static str {
        match self {
            Self::Gemma => "\n<channel|>",
            Self::Qwen => "\n</think>\n\n",
        }
    }
}

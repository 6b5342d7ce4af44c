//! Conversations: messages as clients send them, rendered by the template in the model file.
//!
//! [`Message`] is one turn, parsed from the JSON of the OpenAI chat API. [`Template`] is the Jinja template of a model;
//! its raw [`render`](Template::render) gives what Python's Jinja2 gives, byte for byte. [`Template::prompt`] does the
//! whole way from messages to token ids:
//!
//! 1. system messages are merged into one at the front ([`merge_system`]);
//! 2. every string that comes from the client (texts, reasoning, names, arguments, tools, template arguments) is
//!    shielded, so that it cannot become a control token ([`Tokenizer::shield`]);
//! 3. the template is rendered, and the result tokenized, with exactly one BOS if the model wants one.

mod message;
mod python;
mod template;
mod time;

use serde_json::{Map, Value};

pub use self::message::{Content, Image, ImageReader, Message, Part, Role, ToolCall, merge_system};
pub use self::template::{Context, Template};

use crate::error::Result;
use crate::tokenizer::{SHIELD, Specials, Tokenizer};

/// A conversation to be continued by the model.
#[derive(Debug, Clone, Copy)]
pub struct Chat<'a> {
    /// The turns, the oldest first.
    pub messages: &'a [Message],
    /// The tools the model may call, in the form of the OpenAI API; empty for none.
    pub tools: &'a [Value],
    /// Further variables of the template (`chat_template_kwargs`), such as `enable_thinking`.
    pub kwargs: &'a Map<String, Value>,
    /// Whether the model is to begin a turn of its own at the end.
    pub add_generation_prompt: bool,
}

/// A rendered conversation.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Rendered {
    /// The prompt as text, as the model sees it.
    pub text: String,
    /// The prompt as tokens.
    pub ids: Vec<u32>,
    /// Whether the prompt ends inside a `<think>` block, so that the model's first words are reasoning.
    pub starts_in_reasoning: bool,
}

impl Template {
    /// Renders and tokenizes a conversation.
    ///
    /// # Errors
    ///
    /// `ErrorKind::Template` as [`render`](Self::render); `ErrorKind::Request` as [`Tokenizer::encode`].
    pub fn prompt(&self, tokenizer: &Tokenizer, chat: &Chat<'_>) -> Result<Rendered> {
        let messages = merge_system(chat.messages);
        let messages: Vec<Value> = messages
            .iter()
            .map(|message| shielded(tokenizer, &message.to_json(self.takes_parts())))
            .collect();
        let tools: Vec<Value> = chat.tools.iter().map(|tool| shielded(tokenizer, tool)).collect();
        let kwargs = shielded_map(tokenizer, chat.kwargs);
        let special = |id: Option<u32>| id.map(|id| tokenizer.token_text(id)).unwrap_or_default();
        let text = self.render(&Context {
            messages: &messages,
            tools: &tools,
            kwargs: &kwargs,
            add_generation_prompt: chat.add_generation_prompt,
            bos_token: &special(tokenizer.bos()),
            eos_token: &special(tokenizer.eos()),
        })?;
        let ids = tokenizer.encode_prompt(&text, Specials::Shielded)?;
        let text = text.replace(SHIELD, "");
        let starts_in_reasoning = chat.add_generation_prompt && text.trim_end().ends_with("<think>");
        Ok(Rendered { text, ids, starts_in_reasoning })
    }
}

/// A JSON value with all its strings, the keys of objects included, shielded.
fn shielded(tokenizer: &Tokenizer, value: &Value) -> Value {
    match value {
        Value::String(text) => Value::String(tokenizer.shield(text).into_owned()),
        Value::Array(items) => items.iter().map(|item| shielded(tokenizer, item)).collect(),
        Value::Object(map) => Value::Object(shielded_map(tokenizer, map)),
        Value::Null | Value::Bool(_) | Value::Number(_) => value.clone(),
    }
}

fn shielded_map(tokenizer: &Tokenizer, map: &Map<String, Value>) -> Map<String, Value> {
    let entry = |(key, value)| (tokenizer.shield(key).into_owned(), shielded(tokenizer, value));
    map.iter().map(|(key, value)| entry((key, value))).collect()
}

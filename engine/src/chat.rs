//! Conversations: messages as clients send them, rendered by the template in the model file.
//!
//! [`Message`] is one turn, parsed from the JSON of the OpenAI chat API. [`Template`] is the Jinja template of a model;
//! its raw [`render`](Template::render) gives what Python's Jinja2 gives, byte for byte. [`Template::prompt`] does the
//! whole way from messages to token ids:
//!
//! 1. system messages are merged into one at the front ([`merge_system`]);
//! 2. every string that comes from the client (texts, reasoning, names, arguments, tools, template arguments) is
//!    shielded, so that it cannot become a control token ([`Tokenizer::shield`]);
//! 3. the template is rendered, and the result tokenized, with exactly one BOS if the model wants one;
//! 4. the places that the template gives to images are counted: there must be one for each image.

mod message;
mod python;
mod template;
mod time;

use serde_json::{Map, Value};

pub use self::message::{Content, Image, ImageReader, Message, Part, Role, ToolCall, merge_system};
pub use self::template::{Context, Template};

use crate::error::{Error, ErrorKind, Result};
use crate::stream::Markup;
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
    /// The images in the order of the prompt: the n-th belongs to the n-th token
    /// [`soft`](crate::tokenizer::ImageMarkers::soft) of `ids`.
    pub images: Vec<Image>,
    /// Whether the prompt ends inside a thought, so that the model's first words are reasoning.
    pub starts_in_reasoning: bool,
    /// Whether the prompt asks for an answer without a thought: the model's markup is that of Gemma, whose templates think
    /// only where `enable_thinking` says so, and it does not.
    pub without_thought: bool,
}

impl Template {
    /// Renders and tokenizes a conversation.
    ///
    /// # Errors
    ///
    /// `ErrorKind::Template` as [`render`](Self::render), and when the template has not as many places for images as there
    /// are images; `ErrorKind::Request` as [`Tokenizer::encode`], and for images when the template takes no content in
    /// parts or the vocabulary has no [`image_markers`](Tokenizer::image_markers).
    pub fn prompt(&self, tokenizer: &Tokenizer, chat: &Chat<'_>) -> Result<Rendered> {
        let messages = merge_system(chat.messages);
        let images: Vec<Image> =
            messages.iter().flat_map(|message| message.content.images()).cloned().collect();
        if !images.is_empty() && (!self.takes_parts() || tokenizer.image_markers().is_none()) {
            return Err(Error::new(ErrorKind::Request, "the model's chat template takes no images"));
        }
        let messages: Vec<Value> = messages
            .iter()
            .map(|message| {
                // Templates that take a user's parts may still want the system's text as one.
                let text = message.role == Role::System && message.content.images().next().is_none();
                shielded(tokenizer, &message.to_json(self.takes_parts() && !text))
            })
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
        if let Some(markers) = tokenizer.image_markers() {
            let places = ids.iter().filter(|&&id| id == markers.soft).count();
            if places != images.len() {
                let message = format!(
                    "the chat template has places for {places} images where the conversation has {}",
                    images.len()
                );
                return Err(Error::new(ErrorKind::Template, message));
            }
        }
        let markup = Markup::of(tokenizer);
        let before_thought = text.trim_end().strip_suffix(markup.open_thought());
        let starts_in_reasoning =
            chat.add_generation_prompt && before_thought.is_some_and(|text| !text.ends_with(SHIELD));
        let thinks = chat.kwargs.get("enable_thinking").is_some_and(is_true);
        let without_thought = markup == Markup::Gemma && !starts_in_reasoning && !thinks;
        let text = text.replace(SHIELD, "");
        Ok(Rendered { text, ids, images, starts_in_reasoning, without_thought })
    }
}

/// Whether Python takes a value for true.
fn is_true(value: &Value) -> bool {
    match value {
        Value::Null => false,
        Value::Bool(value) => *value,
        Value::Number(number) => number.as_f64() != Some(0.0),
        Value::String(text) => !text.is_empty(),
        Value::Array(items) => !items.is_empty(),
        Value::Object(map) => !map.is_empty(),
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

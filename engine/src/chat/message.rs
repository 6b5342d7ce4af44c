//! Messages as the OpenAI chat API has them.

use serde::{Deserialize, Deserializer};
use serde_json::{Map, Value, json};
use skep_vision::{Budget, Picture};
use std::sync::Arc;

use crate::error::{Error, ErrorKind, Result};

/// Who speaks in a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Role {
    /// The model.
    Assistant,
    /// Standing instructions; the API's `developer` is the same.
    System,
    /// The result of a tool.
    Tool,
    /// The user.
    User,
}

impl Role {
    /// The name templates know the role by.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Assistant => "assistant",
            Self::System => "system",
            Self::Tool => "tool",
            Self::User => "user",
        }
    }
}

/// One piece of a message's content.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Part {
    /// A picture.
    Image(Image),
    /// Text.
    Text(String),
}

/// A picture in a message.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Image {
    /// Its pixels.
    pub picture: Arc<Picture>,
    /// Soft tokens that it may take; by default what the runner was loaded with.
    pub budget: Option<Budget>,
}

impl Image {
    /// An image with the default budget.
    pub fn new(picture: Picture) -> Self {
        Self { picture: Arc::new(picture), budget: None }
    }
}

/// Turns an image part of a message (`image_url`, `input_image`), given as JSON with its place, into an image.
pub type ImageReader<'r> = dyn FnMut(&Value, &str) -> Result<Image> + 'r;

/// What a message says, in the form the client chose: templates may render the two forms differently.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Content {
    /// Ordered parts.
    Parts(Vec<Part>),
    /// Plain text; empty where the client sent `null` or no content.
    Text(String),
}

impl Content {
    /// All text, joined as it comes.
    pub fn text(&self) -> String {
        match self {
            Self::Parts(parts) => parts
                .iter()
                .filter_map(|part| match part {
                    Part::Image(_) => None,
                    Part::Text(text) => Some(text.as_str()),
                })
                .collect(),
            Self::Text(text) => text.clone(),
        }
    }

    /// The images in order.
    pub fn images(&self) -> impl Iterator<Item = &Image> {
        let parts = match self {
            Self::Parts(parts) => parts.as_slice(),
            Self::Text(_) => &[],
        };
        parts.iter().filter_map(|part| match part {
            Part::Image(image) => Some(image),
            Part::Text(_) => None,
        })
    }

    fn to_json(&self, as_parts: bool) -> Value {
        match self {
            Self::Parts(parts) if as_parts => parts
                .iter()
                .map(|part| match part {
                    Part::Image(_) => json!({"type": "image"}),
                    Part::Text(text) => json!({"type": "text", "text": text}),
                })
                .collect(),
            _ => Value::String(self.text()),
        }
    }
}

/// A call of a function that the model made.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct ToolCall {
    /// The name that the result refers to.
    pub id: Option<String>,
    /// The function.
    pub name: String,
    /// Its arguments by name, in the order they were given.
    pub arguments: Map<String, Value>,
}

/// One turn of a conversation.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct Message {
    /// Who speaks.
    pub role: Role,
    /// What is said.
    pub content: Content,
    /// What an assistant thought before it answered.
    pub reasoning_content: Option<String>,
    /// What an assistant called.
    pub tool_calls: Vec<ToolCall>,
    /// Which call a tool's message answers.
    pub tool_call_id: Option<String>,
    /// The name of the speaker, or of the tool.
    pub name: Option<String>,
}

impl Message {
    /// A message of plain text.
    pub fn text(role: Role, text: impl Into<String>) -> Self {
        Self {
            role,
            content: Content::Text(text.into()),
            reasoning_content: None,
            tool_calls: Vec::new(),
            tool_call_id: None,
            name: None,
        }
    }

    /// Reads the `messages` array of a request.
    ///
    /// # Errors
    ///
    /// `ErrorKind::Request` naming the place (`messages[2].content[0]`): unknown roles, content of an unknown type or
    /// with an unknown type of part, calls without a function name, arguments that are no JSON object.
    pub fn list(messages: &Value) -> Result<Vec<Self>> {
        let Value::Array(messages) = messages else {
            return Err(refused("messages", "is not an array"));
        };
        messages
            .iter()
            .enumerate()
            .map(|(at, message)| Self::from_json(message, &format!("messages[{at}]")))
            .collect()
    }

    /// Reads one message; `at` is what errors call it.
    ///
    /// # Errors
    ///
    /// As [`list`](Self::list).
    pub fn from_json(message: &Value, at: &str) -> Result<Self> {
        Self::with_images(message, at, &mut |_, at| Err(refused(at, "is an image, which is not read here")))
    }

    /// Reads one message whose image parts `images` can read.
    ///
    /// # Errors
    ///
    /// As [`list`](Self::list), and what `images` says.
    pub fn with_images(message: &Value, at: &str, images: &mut ImageReader<'_>) -> Result<Self> {
        let Value::Object(fields) = message else {
            return Err(refused(at, "is not an object"));
        };
        let role = match fields.get("role") {
            Some(Value::String(role)) => match role.as_str() {
                "assistant" => Role::Assistant,
                "developer" | "system" => Role::System,
                "tool" => Role::Tool,
                "user" => Role::User,
                _ => return Err(refused(at, &format!("has the unknown role {role:?}"))),
            },
            _ => return Err(refused(at, "has no role")),
        };
        let reasoning = match text_field(fields, "reasoning_content", at)? {
            Some(text) => Some(text),
            None => text_field(fields, "reasoning", at)?,
        };
        Ok(Self {
            role,
            content: content(fields.get("content"), &format!("{at}.content"), images)?,
            reasoning_content: reasoning,
            tool_calls: tool_calls(fields.get("tool_calls"), &format!("{at}.tool_calls"))?,
            tool_call_id: text_field(fields, "tool_call_id", at)?,
            name: text_field(fields, "name", at)?,
        })
    }

    /// The message as templates expect it; `as_parts` leaves content in parts as it is, otherwise it becomes one text.
    pub(crate) fn to_json(&self, as_parts: bool) -> Value {
        let mut message = Map::new();
        message.insert("role".to_owned(), self.role.name().into());
        message.insert("content".to_owned(), self.content.to_json(as_parts));
        let texts = [
            ("reasoning_content", &self.reasoning_content),
            ("tool_call_id", &self.tool_call_id),
            ("name", &self.name),
        ];
        for (key, text) in texts {
            if let Some(text) = text {
                message.insert(key.to_owned(), text.as_str().into());
            }
        }
        if !self.tool_calls.is_empty() {
            let calls = self.tool_calls.iter().map(|call| {
                let mut json = json!({
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                });
                if let Some(id) = &call.id {
                    json["id"] = id.as_str().into();
                }
                json
            });
            message.insert("tool_calls".to_owned(), calls.collect());
        }
        Value::Object(message)
    }
}

impl<'de> Deserialize<'de> for Message {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let message = Value::deserialize(deserializer)?;
        Self::from_json(&message, "message").map_err(serde::de::Error::custom)
    }
}

/// Merges all system messages into one at the front, contents in order and separated by an empty line.
///
/// Templates refuse system messages in other places, while clients insert them there. A conversation whose only system
/// message is the first comes back unchanged. Merged content is one text, or parts if there are images in it.
pub fn merge_system(messages: &[Message]) -> Vec<Message> {
    let is_system = |message: &&Message| message.role == Role::System;
    if !messages.iter().skip(1).any(|message| is_system(&message)) {
        return messages.to_vec();
    }
    let mut parts = Vec::new();
    for message in messages.iter().filter(is_system) {
        if !parts.is_empty() {
            parts.push(Part::Text("\n\n".to_owned()));
        }
        match &message.content {
            Content::Parts(own) => parts.extend(own.iter().cloned()),
            Content::Text(text) => parts.push(Part::Text(text.clone())),
        }
    }
    let mut system = Message::text(Role::System, "");
    system.content = Content::Parts(parts);
    if system.content.images().next().is_none() {
        system.content = Content::Text(system.content.text());
    }
    let mut merged = vec![system];
    merged.extend(messages.iter().filter(|message| !is_system(message)).cloned());
    merged
}

fn refused(at: &str, what: &str) -> Error {
    Error::new(ErrorKind::Request, format!("{at} {what}"))
}

fn text_field(fields: &Map<String, Value>, key: &str, at: &str) -> Result<Option<String>> {
    match fields.get(key) {
        None | Some(Value::Null) => Ok(None),
        Some(Value::String(text)) => Ok(Some(text.clone())),
        Some(_) => Err(refused(&format!("{at}.{key}"), "is not a string")),
    }
}

fn content(content: Option<&Value>, at: &str, images: &mut ImageReader<'_>) -> Result<Content> {
    match content {
        None | Some(Value::Null) => Ok(Content::Text(String::new())),
        Some(Value::String(text)) => Ok(Content::Text(text.clone())),
        Some(Value::Array(parts)) => {
            let part = |(index, json)| part(json, &format!("{at}[{index}]"), images);
            Ok(Content::Parts(parts.iter().enumerate().map(part).collect::<Result<_>>()?))
        }
        Some(_) => Err(refused(at, "is neither a string nor an array of parts")),
    }
}

fn part(part: &Value, at: &str, images: &mut ImageReader<'_>) -> Result<Part> {
    match part.get("type").and_then(Value::as_str) {
        Some("text" | "input_text" | "output_text") => match part.get("text") {
            Some(Value::String(text)) => Ok(Part::Text(text.clone())),
            _ => Err(refused(at, "has no text")),
        },
        Some("image_url" | "input_image") => Ok(Part::Image(images(part, at)?)),
        Some(kind) => Err(refused(at, &format!("has the unsupported type {kind:?}"))),
        None => Err(refused(at, "has no type")),
    }
}

fn tool_calls(calls: Option<&Value>, at: &str) -> Result<Vec<ToolCall>> {
    match calls {
        None | Some(Value::Null) => Ok(Vec::new()),
        Some(Value::Array(calls)) => {
            calls.iter().enumerate().map(|(index, call)| tool_call(call, &format!("{at}[{index}]"))).collect()
        }
        Some(_) => Err(refused(at, "is not an array")),
    }
}

fn tool_call(call: &Value, at: &str) -> Result<ToolCall> {
    let id = match call {
        Value::Object(fields) => text_field(fields, "id", at)?,
        _ => return Err(refused(at, "is not an object")),
    };
    if let Some(kind) = call.get("type").filter(|&kind| !kind.is_null() && kind != "function") {
        return Err(refused(at, &format!("has the unsupported type {kind}")));
    }
    let Some(Value::String(name)) = call.pointer("/function/name") else {
        return Err(refused(at, "has no function.name"));
    };
    let arguments = match call.pointer("/function/arguments") {
        None | Some(Value::Null) => Map::new(),
        Some(Value::Object(arguments)) => arguments.clone(),
        Some(Value::String(text)) => serde_json::from_str(text).map_err(|error| {
            refused(
                &format!("{at}.function.arguments"),
                &format!("is not the text of a JSON object: {error}"),
            )
        })?,
        Some(_) => {
            return Err(refused(&format!("{at}.function.arguments"), "is neither an object nor its text"));
        }
    };
    Ok(ToolCall { id, name: name.clone(), arguments })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(message: Value) -> Result<Message> {
        Message::from_json(&message, "messages[0]")
    }

    fn call(arguments: Value) -> Result<Message> {
        parse(json!({"role": "assistant", "content": "", "tool_calls": [
            {"id": "c1", "type": "function", "function": {"name": "f", "arguments": arguments}},
        ]}))
    }

    #[test]
    fn arguments_become_an_object() {
        for arguments in [json!({"z": 1.50, "a": {"b": [1]}}), json!(r#"{"z": 1.50, "a": {"b": [1]}}"#)] {
            let message = call(arguments).unwrap();
            let arguments = &message.tool_calls[0].arguments;
            assert_eq!(arguments.keys().collect::<Vec<_>>(), ["z", "a"]);
            assert_eq!(message.to_json(true)["tool_calls"][0]["function"]["arguments"]["z"], json!(1.5));
        }
        assert!(call(Value::Null).unwrap().tool_calls[0].arguments.is_empty());
        for arguments in [json!(""), json!("{"), json!("[1]"), json!([1]), json!(3)] {
            let error = call(arguments).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Request);
            assert!(
                error.to_string().starts_with("messages[0].tool_calls[0].function.arguments is "),
                "{error}"
            );
        }
    }

    #[test]
    fn absent_content_is_empty() {
        for message in [
            json!({"role": "assistant", "content": null, "tool_calls": [], "name": null}),
            json!({"role": "assistant"}),
        ] {
            let message = parse(message).unwrap();
            assert_eq!(message, Message::text(Role::Assistant, ""));
            assert_eq!(message.to_json(true), json!({"role": "assistant", "content": ""}));
        }
    }

    #[test]
    fn parts_keep_their_form() {
        let json = json!({"role": "tool", "tool_call_id": "c", "content": [
            {"type": "text", "text": "a"}, {"type": "input_text", "text": "b"},
        ]});
        let message = parse(json).unwrap();
        assert_eq!(message.content.text(), "ab");
        assert_eq!(message.to_json(false)["content"], "ab");
        assert_eq!(message.to_json(true)["content"][1], json!({"type": "text", "text": "b"}));
        assert_eq!(parse(json!({"role": "user", "content": []})).unwrap().content, Content::Parts(vec![]));
    }

    #[test]
    fn wrong_messages_are_named() {
        for (message, line) in [
            (json!("x"), "messages[0] is not an object"),
            (json!({"content": "x"}), "messages[0] has no role"),
            (json!({"role": "critic"}), "messages[0] has the unknown role \"critic\""),
            (
                json!({"role": "user", "content": 3}),
                "messages[0].content is neither a string nor an array of parts",
            ),
            (
                json!({"role": "user", "content": [{"type": "text", "text": ""}, {"type": "video"}]}),
                "messages[0].content[1] has the unsupported type \"video\"",
            ),
            (json!({"role": "user", "content": [{"text": ""}]}), "messages[0].content[0] has no type"),
            (json!({"role": "user", "content": [{"type": "text"}]}), "messages[0].content[0] has no text"),
            (json!({"role": "user", "name": 3}), "messages[0].name is not a string"),
            (
                json!({"role": "assistant", "tool_calls": [{}]}),
                "messages[0].tool_calls[0] has no function.name",
            ),
            (
                json!({"role": "assistant", "tool_calls": [{"type": "custom"}]}),
                "messages[0].tool_calls[0] has the unsupported type \"custom\"",
            ),
        ] {
            let error = parse(message).unwrap_err();
            assert_eq!((error.kind(), error.to_string().as_str()), (ErrorKind::Request, line));
        }
        assert!(
            serde_json::from_str::<Message>(r#"{"role": "x"}"#)
                .unwrap_err()
                .to_string()
                .contains("unknown role")
        );
        assert!(Message::list(&json!({})).is_err());
    }

    #[test]
    fn system_messages_go_first() {
        let text = |role, text: &str| Message::text(role, text);
        let (system, user) = (Role::System, Role::User);
        let merged = merge_system(&[text(user, "1"), text(system, "a"), text(user, "2"), text(system, "b")]);
        assert_eq!(merged, [text(system, "a\n\nb"), text(user, "1"), text(user, "2")]);
        let merged = merge_system(&[text(system, "a"), text(system, "b"), text(user, "1")]);
        assert_eq!(merged, [text(system, "a\n\nb"), text(user, "1")]);
        let parts =
            Message::list(&json!([{"role": "developer", "content": [{"type": "text", "text": "x"}]}]))
                .unwrap();
        assert_eq!(merge_system(&parts), parts);
        assert_eq!(merge_system(&[]), []);
    }

    #[test]
    fn merged_system_messages_keep_their_images() {
        let image = Part::Image(Image::new(Picture::new(1, 1, vec![1, 2, 3]).unwrap()));
        let mut system = Message::text(Role::System, "");
        system.content = Content::Parts(vec![Part::Text("b".into()), image.clone()]);
        let merged = merge_system(&[Message::text(Role::System, "a"), system]);
        let text = |text: &str| Part::Text(text.to_owned());
        assert_eq!(merged[0].content, Content::Parts(vec![text("a"), text("\n\n"), text("b"), image]));
    }
}

use std::collections::VecDeque;
use std::sync::Arc;

use axum::Json;
use axum::body::Body;
use axum::extract::{Extension, State};
use axum::response::{IntoResponse, Response};
use serde::Serialize;
use skep_engine::{Delta, Event};

use super::answer::{Answer, Script};
use super::error::ApiError;
use super::line::Line;
use super::request::Asked;
use super::server::App;
use super::wire::{Head, Part, Usage, Whole, finish_reason, json};

/// `POST /v1/chat/completions`.
pub(super) async fn post(
    State(app): State<Arc<App>>,
    Extension(line): Extension<Arc<Line>>,
    body: Body,
) -> Result<Response, ApiError> {
    let answer = Answer::ask(&app, line, body, Asked::chat).await?;
    if answer.format.stream {
        let head = Head::new("chatcmpl", "chat.completion.chunk", &answer.card.id);
        let parts = Parts { head, include_usage: answer.format.include_usage, opened: false };
        return Ok(answer.stream(app.keep_alive, parts));
    }
    collect(answer).await.map(IntoResponse::into_response)
}

#[derive(Debug, Serialize)]
struct Choice {
    index: usize,
    message: Message,
    logprobs: Option<()>,
    finish_reason: &'static str,
}

#[derive(Debug, Serialize)]
struct Message {
    role: &'static str,
    content: String,
    #[serde(skip_serializing_if = "String::is_empty")]
    reasoning_content: String,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    tool_calls: Vec<Call>,
}

#[derive(Debug, Serialize)]
struct Call {
    id: String,
    r#type: &'static str,
    function: Function,
}

#[derive(Debug, Serialize)]
struct Function {
    #[serde(skip_serializing_if = "Option::is_none")]
    name: Option<String>,
    arguments: String,
}

async fn collect(mut answer: Answer) -> Result<Json<Whole<Choice>>, ApiError> {
    let head = Head::new("chatcmpl", "chat.completion", &answer.card.id);
    let mut message = Message {
        role: "assistant",
        content: String::new(),
        reasoning_content: String::new(),
        tool_calls: Vec::new(),
    };
    loop {
        match answer.next().await? {
            Event::Delta(delta) => message.append(delta).map_err(|error| answer.fail(error))?,
            Event::Finished { reason, usage, .. } => {
                let finish_reason = finish_reason(reason).map_err(|error| answer.fail(error))?;
                let choice = Choice { index: 0, message, logprobs: None, finish_reason };
                return Ok(Json(Whole { head, choices: [choice], usage: usage.into() }));
            }
            other => return Err(answer.fail(unknown(&other))),
        }
    }
}

impl Message {
    fn append(&mut self, delta: Delta) -> Result<(), ApiError> {
        match delta {
            Delta::Reasoning(text) => self.reasoning_content.push_str(&text),
            Delta::Content(text) => self.content.push_str(&text),
            Delta::ToolCallStart { index, id, name } if index == self.tool_calls.len() => {
                let function = Function { name: Some(name), arguments: String::new() };
                self.tool_calls.push(Call { id, r#type: "function", function });
            }
            Delta::ToolCallArguments { index, text } if index < self.tool_calls.len() => {
                self.tool_calls[index].function.arguments.push_str(&text);
            }
            other => return Err(unknown(&Event::Delta(other))),
        }
        Ok(())
    }
}

/// The parts of a streamed answer.
struct Parts {
    head: Head,
    include_usage: bool,
    opened: bool,
}

#[derive(Debug, Serialize)]
struct PartChoice {
    index: usize,
    delta: PartDelta,
    logprobs: Option<()>,
    finish_reason: Option<&'static str>,
}

#[derive(Debug, Default, Serialize)]
struct PartDelta {
    #[serde(skip_serializing_if = "Option::is_none")]
    role: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    content: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    reasoning_content: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    tool_calls: Option<[PartCall; 1]>,
}

#[derive(Debug, Serialize)]
struct PartCall {
    index: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    id: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    r#type: Option<&'static str>,
    function: Function,
}

impl Script for Parts {
    fn write(&mut self, event: Event, lines: &mut VecDeque<String>) -> Result<(), ApiError> {
        if !self.opened {
            self.opened = true;
            let opening =
                PartDelta { role: Some("assistant"), content: Some(String::new()), ..PartDelta::default() };
            lines.push_back(self.part(opening, None));
        }
        match event {
            Event::Delta(delta) => lines.push_back(self.part(delta.try_into()?, None)),
            Event::Finished { reason, usage, .. } => {
                lines.push_back(self.part(PartDelta::default(), Some(finish_reason(reason)?)));
                if self.include_usage {
                    let usage = Some(Some(Usage::from(usage)));
                    lines.push_back(json(&Part::<PartChoice> { head: &self.head, choices: &[], usage }));
                }
            }
            other => return Err(unknown(&other)),
        }
        Ok(())
    }
}

impl Parts {
    fn part(&self, delta: PartDelta, finish_reason: Option<&'static str>) -> String {
        let choice = PartChoice { index: 0, delta, logprobs: None, finish_reason };
        json(&Part { head: &self.head, choices: &[choice], usage: self.include_usage.then_some(None) })
    }
}

impl TryFrom<Delta> for PartDelta {
    type Error = ApiError;

    fn try_from(delta: Delta) -> Result<Self, ApiError> {
        let call = |index, id, name: Option<String>, arguments| {
            let r#type = name.as_ref().map(|_| "function");
            let call = PartCall { index, id, r#type, function: Function { name, arguments } };
            Self { tool_calls: Some([call]), ..Self::default() }
        };
        Ok(match delta {
            Delta::Reasoning(text) => Self { reasoning_content: Some(text), ..Self::default() },
            Delta::Content(text) => Self { content: Some(text), ..Self::default() },
            Delta::ToolCallStart { index, id, name } => call(index, Some(id), Some(name), String::new()),
            Delta::ToolCallArguments { index, text } => call(index, None, None, text),
            #[allow(unreachable_patterns, reason = "the enum may grow")]
            other => return Err(unknown(&Event::Delta(other))),
        })
    }
}

/// An event this endpoint has no words for: the engine and the server are not of one version.
fn unknown(event: &Event) -> ApiError {
    let kind = match event {
        Event::Delta(_) => "delta",
        _ => "event",
    };
    ApiError::internal(format!("the engine sent a {kind} that does not fit a chat"))
}

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

/// `POST /v1/completions`.
pub(super) async fn post(
    State(app): State<Arc<App>>,
    Extension(line): Extension<Arc<Line>>,
    body: Body,
) -> Result<Response, ApiError> {
    let answer = Answer::ask(&app, line, body, Asked::completion).await?;
    let head = Head::new("cmpl", "text_completion", &answer.card.id);
    if answer.format.stream {
        let parts = Parts { head, include_usage: answer.format.include_usage };
        return Ok(answer.stream(app.keep_alive, parts));
    }
    collect(answer, head).await.map(IntoResponse::into_response)
}

#[derive(Debug, Serialize)]
struct Choice {
    index: usize,
    text: String,
    logprobs: Option<()>,
    finish_reason: Option<&'static str>,
}

impl Choice {
    fn new(text: String, finish_reason: Option<&'static str>) -> Self {
        Self { index: 0, text, logprobs: None, finish_reason }
    }
}

async fn collect(mut answer: Answer, head: Head) -> Result<Json<Whole<Choice>>, ApiError> {
    let mut text = String::new();
    loop {
        match answer.next().await? {
            Event::Finished { reason, usage, .. } => {
                let reason = finish_reason(reason).map_err(|error| answer.fail(error))?;
                let choices = [Choice::new(text, Some(reason))];
                return Ok(Json(Whole { head, choices, usage: usage.into() }));
            }
            event => text.push_str(&plain(event).map_err(|error| answer.fail(error))?),
        }
    }
}

/// The text of a delta. A raw prompt has no roles, so its answer is one text.
fn plain(event: Event) -> Result<String, ApiError> {
    match event {
        Event::Delta(Delta::Content(text)) => Ok(text),
        _ => Err(ApiError::internal("the engine sent an event that does not fit a plain completion")),
    }
}

/// The parts of a streamed answer.
struct Parts {
    head: Head,
    include_usage: bool,
}

impl Script for Parts {
    fn write(&mut self, event: Event, lines: &mut VecDeque<String>) -> Result<(), ApiError> {
        let Event::Finished { reason, usage, .. } = event else {
            lines.push_back(self.part(plain(event)?, None));
            return Ok(());
        };
        lines.push_back(self.part(String::new(), Some(finish_reason(reason)?)));
        if self.include_usage {
            let usage = Some(Some(Usage::from(usage)));
            lines.push_back(json(&Part::<Choice> { head: &self.head, choices: &[], usage }));
        }
        Ok(())
    }
}

impl Parts {
    fn part(&self, text: String, finish_reason: Option<&'static str>) -> String {
        let choices = &[Choice::new(text, finish_reason)];
        json(&Part { head: &self.head, choices, usage: self.include_usage.then_some(None) })
    }
}

use std::collections::VecDeque;
use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use axum::body::{Body, Bytes, HttpBody, to_bytes};
use axum::http::{HeaderName, HeaderValue};
use axum::response::sse::{Event as SseEvent, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use futures_util::stream::unfold;
use skep_engine::{Event, Sampling, Sink};
use tokio::sync::{mpsc, watch};

use super::error::ApiError;
use super::line::Line;
use super::model::{Backend, Card};
use super::request::{Asked, Format};
use super::server::App;
use super::wire;

/// How many events may wait for a client. One that lets this many pile up is cut off.
const EVENTS: usize = 4096;

/// The engine's end: never blocks, and is closed as soon as the other end is dropped.
struct Pipe {
    events: mpsc::Sender<Event>,
    full: Arc<AtomicBool>,
}

impl Sink for Pipe {
    fn send(&mut self, event: Event) -> bool {
        if self.full.load(Ordering::Relaxed) {
            return false;
        }
        match self.events.try_send(event) {
            Ok(()) => true,
            Err(mpsc::error::TrySendError::Closed(_)) => false,
            Err(mpsc::error::TrySendError::Full(_)) => {
                self.full.store(true, Ordering::Relaxed);
                false
            }
        }
    }

    fn closed(&self) -> bool {
        self.events.is_closed()
    }
}

/// The client's end of one answer. Dropping it is how a client that went away stops the engine.
pub(super) struct Answer {
    pub(super) card: Card,
    pub(super) format: Format,
    events: mpsc::Receiver<Event>,
    full: Arc<AtomicBool>,
    stopping: watch::Receiver<bool>,
    line: Arc<Line>,
}

impl Answer {
    /// Reads a request, checks it and hands it to the engine.
    pub(super) async fn ask(
        app: &App,
        line: Arc<Line>,
        body: Body,
        parse: fn(&[u8], &Card, Sampling) -> Result<Asked, ApiError>,
    ) -> Result<Self, ApiError> {
        let asked = Self::admit(app, Arc::clone(&line), body, parse).await;
        asked.inspect_err(|error| line.failed(error))
    }

    async fn admit(
        app: &App,
        line: Arc<Line>,
        body: Body,
        parse: fn(&[u8], &Card, Sampling) -> Result<Asked, ApiError>,
    ) -> Result<Self, ApiError> {
        let backend = Arc::clone(app.model.backend()?);
        let body = read(app, body).await?;
        let strict = app.strict_model;
        let stopping = app.stopping.clone();
        let (sender, events) = mpsc::channel(EVENTS);
        let full = Arc::new(AtomicBool::new(false));
        let pipe = Pipe { events: sender, full: Arc::clone(&full) };

        let admission = tokio::task::spawn_blocking(move || {
            let card = backend.card();
            let asked = parse(&body, &card, backend.sampling())?;
            if let Some(model) = asked.model.filter(|model| strict && *model != card.id) {
                return Err(ApiError::no_such_model(&model, &card.id));
            }
            let prompt_tokens = Backend::submit(&*backend, asked.request, Box::new(pipe))?;
            Ok((card, asked.format, prompt_tokens))
        });
        let (card, format, prompt_tokens) =
            admission.await.map_err(|_| ApiError::internal("admitting the request failed"))??;
        line.admitted(prompt_tokens);
        Ok(Self { card, format, events, full, stopping, line })
    }

    /// The next event; none of kind [`Event::Failed`].
    pub(super) async fn next(&mut self) -> Result<Event, ApiError> {
        let event = tokio::select! {
            biased;
            _ = self.stopping.wait_for(|stopping| *stopping) => Err(ApiError::shutting_down()),
            event = self.events.recv() => Ok(event),
        };
        let event = event.map_err(|error| self.fail(error))?;
        match event {
            Some(Event::Failed(error)) => Err(self.fail(error.into())),
            Some(event) => {
                if let Event::Finished { usage, timings, .. } = &event {
                    self.line.finished(*usage, *timings);
                }
                Ok(event)
            }
            None if self.full.load(Ordering::Relaxed) => Err(self.fail(ApiError::slow_reader())),
            None => Err(self.fail(ApiError::internal("the engine stopped before the answer was finished"))),
        }
    }

    pub(super) fn fail(&self, error: ApiError) -> ApiError {
        self.line.failed(&error);
        error
    }

    /// The rest of the answer as server-sent events: what `script` makes of each engine event, then `[DONE]`; or,
    /// after an error, that error as the last event.
    pub(super) fn stream(self, keep_alive: Duration, script: impl Script) -> Response {
        let stream =
            unfold(Stream { answer: self, script, lines: VecDeque::new(), ended: false }, Stream::next);
        let alive = KeepAlive::new().interval(keep_alive).text("working");
        let mut response = Sse::new(stream).keep_alive(alive).into_response();
        // Some proxies collect a response before they pass it on, unless told not to.
        let buffering = HeaderName::from_static("x-accel-buffering");
        response.headers_mut().insert(buffering, HeaderValue::from_static("no"));
        response
    }
}

/// Writes engine events as the JSON of one endpoint's stream.
pub(super) trait Script: Send + 'static {
    /// Appends the data lines for one event.
    fn write(&mut self, event: Event, lines: &mut VecDeque<String>) -> Result<(), ApiError>;
}

struct Stream<S> {
    answer: Answer,
    script: S,
    lines: VecDeque<String>,
    ended: bool,
}

impl<S: Script> Stream<S> {
    async fn next(mut self) -> Option<(Result<SseEvent, Infallible>, Self)> {
        loop {
            if let Some(line) = self.lines.pop_front() {
                return Some((Ok(SseEvent::default().data(line)), self));
            }
            if self.ended {
                return None;
            }
            self.advance().await;
        }
    }

    async fn advance(&mut self) {
        let written = match self.answer.next().await {
            Ok(event) => {
                self.ended = matches!(event, Event::Finished { .. });
                self.script.write(event, &mut self.lines).map_err(|error| self.answer.fail(error))
            }
            Err(error) => Err(error),
        };
        match written {
            Ok(()) if self.ended => self.lines.push_back("[DONE]".into()),
            Ok(()) => {}
            Err(error) => {
                self.ended = true;
                self.lines.push_back(wire::json(&error.into_body()));
            }
        }
    }
}

async fn read(app: &App, body: Body) -> Result<Bytes, ApiError> {
    let limit = app.body_limit;
    if body.size_hint().lower() > limit as u64 {
        return Err(ApiError::too_large(limit));
    }
    match tokio::time::timeout(app.body_timeout, to_bytes(body, limit)).await {
        Err(_) => Err(ApiError::body_timeout()),
        Ok(Ok(bytes)) => Ok(bytes),
        Ok(Err(error)) => Err(match is_limit(&error) {
            true => ApiError::too_large(limit),
            false => ApiError::invalid("the request body could not be read"),
        }),
    }
}

/// Whether a body could not be read because it is too long; the alternative is a connection that broke.
fn is_limit(error: &axum::Error) -> bool {
    let mut source = std::error::Error::source(error);
    while let Some(error) = source {
        if error.to_string().contains("length limit exceeded") {
            return true;
        }
        source = error.source();
    }
    false
}

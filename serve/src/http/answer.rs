use std::collections::VecDeque;
use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use axum::body::{Body, HttpBody};
use axum::http::{HeaderName, HeaderValue};
use axum::response::sse::{Event as SseEvent, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use futures_util::stream::unfold;
use http_body_util::BodyExt;
use skep_engine::{Event, Sink};
use tokio::sync::{mpsc, watch};

use super::error::ApiError;
use super::ledger::Held;
use super::line::Line;
use super::model::{Backend, Card};
use super::request::{Format, Parse};
use super::server::App;
use super::wire;

/// How many events may wait for a client. One that lets this many pile up is cut off.
const EVENTS: usize = 4096;

/// The engine's end: never blocks, and is closed as soon as the other end is dropped.
struct Pipe {
    events: mpsc::Sender<Event>,
    full: Arc<AtomicBool>,
    /// What the pictures of the request occupy, as long as the engine has them.
    _pictures: Held,
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
    pub(super) async fn ask(app: &App, line: Arc<Line>, body: Body, parse: Parse) -> Result<Self, ApiError> {
        let asked = Self::admit(app, Arc::clone(&line), body, parse).await;
        asked.inspect_err(|error| line.failed(error))
    }

    async fn admit(app: &App, line: Arc<Line>, body: Body, parse: Parse) -> Result<Self, ApiError> {
        let backend = Arc::clone(app.model.backend()?);
        let card = backend.card();
        let mut held = app.ledger.open();
        let body = read(app, body, &card, &mut held).await?;
        let strict = app.strict_model;
        let stopping = app.stopping.clone();
        let (sender, events) = mpsc::channel(EVENTS);
        let full = Arc::new(AtomicBool::new(false));

        let options = Arc::clone(&app.images.options);
        let sampling = backend.sampling();
        let (mut asked, card) = blocking(move || {
            let asked = parse(&body, &card, sampling, &options)?;
            match asked.model.as_ref().filter(|model| strict && **model != card.id) {
                Some(model) => Err(ApiError::no_such_model(model, &card.id)),
                None => Ok((asked, card)),
            }
        })
        .await?;
        let mut pictures = app.ledger.open();
        let pending = std::mem::take(&mut asked.pictures);
        asked.place(app.images.read(pending, &mut pictures).await?)?;
        drop(held);

        let pipe = Pipe { events: sender, full: Arc::clone(&full), _pictures: pictures };
        let format = asked.format;
        let prompt_tokens =
            blocking(move || Ok(Backend::submit(&*backend, asked.request, Box::new(pipe))?)).await?;
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

/// Runs what takes long, rendering a prompt for one, beside the thread that serves sockets.
async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, ApiError> + Send + 'static,
) -> Result<T, ApiError> {
    let done = tokio::task::spawn_blocking(work).await;
    done.map_err(|_| ApiError::internal("admitting the request failed"))?
}

async fn read(app: &App, body: Body, card: &Card, held: &mut Held) -> Result<Vec<u8>, ApiError> {
    let limit = match card.images {
        Some(_) => app.body_limit.max(app.images.options.body_limit),
        None => app.body_limit,
    };
    if body.size_hint().lower() > limit as u64 {
        return Err(ApiError::too_large(limit));
    }
    let read = collect(body, limit, held);
    tokio::time::timeout(app.body_timeout, read).await.unwrap_or_else(|_| Err(ApiError::body_timeout()))
}

async fn collect(mut body: Body, limit: usize, held: &mut Held) -> Result<Vec<u8>, ApiError> {
    let mut bytes = Vec::new();
    while let Some(frame) = body.frame().await {
        let frame = frame.map_err(|_| ApiError::invalid("the request body could not be read"))?;
        let Some(data) = frame.data_ref() else { continue };
        if data.len() > limit - bytes.len() {
            return Err(ApiError::too_large(limit));
        }
        if !held.grow(data.len()) {
            return Err(ApiError::no_room());
        }
        bytes.extend_from_slice(data);
    }
    Ok(bytes)
}

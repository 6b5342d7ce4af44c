use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use axum::extract::Request;
use axum::middleware::Next;
use axum::response::Response;
use skep_engine::{Timings, Usage};

use super::error::ApiError;

/// The one line a request leaves in the log: written when its last owner, which may be a stream, is gone. It holds
/// numbers only, nothing of what client or model say.
pub(super) struct Line {
    method: String,
    path: String,
    started: Instant,
    facts: Mutex<Facts>,
}

#[derive(Default)]
struct Facts {
    status: Option<u16>,
    prompt_tokens: Option<usize>,
    finished: Option<(Usage, Timings)>,
    failed: bool,
}

impl Line {
    fn new(request: &Request) -> Self {
        Self {
            method: request.method().to_string(),
            path: request.uri().path().to_owned(),
            started: Instant::now(),
            facts: Mutex::default(),
        }
    }

    pub(super) fn admitted(&self, prompt_tokens: usize) {
        self.facts().prompt_tokens = Some(prompt_tokens);
    }

    pub(super) fn finished(&self, usage: Usage, timings: Timings) {
        self.facts().finished = Some((usage, timings));
    }

    pub(super) fn failed(&self, error: &ApiError) {
        if let Some(fault) = error.fault() {
            tracing::error!("{} {}: {fault}", self.method, self.path);
        }
        self.facts().failed = true;
    }

    fn facts(&self) -> MutexGuard<'_, Facts> {
        self.facts.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Line {
    fn drop(&mut self) {
        let facts = self.facts.get_mut().unwrap_or_else(PoisonError::into_inner);
        let Self { method, path, .. } = self;
        let seconds = self.started.elapsed().as_secs_f64();
        let status = facts.status.map_or("-".to_owned(), |status| status.to_string());
        match (&facts.finished, facts.prompt_tokens) {
            (Some((usage, timings)), _) => tracing::info!(
                "{method} {path} {status} {seconds:.3} s: {} prompt tokens in {:.3} s, {} tokens in {:.3} s",
                usage.prompt_tokens,
                timings.prefill_seconds,
                usage.completion_tokens,
                timings.decode_seconds,
            ),
            (None, Some(_)) if facts.failed => {
                tracing::info!("{method} {path} {status} {seconds:.3} s: failed");
            }
            (None, Some(tokens)) => {
                tracing::info!(
                    "{method} {path} {status} {seconds:.3} s: {tokens} prompt tokens, client gone"
                );
            }
            (None, None) if facts.status.is_none() => {
                tracing::info!("{method} {path} {status} {seconds:.3} s: client gone");
            }
            (None, None) => tracing::info!("{method} {path} {status} {seconds:.3} s"),
        }
    }
}

/// Gives every request its line, as an extension handlers may take.
pub(super) async fn write(mut request: Request, next: Next) -> Response {
    let line = Arc::new(Line::new(&request));
    request.extensions_mut().insert(Arc::clone(&line));
    let response = next.run(request).await;
    line.facts().status = Some(response.status().as_u16());
    response
}

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use skep_engine::{Budget, Engine, Request, Result, Sampling, Sink};

use super::error::ApiError;

/// What answers requests: an [`Engine`], or a script in a test of the protocol.
pub trait Backend: Send + Sync + 'static {
    /// What clients may know about the model.
    fn card(&self) -> Card;

    /// The sampling of a request that names none.
    fn sampling(&self) -> Sampling;

    /// Admits a request, or says why not, before anything is generated. Events go to the sink afterwards.
    /// May take long (a prompt is rendered and tokenized): it is never called on the thread that serves sockets.
    /// Returns the number of prompt tokens.
    fn submit(&self, request: Request, sink: Box<dyn Sink>) -> Result<usize>;
}

impl Backend for Engine {
    fn card(&self) -> Card {
        let info = self.info();
        Card { id: info.name.clone(), context: info.context, n_vocab: info.n_vocab, images: info.images }
    }

    fn sampling(&self) -> Sampling {
        self.sampling_defaults().clone()
    }

    fn submit(&self, request: Request, sink: Box<dyn Sink>) -> Result<usize> {
        Engine::submit(self, request, sink).map(|accepted| accepted.prompt_tokens)
    }
}

/// What the server tells about the model it serves.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Card {
    /// The id in `/v1/models` and in every answer.
    pub id: String,
    /// Tokens of prompt and answer that fit together.
    pub context: usize,
    /// Tokens in the vocabulary; ids in requests are below this.
    pub n_vocab: usize,
    /// Soft tokens that an image may take unless a request says otherwise; `None` if the model takes no images.
    pub images: Option<Budget>,
}

/// The model behind a server: being loaded at first, then ready for good.
///
/// A server may listen while its model loads. `/health` then tells the progress, and every request for an answer
/// gets status 503 with `Retry-After`.
#[derive(Default)]
pub struct Model {
    done_bytes: AtomicU64,
    total_bytes: AtomicU64,
    ready: OnceLock<Arc<dyn Backend>>,
}

impl Model {
    /// A model that is still being loaded.
    pub fn loading() -> Self {
        Self::default()
    }

    /// Tells how far loading is, in bytes of the file.
    pub fn progress(&self, done_bytes: u64, total_bytes: u64) {
        self.total_bytes.store(total_bytes, Ordering::Relaxed);
        self.done_bytes.store(done_bytes, Ordering::Relaxed);
    }

    /// Answers requests from now on. Only the first backend counts.
    pub fn ready(&self, backend: Arc<dyn Backend>) {
        // A second backend is dropped: a model does not change under its clients.
        let _ = self.ready.set(backend);
    }

    /// The part of the file that is loaded, from 0 to 1.
    pub(super) fn loaded(&self) -> f64 {
        let total = self.total_bytes.load(Ordering::Relaxed);
        if total == 0 {
            return 0.0;
        }
        (self.done_bytes.load(Ordering::Relaxed) as f64 / total as f64).clamp(0.0, 1.0)
    }

    pub(super) fn backend(&self) -> Result<&Arc<dyn Backend>, ApiError> {
        self.ready.get().ok_or_else(|| ApiError::loading(self.loaded()))
    }
}

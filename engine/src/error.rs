use std::fmt;

/// What went wrong, in the terms a caller decides by.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum ErrorKind {
    /// The queue is full; try again later.
    Busy,
    /// The request was cancelled, or the engine is shutting down.
    Cancelled,
    /// Prompt and context do not go together.
    ContextLength {
        /// Tokens of the prompt.
        prompt: usize,
        /// Tokens that fit.
        limit: usize,
    },
    /// The device or the machine refused something, memory for example.
    Device,
    /// The file cannot be read, or is no valid GGUF file.
    File,
    /// The file is valid, but not a model this engine can run as it stands.
    Model,
    /// Numbers that are not finite came out of the model.
    NotFinite,
    /// The request is not valid.
    Request,
    /// The chat template refused the conversation, or failed.
    Template,
    /// The vocabulary in the file is inconsistent, or of a kind that is not supported.
    Tokenizer,
}

/// An error of this crate: a kind to decide by and one line to read.
#[derive(Debug, Clone, thiserror::Error)]
#[error("{message}")]
pub struct Error {
    kind: ErrorKind,
    message: String,
}

impl Error {
    /// Makes an error from its kind and its line: lower-case, naming the thing, without a final stop.
    pub fn new(kind: ErrorKind, message: impl Into<String>) -> Self {
        Self { kind, message: message.into() }
    }

    /// The kind to decide by.
    pub fn kind(&self) -> ErrorKind {
        self.kind
    }

    pub(crate) fn model(message: impl fmt::Display) -> Self {
        Self::new(ErrorKind::Model, message.to_string())
    }
}

impl From<skep_gguf::Error> for Error {
    fn from(error: skep_gguf::Error) -> Self {
        Self::new(ErrorKind::File, error.to_string())
    }
}

impl From<skep_hal::Error> for Error {
    fn from(error: skep_hal::Error) -> Self {
        Self::new(ErrorKind::Device, error.to_string())
    }
}

/// The result type of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

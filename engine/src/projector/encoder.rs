use super::Projector;
use crate::error::{Error, ErrorKind, Result};
use crate::runner::Team;
use crate::store::Residence;
use skep_hal::{Cpu, Pool};
use skep_quant::{Isa, Precision};
use skep_vision::{Budget, Picture, Scratch};
use std::path::Path;

/// A projector without its language model, for measurements and tools.
pub struct ImageEncoder {
    projector: Projector,
    pool: Pool,
    scratch: Scratch,
    precision: Precision,
    embeddings: Vec<f32>,
}

impl ImageEncoder {
    /// Loads the projector (`mmproj`) at `path`, to run on this many threads: by default one per physical core.
    ///
    /// # Errors
    /// A file that is not a projector of a supported type, or whose tensors are not those of its type; no threads.
    pub fn load(path: &Path, threads: Option<usize>, precision: Precision) -> Result<Self> {
        Isa::detect().map_err(|error| Error::new(ErrorKind::Device, error.to_string()))?;
        let projector = Projector::alone(path, Residence::Auto)?;
        let pool = Pool::new(threads.unwrap_or_else(|| Cpu::detect().default_threads()))?;
        Ok(Self { projector, pool, scratch: Scratch::new(), precision, embeddings: Vec::new() })
    }

    /// Threads that it runs on.
    pub fn threads(&self) -> usize {
        self.pool.threads()
    }

    /// Bytes of the file.
    pub fn file_bytes(&self) -> u64 {
        self.projector.file_bytes()
    }

    /// Embeddings that a picture becomes.
    ///
    /// # Errors
    /// [`ErrorKind::Request`] for a picture that cannot be brought to a size.
    pub fn soft_tokens(&self, picture: &Picture, budget: Budget) -> Result<usize> {
        self.projector.soft_tokens(picture, budget)
    }

    /// Floating-point operations of encoding a picture: the multiplications and additions of its matrix products.
    ///
    /// # Errors
    /// As [`soft_tokens`](Self::soft_tokens).
    pub fn operations(&self, picture: &Picture, budget: Budget) -> Result<f64> {
        self.projector.operations(picture, budget)
    }

    /// The embeddings of a picture, `[soft_tokens, width]`.
    ///
    /// # Errors
    /// [`ErrorKind::Request`] for a picture that the tower cannot place, [`ErrorKind::NotFinite`].
    pub fn encode(&mut self, picture: &Picture, budget: Budget) -> Result<&[f32]> {
        let Self { projector, pool, scratch, precision, embeddings } = self;
        pool.enter(|scope| projector.encode(&Team(scope), picture, budget, *precision, scratch, embeddings))?;
        Ok(embeddings)
    }
}

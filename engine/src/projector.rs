//! The `mmproj` file beside a model: its vision tower and projection, which turn a picture into rows of embeddings.

mod config;
mod encoder;
mod weights;

pub use encoder::ImageEncoder;

use crate::error::{Error, ErrorKind, Result};
use crate::keys::Keys;
use crate::store::{self, Claims, Residence, Store};
use skep_gguf::Gguf;
use skep_quant::{Parallel, Precision};
use skep_vision::{Budget, Config, Patches, Picture, Scratch, Tower};
use std::path::Path;
use weights::Weights;

/// A loaded projector: immutable, and the owner of its file.
pub(crate) struct Projector {
    config: Config,
    weights: Weights,
    store: Store,
    file_bytes: u64,
    warnings: Vec<String>,
}

impl Projector {
    /// Loads the projector of a model whose embedding has `hidden` numbers.
    ///
    /// # Errors
    /// A file that is not a projector or not of a supported type, that projects to another length, that lacks a tensor
    /// or has one without a role; each names the file.
    pub(crate) fn load(path: &Path, hidden: usize, residence: Residence) -> Result<Self> {
        Self::open(path, Some(hidden), residence)
    }

    /// Loads a projector without its model.
    pub(crate) fn alone(path: &Path, residence: Residence) -> Result<Self> {
        Self::open(path, None, residence)
    }

    fn open(path: &Path, hidden: Option<usize>, residence: Residence) -> Result<Self> {
        let file = store::open(path)?;
        Self::from_file(file, hidden, residence)
            .map_err(|error| Error::new(error.kind(), format!("projector {}: {error}", path.display())))
    }

    fn from_file(file: Gguf<store::Part>, hidden: Option<usize>, residence: Residence) -> Result<Self> {
        let (config, mut warnings) = config::read(&file)?;
        let hidden = match hidden {
            Some(hidden) => hidden,
            None => Keys { file: &file, prefix: config::PREFIX }.nonzero("projection_dim")?,
        };
        let mut claims = Claims::new(&file);
        let weights = Weights::claim(&file, &config, hidden, &mut claims, &mut warnings)?;
        let used = claims.finish()?;
        let file_bytes = file.file_bytes();
        let store = Store::new(file, &used, residence, &mut |_, _| {})?;
        let projector = Self { config, weights, store, file_bytes, warnings };
        projector.tower()?;
        Ok(projector)
    }

    /// Bytes of the file.
    pub(crate) fn file_bytes(&self) -> u64 {
        self.file_bytes
    }

    /// What was noticed on loading.
    pub(crate) fn warnings(&self) -> &[String] {
        &self.warnings
    }

    /// Rows of embeddings that a picture becomes; an error if the tower has no positions for so long a one.
    pub(crate) fn soft_tokens(&self, picture: &Picture, budget: Budget) -> Result<usize> {
        let tiling = self.config.tiling;
        let (width, height) = (picture.width(), picture.height());
        let (columns, rows) = tiling.fit(width, height, budget).map_err(refused)?;
        let (side, positions) = (columns.max(rows) / tiling.patch(), self.tower()?.positions());
        if side > positions {
            let message = format!(
                "a picture of {width}x{height} pixels takes {side} patches a side, but the tower has {positions} positions"
            );
            return Err(Error::new(ErrorKind::Request, message));
        }
        tiling.soft_tokens(width, height, budget).map_err(refused)
    }

    /// Floating-point operations of encoding a picture.
    pub(crate) fn operations(&self, picture: &Picture, budget: Budget) -> Result<f64> {
        let tiling = self.config.tiling;
        let (width, height) = tiling.fit(picture.width(), picture.height(), budget).map_err(refused)?;
        Ok(self.tower()?.operations(width / tiling.patch(), height / tiling.patch()))
    }

    /// The patches of a picture.
    pub(crate) fn cut(&self, par: &dyn Parallel, picture: &Picture, budget: Budget) -> Result<Patches> {
        self.config.tiling.cut(par, picture, budget).map_err(refused)
    }

    /// One stage of the encoding of a picture, the next of those before with the same `scratch`; says whether `out` is
    /// complete: the embeddings, `[n_soft, hidden]`.
    pub(crate) fn encode_stage(
        &self,
        par: &dyn Parallel,
        patches: &Patches,
        precision: Precision,
        stage: usize,
        scratch: &mut Scratch,
        out: &mut Vec<f32>,
    ) -> Result<bool> {
        let tower = self.tower()?;
        tower.encode_stage(par, patches, precision, stage, scratch, out).map_err(refused)?;
        if stage + 1 < tower.stages() {
            return Ok(false);
        }
        if out.iter().all(|x| x.is_finite()) {
            Ok(true)
        } else {
            Err(Error::new(
                ErrorKind::NotFinite,
                "the embedding of a picture holds numbers that are not finite",
            ))
        }
    }

    /// The embeddings of a picture, `[n_soft, hidden]`. They do not depend on what `scratch` was used for before.
    pub(crate) fn encode(
        &self,
        par: &dyn Parallel,
        picture: &Picture,
        budget: Budget,
        precision: Precision,
        scratch: &mut Scratch,
        out: &mut Vec<f32>,
    ) -> Result<()> {
        let patches = self.cut(par, picture, budget)?;
        let mut stage = 0;
        while !self.encode_stage(par, &patches, precision, stage, scratch, out)? {
            stage += 1;
        }
        Ok(())
    }

    fn tower(&self) -> Result<Tower<'_>> {
        Tower::new(self.config, self.weights.borrow(&self.store)).map_err(Error::model)
    }
}

fn refused(error: skep_vision::Error) -> Error {
    Error::new(ErrorKind::Request, error.to_string())
}

#[cfg(test)]
mod tests;

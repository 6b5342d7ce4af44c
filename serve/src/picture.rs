//! Picture files that a command line names.

use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

use skep_engine::chat::Image;
use skep_vision::{Limits, decode};

use crate::failure::Failure;

/// Reads a picture.
pub(crate) fn read(path: &Path) -> Result<Image, Failure> {
    let limits = Limits::default();
    let failed = |error: &dyn std::fmt::Display| Failure::file(path, error);
    let file = File::open(path).map_err(|error| failed(&error))?;
    let mut bytes = Vec::new();
    // One byte more than allowed tells a file that is too large.
    let limit = limits.bytes as u64 + 1;
    file.take(limit).read_to_end(&mut bytes).map_err(|error| failed(&error))?;
    decode(&bytes, &limits).map(Image::new).map_err(|error| failed(&error))
}

/// Reads pictures in order.
pub(crate) fn read_all(paths: &[PathBuf]) -> Result<Vec<Image>, Failure> {
    paths.iter().map(|path| read(path)).collect()
}

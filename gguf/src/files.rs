use alloc::borrow::ToOwned;
use alloc::format;
use alloc::string::String;
use alloc::vec::Vec;
use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::{fs, io};

use crate::error::{Error, ErrorKind, Result};
use crate::gguf::{Gguf, Part};
use crate::split;

/// Reads a file, or all parts of a split one, into memory.
///
/// `path` is as for [`open_with`].
///
/// # Errors
/// A file is missing, unreadable or malformed, or the parts do not belong together.
pub fn read(path: &Path) -> Result<Gguf<Vec<u8>>> {
    open_with(path, |path| fs::read(path))
}

/// Finds the file, or all parts of a split one, loads each with `load`, and parses them.
///
/// `path` may be a file, any part of a split file (named `NAME-0000i-of-0000N.gguf`, all in one folder), or a folder
/// that holds one such file or set and no other. All parts are looked for before the first is loaded.
///
/// # Errors
/// A file is missing, unreadable or malformed, or the parts do not belong together; the error names the file.
pub fn open_with<B, L>(path: &Path, mut load: L) -> Result<Gguf<B>>
where
    B: AsRef<[u8]>,
    L: FnMut(&Path) -> io::Result<B>,
{
    let path = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
    let path = locate(&path).map_err(|e| e.in_file(&shown(&path)))?;
    let Some(name) = PartFile::of(&path).filter(|name| name.count > 1) else {
        let part = parse(&path, &mut load)?;
        let count = part.integer::<u16>(split::COUNT)?.unwrap_or(0);
        if count > 1 {
            let number = u64::from(part.integer::<u16>(split::NUMBER)?.unwrap_or(0)) + 1;
            return Err(part.blame(ErrorKind::SplitName { number, count: count.into() }));
        }
        return Gguf::assemble(alloc::vec![part]);
    };
    let files: Vec<PathBuf> = (1..=name.count).map(|number| name.sibling(&path, number)).collect();
    let missing: Vec<String> = files.iter().filter(|file| !file.exists()).map(|file| shown(file)).collect();
    if !missing.is_empty() {
        return Err(ErrorKind::MissingFiles { files: missing }.into());
    }
    let mut parts = Vec::with_capacity(files.len());
    for (file, named) in files.iter().zip(1u64..) {
        let part = parse(file, &mut load)?;
        if let Some(number) = part.integer::<u16>(split::NUMBER)?.map(|number| u64::from(number) + 1)
            && number != named
        {
            return Err(part.blame(ErrorKind::PartName { named, number }));
        }
        parts.push(part);
    }
    Gguf::assemble(parts)
}

fn parse<B: AsRef<[u8]>>(path: &Path, load: &mut impl FnMut(&Path) -> io::Result<B>) -> Result<Part<B>> {
    let label = shown(path);
    match load(path) {
        Ok(bytes) => Part::parse(bytes, Some(label)),
        Err(error) => Err(Error::from(error).in_file(&label)),
    }
}

/// The file that a path stands for.
fn locate(path: &Path) -> Result<PathBuf> {
    let metadata = match fs::metadata(path) {
        Ok(metadata) => metadata,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Err(ErrorKind::NotFound.into()),
        Err(error) => return Err(error.into()),
    };
    if metadata.is_dir() {
        return in_folder(path);
    }
    if !metadata.is_file() {
        return Err(ErrorKind::NotAFile.into());
    }
    Ok(path.to_owned())
}

/// A file of the only model in a folder.
fn in_folder(folder: &Path) -> Result<PathBuf> {
    let mut models: Vec<(String, PathBuf)> = Vec::new();
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        let is_model = path.extension().is_some_and(|extension| extension.eq_ignore_ascii_case("gguf"));
        if !is_model || !path.is_file() {
            continue;
        }
        let name = match PartFile::of(&path) {
            Some(part) => format!("{} in {} parts", part.stem, part.count),
            None => path.file_name().unwrap_or_default().to_string_lossy().into_owned(),
        };
        models.push((name, path));
    }
    models.sort();
    models.dedup_by(|a, b| a.0 == b.0);
    match (models.pop(), models.is_empty()) {
        (Some((_, path)), true) => Ok(path),
        (last, _) => {
            let found = models.into_iter().chain(last).map(|(name, _)| name).collect();
            Err(ErrorKind::Folder { found }.into())
        }
    }
}

/// A file name of the form `STEM-0000i-of-0000N.gguf`.
struct PartFile {
    stem: String,
    extension: String,
    count: u32,
}

impl PartFile {
    fn of(path: &Path) -> Option<Self> {
        Self::parse(path.file_name().and_then(OsStr::to_str)?)
    }

    fn parse(name: &str) -> Option<Self> {
        let (rest, extension) = name.rsplit_once('.')?;
        if !extension.eq_ignore_ascii_case("gguf") {
            return None;
        }
        let (rest, count) = rest.rsplit_once("-of-")?;
        let (stem, number) = rest.rsplit_once('-')?;
        let (number, count) = (digits(number)?, digits(count)?);
        let whole = (1..=count).contains(&number) && !stem.is_empty();
        whole.then(|| Self { stem: stem.into(), extension: extension.into(), count })
    }

    fn sibling(&self, path: &Path, number: u32) -> PathBuf {
        let Self { stem, extension, count } = self;
        path.with_file_name(format!("{stem}-{number:05}-of-{count:05}.{extension}"))
    }
}

/// A number of exactly five digits.
fn digits(text: &str) -> Option<u32> {
    let whole = text.len() == 5 && text.bytes().all(|byte| byte.is_ascii_digit());
    if whole { text.parse().ok() } else { None }
}

fn shown(path: &Path) -> String {
    path.to_string_lossy().into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_parts() {
        let part = PartFile::parse("Qwen3.6-35B-A3B-Q4_K_M-00002-of-00003.gguf").unwrap();
        assert_eq!((part.stem.as_str(), part.count), ("Qwen3.6-35B-A3B-Q4_K_M", 3));
        let third = part.sibling(Path::new("models/x"), 3);
        assert_eq!(third, Path::new("models/Qwen3.6-35B-A3B-Q4_K_M-00003-of-00003.gguf"));
        for name in [
            "m.gguf",
            "m-00001-of-00003.bin",
            "m-1-of-3.gguf",
            "m-00004-of-00003.gguf",
            "m-00000-of-00003.gguf",
            "-00001-of-00003.gguf",
            "m-+0001-of-00003.gguf",
            "m00001-of-00003.gguf",
        ] {
            assert!(PartFile::parse(name).is_none(), "{name}");
        }
    }
}

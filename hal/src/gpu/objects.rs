use super::{Driver, Source};
use crate::{Error, ErrorKind, Result};
use sha2::{Digest, Sha256};
use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

/// Where compiled kernels lie: objects made ahead of time, and a cache of those compiled at run time.
///
/// An object is called `<source>-<digest>-<target>.<ending>`, as in `quant-5e0c…-sm_90.cubin`. The digest is of the text and, in
/// the cache, of the compiler's options and version too, so that an object never stands in for another.
#[derive(Debug, Clone, Default)]
#[non_exhaustive]
pub struct Objects {
    /// Folders with objects made ahead of time, searched in order.
    pub folders: Vec<PathBuf>,
    /// The folder of the cache; none without one.
    pub cache: Option<PathBuf>,
}

impl Objects {
    /// The folder `$SKEP_KERNELS`, the folder `kernels` beside the program, and as cache `$SKEP_CACHE`, or `skep` in
    /// `$XDG_CACHE_HOME` or `~/.cache`.
    pub fn from_env() -> Self {
        let given = env::var_os("SKEP_KERNELS").map(PathBuf::from);
        let beside = env::current_exe().ok().and_then(|program| Some(program.parent()?.join("kernels")));
        let var = |name| env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
        let cache = var("SKEP_CACHE")
            .or_else(|| var("XDG_CACHE_HOME").map(|folder| folder.join("skep")))
            .or_else(|| var("HOME").map(|home| home.join(".cache").join("skep")));
        Self { folders: given.into_iter().chain(beside).collect(), cache }
    }

    /// No folders and no cache: everything is compiled where it is used.
    pub fn none() -> Self {
        Self::default()
    }

    /// The name of an object made ahead of time, without its folder.
    pub fn file_name(source: &Source, target: &str, ending: &str) -> String {
        format!("{}-{}-{target}.{ending}", source.name, digest(&[&source.unit()]))
    }

    /// Offers objects of a source to `load` until it takes one: those made ahead of time, that of the cache, and one
    /// compiled now, which the cache keeps.
    pub(crate) fn find<T>(
        &self,
        driver: &dyn Driver,
        source: &Source,
        load: &mut dyn FnMut(&[u8]) -> Option<T>,
    ) -> Result<Option<T>> {
        let ending = driver.object_ending();
        for target in driver.targets() {
            let name = Self::file_name(source, target, ending);
            for folder in &self.folders {
                if let Some(loaded) = fs::read(folder.join(&name)).ok().and_then(|object| load(&object)) {
                    return Ok(Some(loaded));
                }
            }
        }
        let unit = source.unit();
        let target = driver.targets().first().cloned().unwrap_or_default();
        let key = digest(&[&unit, &driver.compile_key(), &target]);
        // One compilation at a time: whoever waits for the same kernels finds them in the cache then.
        static COMPILING: Mutex<()> = Mutex::new(());
        let _turn = COMPILING.lock().unwrap_or_else(PoisonError::into_inner);
        let cached =
            self.cache.as_ref().map(|folder| folder.join(format!("{}-{key}-{target}.{ending}", source.name)));
        if let Some(path) = &cached
            && let Some(loaded) = fs::read(path).ok().and_then(|object| load(&object))
        {
            return Ok(Some(loaded));
        }
        let object = driver.compile(source.name, &unit).map_err(|error| match error.kind() {
            ErrorKind::NoDriver { .. } => Error::new(ErrorKind::Compile {
                unit: source.name.to_owned(),
                target: target.clone(),
                detail: format!("no object was made ahead of time, and {error}"),
            }),
            _ => error,
        })?;
        if let Some(path) = &cached {
            // A cache that cannot be written costs time, and nothing else.
            let _ = keep(path, &object);
        }
        Ok(load(&object))
    }
}

/// Writes a whole file or none, whoever else writes it at the same time.
fn keep(path: &Path, bytes: &[u8]) -> std::io::Result<()> {
    use std::sync::atomic::{AtomicU64, Ordering};
    static WRITTEN: AtomicU64 = AtomicU64::new(0);
    if let Some(folder) = path.parent() {
        fs::create_dir_all(folder)?;
    }
    let number = WRITTEN.fetch_add(1, Ordering::Relaxed);
    let part = path.with_extension(format!("{}-{number}.part", std::process::id()));
    fs::write(&part, bytes).and_then(|()| fs::rename(&part, path)).inspect_err(|_| {
        let _ = fs::remove_file(&part);
    })
}

fn digest(texts: &[&str]) -> String {
    let mut hash = Sha256::new();
    for text in texts {
        hash.update((text.len() as u64).to_le_bytes());
        hash.update(text);
    }
    hash.finalize().iter().take(12).map(|byte| format!("{byte:02x}")).collect()
}

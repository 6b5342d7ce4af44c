//! The files in which Linux describes itself.

use std::fs;
use std::path::{Path, PathBuf};

/// The place where `/proc` and `/sys` are found: the root, or a directory made by a test.
pub(crate) struct System {
    root: PathBuf,
}

impl System {
    /// This machine. Other systems than Linux have none of the files, and so nothing is known of them.
    pub(crate) fn this() -> Self {
        Self { root: "/".into() }
    }

    #[cfg(test)]
    pub(crate) fn at(root: &Path) -> Self {
        Self { root: root.to_owned() }
    }

    /// The text of a file given by its absolute path, if it can be read.
    pub(crate) fn read(&self, path: impl AsRef<Path>) -> Option<String> {
        let path = path.as_ref();
        fs::read_to_string(self.root.join(path.strip_prefix("/").unwrap_or(path))).ok()
    }
}

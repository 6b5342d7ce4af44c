//! Made-up systems for tests.

use crate::system::System;
use std::fs;
use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};

/// A directory with files in the places where Linux has them; removed when dropped.
pub(crate) struct Tree {
    root: PathBuf,
}

impl Tree {
    pub(crate) fn new(files: &[(&str, &str)]) -> Self {
        static NEXT: AtomicUsize = AtomicUsize::new(0);
        let name = format!("skep-hal-{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
        let tree = Self { root: std::env::temp_dir().join(name) };
        fs::create_dir_all(&tree.root).unwrap();
        for (path, text) in files {
            let path = tree.root.join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        tree
    }

    pub(crate) fn system(&self) -> System {
        System::at(&self.root)
    }
}

impl Drop for Tree {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.root);
    }
}

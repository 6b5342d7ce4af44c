//! The projector that lies beside a model.

use std::path::{Path, PathBuf};

/// The one projector in the folder of a model that can use one.
///
/// Projectors are known by `mmproj` in their names. Of several, none is taken, and that is said.
pub(crate) fn projector(model: &Path) -> Option<PathBuf> {
    let mut found = beside(model);
    if found.is_empty() || !takes_images(model) {
        return None;
    }
    if found.len() > 1 {
        let names: Vec<_> = found.iter().filter_map(|path| path.file_name()?.to_str()).collect();
        tracing::warn!(
            "several projectors lie beside the model: choose with --mmproj ({})",
            names.join(", ")
        );
        return None;
    }
    found.pop()
}

fn beside(model: &Path) -> Vec<PathBuf> {
    let folder = match model.parent() {
        Some(folder) if folder.as_os_str().is_empty() => Path::new("."),
        Some(folder) => folder,
        None => return Vec::new(),
    };
    // A folder that cannot be listed has nothing to offer.
    let Ok(entries) = folder.read_dir() else { return Vec::new() };
    let is_projector = |path: &PathBuf| {
        let name =
            path.file_name().map(|name| name.to_string_lossy().to_ascii_lowercase()).unwrap_or_default();
        name.contains("mmproj") && name.ends_with(".gguf") && path.file_name() != model.file_name()
    };
    let mut found: Vec<_> = entries.flatten().map(|entry| entry.path()).filter(is_projector).collect();
    found.sort();
    found
}

/// Whether a model is of an architecture that sees; what is wrong with a file is said when it is loaded.
fn takes_images(model: &Path) -> bool {
    skep_gguf::open(model).is_ok_and(|file| file.architecture().is_ok_and(|name| name == "gemma4"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn projectors_are_known_by_their_names() {
        let models = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../models"));
        let projector = models.join("tiny-gemma4-mmproj-bf16.gguf");
        assert_eq!(super::projector(&models.join("tiny-gemma4-Q4_K_M.gguf")), Some(projector.clone()));
        assert_eq!(super::projector(&models.join("tiny-qwen35moe-Q4_K_M.gguf")), None, "it sees nothing");
        assert_eq!(beside(&projector), Vec::<PathBuf>::new(), "a file is not its own projector");
        assert_eq!(beside(&models.join("nowhere/model.gguf")), Vec::<PathBuf>::new());
    }

    #[test]
    fn of_several_none_is_taken() {
        let folder = std::env::temp_dir().join(format!("skep-sibling-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let model = folder.join("model.gguf");
        let tiny = concat!(env!("CARGO_MANIFEST_DIR"), "/../models/tiny-gemma4-Q4_K_M.gguf");
        std::fs::copy(tiny, &model).unwrap();
        assert_eq!(projector(&model), None);
        for name in ["x.mmproj", "mmproj.txt", "mmproj-F16.gguf.part"] {
            std::fs::write(folder.join(name), "").unwrap();
        }
        assert_eq!(projector(&model), None);
        let first = folder.join("mmproj-F16.GGUF");
        std::fs::write(&first, "").unwrap();
        assert_eq!(projector(&model), Some(first));
        std::fs::write(folder.join("model.mmproj-bf16.gguf"), "").unwrap();
        assert_eq!(projector(&model), None);
        std::fs::remove_dir_all(&folder).unwrap();
    }
}

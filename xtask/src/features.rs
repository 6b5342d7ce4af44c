//! `cargo xtask features`: the feature matrix.

use crate::shell::{Result, cargo, run as shell};

/// Crates with features, and the sets to check: without any, each alone, all.
const MATRIX: [(&str, &[&str]); 6] = [
    ("skep-gguf", &["", "std", "mmap", "std,mmap"]),
    ("skep-quant", &["", "std", "libm", "std,libm"]),
    ("skep-moe-cache", &["libm", "std", "cpu", "std,libm,cpu"]),
    ("skep-gdn", &["libm", "std", "std,libm"]),
    ("skep-attention", &["libm", "std", "std,libm"]),
    ("skep-vision", &["libm", "std", "decode", "std,libm,decode"]),
];

pub(crate) fn run() -> Result {
    for (package, sets) in MATRIX {
        for features in sets {
            println!("{package} [{features}]");
            let args = ["check", "--quiet", "--locked", "--package", package, "--no-default-features"];
            shell(cargo(args).args(["--features", features]).env("RUSTFLAGS", "-D warnings"))?;
        }
    }
    Ok(())
}

//! `cargo xtask features`: the feature matrix.

use crate::shell::{Result, cargo, run as shell};

/// Crates with features, and the sets to check: without any, each alone, all.
const MATRIX: [(&str, &[&str]); 7] = [
    ("skep-hal", &["", "gpu", "cuda"]),
    ("skep-gguf", &["", "std", "mmap", "std,mmap"]),
    ("skep-quant", &["", "std", "libm", "gpu", "std,libm,gpu"]),
    ("skep-moe-cache", &["libm", "std", "cpu", "gpu", "std,libm,cpu,gpu"]),
    ("skep-gdn", &["libm", "std", "gpu", "std,libm,gpu"]),
    ("skep-attention", &["libm", "std", "gpu", "std,libm,gpu"]),
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

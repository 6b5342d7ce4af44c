//! `cargo xtask serve`: from a fresh clone to a chat.

use crate::shell::{Result, cargo, root, run as shell, target};
use std::process::Command;

const BUNDLED: &str = "models/tiny-qwen35moe-Q4_K_M.gguf";

/// Builds `skep` in release and serves the bundled model, unless the arguments name another.
pub(crate) fn run(args: &[String]) -> Result {
    shell(&mut cargo(["build", "--release", "--locked", "--package", "skep-serve"]))?;
    let mut command = Command::new(target().join("release/skep"));
    command.arg("serve");
    let names_model = |arg: &String| arg == "-m" || arg.starts_with("-m") || arg.starts_with("--model");
    if !args.iter().any(names_model) {
        command.arg("-m").arg(root().join(BUNDLED));
    }
    shell(command.args(args))
}

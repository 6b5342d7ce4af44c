//! `cargo xtask ci`: every check.

use crate::shell::{Result, cargo, run as shell, target};
use crate::{features, nostd, tools};
use std::path::PathBuf;
use std::time::Instant;

type Step = fn() -> Result;

/// The checks in order: cheap ones that fail often come first.
const STEPS: [(&str, Step); 9] = [
    ("tools", tools::run),
    ("fmt", fmt),
    ("lint", lint),
    ("nostd", nostd::run),
    ("features", features::run),
    ("docs", docs),
    ("test", test),
    ("loom", loom),
    ("package", package),
];

/// The check of this name.
pub(crate) fn step(name: &str) -> Option<Step> {
    STEPS.iter().find(|(other, _)| *other == name).map(|(_, step)| *step)
}

/// Runs all checks; the first that fails ends the run.
pub(crate) fn run() -> Result {
    let started = Instant::now();
    let mut passed = Vec::new();
    for (name, step) in STEPS {
        println!("\n== {name}");
        let start = Instant::now();
        let done = step();
        let seconds = start.elapsed().as_secs();
        if let Err(message) = done {
            report(&passed);
            return Err(format!("{name} failed after {seconds} s: {message}"));
        }
        passed.push((name, seconds));
    }
    report(&passed);
    println!("all checks passed in {} s", started.elapsed().as_secs());
    Ok(())
}

fn report(passed: &[(&str, u64)]) {
    println!();
    for (name, seconds) in passed {
        println!("{name:<10} passed in {seconds:>4} s");
    }
}

fn fmt() -> Result {
    shell(&mut cargo(["fmt", "--all", "--check"]))
}

fn lint() -> Result {
    shell(&mut cargo(["clippy", "--workspace", "--all-targets", "--locked", "--", "-D", "warnings"]))
}

/// Overflow checks and debug assertions differ between the profiles, so both are run.
fn test() -> Result {
    for profile in [&[][..], &["--release"]] {
        let args = ["test", "--workspace", "--locked", "--quiet"];
        shell(cargo(args).args(profile).env("INSTA_UPDATE", "no"))?;
    }
    Ok(())
}

fn docs() -> Result {
    let flags = "-D warnings -D rustdoc::broken_intra_doc_links";
    shell(cargo(["doc", "--workspace", "--no-deps", "--locked"]).env("RUSTDOCFLAGS", flags))
}

/// A target folder of its own: the flag would otherwise rebuild everything twice.
fn loom() -> Result {
    let args = ["test", "--package", "skep-hal", "--release", "--test", "loom", "--locked"];
    shell(cargo(args).env("RUSTFLAGS", "--cfg loom").env("CARGO_TARGET_DIR", target().join("loom")))
}

/// Every member packed and built against the packed others.
///
/// Cargo unpacks them once per version under its home and would build against those of an earlier run.
fn package() -> Result {
    for unpacked in unpacked_members() {
        std::fs::remove_dir_all(&unpacked).map_err(|error| format!("{}: {error}", unpacked.display()))?;
    }
    shell(&mut cargo(["publish", "--workspace", "--dry-run", "--allow-dirty", "--locked"]))
}

/// Folders of this workspace's crates among the unpacked sources of all registries.
fn unpacked_members() -> Vec<PathBuf> {
    let home = std::env::var_os("CARGO_HOME").map(PathBuf::from);
    let Some(home) = home.or_else(|| Some(std::env::home_dir()?.join(".cargo"))) else { return Vec::new() };
    let inside = |folder: PathBuf| std::fs::read_dir(folder).into_iter().flatten().flatten();
    inside(home.join("registry/src"))
        .flat_map(|registry| inside(registry.path()))
        .filter(|entry| entry.file_name().to_string_lossy().starts_with("skep-"))
        .map(|entry| entry.path())
        .collect()
}

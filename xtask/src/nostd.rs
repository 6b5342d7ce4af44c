//! `cargo xtask nostd`: crates are checked against a sysroot that has no std.
//!
//! The sysroot holds links to `core`, `alloc` and `compiler_builtins` of the installed toolchain and nothing else, so that any
//! use of std, by a crate or by what it depends on, fails to compile. That the method can fail is checked with a crate
//! that does use std.

use crate::shell::{Result, cargo, output, run as shell, target};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

const TARGET: &str = "x86_64-unknown-linux-gnu";

/// What a sysroot offers.
#[derive(Clone, Copy)]
enum Offers {
    Core,
    CoreAndAlloc,
}

/// Every promise: the crate, the features it is made with, and what it may use.
const PROMISES: [(&str, &str, Offers); 7] = [
    ("skep-gguf", "", Offers::CoreAndAlloc),
    ("skep-quant", "", Offers::Core),
    ("skep-quant", "libm", Offers::Core),
    ("skep-moe-cache", "libm", Offers::CoreAndAlloc),
    ("skep-gdn", "libm", Offers::CoreAndAlloc),
    ("skep-attention", "libm", Offers::CoreAndAlloc),
    ("skep-vision", "libm", Offers::CoreAndAlloc),
];

pub(crate) fn run() -> Result {
    let core = sysroot("core", &["core", "compiler_builtins"])?;
    let alloc = sysroot("alloc", &["core", "alloc", "compiler_builtins"])?;
    let choose = |offers| match offers {
        Offers::Core => &core,
        Offers::CoreAndAlloc => &alloc,
    };
    for (package, features, offers) in PROMISES {
        let of = match offers {
            Offers::Core => "core",
            Offers::CoreAndAlloc => "core and alloc",
        };
        println!("{package} [{features}] needs only {of}");
        let args = [
            "check",
            "--quiet",
            "--locked",
            "--target",
            TARGET,
            "--package",
            package,
            "--no-default-features",
        ];
        shell(in_sysroot(cargo(args).args(["--features", features]), choose(offers)))?;
    }
    control(&alloc)
}

/// A crate that uses std must not compile, or the method proves nothing.
fn control(sysroot: &Path) -> Result {
    let folder = target().join("nostd-control");
    let write = |name: &str, text: &str| {
        let path = folder.join(name);
        fs::write(&path, text).map_err(|error| format!("{}: {error}", path.display()))
    };
    fs::create_dir_all(folder.join("src")).map_err(|error| format!("{}: {error}", folder.display()))?;
    write("Cargo.toml", "[package]\nname = \"nostd-control\"\nedition = \"2024\"\n\n[workspace]\n")?;
    write("src/lib.rs", "#![no_std]\nextern crate std;\n")?;
    let manifest = folder.join("Cargo.toml").display().to_string();
    let mut command = cargo(["check", "--offline", "--target", TARGET, "--manifest-path", &manifest]);
    let result = output(in_sysroot(&mut command, sysroot))?;
    let errors = String::from_utf8_lossy(&result.stderr);
    if result.status.success() {
        return Err("the control crate uses std and compiled all the same: the proof is broken".into());
    }
    if !errors.contains("E0463") {
        return Err(format!("the control crate failed for another reason than a missing std:\n{errors}"));
    }
    println!("control: a crate that uses std is refused");
    Ok(())
}

fn in_sysroot<'c>(command: &'c mut Command, sysroot: &Path) -> &'c mut Command {
    // The explicit --target keeps build scripts and macros on the ordinary sysroot.
    command
        .env("RUSTFLAGS", format!("--sysroot={}", sysroot.display()))
        .env("CARGO_TARGET_DIR", target().join("nostd").join(sysroot.file_name().unwrap_or_default()))
}

/// Makes a sysroot of links to some of the toolchain's libraries.
fn sysroot(name: &str, libraries: &[&str]) -> Result<PathBuf> {
    let printed =
        output(Command::new("rustc").args(["--print", "sysroot"]).current_dir(crate::shell::root()))?;
    let installed = PathBuf::from(String::from_utf8_lossy(&printed.stdout).trim());
    let from = installed.join("lib/rustlib").join(TARGET).join("lib");
    let sysroot = target().join("nostd-sysroot").join(name);
    let to = sysroot.join("lib/rustlib").join(TARGET).join("lib");
    let failed = |path: &Path, error: std::io::Error| format!("{}: {error}", path.display());
    if to.exists() {
        fs::remove_dir_all(&to).map_err(|error| failed(&to, error))?;
    }
    fs::create_dir_all(&to).map_err(|error| failed(&to, error))?;
    for entry in fs::read_dir(&from).map_err(|error| failed(&from, error))? {
        let path = entry.map_err(|error| failed(&from, error))?.path();
        let file = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let wanted = libraries.iter().any(|library| file.starts_with(&format!("lib{library}-")));
        if wanted {
            std::os::unix::fs::symlink(&path, to.join(&file)).map_err(|error| failed(&path, error))?;
        }
    }
    Ok(sysroot)
}

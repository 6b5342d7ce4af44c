//! `cargo xtask tools`: what the checks need beside Rust.

use crate::shell::{Result, run as shell};
use std::process::{Command, Stdio};

/// Makes sure of a C++ compiler, which builds the kernels of the emulated device.
pub(crate) fn run() -> Result {
    if ["c++", "g++", "clang++"].into_iter().any(answers) {
        return Ok(());
    }
    println!("no C++ compiler answers to c++, g++ or clang++: installing g++");
    let mut last = Err("no package manager".to_owned());
    for words in
        [&["apt-get", "update"][..], &["apt-get", "install", "--yes", "--no-install-recommends", "g++"]]
    {
        // Root needs no sudo, and may not have it.
        let command = |words: &[&str]| {
            let mut command = Command::new(words[0]);
            command.args(&words[1..]).env("DEBIAN_FRONTEND", "noninteractive");
            command
        };
        let with_sudo: Vec<&str> =
            ["sudo", "--non-interactive"].into_iter().chain(words.iter().copied()).collect();
        last = shell(&mut command(words)).or_else(|_| shell(&mut command(&with_sudo)));
    }
    last?;
    if answers("g++") { Ok(()) } else { Err("g++ was installed, but does not answer".to_owned()) }
}

fn answers(name: &str) -> bool {
    let status = Command::new(name).arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status();
    status.is_ok_and(|status| status.success())
}

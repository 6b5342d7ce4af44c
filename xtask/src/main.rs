//! Checks and chores of the workspace: `cargo xtask COMMAND`.

mod ci;
mod features;
mod nostd;
mod serve;
mod shell;
mod tools;

use std::process::ExitCode;

const USAGE: &str = "\
usage: cargo xtask COMMAND

  serve [ARGS]   build in release and serve the bundled model on the CPU; ARGS go to `skep serve`
  ci             every check, in the order that finds most for least time
  tools          installs what the checks need beside Rust: a C++ compiler for the emulated device
  fmt            rustfmt, as a check
  lint           clippy with warnings denied
  test           all tests, with debug assertions and in release
  docs           documentation, with broken links denied
  nostd          proof that the no_std crates and all they depend on need no std
  features       every crate with each of its features alone, without any, and with all
  loom           the worker pool under the model checker
  package        dry run of the publication
";

fn main() -> ExitCode {
    let mut args = std::env::args().skip(1);
    let command = args.next().unwrap_or_default();
    let rest: Vec<String> = args.collect();
    let done = match (command.as_str(), rest.as_slice()) {
        ("serve", _) => serve::run(&rest),
        ("ci", []) => ci::run(),
        ("help" | "--help" | "-h", _) => {
            print!("{USAGE}");
            Ok(())
        }
        (name, []) => match ci::step(name) {
            Some(step) => step(),
            None => Err(format!("no command {name:?}\n\n{USAGE}")),
        },
        (name, _) => Err(format!("{name} takes no arguments\n\n{USAGE}")),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(message) => {
            eprintln!("xtask: {message}");
            ExitCode::FAILURE
        }
    }
}

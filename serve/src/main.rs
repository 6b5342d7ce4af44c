//! The `skep` command.

#![forbid(unsafe_code)]

mod bench;
mod doctor;
mod failure;
mod inspect;
mod logits;
mod model;
mod npy;
mod picture;
mod random;
mod run;
mod serve;
mod sibling;
mod synth;

use std::io::IsTerminal;
use std::process::ExitCode;

use clap::{Parser, Subcommand};
use tracing_subscriber::EnvFilter;

use crate::failure::Failure;

/// Runs Mixture-of-Experts language models from GGUF files on your own hardware.
#[derive(Parser)]
#[command(name = "skep", version)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    Bench(bench::Args),
    Doctor(doctor::Args),
    Inspect(inspect::Args),
    Logits(logits::Args),
    Run(run::Args),
    Serve(serve::Args),
    Synth(synth::Args),
}

fn main() -> ExitCode {
    match start() {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => failure.report(),
    }
}

fn start() -> Result<(), Failure> {
    let Some(cli) = failure::parse::<Cli>()? else { return Ok(()) };
    match cli.command {
        Command::Bench(args) => {
            log("warn")?;
            bench::run(&args)
        }
        Command::Doctor(args) => doctor::run(&args),
        Command::Inspect(args) => inspect::run(&args),
        Command::Logits(args) => {
            log("warn")?;
            logits::run(&args)
        }
        Command::Synth(args) => synth::run(&args),
        Command::Run(args) => {
            log("warn")?;
            run::run(args)
        }
        Command::Serve(args) => {
            log("info")?;
            serve::run(args)
        }
    }
}

/// Logs to stderr what `SKEP_LOG` asks for, else the given level and above.
fn log(default: &str) -> Result<(), Failure> {
    let directives = std::env::var("SKEP_LOG").unwrap_or_else(|_| default.to_owned());
    let filter = EnvFilter::try_new(&directives)
        .map_err(|error| Failure::usage(format!("SKEP_LOG={directives}: {error}")))?;
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal())
        .with_target(false)
        .init();
    Ok(())
}

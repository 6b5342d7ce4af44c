//! How a command fails.

use std::fmt;
use std::io::Write;
use std::path::Path;
use std::process::ExitCode;

use clap::Parser;
use clap::error::ErrorKind;

/// Why a command did not succeed: the one line the user gets, and with it the exit code.
#[derive(Debug)]
pub(crate) enum Failure {
    /// The command line asks for something that does not exist or does not fit together: exit code 2.
    Usage(String),
    /// Everything else: exit code 1.
    Other(String),
}

impl Failure {
    /// Wrong use of the command line.
    pub(crate) fn usage(message: impl Into<String>) -> Self {
        Self::Usage(message.into())
    }

    /// A failure that is no wrong use.
    pub(crate) fn other(message: impl Into<String>) -> Self {
        Self::Other(message.into())
    }

    /// A file that cannot be used.
    pub(crate) fn file(path: &Path, error: &dyn fmt::Display) -> Self {
        Self::Other(format!("{}: {error}", path.display()))
    }

    /// Writes the line and says with which code to exit.
    pub(crate) fn report(self) -> ExitCode {
        let (message, code) = match self {
            Self::Usage(message) => (message, 2),
            Self::Other(message) => (message, 1),
        };
        // Names from files and arguments must not forge lines or steer the terminal.
        let line: String = message.chars().map(|c| if c.is_control() { ' ' } else { c }).collect();
        // Nobody is left to tell that stderr is closed.
        let _ = writeln!(std::io::stderr(), "skep: error: {line}");
        ExitCode::from(code)
    }
}

impl From<skep_engine::Error> for Failure {
    fn from(error: skep_engine::Error) -> Self {
        Self::Other(error.to_string())
    }
}

/// Parses the command line; `None` when it only asked for help or the version, which is printed.
pub(crate) fn parse<C: Parser>() -> Result<Option<C>, Failure> {
    match C::try_parse() {
        Ok(cli) => Ok(Some(cli)),
        Err(error) if matches!(error.kind(), ErrorKind::DisplayHelp | ErrorKind::DisplayVersion) => {
            // A closed stdout, as of `skep --help | head -1`, is no failure.
            let _ = error.print();
            Ok(None)
        }
        Err(error) if error.kind() == ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand => {
            Err(Failure::usage("no command was given (see `skep --help`)"))
        }
        Err(error) => Err(Failure::usage(one_line(&error.render().to_string()))),
    }
}

/// What clap says over several lines, without the repetition of the usage.
fn one_line(rendered: &str) -> String {
    let text = rendered.split("\n\nUsage:").next().unwrap_or(rendered).trim();
    let text = text.split("\n\nFor more information").next().unwrap_or(text);
    let words: Vec<&str> = text.strip_prefix("error:").unwrap_or(text).split_whitespace().collect();
    format!("{} (see `skep --help`)", words.join(" "))
}

//! What commands that run a model share: its options, its loading, its sampling.

use std::io::IsTerminal;
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::ValueEnum;
use indicatif::{ProgressBar, ProgressStyle};
use skep_engine::{Budget, DeviceKind, KvType, LoadOptions, Precision, Progress, Runner, Sampling};

use crate::failure::Failure;
use crate::sibling;

/// Which model to run, and how.
#[derive(Debug, clap::Args)]
#[command(next_help_heading = "Model")]
pub(crate) struct ModelArgs {
    /// The GGUF file; any part of a split one
    #[arg(short, long, value_name = "FILE")]
    pub(crate) model: PathBuf,
    /// The projector (mmproj file) by which the model sees images [default: the one beside the model]
    #[arg(long, value_name = "FILE", conflicts_with = "no_mmproj")]
    mmproj: Option<PathBuf>,
    /// Take no images, whatever lies beside the model
    #[arg(long)]
    no_mmproj: bool,
    /// Tokens that an image may take: 70, 140, 280, 560 or 1120
    #[arg(long, value_name = "N", value_parser = budget, default_value = "280")]
    image_tokens: Budget,
    /// Tokens of prompt and answer together [default: as many as the model was made for and memory holds]
    #[arg(long, value_name = "N", value_parser = positive)]
    pub(crate) ctx: Option<usize>,
    /// CPU threads [default: one per physical core]
    #[arg(long, value_name = "N", value_parser = positive)]
    pub(crate) threads: Option<usize>,
    /// Compute with weights decoded to f32: slower, close to the reference
    #[arg(long)]
    pub(crate) exact: bool,
    /// Type of the keys and values kept for attention [default: f16, with --exact f32]
    #[arg(long, value_enum, value_name = "TYPE")]
    pub(crate) kv: Option<Kv>,
    /// What computes
    #[arg(long, value_enum, value_name = "DEVICE", default_value_t = Device::Auto)]
    pub(crate) device: Device,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Device {
    Auto,
    Cpu,
    Cuda,
    Hip,
    Emulated,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Kv {
    F16,
    F32,
}

impl ModelArgs {
    /// Checks what can be checked without reading the file.
    pub(crate) fn check(&self) -> Result<(), Failure> {
        for file in [&self.model].into_iter().chain(&self.mmproj) {
            if let Err(error) = std::fs::metadata(file) {
                let path = std::path::absolute(file).unwrap_or_else(|_| file.clone());
                return Err(match error.kind() {
                    std::io::ErrorKind::NotFound => {
                        Failure::other(format!("file not found: {}", path.display()))
                    }
                    _ => Failure::file(&path, &error),
                });
            }
        }
        Ok(())
    }

    /// The file.
    pub(crate) fn file(&self) -> &Path {
        &self.model
    }

    /// The projector that the model is loaded with, if any.
    pub(crate) fn projector(&self) -> Option<PathBuf> {
        match &self.mmproj {
            None if !self.no_mmproj => sibling::projector(&self.model),
            given => given.clone(),
        }
    }

    /// Tokens that an image may take.
    pub(crate) fn image_tokens(&self) -> Budget {
        self.image_tokens
    }

    /// Loads the model, with a bar on a terminal. `adjust` sets what the command itself decides.
    pub(crate) fn load(&self, adjust: impl FnOnce(&mut LoadOptions)) -> Result<Runner, Failure> {
        self.load_watched(adjust, |_, _| {})
    }

    /// Loads the model and tells how many bytes of how many are done.
    pub(crate) fn load_watched(
        &self,
        adjust: impl FnOnce(&mut LoadOptions),
        watch: impl Fn(u64, u64),
    ) -> Result<Runner, Failure> {
        self.check()?;
        let mut options = LoadOptions::default();
        options.threads = self.threads;
        options.precision = if self.exact { Precision::Exact } else { Precision::Fast };
        options.context = self.ctx;
        options.kv = match self.kv {
            Some(Kv::F16) => KvType::F16,
            Some(Kv::F32) => KvType::F32,
            None if self.exact => KvType::F32,
            None => KvType::F16,
        };
        options.device = match self.device {
            Device::Auto => DeviceKind::Auto,
            Device::Cpu => DeviceKind::Cpu,
            Device::Cuda => DeviceKind::Cuda,
            Device::Hip => DeviceKind::Hip,
            Device::Emulated => DeviceKind::Emulated,
        };
        options.budget = self.image_tokens;
        options.projector = self.mmproj.clone();
        adjust(&mut options);
        let sibling = match options.projector {
            None if !self.no_mmproj => sibling::projector(&self.model),
            _ => None,
        };
        let runner = match sibling {
            None => self.load_with(&options, &watch)?,
            Some(sibling) => {
                options.projector = Some(sibling);
                self.load_with(&options, &watch).or_else(|error| {
                    // Nobody asked for what lies beside the model, so it must not keep the model from running.
                    options.projector = None;
                    let runner = self.load_with(&options, &watch)?;
                    tracing::warn!("images are not taken: {error}");
                    Ok::<_, Failure>(runner)
                })?
            }
        };
        for warning in &runner.info().warnings {
            tracing::warn!("{warning}");
        }
        Ok(runner)
    }

    fn load_with(&self, options: &LoadOptions, watch: impl Fn(u64, u64)) -> skep_engine::Result<Runner> {
        let bar = Bar::new("loading", &self.model);
        Runner::load(&self.model, options, &mut |progress| {
            if let Progress::Loading { done_bytes, total_bytes } = progress {
                bar.update(done_bytes, total_bytes);
                watch(done_bytes, total_bytes);
            }
        })
    }
}

/// A bar on stderr while a file is loaded or written; none when nobody watches.
pub(crate) struct Bar {
    bar: ProgressBar,
}

impl Bar {
    pub(crate) fn new(verb: &str, path: &Path) -> Self {
        if !std::io::stderr().is_terminal() {
            return Self { bar: ProgressBar::hidden() };
        }
        let bar = ProgressBar::no_length();
        let template = "{prefix} {msg} {wide_bar} {bytes}/{total_bytes}";
        bar.set_style(
            ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar()),
        );
        bar.set_prefix(verb.to_owned());
        let name = path.file_name().unwrap_or(path.as_os_str()).to_string_lossy();
        bar.set_message(name.chars().filter(|c| !c.is_control()).collect::<String>());
        bar.enable_steady_tick(Duration::from_millis(100));
        Self { bar }
    }

    pub(crate) fn update(&self, done: u64, total: u64) {
        self.bar.set_length(total);
        self.bar.set_position(done);
    }
}

impl Drop for Bar {
    fn drop(&mut self) {
        self.bar.finish_and_clear();
    }
}

/// How tokens are picked; what is left out comes from the file.
#[derive(Debug, clap::Args)]
#[command(next_help_heading = "Sampling")]
pub(crate) struct SamplingArgs {
    /// Temperature; 0 always takes the likeliest token
    #[arg(long, value_name = "T")]
    temp: Option<f32>,
    /// Only the K likeliest tokens; 0 for all
    #[arg(long, value_name = "K")]
    top_k: Option<u32>,
    /// Only the likeliest tokens that make up this probability
    #[arg(long, value_name = "P")]
    top_p: Option<f32>,
    /// Only tokens at least this likely, relative to the likeliest
    #[arg(long, value_name = "P")]
    min_p: Option<f32>,
    /// Divides the logits of tokens that were there before; 1 for none
    #[arg(long, value_name = "X")]
    repeat_penalty: Option<f32>,
    /// Makes the choice of tokens repeatable
    #[arg(long, value_name = "N")]
    seed: Option<u64>,
}

impl SamplingArgs {
    /// The given defaults with what the command line says.
    pub(crate) fn apply(&self, mut sampling: Sampling) -> Result<Sampling, Failure> {
        sampling.temperature = self.temp.unwrap_or(sampling.temperature);
        sampling.top_k = self.top_k.unwrap_or(sampling.top_k);
        sampling.top_p = self.top_p.unwrap_or(sampling.top_p);
        sampling.min_p = self.min_p.unwrap_or(sampling.min_p);
        sampling.repetition_penalty = self.repeat_penalty.unwrap_or(sampling.repetition_penalty);
        sampling.seed = self.seed;
        sampling.validate().map_err(|error| Failure::usage(error.to_string()))?;
        Ok(sampling)
    }
}

/// Parses the soft tokens of an image.
fn budget(text: &str) -> Result<Budget, String> {
    let tokens = text.parse().map_err(|_| "must be one of 70, 140, 280, 560, 1120")?;
    Budget::new(tokens).map_err(|error| error.to_string())
}

/// Parses a whole number above zero.
pub(crate) fn positive(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(0) | Err(_) => Err("must be a whole number above 0".into()),
        Ok(number) => Ok(number),
    }
}

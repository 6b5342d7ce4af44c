//! `skep logits`: the numbers behind the tokens, for comparison with other implementations.

use crate::failure::Failure;
use crate::model::ModelArgs;
use serde::Deserialize;
use skep_engine::{Batch, Runner, SequenceId, Want};
use std::fs::File;
use std::io::BufWriter;
use std::path::{Path, PathBuf};

/// Runs given token ids and writes the logits of every token
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    model: ModelArgs,
    /// JSON file with `prompt_ids` and, optionally, `decode_ids`
    #[arg(long, value_name = "FILE.json")]
    ids: PathBuf,
    /// Where to write the array, f32 [n_tokens, n_vocab], prompt rows first
    #[arg(long, value_name = "FILE.npy")]
    out: PathBuf,
    /// Tokens of a prefill chunk
    #[arg(long, value_name = "N", default_value_t = 512, value_parser = clap::builder::RangedU64ValueParser::<usize>::new().range(1..))]
    chunk: usize,
}

/// What the ids file holds; other keys are ignored.
#[derive(Debug, Deserialize)]
struct Ids {
    prompt_ids: Vec<u32>,
    #[serde(default)]
    decode_ids: Vec<u32>,
}

pub(crate) fn run(args: &Args) -> Result<(), Failure> {
    let ids = read_ids(&args.ids)?;
    let mut runner = args.model.load(|options| {
        // The ids say how much context is needed; the default could be gigabytes.
        options.context.get_or_insert((ids.prompt_ids.len() + ids.decode_ids.len()).max(1));
    })?;
    let rows = all_logits(&mut runner, &ids, args.chunk)?;
    let file = File::create(&args.out).map_err(|error| Failure::file(&args.out, &error))?;
    crate::npy::write(&mut BufWriter::new(file), runner.info().n_vocab, &rows)
        .map_err(|error| Failure::file(&args.out, &error))
}

fn read_ids(path: &Path) -> Result<Ids, Failure> {
    let text = std::fs::read_to_string(path).map_err(|error| Failure::file(path, &error))?;
    let ids: Ids = serde_json::from_str(&text)
        .map_err(|error| Failure::other(format!("{}: {error}", path.display())))?;
    if ids.prompt_ids.is_empty() {
        return Err(Failure::other(format!("{}: prompt_ids is empty", path.display())));
    }
    Ok(ids)
}

fn all_logits(runner: &mut Runner, ids: &Ids, chunk: usize) -> Result<Vec<f32>, Failure> {
    let sequence = runner.open()?;
    let mut rows = Vec::new();
    let mut step = |runner: &mut Runner, sequence: SequenceId, tokens: &[u32]| -> Result<(), Failure> {
        rows.extend_from_slice(runner.step(&Batch::of(sequence, tokens, Want::All))?);
        Ok(())
    };
    for tokens in ids.prompt_ids.chunks(chunk) {
        step(runner, sequence, tokens)?;
    }
    for token in &ids.decode_ids {
        step(runner, sequence, std::slice::from_ref(token))?;
    }
    runner.close(sequence);
    Ok(rows)
}

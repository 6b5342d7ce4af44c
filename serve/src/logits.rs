//! `skep logits`: the numbers behind the tokens, for comparison with other implementations.

use crate::failure::Failure;
use crate::model::ModelArgs;
use crate::picture;
use serde::Deserialize;
use skep_engine::chat::Image;
use skep_engine::{Batch, ImageRows, Piece, Runner, Want};
use std::fs::File;
use std::io::BufWriter;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Runs given token ids and writes the logits of every token
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    model: ModelArgs,
    /// JSON file with `prompt_ids` and, optionally, `decode_ids`
    #[arg(long, value_name = "FILE.json")]
    ids: PathBuf,
    /// Picture whose embeddings stand in place of the next run of placeholders in prompt_ids; may be repeated
    #[arg(long, value_name = "FILE")]
    image: Vec<PathBuf>,
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
    #[serde(alias = "ids")]
    prompt_ids: Vec<u32>,
    #[serde(default)]
    decode_ids: Vec<u32>,
}

pub(crate) fn run(args: &Args) -> Result<(), Failure> {
    let ids = read_ids(&args.ids)?;
    let images = picture::read_all(&args.image)?;
    let mut runner = args.model.load(|options| {
        // The ids say how much context is needed; the default could be gigabytes.
        options.context.get_or_insert((ids.prompt_ids.len() + ids.decode_ids.len()).max(1));
    })?;
    let spans = spans(&mut runner, &ids, &images)?;
    let rows = all_logits(&mut runner, &ids, &spans, args.chunk)?;
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

/// Where an image stands in the prompt.
struct Span {
    tokens: Range<usize>,
    /// Its embeddings, `[tokens, hidden]`.
    rows: Arc<[f32]>,
}

/// Encodes the images and finds their places: runs of the model's placeholder token, in order.
fn spans(runner: &mut Runner, ids: &Ids, images: &[Image]) -> Result<Vec<Span>, Failure> {
    if images.is_empty() {
        return Ok(Vec::new());
    }
    let Some(markers) = runner.tokenizer().image_markers() else {
        return Err(Failure::other("the model's vocabulary has no placeholder for images"));
    };
    let places = runs(&ids.prompt_ids, markers.soft);
    if places.len() != images.len() {
        let message =
            format!("{} image(s) were given, but prompt_ids has places for {}", images.len(), places.len());
        return Err(Failure::usage(message));
    }
    let mut spans = Vec::with_capacity(images.len());
    for (tokens, image) in places.into_iter().zip(images) {
        let needed = runner.image_tokens(image)?;
        if needed != tokens.len() {
            let message = format!(
                "an image takes {needed} tokens, but prompt_ids has {} placeholders for it; see --image-tokens",
                tokens.len()
            );
            return Err(Failure::usage(message));
        }
        spans.push(Span { tokens, rows: runner.encode_image(image)? });
    }
    Ok(spans)
}

/// The runs of one token among others.
fn runs(ids: &[u32], token: u32) -> Vec<Range<usize>> {
    let mut runs: Vec<Range<usize>> = Vec::new();
    for at in (0..ids.len()).filter(|&at| ids[at] == token) {
        match runs.last_mut() {
            Some(run) if run.end == at => run.end += 1,
            _ => runs.push(at..at + 1),
        }
    }
    runs
}

/// The end of the chunk that begins at `start`: no image is split, be a chunk shorter or longer for it.
fn chunk_end(start: usize, chunk: usize, len: usize, spans: &[Span]) -> usize {
    let end = start.saturating_add(chunk).min(len);
    match spans.iter().find(|span| span.tokens.start < end && end < span.tokens.end) {
        Some(span) if span.tokens.start > start => span.tokens.start,
        Some(span) => span.tokens.end,
        None => end,
    }
}

fn all_logits(runner: &mut Runner, ids: &Ids, spans: &[Span], chunk: usize) -> Result<Vec<f32>, Failure> {
    let sequence = runner.open()?;
    let mut rows = Vec::new();
    let mut step = |runner: &mut Runner, tokens: &[u32], images: &[ImageRows<'_>]| -> Result<(), Failure> {
        let mut batch = Batch::new();
        batch.push(Piece { sequence, tokens, images, want: Want::All });
        rows.extend_from_slice(runner.step(&batch)?);
        Ok(())
    };
    let mut start = 0;
    while start < ids.prompt_ids.len() {
        let end = chunk_end(start, chunk, ids.prompt_ids.len(), spans);
        let within = spans.iter().filter(|span| (start..end).contains(&span.tokens.start));
        let images: Vec<_> =
            within.map(|span| ImageRows { at: span.tokens.start - start, rows: &span.rows }).collect();
        step(runner, &ids.prompt_ids[start..end], &images)?;
        start = end;
    }
    for token in &ids.decode_ids {
        step(runner, std::slice::from_ref(token), &[])?;
    }
    runner.close(sequence);
    Ok(rows)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn images_stand_where_their_placeholders_run() {
        assert_eq!(runs(&[7, 1, 7, 7, 2, 7], 7), [0..1, 2..4, 5..6]);
        assert!(runs(&[1, 2], 7).is_empty());
    }

    #[test]
    fn chunks_do_not_split_images() {
        let spans = [3..6, 6..8].map(|tokens| Span { tokens, rows: Arc::from([]) });
        let ends = |chunk| {
            let mut ends = vec![0];
            while *ends.last().unwrap() < 10 {
                ends.push(chunk_end(*ends.last().unwrap(), chunk, 10, &spans));
            }
            ends
        };
        assert_eq!(ends(1), [0, 1, 2, 3, 6, 8, 9, 10]);
        assert_eq!(ends(2), [0, 2, 3, 6, 8, 10]);
        assert_eq!(ends(4), [0, 3, 6, 10]);
        assert_eq!(ends(7), [0, 6, 10]);
        assert_eq!(ends(usize::MAX), [0, 10]);
    }
}

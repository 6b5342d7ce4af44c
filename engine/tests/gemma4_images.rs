//! Images in Gemma 4: their rows among tokens, what they see, and that nothing around them matters.

mod common;

use common::{Array, load, max_difference, shared, top};
use skep_engine::{Batch, ErrorKind, ImageRows, Piece, Precision, Runner, SequenceId, Want};
use std::ops::Range;
use std::path::Path;

/// A prompt with an image, and what Hugging Face makes of it.
struct Fixture {
    ids: Vec<u32>,
    span: Range<usize>,
    rows: Vec<f32>,
    /// Logits of the tokens behind the image.
    after: Array,
}

impl Fixture {
    fn read(oracle: &Path) -> Self {
        let text = std::fs::read_to_string(oracle.join("gemma4-nano.image.ids.json")).unwrap();
        let json: serde_json::Value = serde_json::from_str(&text).unwrap();
        let numbers = |key: &str| -> Vec<u32> {
            json[key].as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect()
        };
        let span = numbers("image_span");
        Self {
            ids: numbers("prompt_ids"),
            span: span[0] as usize..span[1] as usize,
            rows: Array::read(&oracle.join("gemma4-nano.hf.image_embd.npy")).values,
            after: Array::read(&oracle.join("gemma4-nano.hf.image_logits_after.npy")),
        }
    }

    /// Logits of the tokens behind the image, when the prompt is cut at `cuts`.
    fn run(&self, runner: &mut Runner, cuts: &[usize]) -> Vec<f32> {
        let sequence = runner.open().unwrap();
        let (mut all, mut start) = (Vec::new(), 0);
        for &end in cuts {
            let images = [ImageRows { at: self.span.start.saturating_sub(start), rows: &self.rows }];
            let images = if (start..end).contains(&self.span.start) { &images[..] } else { &[] };
            let piece = Piece { sequence, tokens: &self.ids[start..end], images, want: Want::All };
            all.extend_from_slice(step(runner, piece));
            start = end;
        }
        runner.close(sequence);
        all.split_off(self.span.end * runner.info().n_vocab)
    }
}

fn step<'r>(runner: &'r mut Runner, piece: Piece<'_>) -> &'r [f32] {
    let mut batch = Batch::new();
    batch.push(piece);
    runner.step(&batch).unwrap()
}

#[test]
fn text_behind_an_image_is_that_of_hugging_face_wherever_the_prompt_is_cut() {
    let Some(shared) = shared() else { return };
    let oracle = shared.join("oracle");
    let fixture = Fixture::read(&oracle);
    let mut runner = load(&oracle.join("gemma4-nano-f32.gguf"), Precision::Exact);
    let vocab = runner.info().n_vocab;
    let (n, Range { start, end }) = (fixture.ids.len(), fixture.span.clone());
    let whole = fixture.run(&mut runner, &[n]);
    let mut worst = 0.0_f32;
    for (row, found) in whole.chunks_exact(vocab).enumerate() {
        worst = worst.max(max_difference(found, fixture.after.row(row)));
        assert_eq!(top(found), top(fixture.after.row(row)), "row {row}");
    }
    println!("max difference {worst:.1e}");
    assert!(worst <= 2e-4, "{worst}");
    for cuts in [&[start, end, n][..], &[1, end, n], &[start - 2, end + 1, n], &[start, end + 3, end + 4, n]]
    {
        assert!(fixture.run(&mut runner, cuts) == whole, "cut at {cuts:?}");
    }
}

#[test]
fn the_rows_and_their_place_count() {
    let Some(shared) = shared() else { return };
    let oracle = shared.join("oracle");
    let fixture = Fixture::read(&oracle);
    let mut runner = load(&oracle.join("gemma4-nano-f32.gguf"), Precision::Exact);
    let n = fixture.ids.len();
    let whole = fixture.run(&mut runner, &[n]);
    let mut far = |what: &str, changed: Fixture| {
        let difference = max_difference(&changed.run(&mut runner, &[n]), &whole);
        assert!(difference > 0.05, "{what}: {difference}");
    };
    let with_rows = |rows: Vec<f32>| Fixture { rows, ..Fixture::read(&oracle) };
    let mut backwards = Vec::new();
    fixture.rows.chunks_exact(256).rev().for_each(|row| backwards.extend_from_slice(row));
    far("rows backwards", with_rows(backwards));
    // Embeddings of images are not scaled as those of tokens are.
    far("scaled rows", with_rows(fixture.rows.iter().map(|value| value * 16.0).collect()));
    // Two images in the place of one see less of each other.
    let sequence = runner.open().unwrap();
    let (left, right) = fixture.rows.split_at(35 * 256);
    let start = fixture.span.start;
    let images = [ImageRows { at: start, rows: left }, ImageRows { at: start + 35, rows: right }];
    let piece = Piece { sequence, tokens: &fixture.ids, images: &images, want: Want::All };
    let vocab = runner.info().n_vocab;
    let apart = step(&mut runner, piece)[fixture.span.end * vocab..].to_vec();
    runner.close(sequence);
    let difference = max_difference(&apart, &whole);
    assert!(difference > 0.05, "{difference}");
}

#[test]
fn neighbours_see_nothing_of_an_image() {
    let Some(shared) = shared() else { return };
    let oracle = shared.join("oracle");
    let fixture = Fixture::read(&oracle);
    let mut runner = load(&oracle.join("gemma4-nano-q8_0.gguf"), Precision::Fast);
    let images = [ImageRows { at: fixture.span.start, rows: &fixture.rows }];
    let piece =
        |sequence: SequenceId, images| Piece { sequence, tokens: &fixture.ids, images, want: Want::Last };
    let mut alone = Vec::new();
    for images in [&images[..], &[]] {
        let sequence = runner.open().unwrap();
        alone.extend_from_slice(step(&mut runner, piece(sequence, images)));
        runner.close(sequence);
    }
    let (a, b) = (runner.open().unwrap(), runner.open().unwrap());
    let mut batch = Batch::new();
    batch.push(piece(a, &images));
    batch.push(piece(b, &[]));
    assert!(runner.step(&batch).unwrap() == alone);
    runner.close(a);
    runner.close(b);
}

#[test]
fn images_that_do_not_fit_are_refused() {
    let Some(shared) = shared() else { return };
    let mut runner = load(&shared.join("oracle/gemma4-nano-f32.gguf"), Precision::Exact);
    let (sequence, rows) = (runner.open().unwrap(), vec![0.5; 3 * 256]);
    for images in [
        &[ImageRows { at: 3, rows: &rows }][..],
        &[ImageRows { at: usize::MAX, rows: &rows }],
        &[ImageRows { at: 0, rows: &rows[..100] }],
        &[ImageRows { at: 0, rows: &[] }],
        &[ImageRows { at: 0, rows: &rows }, ImageRows { at: 2, rows: &rows }],
    ] {
        let mut batch = Batch::new();
        batch.push(Piece { sequence, tokens: &[5; 5], images, want: Want::Last });
        let error = runner.step(&batch).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Request);
        assert!(error.to_string().contains("image"), "{error}");
        assert_eq!(runner.len(sequence), 0);
    }
    let mut qwen = load(&shared.join("oracle/qwen35moe-nano-q8_0.gguf"), Precision::Fast);
    let sequence = qwen.open().unwrap();
    let images = [ImageRows { at: 0, rows: &rows }];
    let mut batch = Batch::new();
    batch.push(Piece { sequence, tokens: &[5; 5], images: &images, want: Want::Last });
    assert_eq!(qwen.step(&batch).unwrap_err().to_string(), "this model takes no images");
}

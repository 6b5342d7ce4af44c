//! Results do not depend on company: neighbours in a batch, chunks, earlier sequences.

mod common;

use common::{Ids, load, max_difference, models, top};
use skep_engine::{Batch, ErrorKind, Piece, Precision, Runner, Want};

fn bundled() -> Runner {
    load(&models().join("tiny-qwen35moe-Q4_K_M.gguf"), Precision::Fast)
}

fn prompt() -> Vec<u32> {
    Ids::read(&models().join("tiny-qwen35moe-Q4_K_M.ids.json")).prompt
}

/// Logits of the last token, after tokens given in pieces of `chunk`.
fn alone(runner: &mut Runner, tokens: &[u32], chunk: usize) -> Vec<f32> {
    let sequence = runner.open().unwrap();
    let mut last = Vec::new();
    for piece in tokens.chunks(chunk) {
        last = runner.step(&Batch::of(sequence, piece, Want::Last)).unwrap().to_vec();
    }
    runner.close(sequence);
    last
}

#[test]
fn neighbours_change_no_bit() {
    let mut runner = bundled();
    let tokens = prompt();
    let (a, b, c) = (&tokens[..40], &tokens[40..41], &tokens[50..120]);
    let apart: Vec<Vec<f32>> = [a, b, c].iter().map(|tokens| alone(&mut runner, tokens, 512)).collect();

    let sequences: Vec<_> = (0..3).map(|_| runner.open().unwrap()).collect();
    let mut batch = Batch::new();
    for (&sequence, tokens) in sequences.iter().zip([a, b, c]) {
        batch.push(Piece { sequence, tokens, images: &[], want: Want::Last });
    }
    let vocab = runner.info().n_vocab;
    let together = runner.step(&batch).unwrap().to_vec();
    for (index, row) in together.chunks_exact(vocab).enumerate() {
        assert!(row == apart[index], "sequence {index} has other logits in company");
    }
    // One prefills while the others decode, rows in another order than the sequences were opened.
    let mut batch = Batch::new();
    for (index, tokens) in [(2, &tokens[120..121]), (0, &tokens[40..60]), (1, &tokens[41..42])] {
        batch.push(Piece { sequence: sequences[index], tokens, images: &[], want: Want::Last });
    }
    let together = runner.step(&batch).unwrap().to_vec();
    sequences.iter().for_each(|&sequence| runner.close(sequence));
    for (row, (first, second)) in
        together.chunks_exact(vocab).zip([(c, &tokens[120..121]), (a, &tokens[40..60]), (b, &tokens[41..42])])
    {
        let sequence = runner.open().unwrap();
        runner.step(&Batch::of(sequence, first, Want::Nothing)).unwrap();
        let expected = runner.step(&Batch::of(sequence, second, Want::Last)).unwrap().to_vec();
        runner.close(sequence);
        assert!(row == expected, "other logits in company");
    }
}

#[test]
fn chunks_change_no_token() {
    let mut runner = bundled();
    let tokens = prompt();
    let whole = alone(&mut runner, &tokens, 512);
    for chunk in [1, 3, 7, 63, 64, 65, 128] {
        let cut = alone(&mut runner, &tokens, chunk);
        assert_eq!(top(&cut), top(&whole), "chunk {chunk}");
        let difference = max_difference(&cut, &whole);
        assert!(difference < 0.5, "chunk {chunk}: {difference}");
    }
}

#[test]
fn a_sequence_starts_from_nothing() {
    let mut runner = bundled();
    let tokens = prompt();
    let fresh = alone(&mut runner, &tokens, 512);
    let other = runner.open().unwrap();
    runner.step(&Batch::of(other, &tokens[60..], Want::Nothing)).unwrap();
    runner.close(other);
    assert!(alone(&mut runner, &tokens, 512) == fresh, "state of an earlier sequence was left behind");
}

#[test]
fn every_row_can_be_asked_for() {
    let mut runner = bundled();
    let vocab = runner.info().n_vocab;
    let tokens = &prompt()[..9];
    let sequence = runner.open().unwrap();
    let all = runner.step(&Batch::of(sequence, tokens, Want::All)).unwrap().to_vec();
    assert_eq!(all.len(), 9 * vocab);
    runner.close(sequence);
    assert!(all[8 * vocab..] == alone(&mut runner, tokens, 512));
    let sequence = runner.open().unwrap();
    assert!(runner.step(&Batch::of(sequence, tokens, Want::Nothing)).unwrap().is_empty());
    assert_eq!(runner.len(sequence), 9);
}

#[test]
fn what_cannot_run_is_refused_and_changes_nothing() {
    let mut runner = bundled();
    let tokens = prompt();
    let sequence = runner.open().unwrap();
    let vocab = runner.info().n_vocab as u32;
    let refused = |runner: &mut Runner, batch: &Batch<'_>| runner.step(batch).unwrap_err().kind();
    assert_eq!(refused(&mut runner, &Batch::of(sequence, &[vocab], Want::Last)), ErrorKind::Request);
    let long = vec![1; 1025];
    let kind = refused(&mut runner, &Batch::of(sequence, &long, Want::Last));
    assert_eq!(kind, ErrorKind::ContextLength { prompt: 1025, limit: 1024 });
    let mut twice = Batch::of(sequence, &tokens[..2], Want::Last);
    twice.push(Piece { sequence, tokens: &tokens[2..3], images: &[], want: Want::Last });
    assert_eq!(refused(&mut runner, &twice), ErrorKind::Request);
    assert_eq!(runner.len(sequence), 0);
    let after = runner.step(&Batch::of(sequence, &tokens, Want::Last)).unwrap().to_vec();
    runner.close(sequence);
    assert_eq!(refused(&mut runner, &Batch::of(sequence, &tokens[..1], Want::Last)), ErrorKind::Request);
    assert!(after == alone(&mut runner, &tokens, 512));
    let all: Vec<_> = (0..3).map(|_| runner.open().unwrap()).collect();
    assert_eq!(runner.open().unwrap_err().kind(), ErrorKind::Busy);
    all.into_iter().for_each(|sequence| runner.close(sequence));
}

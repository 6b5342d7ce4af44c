//! Deltas put together.

use skep_engine::stream::{Delta, Splitter};

/// What a client has at the end: reasoning, content, and name and arguments of each call.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct Answer {
    pub(crate) reasoning: String,
    pub(crate) content: String,
    pub(crate) calls: Vec<(String, String)>,
}

impl Answer {
    pub(crate) fn of(deltas: &[Delta]) -> Self {
        let mut answer = Self::default();
        for delta in deltas {
            match delta {
                Delta::Reasoning(text) => {
                    assert!(!text.is_empty());
                    answer.reasoning += text;
                }
                Delta::Content(text) => {
                    assert!(!text.is_empty());
                    answer.content += text;
                }
                Delta::ToolCallStart { index, id, name } => {
                    assert_eq!(*index, answer.calls.len());
                    assert!(id.starts_with("call_"));
                    answer.calls.push((name.clone(), String::new()));
                }
                Delta::ToolCallArguments { index, text } => answer.calls[*index].1 += text,
                _ => panic!("{delta:?}"),
            }
        }
        answer
    }

    pub(crate) fn new(reasoning: &str, content: &str, calls: &[(&str, &str)]) -> Self {
        let calls = calls.iter().map(|(name, arguments)| ((*name).into(), (*arguments).into())).collect();
        Self { reasoning: reasoning.into(), content: content.into(), calls }
    }
}

pub(crate) fn split(splitter: &Splitter, pieces: &[&str]) -> Answer {
    let (mut splitter, mut deltas) = (splitter.clone(), Vec::new());
    for piece in pieces {
        splitter.push(piece, &mut deltas);
    }
    splitter.finish(&mut deltas);
    Answer::of(&deltas)
}

/// The answer to a text, which must be the same however it is cut in up to three pieces, or into single characters.
pub(crate) fn at_every_cut(splitter: &Splitter, text: &str) -> Answer {
    let answer = split(splitter, &[text]);
    let cuts: Vec<usize> = text.char_indices().map(|(at, _)| at).collect();
    for (order, &first) in cuts.iter().enumerate() {
        for &second in &cuts[order..] {
            let pieces = [&text[..first], &text[first..second], &text[second..]];
            assert_eq!(split(splitter, &pieces), answer, "{pieces:?}");
        }
    }
    let single: Vec<String> = text.chars().map(String::from).collect();
    assert_eq!(split(splitter, &single.iter().map(String::as_str).collect::<Vec<_>>()), answer);
    answer
}

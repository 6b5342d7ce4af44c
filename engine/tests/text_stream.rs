//! Streams of tokens against the text they stand for: the result must not depend on the cut.

mod text_support;

use std::sync::Arc;

use serde_json::{Value, json};
use skep_engine::stream::{Delta, Markup, Splitter, Stream, StreamOptions, Tools};
use skep_engine::tokenizer::Specials;
use text_support::answer::{Answer, at_every_cut};
use text_support::{tiny, tokenizer};

const CALL: &str = "<tool_call>\n<function=f>\n<parameter=n>\n3\n</parameter>\n<parameter=s>\na<b && \"q\"\n</parameter>\n</function>\n</tool_call>";

fn tools() -> Value {
    json!([{"type": "function", "function": {"name": "f", "parameters": {
        "type": "object",
        "properties": {"n": {"type": "number"}, "s": {"type": "string"}},
    }}}])
}

fn with_tools(in_reasoning: bool) -> Splitter {
    Splitter::new(Markup::Qwen, in_reasoning, Some(Tools::new(tools().as_array().unwrap()).unwrap()))
}

const ARGUMENTS: &str = r#"{"n":3,"s":"a<b && \"q\""}"#;

#[test]
fn a_call_behind_text() {
    let answer = at_every_cut(&with_tools(false), &format!("Sure.\n{CALL}"));
    assert_eq!(answer, Answer::new("", "Sure.", &[("f", ARGUMENTS)]));
}

#[test]
fn two_calls_and_nothing_else() {
    let answer = at_every_cut(&with_tools(false), &format!("{CALL}\n{CALL}\n"));
    assert_eq!(answer, Answer::new("", "", &[("f", ARGUMENTS), ("f", ARGUMENTS)]));
}

#[test]
fn a_call_behind_a_thought() {
    let text = format!("thinking of <tool_call> and\n{CALL}\n</think>\n\n{CALL}");
    let answer = at_every_cut(&with_tools(true), &text);
    assert_eq!(answer, Answer::new(&format!("thinking of <tool_call> and\n{CALL}"), "", &[("f", ARGUMENTS)]));
}

#[test]
fn markup_is_content_without_tools() {
    let text = format!("Sure.\n{CALL}\n</think>\n");
    assert_eq!(at_every_cut(&Splitter::new(Markup::Qwen, false, None), &text), Answer::new("", &text, &[]));
}

#[test]
fn what_is_no_call_is_content() {
    let inner = &CALL["<tool_call>\n".len()..];
    for (text, content, calls) in [
        // Cut off inside the call.
        (&CALL[..CALL.len() - 20], &CALL[..CALL.len() - 20], 0),
        (&format!("Sure.\n {}", &CALL[..30]), &format!("Sure.\n {}", &CALL[..30]), 0),
        ("x <tool_ca", "x <tool_ca", 0),
        // Only closing tags are missing.
        (CALL.trim_end_matches("\n</tool_call>"), "", 1),
        (&CALL[..CALL.len() - 3], "", 1),
        // Other things in place of a call, then one.
        ("<tool_call>hello</tool_call> you", "<tool_call>hello</tool_call> you", 0),
        (&format!("<tool_call>\n{CALL}"), "<tool_call>", 1),
        (&format!("{}\n{CALL}", &CALL[..24]), &CALL[..24], 1),
        // Text between and behind calls.
        (&format!("{CALL}\n\nand\n{CALL}\nend"), "andend", 2),
        // Two functions in one call.
        (&format!("<tool_call>\n{}\n{inner}", inner.trim_end_matches("\n</tool_call>")), "", 2),
    ] {
        let answer = at_every_cut(&with_tools(false), text);
        assert_eq!((answer.content.as_str(), answer.calls.len()), (content, calls), "{text}");
    }
}

#[test]
fn json_calls() {
    let call = r#"<tool_call>{"name": "f", "arguments": {"s": "</tool_call>", "n": 1}}</tool_call>"#;
    let answer = at_every_cut(&with_tools(false), &format!("ok {call}\n{call}"));
    let arguments = r#"{"s":"</tool_call>","n":1}"#;
    assert_eq!(answer, Answer::new("", "ok", &[("f", arguments), ("f", arguments)]));
    let open = call.trim_end_matches("</tool_call>");
    assert_eq!(at_every_cut(&with_tools(false), open).calls.len(), 1);
    assert_eq!(at_every_cut(&with_tools(false), &open[..40]), Answer::new("", &open[..40], &[]));
}

#[test]
fn reasoning_and_content() {
    for (in_reasoning, text, reasoning, content) in [
        (true, "abc</think>\n\nHi", "abc", "Hi"),
        (true, "\nabc\n</think>\n\nHi \n", "abc", "Hi \n"),
        (true, "abc", "abc", ""),
        (true, "</think>Hi", "", "Hi"),
        (true, "\n\n</think>\n\n", "", ""),
        (true, "a </thin b </think></think>", "a </thin b", "</think>"),
        (true, "abc </thi", "abc </thi", ""),
        (false, "Hi", "", "Hi"),
        (false, " \nHi <think>", "", " \nHi <think>"),
        (false, "<think>a</think>b", "", "<think>a</think>b"),
    ] {
        for tools in [None, Some(Tools::default())] {
            let answer = at_every_cut(&Splitter::new(Markup::Qwen, in_reasoning, tools), text);
            assert_eq!(answer, Answer::new(reasoning, content, &[]), "{text}");
        }
    }
    for (text, reasoning, content) in [
        ("\n<think>\na\n</think>\nb", "a", "b"),
        ("<thin", "", "<thin"),
        ("x<think>", "", "x<think>"),
        (" ", "", " "),
    ] {
        let splitter = Splitter::new(Markup::Qwen, false, None).detect_reasoning();
        assert_eq!(at_every_cut(&splitter, text), Answer::new(reasoning, content, &[]), "{text}");
    }
}

fn stream(in_reasoning: bool, tools: &Value, stop: &[&str]) -> Stream {
    let options = StreamOptions {
        starts_in_reasoning: in_reasoning,
        tools: tools.as_array().unwrap().clone(),
        stop: stop.iter().map(|&stop| stop.to_owned()).collect(),
        ..StreamOptions::default()
    };
    Stream::new(Arc::new(tokenizer(&tiny())), options).unwrap()
}

/// The answer to a text given byte by byte, and whether a stop string ended it.
fn by_bytes(mut stream: Stream, text: &[u8]) -> (Answer, bool) {
    let tokenizer = tokenizer(&tiny());
    let by_byte: Vec<u32> = (0..=255u8)
        .map(|byte| (0..tokenizer.n_vocab() as u32).find(|&id| tokenizer.token_bytes(id) == [byte]).unwrap())
        .collect();
    let mut deltas = Vec::new();
    let stopped = text.iter().any(|&byte| stream.push(by_byte[byte as usize], &mut deltas));
    assert_eq!(stopped, stream.stopped());
    stream.finish(&mut deltas);
    (Answer::of(&deltas), stream.stopped())
}

#[test]
fn tokens_become_deltas() {
    let tokenizer = tokenizer(&tiny());
    let text = format!("Let me see 😀.\n</think>\n\nSure, あ.\n{CALL}<|im_end|>");
    let mut stream = stream(true, &tools(), &[]);
    let mut deltas = Vec::new();
    for id in tokenizer.encode(&text, Specials::Parse).unwrap() {
        assert!(!stream.push(id, &mut deltas));
    }
    assert!(!stream.in_reasoning());
    assert_eq!(stream.tool_calls(), 1);
    stream.finish(&mut deltas);
    assert_eq!(Answer::of(&deltas), Answer::new("Let me see 😀.", "Sure, あ.", &[("f", ARGUMENTS)]));
}

#[test]
fn control_tokens_show_nothing_and_cut_characters() {
    let tokenizer = tokenizer(&tiny());
    let start = tokenizer.id_of("<|im_start|>").unwrap();
    let byte =
        |byte| (0..tokenizer.n_vocab() as u32).find(|&id| tokenizer.token_bytes(id) == [byte]).unwrap();
    let mut stream = stream(false, &json!([]), &[]);
    let mut deltas = Vec::new();
    for id in [byte(b'a'), start, byte(0xE3), start, byte(0x81), byte(b'b'), byte(0xF0), u32::MAX] {
        stream.push(id, &mut deltas);
    }
    stream.finish(&mut deltas);
    assert_eq!(Answer::of(&deltas).content, "a\u{FFFD}\u{FFFD}b\u{FFFD}");
}

#[test]
fn stop_strings_end_the_visible_text() {
    let none = json!([]);
    for (in_reasoning, tools, stop, text, answer, stopped) in [
        (false, &none, &["X"][..], "aXb", Answer::new("", "a", &[]), true),
        (false, &none, &["END\n"], "a END\nb", Answer::new("", "a ", &[]), true),
        (false, &none, &["<b>", "</b>"], "x</b>", Answer::new("", "x", &[]), true),
        (false, &none, &["END"], "EN", Answer::new("", "EN", &[]), false),
        (true, &none, &["X"], "thXought</think>a", Answer::new("th", "", &[]), true),
        (true, &none, &["ab"], "a</think>b", Answer::new("a", "b", &[]), false),
        (true, &none, &["</think>"], "a</think>b", Answer::new("a", "b", &[]), false),
        (false, &none, &["é"], "caféx", Answer::new("", "caf", &[]), true),
        (false, &tools(), &["\n"], &format!("ok\n{CALL}"), Answer::new("", "ok", &[("f", ARGUMENTS)]), false),
        (false, &tools(), &["&&", "\n"], CALL, Answer::new("", "", &[("f", ARGUMENTS)]), false),
        (false, &tools(), &["\n"], "ok\nmore", Answer::new("", "ok", &[]), true),
        (false, &tools(), &["ok<"], &format!("ok{CALL}"), Answer::new("", "ok", &[("f", ARGUMENTS)]), false),
        (false, &tools(), &["k"], &format!("ok{CALL}"), Answer::new("", "o", &[]), true),
    ] {
        let given = by_bytes(stream(in_reasoning, tools, stop), text.as_bytes());
        assert_eq!(given, (answer, stopped), "{text:?} {stop:?}");
    }
}

#[test]
fn ids_of_calls_differ() {
    let mut ids = Vec::new();
    for _ in 0..2 {
        let mut deltas = Vec::new();
        let mut splitter = with_tools(false);
        splitter.push(&format!("{CALL}{CALL}"), &mut deltas);
        ids.extend(deltas.into_iter().filter_map(|delta| match delta {
            Delta::ToolCallStart { id, .. } => Some(id),
            _ => None,
        }));
    }
    ids.sort();
    ids.dedup();
    assert_eq!(ids.len(), 4);
}

#[test]
fn wrong_tools_and_stops_are_refused() {
    let tokenizer = Arc::new(tokenizer(&tiny()));
    for options in [
        StreamOptions { tools: vec![json!({})], ..StreamOptions::default() },
        StreamOptions { stop: vec![String::new(); 1000], ..StreamOptions::default() },
    ] {
        let error = Stream::new(Arc::clone(&tokenizer), options).unwrap_err();
        assert_eq!(error.kind(), skep_engine::ErrorKind::Request);
    }
}

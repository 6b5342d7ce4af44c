//! Streams in the markup of Gemma 4: the result must not depend on the cut, and no mark may be seen.

mod text_support;

use std::sync::Arc;

use proptest::prelude::*;
use serde_json::{Value, json};
use skep_engine::stream::{Markup, Splitter, Stream, StreamOptions, Tools};
use skep_engine::tokenizer::{Specials, Tokenizer};
use text_support::answer::{Answer, at_every_cut, split};
use text_support::{parts, tiny_gemma, tokenizer};

const CALL: &str = r#"<|tool_call>call:f{n:3,s:<|"|>a<b, {"q"}<|"|>}<tool_call|>"#;
const ARGUMENTS: &str = r#"{"n":3,"s":"a<b, {\"q\"}"}"#;

fn tools() -> Value {
    json!([{"type": "function", "function": {"name": "f", "parameters": {
        "type": "object",
        "properties": {
            "n": {"type": "number"},
            "s": {"type": "string"},
            "b": {"type": "boolean"},
            "o": {"type": "object", "properties": {"s": {"type": "string"}, "i": {"type": "integer"}}},
            "a": {"type": "array", "items": {"type": "string"}},
            "u": {"type": ["integer", "string"]},
        },
    }}}])
}

/// The splitter of a chat: in a thought, outside of one, or where no thought is asked for.
fn chat(thought: Option<bool>) -> Splitter {
    let tools = Tools::new(tools().as_array().unwrap()).unwrap();
    let splitter = Splitter::new(Markup::Gemma, thought == Some(true), Some(tools)).detect_reasoning();
    if thought.is_none() { splitter.without_thought() } else { splitter }
}

#[test]
fn thoughts_and_content() {
    for (in_thought, text, reasoning, content) in [
        (false, "<|channel>thought\nplan<channel|>Answer", "plan", "Answer"),
        (false, "<|channel>thought\n\nplan \n on\n<channel|>\n\nAnswer\n", "plan \n on", "Answer\n"),
        (false, "<|channel>thought\n<channel|>Answer", "", "Answer"),
        (false, "<|channel>thought<channel|>Answer", "", "Answer"),
        (false, "\n<|channel>\nplan<channel|>Answer", "plan", "Answer"),
        (false, "Answer", "", "Answer"),
        (false, " Answer <|chan", "", " Answer <|chan"),
        (false, "a < b <| c", "", "a < b <| c"),
        // Cut off.
        (false, "<|channel>thought\nplan ", "plan ", ""),
        (false, "<|channel>thought\nplan <chan", "plan <chan", ""),
        (false, "<|channel>thou", "", ""),
        (false, "<|channel>", "", ""),
        (true, "plan", "plan", ""),
        (true, "plan\n<channel|>Answer", "plan", "Answer"),
        (true, "<channel|>Answer", "", "Answer"),
        // Text in the place of a name.
        (false, "<|channel>I plan<channel|>Answer", "I plan", "Answer"),
        (false, "<|channel>thoughts and more\n<channel|>Answer", "thoughts and more", "Answer"),
        // Without the first mark.
        (false, "thought\nplan\n<channel|>Answer", "plan", "Answer"),
        (false, " thought<channel|>Answer", "", "Answer"),
        (false, "<|channel>thought\na<channel|>thought\nb<channel|>Answer", "a\nb", "Answer"),
        (false, "thought", "", "thought"),
        (false, " thought experiments\n", "", " thought experiments\n"),
        (false, "thoughts\n", "", "thoughts\n"),
        (false, "A\nthought\nb", "", "A\nthought\nb"),
        // Other channels.
        (false, "<|channel>thought\nplan<channel|><|channel>final\nAnswer<channel|>", "plan", "Answer"),
        (false, "<|channel>response\nAnswer", "", "Answer"),
        // Several thoughts, thoughts in thoughts, ends without a beginning.
        (false, "<|channel>thought\na<channel|><|channel>thought\nb<channel|>c", "a\nb", "c"),
        (false, "<|channel>thought\na<|channel>thought\nb<channel|>c<channel|>", "a\nb", "c"),
        (false, "<channel|>\nAnswer", "", "Answer"),
        (false, "a <|channel>thought\nb<channel|> c", "b", "a c"),
        (
            true,
            "a <|tool_call>call:g{}<tool_call|> b<channel|>c",
            "a <|tool_call>call:g{}<tool_call|> b",
            "c",
        ),
    ] {
        let answer = at_every_cut(&chat(Some(in_thought)), text);
        assert_eq!(answer, Answer::new(reasoning, content, &[]), "{text:?}");
    }
}

#[test]
fn an_answer_is_never_lost_in_a_thought_nobody_asked_for() {
    for (text, reasoning, content) in [
        ("Answer", "", "Answer"),
        ("<|channel>thought\nplan<channel|>Answer", "plan", "Answer"),
        ("<channel|>Answer", "", "Answer"),
        // Never closed: this is all the answer there is.
        ("<|channel>thought\nAnswer.", "", "Answer."),
        ("<|channel>thought\nAnswer <chan", "", "Answer <chan"),
        ("<|channel>Answer.", "", "Answer."),
        ("<|channel>thought\na<channel|><|channel>thought\nAnswer.", "a", "Answer."),
        ("<|channel>thought\n<|channel>thought\nAnswer.", "", "Answer."),
        ("<|channel>thought\n<|channel>", "", ""),
        // There is an answer already.
        ("Answer.<|channel>thought\nmore", "more", "Answer."),
    ] {
        assert_eq!(at_every_cut(&chat(None), text), Answer::new(reasoning, content, &[]), "{text:?}");
    }
    // A call in it is a call.
    let text = format!("<|channel>thought\nLet me see.\n{CALL}");
    assert_eq!(at_every_cut(&chat(None), &text), Answer::new("Let me see.", "", &[("f", ARGUMENTS)]));
    let text = "<|channel>thought\nAnswer <|tool_call>call:f{a:<|\"|>";
    assert_eq!(at_every_cut(&chat(None), text), Answer::new("", &text["<|channel>thought\n".len()..], &[]));
    let text = format!("{CALL}<|channel>thought\nmore");
    assert_eq!(at_every_cut(&chat(None), &text), Answer::new("more", "", &[("f", ARGUMENTS)]));
}

#[test]
fn plain_completions_show_everything() {
    let text = format!("<|channel>thought\nplan<channel|>Answer\n{CALL} ");
    assert_eq!(at_every_cut(&Splitter::new(Markup::Gemma, false, None), &text), Answer::new("", &text, &[]));
    // Without tools, the markup of calls is content.
    let chat = Splitter::new(Markup::Gemma, false, None).detect_reasoning();
    assert_eq!(at_every_cut(&chat, &text), Answer::new("plan", &format!("Answer\n{CALL} "), &[]));
}

#[test]
fn calls() {
    let g = ("g", "{}");
    for (text, content, calls) in [
        (format!("Sure.\n{CALL}"), "Sure.", vec![("f", ARGUMENTS)]),
        (format!("{CALL}{CALL}\n{CALL}\n"), "", vec![("f", ARGUMENTS); 3]),
        (format!("{CALL}\n\nand\n{CALL}\nend"), "andend", vec![("f", ARGUMENTS); 2]),
        (format!("<|channel>thought\n<channel|>\n{CALL}"), "", vec![("f", ARGUMENTS)]),
        ("<|tool_call>call:g{}<tool_call|>".to_owned(), "", vec![g]),
        ("<|tool_call> call: g { } <tool_call|>".to_owned(), "", vec![g]),
        // The closing mark may be missing, or cut.
        (CALL.trim_end_matches("<tool_call|>").to_owned(), "", vec![("f", ARGUMENTS)]),
        (CALL[..CALL.len() - 3].to_owned(), "", vec![("f", ARGUMENTS)]),
        ("<|tool_call>call:g{}<|tool_call>call:g{}".to_owned(), "", vec![g, g]),
    ] {
        assert_eq!(at_every_cut(&chat(Some(false)), &text), Answer::new("", content, &calls), "{text}");
    }
}

#[test]
fn calls_that_lack_something() {
    let (f, g) = (("f", ARGUMENTS), ("g", "{}"));
    let bare = CALL.trim_start_matches("<|tool_call>");
    for (thought, text, reasoning, content, calls) in [
        // The end of the thought.
        (Some(true), format!("plan\n{CALL}"), "plan", "", vec![f]),
        (Some(true), format!("{CALL}{CALL}"), "", "", vec![f, f]),
        (Some(false), format!("<|channel>thought\nplan {CALL}\n<channel|>"), "plan", "", vec![f]),
        // The mark.
        (Some(false), bare.to_owned(), "", "", vec![f]),
        (None, format!(" {bare}"), "", "", vec![f]),
        (Some(false), format!("<|channel>thought\nplan\n<channel|>{bare}"), "plan", "", vec![f]),
        (Some(false), format!("{CALL}{bare}\n{bare}"), "", "", vec![f, f, f]),
        (Some(false), bare.replace('f', "g"), "", &bare.replace('f', "g"), vec![]),
        (Some(false), "call: me".to_owned(), "", "call: me", vec![]),
        (Some(false), " call:f{".to_owned(), "", " call:f{", vec![]),
        (Some(true), "<channel|>\ncal".to_owned(), "", "cal", vec![]),
        (Some(false), format!("Then {bare}"), "", &format!("Then {bare}"), vec![]),
        // The last braces.
        (Some(false), "<|tool_call>call:g{<tool_call|>ok".to_owned(), "", "ok", vec![g]),
        (
            Some(false),
            "<|tool_call>call:g{a:[{b:<|\"|>}<|\"|>,c:1}]<tool_call|>".to_owned(),
            "",
            "",
            vec![("g", r#"{"a":[{"b":"}","c":1}]}"#)],
        ),
        (Some(false), "<|tool_call>call:g{a:[1,<tool_call|>".to_owned(), "", "", vec![("g", r#"{"a":[1]}"#)]),
    ] {
        assert_eq!(at_every_cut(&chat(thought), &text), Answer::new(reasoning, content, &calls), "{text}");
    }
}

#[test]
fn arguments() {
    for (arguments, json) in [
        (r#"{s:<|"|>x<|"|>}"#, r#"{"s":"x"}"#),
        (r#"{s:<|"|><|"|>}"#, r#"{"s":""}"#),
        // Marks, braces and quotes in a string are text.
        (
            r#"{s:<|"|>a <|tool_call>call:g{}<tool_call|> }]," \ é<|"|>,n:1}"#,
            r#"{"s":"a <|tool_call>call:g{}<tool_call|> }],\" \\ é","n":1}"#,
        ),
        ("{s:<|\"|>two\nlines\t<|\"|>}", r#"{"s":"two\nlines\t"}"#),
        // Nested, with types by the schema.
        (
            r#"{o:{i:3,s:4,x:{y:[1,<|"|>2<|"|>,true,null,[]]}},a:[1,<|"|>b<|"|>]}"#,
            r#"{"o":{"i":3,"s":"4","x":{"y":[1,"2",true,null,[]]}},"a":["1","b"]}"#,
        ),
        (r#"{n:<|"|>3<|"|>,b:<|"|>true<|"|>}"#, r#"{"n":3,"b":true}"#),
        (r#"{n:<|"|>three<|"|>}"#, r#"{"n":"three"}"#),
        (r#"{u:<|"|>7<|"|>}"#, r#"{"u":"7"}"#),
        ("{u:7}", r#"{"u":7}"#),
        ("{s:3.50}", r#"{"s":"3.50"}"#),
        ("{s:true}", r#"{"s":"true"}"#),
        ("{s:null}", r#"{"s":null}"#),
        ("{n:None,b:True}", r#"{"n":null,"b":true}"#),
        ("{s:{a:1}}", r#"{"s":"{\"a\":1}"}"#),
        // Numbers keep their form; what is no number is text.
        (
            "{x:1.50,y:-2e5,z:123456789012345678901234567890}",
            r#"{"x":1.50,"y":-2e5,"z":123456789012345678901234567890}"#,
        ),
        ("{x:01,y:.5,z:two words}", r#"{"x":"01","y":".5","z":"two words"}"#),
        // Order stays, the last of equal keys counts; spaces, commas and JSON's quotes are no matter.
        ("{z:1,a:2,z:3}", r#"{"z":3,"a":2}"#),
        (" { z : 1 , w : [ 2 , 3 , ] , }", r#"{"z":1,"w":[2,3]}"#),
        (r#"{"s": "x\"}", <|"|>n<|"|>: 1}"#, r#"{"s":"x\"}","n":1}"#),
        ("{$ref.x-y:1,ключ:2}", r#"{"$ref.x-y":1,"ключ":2}"#),
    ] {
        let text = format!("<|tool_call>call:f{arguments}<tool_call|>");
        assert!(serde_json::from_str::<Value>(json).is_ok());
        assert_eq!(at_every_cut(&chat(Some(false)), &text), Answer::new("", "", &[("f", json)]), "{text}");
    }
}

#[test]
fn what_is_no_call_is_content() {
    for text in [
        "<|tool_call>",
        "x <|tool_ca",
        "<|tool_call>f{}<tool_call|>",
        "<|tool_call>call:{}<tool_call|>",
        "<|tool_call>call:f",
        "<|tool_call>call:f\n{}",
        "<|tool_call>call:f<tool_call|>",
        "<|tool_call>call:f{a}<tool_call|>",
        "<|tool_call>call:f{a:}<tool_call|>",
        "<|tool_call>call:f{:1}<tool_call|>",
        "<|tool_call>call:f{a:1,b}<tool_call|>",
        "<|tool_call>call:f{a:[1}<tool_call|>",
        "<|tool_call>call:f{a:1]<tool_call|>",
        "<|tool_call>call:f{a:1",
        "<|tool_call>call:f{a:<|\"|>never closed}<tool_call|>",
        "Sure.\n <|tool_call>call:f{a:1,",
    ] {
        assert_eq!(at_every_cut(&chat(Some(false)), text), Answer::new("", text, &[]), "{text:?}");
    }
    // The next call is a call again.
    for broken in
        ["<|tool_call>", "<|tool_call>call:f{a:]<tool_call|>", "<|tool_call>call:f{a:[<|tool_call>x"]
    {
        let text = format!("{broken}{CALL}");
        assert_eq!(at_every_cut(&chat(Some(false)), &text), Answer::new("", broken, &[("f", ARGUMENTS)]));
    }
    let long = format!("<|tool_call>call:{}", "f".repeat(2000));
    assert_eq!(split(&chat(Some(false)), &[&long]), Answer::new("", &long, &[]));
    let deep = format!("<|tool_call>call:f{{a:{}", "[".repeat(100_000));
    assert_eq!(split(&chat(Some(false)), &[&deep]), Answer::new("", &deep, &[]));
}

#[test]
fn hostile_texts_take_no_more_than_their_length() {
    for piece in [
        "<|tool_call>call:f{a:<|\"|>",
        "<|tool_call>call:f{a:\"",
        "<|tool_call>call:f{a:[",
        "<|tool_call>call:f{",
        "<|tool_call>",
        "<|tool_call>call:f{a:<|\"|>\\\"",
        "<|channel>thought\n",
        "<|channel>",
        "<",
        "{a:1}",
    ] {
        let text = format!("<|tool_call>call:f{{a:<|\"|>{}", piece.repeat(20_000));
        for thought in [None, Some(false), Some(true)] {
            let started = std::time::Instant::now();
            let answer = split(&chat(thought), &[&text]);
            assert!(answer.calls.len() <= 1);
            assert!(started.elapsed().as_secs() < 10, "{piece:?}");
        }
    }
}

/// The bundled vocabulary, with the marks of channels and calls typed as given.
fn typed(kind: i32) -> Tokenizer {
    let mut parts = parts(&tiny_gemma());
    for (text, typed) in parts.tokens.iter().zip(&mut parts.types) {
        if *typed == 4 {
            assert!(text.starts_with('<'));
            *typed = kind;
        }
    }
    Tokenizer::from_parts(parts).unwrap()
}

#[test]
fn tokens_become_deltas_whatever_the_types_of_marks() {
    let text =
        format!("<|channel>thought\nLet me see 😀.\n<channel|>Sure, あ.\n{CALL}{CALL}<|tool_response>");
    for kind in [1, 3, 4] {
        let tokenizer = Arc::new(typed(kind));
        assert_eq!(Markup::of(&tokenizer), Markup::Gemma);
        let options =
            StreamOptions { tools: tools().as_array().unwrap().clone(), ..StreamOptions::default() };
        let mut stream = Stream::new(Arc::clone(&tokenizer), options).unwrap().detect_reasoning();
        let mut deltas = Vec::new();
        for id in tokenizer.encode(&text, Specials::Parse).unwrap() {
            if tokenizer.is_end(id) {
                assert_eq!(tokenizer.token_text(id), "<|tool_response>");
                break;
            }
            assert!(!stream.push(id, &mut deltas));
        }
        assert_eq!(stream.tool_calls(), 2);
        stream.finish(&mut deltas);
        let wanted = Answer::new("Let me see 😀.", "Sure, あ.", &[("f", ARGUMENTS), ("f", ARGUMENTS)]);
        assert_eq!(Answer::of(&deltas), wanted);
    }
    assert_eq!(Markup::of(&tokenizer(&text_support::tiny())), Markup::Qwen);
}

#[test]
fn stop_strings_see_no_markup() {
    let tokenizer = Arc::new(tokenizer(&tiny_gemma()));
    let run = |stop: &str, text: &str| {
        let options = StreamOptions {
            tools: tools().as_array().unwrap().clone(),
            stop: vec![stop.to_owned()],
            ..StreamOptions::default()
        };
        let mut stream = Stream::new(Arc::clone(&tokenizer), options).unwrap().detect_reasoning();
        let mut deltas = Vec::new();
        let ids = tokenizer.encode(text, Specials::Parse).unwrap();
        let stopped = ids.into_iter().any(|id| stream.push(id, &mut deltas));
        stream.finish(&mut deltas);
        (Answer::of(&deltas), stopped)
    };
    let text = format!("<|channel>thought\na plan<channel|>ok {CALL}");
    for (stop, answer, stopped) in [
        ("thought", Answer::new("a plan", "ok", &[("f", ARGUMENTS)]), false),
        ("channel", Answer::new("a plan", "ok", &[("f", ARGUMENTS)]), false),
        ("n", Answer::new("a pla", "", &[]), true),
        ("k", Answer::new("a plan", "o", &[]), true),
    ] {
        assert_eq!(run(stop, &text), (answer, stopped), "{stop}");
    }
}

fn text() -> impl Strategy<Value = Vec<String>> {
    let piece = prop_oneof![
        Just("<|channel>"),
        Just("<channel|>"),
        Just("thought\n"),
        Just("<|tool_call>"),
        Just("<tool_call|>"),
        Just("call:f{"),
        Just("<|\"|>"),
        Just("}"),
        Just("n:3,"),
        Just("s:"),
        Just("["),
        Just("]"),
        Just("\""),
        Just("\\"),
        Just("<|"),
        Just(" \n"),
        Just("é"),
        Just("word"),
    ];
    proptest::collection::vec(piece.prop_map(str::to_owned), 0..24)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1024))]

    #[test]
    fn the_cut_does_not_matter(pieces in text(), cuts in proptest::collection::vec(any::<prop::sample::Index>(), 0..6)) {
        let text = pieces.concat();
        let ends: Vec<usize> = text.char_indices().map(|(at, _)| at).chain([text.len()]).collect();
        let mut cuts: Vec<usize> = cuts.iter().map(|cut| *cut.get(&ends)).collect();
        cuts.sort_unstable();
        let bounds: Vec<usize> = [0].into_iter().chain(cuts).chain([text.len()]).collect();
        let cut: Vec<&str> = bounds.windows(2).map(|pair| &text[pair[0]..pair[1]]).collect();
        for thought in [None, Some(false), Some(true)] {
            let whole = split(&chat(thought), &[&text]);
            prop_assert_eq!(split(&chat(thought), &cut), split(&chat(thought), &[&text]));
            let parts: Vec<&str> = pieces.iter().map(String::as_str).collect();
            prop_assert_eq!(&split(&chat(thought), &parts), &whole);
            prop_assert!(!whole.content.contains("<|channel>") && !whole.content.contains("<channel|>"));
            for (_, arguments) in &whole.calls {
                prop_assert!(serde_json::from_str::<serde_json::Map<String, Value>>(arguments).is_ok());
            }
        }
    }
}

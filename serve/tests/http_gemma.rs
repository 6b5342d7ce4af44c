//! The whole way with the small Gemma 4 of this repository: every case and every picture through HTTP.

mod common;

use std::path::PathBuf;
use std::sync::LazyLock;
use std::thread;

use common::cases::{self, Said, ask_all, text};
use common::{Host, data_url, file};
use serde_json::{Value, json};
use skep_engine::Budget;

const MODEL: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../models/tiny-gemma4-Q4_K_M.gguf");
const PROJECTOR: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../models/tiny-gemma4-mmproj-bf16.gguf");
const CASES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../models/tiny-gemma4.cases.json");
const PICTURES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../models/vision/cases.json");

static HOST: LazyLock<Host> = LazyLock::new(|| {
    cases::start(MODEL, 64, |options| {
        options.sequences = 2;
        options.projector = Some(PathBuf::from(PROJECTOR));
    })
});

/// A part with a picture of the model's own set.
fn picture(name: &Value) -> Value {
    part(&file(&format!("../models/vision/{}", text(name))))
}

/// A part with a picture that was made for the tests.
fn fixture(name: &str) -> Value {
    part(&file(&format!("tests/pictures/{name}")))
}

fn part(bytes: &[u8]) -> Value {
    json!({"type": "image_url", "image_url": {"url": data_url(bytes)}})
}

/// What is answered to the content of one message, and how many tokens the prompt had.
fn ask(content: &Value) -> (String, u64) {
    converse(&json!([{"role": "user", "content": content}]))
}

fn converse(messages: &Value) -> (String, u64) {
    let body = json!({"messages": messages, "temperature": 0, "max_tokens": 100});
    let reply = HOST.chat(&body.to_string());
    let said = Said::whole(&reply);
    assert_eq!(said.finish, "stop", "{said:?}");
    (said.content, reply.json()["usage"]["prompt_tokens"].as_u64().unwrap())
}

/// What is answered to a question about a picture.
fn look(part: &Value, question: &str) -> String {
    ask(&json!([part, {"type": "text", "text": question}])).0
}

#[test]
fn whole_answers_are_right() {
    let cases = cases::load(CASES);
    assert_eq!(cases.len(), 50);
    ask_all(&HOST, &cases, false);
}

#[test]
fn streamed_answers_are_right() {
    ask_all(&HOST, &cases::load(CASES), true);
}

/// Asks every picture case and counts what is wrong: the answer, the visible rest, or the count of tokens.
fn look_at_all(stream: bool) {
    let cases = cases::load(PICTURES);
    assert_eq!(cases.len(), 21);
    let wrong: Vec<String> = cases
        .iter()
        .filter_map(|case| {
            let content = json!([picture(&case["image"]), {"type": "text", "text": case["question"]}]);
            let body = json!({
                "messages": [{"role": "user", "content": content}],
                "temperature": 0,
                "max_tokens": 100,
                "stream": stream,
                "stream_options": {"include_usage": stream},
            });
            let reply = HOST.chat(&body.to_string());
            let (said, usage) = match stream {
                true => (Said::streamed(&reply), reply.chunks().pop().unwrap()["usage"].clone()),
                false => (Said::whole(&reply), reply.json()["usage"].clone()),
            };
            let right = said.content == text(&case["expect"])
                && said.reasoning.is_none()
                && said.finish == "stop"
                && usage["prompt_tokens"] == case["prompt_tokens"];
            (!right).then(|| format!("{case}: {said:?}, {usage}"))
        })
        .collect();
    assert!(wrong.is_empty(), "{} of {} are wrong:\n{}", wrong.len(), cases.len(), wrong.join("\n"));
}

#[test]
fn pictures_are_seen() {
    look_at_all(false);
}

#[test]
fn pictures_are_seen_streamed() {
    look_at_all(true);
}

#[test]
fn the_same_again_is_answered_the_same() {
    let (rounds, cases) = if cfg!(debug_assertions) { (1, 4) } else { (2, usize::MAX) };
    for _ in 0..rounds {
        let texts = cases::load(CASES);
        ask_all(&HOST, &texts[..texts.len().min(cases)], false);
        for case in cases::load(PICTURES).iter().take(cases) {
            let said = look(&picture(&case["image"]), &text(&case["question"]));
            assert_eq!(said, text(&case["expect"]), "{case}");
        }
    }
}

#[test]
fn files_of_all_kinds_are_seen() {
    for (name, answer) in [
        ("red-cmyk.jpg", "The image is red."),
        ("red-palette.png", "The image is red."),
        ("green-icc.jpg", "The image is green."),
        ("blue-rgba.png", "The image is blue."),
        ("blue-then-red.gif", "The image is blue."),
        ("yellow.webp", "The image is yellow."),
        ("yellow-lossy.webp", "The image is yellow."),
    ] {
        assert_eq!(look(&fixture(name), "What colour is this image?"), answer, "{name}");
    }
    // Stored on its side, with the orientation in its EXIF data.
    let answer = "The left half is red and the right half is black.";
    assert_eq!(look(&fixture("turned.jpg"), "Describe the image."), answer);
}

#[test]
fn hostile_pictures_leave_the_server_as_it_was() {
    let question = json!({"type": "text", "text": "What colour is this image?"});
    let red = picture(&json!("00-solid-red.png"));
    let cut = file("../models/vision/10-shape.png")[..1000].to_vec();
    for hostile in [
        fixture("bomb.png"),
        fixture("empty.png"),
        fixture("no-rows.png"),
        fixture("line.png"),
        part(&cut),
        part(b"no picture"),
    ] {
        let content = json!([red, hostile, question]);
        let body = json!({"messages": [{"role": "user", "content": content}], "temperature": 0});
        let reply = HOST.chat(&body.to_string());
        assert_eq!(reply.status, 400, "{}", reply.body);
        assert_eq!(reply.error()["param"], "messages[0].content[1]");
        assert_eq!(look(&red, "What colour is this image?"), "The image is red.");
    }
    // As long as the tower has positions for it, and still a picture.
    let url = data_url(&file("tests/pictures/long.png"));
    let long = |detail: &str| json!({"type": "image_url", "image_url": {"url": url, "detail": detail}});
    assert_eq!(ask(&json!([long("low"), question])).1, 305 - 280 + 70);
    for stream in [false, true] {
        let content = json!([long("high"), question]);
        let body = json!({"messages": [{"role": "user", "content": content}], "stream": stream});
        let reply = HOST.chat(&body.to_string());
        assert_eq!(reply.status, 400, "{}", reply.body);
        assert!(reply.error()["message"].as_str().unwrap().contains("positions"), "{}", reply.body);
    }
}

#[test]
fn budgets_are_chosen_per_picture() {
    let text = json!({"type": "text", "text": "What colour is this image?"});
    let url = data_url(&file("../models/vision/00-solid-red.png"));
    let tokens = |image: Value| {
        let part = json!({"type": "image_url", "image_url": image});
        ask(&json!([part, text])).1
    };
    let base = 305 - 280;
    assert_eq!(tokens(json!({"url": url})), base + 280);
    assert_eq!(tokens(json!({"url": url, "detail": "auto"})), base + 280);
    assert_eq!(tokens(json!({"url": url, "detail": "low"})), base + 70);
    assert_eq!(tokens(json!({"url": url, "max_soft_tokens": 140})), base + 126);
    assert_eq!(tokens(json!({"url": url, "detail": "high"})), base + 1120);
}

#[test]
fn a_server_has_a_budget_of_its_own() {
    let host = cases::start(MODEL, 4, |options| {
        options.projector = Some(PathBuf::from(PROJECTOR));
        options.budget = Budget::new(70).unwrap();
    });
    let content =
        json!([picture(&json!("00-solid-red.png")), {"type": "text", "text": "What colour is this image?"}]);
    let body = json!({"messages": [{"role": "user", "content": content}], "temperature": 0});
    let reply = host.chat(&body.to_string());
    assert_eq!(Said::whole(&reply).content, "The image is red.");
    assert_eq!(reply.json()["usage"]["prompt_tokens"], 305 - 280 + 70);
}

#[test]
fn several_pictures_in_one_message_keep_their_order() {
    let (red, blue) = (picture(&json!("00-solid-red.png")), picture(&json!("02-solid-blue.png")));
    let text = |text: &str| json!({"type": "text", "text": text});
    let question = text("What colour is this image?");
    let (_, one) = ask(&json!([red, question]));
    let (first, tokens) = ask(&json!([red, text("Look."), blue, question]));
    // Two pictures, two pairs of marks, and a word between them.
    assert!(tokens > one + 256 && tokens < one + 256 + 20, "{tokens}");
    let (swapped, same) = ask(&json!([blue, text("Look."), red, question]));
    assert_eq!(same, tokens);
    assert_ne!(first, swapped, "the order of pictures counts");
    assert_eq!(ask(&json!([red, text("Look."), blue, question])), (first, tokens));
}

#[test]
fn a_picture_stays_in_the_conversation() {
    let red = picture(&json!("00-solid-red.png"));
    let question = "What colour is this image?";
    let mut messages = json!([{"role": "user", "content": [red, {"type": "text", "text": question}]}]);
    let (first, tokens) = converse(&messages);
    assert_eq!(first, "The image is red.");
    let turns = messages.as_array_mut().unwrap();
    turns.push(json!({"role": "assistant", "content": first}));
    turns.push(json!({"role": "user", "content": question}));
    let (second, more) = converse(&messages);
    assert_eq!(second, "The image is red.");
    assert!(more > tokens + 10, "{more}: the picture counts again");
    let without = json!([
        {"role": "user", "content": question},
        {"role": "assistant", "content": "The image is red."},
        {"role": "user", "content": question},
    ]);
    assert_eq!(more, converse(&without).1 + 282, "280 rows and two marks");
}

#[test]
fn pictures_at_the_same_time_are_seen_as_one_after_the_other() {
    let cases = cases::load(PICTURES);
    let pair = [&cases[4], &cases[13]];
    for _ in 0..if cfg!(debug_assertions) { 1 } else { 3 } {
        let asked = pair.map(|case| {
            let (part, question) = (picture(&case["image"]), text(&case["question"]));
            thread::spawn(move || look(&part, &question))
        });
        for (said, case) in asked.into_iter().zip(pair) {
            assert_eq!(said.join().unwrap(), text(&case["expect"]), "{case}");
        }
    }
}

#[test]
fn a_picture_that_does_not_fit_is_refused_whole() {
    let part = json!({"type": "image_url", "image_url": {
        "url": data_url(&file("../models/vision/00-solid-red.png")), "detail": "high"}});
    let body = json!({"messages": [{"role": "user", "content": vec![part; 4]}]});
    let reply = HOST.chat(&body.to_string());
    assert_eq!(reply.status, 400, "{}", reply.body);
    assert_eq!(reply.error()["code"], "context_length_exceeded");
    assert_eq!(
        look(&picture(&json!("02-solid-blue.png")), "What colour is this image?"),
        "The image is blue."
    );
}

#[test]
fn without_a_projector_there_are_no_pictures() {
    let host = cases::start(MODEL, 4, |_| {});
    let content = json!([picture(&json!("00-solid-red.png"))]);
    let reply = host.chat(&json!({"messages": [{"role": "user", "content": content}]}).to_string());
    assert_eq!(reply.status, 400, "{}", reply.body);
    let error = reply.error();
    assert_eq!(error["param"], "messages[0].content[0]");
    assert!(error["message"].as_str().unwrap().contains("takes none"), "{error}");
    let texts = cases::load(CASES);
    ask_all(&host, &texts[..2], false);
}

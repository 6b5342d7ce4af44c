//! The whole way, with the small model of this repository: every case through HTTP, whole and streamed.

mod common;

use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::LazyLock;
use std::thread;
use std::time::{Duration, Instant};

use common::cases::{self, Said, ask_all, body, text};
use common::{Host, head};
use serde_json::{Value, json};

const MODEL: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../models/tiny-qwen35moe-Q4_K_M.gguf");
const CASES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../models/tiny-qwen35moe.cases.json");

/// The server of all tests that do not fill it up.
static HOST: LazyLock<Host> = LazyLock::new(|| start(2, 64));

fn start(sequences: usize, queue: usize) -> Host {
    cases::start(MODEL, queue, |options| options.sequences = sequences)
}

fn cases() -> Vec<Value> {
    cases::load(CASES)
}

#[test]
fn whole_answers_are_right() {
    let cases = cases();
    assert_eq!(cases.len(), 86);
    ask_all(&HOST, &cases, false);
}

#[test]
fn streamed_answers_are_right() {
    ask_all(&HOST, &cases(), true);
}

#[test]
fn usage_is_the_same_whole_and_streamed() {
    let case = &cases()[0];
    let whole = HOST.chat(&body(case, false)).json()["usage"].clone();
    let streamed = HOST.chat(&body(case, true)).chunks().pop().unwrap()["usage"].clone();
    assert_eq!(whole, streamed);
    let sum = whole["prompt_tokens"].as_u64().unwrap() + whole["completion_tokens"].as_u64().unwrap();
    assert_eq!(whole["total_tokens"], sum);
    assert!(whole["prompt_tokens"].as_u64().unwrap() > 5 && whole["completion_tokens"].as_u64().unwrap() > 1);
}

#[test]
fn a_tool_conversation_goes_on() {
    let cases = cases();
    let case = cases.iter().find(|case| case["task"] == "tool_call").unwrap();
    let asked = HOST.chat(&body(case, false)).json();
    let mut messages = case["messages"].as_array().unwrap().clone();
    // The answer goes back as it came, with its arguments as a text.
    let message = asked["choices"][0]["message"].clone();
    let id = message["tool_calls"][0]["id"].clone();
    messages.push(message);
    messages.push(json!({"role": "tool", "tool_call_id": id, "content": "584"}));
    let body =
        json!({"messages": messages, "tools": case["tools"], "temperature": 0, "enable_thinking": false});
    let reply = HOST.chat(&body.to_string());
    assert_eq!(reply.status, 200, "{}", reply.body);
    assert!(text(&reply.json()["choices"][0]["message"]["content"]).contains("584"), "{}", reply.body);
}

#[test]
fn thinking_is_switched_in_three_ways() {
    let thinks = |fields: Value| {
        let mut body = json!({
            "messages": [{"role": "user", "content": "What is 3 times 6?"}],
            "temperature": 0,
        });
        body.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
        let reply = HOST.chat(&body.to_string()).json();
        reply["choices"][0]["message"].get("reasoning_content").is_some()
    };
    assert!(thinks(json!({"reasoning_effort": "high"})));
    assert!(!thinks(json!({"reasoning_effort": "none"})));
    assert!(!thinks(json!({"enable_thinking": false})));
    assert!(!thinks(json!({"chat_template_kwargs": {"enable_thinking": false}})));
}

#[test]
fn messages_of_all_shapes() {
    let conversations = [
        json!([{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "Hi"}]),
        json!([{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."},
               {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]),
        json!([{"role": "system", "content": "A"}, {"role": "system", "content": "B"}, {"role": "user", "content": "Hi"}]),
        json!([{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]),
        json!([{"role": "user", "content": []}]),
        json!([{"role": "user", "content": "Hi"}, {"role": "assistant", "tool_calls": []}, {"role": "user", "content": "Hi"}]),
        json!([{"role": "user", "content": "Hi", "name": null},
               {"role": "assistant", "content": null, "tool_calls": [
                   {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{\"city\": \"Paris\"}"}}]},
               {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "sunny"}]}]),
    ];
    for messages in conversations {
        let body = json!({"messages": messages, "max_tokens": 2, "temperature": 0});
        let reply = HOST.chat(&body.to_string());
        assert_eq!(reply.status, 200, "{messages}: {}", reply.body);
    }
    let refused = [
        json!([{"role": "wizard", "content": "Hi"}]),
        json!([{"role": "user", "content": 5}]),
        json!([{"role": "user", "content": [{"type": "video_url", "video_url": "x"}]}]),
        json!([{"role": "user", "content": "Hi"}, {"role": "assistant", "tool_calls": [
            {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{"}}]}]),
    ];
    for messages in refused {
        let reply = HOST.chat(&json!({"messages": messages}).to_string());
        assert_eq!(reply.status, 400, "{messages}: {}", reply.body);
        let last = messages.as_array().unwrap().len() - 1;
        assert_eq!(reply.error()["param"], format!("messages[{last}]"));
    }
    let reply =
        HOST.chat(&json!({"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}).to_string());
    assert_eq!(reply.status, 200, "one bad request does not spoil the next");
}

#[test]
fn the_context_is_never_exceeded_in_silence() {
    let words = vec!["horse"; 5000].join(" ");
    for fields in [json!({}), json!({"stream": true})] {
        let mut body = json!({"messages": [{"role": "user", "content": words}]});
        body.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
        let reply = HOST.chat(&body.to_string());
        assert_eq!(reply.status, 400);
        let error = reply.error();
        assert_eq!(error["code"], "context_length_exceeded");
        assert_eq!(error["type"], "invalid_request_error");
        assert!(error["message"].as_str().unwrap().contains("4096"), "{error}");
    }
}

#[test]
fn limits_end_answers() {
    let ask = |fields: Value| {
        let mut body = json!({
            "messages": [{"role": "user", "content": "Sort these numbers: 41, 90, 68"}],
            "temperature": 0,
            "enable_thinking": false,
        });
        body.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
        Said::whole(&HOST.chat(&body.to_string()))
    };
    let full = ask(json!({"max_tokens": u64::MAX}));
    assert_eq!((full.content.as_str(), full.finish.as_str()), ("41, 68, 90.", "stop"));
    let cut = ask(json!({"max_tokens": 3}));
    assert_eq!(cut.finish, "length");
    assert!(full.content.starts_with(&cut.content) && cut.content != full.content);
    let stopped = ask(json!({"stop": ["never", ", 9"]}));
    assert_eq!((stopped.content.as_str(), stopped.finish.as_str()), ("41, 68", "stop"));
}

#[test]
fn completions_of_text() {
    let body = json!({"prompt": "<|im_start|>user\nSort these numbers: 41, 90, 68<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n",
                      "temperature": 0, "max_tokens": 50});
    let reply = HOST.post("/v1/completions", &body.to_string());
    assert_eq!(reply.status, 200, "{}", reply.body);
    assert_eq!(reply.json()["choices"][0]["text"], "41, 68, 90.");
    for prompt in [json!("<think>a"), json!([1, 2, 3])] {
        let body =
            json!({"prompt": prompt, "max_tokens": 5, "stream": true, "temperature": 0, "ignore_eos": true});
        assert!(HOST.post("/v1/completions", &body.to_string()).chunks().len() > 1);
    }
    let reply = HOST.post("/v1/completions", r#"{"prompt": ""}"#);
    assert_eq!(reply.status, 400);
}

#[test]
fn seeds_make_answers_repeatable() {
    let ask = |seed: Value| {
        let body =
            json!({"prompt": "Once", "max_tokens": 20, "seed": seed, "temperature": 2, "ignore_eos": true});
        text(&HOST.post("/v1/completions", &body.to_string()).json()["choices"][0]["text"])
    };
    assert_eq!(ask(json!(5)), ask(json!(5)));
    assert_ne!(ask(json!(5)), ask(json!(6)));
    assert_ne!(ask(Value::Null), ask(Value::Null));
}

/// Opens a stream that goes on until the context is full, which takes a while.
fn endless(host: &Host) -> TcpStream {
    let body = json!({"prompt": "Once", "ignore_eos": true, "stream": true}).to_string();
    let mut stream = host.connect();
    stream.write_all(head("POST", "/v1/completions", &[], &body).as_bytes()).unwrap();
    stream
}

fn status(stream: &mut TcpStream) -> String {
    let mut line = [0; 12];
    stream.read_exact(&mut line).unwrap();
    String::from_utf8(line.to_vec()).unwrap()
}

#[test]
fn clients_that_leave_make_room_at_once() {
    let host = start(1, 8);
    let mut running = endless(&host);
    assert_eq!(status(&mut running), "HTTP/1.1 200");
    let waiting: Vec<_> = (0..4).map(|_| endless(&host)).collect();
    thread::sleep(Duration::from_millis(100));
    drop(waiting);
    drop(running);
    let start = Instant::now();
    let reply = host.post("/v1/completions", r#"{"prompt": "Once", "max_tokens": 1}"#);
    assert_eq!(reply.status, 200, "{}", reply.body);
    let one = start.elapsed();
    assert!(one < Duration::from_secs(10), "the answer waited {one:?} for answers to nobody");
}

#[test]
fn clients_that_leave_during_the_prefill_make_room() {
    let host = start(1, 8);
    let words = vec!["horse"; 3500].join(" ");
    let body = json!({"prompt": words, "max_tokens": 500, "ignore_eos": true}).to_string();
    let mut stream = host.connect();
    stream.write_all(head("POST", "/v1/completions", &[], &body).as_bytes()).unwrap();
    thread::sleep(Duration::from_millis(200));
    drop(stream);
    let reply = host.post("/v1/completions", r#"{"prompt": "Once", "max_tokens": 1}"#);
    assert_eq!(reply.status, 200, "{}", reply.body);
}

#[test]
fn a_full_queue_says_so() {
    let host = start(1, 1);
    let mut streams = Vec::new();
    for _ in 0..8 {
        streams.push(endless(&host));
        thread::sleep(Duration::from_millis(100));
    }
    let last = host.post("/v1/completions", r#"{"prompt": "Once", "max_tokens": 1}"#);
    assert_eq!((last.status, last.header("retry-after")), (503, Some("1")));
    assert_eq!(last.error()["code"], "busy");
    let taken = streams.iter_mut().map(status).filter(|line| line == "HTTP/1.1 200").count();
    assert!((1..=3).contains(&taken), "{taken}");
}

//! Answers, whole and streamed, and what becomes of them when one side goes away.

mod common;

use std::io::{Read, Write};
use std::net::{Shutdown, TcpStream};
use std::thread;
use std::time::{Duration, Instant};

use common::{Act, End, PROMPT_TOKENS, Play, Reply, Stage, arguments, call, chat, head, say, think};
use serde_json::{Value, json};
use skep_engine::{ErrorKind, FinishReason};

const FINGERPRINT: &str = concat!("skep-", env!("CARGO_PKG_VERSION"));
const SOON: Duration = Duration::from_secs(5);

fn calls() -> Play {
    Play::acts([
        think("Two sums."),
        say("Sure.\n"),
        call(0, "call_a", "add"),
        arguments(0, r#"{"a": 1, "#),
        arguments(0, r#""b": 2}"#),
        call(1, "call_b", "add"),
        arguments(1, r#"{"a": 3, "b": "ü\"\n"}"#),
        Act::Finish(FinishReason::ToolCalls, 20),
    ])
}

/// The events of a stream with what differs from run to run taken out. All must share one id and time.
fn transcript(reply: &Reply) -> String {
    let chunks: Vec<Value> =
        reply.events().iter().filter_map(|event| serde_json::from_str(event).ok()).collect();
    let heads: Vec<_> =
        chunks.iter().filter_map(|chunk| Some((chunk.get("id")?, chunk.get("created")?))).collect();
    assert!(heads.windows(2).all(|pair| pair[0] == pair[1]));
    let mut text = reply.body.clone();
    if let Some((id, created)) = heads.first() {
        assert!(created.as_u64().unwrap() > 1_700_000_000);
        text = text.replace(id.as_str().unwrap(), "ID").replace(&created.to_string(), "TIME");
        text = text.replace(FINGERPRINT, "skep-VERSION");
    }
    text
}

/// A whole answer likewise.
fn answer(reply: &Reply) -> Value {
    assert_eq!(reply.status, 200);
    let mut json = reply.json();
    json["id"] = "ID".into();
    json["created"] = "TIME".into();
    assert_eq!(json["system_fingerprint"], FINGERPRINT);
    json["system_fingerprint"] = "skep-VERSION".into();
    json
}

#[test]
fn a_whole_chat() {
    let stage = Stage::new(Play::acts([
        think("Well, "),
        think("hm."),
        say("Hel"),
        say("lo."),
        Act::Finish(FinishReason::Length, 4),
    ]));
    let reply = stage.host.chat(&chat(""));
    let id = reply.json()["id"].as_str().unwrap().to_owned();
    assert!(id.starts_with("chatcmpl-") && id.len() > 20);
    assert_eq!(reply.header("content-type"), Some("application/json"));
    assert_eq!(
        answer(&reply),
        json!({
            "id": "ID",
            "object": "chat.completion",
            "created": "TIME",
            "model": "org/scripted model",
            "system_fingerprint": "skep-VERSION",
            "choices": [{
                "index": 0,
                "message": {"role": "assistant", "content": "Hello.", "reasoning_content": "Well, hm."},
                "logprobs": null,
                "finish_reason": "length"
            }],
            "usage": {
                "prompt_tokens": PROMPT_TOKENS,
                "completion_tokens": 4,
                "total_tokens": PROMPT_TOKENS + 4,
                "prompt_tokens_details": {"cached_tokens": 0}
            }
        })
    );
    assert_ne!(stage.host.chat(&chat("")).json()["id"], id);
}

#[test]
fn a_whole_chat_with_calls() {
    let reply = Stage::new(calls()).host.chat(&chat(""));
    let choice = &answer(&reply)["choices"][0];
    assert_eq!(choice["finish_reason"], "tool_calls");
    assert_eq!(
        choice["message"],
        json!({
            "role": "assistant",
            "content": "Sure.\n",
            "reasoning_content": "Two sums.",
            "tool_calls": [
                {"id": "call_a", "type": "function",
                 "function": {"name": "add", "arguments": "{\"a\": 1, \"b\": 2}"}},
                {"id": "call_b", "type": "function",
                 "function": {"name": "add", "arguments": "{\"a\": 3, \"b\": \"ü\\\"\\n\"}"}}
            ]
        })
    );
}

#[test]
fn a_call_without_text_has_empty_content() {
    let acts = [call(0, "call_a", "f"), arguments(0, "{}"), Act::Finish(FinishReason::ToolCalls, 5)];
    let reply = Stage::new(Play::acts(acts)).host.chat(&chat(""));
    let message = &reply.json()["choices"][0]["message"];
    assert_eq!(message["content"], "");
    assert!(message.get("reasoning_content").is_none());
}

#[test]
fn a_streamed_chat() {
    let reply = Stage::new(Play::hello()).host.chat(&chat(r#""stream": true"#));
    assert_eq!(reply.header("cache-control"), Some("no-cache"));
    assert_eq!(reply.header("x-accel-buffering"), Some("no"));
    insta::assert_snapshot!("chat", transcript(&reply));
}

#[test]
fn a_streamed_chat_with_reasoning_calls_and_usage() {
    let fields = r#""stream": true, "stream_options": {"include_usage": true}"#;
    let reply = Stage::new(calls()).host.chat(&chat(fields));
    insta::assert_snapshot!("calls", transcript(&reply));
    // The counts are in the last part only, and that part has no choices.
    let chunks = reply.chunks();
    let (last, others) = chunks.split_last().unwrap();
    assert_eq!((&last["choices"], &last["usage"]["total_tokens"]), (&json!([]), &json!(PROMPT_TOKENS + 20)));
    assert!(others.iter().all(|chunk| chunk["usage"].is_null() && chunk["choices"][0]["index"] == 0));
}

#[test]
fn a_streamed_answer_without_tokens() {
    let reply =
        Stage::new(Play::acts([Act::Finish(FinishReason::Stop, 1)])).host.chat(&chat(r#""stream": true"#));
    insta::assert_snapshot!("empty", transcript(&reply));
}

#[test]
fn whole_and_streamed_completions() {
    let stage = Stage::new(Play::hello());
    let whole = stage.host.post("/v1/completions", r#"{"prompt": "Say"}"#);
    assert!(whole.json()["id"].as_str().unwrap().starts_with("cmpl-"));
    insta::assert_snapshot!("completion_whole", serde_json::to_string_pretty(&answer(&whole)).unwrap());
    let body = r#"{"prompt": "Say", "stream": true, "stream_options": {"include_usage": true}}"#;
    insta::assert_snapshot!("completion", transcript(&stage.host.post("/v1/completions", body)));
}

#[test]
fn text_of_all_kinds_survives() {
    let text = "\u{0}\u{1b}[31m\r\n\n data: x\n\n\u{2028}😀é\u{fffd}</script>";
    let acts: Vec<Act> = text.chars().map(|c| say(&c.to_string())).collect();
    let finish = [Act::Finish(FinishReason::Stop, 9)];
    let stage = Stage::new(Play::acts([acts, finish.to_vec()].concat()));
    assert_eq!(stage.host.chat(&chat("")).json()["choices"][0]["message"]["content"], text);
    let reply = stage.host.chat(&chat(r#""stream": true"#));
    let streamed: String = reply
        .chunks()
        .iter()
        .filter_map(|chunk| chunk["choices"][0]["delta"]["content"].as_str().map(str::to_owned))
        .collect();
    assert_eq!(streamed, text);
}

#[test]
fn a_failure_after_the_first_token() {
    let acts = [say("Hel"), Act::Fail(ErrorKind::NotFinite, "logits are not finite")];
    let stage = Stage::new(Play::acts(acts));
    let reply = stage.host.chat(&chat(r#""stream": true"#));
    insta::assert_snapshot!("failure", transcript(&reply));
    let reply = stage.host.chat(&chat(""));
    assert_eq!((reply.status, &reply.error()["message"]), (500, &json!("logits are not finite")));
    let stage = Stage::new(Play::acts([say("Hel"), Act::Fail(ErrorKind::Cancelled, "shutting down")]));
    assert_eq!(stage.host.chat(&chat("")).status, 503);
}

#[test]
fn an_engine_that_vanishes() {
    let stage = Stage::new(Play::acts([say("Hel")]));
    let reply = stage.host.chat(&chat(r#""stream": true"#));
    let events = reply.events();
    let error: Value = serde_json::from_str(events.last().unwrap()).unwrap();
    assert_eq!(error["error"]["type"], "server_error");
    assert_eq!(stage.host.chat(&chat("")).status, 500);
}

#[test]
fn an_engine_whose_events_make_no_sense() {
    for act in [call(1, "id", "f"), arguments(0, "{}")] {
        let stage = Stage::new(Play::acts([act, Act::Finish(FinishReason::Stop, 1)]));
        assert_eq!(stage.host.chat(&chat("")).status, 500);
        assert_eq!(stage.host.post("/v1/completions", r#"{"prompt": "a"}"#).status, 500);
    }
}

#[test]
fn silence_is_filled_with_comments() {
    let acts = [Act::Wait(Duration::from_millis(500)), say("x"), Act::Finish(FinishReason::Stop, 1)];
    let stage = Stage::with(Play::acts(acts), |options| options.keep_alive = Duration::from_millis(50));
    let reply = stage.host.chat(&chat(r#""stream": true"#));
    let first = reply.body.split("\n\n").next().unwrap();
    assert!(first.starts_with(':'), "{first}");
    assert!(reply.body.matches("\n\n:").count() >= 2 || reply.body.matches(": ").count() >= 3);
    assert_eq!(reply.chunks().len(), 3);
}

/// Sends a request and leaves the connection open.
fn open(stage: &Stage, fields: &str) -> TcpStream {
    let mut stream = stage.host.connect();
    stream.write_all(head("POST", "/v1/chat/completions", &[], &chat(fields)).as_bytes()).unwrap();
    stream
}

/// Reads until a text was seen.
fn read_until(stream: &mut TcpStream, text: &str) {
    let mut seen = Vec::new();
    while !String::from_utf8_lossy(&seen).contains(text) {
        let mut buffer = [0; 4096];
        let n = stream.read(&mut buffer).unwrap();
        assert!(n > 0, "the stream ended before {text:?}");
        seen.extend_from_slice(&buffer[..n]);
    }
}

#[test]
fn a_client_that_leaves_a_stream_stops_the_engine() {
    let stage = Stage::new(Play::acts([say("one"), say("two"), Act::Hold]));
    let mut stream = open(&stage, r#""stream": true"#);
    read_until(&mut stream, "two");
    drop(stream);
    assert_eq!(stage.end_within(SOON), End::Gone { sent: 2 });
}

#[test]
fn a_client_that_leaves_while_tokens_come_stops_the_engine() {
    let mut acts = Vec::new();
    for _ in 0..100_000 {
        acts.extend([say("token "), Act::Wait(Duration::from_millis(2))]);
    }
    let stage = Stage::new(Play::acts(acts));
    let mut stream = open(&stage, r#""stream": true"#);
    read_until(&mut stream, "token");
    drop(stream);
    let End::Gone { sent } = stage.end_within(SOON) else { panic!("the script must not end") };
    assert!(sent < 2000, "{sent} tokens were made for nobody");
}

#[test]
fn a_client_that_leaves_before_the_first_token_stops_the_engine() {
    for fields in ["", r#""stream": true"#] {
        let stage = Stage::new(Play::acts([Act::Hold]));
        let stream = open(&stage, fields);
        thread::sleep(Duration::from_millis(100));
        assert_eq!(stage.count(), 1);
        drop(stream);
        assert_eq!(stage.end_within(SOON), End::Gone { sent: 0 });
    }
}

#[test]
fn a_client_that_leaves_during_admission_is_never_answered() {
    let mut play = Play::acts([Act::Hold]);
    play.admission = Duration::from_millis(300);
    let stage = Stage::new(play);
    let stream = open(&stage, "");
    thread::sleep(Duration::from_millis(50));
    drop(stream);
    // The sink is closed before the engine could look at it for the first time.
    let start = Instant::now();
    assert_eq!(stage.end_within(SOON), End::Gone { sent: 0 });
    assert!(start.elapsed() < Duration::from_secs(2));
}

#[test]
fn a_client_that_closes_its_half_counts_as_gone() {
    let stage = Stage::new(Play::acts([say("one"), Act::Hold]));
    let mut stream = open(&stage, r#""stream": true"#);
    read_until(&mut stream, "one");
    stream.shutdown(Shutdown::Write).unwrap();
    assert_eq!(stage.end_within(SOON), End::Gone { sent: 1 });
}

#[test]
fn a_client_that_does_not_read_is_cut_off() {
    let acts = vec![say(&"x".repeat(10_000)); 20_000];
    let stage = Stage::new(Play::acts(acts));
    let stream = open(&stage, r#""stream": true"#);
    let End::Gone { sent } = stage.end_within(Duration::from_secs(30)) else {
        panic!("the script must not end")
    };
    assert!((4096..20_000).contains(&sent), "{sent}");
    // Another client is served meanwhile.
    assert_eq!(stage.host.get("/health").status, 200);
    let mut bytes = Vec::new();
    let mut stream = stream;
    stream.read_to_end(&mut bytes).unwrap();
    let reply = Reply::parse(&bytes);
    let events = reply.events();
    let error: Value = serde_json::from_str(events.last().unwrap()).unwrap();
    assert_eq!(error["error"]["code"], "slow_reader");
}

#[test]
fn requests_do_not_wait_for_each_other() {
    let stage = Stage::new(Play::acts([say("one"), Act::Hold]));
    let streams: Vec<_> = (0..8)
        .map(|_| {
            let mut stream = open(&stage, r#""stream": true"#);
            read_until(&mut stream, "one");
            stream
        })
        .collect();
    assert_eq!(stage.count(), 8);
    drop(streams);
    for _ in 0..8 {
        assert_eq!(stage.end_within(SOON), End::Gone { sent: 1 });
    }
}

#[test]
fn stopping_lets_short_answers_finish() {
    let acts =
        [say("one"), Act::Wait(Duration::from_millis(200)), say("two"), Act::Finish(FinishReason::Stop, 2)];
    let mut stage = Stage::with(Play::acts(acts), |options| options.grace = SOON);
    let stream = open(&stage, r#""stream": true"#);
    thread::sleep(Duration::from_millis(100));
    stage.host.stop();
    let reply = read(stream);
    assert_eq!(reply.chunks().len(), 4);
    let start = Instant::now();
    stage.host.join();
    assert!(start.elapsed() < Duration::from_secs(2));
    assert!(TcpStream::connect(stage.host.address).is_err());
}

#[test]
fn stopping_ends_long_answers_with_an_error() {
    let mut stage = Stage::new(Play::acts([say("one"), Act::Hold]));
    let streams = [open(&stage, r#""stream": true"#), open(&stage, "")];
    thread::sleep(Duration::from_millis(100));
    let start = Instant::now();
    stage.host.join();
    assert!(start.elapsed() < Duration::from_secs(3));
    for _ in 0..2 {
        assert_eq!(stage.end_within(SOON), End::Gone { sent: 1 });
    }
    let [streamed, whole] = streams.map(read);
    let events = streamed.events();
    let error: Value = serde_json::from_str(events.last().unwrap()).unwrap();
    assert_eq!(error["error"]["code"], "cancelled");
    assert_eq!((whole.status, &whole.error()["code"]), (503, &json!("cancelled")));
}

fn read(mut stream: TcpStream) -> Reply {
    let mut bytes = Vec::new();
    stream.read_to_end(&mut bytes).unwrap();
    Reply::parse(&bytes)
}

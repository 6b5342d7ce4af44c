//! The engine thread: answers, forced calls, company, clients that leave, refusals.

mod common;

use common::models;
use serde_json::{Map, Value, json};
use skep_engine::chat::Message;
use skep_engine::{
    Delta, Engine, EngineOptions, ErrorKind, Event, FinishReason, LoadOptions, Prompt, Request, Runner,
    Sampling, Sink, ToolChoice,
};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;

fn engine(sequences: usize, context: usize) -> Engine {
    let mut options = LoadOptions::default();
    options.sequences = sequences;
    options.context = Some(context);
    let path = models().join("tiny-qwen35moe-Q4_K_M.gguf");
    let runner = Runner::load(&path, &options, &mut |_| {}).unwrap();
    Engine::start(runner, EngineOptions::default()).unwrap()
}

/// Sends events to the test, and says that the client is gone once it is told so.
struct Client {
    events: Sender<Event>,
    gone: Arc<AtomicBool>,
}

impl Sink for Client {
    fn send(&mut self, event: Event) -> bool {
        self.events.send(event).is_ok()
    }

    fn closed(&self) -> bool {
        self.gone.load(Ordering::Acquire)
    }
}

#[derive(Debug, Default, PartialEq)]
struct Answer {
    content: String,
    reasoning: String,
    calls: Vec<(String, String)>,
    reason: Option<FinishReason>,
    completion_tokens: usize,
}

fn submit(engine: &Engine, request: Request) -> Receiver<Event> {
    let (events, receiver) = channel();
    engine.submit(request, Box::new(Client { events, gone: Arc::default() })).unwrap();
    receiver
}

fn answer(events: &Receiver<Event>) -> Answer {
    let mut answer = Answer::default();
    loop {
        match events.recv_timeout(Duration::from_secs(60)).expect("the engine answers") {
            Event::Delta(Delta::Content(text)) => answer.content += &text,
            Event::Delta(Delta::Reasoning(text)) => answer.reasoning += &text,
            Event::Delta(Delta::ToolCallStart { name, .. }) => answer.calls.push((name, String::new())),
            Event::Delta(Delta::ToolCallArguments { index, text }) => answer.calls[index].1 += &text,
            Event::Finished { reason, usage, .. } => {
                answer.reason = Some(reason);
                answer.completion_tokens = usage.completion_tokens;
                return answer;
            }
            Event::Failed(error) => panic!("{error}"),
            _ => {}
        }
    }
}

fn chat(text: &str, tools: &[Value], tool_choice: ToolChoice, thinking: bool) -> Request {
    let messages = Message::list(&json!([{"role": "user", "content": text}])).unwrap();
    let kwargs = Map::from_iter([("enable_thinking".to_owned(), Value::Bool(thinking))]);
    Request {
        prompt: Prompt::Chat { messages, tools: tools.to_vec(), tool_choice, kwargs },
        sampling: Sampling::greedy(),
        max_tokens: Some(200),
        stop: Vec::new(),
        ignore_eos: false,
    }
}

fn tools() -> Vec<Value> {
    let tool = |name: &str, field: &str, ty: &str| {
        json!({"type": "function", "function": {"name": name, "description": name, "parameters":
            {"type": "object", "properties": {field: {"type": ty}}, "required": [field]}}})
    };
    vec![
        tool("get_weather", "city", "string"),
        tool("get_weather_history", "city", "string"),
        tool("find_person", "name", "string"),
    ]
}

#[test]
fn answers_are_the_same_in_company() {
    let engine = engine(3, 1024);
    let questions = [
        "What is 3 times 6?",
        "Name the capital city of Italy.",
        "Which day comes after Saturday?",
        "What colour is a plum?",
    ];
    let request = |question: &&str| chat(question, &[], ToolChoice::Auto, true);
    let alone: Vec<Answer> =
        questions.iter().map(|question| answer(&submit(&engine, request(question)))).collect();
    assert_eq!(alone[0].content, "3 times 6 is 18.");
    assert_eq!(alone[0].reasoning, "I multiply 3 by 6 and get 18.");
    let together: Vec<Receiver<Event>> =
        questions.iter().map(|question| submit(&engine, request(question))).collect();
    for (events, alone) in together.iter().zip(&alone) {
        assert_eq!(&answer(events), alone);
    }
}

#[test]
fn a_call_can_be_forced_and_forbidden() {
    let engine = engine(1, 2048);
    let tools = tools();
    for thinking in [false, true] {
        let choice = ToolChoice::Function("find_person".into());
        let forced = answer(&submit(&engine, chat("What is 3 times 6?", &tools, choice, thinking)));
        assert_eq!(forced.calls.len(), 1, "{forced:?}");
        assert_eq!(
            (forced.calls[0].0.as_str(), forced.reason),
            ("find_person", Some(FinishReason::ToolCalls))
        );
        serde_json::from_str::<Map<String, Value>>(&forced.calls[0].1).unwrap();
        assert_eq!((forced.content.as_str(), forced.reasoning.as_str()), ("", ""));
    }
    // Two names share a beginning: the choice must reach the end of one of them.
    let required = answer(&submit(&engine, chat("What is 3 times 6?", &tools, ToolChoice::Required, false)));
    let names = ["get_weather", "get_weather_history", "find_person"];
    assert!(
        required.calls.iter().all(|(name, _)| names.contains(&name.as_str())) && !required.calls.is_empty()
    );

    let question = "What is the weather in Edinburgh?";
    assert_eq!(answer(&submit(&engine, chat(question, &tools, ToolChoice::Auto, false))).calls.len(), 1);
    let forbidden = answer(&submit(&engine, chat(question, &tools, ToolChoice::None, false)));
    assert_eq!(forbidden.calls, []);
    assert_ne!(forbidden.reason, Some(FinishReason::ToolCalls));
}

#[test]
fn limits_and_stop_strings_end_an_answer() {
    let engine = engine(1, 1024);
    let question = "Name the capital city of Italy.";
    let mut request = chat(question, &[], ToolChoice::Auto, false);
    request.max_tokens = Some(3);
    let cut = answer(&submit(&engine, request));
    assert_eq!((cut.reason, cut.completion_tokens), (Some(FinishReason::Length), 3));
    let mut request = chat(question, &[], ToolChoice::Auto, false);
    request.stop = vec![" of It".into()];
    let stopped = answer(&submit(&engine, request));
    assert_eq!((stopped.content.as_str(), stopped.reason), ("The capital", Some(FinishReason::Stop)));
    let mut request = chat(question, &[], ToolChoice::Auto, false);
    request.ignore_eos = true;
    request.max_tokens = Some(40);
    assert_eq!(answer(&submit(&engine, request)).completion_tokens, 40);
}

#[test]
fn requests_that_cannot_run_are_refused_at_once() {
    let engine = engine(1, 64);
    let refused = |request: Request| {
        let (events, _receiver) = channel();
        engine.submit(request, Box::new(Client { events, gone: Arc::default() })).unwrap_err().kind()
    };
    let with = |prompt: Prompt| Request { prompt, ..chat("", &[], ToolChoice::Auto, false) };
    assert_eq!(refused(with(Prompt::Tokens(Vec::new()))), ErrorKind::Request);
    assert_eq!(refused(with(Prompt::Tokens(vec![1 << 30]))), ErrorKind::Request);
    assert_eq!(
        refused(with(Prompt::Tokens(vec![1; 64]))),
        ErrorKind::ContextLength { prompt: 64, limit: 64 }
    );
    assert_eq!(refused(chat("hi", &[], ToolChoice::Required, false)), ErrorKind::Request);
    assert_eq!(
        refused(chat("hi", &tools(), ToolChoice::Function("nobody".into()), false)),
        ErrorKind::Request
    );
    let fits = submit(&engine, with(Prompt::Tokens(vec![1; 63])));
    assert_eq!(answer(&fits).completion_tokens, 1);
}

#[test]
fn a_client_that_leaves_makes_room() {
    struct Leaver {
        tokens: Arc<AtomicUsize>,
    }
    impl Sink for Leaver {
        fn send(&mut self, _: Event) -> bool {
            self.tokens.fetch_add(1, Ordering::AcqRel) < 2
        }

        fn closed(&self) -> bool {
            false
        }
    }
    let engine = engine(1, 4096);
    let tokens = Arc::new(AtomicUsize::new(0));
    let mut endless = chat("Name the capital city of Italy.", &[], ToolChoice::Auto, false);
    endless.ignore_eos = true;
    endless.max_tokens = None;
    engine.submit(endless.clone(), Box::new(Leaver { tokens: Arc::clone(&tokens) })).unwrap();
    let next = submit(&engine, chat("What is 3 times 6?", &[], ToolChoice::Auto, false));
    assert_eq!(answer(&next).content, "3 times 6 is 18.");
    assert!(tokens.load(Ordering::Acquire) <= 4);

    // One that runs and one that waits both say that they are gone: neither holds up what comes after.
    let gone = Arc::new(AtomicBool::new(false));
    let mut silent = Vec::new();
    for _ in 0..2 {
        let (events, receiver) = channel();
        silent.push(receiver);
        engine.submit(endless.clone(), Box::new(Client { events, gone: Arc::clone(&gone) })).unwrap();
    }
    gone.store(true, Ordering::Release);
    let next = submit(&engine, chat("What is 3 times 6?", &[], ToolChoice::Auto, false));
    assert_eq!(answer(&next).content, "3 times 6 is 18.");
}

#[test]
fn shutting_down_tells_those_who_wait() {
    let engine = engine(1, 8192);
    let mut endless = chat("Name the capital city of Italy.", &[], ToolChoice::Auto, false);
    endless.ignore_eos = true;
    endless.max_tokens = None;
    let events: Vec<_> = (0..2).map(|_| submit(&engine, endless.clone())).collect();
    engine.shutdown();
    for events in events {
        let last = events.iter().last();
        assert!(matches!(last, Some(Event::Failed(error)) if error.kind() == ErrorKind::Cancelled));
    }
    let (sender, _receiver) = channel();
    let late = engine.submit(endless, Box::new(Client { events: sender, gone: Arc::default() }));
    assert_eq!(late.unwrap_err().kind(), ErrorKind::Cancelled);
}

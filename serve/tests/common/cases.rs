//! Questions with one right answer, asked through HTTP.

use std::path::Path;
use std::sync::Arc;

use serde_json::{Value, json};
use skep_engine::{Engine, EngineOptions, LoadOptions, Runner};
use skep_serve::{Backend, Model};

use super::{Host, Reply};

/// A server with a model of this repository.
pub(crate) fn start(model: &str, queue: usize, adjust: impl FnOnce(&mut LoadOptions)) -> Host {
    let mut options = LoadOptions::default();
    options.context = Some(4096);
    adjust(&mut options);
    let runner = Runner::load(Path::new(model), &options, &mut |_| {}).unwrap();
    let mut options = EngineOptions::default();
    options.queue = queue;
    let engine = Engine::start(runner, options).unwrap();
    let model = Model::loading();
    model.ready(Arc::new(engine) as Arc<dyn Backend>);
    Host::start(model, |_| {})
}

pub(crate) fn load(path: &str) -> Vec<Value> {
    serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
}

/// The request of a case.
pub(crate) fn body(case: &Value, stream: bool) -> String {
    let mut body = json!({
        "messages": case["messages"],
        "chat_template_kwargs": {"enable_thinking": case["enable_thinking"]},
        "temperature": 0,
        "max_tokens": 300,
        "stream": stream,
    });
    if let Some(tools) = case.get("tools") {
        body["tools"] = tools.clone();
    }
    if stream {
        body["stream_options"] = json!({"include_usage": true});
    }
    body.to_string()
}

/// What was answered, in the form of the cases.
#[derive(Debug, PartialEq)]
pub(crate) struct Said {
    pub(crate) content: String,
    pub(crate) reasoning: Option<String>,
    pub(crate) calls: Vec<(String, Value)>,
    pub(crate) finish: String,
}

impl Said {
    pub(crate) fn expected(case: &Value) -> Self {
        let expect = &case["expect"];
        let calls: Vec<_> = expect["tool_calls"]
            .as_array()
            .into_iter()
            .flatten()
            .map(|call| (text(&call["function"]["name"]), call["function"]["arguments"].clone()))
            .collect();
        let finish = if calls.is_empty() { "stop" } else { "tool_calls" };
        Self {
            content: text(&expect["content"]),
            reasoning: expect.get("reasoning").map(text),
            calls,
            finish: finish.to_owned(),
        }
    }

    pub(crate) fn whole(reply: &Reply) -> Self {
        assert_eq!(reply.status, 200, "{}", reply.body);
        let json = reply.json();
        let choice = &json["choices"][0];
        let message = &choice["message"];
        let calls = message["tool_calls"].as_array().into_iter().flatten().map(|call| {
            assert_eq!(call["type"], "function");
            assert!(!text(&call["id"]).is_empty());
            (text(&call["function"]["name"]), parse(&text(&call["function"]["arguments"])))
        });
        Self {
            content: text(&message["content"]),
            reasoning: message.get("reasoning_content").map(text),
            calls: calls.collect(),
            finish: text(&choice["finish_reason"]),
        }
    }

    /// Puts a stream together as clients do.
    pub(crate) fn streamed(reply: &Reply) -> Self {
        let mut said =
            Self { content: String::new(), reasoning: None, calls: Vec::new(), finish: String::new() };
        let mut arguments: Vec<String> = Vec::new();
        for chunk in reply.chunks() {
            let Some(choice) = chunk["choices"].get(0) else { continue };
            assert_eq!(said.finish, "", "nothing follows the reason");
            let delta = &choice["delta"];
            said.content += delta["content"].as_str().unwrap_or_default();
            if let Some(thought) = delta["reasoning_content"].as_str() {
                *said.reasoning.get_or_insert_default() += thought;
            }
            for call in delta["tool_calls"].as_array().into_iter().flatten() {
                let index = call["index"].as_u64().unwrap() as usize;
                if index == arguments.len() {
                    assert!(!text(&call["id"]).is_empty() && call["type"] == "function");
                    said.calls.push((text(&call["function"]["name"]), Value::Null));
                    arguments.push(String::new());
                } else {
                    assert!(call.get("id").is_none() && call["function"].get("name").is_none());
                }
                arguments[index] += call["function"]["arguments"].as_str().unwrap();
            }
            if let Some(reason) = choice["finish_reason"].as_str() {
                said.finish = reason.to_owned();
            }
        }
        for (call, arguments) in said.calls.iter_mut().zip(arguments) {
            call.1 = parse(&arguments);
        }
        said
    }
}

pub(crate) fn text(value: &Value) -> String {
    value.as_str().unwrap_or_else(|| panic!("{value} is no text")).to_owned()
}

fn parse(arguments: &str) -> Value {
    serde_json::from_str(arguments).unwrap_or_else(|error| panic!("{arguments}: {error}"))
}

/// Asks every case and counts the wrong answers.
pub(crate) fn ask_all(host: &Host, cases: &[Value], stream: bool) {
    let read = if stream { Said::streamed } else { Said::whole };
    let wrong: Vec<String> = cases
        .iter()
        .enumerate()
        .filter_map(|(index, case)| {
            let (said, expected) = (read(&host.chat(&body(case, stream))), Said::expected(case));
            (said != expected).then(|| format!("{index} {}: {said:?}, not {expected:?}", case["task"]))
        })
        .collect();
    assert!(wrong.is_empty(), "{} of {} cases are wrong:\n{}", wrong.len(), cases.len(), wrong.join("\n"));
}

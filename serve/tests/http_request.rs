//! What requests may hold, and what reaches the engine.

mod common;

use common::{Play, Stage, VOCABULARY, chat};
use serde_json::{Value, json};
use skep_engine::{Prompt, Request, ToolChoice};

/// The request that reaches the engine.
fn accepted(path: &str, body: &str) -> Request {
    let stage = Stage::new(Play::hello());
    let reply = stage.host.post(path, body);
    assert_eq!(reply.status, 200, "{body:.200}: {}", reply.body);
    stage.request()
}

fn accepted_chat(fields: &str) -> Request {
    accepted("/v1/chat/completions", &chat(fields))
}

/// Sends each body; all must be refused before they reach the engine, blaming the field.
fn refused(path: &str, cases: &[(String, &str)]) {
    let stage = Stage::new(Play::hello());
    for (body, param) in cases {
        let reply = stage.host.post(path, body);
        assert_eq!(reply.status, 400, "{body:.200}: {}", reply.body);
        let error = reply.error();
        assert_eq!(error["type"], "invalid_request_error");
        assert_eq!(error["param"], *param, "{body:.200}: {error}");
        assert!(error["message"].as_str().unwrap().contains(param), "{error}");
    }
    assert_eq!(stage.count(), 0);
}

fn refused_fields(cases: &[(&str, &str)]) {
    let cases: Vec<_> = cases.iter().map(|&(fields, param)| (chat(fields), param)).collect();
    refused("/v1/chat/completions", &cases);
}

fn tools() -> &'static str {
    r#""tools": [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]"#
}

#[test]
fn defaults_come_from_the_model() {
    let request = accepted_chat("");
    assert_eq!((request.sampling.temperature, request.sampling.top_k), (0.7, 20));
    assert_eq!((request.max_tokens, request.sampling.seed), (None, None));
    assert!(request.stop.is_empty() && !request.ignore_eos);
    let Prompt::Chat { messages, tools, tool_choice, kwargs } = request.prompt else { panic!("a chat") };
    assert_eq!(messages.len(), 1);
    assert!(tools.is_empty() && kwargs.is_empty());
    assert_eq!(tool_choice, ToolChoice::Auto);
}

#[test]
fn every_field_reaches_the_engine() {
    let request = accepted_chat(
        r#""temperature": 0, "top_k": 5, "top_p": 0.25, "min_p": 0.125, "repetition_penalty": 1.5,
           "presence_penalty": -2, "frequency_penalty": 2, "logit_bias": {"0": -100, "999": 0.5}, "seed": -1,
           "max_tokens": 9, "stop": ["a", "b\n"], "ignore_eos": true"#,
    );
    let sampling = &request.sampling;
    assert_eq!((sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p), (0.0, 5, 0.25, 0.125));
    let penalties = (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty);
    assert_eq!(penalties, (1.5, -2.0, 2.0));
    assert_eq!(sampling.logit_bias, [(0, -100.0), (999, 0.5)]);
    assert_eq!(sampling.seed, Some(u64::MAX));
    assert_eq!((request.max_tokens, request.ignore_eos), (Some(9), true));
    assert_eq!(request.stop, ["a", "b\n"]);
}

#[test]
fn null_is_the_default() {
    let names = [
        "temperature",
        "top_k",
        "top_p",
        "min_p",
        "repetition_penalty",
        "repeat_penalty",
        "presence_penalty",
        "frequency_penalty",
        "logit_bias",
        "seed",
        "max_tokens",
        "max_completion_tokens",
        "stop",
        "n",
        "best_of",
        "logprobs",
        "top_logprobs",
        "response_format",
        "tools",
        "tool_choice",
        "functions",
        "function_call",
        "stream",
        "stream_options",
        "model",
        "chat_template_kwargs",
        "enable_thinking",
        "reasoning_effort",
        "ignore_eos",
        "modalities",
        "audio",
        "grammar",
        "user",
    ];
    let fields: Vec<_> = names.iter().map(|name| format!(r#""{name}": null"#)).collect();
    let request = accepted_chat(&fields.join(", "));
    assert_eq!((request.sampling.temperature, request.max_tokens), (0.7, None));
}

#[test]
fn unknown_fields_are_ignored() {
    accepted_chat(
        r#""user": "u", "store": true, "metadata": {"a": [1]}, "parallel_tool_calls": false, "x": -1e308"#,
    );
}

#[test]
fn harmless_forms_of_what_is_not_supported() {
    accepted_chat(
        r#""n": 1, "logprobs": false, "top_logprobs": 0, "response_format": {"type": "text"}, "modalities": ["text"],
           "tools": [], "stop": [], "logit_bias": {}, "stream_options": {"include_usage": true}, "model": "gpt-4""#,
    );
}

#[test]
fn numbers_out_of_range() {
    let hostile = [
        "-1",
        "2147483648",
        "9223372036854775808",
        "1e308",
        "-1e308",
        "\"NaN\"",
        "\"5\"",
        "true",
        "[]",
        "{}",
    ];
    let names = ["temperature", "top_p", "min_p", "repetition_penalty", "repeat_penalty"];
    let mut cases: Vec<(String, &str)> = Vec::new();
    for name in names {
        cases.extend(hostile.iter().map(|value| (format!(r#""{name}": {value}"#), name)));
    }
    for name in ["presence_penalty", "frequency_penalty"] {
        cases.extend(hostile[1..].iter().map(|value| (format!(r#""{name}": {value}"#), name)));
    }
    let not_whole = ["-1", "1e308", "-1e308", "0.5", "\"NaN\"", "\"5\"", "true", "[]", "{}"];
    for name in ["max_tokens", "max_completion_tokens", "top_k", "top_logprobs", "n"] {
        cases.extend(not_whole.iter().map(|value| (format!(r#""{name}": {value}"#), name)));
    }
    for value in ["1e308", "0.5", "\"NaN\"", "\"5\"", "true", "-9223372036854775809", "18446744073709551616"]
    {
        cases.push((format!(r#""seed": {value}"#), "seed"));
    }
    for (name, value) in
        [("top_p", "0"), ("repetition_penalty", "0"), ("max_tokens", "0"), ("n", "0"), ("n", "2")]
    {
        cases.push((format!(r#""{name}": {value}"#), name));
    }
    cases.push((r#""n": 1000"#.into(), "n"));
    cases.push((r#""top_logprobs": 1000000"#.into(), "top_logprobs"));
    let cases: Vec<_> = cases.iter().map(|(fields, param)| (fields.as_str(), *param)).collect();
    refused_fields(&cases);
}

#[test]
fn large_counts_are_only_limits() {
    for (value, expected) in
        [("1", 1), ("4.0", 4), ("2147483648", 1 << 31), ("18446744073709551615", usize::MAX)]
    {
        assert_eq!(accepted_chat(&format!(r#""max_tokens": {value}"#)).max_tokens, Some(expected));
        assert_eq!(accepted_chat(&format!(r#""max_completion_tokens": {value}"#)).max_tokens, Some(expected));
    }
    assert_eq!(accepted_chat(r#""max_tokens": 5, "max_completion_tokens": 6"#).max_tokens, Some(6));
    for (value, expected) in [("0", 0), ("-9223372036854775808", 1 << 63), ("9223372036854775808", 1 << 63)] {
        assert_eq!(accepted_chat(&format!(r#""seed": {value}"#)).sampling.seed, Some(expected));
    }
}

#[test]
fn logit_bias() {
    refused_fields(&[
        (r#""logit_bias": {"1000": 1}"#, "logit_bias"),
        (r#""logit_bias": {"1000000000": 1}"#, "logit_bias"),
        (r#""logit_bias": {"-1": 1}"#, "logit_bias"),
        (r#""logit_bias": {"18446744073709551616": 1}"#, "logit_bias"),
        (r#""logit_bias": {"the": 1}"#, "logit_bias"),
        (r#""logit_bias": {"": 1}"#, "logit_bias"),
        (r#""logit_bias": {"1": 100.5}"#, "logit_bias"),
        (r#""logit_bias": {"1": "5"}"#, "logit_bias"),
        (r#""logit_bias": {"1": null}"#, "logit_bias"),
        (r#""logit_bias": [[1, 2]]"#, "logit_bias"),
    ]);
}

#[test]
fn stop_strings() {
    assert_eq!(accepted_chat(r#""stop": "END\n""#).stop, ["END\n"]);
    let sixteen = json!(vec!["x"; 16]).to_string();
    assert_eq!(accepted_chat(&format!(r#""stop": {sixteen}"#)).stop.len(), 16);
    let many = format!(r#""stop": {}"#, json!(vec!["x"; 10_000]));
    let long = format!(r#""stop": "{}""#, "x".repeat(1025));
    refused_fields(&[
        (&many, "stop"),
        (&long, "stop"),
        (r#""stop": """#, "stop"),
        (r#""stop": ["a", ""]"#, "stop"),
        (r#""stop": [1]"#, "stop"),
        (r#""stop": [null]"#, "stop"),
        (r#""stop": {"a": 1}"#, "stop"),
        (r#""stop": 5"#, "stop"),
    ]);
}

#[test]
fn what_cannot_be_done_is_refused() {
    refused_fields(&[
        (r#""response_format": {"type": "json_object"}"#, "response_format"),
        (r#""response_format": {"type": "json_schema", "json_schema": {}}"#, "response_format"),
        (r#""response_format": "json""#, "response_format"),
        (r#""response_format": {}"#, "response_format"),
        (r#""guided_json": {}"#, "guided_json"),
        (r#""grammar": "root ::= x""#, "grammar"),
        (r#""logprobs": true"#, "logprobs"),
        (r#""logprobs": true, "top_logprobs": 5"#, "logprobs"),
        (r#""functions": [{"name": "f"}]"#, "functions"),
        (r#""function_call": "auto""#, "function_call"),
        (r#""modalities": ["text", "audio"]"#, "modalities"),
        (r#""audio": {"voice": "x"}"#, "audio"),
    ]);
}

#[test]
fn types_of_the_rest() {
    refused_fields(&[
        (r#""stream": "yes""#, "stream"),
        (r#""stream": 1"#, "stream"),
        (r#""stream_options": true"#, "stream_options"),
        (r#""stream_options": {"include_usage": "yes"}"#, "stream_options.include_usage"),
        (r#""model": 5"#, "model"),
        (r#""ignore_eos": "no""#, "ignore_eos"),
        (r#""chat_template_kwargs": []"#, "chat_template_kwargs"),
        (r#""enable_thinking": "false""#, "enable_thinking"),
    ]);
}

#[test]
fn messages() {
    let bodies = [
        (r#"{}"#, "messages"),
        (r#"{"messages": null}"#, "messages"),
        (r#"{"messages": []}"#, "messages"),
        (r#"{"messages": "Hi"}"#, "messages"),
        (r#"{"messages": {"role": "user", "content": "Hi"}}"#, "messages"),
        (r#"{"messages": ["Hi"]}"#, "messages[0]"),
        (r#"{"messages": [{"role": "user", "content": "Hi"}, {"content": "Hi"}]}"#, "messages[1]"),
        (r#"{"messages": [{"role": 5, "content": "Hi"}]}"#, "messages[0]"),
    ];
    let cases: Vec<_> = bodies.iter().map(|&(body, param)| (body.to_owned(), param)).collect();
    refused("/v1/chat/completions", &cases);
}

#[test]
fn tool_declarations() {
    let Prompt::Chat { tools: declared, .. } = accepted_chat(tools()).prompt else { panic!("a chat") };
    assert_eq!(declared[0]["function"]["name"], "add");
    refused_fields(&[
        (r#""tools": {}"#, "tools"),
        (r#""tools": ["add"]"#, "tools[0]"),
        (r#""tools": [{"function": {"name": "add"}}]"#, "tools[0]"),
        (r#""tools": [{"type": "web_search"}]"#, "tools[0]"),
        (r#""tools": [{"type": "function"}]"#, "tools[0]"),
        (r#""tools": [{"type": "function", "function": {"name": ""}}]"#, "tools[0]"),
        (r#""tools": [{"type": "function", "function": {"name": 5}}]"#, "tools[0]"),
        (
            r#""tools": [{"type": "function", "function": {"name": "f", "parameters": []}}]"#,
            "tools[0].function.parameters",
        ),
    ]);
}

#[test]
fn tool_choices() {
    let choice = |value: &str| {
        let request = accepted_chat(&format!(r#"{}, "tool_choice": {value}"#, tools()));
        let Prompt::Chat { tool_choice, .. } = request.prompt else { panic!("a chat") };
        tool_choice
    };
    assert_eq!(choice(r#""auto""#), ToolChoice::Auto);
    assert_eq!(choice(r#""none""#), ToolChoice::None);
    assert_eq!(choice(r#""required""#), ToolChoice::Required);
    let named = r#"{"type": "function", "function": {"name": "add"}}"#;
    assert_eq!(choice(named), ToolChoice::Function("add".into()));

    let bad = [r#""any""#, "true", "{}", r#"{"type": "function"}"#, r#"{"function": {"name": "add"}}"#];
    let mut cases: Vec<_> = bad
        .iter()
        .map(|value| (chat(&format!(r#"{}, "tool_choice": {value}"#, tools())), "tool_choice"))
        .collect();
    let other = r#"{"type": "function", "function": {"name": "sub"}}"#;
    cases.push((chat(&format!(r#"{}, "tool_choice": {other}"#, tools())), "tool_choice"));
    cases.push((chat(r#""tool_choice": "required""#), "tool_choice"));
    cases.push((chat(&format!(r#""tool_choice": {named}"#)), "tool_choice"));
    refused("/v1/chat/completions", &cases);
}

#[test]
fn thinking() {
    let thinking = |fields: &str| {
        let Prompt::Chat { kwargs, .. } = accepted_chat(fields).prompt else { panic!("a chat") };
        kwargs.get("enable_thinking").cloned()
    };
    assert_eq!(thinking(r#""reasoning_effort": "none""#), Some(json!(false)));
    for effort in ["minimal", "low", "medium", "high"] {
        assert_eq!(thinking(&format!(r#""reasoning_effort": "{effort}""#)), Some(json!(true)));
    }
    assert_eq!(thinking(r#""enable_thinking": false"#), Some(json!(false)));
    assert_eq!(thinking(r#""chat_template_kwargs": {"enable_thinking": false}"#), Some(json!(false)));
    assert_eq!(thinking(r#""chat_template_kwargs": {"other": 1}"#), None);
    // The most specific one counts.
    let all = r#""chat_template_kwargs": {"enable_thinking": false}, "enable_thinking": true, "reasoning_effort": "high""#;
    assert_eq!(thinking(all), Some(json!(false)));
    assert_eq!(thinking(r#""enable_thinking": true, "reasoning_effort": "none""#), Some(json!(true)));
    let null = r#""chat_template_kwargs": {"enable_thinking": null}, "reasoning_effort": "none""#;
    assert_eq!(thinking(null), Some(json!(false)));

    refused_fields(&[
        (r#""reasoning_effort": "extreme""#, "reasoning_effort"),
        (r#""reasoning_effort": """#, "reasoning_effort"),
        (r#""reasoning_effort": 1"#, "reasoning_effort"),
        (r#""chat_template_kwargs": {"enable_thinking": "no"}"#, "chat_template_kwargs.enable_thinking"),
    ]);
}

#[test]
fn prompts_of_completions() {
    let prompt = |value: &str| accepted("/v1/completions", &format!(r#"{{"prompt": {value}}}"#)).prompt;
    assert!(matches!(prompt(r#""Once""#), Prompt::Text(text) if text == "Once"));
    assert!(matches!(prompt(r#"["Once"]"#), Prompt::Text(text) if text == "Once"));
    for ids in ["[1, 2, 999]", "[[1, 2, 999]]"] {
        assert!(matches!(prompt(ids), Prompt::Tokens(ids) if ids == [1, 2, 999]));
    }
    let over = format!("[{VOCABULARY}]");
    let bad = [
        "5",
        "true",
        "{}",
        "[]",
        "[[]]",
        r#"["a", "b"]"#,
        "[[1], [2]]",
        r#"[1, "a"]"#,
        "[-1]",
        "[1.5]",
        "[1e308]",
        "[4294967296]",
        "[null]",
        &over,
    ];
    let mut cases: Vec<_> = bad.iter().map(|value| (format!(r#"{{"prompt": {value}}}"#), "prompt")).collect();
    cases.push(("{}".into(), "prompt"));
    refused("/v1/completions", &cases);
}

#[test]
fn fields_of_completions() {
    let request = accepted(
        "/v1/completions",
        r#"{"prompt": "a", "max_tokens": 4, "echo": false, "best_of": 1, "logprobs": null, "suffix": "", "n": 1,
            "temperature": 0, "stop": "b"}"#,
    );
    assert_eq!((request.max_tokens, request.sampling.temperature), (Some(4), 0.0));
    assert_eq!(request.stop, ["b"]);
    let bad = [
        (r#""echo": true"#, "echo"),
        (r#""best_of": 2"#, "best_of"),
        (r#""logprobs": 1"#, "logprobs"),
        (r#""logprobs": 0"#, "logprobs"),
        (r#""suffix": "end""#, "suffix"),
        (r#""temperature": 3"#, "temperature"),
        (r#""max_tokens": 0"#, "max_tokens"),
        (r#""response_format": {"type": "json_object"}"#, "response_format"),
    ];
    let cases: Vec<_> =
        bad.iter().map(|(field, param)| (format!(r#"{{"prompt": "a", {field}}}"#), *param)).collect();
    refused("/v1/completions", &cases);
}

#[test]
fn model_names() {
    let stage = Stage::with(Play::hello(), |options| options.strict_model = true);
    let reply = stage.host.chat(&chat(r#""model": "gpt-4""#));
    assert_eq!(reply.status, 404);
    let error = reply.error();
    assert_eq!((&error["code"], &error["param"]), (&json!("model_not_found"), &json!("model")));
    assert_eq!(stage.count(), 0);
    assert_eq!(stage.host.chat(&chat(r#""model": "org/scripted model""#)).status, 200);
    assert_eq!(stage.host.chat(&chat("")).status, 200);

    let stage = Stage::new(Play::hello());
    let reply: Value = stage.host.chat(&chat(r#""model": "gpt-4""#)).json();
    assert_eq!(reply["model"], "org/scripted model");
}

//! Chat templates against what Python's Jinja2 makes of the same conversations.

mod text_support;

use serde_json::Value;
use skep_engine::ErrorKind;
use skep_engine::chat::{Context, Template};
use text_support::{json, shared, template, tiny};

#[test]
fn conversations_render_as_in_python() {
    let Some(vectors) = shared("vocab/template-vectors.json") else { return };
    let file = |path: &str| std::fs::read_to_string(shared(path).unwrap()).unwrap();
    let templates = [
        ("Qwen3.5-4B", file("vocab/Qwen3.5-4B.jinja")),
        ("gemma-4-31B-it", file("vocab/google-gemma-4-31B-it.jinja")),
        ("tiny-qwen35moe", template(&tiny())),
        ("tiny-gemma4", template(&shared("models/tiny-gemma4-Q4_K_M.gguf").unwrap())),
    ];
    let (mut rendered, mut refused) = (0, 0);
    for (name, source) in templates {
        let template = Template::new(&source).unwrap();
        for (at, vector) in json(&vectors).as_array().unwrap().iter().enumerate() {
            let mut kwargs = vector["kwargs"].as_object().unwrap().clone();
            let prompt = kwargs.remove("add_generation_prompt").unwrap();
            let tools = vector.get("tools").and_then(Value::as_array).cloned().unwrap_or_default();
            let result = template.render(&Context {
                messages: vector["messages"].as_array().unwrap(),
                tools: &tools,
                kwargs: &kwargs,
                add_generation_prompt: prompt.as_bool().unwrap(),
                bos_token: vector["bos_token"].as_str().unwrap(),
                eos_token: "",
            });
            let expected = &vector["expect"][name];
            match (result, expected["text"].as_str(), expected["error"].as_str()) {
                (Ok(text), Some(wanted), None) => {
                    assert_eq!(text, wanted, "{name}, vector {at}");
                    rendered += 1;
                }
                (Err(error), None, Some(wanted)) => {
                    assert_eq!(error.kind(), ErrorKind::Template);
                    if let Some(words) = wanted.strip_prefix("TemplateError: ") {
                        assert_eq!(error.to_string(), words);
                    }
                    refused += 1;
                }
                (result, ..) => panic!("{name}, vector {at}: {result:?} instead of {expected}"),
            }
        }
    }
    assert_eq!((rendered + refused, refused > 0), (160, true));
}

#[test]
fn long() {
    for (name, source) in [("qwen", "vocab/Qwen3.5-4B.jinja"), ("gemma", "vocab/google-gemma-4-31B-it.jinja")] {
        let t = Template::new(&std::fs::read_to_string(shared(source).unwrap()).unwrap()).unwrap();
        for n in [2, 100, 1000] {
            let m: Vec<Value> = (0..n).flat_map(|i| [
              serde_json::json!({"role": "user", "content": format!("message {i}")}),
              serde_json::json!({"role": "assistant", "content": "", "tool_calls": [{"id": i.to_string(), "function": {"name": "f", "arguments": {"a": 1, "b": "xyz"}}}]}),
              serde_json::json!({"role": "tool", "tool_call_id": i.to_string(), "content": "some result"}),
            ]).collect();
            eprintln!("{name}");
            let now = std::time::Instant::now();
            let r = t.render(&Context { messages: &m, tools: &[], kwargs: &Default::default(), add_generation_prompt: true, bos_token: "", eos_token: "" });
            eprintln!("{:?} {:?}", now.elapsed(), r.map(|x| x.len()));
        }
    }
}

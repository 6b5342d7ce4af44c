//! Chat templates against what Python's Jinja2 makes of the same conversations.

mod text_support;

use std::path::Path;

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

/// Jinja's features one by one, made by `data/templates.py`.
#[test]
fn features_are_those_of_python() {
    let golden = json(Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data/templates.json")));
    let variables = golden["variables"].as_object().unwrap();
    let mut wrong = 0;
    for case in golden["cases"].as_array().unwrap() {
        let source = case["template"].as_str().unwrap();
        let result = Template::new(source).and_then(|template| {
            template.render(&Context {
                messages: &[],
                tools: &[],
                kwargs: variables,
                add_generation_prompt: true,
                bos_token: "",
                eos_token: "",
            })
        });
        let same = match (&result, case["text"].as_str()) {
            (Ok(text), Some(wanted)) => text == wanted,
            (Err(error), None) => {
                let words = case["error"].as_str().unwrap().strip_prefix("TemplateError: ");
                words.is_none_or(|words| error.to_string() == words)
            }
            _ => false,
        };
        if !same {
            wrong += 1;
            println!("{source}\n   is {result:?}\n   not {case}");
        }
    }
    assert_eq!(wrong, 0);
}

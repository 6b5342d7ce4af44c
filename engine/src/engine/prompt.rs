use super::job::Job;
use super::{Prompt, Request, Sink, ToolChoice};
use crate::chat::{Chat, Template};
use crate::constraint::OneOf;
use crate::error::{Error, ErrorKind, Result};
use crate::images::{Images, Placed};
use crate::runner::{Runner, blind};
use crate::sampler::Sampler;
use crate::stream::{Markup, Stream, StreamOptions};
use crate::tokenizer::{Specials, Tokenizer};
use serde_json::Value;
use std::sync::Arc;
use std::time::Instant;

/// Turns requests into jobs: renders, tokenizes and checks, on the caller's thread.
pub(super) struct Prompter {
    tokenizer: Arc<Tokenizer>,
    template: Option<Arc<Template>>,
    images: Option<Images>,
    n_vocab: usize,
}

/// A prompt in tokens, and how the answer begins.
struct Start {
    tokens: Vec<u32>,
    images: Vec<Placed>,
    /// Tokens of the answer that are given, not generated.
    forced: Vec<u32>,
    constraint: Option<OneOf>,
    starts_in_reasoning: bool,
    without_thought: bool,
    tools: Vec<Value>,
}

impl Prompter {
    pub(super) fn new(runner: &Runner) -> Self {
        Self {
            tokenizer: Arc::clone(runner.shared_tokenizer()),
            template: runner.shared_template().cloned(),
            images: runner.images().cloned(),
            n_vocab: runner.info().n_vocab,
        }
    }

    pub(super) fn job(&self, request: Request, sink: Box<dyn Sink>, context: usize) -> Result<Job> {
        let sampler = Sampler::new(&request.sampling)?;
        let out_of_vocabulary = |id: u32| id as usize >= self.n_vocab;
        if let Some((id, _)) = request.sampling.logit_bias.iter().find(|(id, _)| out_of_vocabulary(*id)) {
            return Err(self.no_such_token("logit_bias", *id));
        }
        let chat = matches!(request.prompt, Prompt::Chat { .. });
        let Start { mut tokens, images, forced, constraint, starts_in_reasoning, without_thought, tools } =
            self.start(request.prompt)?;
        if tokens.is_empty() {
            return Err(Error::new(ErrorKind::Request, "the prompt is empty"));
        }
        let prompt_tokens = tokens.len();
        if prompt_tokens + forced.len() >= context {
            return Err(Error::new(
                ErrorKind::ContextLength { prompt: prompt_tokens, limit: context },
                format!(
                    "the prompt has {prompt_tokens} tokens and leaves no room in the context of {context}"
                ),
            ));
        }
        let room = context - prompt_tokens;
        let max_tokens = request.max_tokens.unwrap_or(room).min(room);
        let options = StreamOptions { starts_in_reasoning, without_thought, tools, stop: request.stop };
        let mut stream = Stream::new(Arc::clone(&self.tokenizer), options)?;
        if chat {
            stream = stream.detect_reasoning();
        }
        tokens.extend(forced);
        Ok(Job {
            tokens,
            prompt_tokens,
            images,
            max_tokens,
            ignore_eos: request.ignore_eos,
            sampler,
            constraint,
            stream,
            sink,
            queued: Instant::now(),
        })
    }

    fn start(&self, prompt: Prompt) -> Result<Start> {
        let plain = |tokens| Start {
            tokens,
            images: Vec::new(),
            forced: Vec::new(),
            constraint: None,
            starts_in_reasoning: false,
            without_thought: false,
            tools: Vec::new(),
        };
        match prompt {
            Prompt::Text(text) => Ok(plain(self.tokenizer.encode_prompt(&text, Specials::Parse)?)),
            Prompt::Tokens(tokens) => match tokens.iter().find(|&&id| id as usize >= self.n_vocab) {
                Some(&id) => Err(self.no_such_token("prompt", id)),
                None => Ok(plain(tokens)),
            },
            Prompt::Chat { messages, mut tools, tool_choice, kwargs } => {
                let template = self.template.as_ref().ok_or_else(|| {
                    Error::new(
                        ErrorKind::Template,
                        "the model's file has no chat template: use plain completions",
                    )
                })?;
                if tool_choice == ToolChoice::None {
                    tools.clear();
                }
                let chat =
                    Chat { messages: &messages, tools: &tools, kwargs: &kwargs, add_generation_prompt: true };
                let rendered = template.prompt(&self.tokenizer, &chat)?;
                let mut start = plain(rendered.ids);
                if !rendered.images.is_empty() {
                    let images = self.images.as_ref().ok_or_else(blind)?;
                    (start.tokens, start.images) = images.expand(&start.tokens, rendered.images)?;
                }
                start.starts_in_reasoning = rendered.starts_in_reasoning;
                start.without_thought = rendered.without_thought;
                self.force_call(template, &tool_choice, &tools, &mut start)?;
                start.tools = tools;
                Ok(start)
            }
        }
    }

    /// Makes the answer begin with a call where the request asks for one.
    fn force_call(
        &self,
        template: &Template,
        choice: &ToolChoice,
        tools: &[Value],
        start: &mut Start,
    ) -> Result<()> {
        let names: Vec<&str> = match choice {
            ToolChoice::Auto | ToolChoice::None => return Ok(()),
            ToolChoice::Required => tools.iter().filter_map(tool_name).collect(),
            ToolChoice::Function(name) => {
                tools.iter().filter_map(tool_name).filter(|tool| tool == name).collect()
            }
        };
        if names.is_empty() {
            let message = match choice {
                ToolChoice::Function(name) => {
                    format!("tool_choice names {name}, which is not among the tools")
                }
                _ => "tool_choice asks for a call, but there are no tools".to_owned(),
            };
            return Err(Error::new(ErrorKind::Request, message));
        }
        let Some(CallForm { opening, after_name }) = CallForm::of(template.source()) else {
            let message =
                "tool_choice cannot force a call: the model's template has no form of call known here";
            return Err(Error::new(ErrorKind::Request, message));
        };
        let mut text = opening.to_owned();
        match names.as_slice() {
            [name] => text.extend([&*self.tokenizer.shield(name), after_name]),
            several => {
                start.constraint = Some(OneOf::new(several.iter().map(|name| format!("{name}{after_name}"))))
            }
        }
        if start.starts_in_reasoning {
            // The thought is closed unthought: what is forced is the answer.
            let end = Markup::of(&self.tokenizer).end_of_thought();
            start.tokens.extend(self.tokenizer.encode(end, Specials::Parse)?);
            start.starts_in_reasoning = false;
        }
        start.forced = self.tokenizer.encode(&text, Specials::Shielded)?;
        Ok(())
    }

    fn no_such_token(&self, field: &str, id: u32) -> Error {
        let message = format!("{field}: token {id} is outside the vocabulary of {}", self.n_vocab);
        Error::new(ErrorKind::Request, message)
    }
}

/// How a model writes a call, up to and behind the function's name.
struct CallForm {
    opening: &'static str,
    after_name: &'static str,
}

impl CallForm {
    /// The form that a template shows the model.
    fn of(template: &str) -> Option<Self> {
        if template.contains("<function=") {
            Some(Self { opening: "<tool_call>\n<function=", after_name: ">\n" })
        } else if template.contains("<|tool_call>call:") {
            Some(Self { opening: "<|tool_call>call:", after_name: "{" })
        } else if template.contains("<tool_call>\\n{\"name\"") {
            Some(Self { opening: "<tool_call>\n{\"name\": \"", after_name: "\", \"arguments\": " })
        } else {
            None
        }
    }
}

fn tool_name(tool: &Value) -> Option<&str> {
    tool.get("function")?.get("name")?.as_str()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calls_are_begun_in_the_form_of_the_template() {
        let opening = |template: &str| CallForm::of(template).map(|form| (form.opening, form.after_name));
        assert_eq!(opening("... <function=name> ..."), Some(("<tool_call>\n<function=", ">\n")));
        assert_eq!(opening("{{- '<|tool_call>call:' + name + '{' -}}"), Some(("<|tool_call>call:", "{")));
        assert_eq!(
            opening(r#"<tool_call>\n{"name": <function-name>"#),
            Some(("<tool_call>\n{\"name\": \"", "\", \"arguments\": "))
        );
        assert_eq!(opening("{{ messages }}"), None);
    }
}

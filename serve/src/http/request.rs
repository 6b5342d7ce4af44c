use serde_json::{Map, Value};
use skep_engine::{Prompt, Request, Sampling, ToolChoice, chat};

use super::error::ApiError;
use super::fields::{Fields, Interval, mismatch, whole};
use super::images::{self, Collector, ImageOptions, Pending};
use super::model::Card;

/// How many stop strings a request may have, and how long each may be.
const STOP_COUNT: usize = 16;
const STOP_BYTES: usize = 1024;

/// A request for an answer, checked.
pub(super) struct Asked {
    pub(super) request: Request,
    pub(super) model: Option<String>,
    pub(super) format: Format,
    /// The pictures that the messages leave places for, in order.
    pub(super) pictures: Vec<Pending>,
}

/// Reads a request body.
pub(super) type Parse = fn(&[u8], &Card, Sampling, &ImageOptions) -> Result<Asked, ApiError>;

/// How the answer is to be sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Format {
    pub(super) stream: bool,
    pub(super) include_usage: bool,
}

impl Asked {
    /// The body of `POST /v1/chat/completions`.
    pub(super) fn chat(
        body: &[u8],
        card: &Card,
        defaults: Sampling,
        images: &ImageOptions,
    ) -> Result<Self, ApiError> {
        let mut fields = Fields::parse(body)?;
        refuse_common(&mut fields)?;
        refuse_chat(&mut fields)?;

        let mut collector = Collector::new(images, card);
        let messages = messages(fields.array("messages")?, &mut collector)?;
        let pictures = collector.pending;
        let tools = tools(fields.array("tools")?)?;
        let tool_choice = tool_choice(fields.take("tool_choice"), &tools)?;
        let kwargs = template_arguments(&mut fields)?;
        let limit = fields.count("max_tokens", 1)?;
        let max_tokens = fields.count("max_completion_tokens", 1)?.or(limit);
        let prompt = Prompt::Chat { messages, tools, tool_choice, kwargs };
        Ok(Self { pictures, ..Self::finish(fields, prompt, max_tokens, card, defaults)? })
    }

    /// The body of `POST /v1/completions`.
    pub(super) fn completion(
        body: &[u8],
        card: &Card,
        defaults: Sampling,
        _: &ImageOptions,
    ) -> Result<Self, ApiError> {
        let mut fields = Fields::parse(body)?;
        refuse_common(&mut fields)?;
        refuse_completion(&mut fields)?;

        let prompt = prompt(fields.take("prompt"), card)?;
        let max_tokens = fields.count("max_tokens", 1)?;
        Self::finish(fields, prompt, max_tokens, card, defaults)
    }

    /// Puts the pictures where the messages left places for them.
    pub(super) fn place(&mut self, pictures: Vec<chat::Image>) -> Result<(), ApiError> {
        match &mut self.request.prompt {
            Prompt::Chat { messages, .. } => images::place(messages, pictures),
            _ => images::place(&mut [], pictures),
        }
    }

    fn finish(
        mut fields: Fields,
        prompt: Prompt,
        max_tokens: Option<usize>,
        card: &Card,
        defaults: Sampling,
    ) -> Result<Self, ApiError> {
        let format = format(&mut fields)?;
        let request = Request {
            prompt,
            sampling: sampling(&mut fields, card, defaults)?,
            max_tokens,
            stop: stop(fields.take("stop"))?,
            ignore_eos: fields.boolean("ignore_eos")?.unwrap_or(false),
        };
        Ok(Self { request, model: fields.string("model")?, format, pictures: Vec::new() })
    }
}

/// What neither endpoint can do. A constraint that cannot be enforced is refused, never dropped in silence.
fn refuse_common(fields: &mut Fields) -> Result<(), ApiError> {
    for name in ["n", "best_of"] {
        if fields.count(name, 1)?.is_some_and(|count| count > 1) {
            return Err(ApiError::unsupported(name, format!("`{name}` must be 1: one answer per request")));
        }
    }
    let constraints = [
        "grammar",
        "guided_choice",
        "guided_grammar",
        "guided_json",
        "guided_regex",
        "json_schema",
        "structured_outputs",
    ];
    for name in constraints {
        if fields.take(name).is_some() {
            let message = format!("`{name}` is not supported: this server does not constrain its answers");
            return Err(ApiError::unsupported(name, message));
        }
    }
    let Some(format) = fields.take("response_format") else { return Ok(()) };
    match format.get("type").and_then(Value::as_str) {
        Some("text") => Ok(()),
        Some(kind) => {
            let message = format!("`response_format` of type `{kind}` is not supported; only `text` is");
            Err(ApiError::unsupported("response_format", message))
        }
        None => Err(mismatch("response_format", "an object with a `type`", &format)),
    }
}

fn refuse_chat(fields: &mut Fields) -> Result<(), ApiError> {
    if fields.boolean("logprobs")? == Some(true) {
        return Err(ApiError::unsupported("logprobs", "`logprobs` are not supported"));
    }
    if fields.count("top_logprobs", 0)?.is_some_and(|count| count > 0) {
        return Err(ApiError::unsupported("top_logprobs", "`top_logprobs` are not supported"));
    }
    for (name, instead) in [("functions", "tools"), ("function_call", "tool_choice")] {
        if fields.take(name).is_some() {
            let message = format!("`{name}` is the old form and not supported; use `{instead}`");
            return Err(ApiError::unsupported(name, message));
        }
    }
    if fields.take("audio").is_some() {
        return Err(ApiError::unsupported("audio", "`audio` is not supported: answers are text"));
    }
    let modalities = fields.array("modalities")?.unwrap_or_default();
    if modalities.iter().any(|modality| modality != "text") {
        return Err(ApiError::unsupported("modalities", "`modalities` may only hold `text`"));
    }
    Ok(())
}

fn refuse_completion(fields: &mut Fields) -> Result<(), ApiError> {
    if fields.boolean("echo")? == Some(true) {
        return Err(ApiError::unsupported("echo", "`echo` is not supported"));
    }
    match fields.take("logprobs") {
        None | Some(Value::Bool(false)) => {}
        Some(_) => return Err(ApiError::unsupported("logprobs", "`logprobs` are not supported")),
    }
    match fields.string("suffix")? {
        Some(suffix) if !suffix.is_empty() => {
            Err(ApiError::unsupported("suffix", "`suffix` is not supported"))
        }
        _ => Ok(()),
    }
}

fn messages(
    values: Option<Vec<Value>>,
    collector: &mut Collector<'_>,
) -> Result<Vec<chat::Message>, ApiError> {
    let values = values.unwrap_or_default();
    if values.is_empty() {
        return Err(ApiError::field("messages", "`messages` must hold at least one message"));
    }
    let parse = |(index, value): (usize, &Value)| {
        let param = format!("messages[{index}]");
        let message = chat::Message::with_images(value, &param, &mut |part, at| collector.part(part, at));
        message.map_err(|error| {
            let refusal = collector.refusal.take();
            refusal.unwrap_or_else(|| ApiError::from(error).with_param(param))
        })
    };
    values.iter().enumerate().map(parse).collect()
}

fn tools(values: Option<Vec<Value>>) -> Result<Vec<Value>, ApiError> {
    let values = values.unwrap_or_default();
    for (index, tool) in values.iter().enumerate() {
        let param = format!("tools[{index}]");
        match tool.get("type").and_then(Value::as_str) {
            Some("function") => {}
            Some(kind) => {
                let message = format!("`{param}.type` is `{kind}`; only `function` is supported");
                return Err(ApiError::field(param, message));
            }
            None => return Err(mismatch(&param, "an object of type `function`", tool)),
        }
        if tool_name(tool).is_none_or(str::is_empty) {
            let message = format!("`{param}.function.name` must be a string that is not empty");
            return Err(ApiError::field(param, message));
        }
        let parameters = &tool["function"]["parameters"];
        if !(parameters.is_null() || parameters.is_object()) {
            return Err(mismatch(&format!("{param}.function.parameters"), "an object", parameters));
        }
    }
    Ok(values)
}

fn tool_name(tool: &Value) -> Option<&str> {
    tool.get("function")?.get("name")?.as_str()
}

fn tool_choice(value: Option<Value>, tools: &[Value]) -> Result<ToolChoice, ApiError> {
    let Some(value) = value else { return Ok(ToolChoice::Auto) };
    let needs_tools = |choice| match tools {
        [] => Err(ApiError::field("tool_choice", "`tool_choice` asks for a call, but `tools` holds none")),
        _ => Ok(choice),
    };
    match value.as_str() {
        Some("auto") => return Ok(ToolChoice::Auto),
        Some("none") => return Ok(ToolChoice::None),
        Some("required") => return needs_tools(ToolChoice::Required),
        _ => {}
    }
    let function = value.get("type").is_some_and(|kind| kind == "function");
    let Some(name) = tool_name(&value).filter(|_| function) else {
        let expected = "`auto`, `none`, `required`, or an object that names a function";
        return Err(mismatch("tool_choice", expected, &value));
    };
    if !tools.iter().any(|tool| tool_name(tool) == Some(name)) {
        let message = format!("`tool_choice` names the function `{name}`, which `tools` does not hold");
        return Err(ApiError::field("tool_choice", message));
    }
    needs_tools(ToolChoice::Function(name.to_owned()))
}

/// What the template is rendered with beside the conversation. Of the three ways to switch thinking, the most
/// specific one counts: `chat_template_kwargs`, then `enable_thinking`, then `reasoning_effort`.
fn template_arguments(fields: &mut Fields) -> Result<Map<String, Value>, ApiError> {
    const THINKING: &str = "enable_thinking";
    let mut arguments = fields.object("chat_template_kwargs")?.unwrap_or_default();
    let switch = fields.boolean(THINKING)?;
    let effort = match fields.string("reasoning_effort")?.as_deref() {
        None => None,
        Some("none") => Some(false),
        Some("minimal" | "low" | "medium" | "high") => Some(true),
        Some(other) => {
            let expected = "`none`, `minimal`, `low`, `medium` or `high`";
            return Err(mismatch("reasoning_effort", expected, &Value::from(other)));
        }
    };
    match arguments.get(THINKING) {
        None | Some(Value::Null) => {
            if let Some(thinking) = switch.or(effort) {
                arguments.insert(THINKING.to_owned(), Value::Bool(thinking));
            }
        }
        Some(Value::Bool(_)) => {}
        Some(other) => return Err(mismatch("chat_template_kwargs.enable_thinking", "true or false", other)),
    }
    Ok(arguments)
}

fn prompt(value: Option<Value>, card: &Card) -> Result<Prompt, ApiError> {
    const EXPECTED: &str = "a string or an array of token ids";
    match value {
        None => Err(ApiError::field("prompt", format!("`prompt` is missing: it must be {EXPECTED}"))),
        Some(Value::String(text)) => Ok(Prompt::Text(text)),
        Some(Value::Array(mut items)) => match items.as_mut_slice() {
            [] => Err(ApiError::field("prompt", "`prompt` is empty")),
            [one @ (Value::String(_) | Value::Array(_))] => prompt(Some(one.take()), card),
            [Value::String(_) | Value::Array(_), ..] => {
                Err(ApiError::unsupported("prompt", "`prompt` may hold only one prompt per request"))
            }
            ids => {
                ids.iter().map(|id| token(id, "prompt", card)).collect::<Result<_, _>>().map(Prompt::Tokens)
            }
        },
        Some(other) => Err(mismatch("prompt", EXPECTED, &other)),
    }
}

fn token(value: &Value, param: &str, card: &Card) -> Result<u32, ApiError> {
    let id = whole(value).filter(|&id| id < card.n_vocab as u64).and_then(|id| u32::try_from(id).ok());
    id.ok_or_else(|| {
        let message = format!("`{param}` holds {value}, which is no token id from 0 to {}", card.n_vocab - 1);
        ApiError::field(param, message)
    })
}

fn sampling(fields: &mut Fields, card: &Card, mut sampling: Sampling) -> Result<Sampling, ApiError> {
    fn set<T>(target: &mut T, value: Option<T>) {
        if let Some(value) = value {
            *target = value;
        }
    }
    set(&mut sampling.temperature, fields.number("temperature", Interval::Closed(0.0, 2.0))?);
    let top_k = fields.count("top_k", 0)?;
    set(&mut sampling.top_k, top_k.map(|count| u32::try_from(count).unwrap_or(u32::MAX)));
    set(&mut sampling.top_p, fields.number("top_p", Interval::Above(0.0, 1.0))?);
    set(&mut sampling.min_p, fields.number("min_p", Interval::Closed(0.0, 1.0))?);
    for name in ["repeat_penalty", "repetition_penalty"] {
        set(&mut sampling.repetition_penalty, fields.number(name, Interval::Above(0.0, 10.0))?);
    }
    set(&mut sampling.presence_penalty, fields.number("presence_penalty", Interval::Closed(-2.0, 2.0))?);
    set(&mut sampling.frequency_penalty, fields.number("frequency_penalty", Interval::Closed(-2.0, 2.0))?);
    set(&mut sampling.logit_bias, fields.object("logit_bias")?.map(|map| logit_bias(map, card)).transpose()?);
    sampling.seed = fields.seed("seed")?;
    sampling.validate()?;
    Ok(sampling)
}

fn logit_bias(map: Map<String, Value>, card: &Card) -> Result<Vec<(u32, f32)>, ApiError> {
    const PARAM: &str = "logit_bias";
    let parse = |(id, bias): (String, Value)| {
        let number = id.parse().map_or_else(|_| Value::String(id), |id: u64| Value::from(id));
        let token = token(&number, PARAM, card)?;
        match bias.as_f64() {
            Some(value) if (-100.0..=100.0).contains(&value) => Ok((token, value as f32)),
            _ => Err(mismatch(PARAM, "an object of numbers from -100 to 100", &bias)),
        }
    };
    map.into_iter().map(parse).collect()
}

fn stop(value: Option<Value>) -> Result<Vec<String>, ApiError> {
    const PARAM: &str = "stop";
    let values = match value {
        None => return Ok(Vec::new()),
        Some(Value::Array(values)) => values,
        Some(one) => vec![one],
    };
    if values.len() > STOP_COUNT {
        let message = format!("`stop` may hold at most {STOP_COUNT} strings, not {}", values.len());
        return Err(ApiError::field(PARAM, message));
    }
    let parse = |value| match value {
        Value::String(text) if text.is_empty() => {
            Err(ApiError::field(PARAM, "a string in `stop` must not be empty"))
        }
        Value::String(text) if text.len() > STOP_BYTES => {
            Err(ApiError::field(PARAM, format!("a string in `stop` may have at most {STOP_BYTES} bytes")))
        }
        Value::String(text) => Ok(text),
        other => Err(mismatch(PARAM, "a string or an array of strings", &other)),
    };
    values.into_iter().map(parse).collect()
}

fn format(fields: &mut Fields) -> Result<Format, ApiError> {
    let stream = fields.boolean("stream")?.unwrap_or(false);
    let include_usage = match fields.object("stream_options")? {
        None => false,
        Some(options) => match options.get("include_usage") {
            None | Some(Value::Null) => false,
            Some(Value::Bool(include)) => *include,
            Some(other) => return Err(mismatch("stream_options.include_usage", "true or false", other)),
        },
    };
    Ok(Format { stream, include_usage })
}

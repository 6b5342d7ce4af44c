//! Jinja templates as `transformers` runs them.

use std::time::{SystemTime, UNIX_EPOCH};

use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Rest, ValueKind};
use minijinja::{Environment, Output, State, UndefinedBehavior, context};
use minijinja_contrib::pycompat;
use serde_json::{Map, Value, json};

use super::{python, time};
use crate::error::{Error, ErrorKind, Result};

const NAME: &str = "chat template";

/// What rendering may cost whatever the input (in the engine's units: about an instruction or 64 bytes each) ...
const BASE_FUEL: u64 = 1_000_000;
/// ... and further per byte of input.
const FUEL_PER_BYTE: u64 = 32;
/// Bytes a prompt may have whatever the input, and further per byte of input.
const BASE_OUTPUT: usize = 1 << 20;
const OUTPUT_PER_BYTE: usize = 16;
/// Nesting of macro calls and blocks, in the engine's units (a macro call costs four).
const MAX_RECURSION: usize = 200;
/// Bytes of a template's source.
const MAX_SOURCE: usize = 1 << 20;

/// What a template is rendered with.
#[derive(Debug, Clone, Copy)]
pub struct Context<'a> {
    /// The variable `messages`.
    pub messages: &'a [Value],
    /// The variable `tools`; `none` to the template when empty.
    pub tools: &'a [Value],
    /// Further variables; those of this struct win over variables of the same name.
    pub kwargs: &'a Map<String, Value>,
    /// The variable `add_generation_prompt`.
    pub add_generation_prompt: bool,
    /// The variable `bos_token`.
    pub bos_token: &'a str,
    /// The variable `eos_token`.
    pub eos_token: &'a str,
}

/// A chat template, compiled.
///
/// It behaves as in Python's `transformers`: `trim_blocks` and `lstrip_blocks`, loop controls, `{% generation %}` blocks
/// (which only matter for training), `tojson` without HTML escaping, `raise_exception`, `strftime_now` (in UTC), string
/// methods of Python, undefined variables that print as nothing. A template comes with a model file and is not trusted:
/// it has no access to files or the network, and bounded steps, memory, nesting and output.
///
/// Known differences to Python: integers beyond 64 bits in the input are floats, the operator `~` writes floats below 1e-4
/// and from 1e16 on without exponent, and slicing an undefined value gives an empty list instead of an error.
pub struct Template {
    environment: Environment<'static>,
    takes_parts: bool,
}

impl Template {
    /// Compiles a template.
    ///
    /// # Errors
    ///
    /// `ErrorKind::Template` on a syntax error, with the line.
    pub fn new(source: &str) -> Result<Self> {
        if source.len() > MAX_SOURCE {
            let message = format!("chat template has {} bytes, more than {MAX_SOURCE}", source.len());
            return Err(Error::new(ErrorKind::Template, message));
        }
        let mut environment = environment()?;
        environment.add_template_owned(NAME, without_generation_tags(source)).map_err(|error| failure(&error))?;
        let mut template = Self { environment, takes_parts: false };
        template.takes_parts = template.probe_parts();
        Ok(template)
    }

    /// Renders the template.
    ///
    /// # Errors
    ///
    /// `ErrorKind::Template`, with the template's own words where it refuses the conversation by `raise_exception`.
    pub fn render(&self, context: &Context<'_>) -> Result<String> {
        let kwargs: usize = context.kwargs.iter().map(|(key, value)| key.len() + size(value)).sum();
        let input = kwargs + context.messages.iter().chain(context.tools).map(size).sum::<usize>();
        let mut environment = self.environment.clone();
        environment.set_fuel(Some(BASE_FUEL.saturating_add((input as u64).saturating_mul(FUEL_PER_BYTE))));

        let mut variables = context.kwargs.clone();
        let tools = if context.tools.is_empty() { Value::Null } else { Value::Array(context.tools.to_vec()) };
        for (name, value) in [
            ("messages", Value::Array(context.messages.to_vec())),
            ("tools", tools),
            ("add_generation_prompt", context.add_generation_prompt.into()),
            ("bos_token", context.bos_token.into()),
            ("eos_token", context.eos_token.into()),
        ] {
            variables.insert(name.to_owned(), value);
        }
        variables.entry("documents").or_insert(Value::Null);

        let limit = BASE_OUTPUT.saturating_add(input.saturating_mul(OUTPUT_PER_BYTE));
        let mut output = Limited { bytes: Vec::new(), limit };
        let template = environment.get_template(NAME).map_err(|error| failure(&error))?;
        template
            .render_captured_to(minijinja::Value::from_serialize(&variables), &mut output)
            .map_err(|error| failure(&error))?;
        String::from_utf8(output.bytes)
            .map_err(|_| Error::new(ErrorKind::Template, "chat template: the output is not UTF-8"))
    }

    /// Whether the template renders content given as a list of parts; otherwise it must be given as one text.
    pub(crate) fn takes_parts(&self) -> bool {
        self.takes_parts
    }

    fn probe_parts(&self) -> bool {
        let messages = [json!({"role": "user", "content": [{"type": "text", "text": "Probe"}]})];
        let rendered = self.render(&Context {
            messages: &messages,
            tools: &[],
            kwargs: &Map::new(),
            add_generation_prompt: false,
            bos_token: "",
            eos_token: "",
        });
        // A template that expects text prints the list itself, or fails.
        rendered.is_ok_and(|text| text.contains("Probe") && !text.contains("'text'") && !text.contains("\"text\""))
    }
}

impl std::fmt::Debug for Template {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Template").field("takes_parts", &self.takes_parts).finish_non_exhaustive()
    }
}

/// The words of `raise_exception`.
#[derive(Debug)]
struct Raised(String);

impl std::fmt::Display for Raised {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Raised {}

/// A buffer that refuses to grow beyond a limit.
struct Limited {
    bytes: Vec<u8>,
    limit: usize,
}

impl std::io::Write for Limited {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        if self.bytes.len() + bytes.len() > self.limit {
            return Err(std::io::Error::other(format!("more than {} bytes of output", self.limit)));
        }
        self.bytes.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

fn environment() -> Result<Environment<'static>> {
    let mut environment = Environment::new();
    let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
    environment.set_syntax(syntax.map_err(|error| failure(&error))?);
    environment.set_undefined_behavior(UndefinedBehavior::Lenient);
    environment.set_recursion_limit(MAX_RECURSION);
    environment.set_debug(false);
    environment.set_formatter(format_value);
    environment.set_unknown_method_callback(method);
    environment.add_filter("string", |value: &minijinja::Value| python::str(value));
    environment.add_filter("tojson", python::tojson);
    environment.add_filter("trim", trim);
    environment.add_test("sequence", |value: &minijinja::Value| {
        // In Python strings and mappings have a length and can be indexed, too.
        matches!(value.kind(), ValueKind::Seq | ValueKind::String | ValueKind::Map | ValueKind::Undefined)
    });
    environment.add_function("raise_exception", raise_exception);
    environment.add_function("strftime_now", strftime_now);
    Ok(environment)
}

fn format_value(
    out: &mut Output<'_>,
    _state: &mut State<'_, '_>,
    value: &minijinja::Value,
) -> Result<(), minijinja::Error> {
    match value.as_str() {
        Some(text) => out.write_str(text),
        None => out.write_str(&python::str(value)?),
    }
    .map_err(|_| minijinja::Error::new(minijinja::ErrorKind::WriteFailure, "cannot write the output"))
}

/// `trim(value, chars=none)`: Python's `str(value).strip(chars)`.
fn trim(value: &minijinja::Value, chars: Option<&str>) -> Result<String, minijinja::Error> {
    let text = python::str(value)?;
    Ok(match chars {
        Some(chars) => text.trim_matches(|c| chars.contains(c)),
        None => text.trim_matches(python::is_space),
    }
    .to_owned())
}

fn raise_exception(message: &minijinja::Value) -> Result<minijinja::Value, minijinja::Error> {
    let error = minijinja::Error::new(minijinja::ErrorKind::InvalidOperation, "raise_exception was called");
    Err(error.with_source(Raised(message.to_string())))
}

fn strftime_now(format: &str) -> String {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |now| now.as_secs());
    time::strftime(format, now as i64)
}

/// Methods of Python's types: those where the library's differ or lack, then the library's.
fn method(
    state: &mut State<'_, '_>,
    value: &minijinja::Value,
    name: &str,
    args: &[minijinja::Value],
) -> Result<minijinja::Value, minijinja::Error> {
    let Some(text) = value.as_str() else {
        return pycompat::unknown_method_callback(state, value, name, args);
    };
    let strings: Option<Vec<&str>> = args.iter().map(minijinja::Value::as_str).collect();
    let whitespace = args.iter().all(minijinja::Value::is_none) && args.len() <= 1;
    Ok(match (name, strings.as_deref()) {
        ("strip", _) if whitespace => text.trim_matches(python::is_space).into(),
        ("lstrip", _) if whitespace => text.trim_start_matches(python::is_space).into(),
        ("rstrip", _) if whitespace => text.trim_end_matches(python::is_space).into(),
        ("split", _) if whitespace => {
            text.split(python::is_space).filter(|word| !word.is_empty()).map(minijinja::Value::from).collect()
        }
        ("removeprefix", Some(&[prefix])) => text.strip_prefix(prefix).unwrap_or(text).into(),
        ("removesuffix", Some(&[suffix])) => text.strip_suffix(suffix).unwrap_or(text).into(),
        ("rsplit", _) if let Some((separator, limit)) = rsplit_args(args) => {
            let mut parts: Vec<_> = text.rsplitn(limit, separator).map(minijinja::Value::from).collect();
            parts.reverse();
            parts.into()
        }
        _ => return pycompat::unknown_method_callback(state, value, name, args),
    })
}

//! Jinja templates as `transformers` runs them.

use std::time::{SystemTime, UNIX_EPOCH};

use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Serde, ValueKind};
use minijinja::{Environment, Output, State, UndefinedBehavior};
use minijinja_contrib::pycompat;
use serde_json::{Map, Value, json};

use super::{python, time};
use crate::error::{Error, ErrorKind, Result};

const NAME: &str = "chat template";

/// What rendering may cost whatever the input (in the engine's units: about an instruction, or 64 bytes) ...
const BASE_FUEL: u64 = 100_000;
/// ... further per byte of input (templates search texts, at a unit per byte) ...
const FUEL_PER_BYTE: u64 = 8;
/// ... and per pair of messages (some templates look from each message at all others).
const FUEL_PER_PAIR: u64 = 8;
/// The most it may cost: about a second.
const MAX_FUEL: u64 = 20_000_000;
/// A template can nest a value one level deeper per unit of fuel, and the engine compares, writes and drops nested values
/// recursively: the stack it runs on has this many bytes per unit ...
const STACK_PER_FUEL: u64 = 640;
/// ... within these limits. The memory is only reserved, and used if a template really does so.
const STACK: std::ops::RangeInclusive<u64> = 2 << 20..=1 << 30;
/// Bytes a prompt may have whatever the input, and further per byte of input.
const BASE_OUTPUT: usize = 1 << 20;
const OUTPUT_PER_BYTE: usize = 16;
/// Nesting of macro calls and blocks, in the engine's units (a macro call costs four).
const MAX_RECURSION: usize = 200;
/// Bytes of a template's source.
const MAX_SOURCE: usize = 1 << 18;

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
/// Known differences to Python, in what chat templates hardly use: integers beyond 64 bits in the input are floats; the
/// operator `~` writes floats below 1e-4 and from 1e16 on without exponent; a loop over `none` and a slice of an undefined
/// value are empty instead of errors; `safe` text is not joined by escaping; `%` does not format; `dictsort` takes its
/// options by name only; the filter `wordcount` and the globals `cycler`, `joiner` and `lipsum` do not exist.
pub struct Template {
    environment: Environment<'static>,
    source: String,
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
        let lines = source.replace("\r\n", "\n").replace('\r', "\n");
        environment
            .add_template_owned(NAME, without_generation_tags(&lines))
            .map_err(|error| failure(&error))?;
        let mut template = Self { source: source.to_owned(), environment, takes_parts: false };
        template.takes_parts = template.probe_parts();
        Ok(template)
    }

    /// The template's own text.
    pub fn source(&self) -> &str {
        &self.source
    }

    /// Renders the template.
    ///
    /// # Errors
    ///
    /// `ErrorKind::Template`, with the template's own words where it refuses the conversation by `raise_exception`.
    pub fn render(&self, context: &Context<'_>) -> Result<String> {
        let kwargs: usize = context.kwargs.iter().map(|(key, value)| key.len() + size(value)).sum();
        let input = kwargs + context.messages.iter().chain(context.tools).map(size).sum::<usize>();
        let pairs = (context.messages.len() as u64).saturating_pow(2);
        let fuel = BASE_FUEL
            .saturating_add(FUEL_PER_BYTE.saturating_mul(input as u64))
            .saturating_add(FUEL_PER_PAIR.saturating_mul(pairs))
            .min(MAX_FUEL);
        let stack = fuel.saturating_mul(STACK_PER_FUEL).clamp(*STACK.start(), *STACK.end()) as usize;
        let output = BASE_OUTPUT.saturating_add(input.saturating_mul(OUTPUT_PER_BYTE));
        let variables = variables(context);
        std::thread::scope(|scope| {
            let render = || self.render_within(&variables, fuel, output);
            let thread = std::thread::Builder::new().stack_size(stack).spawn_scoped(scope, render).map_err(
                |error| {
                    Error::new(
                        ErrorKind::Template,
                        format!("{NAME}: no thread with {stack} bytes of stack: {error}"),
                    )
                },
            )?;
            thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        })
    }

    fn render_within(&self, variables: &Map<String, Value>, fuel: u64, limit: usize) -> Result<String> {
        let mut environment = self.environment.clone();
        environment.set_fuel(Some(fuel));
        let mut output = Limited { bytes: Vec::new(), limit };
        let template = environment.get_template(NAME).map_err(|error| failure(&error))?;
        template
            .render_captured_to(minijinja::Value::from(Serde(variables)), &mut output)
            .map_err(|error| failure(&error))?;
        String::from_utf8(output.bytes)
            .map_err(|_| Error::new(ErrorKind::Template, format!("{NAME}: the output is not UTF-8")))
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
        rendered.is_ok_and(|text| {
            text.contains("Probe") && !text.contains("'text'") && !text.contains("\"text\"")
        })
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

/// The variables of a context; its own win over others of the same name.
fn variables(context: &Context<'_>) -> Map<String, Value> {
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
    variables
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
        // In Python strings, mappings and ranges have a length and can be indexed, too.
        match value.kind() {
            ValueKind::Seq | ValueKind::String | ValueKind::Map | ValueKind::Undefined => true,
            ValueKind::Iterable => value.len().is_some(),
            _ => false,
        }
    });
    environment.add_test("iterable", |value: &minijinja::Value| !value.is_none() && value.try_iter().is_ok());
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
        ("rsplit", Some(&[separator])) if !separator.is_empty() => reversed(text.rsplit(separator)),
        _ => return pycompat::unknown_method_callback(state, value, name, args),
    })
}

fn reversed<'t>(parts: impl Iterator<Item = &'t str>) -> minijinja::Value {
    let mut parts: Vec<minijinja::Value> = parts.map(minijinja::Value::from).collect();
    parts.reverse();
    parts.into()
}

/// About the bytes of a JSON value as text.
fn size(value: &Value) -> usize {
    match value {
        Value::Null | Value::Bool(_) | Value::Number(_) => 8,
        Value::String(text) => text.len() + 8,
        Value::Array(items) => 8 + items.iter().map(size).sum::<usize>(),
        Value::Object(map) => 8 + map.iter().map(|(key, value)| key.len() + size(value)).sum::<usize>(),
    }
}

/// The error a caller sees: the words of `raise_exception`, or what went wrong and in which line.
fn failure(error: &minijinja::Error) -> Error {
    let mut source: Option<&(dyn std::error::Error + 'static)> = Some(error);
    while let Some(cause) = source {
        if let Some(Raised(words)) = cause.downcast_ref() {
            return Error::new(ErrorKind::Template, words.clone());
        }
        source = cause.source();
    }
    let mut message = NAME.to_owned();
    if let Some(line) = error.line() {
        message.push_str(&format!(", line {line}"));
    }
    message.push_str(&format!(": {}", error.kind()));
    if let Some(detail) = error.detail() {
        message.push_str(&format!(": {detail}"));
    }
    Error::new(ErrorKind::Template, message)
}

/// Replaces the tags `generation` and `endgeneration`, which the engine does not know, by a plain scope with the same
/// whitespace control.
fn without_generation_tags(source: &str) -> String {
    let mut out = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(open) = rest.find("{%") {
        out.push_str(&rest[..open + 2]);
        rest = &rest[open + 2..];
        let Some(close) = rest.find("%}") else { break };
        let tag = &rest[..close];
        let word = tag.trim_start_matches(['-', '+']).trim_end_matches(['-', '+']).trim();
        let scope = match word {
            "generation" => "with",
            "endgeneration" => "endwith",
            _ => continue,
        };
        out.push_str(&tag.replacen(word, scope, 1));
        rest = &rest[close..];
    }
    out.push_str(rest);
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn render(source: &str) -> Result<String> {
        render_with(source, Map::new())
    }

    fn render_with(source: &str, kwargs: Map<String, Value>) -> Result<String> {
        Template::new(source)?.render(&Context {
            messages: &[json!({"role": "user", "content": "hi"})],
            tools: &[],
            kwargs: &kwargs,
            add_generation_prompt: true,
            bos_token: "<s>",
            eos_token: "</s>",
        })
    }

    #[test]
    fn generation_tags_are_scopes() {
        let source = "a {%- generation -%} b{% set x = 1 %}{% endgeneration %}\n c{%generation%}d{%- endgeneration +%}\ne";
        assert_eq!(
            without_generation_tags(source),
            "a {%- with -%} b{% set x = 1 %}{% endwith %}\n c{%with%}d{%- endwith +%}\ne"
        );
        assert_eq!(render(source).unwrap(), "ab cd\ne");
        assert_eq!(without_generation_tags("{% generation"), "{% generation");
        assert_eq!(render("{{ 'generation' }}").unwrap(), "generation");
    }

    #[test]
    fn a_refusal_has_the_templates_words_and_spoils_nothing() {
        let source =
            "{% macro m() %}{{ raise_exception('No ' ~ x) }}{% endmacro %}{% if x %}{{ m() }}{% endif %}ok";
        let template = Template::new(source).unwrap();
        let render = |kwargs: &Map<String, Value>| {
            template.render(&Context {
                messages: &[],
                tools: &[],
                kwargs,
                add_generation_prompt: false,
                bos_token: "",
                eos_token: "",
            })
        };
        let refused = json!({"x": "Bob"});
        for _ in 0..3 {
            let error = render(refused.as_object().unwrap()).unwrap_err();
            assert_eq!((error.kind(), error.to_string().as_str()), (ErrorKind::Template, "No Bob"));
            assert_eq!(render(&Map::new()).unwrap(), "ok");
        }
    }

    #[test]
    fn errors_have_a_line() {
        let error = Template::new("a\n{% if %}").unwrap_err();
        assert!(error.to_string().starts_with("chat template, line 2: syntax error: "), "{error}");
        let error = render("a\n\n{{ x.y.z }}").unwrap_err();
        assert_eq!(
            (error.kind(), error.to_string().as_str()),
            (ErrorKind::Template, "chat template, line 3: undefined value")
        );
    }

    #[test]
    fn hostile_templates_fail() {
        for source in [
            "{{ ''.__class__.__mro__[1].__subclasses__() }}",
            "{% for i in range(10 ** 9) %}{% endfor %}",
            "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
            "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
            "{% set ns = namespace(s='xxxxxxxx') %}{% for i in range(64) %}{% set ns.s = ns.s + ns.s %}{% endfor %}{{ ns.s }}",
            "{% set ns = namespace(s='x' * 4000) %}{% for i in range(9999) %}{{ ns.s }}{% endfor %}",
            "{{ 'x' * 10 ** 10 }}",
            "{% set ns = namespace(l=[]) %}{% for i in range(99999) %}{% set ns.l = [ns.l] %}{% endfor %}{{ ns.l }}",
            "{% set ns = namespace(l=[]) %}{% for i in range(9999) %}{% set ns.l = [ns.l] %}{% endfor %}{{ ns.l | tojson }}",
            "{% include '/etc/passwd' %}",
            "{% import '/etc/passwd' as x %}",
            "{% extends '/etc/passwd' %}",
        ] {
            let error = render(source).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Template, "{source}");
        }
        assert!(
            Template::new(&format!("{{{{ {}1{} }}}}", "(".repeat(100_000), ")".repeat(100_000))).is_err()
        );
        assert!(Template::new(&" ".repeat(MAX_SOURCE + 1)).is_err());
    }

    #[test]
    fn variables_of_the_call_win() {
        let kwargs =
            json!({"messages": 1, "tools": 2, "bos_token": 3, "x": 1e16, "add_generation_prompt": false});
        let source = "{{ messages[0].content }} {{ tools }} {{ bos_token }} {{ add_generation_prompt }} {{ x }} {{ documents }}";
        let text = render_with(source, kwargs.as_object().unwrap().clone()).unwrap();
        assert_eq!(text, "hi None <s> True 1e+16 None");
    }

    #[test]
    fn content_in_parts_is_probed() {
        for (source, takes) in [
            ("{% for m in messages %}{{ m.content }}{% endfor %}", false),
            ("{% for m in messages %}{{ m.content + 'x' }}{% endfor %}", false),
            ("{% for m in messages %}{{ m.content | tojson }}{% endfor %}", false),
            ("{% for m in messages %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endfor %}", true),
            ("nothing", false),
        ] {
            assert_eq!(Template::new(source).unwrap().takes_parts(), takes, "{source}");
        }
    }
}

//! Tools a model may call, and the arguments of its calls.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::SystemTime;

use serde_json::{Map, Value};

use super::Delta;
use crate::error::{Error, ErrorKind, Result};

/// The parameter schemas of a request's tools: they decide how the text of an argument becomes JSON.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Tools {
    /// By function, its parameters and their schemas.
    functions: HashMap<String, Map<String, Value>>,
}

impl Tools {
    /// Reads the `tools` of a request: `{"type": "function", "function": {"name", "parameters"}}`, or the inner object alone.
    ///
    /// # Errors
    ///
    /// `ErrorKind::Request` naming the tool that has no name, or parameters that are not an object.
    pub fn new(tools: &[Value]) -> Result<Self> {
        let mut functions = HashMap::new();
        for (at, tool) in tools.iter().enumerate() {
            let wrong = |what: &str| Error::new(ErrorKind::Request, format!("tools[{at}] {what}"));
            let function = tool.get("function").unwrap_or(tool);
            let Some(Value::String(name)) = function.get("name") else {
                return Err(wrong("has no function name"));
            };
            let properties = match function.get("parameters") {
                None | Some(Value::Null) => Map::new(),
                Some(Value::Object(schema)) => match schema.get("properties") {
                    Some(Value::Object(properties)) => properties.clone(),
                    _ => Map::new(),
                },
                Some(_) => return Err(wrong("has parameters that are not an object")),
            };
            functions.insert(name.clone(), properties);
        }
        Ok(Self { functions })
    }

    /// The JSON text of an argument that the model wrote as plain text.
    ///
    /// By the schema of the parameter: a type other than string is taken where the text is JSON of that type (numbers
    /// keep their form); otherwise the text itself is the value. A parameter without a schema, or with one that does not say a
    /// type, is a string unless the text is a JSON object or array.
    pub(super) fn argument(&self, function: &str, parameter: &str, text: &str) -> String {
        let schema = self.functions.get(function).and_then(|parameters| parameters.get(parameter));
        schema.map(Types::of).unwrap_or_default().of_text(text)
    }

    /// The schemas of a function's parameters, by name.
    pub(super) fn parameters(&self, function: &str) -> Option<&Map<String, Value>> {
        self.functions.get(function)
    }
}

/// Which JSON types a schema allows.
#[derive(Debug, Default, Clone, Copy)]
pub(super) struct Types {
    known: bool,
    array: bool,
    boolean: bool,
    integer: bool,
    null: bool,
    number: bool,
    object: bool,
    string: bool,
}

impl Types {
    pub(super) fn of(schema: &Value) -> Self {
        let mut types = Self::default();
        collect_types(schema, &mut types, 0);
        types
    }

    /// The JSON of plain text: a type other than string where the text is JSON of it.
    fn of_text(self, text: &str) -> String {
        let json = text.trim();
        // Models trained on Python spell these so.
        let json = match json {
            "True" if self.boolean => "true",
            "False" if self.boolean => "false",
            "None" if self.null => "null",
            _ => json,
        };
        if let Ok(value) = serde_json::from_str::<Value>(json)
            && self.allows(&value)
        {
            return json.to_owned();
        }
        Value::from(text).to_string()
    }

    /// The JSON of what was written as a string: another type only where the schema wants no string.
    pub(super) fn of_string(self, text: &str) -> String {
        match self.known && !self.string {
            true => self.of_text(text),
            false => Value::from(text).to_string(),
        }
    }

    /// The JSON of a word outside of quotes: a number, a literal, or else text.
    pub(super) fn of_bare(self, word: &str) -> String {
        let json = match word {
            "True" => "true",
            "False" => "false",
            "None" => "null",
            _ => word,
        };
        match serde_json::from_str(json) {
            Ok(value @ (Value::Bool(_) | Value::Number(_))) if self.string && !self.allows(&value) => {
                Value::from(word).to_string()
            }
            Ok(Value::Null | Value::Bool(_) | Value::Number(_)) => json.to_owned(),
            _ => Value::from(word).to_string(),
        }
    }

    /// The JSON of a list or object, as the text of it where the schema wants only text.
    pub(super) fn of_compound(self, json: String, kind: &str) -> String {
        let wanted = match kind {
            "array" => self.array,
            _ => self.object,
        };
        match self.string && !wanted {
            true => Value::from(json).to_string(),
            false => json,
        }
    }

    fn allows(self, value: &Value) -> bool {
        match value {
            Value::Array(_) => self.array || !self.known,
            Value::Object(_) => self.object || !self.known,
            Value::Bool(_) => self.boolean,
            Value::Null => self.null,
            Value::Number(number) => {
                let whole =
                    number.is_i64() || number.is_u64() || number.as_f64().is_some_and(|n| n.fract() == 0.0);
                self.number || (self.integer && whole)
            }
            Value::String(_) => false,
        }
    }

    fn add(&mut self, name: &str) {
        self.known = true;
        match name {
            "array" => self.array = true,
            "boolean" => self.boolean = true,
            "integer" => self.integer = true,
            "null" => self.null = true,
            "number" => self.number = true,
            "object" => self.object = true,
            "string" => self.string = true,
            _ => {}
        }
    }
}

/// Adds the types that a schema names itself, by its values, or in its alternatives.
fn collect_types(schema: &Value, types: &mut Types, depth: usize) {
    match schema.get("type") {
        Some(Value::String(name)) => types.add(name),
        Some(Value::Array(names)) => names.iter().filter_map(Value::as_str).for_each(|name| types.add(name)),
        _ => {
            let values = schema.get("enum").and_then(Value::as_array).map(Vec::as_slice);
            for value in values.unwrap_or_default().iter().chain(schema.get("const")) {
                types.add(match value {
                    Value::Array(_) => "array",
                    Value::Bool(_) => "boolean",
                    Value::Null => "null",
                    Value::Number(_) => "number",
                    Value::Object(_) => "object",
                    Value::String(_) => "string",
                });
            }
        }
    }
    if schema.get("nullable") == Some(&Value::Bool(true)) {
        types.null = true;
    }
    if depth < 8 {
        for key in ["anyOf", "oneOf", "allOf"] {
            for alternative in schema.get(key).and_then(Value::as_array).into_iter().flatten() {
                collect_types(alternative, types, depth + 1);
            }
        }
    }
}

/// A finished call.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Call {
    pub(super) name: String,
    /// The text of a JSON object.
    pub(super) arguments: String,
}

impl Call {
    /// Appends the call as the `index`-th of an answer.
    pub(super) fn announce(self, index: usize, deltas: &mut Vec<Delta>) {
        deltas.push(Delta::ToolCallStart { index, id: call_id(), name: self.name });
        deltas.push(Delta::ToolCallArguments { index, text: self.arguments });
    }
}

/// Appends a piece of text, unless it is empty.
pub(super) fn emit(deltas: &mut Vec<Delta>, kind: fn(String) -> Delta, text: &str) {
    if !text.is_empty() {
        deltas.push(kind(text.to_owned()));
    }
}

/// Reads `<function=NAME>` to `</function>`, which `text` must begin and end with (whitespace before allowed).
pub(super) fn parse_xml(tools: &Tools, text: &str) -> Option<Call> {
    let (name, mut rest) = text.trim_start().strip_prefix("<function=")?.split_once('>')?;
    let name = name.trim();
    if name.is_empty() || name.contains(['<', '\n']) {
        return None;
    }
    let mut arguments: Vec<(&str, String)> = Vec::new();
    loop {
        rest = rest.trim_start();
        if rest == "</function>" {
            break;
        }
        let (key, after) = rest.strip_prefix("<parameter=")?.split_once('>')?;
        let key = key.trim();
        let (value, after) = parameter_value(after)?;
        let json = tools.argument(name, key, value);
        match arguments.iter_mut().find(|(known, _)| *known == key) {
            Some((_, earlier)) => *earlier = json,
            None => arguments.push((key, json)),
        }
        rest = after;
    }
    let fields: Vec<String> =
        arguments.iter().map(|(key, json)| format!("{}:{json}", Value::from(*key))).collect();
    Some(Call { name: name.to_owned(), arguments: format!("{{{}}}", fields.join(",")) })
}

/// Splits off a value at the first `</parameter>` that another parameter or the end of the function follows, so that a
/// value may itself contain the tag; one newline at each end belongs to the markup.
fn parameter_value(text: &str) -> Option<(&str, &str)> {
    const CLOSE: &str = "</parameter>";
    for (at, _) in text.match_indices(CLOSE) {
        let after = &text[at + CLOSE.len()..];
        let next = after.trim_start();
        if next == "</function>" || next.starts_with("<parameter=") {
            let value = &text[..at];
            let value = value.strip_prefix('\n').unwrap_or(value);
            return Some((value.strip_suffix('\n').unwrap_or(value), after));
        }
    }
    None
}

/// Reads `{"name": ..., "arguments": {...}}`.
pub(super) fn parse_json(text: &str) -> Option<Call> {
    let Ok(Value::Object(call)) = serde_json::from_str(text.trim()) else { return None };
    let Some(Value::String(name)) = call.get("name") else { return None };
    let arguments = match call.get("arguments") {
        None | Some(Value::Null) => Map::new(),
        Some(Value::Object(arguments)) => arguments.clone(),
        Some(Value::String(text)) => serde_json::from_str(text).ok()?,
        Some(_) => return None,
    };
    Some(Call { name: name.clone(), arguments: Value::Object(arguments).to_string() })
}

/// A name for a call: different in every process and for every call.
fn call_id() -> String {
    use std::hash::BuildHasher;
    static COUNT: AtomicU64 = AtomicU64::new(0);
    let count = COUNT.fetch_add(1, Ordering::Relaxed);
    let random = std::hash::RandomState::new();
    let now = SystemTime::now();
    format!("call_{:016x}{:08x}", random.hash_one((now, count)), count as u32)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn tools() -> Tools {
        Tools::new(&[json!({"type": "function", "function": {"name": "f", "parameters": {"properties": {
            "s": {"type": "string"},
            "n": {"type": "number"},
            "i": {"type": "integer"},
            "b": {"type": "boolean"},
            "o": {"type": "object"},
            "a": {"type": "array"},
            "m": {"type": ["string", "null"]},
            "u": {"anyOf": [{"type": "integer"}, {"type": "string"}]},
            "e": {"enum": [1, "x"]},
            "d": {"description": "no type"},
        }}}})])
        .unwrap()
    }

    #[test]
    fn arguments_follow_the_schema() {
        for (parameter, text, json) in [
            ("s", "3", r#""3""#),
            ("s", "{\"a\": 1}", r#""{\"a\": 1}""#),
            ("s", " a<b && \"q\"\n", r#"" a<b && \"q\"\n""#),
            ("n", "3", "3"),
            ("n", " 1.50 ", "1.50"),
            ("n", "three", r#""three""#),
            ("n", "123456789012345678901234567890", "123456789012345678901234567890"),
            ("i", "3", "3"),
            ("i", "3.0", "3.0"),
            ("i", "3.5", r#""3.5""#),
            ("b", "true", "true"),
            ("b", "False", "false"),
            ("b", "yes", r#""yes""#),
            ("o", "{\"z\": 1, \"a\": [2]}", r#"{"z": 1, "a": [2]}"#),
            ("o", "{", r#""{""#),
            ("a", "[1, 2]", "[1, 2]"),
            ("a", "{}", r#""{}""#),
            ("m", "null", "null"),
            ("m", "None", "null"),
            ("m", "text", r#""text""#),
            ("u", "7", "7"),
            ("u", "7a", r#""7a""#),
            ("e", "1", "1"),
            ("e", "x", r#""x""#),
            ("d", "3", r#""3""#),
            ("d", "[3]", "[3]"),
            ("unknown", "true", r#""true""#),
            ("unknown", "{\"a\": 1}", r#"{"a": 1}"#),
        ] {
            assert_eq!(tools().argument("f", parameter, text), json, "{parameter}: {text}");
        }
        assert_eq!(tools().argument("g", "n", "3"), r#""3""#);
    }

    #[test]
    fn xml_calls() {
        let call =
            |name: &str, arguments: &str| Some(Call { name: name.into(), arguments: arguments.into() });
        let parse = |text: &str| parse_xml(&tools(), text);
        assert_eq!(parse("\n<function=f>\n</function>"), call("f", "{}"));
        assert_eq!(parse("<function=f><parameter=i>3</parameter></function>"), call("f", r#"{"i":3}"#));
        assert_eq!(
            parse(
                "<function=f>\n<parameter=s>\n\n two\nlines \n\n</parameter>\n<parameter=i>\n1\n</parameter>\n</function>"
            ),
            call("f", r#"{"s":"\n two\nlines \n","i":1}"#)
        );
        assert_eq!(
            parse("<function=f><parameter=s>x</parameter> and </function> too</parameter></function>"),
            call("f", r#"{"s":"x</parameter> and </function> too"}"#)
        );
        assert_eq!(
            parse(
                "<function=f><parameter=i>1</parameter><parameter=s>x</parameter><parameter=i>2</parameter></function>"
            ),
            call("f", r#"{"i":2,"s":"x"}"#)
        );
        for text in [
            "",
            "<function=>\n</function>",
            "<function=f\n<parameter=a>\n</function>",
            "<function=f>junk</function>",
            "<function=f><parameter=s>x</function>",
            "<function=f></function>x",
        ] {
            assert_eq!(parse(text), None, "{text}");
        }
    }

    #[test]
    fn json_calls() {
        let arguments = |text| parse_json(text).map(|call| call.arguments);
        assert_eq!(
            arguments("\n{\"name\": \"f\", \"arguments\": {\"z\": 1, \"a\": \"x\"}}\n").unwrap(),
            r#"{"z":1,"a":"x"}"#
        );
        assert_eq!(arguments(r#"{"name": "f", "arguments": "{\"a\": 1}"}"#).unwrap(), r#"{"a":1}"#);
        assert_eq!(arguments(r#"{"name": "f"}"#).unwrap(), "{}");
        for text in [
            "",
            "{",
            "[]",
            "{}",
            r#"{"name": 1}"#,
            r#"{"name": "f", "arguments": [1]}"#,
            r#"{"name": "f"} x"#,
        ] {
            assert_eq!(arguments(text), None, "{text}");
        }
    }

    #[test]
    fn wrong_tools_are_named() {
        for (tool, line) in [
            (json!({}), "tools[0] has no function name"),
            (json!({"type": "function", "function": {"name": 1}}), "tools[0] has no function name"),
            (json!({"name": "f", "parameters": 3}), "tools[0] has parameters that are not an object"),
        ] {
            let error = Tools::new(&[tool]).unwrap_err();
            assert_eq!((error.kind(), error.to_string().as_str()), (ErrorKind::Request, line));
        }
        assert!(Tools::new(&[json!({"name": "f"})]).is_ok());
    }

    #[test]
    fn ids_differ() {
        let ids: std::collections::HashSet<String> = (0..1000).map(|_| call_id()).collect();
        assert_eq!(ids.len(), 1000);
        assert!(ids.iter().all(|id| id.len() == 29 && id.starts_with("call_")));
    }
}

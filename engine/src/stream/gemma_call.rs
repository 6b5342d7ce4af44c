//! Tool calls as Gemma 4 writes them.

use std::collections::HashMap;

use serde_json::{Map, Value};

use super::tools::{Call, Tools, Types};

pub(super) const CALL: &str = "<|tool_call>";
pub(super) const CALL_END: &str = "<tool_call|>";
/// Begins and ends a string.
const QUOTE: &str = "<|\"|>";
const PREFIX: &str = "call:";
/// Bytes of a function's name.
const MAX_NAME: usize = 256;
/// Lists and objects in one another.
const MAX_DEPTH: usize = 64;

/// What a [`Reader`] has found.
pub(super) enum Reading {
    /// This is no call.
    Broken,
    /// A call, and the bytes it takes.
    Complete { call: Call, len: usize },
    /// More text must come.
    Open,
}

/// Reads `call:NAME{...}` from a growing text, looking at each byte once until the call is complete.
#[derive(Debug, Clone, Default)]
pub(super) struct Reader {
    /// Where the arguments begin, once that is known.
    arguments: Option<usize>,
    /// Up to where the arguments were read.
    at: usize,
    depth: usize,
    inside: Inside,
    /// The last byte outside of strings that is not whitespace.
    last: u8,
}

/// What the place is in to which a [`Reader`] has come.
#[derive(Debug, Clone, Copy, Default)]
enum Inside {
    /// A string between [`QUOTE`]s.
    Marked,
    #[default]
    Nothing,
    /// A string in the quotes of JSON.
    Quoted,
}

impl Reader {
    /// Goes on reading `text`, which must be what it was at the last call, and more.
    pub(super) fn read(&mut self, tools: &Tools, text: &str) -> Reading {
        let begin = match self.arguments {
            Some(begin) => begin,
            None => match name_end(text) {
                Ok(Some(begin)) => {
                    (self.arguments, self.at) = (Some(begin), begin);
                    begin
                }
                Ok(None) => return Reading::Open,
                Err(Broken) => return Reading::Broken,
            },
        };
        match self.end(text.as_bytes()) {
            Ok(Some(len)) => {
                let name = text[..begin].trim_start()[PREFIX.len()..].trim();
                match parse(tools, name, &text[begin..len]) {
                    Some(call) => Reading::Complete { call, len },
                    None => Reading::Broken,
                }
            }
            Ok(None) => Reading::Open,
            Err(Broken) => Reading::Broken,
        }
    }

    /// The end of the arguments, if it has come.
    fn end(&mut self, text: &[u8]) -> Result<Option<usize>, Broken> {
        while let Some(&byte) = text.get(self.at) {
            let rest = &text[self.at..];
            let begins = |mark: &str| rest.starts_with(mark.as_bytes());
            let undecided = |mark: &str| mark.as_bytes().starts_with(rest);
            match self.inside {
                Inside::Marked if begins(QUOTE) => {
                    (self.inside, self.last) = (Inside::Nothing, b'"');
                    self.at += QUOTE.len();
                }
                Inside::Marked if undecided(QUOTE) => return Ok(None),
                Inside::Quoted if byte == b'\\' => {
                    if rest.len() < 2 {
                        return Ok(None);
                    }
                    self.at += 2;
                }
                Inside::Quoted if byte == b'"' => {
                    (self.inside, self.last) = (Inside::Nothing, b'"');
                    self.at += 1;
                }
                Inside::Marked | Inside::Quoted => self.at += 1,
                Inside::Nothing => {
                    if begins(QUOTE) {
                        self.inside = Inside::Marked;
                        self.at += QUOTE.len();
                        continue;
                    }
                    if begins(CALL) || begins(CALL_END) {
                        return Err(Broken);
                    }
                    if undecided(QUOTE) || undecided(CALL) || undecided(CALL_END) {
                        return Ok(None);
                    }
                    self.at += 1;
                    match byte {
                        b'"' if matches!(self.last, b'{' | b'[' | b',' | b':') => {
                            self.inside = Inside::Quoted
                        }
                        b'{' | b'[' if self.depth == MAX_DEPTH => return Err(Broken),
                        b'{' | b'[' => self.depth += 1,
                        b'}' | b']' => {
                            self.depth -= 1;
                            if self.depth == 0 {
                                return Ok(Some(self.at));
                            }
                        }
                        _ => {}
                    }
                    if !byte.is_ascii_whitespace() {
                        self.last = byte;
                    }
                }
            }
        }
        Ok(None)
    }
}

struct Broken;

/// The place behind `call:NAME`, if it has come.
fn name_end(text: &str) -> Result<Option<usize>, Broken> {
    let trimmed = text.trim_start();
    let start = text.len() - trimmed.len();
    let Some(name) = trimmed.strip_prefix(PREFIX) else {
        return if PREFIX.starts_with(trimmed) { Ok(None) } else { Err(Broken) };
    };
    match name.find(['{', '<', '\n']) {
        Some(at) if name[at..].starts_with('{') && at <= MAX_NAME && !name[..at].trim().is_empty() => {
            Ok(Some(start + PREFIX.len() + at))
        }
        None if name.len() <= MAX_NAME => Ok(None),
        _ => Err(Broken),
    }
}

/// Reads the arguments of a call, an object.
fn parse(tools: &Tools, name: &str, arguments: &str) -> Option<Call> {
    let mut parser = Parser { rest: arguments };
    let arguments = parser.object(tools.parameters(name))?;
    parser.rest.is_empty().then(|| Call { name: name.to_owned(), arguments })
}

struct Parser<'t> {
    rest: &'t str,
}

impl<'t> Parser<'t> {
    fn space(&mut self) {
        self.rest = self.rest.trim_start();
    }

    fn take(&mut self, mark: &str) -> bool {
        self.space();
        let after = self.rest.strip_prefix(mark);
        self.rest = after.unwrap_or(self.rest);
        after.is_some()
    }

    /// A value as JSON, of the type its schema asks for where that can be.
    fn value(&mut self, schema: Option<&Value>) -> Option<String> {
        let types = schema.map(Types::of).unwrap_or_default();
        if let Some(text) = self.string()? {
            return Some(types.of_string(&text));
        }
        if self.rest.starts_with('{') {
            let members = schema.and_then(|schema| schema.get("properties")?.as_object());
            let json = self.object(members)?;
            return Some(types.of_compound(json, "object"));
        }
        if self.take("[") {
            let mut items = Vec::new();
            let schema = schema.and_then(|schema| schema.get("items"));
            while !self.take("]") {
                items.push(self.value(schema)?);
                self.separator(']')?;
            }
            return Some(types.of_compound(format!("[{}]", items.join(",")), "array"));
        }
        let text = self.bare(&[',', '}', ']', '{', '['])?;
        Some(types.of_bare(text))
    }

    /// An object as JSON, with the schemas of its members.
    fn object(&mut self, members: Option<&Map<String, Value>>) -> Option<String> {
        if !self.take("{") {
            return None;
        }
        let mut fields: Vec<String> = Vec::new();
        let mut places = HashMap::new();
        while !self.take("}") {
            let key = match self.string()? {
                Some(key) => key,
                None => self.bare(&[':', ',', '}', ']', '{', '['])?.to_owned(),
            };
            if !self.take(":") {
                return None;
            }
            let json = self.value(members.and_then(|members| members.get(&key)))?;
            self.separator('}')?;
            let field = format!("{}:{json}", Value::from(key.as_str()));
            let place = *places.entry(key).or_insert(fields.len());
            match fields.get_mut(place) {
                Some(earlier) => *earlier = field,
                None => fields.push(field),
            }
        }
        Some(format!("{{{}}}", fields.join(",")))
    }

    /// Takes the comma behind an element, unless the list or object ends.
    fn separator(&mut self, end: char) -> Option<()> {
        self.space();
        (self.rest.starts_with(end) || self.take(",")).then_some(())
    }

    /// A string, if one begins here.
    fn string(&mut self) -> Option<Option<String>> {
        if self.take(QUOTE) {
            let (text, after) = self.rest.split_once(QUOTE)?;
            self.rest = after;
            return Some(Some(text.to_owned()));
        }
        if !self.rest.starts_with('"') {
            return Some(None);
        }
        let mut strings = serde_json::Deserializer::from_str(self.rest).into_iter::<String>();
        let text = strings.next()?.ok()?;
        self.rest = &self.rest[strings.byte_offset()..];
        Some(Some(text))
    }

    /// What stands before one of `ends`, without marks.
    fn bare(&mut self, ends: &[char]) -> Option<&'t str> {
        let (text, after) = self.rest.split_at(self.rest.find(ends)?);
        self.rest = after;
        let text = text.trim();
        (!text.is_empty() && !text.contains(QUOTE)).then_some(text)
    }
}

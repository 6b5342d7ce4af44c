//! Tool calls as Gemma 4 writes them.

use std::collections::HashMap;

use serde_json::{Map, Value};

use super::tools::{Call, Tools, Types};

pub(super) const CALL: &str = "<|tool_call>";
pub(super) const CALL_END: &str = "<tool_call|>";
/// Begins and ends a string.
const QUOTE: &str = "<|\"|>";
/// Before the name of the function.
pub(super) const PREFIX: &str = "call:";
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
///
/// Where [`CALL_END`] comes before the last braces, the call is taken to be complete: models forget them.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Reader {
    /// Whether only functions among the tools are called.
    of_tools: bool,
    /// Where the arguments begin, once that is known.
    arguments: Option<usize>,
    /// Up to where the arguments were read.
    at: usize,
    depth: usize,
    inside: Inside,
    /// The last byte outside of strings that is not whitespace.
    last: u8,
    /// Whether the last braces are missing.
    unclosed: bool,
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
    /// A reader that takes nothing for a call but those of the request's tools.
    pub(super) fn of_tools() -> Self {
        Self { of_tools: true, ..Self::default() }
    }

    /// Goes on reading `text`, which must be what it was at the last call, and more.
    pub(super) fn read(&mut self, tools: &Tools, text: &str) -> Reading {
        self.try_read(tools, text).unwrap_or(Reading::Broken)
    }

    fn try_read(&mut self, tools: &Tools, text: &str) -> Result<Reading, Broken> {
        let begin = match self.arguments {
            Some(begin) => begin,
            None => {
                let Some(begin) = name_end(text)? else { return Ok(Reading::Open) };
                if self.of_tools && tools.parameters(name(text, begin)).is_none() {
                    return Err(Broken);
                }
                (self.arguments, self.at) = (Some(begin), begin);
                begin
            }
        };
        let Some(len) = self.end(text.as_bytes())? else { return Ok(Reading::Open) };
        let mut parser = Parser { rest: &text[begin..len], unclosed: self.unclosed };
        let name = name(text, begin);
        let arguments = parser.object(tools.parameters(name)).ok_or(Broken)?;
        match parser.rest.is_empty() {
            true => Ok(Reading::Complete { call: Call { name: name.to_owned(), arguments }, len }),
            false => Err(Broken),
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
                    if begins(CALL) {
                        return Err(Broken);
                    }
                    if begins(CALL_END) {
                        self.unclosed = true;
                        return Ok(Some(self.at));
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

/// The name before the arguments.
fn name(text: &str, arguments: usize) -> &str {
    text[..arguments].trim_start()[PREFIX.len()..].trim()
}

/// Reads the arguments of a call.
struct Parser<'t> {
    rest: &'t str,
    /// Whether the end of the text ends all lists and objects.
    unclosed: bool,
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

    fn ends(&mut self, mark: &str) -> bool {
        self.take(mark) || (self.unclosed && self.rest.is_empty())
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
            while !self.ends("]") {
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
        while !self.ends("}") {
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
        let ends = self.rest.starts_with(end) || (self.unclosed && self.rest.is_empty());
        (ends || self.take(",")).then_some(())
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
        let end = self.rest.find(ends).or(self.unclosed.then_some(self.rest.len()))?;
        let (text, after) = self.rest.split_at(end);
        self.rest = after;
        let text = text.trim();
        (!text.is_empty() && !text.contains(QUOTE)).then_some(text)
    }
}

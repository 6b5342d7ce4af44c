//! Values of a template as Python writes them.

use std::fmt::Write;

use minijinja::value::{Kwargs, Rest, ValueKind};
use minijinja::{Error, ErrorKind, Value};

/// How deep values may be nested to be written.
const MAX_DEPTH: usize = 128;

fn invalid(message: impl Into<String>) -> Error {
    Error::new(ErrorKind::InvalidOperation, message.into())
}

/// Characters that Python's `str.strip` and `str.split` take for whitespace.
pub(super) fn is_space(c: char) -> bool {
    c.is_whitespace() || ('\x1c'..='\x1f').contains(&c)
}

/// `str(value)`, and nothing for undefined.
pub(super) fn str(value: &Value) -> Result<String, Error> {
    let mut out = String::new();
    match value.kind() {
        ValueKind::Number | ValueKind::Seq | ValueKind::Map => repr(value, &mut out, 0)?,
        _ => out = value.to_string(),
    }
    Ok(out)
}

fn repr(value: &Value, out: &mut String, depth: usize) -> Result<(), Error> {
    if depth > MAX_DEPTH {
        return Err(invalid(format!("a value nested deeper than {MAX_DEPTH} cannot be written")));
    }
    match value.kind() {
        ValueKind::Number => write_number(value, out, ["nan", "inf", "-inf"]),
        ValueKind::Seq => {
            let tuple = value.is_tuple();
            out.push(if tuple { '(' } else { '[' });
            for (at, item) in value.try_iter()?.enumerate() {
                separate(out, at, ", ");
                repr(&item, out, depth + 1)?;
            }
            if tuple && value.len() == Some(1) {
                out.push(',');
            }
            out.push(if tuple { ')' } else { ']' });
        }
        ValueKind::Map => {
            out.push('{');
            for (at, key) in value.try_iter()?.enumerate() {
                separate(out, at, ", ");
                repr(&key, out, depth + 1)?;
                out.push_str(": ");
                repr(&value.get_item(&key)?, out, depth + 1)?;
            }
            out.push('}');
        }
        // The library writes strings with Python's quotes and escapes.
        _ => write!(out, "{value:?}").map_err(|_| invalid("cannot write the value"))?,
    }
    Ok(())
}

fn separate(out: &mut String, at: usize, separator: &str) {
    if at > 0 {
        out.push_str(separator);
    }
}

fn write_number(value: &Value, out: &mut String, special: [&str; 3]) {
    match f64::try_from(value.clone()) {
        Ok(float) if !value.is_integer() => write_float(float, out, special),
        _ => out.push_str(&value.to_string()),
    }
}

/// A float as `repr` writes it: the shortest digits that give it back, with an exponent below 1e-4 and from 1e16 on.
fn write_float(value: f64, out: &mut String, [nan, infinity, negative]: [&str; 3]) {
    if !value.is_finite() {
        out.push_str(if value.is_nan() {
            nan
        } else if value > 0.0 {
            infinity
        } else {
            negative
        });
        return;
    }
    let scientific = format!("{value:e}");
    let (digits, exponent) = scientific.split_once('e').unwrap_or((&scientific, "0"));
    let exponent: i32 = exponent.parse().unwrap_or(0);
    if (-4..16).contains(&exponent) {
        let positional = value.to_string();
        out.push_str(&positional);
        if !positional.contains('.') {
            out.push_str(".0");
        }
    } else {
        let sign = if exponent < 0 { '-' } else { '+' };
        out.push_str(&format!("{digits}e{sign}{:02}", exponent.abs()));
    }
}

/// The filter `tojson` as chat templates have it: `json.dumps` of `(value, ensure_ascii=False, indent=None,
/// separators=None, sort_keys=False)`.
pub(super) fn tojson(value: &Value, args: Rest<Value>, kwargs: Kwargs) -> Result<Value, Error> {
    if args.len() > 4 {
        return Err(Error::from(ErrorKind::TooManyArguments));
    }
    let option = |at: usize, name: &str| -> Result<Option<Value>, Error> {
        let value = match args.get(at) {
            Some(value) => Some(value.clone()),
            None => kwargs.get::<Option<Value>>(name)?,
        };
        Ok(value.filter(|value| !value.is_none()))
    };
    let truth = |value: Option<Value>| value.is_some_and(|value| value.is_true());
    let ensure_ascii = truth(option(0, "ensure_ascii")?);
    let indent = match option(1, "indent")? {
        None => None,
        Some(value) => match value.as_str() {
            Some(text) => Some(text.to_owned()),
            None => {
                let width = i64::try_from(value)?;
                Some(" ".repeat(usize::try_from(width).unwrap_or(0).min(64)))
            }
        },
    };
    let (item, key) = match option(2, "separators")? {
        None => (if indent.is_some() { "," } else { ", " }.to_owned(), ": ".to_owned()),
        Some(pair) => {
            let pair: Vec<Value> = pair.try_iter()?.collect();
            match pair.iter().map(Value::as_str).collect::<Vec<_>>()[..] {
                [Some(item), Some(key)] => (item.to_owned(), key.to_owned()),
                _ => return Err(invalid("separators of tojson must be two strings")),
            }
        }
    };
    let sort_keys = truth(option(3, "sort_keys")?);
    kwargs.assert_all_used()?;
    let json = Json { ensure_ascii, indent, item, key, sort_keys };
    let mut out = String::new();
    json.write(value, &mut out, 0)?;
    Ok(Value::from(out))
}

struct Json {
    ensure_ascii: bool,
    indent: Option<String>,
    item: String,
    key: String,
    sort_keys: bool,
}

impl Json {
    fn write(&self, value: &Value, out: &mut String, depth: usize) -> Result<(), Error> {
        if depth > MAX_DEPTH {
            return Err(invalid(format!("a value nested deeper than {MAX_DEPTH} cannot be written as json")));
        }
        match value.kind() {
            ValueKind::None => out.push_str("null"),
            ValueKind::Bool => out.push_str(if value.is_true() { "true" } else { "false" }),
            ValueKind::Number => write_number(value, out, ["NaN", "Infinity", "-Infinity"]),
            ValueKind::String => self.string(value.as_str().unwrap_or_default(), out),
            ValueKind::Seq => {
                let items: Vec<Value> = value.try_iter()?.collect();
                self.block(out, depth, ['[', ']'], items.len(), |out, at| {
                    self.write(&items[at], out, depth + 1)
                })?;
            }
            ValueKind::Map => {
                let mut entries = Vec::new();
                for key in value.try_iter()? {
                    entries.push((self.key_text(&key)?, value.get_item(&key)?));
                }
                if self.sort_keys {
                    entries.sort_by(|(a, _), (b, _)| a.cmp(b));
                }
                self.block(out, depth, ['{', '}'], entries.len(), |out, at| {
                    self.string(&entries[at].0, out);
                    out.push_str(&self.key);
                    self.write(&entries[at].1, out, depth + 1)
                })?;
            }
            kind => return Err(invalid(format!("a value of type {kind} cannot be written as json"))),
        }
        Ok(())
    }

    fn block(
        &self,
        out: &mut String,
        depth: usize,
        [open, close]: [char; 2],
        len: usize,
        mut entry: impl FnMut(&mut String, usize) -> Result<(), Error>,
    ) -> Result<(), Error> {
        out.push(open);
        for at in 0..len {
            separate(out, at, &self.item);
            self.line(out, depth + 1);
            entry(out, at)?;
        }
        if len > 0 {
            self.line(out, depth);
        }
        out.push(close);
        Ok(())
    }

    fn line(&self, out: &mut String, depth: usize) {
        if let Some(indent) = &self.indent {
            out.push('\n');
            (0..depth).for_each(|_| out.push_str(indent));
        }
    }

    fn key_text(&self, key: &Value) -> Result<String, Error> {
        let mut text = String::new();
        match key.kind() {
            ValueKind::String => text.push_str(key.as_str().unwrap_or_default()),
            ValueKind::None | ValueKind::Bool | ValueKind::Number => self.write(key, &mut text, 0)?,
            kind => return Err(invalid(format!("a key of type {kind} cannot be written as json"))),
        }
        Ok(text)
    }

    fn string(&self, text: &str, out: &mut String) {
        out.push('"');
        for c in text.chars() {
            match c {
                '"' => out.push_str("\\\""),
                '\\' => out.push_str("\\\\"),
                '\n' => out.push_str("\\n"),
                '\r' => out.push_str("\\r"),
                '\t' => out.push_str("\\t"),
                '\x08' => out.push_str("\\b"),
                '\x0c' => out.push_str("\\f"),
                c if c < ' ' || (self.ensure_ascii && !c.is_ascii()) => {
                    for unit in c.encode_utf16(&mut [0; 2]) {
                        out.push_str(&format!("\\u{unit:04x}"));
                    }
                }
                c => out.push(c),
            }
        }
        out.push('"');
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn floats_as_repr() {
        for (value, text) in [
            (1.0, "1.0"),
            (-0.0, "-0.0"),
            (0.1, "0.1"),
            (1.5, "1.5"),
            (0.0001, "0.0001"),
            (0.00001, "1e-05"),
            (1.25e-7, "1.25e-07"),
            (123456789012345.6, "123456789012345.6"),
            (1e15, "1000000000000000.0"),
            (1e16, "1e+16"),
            (1.2345e22, "1.2345e+22"),
            (1e308, "1e+308"),
            (5e-324, "5e-324"),
            (f64::NEG_INFINITY, "-inf"),
        ] {
            let mut out = String::new();
            write_float(value, &mut out, ["nan", "inf", "-inf"]);
            assert_eq!(out, text);
        }
    }
}

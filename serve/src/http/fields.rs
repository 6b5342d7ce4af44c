use std::fmt;

use serde_json::{Map, Value};

use super::error::ApiError;

/// The fields of a JSON request body, taken one by one. `null` counts as absent; what nobody takes is ignored.
///
/// Fields are read by hand rather than derived, so that every error can name its field in `param`.
pub(super) struct Fields {
    map: Map<String, Value>,
}

impl Fields {
    pub(super) fn parse(body: &[u8]) -> Result<Self, ApiError> {
        match serde_json::from_slice(body) {
            Ok(Value::Object(map)) => Ok(Self { map }),
            Ok(_) => Err(ApiError::invalid("the request body must be a JSON object")),
            Err(error) => Err(ApiError::invalid(format!("the request body is not valid JSON: {error}"))),
        }
    }

    pub(super) fn take(&mut self, name: &str) -> Option<Value> {
        self.map.remove(name).filter(|value| !value.is_null())
    }

    pub(super) fn boolean(&mut self, name: &str) -> Result<Option<bool>, ApiError> {
        match self.take(name) {
            None => Ok(None),
            Some(Value::Bool(value)) => Ok(Some(value)),
            Some(other) => Err(mismatch(name, "true or false", &other)),
        }
    }

    pub(super) fn string(&mut self, name: &str) -> Result<Option<String>, ApiError> {
        match self.take(name) {
            None => Ok(None),
            Some(Value::String(value)) => Ok(Some(value)),
            Some(other) => Err(mismatch(name, "a string", &other)),
        }
    }

    pub(super) fn array(&mut self, name: &str) -> Result<Option<Vec<Value>>, ApiError> {
        match self.take(name) {
            None => Ok(None),
            Some(Value::Array(value)) => Ok(Some(value)),
            Some(other) => Err(mismatch(name, "an array", &other)),
        }
    }

    pub(super) fn object(&mut self, name: &str) -> Result<Option<Map<String, Value>>, ApiError> {
        match self.take(name) {
            None => Ok(None),
            Some(Value::Object(value)) => Ok(Some(value)),
            Some(other) => Err(mismatch(name, "an object", &other)),
        }
    }

    /// A number within an interval.
    pub(super) fn number(&mut self, name: &str, interval: Interval) -> Result<Option<f32>, ApiError> {
        let Some(value) = self.take(name) else { return Ok(None) };
        match value.as_f64() {
            Some(number) if interval.contains(number) => Ok(Some(number as f32)),
            _ => Err(mismatch(name, &format!("a number {interval}"), &value)),
        }
    }

    /// A whole number of at least `min`. What exceeds the machine's word is as good as endless.
    pub(super) fn count(&mut self, name: &str, min: usize) -> Result<Option<usize>, ApiError> {
        let Some(value) = self.take(name) else { return Ok(None) };
        match whole(&value).map(|count| usize::try_from(count).unwrap_or(usize::MAX)) {
            Some(count) if count >= min => Ok(Some(count)),
            _ => Err(mismatch(name, &format!("a whole number of at least {min}"), &value)),
        }
    }

    /// Any integer of 64 bits, signed or not.
    pub(super) fn seed(&mut self, name: &str) -> Result<Option<u64>, ApiError> {
        let Some(value) = self.take(name) else { return Ok(None) };
        match value.as_u64().or(value.as_i64().map(i64::cast_unsigned)) {
            Some(seed) => Ok(Some(seed)),
            None => Err(mismatch(name, "an integer of 64 bits", &value)),
        }
    }
}

/// The numbers a field may take, both ends finite.
#[derive(Debug, Clone, Copy)]
pub(super) enum Interval {
    /// From the first to the second, both included.
    Closed(f64, f64),
    /// Above the first, up to the second included.
    Above(f64, f64),
}

impl Interval {
    fn contains(self, number: f64) -> bool {
        match self {
            Self::Closed(min, max) => min <= number && number <= max,
            // The engine computes in f32, where a tiny number may vanish.
            Self::Above(min, max) => f64::from(number as f32) > min && number <= max,
        }
    }
}

impl fmt::Display for Interval {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Closed(min, max) => write!(f, "from {min} to {max}"),
            Self::Above(min, max) => write!(f, "above {min} and at most {max}"),
        }
    }
}

/// A non-negative whole number; `5.0` is one, since some clients know only floats.
pub(super) fn whole(value: &Value) -> Option<u64> {
    const EXACT: f64 = (1_u64 << 53) as f64;
    value.as_u64().or_else(|| {
        let number = value.as_f64()?;
        (number.fract() == 0.0 && (0.0..=EXACT).contains(&number)).then_some(number as u64)
    })
}

/// The error of a field that holds something else than it must.
pub(super) fn mismatch(name: &str, expected: &str, found: &Value) -> ApiError {
    ApiError::field(name, format!("`{name}` must be {expected}, not {}", excerpt(found)))
}

/// A value for an error message: short ones whole, long ones by their type.
fn excerpt(value: &Value) -> String {
    match value {
        Value::Array(_) => "an array".into(),
        Value::Object(_) => "an object".into(),
        Value::String(text) if text.len() > 40 => "this string".into(),
        short => short.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fields(body: &str) -> Fields {
        Fields::parse(body.as_bytes()).unwrap()
    }

    #[test]
    fn null_is_absent() {
        assert!(fields(r#"{"a": null}"#).number("a", Interval::Closed(0.0, 1.0)).unwrap().is_none());
        assert!(fields("{}").boolean("a").unwrap().is_none());
    }

    #[test]
    fn numbers_keep_to_their_interval() {
        let top_p = Interval::Above(0.0, 1.0);
        for good in ["1", "1.0", "0.5", "1e-30"] {
            assert!(fields(&format!(r#"{{"p": {good}}}"#)).number("p", top_p).unwrap().is_some(), "{good}");
        }
        for bad in ["0", "-1", "1.0000001", "1e308", "2147483648", "\"5\"", "1e-320", "true", "[]"] {
            assert!(fields(&format!(r#"{{"p": {bad}}}"#)).number("p", top_p).is_err(), "{bad}");
        }
    }

    #[test]
    fn counts_are_whole_and_saturate() {
        for (good, expected) in [("1", 1), ("4.0", 4), ("9223372036854775808", 1 << 63), ("1e3", 1000)] {
            assert_eq!(fields(&format!(r#"{{"n": {good}}}"#)).count("n", 1).unwrap(), Some(expected));
        }
        for bad in ["0", "-1", "0.5", "1e308", "\"5\"", "-9223372036854775808", "18446744073709551616"] {
            assert!(fields(&format!(r#"{{"n": {bad}}}"#)).count("n", 1).is_err(), "{bad}");
        }
    }

    #[test]
    fn seeds_are_any_integer() {
        for (good, expected) in [("-1", u64::MAX), ("0", 0), ("18446744073709551615", u64::MAX)] {
            assert_eq!(fields(&format!(r#"{{"s": {good}}}"#)).seed("s").unwrap(), Some(expected));
        }
        for bad in ["1.5", "1e308", "\"5\""] {
            assert!(fields(&format!(r#"{{"s": {bad}}}"#)).seed("s").is_err(), "{bad}");
        }
    }
}

//! Stop strings.

use crate::error::{Error, ErrorKind, Result};

/// How many stop strings a request may have.
pub const MAX_STOP_STRINGS: usize = 64;

/// How long a stop string may be, in bytes.
pub const MAX_STOP_BYTES: usize = 1024;

/// Ends a text at the first occurrence of any stop string, which is left out.
///
/// Text that may be the beginning of a stop string is held back until that is decided. Of several stop strings the one that
/// begins first counts; the result does not depend on how the text was cut.
#[derive(Debug, Clone)]
pub struct StopStrings {
    stops: Vec<String>,
    held: String,
    stopped: bool,
}

impl StopStrings {
    /// Stop strings at the beginning of a text; empty ones are ignored.
    ///
    /// # Errors
    ///
    /// `ErrorKind::Request` for more than [`MAX_STOP_STRINGS`] strings or one longer than [`MAX_STOP_BYTES`].
    pub fn new(mut stops: Vec<String>) -> Result<Self> {
        if stops.len() > MAX_STOP_STRINGS {
            let message = format!("stop has {} strings, more than {MAX_STOP_STRINGS}", stops.len());
            return Err(Error::new(ErrorKind::Request, message));
        }
        if let Some(at) = stops.iter().position(|stop| stop.len() > MAX_STOP_BYTES) {
            let message = format!("stop[{at}] has {} bytes, more than {MAX_STOP_BYTES}", stops[at].len());
            return Err(Error::new(ErrorKind::Request, message));
        }
        stops.retain(|stop| !stop.is_empty());
        Ok(Self { stops, held: String::new(), stopped: false })
    }

    /// Takes text and appends what surely comes before any stop string to `shown`.
    pub fn push(&mut self, text: &str, shown: &mut String) {
        if self.stopped {
            return;
        }
        if self.stops.is_empty() {
            shown.push_str(text);
            return;
        }
        self.held.push_str(text);
        // The first place where a stop string begins, or may begin.
        let mut at = 0;
        while let Some(c) = self.held[at..].chars().next() {
            let rest = &self.held[at..];
            if self.stops.iter().any(|stop| rest.starts_with(stop.as_str())) {
                self.stopped = true;
                shown.push_str(&self.held[..at]);
                self.held.clear();
                return;
            }
            if self.stops.iter().any(|stop| stop.starts_with(rest)) {
                break;
            }
            at += c.len_utf8();
        }
        shown.push_str(&self.held[..at]);
        self.held.drain(..at);
    }

    /// Appends what is held back to `shown`, as it has become clear that no stop string follows.
    pub fn flush(&mut self, shown: &mut String) {
        shown.push_str(&self.held);
        self.held.clear();
    }

    /// Whether a stop string was found.
    pub fn stopped(&self) -> bool {
        self.stopped
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What each piece shows, the flush last, and whether it stopped.
    fn run(stops: &[&str], pieces: &[&str]) -> (Vec<String>, bool) {
        let mut stop = StopStrings::new(stops.iter().map(|&stop| stop.to_owned()).collect()).unwrap();
        let mut shown = Vec::new();
        for piece in pieces {
            let mut text = String::new();
            stop.push(piece, &mut text);
            shown.push(text);
        }
        let mut text = String::new();
        stop.flush(&mut text);
        shown.push(text);
        (shown, stop.stopped())
    }

    #[test]
    fn holds_back_prefixes() {
        assert_eq!(
            run(&["END\n"], &["a E", "N", "D", "\nrest"]),
            (vec!["a ".into(), "".into(), "".into(), "".into(), "".into()], true)
        );
        assert_eq!(
            run(&["END"], &["E", "NX", "EN"]),
            (vec!["".into(), "ENX".into(), "".into(), "EN".into()], false)
        );
        assert_eq!(
            run(&["<b>", "</b>"], &["x<", "/b", ">y"]),
            (vec!["x".into(), "".into(), "".into(), "".into()], true)
        );
        assert_eq!(run(&["aab"], &["aa", "ab"]), (vec!["".into(), "a".into(), "".into()], true));
        assert_eq!(run(&[], &["any"]), (vec!["any".into(), "".into()], false));
        assert_eq!(run(&["", "X"], &["anyX"]), (vec!["any".into(), "".into()], true));
        assert_eq!(run(&["é"], &["aée"]), (vec!["a".into(), "".into()], true));
    }

    #[test]
    fn the_earliest_counts_whatever_the_cut() {
        // "bcd" is complete before "abcde" is ruled out, yet the latter may begin earlier.
        for text in ["xabcdex", "xabcdf", "xbcd"] {
            let whole = run(&["abcde", "bcd"], &[text]);
            for cut in 0..text.len() {
                let cut = run(&["abcde", "bcd"], &[&text[..cut], &text[cut..]]);
                assert_eq!((cut.0.concat(), cut.1), (whole.0.concat(), whole.1), "{text}");
            }
        }
    }

    #[test]
    fn limits() {
        assert!(StopStrings::new(vec!["x".into(); MAX_STOP_STRINGS]).is_ok());
        for stops in [vec!["x".to_owned(); 10_000], vec!["x".repeat(MAX_STOP_BYTES + 1)]] {
            assert_eq!(StopStrings::new(stops).unwrap_err().kind(), ErrorKind::Request);
        }
    }
}

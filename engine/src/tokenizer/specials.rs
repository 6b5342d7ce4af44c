//! Finding special tokens in text.

use std::borrow::Cow;
use std::ops::Range;

use super::{SHIELD, Specials};

/// A special token found in a text.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Found {
    pub(super) start: usize,
    pub(super) end: usize,
    pub(super) id: u32,
}

#[derive(Debug)]
struct Literal {
    text: String,
    id: u32,
    power: Power,
}

/// What a special token may do, and so where its text is matched.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Power {
    /// Steers the model: not matched in plain text, nor behind a mark.
    Control,
    /// Matched in plain text, but not behind a mark.
    Guarded,
    /// Always matched.
    Shown,
}

/// The literals of special tokens, sorted by their bytes: the literals that begin with a given prefix are neighbours,
/// so a search walks down one range, byte by byte, as in a trie.
#[derive(Debug)]
pub(super) struct Matcher {
    literals: Vec<Literal>,
    /// For each first byte, the literals that begin with it.
    by_first: [Range<u32>; 256],
}

impl Matcher {
    /// Makes a matcher of `(literal, id, power)`; empty literals match nothing.
    pub(super) fn new(literals: impl Iterator<Item = (String, u32, Power)>) -> Self {
        let mut literals: Vec<Literal> = literals
            .filter(|(text, ..)| !text.is_empty())
            .map(|(text, id, power)| Literal { text, id, power })
            .collect();
        literals.sort_by(|a, b| a.text.cmp(&b.text));
        let mut by_first = [const { 0..0 }; 256];
        for (at, literal) in literals.iter().enumerate() {
            let range = &mut by_first[literal.text.as_bytes()[0] as usize];
            if range.start == range.end {
                *range = at as u32..at as u32;
            }
            range.end = at as u32 + 1;
        }
        Self { literals, by_first }
    }

    /// The first special token of a text, the longest one if several start at the same place.
    pub(super) fn find(&self, text: &str, specials: Specials) -> Option<Found> {
        let mark = SHIELD.len_utf8();
        for (start, &first) in text.as_bytes().iter().enumerate() {
            if self.by_first[first as usize].end == 0 {
                continue;
            }
            let shielded = start >= mark && text.is_char_boundary(start) && text[..start].ends_with(SHIELD);
            let found = self.longest(&text[start..], |literal| match specials {
                Specials::AsText => literal.power != Power::Control,
                Specials::Parse => true,
                Specials::Shielded => literal.power == Power::Shown || !shielded,
            });
            if let Some(literal) = found {
                return Some(Found { start, end: start + literal.text.len(), id: literal.id });
            }
        }
        None
    }

    /// Puts a mark before each place of `text` where a guarded token starts or, at the end of the text, could start.
    pub(super) fn shield<'t>(&self, text: &'t str) -> Cow<'t, str> {
        let text = match text.contains(SHIELD) {
            true => Cow::Owned(text.replace(SHIELD, "")),
            false => Cow::Borrowed(text),
        };
        let places: Vec<usize> =
            (0..text.len()).filter(|&at| self.guarded_may_start(&text.as_bytes()[at..])).collect();
        if places.is_empty() {
            return text;
        }
        let mut marked = String::with_capacity(text.len() + places.len() * SHIELD.len_utf8());
        let mut done = 0;
        for place in places {
            marked.push_str(&text[done..place]);
            marked.push(SHIELD);
            done = place;
        }
        marked.push_str(&text[done..]);
        Cow::Owned(marked)
    }

    fn longest(&self, text: &str, wanted: impl Fn(&Literal) -> bool) -> Option<&Literal> {
        let mut best = None;
        self.walk(text.as_bytes(), |literal| {
            if wanted(literal) {
                best = Some(literal);
            }
        });
        best
    }

    fn guarded_may_start(&self, text: &[u8]) -> bool {
        let guarded = |literal: &Literal| literal.power != Power::Shown;
        let mut starts = false;
        let open = self.walk(text, |literal| starts |= guarded(literal));
        starts || open.iter().any(guarded)
    }

    /// Visits the literals that `text` begins with, short ones first, and returns those longer than the whole text
    /// that begin with it.
    fn walk<'m>(&'m self, text: &[u8], mut visit: impl FnMut(&'m Literal)) -> &'m [Literal] {
        let Some(first) = text.first() else { return &[] };
        let range = self.by_first[*first as usize].clone();
        let mut range = &self.literals[range.start as usize..range.end as usize];
        let mut depth = 1;
        loop {
            // Equal prefixes sort by length, so a literal that ends here is the first of its range.
            while let Some((literal, longer)) = range.split_first()
                && literal.text.len() == depth
            {
                visit(literal);
                range = longer;
            }
            let Some(&byte) = text.get(depth) else { return range };
            let at = |literal: &Literal| literal.text.as_bytes()[depth];
            let from = range.partition_point(|literal| at(literal) < byte);
            let to = range.partition_point(|literal| at(literal) <= byte);
            range = &range[from..to];
            if range.is_empty() {
                return range;
            }
            depth += 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn matcher() -> Matcher {
        use Power::{Control, Shown};
        let literals = [
            ("<|end|>", 0, Control),
            ("<|end|>x", 1, Control),
            ("<t>", 2, Shown),
            ("|e", 3, Control),
            ("é", 4, Control),
        ];
        Matcher::new(literals.into_iter().map(|(text, id, power)| (text.to_owned(), id, power)))
    }

    fn ids(text: &str, specials: Specials) -> Vec<u32> {
        let (matcher, mut rest, mut ids) = (matcher(), text, Vec::new());
        while let Some(found) = matcher.find(rest, specials) {
            ids.push(found.id);
            rest = &rest[found.end..];
        }
        ids
    }

    #[test]
    fn leftmost_then_longest() {
        assert_eq!(ids("a<|end|>x<|end|>y", Specials::Parse), [1, 0]);
        assert_eq!(ids("<|en<t>|e", Specials::Parse), [3, 2, 3]);
        assert_eq!(ids("<|end|>x<t>", Specials::AsText), [2]);
        assert_eq!(matcher().find("日本<t>", Specials::Parse), Some(Found { start: 6, end: 9, id: 2 }));
        assert_eq!(matcher().find("", Specials::Parse), None);
    }

    #[test]
    fn shielded_text_has_no_control_token() {
        for text in ["<|end|>", "x<|end|>x|e", "<|e", "<", "<|end|", "é", "|", "<t><|end|>", "|e|e|e<t>é"] {
            let shielded = matcher().shield(text);
            // Whatever a template puts behind the text.
            for tail in ["", "x", "|e", "e", "end|>", "|end|>", "d|>x", ">", "\n"] {
                let all = format!("{shielded}{tail}");
                let expected = match tail {
                    "|e" => vec![3],
                    "|end|>" => vec![3],
                    _ => vec![],
                };
                let found: Vec<u32> =
                    ids(&all, Specials::Shielded).into_iter().filter(|&id| id != 2).collect();
                assert_eq!(found, expected, "{text:?} + {tail:?}");
            }
            assert_eq!(shielded.replace(SHIELD, ""), text);
        }
        assert_eq!(ids("<|end|>", Specials::Shielded), [0]);
        assert!(matches!(matcher().shield("a < b, <t> and |x"), Cow::Borrowed(_)));
    }
}

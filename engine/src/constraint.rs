use crate::tokenizer::Tokenizer;

/// Lets only those tokens through that continue one of a set of strings.
#[derive(Debug, Clone)]
pub(crate) struct OneOf {
    /// What is still to come of each string that fits so far.
    rest: Vec<Vec<u8>>,
}

impl OneOf {
    pub(crate) fn new(strings: impl IntoIterator<Item = String>) -> Self {
        Self { rest: strings.into_iter().map(String::into_bytes).collect() }
    }

    /// Whether one of the strings is complete.
    pub(crate) fn done(&self) -> bool {
        self.rest.iter().any(Vec::is_empty)
    }

    /// Takes every token out of the choice that leads away from all strings.
    pub(crate) fn mask(&self, tokenizer: &Tokenizer, logits: &mut [f32]) {
        for (id, logit) in logits.iter_mut().enumerate() {
            let bytes = tokenizer.token_bytes(id as u32);
            let fits = !bytes.is_empty() && self.rest.iter().any(|rest| rest.starts_with(bytes));
            if !fits || tokenizer.is_control(id as u32) {
                *logit = f32::NEG_INFINITY;
            }
        }
    }

    /// Goes on by a chosen token.
    pub(crate) fn advance(&mut self, bytes: &[u8]) {
        self.rest.retain_mut(|rest| {
            let fits = rest.starts_with(bytes);
            if fits {
                rest.drain(..bytes.len());
            }
            fits
        });
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    fn tokenizer(file: &str) -> Tokenizer {
        let path = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../models")).join(file);
        Tokenizer::from_gguf(&skep_gguf::open(&path).unwrap()).unwrap()
    }

    /// Whatever the model prefers, its tokens spell one of the strings, and each of them can come.
    #[test]
    fn any_preference_spells_one_of_the_strings() {
        let strings = ["get_weather{", "get{", "größe des Raums{", "get_weather_now{"];
        for file in ["tiny-gemma4-Q4_K_M.gguf", "tiny-qwen35moe-Q4_K_M.gguf"] {
            let tokenizer = tokenizer(file);
            let mut seen = std::collections::HashSet::new();
            let mut state = 1_u64;
            for _ in 0..200 {
                let mut constraint = OneOf::new(strings.map(str::to_owned));
                let mut text = Vec::new();
                while !constraint.done() {
                    let mut logits: Vec<f32> = (0..tokenizer.n_vocab())
                        .map(|_| {
                            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                            (state >> 40) as f32
                        })
                        .collect();
                    constraint.mask(&tokenizer, &mut logits);
                    let best = (0..logits.len()).max_by(|&a, &b| logits[a].total_cmp(&logits[b])).unwrap();
                    assert!(logits[best].is_finite() && !tokenizer.is_control(best as u32));
                    text.extend_from_slice(tokenizer.token_bytes(best as u32));
                    constraint.advance(tokenizer.token_bytes(best as u32));
                }
                seen.insert(String::from_utf8(text).unwrap());
            }
            let mut seen: Vec<String> = seen.into_iter().collect();
            seen.sort_by_key(|text| strings.iter().position(|string| string == text));
            assert_eq!(seen, strings, "{file}");
        }
    }
}

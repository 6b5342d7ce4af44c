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

//! From logits to the next token.
//!
//! The order of the steps follows llama.cpp and the OpenAI API: logit bias, penalties, then (at a temperature of zero)
//! the best token, otherwise temperature, top-k, top-p, min-p and a draw. Top-k, top-p and min-p look at the
//! probabilities after the temperature.

use std::collections::hash_map::RandomState;
use std::hash::{BuildHasher, Hasher};

use skep_gguf::Gguf;

use crate::error::{Error, ErrorKind, Result};

/// How tokens are chosen. [`Default`] is a plain draw from the model's distribution.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct Sampling {
    /// Divides the logits, 0 to 2; 0 always takes the best token.
    pub temperature: f32,
    /// Keep only this many best tokens; 0 keeps all.
    pub top_k: u32,
    /// Keep the fewest best tokens whose probabilities reach this sum, above 0 to 1.
    pub top_p: f32,
    /// Keep tokens with at least this part of the best token's probability, 0 to 1.
    pub min_p: f32,
    /// Divides positive and multiplies negative logits of tokens in the window (llama.cpp's rule), above 0 to 10;
    /// 1 changes nothing.
    pub repetition_penalty: f32,
    /// Subtracted once from the logits of tokens in the window, -2 to 2 (OpenAI's rule).
    pub presence_penalty: f32,
    /// Subtracted from the logits of tokens in the window as often as they occur there, -2 to 2 (OpenAI's rule).
    pub frequency_penalty: f32,
    /// How many of the last tokens the penalties look at; 0 looks at all.
    pub repeat_window: u32,
    /// Added to the logits of tokens, -100 to 100; of several entries for a token all count.
    pub logit_bias: Vec<(u32, f32)>,
    /// Seed of the random numbers: the same seed and logits give the same tokens. Without one, every sampler draws others.
    pub seed: Option<u64>,
}

impl Default for Sampling {
    fn default() -> Self {
        Self {
            temperature: 1.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            repetition_penalty: 1.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            repeat_window: 0,
            logit_bias: Vec::new(),
            seed: None,
        }
    }
}

impl Sampling {
    /// The best token every time.
    pub fn greedy() -> Self {
        Self { temperature: 0.0, ..Self::default() }
    }

    /// The settings a model file recommends (`general.sampling.temp`, `.top_k`, `.top_p`, `.min_p`), defaults for the rest.
    ///
    /// # Errors
    ///
    /// `ErrorKind::Model` naming the key of another type, or the setting that is out of range.
    pub fn from_gguf<B: AsRef<[u8]>>(file: &Gguf<B>) -> Result<Self> {
        let wrong = |source: &dyn std::fmt::Display| {
            Error::new(ErrorKind::Model, format!("general.sampling: {source}"))
        };
        let number = |key: &str, default: f32| match file.f32(key) {
            Ok(value) => Ok(value.unwrap_or(default)),
            Err(source) => Err(wrong(&source)),
        };
        let default = Self::default();
        let sampling = Self {
            temperature: number("general.sampling.temp", default.temperature)?,
            top_p: number("general.sampling.top_p", default.top_p)?,
            min_p: number("general.sampling.min_p", default.min_p)?,
            top_k: file
                .u32("general.sampling.top_k")
                .map_err(|source| wrong(&source))?
                .unwrap_or(default.top_k),
            ..default
        };
        sampling.validate().map_err(|source| wrong(&source))?;
        Ok(sampling)
    }

    /// Checks that every setting is in its range.
    ///
    /// # Errors
    ///
    /// `ErrorKind::Request` naming the setting as the API calls it, its value and its range. NaN is in no range.
    pub fn validate(&self) -> Result<()> {
        let closed = |low: f32, high: f32| (low, high, true);
        let open = |low: f32, high: f32| (low, high, false);
        for (name, value, (low, high, with_low)) in [
            ("temperature", self.temperature, closed(0.0, 2.0)),
            ("top_p", self.top_p, open(0.0, 1.0)),
            ("min_p", self.min_p, closed(0.0, 1.0)),
            ("repetition_penalty", self.repetition_penalty, open(0.0, 10.0)),
            ("presence_penalty", self.presence_penalty, closed(-2.0, 2.0)),
            ("frequency_penalty", self.frequency_penalty, closed(-2.0, 2.0)),
        ] {
            if !(value >= low && value <= high && (with_low || value > low)) {
                let range = if with_low { "from" } else { "above" };
                return Err(refused(format!("{name} is {value}, but must be {range} {low} to {high}")));
            }
        }
        for &(token, bias) in &self.logit_bias {
            if !(-100.0..=100.0).contains(&bias) {
                return Err(refused(format!(
                    "logit_bias of token {token} is {bias}, but must be from -100 to 100"
                )));
            }
        }
        Ok(())
    }

    /// Whether the penalties change anything, so that the history matters.
    fn penalises(&self) -> bool {
        self.repetition_penalty != 1.0 || self.presence_penalty != 0.0 || self.frequency_penalty != 0.0
    }
}

fn refused(message: String) -> Error {
    Error::new(ErrorKind::Request, message)
}

/// Chooses tokens, one request's worth: settings, random numbers and buffers that are used again.
#[derive(Debug, Clone)]
pub struct Sampler {
    sampling: Sampling,
    random: Xoshiro256,
    /// Tokens of the window, sorted, to count them.
    window: Vec<u32>,
    /// Tokens still in the running, with their logits and then their weights.
    candidates: Vec<(u32, f32)>,
}

impl Sampler {
    /// A sampler at the start of its random sequence.
    ///
    /// # Errors
    ///
    /// As [`Sampling::validate`].
    pub fn new(sampling: &Sampling) -> Result<Self> {
        sampling.validate()?;
        Ok(Self {
            sampling: sampling.clone(),
            random: Xoshiro256::new(sampling.seed.unwrap_or_else(fresh_seed)),
            window: Vec::new(),
            candidates: Vec::new(),
        })
    }

    /// Chooses the next token.
    ///
    /// `logits` is one row of the model's output, `[n_vocab]`; entries of negative infinity (a mask) are never chosen. Bias
    /// and penalties are applied in place. `history` is all the tokens the penalties may look at, the oldest first.
    ///
    /// # Errors
    ///
    /// `ErrorKind::NotFinite` when a logit is NaN or positive infinity, or when no finite one is left;
    /// `ErrorKind::Request` when `logit_bias` names a token outside the vocabulary.
    pub fn sample(&mut self, logits: &mut [f32], history: &[u32]) -> Result<u32> {
        self.bias(logits)?;
        self.penalise(logits, history);
        let best = best(logits)?;
        let Sampling { temperature, top_k, top_p, min_p, .. } = self.sampling;
        if temperature == 0.0 || top_k == 1 {
            return Ok(best);
        }
        match top_k as usize {
            k if k > 0 && k < logits.len() => keep_best(logits, k, &mut self.candidates),
            _ => {
                self.candidates.clear();
                self.candidates.extend((0..).zip(logits.iter().copied()));
            }
        }
        let top = logits[best as usize];
        let floor = if min_p > 0.0 { min_p } else { f32::MIN_POSITIVE };
        // Probabilities are relative to the best token, which has one.
        self.candidates.retain_mut(|(_, value)| {
            *value = ((*value - top) / temperature).exp();
            *value >= floor
        });
        let mut kept = &mut self.candidates[..];
        if top_p < 1.0 {
            let count = nucleus(kept, top_p);
            kept = &mut kept[..count];
        }
        // The order must not depend on how the best were found.
        kept.sort_unstable_by_key(|&(token, _)| token);
        Ok(draw(kept, self.random.unit()))
    }

    fn bias(&self, logits: &mut [f32]) -> Result<()> {
        let n_vocab = logits.len();
        for &(token, bias) in &self.sampling.logit_bias {
            match logits.get_mut(token as usize) {
                Some(logit) => *logit += bias,
                None => {
                    return Err(refused(format!(
                        "logit_bias names token {token}, but the vocabulary has {n_vocab}"
                    )));
                }
            }
        }
        Ok(())
    }

    fn penalise(&mut self, logits: &mut [f32], history: &[u32]) {
        if !self.sampling.penalises() {
            return;
        }
        let Sampling { repetition_penalty, presence_penalty, frequency_penalty, repeat_window, .. } =
            self.sampling;
        let window = if repeat_window == 0 { usize::MAX } else { repeat_window as usize };
        self.window.clear();
        self.window.extend_from_slice(&history[history.len().saturating_sub(window)..]);
        self.window.sort_unstable();
        for run in self.window.chunk_by(|a, b| a == b) {
            let Some(logit) = logits.get_mut(run[0] as usize) else { continue };
            if *logit > 0.0 {
                *logit /= repetition_penalty;
            } else {
                *logit *= repetition_penalty;
            }
            *logit -= presence_penalty + frequency_penalty * run.len() as f32;
        }
    }
}

/// The token with the greatest logit, the lowest id among equals.
fn best(logits: &[f32]) -> Result<u32> {
    let mut best = None;
    for (token, &logit) in logits.iter().enumerate() {
        if logit.is_nan() || logit == f32::INFINITY {
            return Err(Error::new(ErrorKind::NotFinite, format!("logit of token {token} is {logit}")));
        }
        if logit > best.map_or(f32::NEG_INFINITY, |(_, greatest)| greatest) {
            best = Some((token as u32, logit));
        }
    }
    match best {
        Some((token, _)) => Ok(token),
        None => Err(Error::new(ErrorKind::NotFinite, "no token has a finite logit")),
    }
}

/// Collects the `k` best tokens with their logits, in no order.
fn keep_best(logits: &[f32], k: usize, candidates: &mut Vec<(u32, f32)>) {
    let capacity = (4 * k).max(256);
    let mut least = f32::NEG_INFINITY;
    candidates.clear();
    for (token, &logit) in logits.iter().enumerate() {
        // An equal logit later in the row has the higher id, so it is worse than those found before.
        if logit > least {
            candidates.push((token as u32, logit));
            if candidates.len() == capacity {
                candidates.select_nth_unstable_by(k - 1, better);
                candidates.truncate(k);
                least = candidates[k - 1].1;
            }
        }
    }
    if candidates.len() > k {
        candidates.select_nth_unstable_by(k - 1, better);
        candidates.truncate(k);
    }
}

/// The better candidate first: the greater value, then the lower id.
fn better(a: &(u32, f32), b: &(u32, f32)) -> std::cmp::Ordering {
    b.1.total_cmp(&a.1).then(a.0.cmp(&b.0))
}

/// Moves the fewest best candidates that hold `top_p` of the weight to the front, and counts them.
///
/// Sorts only as many as it needs: the leading part doubles until it holds enough.
fn nucleus(candidates: &mut [(u32, f32)], top_p: f32) -> usize {
    let total: f64 = candidates.iter().map(|&(_, weight)| f64::from(weight)).sum();
    let enough = total * f64::from(top_p);
    let (mut sorted, mut sum) = (0, 0.0);
    let mut part = 64;
    while sorted < candidates.len() {
        let rest = &mut candidates[sorted..];
        let take = part.min(rest.len());
        if take < rest.len() {
            rest.select_nth_unstable_by(take - 1, better);
        }
        rest[..take].sort_unstable_by(better);
        for &(_, weight) in &rest[..take] {
            sum += f64::from(weight);
            sorted += 1;
            if sum >= enough {
                return sorted;
            }
        }
        part *= 4;
    }
    sorted
}

/// The candidate at the part `at` (0 to below 1) of the sum of all weights.
fn draw(candidates: &[(u32, f32)], at: f64) -> u32 {
    let total: f64 = candidates.iter().map(|&(_, weight)| f64::from(weight)).sum();
    let mut left = at * total;
    let mut last = 0;
    for &(token, weight) in candidates {
        last = token;
        left -= f64::from(weight);
        if left < 0.0 {
            break;
        }
    }
    // Rounding may leave a rest behind the last one.
    last
}

/// A seed that differs from call to call: the keys that the standard library draws for its hash maps.
fn fresh_seed() -> u64 {
    RandomState::new().build_hasher().finish()
}

/// The generator xoshiro256** of Blackman and Vigna (2018), seeded by splitmix64 as they advise.
#[derive(Debug, Clone)]
struct Xoshiro256 {
    state: [u64; 4],
}

impl Xoshiro256 {
    fn new(mut seed: u64) -> Self {
        let state = std::array::from_fn(|_| {
            seed = seed.wrapping_add(0x9E37_79B9_7F4A_7C15);
            let mixed = (seed ^ (seed >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
            let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
            mixed ^ (mixed >> 31)
        });
        Self { state }
    }

    fn next(&mut self) -> u64 {
        let [a, b, c, d] = &mut self.state;
        let result = b.wrapping_mul(5).rotate_left(7).wrapping_mul(9);
        let shifted = *b << 17;
        *c ^= *a;
        *d ^= *b;
        *b ^= *c;
        *a ^= *d;
        *c ^= shifted;
        *d = d.rotate_left(45);
        result
    }

    /// A number from 0 to below 1 with 53 random bits.
    fn unit(&mut self) -> f64 {
        (self.next() >> 11) as f64 * (1.0 / (1u64 << 53) as f64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sampler(sampling: Sampling) -> Sampler {
        Sampler::new(&sampling).unwrap()
    }

    #[test]
    fn random_numbers_are_those_of_the_paper() {
        // From the authors' C sources, state seeded by splitmix64(0).
        let mut random = Xoshiro256::new(0);
        assert_eq!(random.state[0], 0xE220_A839_7B1D_CDAF);
        let mut reference = Xoshiro256 { state: [1, 2, 3, 4] };
        let numbers: Vec<u64> = (0..6).map(|_| reference.next()).collect();
        assert_eq!(
            numbers,
            [
                11520,
                0,
                1_509_978_240,
                1_215_971_899_390_074_240,
                1_216_172_134_540_287_360,
                607_988_272_756_665_600
            ]
        );
        assert!((0..1000).all(|_| (0.0..1.0).contains(&random.unit())));
    }

    #[test]
    fn not_finite_logits_are_refused() {
        for (logits, words) in [
            (vec![f32::NAN; 4], "logit of token 0 is NaN"),
            (vec![1.0, f32::NAN], "logit of token 1 is NaN"),
            (vec![1.0, f32::INFINITY], "logit of token 1 is inf"),
            (vec![f32::NEG_INFINITY; 3], "no token has a finite logit"),
            (vec![], "no token has a finite logit"),
        ] {
            for sampling in [Sampling::default(), Sampling::greedy()] {
                let error = sampler(sampling).sample(&mut logits.clone(), &[]).unwrap_err();
                assert_eq!((error.kind(), error.to_string().as_str()), (ErrorKind::NotFinite, words));
            }
        }
    }

    #[test]
    fn penalties_follow_their_formulas() {
        let sampling = Sampling {
            repetition_penalty: 2.0,
            presence_penalty: 0.5,
            frequency_penalty: 0.25,
            repeat_window: 4,
            ..Sampling::greedy()
        };
        let mut logits = [4.0, -1.0, 3.0, 0.0, 5.0];
        let token = sampler(sampling).sample(&mut logits, &[4, 4, 0, 1, 0, 0, 99][..6]).unwrap();
        // The window is 0, 1, 0, 0: the two fours have left it.
        assert_eq!(logits, [4.0 / 2.0 - 0.5 - 0.75, -2.0 - 0.5 - 0.25, 3.0, 0.0, 5.0]);
        assert_eq!(token, 4);
        // Tokens outside the vocabulary in the history are no error.
        let all = Sampling { presence_penalty: 2.0, ..Sampling::greedy() };
        assert_eq!(sampler(all).sample(&mut [1.0, 0.0], &[0, 99]).unwrap(), 1);
    }

    #[test]
    fn bias_adds_up() {
        let biased = |logit_bias| Sampling { logit_bias, ..Sampling::greedy() };
        assert_eq!(sampler(biased(vec![(2, 3.0), (2, 3.0)])).sample(&mut [5.0, 0.0, 0.0], &[]).unwrap(), 2);
        assert_eq!(sampler(biased(vec![(0, -100.0)])).sample(&mut [5.0, 0.0, 0.0], &[]).unwrap(), 1);
        let error = sampler(biased(vec![(1_000_000_000, 1.0)])).sample(&mut [5.0, 0.0], &[]).unwrap_err();
        assert_eq!(error.to_string(), "logit_bias names token 1000000000, but the vocabulary has 2");
    }

    #[test]
    fn settings_out_of_range_are_named() {
        let default = Sampling::default();
        assert!(default.validate().is_ok());
        for (sampling, words) in [
            (
                Sampling { temperature: -0.1, ..default.clone() },
                "temperature is -0.1, but must be from 0 to 2",
            ),
            (
                Sampling { temperature: f32::NAN, ..default.clone() },
                "temperature is NaN, but must be from 0 to 2",
            ),
            (Sampling { top_p: 0.0, ..default.clone() }, "top_p is 0, but must be above 0 to 1"),
            (Sampling { min_p: 1.5, ..default.clone() }, "min_p is 1.5, but must be from 0 to 1"),
            (
                Sampling { repetition_penalty: 0.0, ..default.clone() },
                "repetition_penalty is 0, but must be above 0 to 10",
            ),
            (
                Sampling { presence_penalty: f32::INFINITY, ..default.clone() },
                "presence_penalty is inf, but must be from -2 to 2",
            ),
            (
                Sampling { frequency_penalty: -2.5, ..default.clone() },
                "frequency_penalty is -2.5, but must be from -2 to 2",
            ),
            (
                Sampling { logit_bias: vec![(7, 101.0)], ..default.clone() },
                "logit_bias of token 7 is 101, but must be from -100 to 100",
            ),
        ] {
            let error = Sampler::new(&sampling).unwrap_err();
            assert_eq!((error.kind(), error.to_string().as_str()), (ErrorKind::Request, words));
        }
    }
}

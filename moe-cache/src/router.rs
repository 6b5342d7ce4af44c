//! Choosing experts: softmax over the router's logits, the best k, weights renormalised.

use alloc::vec::Vec;

use crate::math::exp;
use crate::{ErrorKind, Result};

/// The experts of a batch of tokens and their weights; reused from call to call.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Routes {
    top_k: usize,
    /// `[n_tokens, top_k]`, best first.
    experts: Vec<u32>,
    /// `[n_tokens, top_k]`.
    weights: Vec<f32>,
}

/// What the weights of the chosen experts sum to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Norm {
    /// The probabilities as they are: p = softmax over all experts.
    Full,
    /// The probabilities divided by the sum of the chosen ones, so that the weights of a token sum to 1.
    #[default]
    TopK,
}

/// How [`route`] turns logits into weights. [`Options::default`] is softmax, top-k, renormalised.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct Options<'a> {
    /// What the weights sum to.
    pub norm: Norm,
    /// `[n_experts]`: a factor per expert, multiplied on after `norm` (Gemma 4 has one).
    pub expert_scale: Option<&'a [f32]>,
}

/// Routes each token to its `top_k` best experts.
///
/// `logits` is `[n_tokens, n_experts]`, f32. Experts are ranked by logit, ties to the lower number; this is the order
/// of the softmax, without its rounding, so it is the same on every device. The weights are computed in f32 and, for
/// [`Norm::TopK`], summed in rank order. A logit of −∞ is a probability of zero.
///
/// # Errors
/// [`ErrorKind::TopK`] unless 1 ≤ `top_k` ≤ `n_experts`; [`ErrorKind::Length`] when `logits` is not a whole number of
/// rows or the scale is not `n_experts` long; [`ErrorKind::Logit`] for NaN, +∞, or a token whose logits are all −∞.
/// `out` is empty then.
pub fn route(
    logits: &[f32],
    n_experts: usize,
    top_k: usize,
    options: &Options<'_>,
    out: &mut Routes,
) -> Result<()> {
    out.clear(top_k);
    if top_k == 0 || top_k > n_experts {
        return Err(ErrorKind::TopK { top_k, n_experts }.into());
    }
    let n_tokens = logits.len() / n_experts;
    if !logits.len().is_multiple_of(n_experts) {
        let expected = (n_tokens + 1) * n_experts;
        return Err(ErrorKind::Length { what: "router logits", expected, actual: logits.len() }.into());
    }
    if let Some(scale) = options.expert_scale.filter(|scale| scale.len() != n_experts) {
        return Err(
            ErrorKind::Length { what: "expert scale", expected: n_experts, actual: scale.len() }.into()
        );
    }
    out.experts.resize(n_tokens * top_k, 0);
    out.weights.resize(n_tokens * top_k, 0.0);
    let rows = logits.chunks_exact(n_experts);
    let chosen = out.experts.chunks_exact_mut(top_k).zip(out.weights.chunks_exact_mut(top_k));
    for (token, (row, (experts, weights))) in rows.zip(chosen).enumerate() {
        if let Err(expert) = select(row, experts, weights) {
            out.clear(top_k);
            return Err(ErrorKind::Logit { token, expert, value: row[expert] }.into());
        }
        weigh(row, options.norm, weights);
        if let Some(scale) = options.expert_scale {
            for (weight, &expert) in weights.iter_mut().zip(&*experts) {
                *weight *= scale[expert as usize];
            }
        }
    }
    Ok(())
}

/// The best `experts.len()` entries of `row`, best first, and their logits. `Err` is the expert whose logit admits no
/// answer.
fn select(row: &[f32], experts: &mut [u32], logits: &mut [f32]) -> Result<(), usize> {
    let mut count = 0;
    for (expert, &logit) in row.iter().enumerate() {
        // Full, and not better than the last: most experts end here. NaN does not, and +∞ is found first of all.
        if count == experts.len() && logit <= logits[count - 1] {
            continue;
        }
        if logit.is_nan() || logit == f32::INFINITY {
            return Err(expert);
        }
        if count < experts.len() {
            count += 1;
        }
        let mut place = count - 1;
        while place > 0 && logit > logits[place - 1] {
            experts[place] = experts[place - 1];
            logits[place] = logits[place - 1];
            place -= 1;
        }
        experts[place] = expert as u32;
        logits[place] = logit;
    }
    if logits[0] == f32::NEG_INFINITY { Err(experts[0] as usize) } else { Ok(()) }
}

/// Chosen logits, best first, to weights, in place.
fn weigh(row: &[f32], norm: Norm, weights: &mut [f32]) {
    let max = weights[0];
    for weight in &mut *weights {
        *weight = exp(*weight - max);
    }
    let sum: f32 = match norm {
        Norm::Full => row.iter().map(|&logit| exp(logit - max)).sum(),
        // The sum over all experts cancels.
        Norm::TopK => weights.iter().sum(),
    };
    for weight in weights {
        *weight /= sum;
    }
}

impl<'a> Options<'a> {
    /// With a factor per expert, `[n_experts]`.
    pub fn with_expert_scale(mut self, scale: &'a [f32]) -> Self {
        self.expert_scale = Some(scale);
        self
    }

    /// With another normalisation.
    pub fn with_norm(mut self, norm: Norm) -> Self {
        self.norm = norm;
        self
    }
}

impl Routes {
    /// No tokens.
    pub fn new() -> Self {
        Self::default()
    }

    /// Routes made elsewhere: `experts` and `weights` are `[n_tokens, top_k]`.
    ///
    /// # Errors
    /// [`ErrorKind::Length`] when they differ in length or are not a whole number of tokens, [`ErrorKind::TopK`] when
    /// `top_k` is zero.
    pub fn from_parts(top_k: usize, experts: Vec<u32>, weights: Vec<f32>) -> Result<Self> {
        if top_k == 0 {
            return Err(ErrorKind::TopK { top_k, n_experts: 0 }.into());
        }
        let expected = experts.len().next_multiple_of(top_k);
        for (what, actual) in [("routed experts", experts.len()), ("route weights", weights.len())] {
            if actual != expected {
                return Err(ErrorKind::Length { what, expected, actual }.into());
            }
        }
        Ok(Self { top_k, experts, weights })
    }

    /// Tokens.
    pub fn n_tokens(&self) -> usize {
        self.experts.len().checked_div(self.top_k).unwrap_or(0)
    }

    /// Experts per token.
    pub fn top_k(&self) -> usize {
        self.top_k
    }

    /// `[n_tokens, top_k]`, best first.
    pub fn experts(&self) -> &[u32] {
        &self.experts
    }

    /// `[n_tokens, top_k]`, in the order of [`experts`](Routes::experts).
    pub fn weights(&self) -> &[f32] {
        &self.weights
    }

    fn clear(&mut self, top_k: usize) {
        self.top_k = top_k;
        self.experts.clear();
        self.weights.clear();
    }
}

#[cfg(test)]
mod tests {
    use alloc::string::ToString;
    use alloc::vec;

    use super::*;

    fn routed(logits: &[f32], n_experts: usize, top_k: usize) -> Routes {
        let mut routes = Routes::new();
        route(logits, n_experts, top_k, &Options::default(), &mut routes).unwrap();
        routes
    }

    #[test]
    fn top_2_of_8_by_hand() {
        // exp: 1, 2, 4, 8 ... so that the two best are 8 and 4 of 12.
        let ln2 = core::f32::consts::LN_2;
        let logits: Vec<f32> = [0.0, 2.0, 1.0, 3.0, 0.0, 0.0, 0.0, 0.0].map(|x| x * ln2).to_vec();
        let routes = routed(&logits, 8, 2);
        assert_eq!(routes.experts(), [3, 1]);
        assert!((routes.weights()[0] - 2.0 / 3.0).abs() < 1e-6);
        assert!((routes.weights()[1] - 1.0 / 3.0).abs() < 1e-6);

        let mut full = Routes::new();
        route(&logits, 8, 2, &Options::default().with_norm(Norm::Full), &mut full).unwrap();
        assert_eq!(full.experts(), [3, 1]);
        assert!((full.weights()[0] - 8.0 / 19.0).abs() < 1e-6);
        assert!((full.weights()[1] - 4.0 / 19.0).abs() < 1e-6);

        let scale = [0.0, 3.0, 0.0, 0.5, 0.0, 0.0, 0.0, 0.0];
        let mut scaled = Routes::new();
        route(&logits, 8, 2, &Options::default().with_expert_scale(&scale), &mut scaled).unwrap();
        assert_eq!(scaled.weights(), [routes.weights()[0] * 0.5, routes.weights()[1] * 3.0]);
    }

    #[test]
    fn ties_go_to_the_lower_expert() {
        assert_eq!(routed(&[1.0; 16], 16, 4).experts(), [0, 1, 2, 3]);
        assert_eq!(routed(&[0.0, -0.0, 5.0, 0.0, 5.0], 5, 4).experts(), [2, 4, 0, 1]);
        // Rank 2 and 3 differ by one unit in the last place at magnitude 20.
        let close = 20.0_f32.next_up();
        assert_eq!(routed(&[20.0, close, 30.0], 3, 2).experts(), [2, 1]);
        // The probabilities underflow to 0 and tie; the logits do not.
        assert_eq!(routed(&[-900.0, 0.0, -800.0, f32::NEG_INFINITY], 4, 4).experts(), [1, 2, 0, 3]);
    }

    #[test]
    fn extreme_logits_give_finite_weights() {
        let routes = routed(&[f32::MAX, f32::MIN, 0.0, f32::NEG_INFINITY], 4, 4);
        assert_eq!(routes.experts(), [0, 2, 1, 3]);
        assert_eq!(routes.weights(), [1.0, 0.0, 0.0, 0.0]);
    }

    #[test]
    fn logits_without_a_distribution_are_errors_naming_the_token() {
        let mut routes = routed(&[1.0, 2.0], 2, 1);
        let mut refuse = |logits: &[f32], token, expert, text: &str| {
            let error = route(logits, 3, 2, &Options::default(), &mut routes).unwrap_err();
            assert!(
                matches!(error.kind(), ErrorKind::Logit { token: t, expert: e, .. } if (*t, *e) == (token, expert))
            );
            assert_eq!(error.to_string(), text);
            assert_eq!(routes.n_tokens(), 0);
        };
        refuse(&[0.0, 1.0, 2.0, 0.0, 1.0, f32::NAN], 1, 2, "token 1: router logit of expert 2 is NaN");
        refuse(&[f32::NAN, 1.0, 2.0], 0, 0, "token 0: router logit of expert 0 is NaN");
        refuse(&[0.0, 1.0, f32::INFINITY], 0, 2, "token 0: router logit of expert 2 is inf");
        refuse(&[f32::NEG_INFINITY; 3], 0, 0, "token 0: router logit of expert 0 is -inf");
    }

    #[test]
    fn wrong_shapes_are_errors() {
        let mut routes = Routes::new();
        let mut kind = |logits: &[f32], n_experts, top_k, options: &Options<'_>| {
            route(logits, n_experts, top_k, options, &mut routes).unwrap_err().kind().clone()
        };
        let plain = Options::default();
        assert_eq!(kind(&[0.0; 4], 4, 0, &plain), ErrorKind::TopK { top_k: 0, n_experts: 4 });
        assert_eq!(kind(&[0.0; 4], 4, 5, &plain), ErrorKind::TopK { top_k: 5, n_experts: 4 });
        assert_eq!(kind(&[], 0, 0, &plain), ErrorKind::TopK { top_k: 0, n_experts: 0 });
        assert_eq!(
            kind(&[0.0; 5], 4, 1, &plain),
            ErrorKind::Length { what: "router logits", expected: 8, actual: 5 }
        );
        assert_eq!(
            kind(&[0.0; 4], 4, 1, &plain.with_expert_scale(&[1.0; 3])),
            ErrorKind::Length { what: "expert scale", expected: 4, actual: 3 }
        );
        assert!(Routes::from_parts(2, vec![0; 3], vec![0.0; 3]).is_err());
        assert!(Routes::from_parts(2, vec![0; 4], vec![0.0; 3]).is_err());
        assert!(Routes::from_parts(0, vec![], vec![]).is_err());
        assert_eq!(Routes::from_parts(2, vec![0; 4], vec![0.0; 4]).unwrap().n_tokens(), 2);
        assert_eq!(Routes::new().n_tokens(), 0);
    }
}

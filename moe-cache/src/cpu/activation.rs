/// The function applied to the gate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Activation {
    /// x · ½(1 + tanh(√(2/π)(x + 0.044715 x³))), the tanh form of GELU.
    GeluTanh,
    /// x · σ(x).
    Silu,
}

impl Activation {
    /// `out = act(gate) * up`, element by element; the bits are the same on every processor.
    ///
    /// # Panics
    /// When the lengths differ.
    pub fn apply(self, gate: &[f32], up: &[f32], out: &mut [f32]) {
        assert!(gate.len() == out.len() && up.len() == out.len(), "lengths of gate, up and output differ");
        match self {
            Self::GeluTanh => map(gate, up, out, |x| {
                // ½(1 + tanh u) = σ(2u).
                const TWICE_SQRT_2_OVER_PI: f32 = 1.595_769_2;
                over_one_plus_exp(x, -TWICE_SQRT_2_OVER_PI * (x + 0.044_715 * x * x * x))
            }),
            Self::Silu => map(gate, up, out, |x| over_one_plus_exp(x, -x)),
        }
    }
}

#[inline(always)]
fn map(gate: &[f32], up: &[f32], out: &mut [f32], act: impl Fn(f32) -> f32) {
    for ((out, &gate), &up) in out.iter_mut().zip(gate).zip(up) {
        *out = act(gate) * up;
    }
}

#[inline(always)]
fn over_one_plus_exp(x: f32, y: f32) -> f32 {
    x / (1.0 + exp(y))
}

/// e^x to 2e-7 relative, without branches and calls so that loops over it vectorise; the argument is clamped to
/// −87 … 88. Range reduction by ln 2 in two parts, polynomial of Cephes' `expf` (S. Moshier).
#[inline(always)]
fn exp(x: f32) -> f32 {
    /// 1.5 · 2²³: adding it rounds to an integer, which then stands in the low bits.
    const ROUND: f32 = 12_582_912.0;
    const LN_2_HI: f32 = 0.693_359_4;
    const LN_2_LO: f32 = -2.121_944_4e-4;
    let x = x.clamp(-87.0, 88.0);
    let shifted = x * core::f32::consts::LOG2_E + ROUND;
    let n = shifted - ROUND;
    let r = x - n * LN_2_HI - n * LN_2_LO;
    let mut p = 1.987_569_2e-4;
    for c in [1.398_2e-3, 8.333_452e-3, 4.166_579_6e-2, 0.166_666_65, 0.5] {
        p = p * r + c;
    }
    let power = f32::from_bits((shifted.to_bits() << 23).wrapping_add(0x3f80_0000));
    (p * r * r + r + 1.0) * power
}

#[cfg(test)]
mod tests {
    use alloc::vec;
    use alloc::vec::Vec;

    use super::*;

    #[test]
    fn exp_is_within_2e_7() {
        let mut worst = 0.0_f64;
        for i in -870_000..=880_000 {
            let x = i as f32 * 1e-4;
            let x = x.clamp(-87.0, 88.0);
            let exact = f64::from(x).exp();
            worst = worst.max((f64::from(exp(x)) / exact - 1.0).abs());
        }
        assert!(worst < 2e-7, "{worst:e}");
        assert_eq!(exp(0.0), 1.0);
        assert!(exp(f32::NAN).is_nan());
    }

    fn applied(act: Activation, x: &[f32]) -> Vec<f32> {
        let mut out = vec![0.0; x.len()];
        act.apply(x, &vec![1.0; x.len()], &mut out);
        out
    }

    #[test]
    fn activations_are_their_formulas() {
        let x: Vec<f32> = (-4000..4000).map(|i| i as f32 * 0.005).collect();
        let silu = applied(Activation::Silu, &x);
        let gelu = applied(Activation::GeluTanh, &x);
        for ((&x, silu), gelu) in x.iter().zip(silu).zip(gelu) {
            let x = f64::from(x);
            let exact = x / (1.0 + (-x).exp());
            assert!((f64::from(silu) - exact).abs() <= 4e-7 * exact.abs() + 1e-30, "silu({x}) = {silu}");
            let u = (2.0 / core::f64::consts::PI).sqrt() * (x + 0.044715 * x * x * x);
            let exact = 0.5 * x * (1.0 + u.tanh());
            assert!((f64::from(gelu) - exact).abs() <= 2e-6 * exact.abs() + 1e-6, "gelu({x}) = {gelu}");
        }
    }

    #[test]
    fn extremes() {
        let x = [-1e30, -200.0, 0.0, 200.0, 1e30, f32::INFINITY, f32::NAN];
        for act in [Activation::Silu, Activation::GeluTanh] {
            let y = applied(act, &x);
            assert!(y[1].abs() < 1e-30 && y[2] == 0.0 && y[3] == 200.0 && y[4] == 1e30, "{act:?} {y:?}");
            assert!(y[0].is_finite() && y[5] == f32::INFINITY && y[6].is_nan(), "{act:?} {y:?}");
        }
        let mut out = [0.0];
        Activation::Silu.apply(&[2.0], &[-3.0], &mut out);
        assert!((out[0] + 5.284_782_5).abs() < 1e-5);
    }
}

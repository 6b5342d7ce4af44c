//! Random layers, an f64 oracle, and a thread pool.
#![allow(dead_code, reason = "each test binary uses its own part")]

use std::ops::Range;

use skep_gdn::{Form, HeadOrder, Input, Scratch, Shape, Span, State, Weights, mix};
use skep_quant::Parallel;

/// xorshift64*
pub(crate) struct Random(u64);

impl Random {
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    pub(crate) fn bits(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    /// Between -1 and 1.
    pub(crate) fn unit(&mut self) -> f32 {
        (self.bits() >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    }

    pub(crate) fn vec(&mut self, n: usize, scale: f32) -> Vec<f32> {
        (0..n).map(|_| self.unit() * scale).collect()
    }
}

/// An owned layer with its inputs.
#[derive(Clone)]
pub(crate) struct Case {
    pub(crate) shape: Shape,
    pub(crate) conv: Vec<f32>,
    pub(crate) a: Vec<f32>,
    pub(crate) dt_bias: Vec<f32>,
    pub(crate) norm: Vec<f32>,
    pub(crate) eps: f32,
    pub(crate) qkv: Vec<f32>,
    pub(crate) z: Vec<f32>,
    pub(crate) beta: Vec<f32>,
    pub(crate) alpha: Vec<f32>,
}

impl Case {
    pub(crate) fn new(shape: Shape, n: usize, seed: u64) -> Self {
        let mut random = Random::new(seed);
        Self {
            shape,
            conv: random.vec(shape.conv_dim() * shape.conv_kernel(), 0.8),
            a: (0..shape.v_heads()).map(|_| -0.02 - 0.5 * (random.unit() + 1.0)).collect(),
            dt_bias: random.vec(shape.v_heads(), 1.0),
            norm: (0..shape.head_v_dim()).map(|_| 1.0 + 0.3 * random.unit()).collect(),
            eps: 1e-6,
            qkv: random.vec(n * shape.conv_dim(), 2.0),
            z: random.vec(n * shape.value_dim(), 3.0),
            beta: random.vec(n * shape.v_heads(), 3.0),
            alpha: random.vec(n * shape.v_heads(), 4.0),
        }
    }

    pub(crate) fn n(&self) -> usize {
        self.beta.len() / self.shape.v_heads()
    }

    pub(crate) fn weights(&self) -> Weights<'_> {
        Weights::new(&self.shape, &self.conv, &self.a, &self.dt_bias, &self.norm, self.eps).unwrap()
    }

    pub(crate) fn input(&self) -> Input<'_> {
        self.input_of(0..self.n())
    }

    pub(crate) fn input_of(&self, rows: Range<usize>) -> Input<'_> {
        let part = |width: usize| rows.start * width..rows.end * width;
        Input {
            qkv: &self.qkv[part(self.shape.conv_dim())],
            z: &self.z[part(self.shape.value_dim())],
            beta: &self.beta[part(self.shape.v_heads())],
            alpha: &self.alpha[part(self.shape.v_heads())],
        }
    }

    /// A state with something in it.
    pub(crate) fn carried(&self, seed: u64) -> State {
        let mut random = Random::new(seed ^ 0x5eed);
        let mut state = State::new(&self.shape);
        state.conv_mut().iter_mut().for_each(|x| *x = random.unit());
        state.s_mut().iter_mut().for_each(|x| *x = 0.5 * random.unit());
        state
    }

    /// All rows as one sequence, in pieces.
    pub(crate) fn run(&self, par: &dyn Parallel, form: Form, state: &mut State, cuts: &[usize]) -> Vec<f32> {
        let mut scratch = Scratch::new();
        let mut out = Vec::new();
        let mut at = 0;
        for &cut in cuts {
            let rows = at..(at + cut).min(self.n());
            let mut piece = vec![f32::NAN; rows.len() * self.shape.value_dim()];
            let mut spans = [Span { tokens: 0..rows.len(), state: &mut *state }];
            let input = self.input_of(rows.clone());
            mix(par, &self.shape, &self.weights(), &mut spans, &input, &mut scratch, form, &mut piece);
            out.extend(piece);
            at = rows.end;
        }
        assert_eq!(at, self.n());
        out
    }

    /// The mixer in f64 with its own bookkeeping: channel by channel, head by head, token by token.
    pub(crate) fn oracle(&self, state: &State) -> Oracle {
        let shape = &self.shape;
        let (n, kernel, conv_dim) = (self.n(), shape.conv_kernel(), shape.conv_dim());
        let (d_k, d_v, v_heads) = (shape.head_k_dim(), shape.head_v_dim(), shape.v_heads());
        let ratio = v_heads / shape.k_heads();
        let sigmoid = |x: f64| 1.0 / (1.0 + (-x).exp());
        let raw = |t: isize, c: usize| -> f64 {
            if t < 0 {
                f64::from(state.conv()[(t + kernel as isize - 1) as usize * conv_dim + c])
            } else {
                f64::from(self.qkv[t as usize * conv_dim + c])
            }
        };
        let conv = |t: usize, c: usize| -> f64 {
            let y: f64 = (0..kernel)
                .map(|j| {
                    f64::from(self.conv[c * kernel + j]) * raw((t + j) as isize - kernel as isize + 1, c)
                })
                .sum();
            y * sigmoid(y)
        };
        let unit = |x: Vec<f64>| -> Vec<f64> {
            let factor = 1.0 / (x.iter().map(|x| x * x).sum::<f64>() + 1e-6).sqrt();
            x.iter().map(|x| x * factor).collect()
        };
        let mut out = vec![0.0; n * v_heads * d_v];
        let mut states = Vec::new();
        for head in 0..v_heads {
            let k_head = match shape.order() {
                HeadOrder::Grouped => head / ratio,
                HeadOrder::Tiled => head % shape.k_heads(),
                _ => unreachable!(),
            };
            let mut s: Vec<f64> =
                state.s()[head * d_k * d_v..][..d_k * d_v].iter().map(|&x| f64::from(x)).collect();
            for t in 0..n {
                let q = unit((0..d_k).map(|i| conv(t, k_head * d_k + i)).collect());
                let k = unit((0..d_k).map(|i| conv(t, (shape.k_heads() + k_head) * d_k + i)).collect());
                let v: Vec<f64> = (0..d_v).map(|j| conv(t, 2 * shape.key_dim() + head * d_v + j)).collect();
                let x = f64::from(self.alpha[t * v_heads + head]) + f64::from(self.dt_bias[head]);
                let softplus = if x > 20.0 { x } else { x.exp().ln_1p() };
                let decay = (f64::from(self.a[head]) * softplus).exp();
                let beta = sigmoid(f64::from(self.beta[t * v_heads + head]));
                s.iter_mut().for_each(|s| *s *= decay);
                for j in 0..d_v {
                    let read: f64 = (0..d_k).map(|i| s[i * d_v + j] * k[i]).sum();
                    let u = beta * (v[j] - read);
                    (0..d_k).for_each(|i| s[i * d_v + j] += k[i] * u);
                }
                let o: Vec<f64> = (0..d_v)
                    .map(|j| (0..d_k).map(|i| s[i * d_v + j] * q[i]).sum::<f64>() / (d_k as f64).sqrt())
                    .collect();
                let mean = o.iter().map(|x| x * x).sum::<f64>() / d_v as f64;
                for j in 0..d_v {
                    let z = f64::from(self.z[(t * v_heads + head) * d_v + j]);
                    out[(t * v_heads + head) * d_v + j] =
                        o[j] / (mean + f64::from(self.eps)).sqrt() * f64::from(self.norm[j]) * z * sigmoid(z);
                }
            }
            states.extend(s);
        }
        let window = (0..kernel - 1).flat_map(|m| (0..conv_dim).map(move |c| (m, c)));
        let window =
            window.map(|(m, c)| raw(n as isize - kernel as isize + 1 + m as isize, c) as f32).collect();
        Oracle { out, s: states, window }
    }
}

pub(crate) struct Oracle {
    pub(crate) out: Vec<f64>,
    pub(crate) s: Vec<f64>,
    pub(crate) window: Vec<f32>,
}

impl Oracle {
    pub(crate) fn check(&self, out: &[f32], state: &State, tolerance: f64, what: &str) {
        assert_close(&widen(out), &self.out, tolerance, &format!("{what}: out"));
        assert_close(&widen(state.s()), &self.s, tolerance, &format!("{what}: state"));
        assert_eq!(state.conv(), self.window, "{what}: window");
    }
}

pub(crate) fn widen(x: &[f32]) -> Vec<f64> {
    x.iter().map(|&x| f64::from(x)).collect()
}

/// Largest difference, relative to the larger of 1 and the value.
pub(crate) fn distance(x: &[f64], y: &[f64]) -> f64 {
    assert_eq!(x.len(), y.len());
    x.iter()
        .zip(y)
        .map(|(x, y)| (x - y).abs() / y.abs().max(1.0))
        .fold(0.0, |worst, d| if d.is_nan() { d } else { f64::max(worst, d) })
}

pub(crate) fn assert_close(x: &[f64], y: &[f64], tolerance: f64, what: &str) {
    let d = distance(x, y);
    assert!(d <= tolerance, "{what}: off by {d:.3e}, allowed {tolerance:.1e}");
}

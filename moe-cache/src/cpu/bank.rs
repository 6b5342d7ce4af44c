use core::fmt;

use skep_quant::{Forms, Matrix, Precision, Type};

use super::Activation;
use crate::{ErrorKind, Result};

/// The stacked matrices of all experts of one layer in one role: `[n_experts, rows, cols]` of one type.
#[derive(Clone, Copy)]
pub struct Bank<'a> {
    /// `[n_experts * rows, cols]`.
    all: Matrix<'a>,
    rows: usize,
    n_experts: usize,
}

/// The expert weights of one layer.
#[derive(Clone, Copy, Debug)]
pub struct Experts<'a> {
    /// `[n_experts, ff, hidden]`, or with `up` in one bank `[n_experts, 2 * ff, hidden]`, gate rows first.
    gate: Bank<'a>,
    up: Option<Bank<'a>>,
    /// `[n_experts, hidden, ff]`.
    down: Bank<'a>,
    activation: Activation,
}

impl<'a> Bank<'a> {
    /// A bank over `data`, expert after expert, each `[rows, cols]` row-major in the blocks of `ty`.
    ///
    /// # Errors
    /// [`ErrorKind::Geometry`] when there are no experts or too many rows, [`ErrorKind::Weights`] when `cols` is not
    /// whole blocks or `data` has not exactly the bytes of this shape.
    pub fn new(ty: Type, n_experts: usize, rows: usize, cols: usize, data: &'a [u8]) -> Result<Self> {
        if n_experts == 0 || n_experts > u32::MAX as usize || rows == 0 || cols == 0 {
            return Err(
                ErrorKind::Geometry { what: "experts, rows and columns of a bank must not be zero" }.into()
            );
        }
        let Some(all_rows) = n_experts.checked_mul(rows) else {
            return Err(ErrorKind::Geometry { what: "a bank has too many rows" }.into());
        };
        match Matrix::new(ty, all_rows, cols, data) {
            Ok(all) => Ok(Self { all, rows, n_experts }),
            Err(source) => Err(ErrorKind::Weights { n_experts, rows, cols, source }.into()),
        }
    }

    /// The matrix `[rows, cols]` of one expert.
    ///
    /// # Panics
    /// When there is no such expert.
    pub fn expert(&self, expert: usize) -> Matrix<'a> {
        assert!(expert < self.n_experts, "expert {expert} of a bank of {}", self.n_experts);
        self.all.rows_range(expert * self.rows..(expert + 1) * self.rows)
    }

    /// Experts.
    pub fn n_experts(&self) -> usize {
        self.n_experts
    }

    /// Rows of each expert.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Columns of each expert.
    pub fn cols(&self) -> usize {
        self.all.cols()
    }

    /// Type of the weights.
    pub fn ty(&self) -> Type {
        self.all.ty()
    }
}

impl<'a> Experts<'a> {
    /// From separate banks: `gate` and `up` `[n_experts, ff, hidden]`, `down` `[n_experts, hidden, ff]`. Types may
    /// differ.
    ///
    /// # Errors
    /// [`ErrorKind::Geometry`] when the shapes do not fit together.
    pub fn new(gate: Bank<'a>, up: Bank<'a>, down: Bank<'a>, activation: Activation) -> Result<Self> {
        if (gate.n_experts, gate.rows, gate.cols()) != (up.n_experts, up.rows, up.cols()) {
            return Err(ErrorKind::Geometry { what: "gate and up banks have different shapes" }.into());
        }
        Self { gate, up: Some(up), down, activation }.checked()
    }

    /// From a fused bank `gate_up` `[n_experts, 2 * ff, hidden]`, of each expert the gate rows first, and `down`
    /// `[n_experts, hidden, ff]`.
    ///
    /// # Errors
    /// [`ErrorKind::Geometry`] when the shapes do not fit together.
    pub fn fused(gate_up: Bank<'a>, down: Bank<'a>, activation: Activation) -> Result<Self> {
        if !gate_up.rows.is_multiple_of(2) {
            return Err(
                ErrorKind::Geometry { what: "a fused gate and up bank has an odd number of rows" }.into()
            );
        }
        Self { gate: gate_up, up: None, down, activation }.checked()
    }

    fn checked(self) -> Result<Self> {
        if self.down.n_experts != self.gate.n_experts {
            return Err(ErrorKind::Geometry {
                what: "gate and down banks have different numbers of experts",
            }
            .into());
        }
        if (self.down.rows, self.down.cols()) != (self.gate.cols(), self.ff()) {
            return Err(ErrorKind::Geometry {
                what: "down bank is not the transposed shape of the gate bank",
            }
            .into());
        }
        Ok(self)
    }

    /// Experts.
    pub fn n_experts(&self) -> usize {
        self.gate.n_experts
    }

    /// Width of the model: columns of gate and up, rows of down.
    pub fn hidden(&self) -> usize {
        self.gate.cols()
    }

    /// Hidden units of one expert: rows of gate and up, columns of down.
    pub fn ff(&self) -> usize {
        if self.up.is_some() { self.gate.rows } else { self.gate.rows / 2 }
    }

    /// The activation function of the gate.
    pub fn activation(&self) -> Activation {
        self.activation
    }

    /// The forms of the activations that gate and up read.
    pub fn forms(&self, precision: Precision) -> Forms {
        let gate = Forms::of(self.gate.ty(), precision);
        self.up.map_or(gate, |up| gate | Forms::of(up.ty(), precision))
    }

    /// Gate matrix `[ff, hidden]` of an expert.
    ///
    /// # Panics
    /// When there is no such expert; so do [`up`](Experts::up) and [`down`](Experts::down).
    pub fn gate(&self, expert: usize) -> Matrix<'a> {
        self.gate.expert(expert).rows_range(0..self.ff())
    }

    /// Up matrix `[ff, hidden]` of an expert.
    pub fn up(&self, expert: usize) -> Matrix<'a> {
        match &self.up {
            Some(up) => up.expert(expert),
            None => self.gate.expert(expert).rows_range(self.ff()..self.gate.rows),
        }
    }

    /// Down matrix `[hidden, ff]` of an expert.
    pub fn down(&self, expert: usize) -> Matrix<'a> {
        self.down.expert(expert)
    }

    /// Type of the down weights.
    pub fn down_type(&self) -> Type {
        self.down.ty()
    }
}

impl fmt::Debug for Bank<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Bank([{}, {}, {}] {})", self.n_experts, self.rows, self.cols(), self.ty().name())
    }
}

#[cfg(test)]
mod tests {
    use alloc::string::ToString;
    use alloc::vec;
    use alloc::vec::Vec;

    use super::*;

    fn bank(n_experts: usize, rows: usize, cols: usize, data: &[f32]) -> Bank<'_> {
        let bytes = data.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<_>>().leak();
        Bank::new(Type::F32, n_experts, rows, cols, bytes).unwrap()
    }

    #[test]
    fn shapes_are_checked_with_names() {
        let error = |r: Result<Experts<'_>>| r.unwrap_err().to_string();
        let zeros = vec![0.0; 4096];
        let of = |e, r, c| bank(e, r, c, &zeros[..e * r * c]);
        let silu = Activation::Silu;
        assert!(Experts::new(of(2, 8, 4), of(2, 8, 4), of(2, 4, 8), silu).is_ok());
        assert!(Experts::fused(of(2, 16, 4), of(2, 4, 8), silu).is_ok());
        assert!(error(Experts::new(of(2, 8, 4), of(2, 4, 4), of(2, 4, 8), silu)).contains("gate and up"));
        assert!(
            error(Experts::new(of(2, 8, 4), of(2, 8, 4), of(3, 4, 8), silu)).contains("numbers of experts")
        );
        assert!(error(Experts::new(of(2, 8, 4), of(2, 8, 4), of(2, 8, 4), silu)).contains("transposed"));
        assert!(error(Experts::fused(of(2, 15, 4), of(2, 4, 8), silu)).contains("odd"));
        assert!(error(Experts::fused(of(2, 16, 4), of(2, 4, 16), silu)).contains("transposed"));
        let short = Bank::new(Type::Q4_K, 2, 4, 256, &[0; 100]).unwrap_err();
        assert!(short.to_string().starts_with("expert bank [2, 4, 256]: "), "{short}");
        assert!(Bank::new(Type::Q4_K, 2, 4, 100, &[0; 100]).is_err());
        assert!(Bank::new(Type::F32, 0, 4, 4, &[]).is_err());
        assert!(Bank::new(Type::F32, usize::MAX, 4, 4, &[]).is_err());
        assert!(Bank::new(Type::F32, 1 << 31, 1 << 40, 4, &[]).is_err());
    }

    #[test]
    fn a_fused_bank_holds_gate_rows_before_up_rows() {
        let numbers: Vec<f32> = (0..2 * 4 * 3).map(|i| i as f32).collect();
        let down = [0.0; 2 * 3 * 2];
        let experts =
            Experts::fused(bank(2, 4, 3, &numbers), bank(2, 3, 2, &down), Activation::Silu).unwrap();
        let first = |m: Matrix<'_>| f32::from_le_bytes(m.row(0)[..4].try_into().unwrap());
        assert_eq!((first(experts.gate(0)), first(experts.up(0))), (0.0, 6.0));
        assert_eq!((first(experts.gate(1)), first(experts.up(1))), (12.0, 18.0));
        assert_eq!((experts.up(1).rows(), experts.ff(), experts.hidden()), (2, 2, 3));
    }
}

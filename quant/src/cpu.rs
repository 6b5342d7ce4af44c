//! Instruction sets and the kernels written for them.

#[cfg(target_arch = "x86_64")]
mod gemm;
mod scalar;

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;

use alloc::string::String;
use std::sync::OnceLock;

use crate::activations::{Q8K, Q8x8};
use crate::matmul::{Precision, Tile};
use crate::{Error, ErrorKind, Result};

/// An instruction set the kernels are written for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Isa {
    /// Portable Rust.
    Scalar,
    /// x86-64 with AVX2, FMA and F16C.
    Avx2,
    /// x86-64 with AVX-512 F, BW, DQ, VL and VNNI, besides [`Avx2`](Self::Avx2).
    Avx512,
}

impl Isa {
    /// Every instruction set, best last.
    pub const ALL: &'static [Self] = &[Self::Scalar, Self::Avx2, Self::Avx512];

    /// The name `SKEP_ISA` knows it by.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Scalar => "scalar",
            Self::Avx2 => "avx2",
            Self::Avx512 => "avx512",
        }
    }

    /// Whether this processor has it.
    pub fn is_supported(self) -> bool {
        match self {
            Self::Scalar => true,
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => {
                std::is_x86_feature_detected!("avx2")
                    && std::is_x86_feature_detected!("fma")
                    && std::is_x86_feature_detected!("f16c")
            }
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => {
                Self::Avx2.is_supported()
                    && std::is_x86_feature_detected!("avx512f")
                    && std::is_x86_feature_detected!("avx512bw")
                    && std::is_x86_feature_detected!("avx512dq")
                    && std::is_x86_feature_detected!("avx512vl")
                    && std::is_x86_feature_detected!("avx512vnni")
            }
            #[cfg(not(target_arch = "x86_64"))]
            _ => false,
        }
    }

    /// The instruction set this process uses: the one the environment variable `SKEP_ISA` names, or the best
    /// supported one. Determined on the first call, the same ever after.
    ///
    /// # Errors
    /// [`ErrorKind::UnknownIsa`] or [`ErrorKind::UnsupportedIsa`] when `SKEP_ISA` is set to something unusable.
    /// The products of this crate panic then; a program reports the error by calling this at its start.
    pub fn detect() -> Result<Self> {
        Kernels::detect().map(|kernels| kernels.isa)
    }

    /// The instruction set that `SKEP_ISA` holds this process to, if it does: for crates that have kernels of their own
    /// beside these.
    pub fn forced() -> Option<Self> {
        static FORCED: OnceLock<Option<Isa>> = OnceLock::new();
        *FORCED.get_or_init(|| std::env::var_os("SKEP_ISA").and_then(|_| Self::detect().ok()))
    }

    fn choose(wanted: Option<String>) -> Result<Self> {
        match wanted {
            Some(name) => match Self::ALL.iter().copied().find(|isa| isa.name() == name) {
                Some(isa) if isa.is_supported() => Ok(isa),
                Some(isa) => Err(Error::new(ErrorKind::UnsupportedIsa(isa))),
                None => Err(Error::new(ErrorKind::UnknownIsa(name))),
            },
            None => {
                Ok(Self::ALL.iter().copied().rev().find(|isa| isa.is_supported()).unwrap_or(Self::Scalar))
            }
        }
    }
}

type RmsNorm = fn(&[f32], Option<&[f32]>, f32, &mut [f32]);

/// The kernels of one [`Isa`].
///
/// Products, quantised forms, `dot` and `axpy` have the same bits on every instruction set; the functions with
/// an exponential or a norm agree within a few ulp.
#[derive(Clone, Copy, Debug)]
pub struct Kernels {
    isa: Isa,
    fast: fn(&mut Tile<'_>),
    exact: fn(&mut Tile<'_>),
    quantise_256: fn(&[f32], &mut [Q8K]),
    quantise_32: fn(&[f32], &mut [Q8x8]),
    dot: fn(&[f32], &[f32]) -> f32,
    rms_norm: RmsNorm,
    sigmoid_in_place: fn(&mut [f32]),
    silu_in_place: fn(&mut [f32]),
    silu_mul: fn(&[f32], &[f32], &mut [f32]),
    softmax_in_place: fn(&mut [f32]),
    axpy: fn(f32, &[f32], &mut [f32]),
}

const SCALAR: Kernels = Kernels {
    isa: Isa::Scalar,
    fast: scalar::fast,
    exact: scalar::exact,
    quantise_256: scalar::quantise_256,
    quantise_32: scalar::quantise_32,
    dot: scalar::vec::dot,
    rms_norm: scalar::vec::rms_norm,
    sigmoid_in_place: scalar::vec::sigmoid_in_place,
    silu_in_place: scalar::vec::silu_in_place,
    silu_mul: scalar::vec::silu_mul,
    softmax_in_place: scalar::vec::softmax_in_place,
    axpy: scalar::vec::axpy,
};

/// Wraps a function that needs processor features in a plain function pointer.
#[cfg(target_arch = "x86_64")]
macro_rules! detected {
    ($($path:ident)::+ ($($arg:ident),*)) => {
        // SAFETY: `Kernels::of` gives the pointer out only on a processor with the features.
        |$($arg),*| unsafe { $($path)::+($($arg),*) }
    };
}

#[cfg(target_arch = "x86_64")]
const AVX2: Kernels = Kernels {
    isa: Isa::Avx2,
    fast: detected!(avx2::fast(tile)),
    exact: detected!(avx2::exact(tile)),
    quantise_256: detected!(avx2::quantise_256(x, blocks)),
    quantise_32: detected!(avx2::quantise_32(x, groups)),
    dot: detected!(avx2::vec::dot(a, b)),
    rms_norm: detected!(avx2::vec::rms_norm(x, weight, eps, out)),
    sigmoid_in_place: detected!(avx2::vec::sigmoid_in_place(x)),
    silu_in_place: detected!(avx2::vec::silu_in_place(x)),
    silu_mul: detected!(avx2::vec::silu_mul(gate, up, out)),
    softmax_in_place: detected!(avx2::vec::softmax_in_place(x)),
    axpy: detected!(avx2::vec::axpy(a, x, y)),
};

#[cfg(target_arch = "x86_64")]
const AVX512: Kernels = Kernels {
    isa: Isa::Avx512,
    fast: detected!(avx512::fast(tile)),
    exact: detected!(avx512::exact(tile)),
    ..AVX2
};

impl Kernels {
    /// The kernels for `isa`.
    ///
    /// # Errors
    /// [`ErrorKind::UnsupportedIsa`] when this processor lacks it.
    pub fn of(isa: Isa) -> Result<Self> {
        if !isa.is_supported() {
            return Err(Error::new(ErrorKind::UnsupportedIsa(isa)));
        }
        match isa {
            Isa::Scalar => Ok(SCALAR),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => Ok(AVX2),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => Ok(AVX512),
            #[cfg(not(target_arch = "x86_64"))]
            _ => Err(Error::new(ErrorKind::UnsupportedIsa(isa))),
        }
    }

    /// The kernels this process uses, see [`Isa::detect`].
    ///
    /// # Errors
    /// As [`Isa::detect`].
    pub fn detect() -> Result<&'static Self> {
        static CHOICE: OnceLock<Result<Kernels>> = OnceLock::new();
        let wanted = || std::env::var_os("SKEP_ISA").map(|v| v.to_string_lossy().into_owned());
        CHOICE.get_or_init(|| Isa::choose(wanted()).and_then(Self::of)).as_ref().map_err(Clone::clone)
    }

    /// The kernels this process uses.
    ///
    /// # Panics
    /// When [`detect`](Self::detect) fails.
    pub(crate) fn active() -> &'static Self {
        match Self::detect() {
            Ok(kernels) => kernels,
            Err(error) => panic!("{error}"),
        }
    }

    /// Their instruction set.
    pub const fn isa(&self) -> Isa {
        self.isa
    }

    pub(crate) fn tile(&self, tile: &mut Tile<'_>, precision: Precision) {
        if precision == Precision::Fast && tile.w.ty().is_quantised() {
            (self.fast)(tile);
        } else {
            (self.exact)(tile);
        }
    }

    pub(crate) fn quantise_256(&self, x: &[f32], blocks: &mut [Q8K]) {
        (self.quantise_256)(x, blocks);
    }

    pub(crate) fn quantise_32(&self, x: &[f32], groups: &mut [Q8x8]) {
        (self.quantise_32)(x, groups);
    }

    /// [`vec::dot`](crate::vec::dot) with these kernels.
    ///
    /// # Panics
    /// As the function in [`vec`](crate::vec); so for all methods below.
    pub fn dot(&self, a: &[f32], b: &[f32]) -> f32 {
        assert_eq!(a.len(), b.len(), "lengths of the vectors");
        (self.dot)(a, b)
    }

    /// [`vec::rms_norm`](crate::vec::rms_norm) with these kernels.
    pub fn rms_norm(&self, x: &[f32], weight: Option<&[f32]>, eps: f32, out: &mut [f32]) {
        assert_eq!(x.len(), out.len(), "lengths of the vectors");
        assert!(weight.is_none_or(|w| w.len() == x.len()), "lengths of the vectors");
        (self.rms_norm)(x, weight, eps, out);
    }

    /// [`vec::sigmoid_in_place`](crate::vec::sigmoid_in_place) with these kernels.
    pub fn sigmoid_in_place(&self, x: &mut [f32]) {
        (self.sigmoid_in_place)(x);
    }

    /// [`vec::silu_in_place`](crate::vec::silu_in_place) with these kernels.
    pub fn silu_in_place(&self, x: &mut [f32]) {
        (self.silu_in_place)(x);
    }

    /// [`vec::silu_mul`](crate::vec::silu_mul) with these kernels.
    pub fn silu_mul(&self, gate: &[f32], up: &[f32], out: &mut [f32]) {
        assert!(gate.len() == up.len() && gate.len() == out.len(), "lengths of the vectors");
        (self.silu_mul)(gate, up, out);
    }

    /// [`vec::softmax_in_place`](crate::vec::softmax_in_place) with these kernels.
    pub fn softmax_in_place(&self, x: &mut [f32]) {
        (self.softmax_in_place)(x);
    }

    /// [`vec::axpy`](crate::vec::axpy) with these kernels.
    pub fn axpy(&self, a: f32, x: &[f32], y: &mut [f32]) {
        assert_eq!(x.len(), y.len(), "lengths of the vectors");
        (self.axpy)(a, x, y);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_instruction_set_is_chosen_or_refused_by_name() {
        assert_eq!(Isa::choose(Some("scalar".into())), Ok(Isa::Scalar));
        assert!(Isa::choose(None).is_ok_and(Isa::is_supported));
        let error = Isa::choose(Some("sse9".into())).unwrap_err();
        assert_eq!(error.kind(), &ErrorKind::UnknownIsa("sse9".into()));
        assert!(std::format!("{error}").contains("\"sse9\""));
        for isa in Isa::ALL {
            let chosen = Isa::choose(Some(isa.name().into()));
            let kernels = Kernels::of(*isa).map(|k| k.isa());
            if isa.is_supported() {
                assert_eq!((chosen, kernels), (Ok(*isa), Ok(*isa)));
            } else {
                let error = Error::new(ErrorKind::UnsupportedIsa(*isa));
                assert_eq!((chosen, kernels), (Err(error.clone()), Err(error)));
            }
        }
    }
}

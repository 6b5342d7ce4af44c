//! The float functions that `core` lacks, from `std` or `libm`.

#[cfg(feature = "std")]
mod imp {
    pub(crate) fn ceil(x: f64) -> f64 {
        x.ceil()
    }
    pub(crate) fn floor(x: f64) -> f64 {
        x.floor()
    }
    pub(crate) fn sqrt(x: f64) -> f64 {
        x.sqrt()
    }
    pub(crate) fn exp(x: f64) -> f64 {
        x.exp()
    }
    pub(crate) fn tanh(x: f64) -> f64 {
        x.tanh()
    }
    pub(crate) fn pow(base: f64, exponent: f64) -> f64 {
        base.powf(exponent)
    }
    pub(crate) fn sin_cos(x: f64) -> (f64, f64) {
        x.sin_cos()
    }
}

#[cfg(not(feature = "std"))]
mod imp {
    pub(crate) fn ceil(x: f64) -> f64 {
        libm::ceil(x)
    }
    pub(crate) fn floor(x: f64) -> f64 {
        libm::floor(x)
    }
    pub(crate) fn sqrt(x: f64) -> f64 {
        libm::sqrt(x)
    }
    pub(crate) fn exp(x: f64) -> f64 {
        libm::exp(x)
    }
    pub(crate) fn tanh(x: f64) -> f64 {
        libm::tanh(x)
    }
    pub(crate) fn pow(base: f64, exponent: f64) -> f64 {
        libm::pow(base, exponent)
    }
    pub(crate) fn sin_cos(x: f64) -> (f64, f64) {
        libm::sincos(x)
    }
}

pub(crate) use imp::{ceil, exp, floor, pow, sin_cos, sqrt, tanh};

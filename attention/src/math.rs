//! Float functions that `core` lacks, from `std` or from `libm`.

#[cfg(feature = "std")]
mod imp {
    pub(crate) fn exp(x: f32) -> f32 {
        x.exp()
    }
    pub(crate) fn sqrt(x: f32) -> f32 {
        x.sqrt()
    }
    pub(crate) fn pow64(base: f64, exponent: f64) -> f64 {
        base.powf(exponent)
    }
    pub(crate) fn sin_cos64(x: f64) -> (f64, f64) {
        x.sin_cos()
    }
}

#[cfg(not(feature = "std"))]
mod imp {
    pub(crate) fn exp(x: f32) -> f32 {
        libm::expf(x)
    }
    pub(crate) fn sqrt(x: f32) -> f32 {
        libm::sqrtf(x)
    }
    pub(crate) fn pow64(base: f64, exponent: f64) -> f64 {
        libm::pow(base, exponent)
    }
    pub(crate) fn sin_cos64(x: f64) -> (f64, f64) {
        libm::sincos(x)
    }
}

pub(crate) use imp::*;

/// Logistic function, written so that neither tail overflows.
pub(crate) fn sigmoid(x: f32) -> f32 {
    let z = exp(-x.abs());
    if x < 0.0 { z / (1.0 + z) } else { 1.0 / (1.0 + z) }
}

//! The float functions that `core` lacks, from `std` or `libm`.

#[cfg(feature = "std")]
mod imp {
    pub(crate) fn exp(x: f32) -> f32 {
        x.exp()
    }
    pub(crate) fn ln_1p(x: f32) -> f32 {
        x.ln_1p()
    }
    pub(crate) fn sqrt(x: f32) -> f32 {
        x.sqrt()
    }
}

#[cfg(not(feature = "std"))]
mod imp {
    pub(crate) fn exp(x: f32) -> f32 {
        libm::expf(x)
    }
    pub(crate) fn ln_1p(x: f32) -> f32 {
        libm::log1pf(x)
    }
    pub(crate) fn sqrt(x: f32) -> f32 {
        libm::sqrtf(x)
    }
}

pub(crate) use imp::{exp, ln_1p, sqrt};

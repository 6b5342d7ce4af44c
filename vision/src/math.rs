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
}

pub(crate) use imp::{ceil, floor, sqrt};

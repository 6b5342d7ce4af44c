//! Float functions that `core` lacks, from `std` when it is there, else from `libm`.

#[cfg(feature = "std")]
pub(crate) fn exp(x: f32) -> f32 {
    x.exp()
}

#[cfg(not(feature = "std"))]
pub(crate) fn exp(x: f32) -> f32 {
    libm::expf(x)
}

#[cfg(feature = "std")]
pub(crate) fn powf(x: f64, y: f64) -> f64 {
    x.powf(y)
}

#[cfg(not(feature = "std"))]
pub(crate) fn powf(x: f64, y: f64) -> f64 {
    libm::pow(x, y)
}

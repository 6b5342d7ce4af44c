//! Float functions that `core` lacks, from `std` or `libm`.

#[cfg(feature = "std")]
pub(crate) fn exp(x: f64) -> f64 {
    x.exp()
}

#[cfg(feature = "std")]
pub(crate) fn sqrt(x: f64) -> f64 {
    x.sqrt()
}

#[cfg(all(feature = "libm", not(feature = "std")))]
pub(crate) fn exp(x: f64) -> f64 {
    libm::exp(x)
}

#[cfg(all(feature = "libm", not(feature = "std")))]
pub(crate) fn sqrt(x: f64) -> f64 {
    libm::sqrt(x)
}

/// Rounds to the nearest integer, ties to even; exact for `|x| < 2^22`.
#[inline(always)]
pub(crate) fn round_ties_even(x: f32) -> f32 {
    // At 1.5 * 2^23 the spacing of f32 is 1, so the addition itself rounds.
    const MAGIC: f32 = 12_582_912.0;
    (x + MAGIC) - MAGIC
}

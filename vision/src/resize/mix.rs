//! The weighted sum of bytes that lie side by side, the inner loop of both passes.

/// Bytes that are summed together.
pub(super) const LANES: usize = 48;

/// Fraction bits of a weight: 8 bits of the pixel and 2 of overshoot leave 22 of 32.
pub(super) const FRACTION: u32 = 22;

/// `out[lane] = sum over i of weights[i] * bytes[i * stride + lane]`, rounded and clipped to 8 bits.
pub(super) type Mix = fn(weights: &[i32], bytes: &[u8], stride: usize, out: &mut [u8; LANES]);

/// The fastest form that this machine has. All give the same result.
pub(super) fn detect() -> Mix {
    #[cfg(all(feature = "std", target_arch = "x86_64"))]
    if std::is_x86_feature_detected!("avx2") {
        // SAFETY: the processor has AVX2.
        return |weights, bytes, stride, out| unsafe { avx2(weights, bytes, stride, out) };
    }
    scalar
}

/// The loop compiled for 256-bit integers; the baseline of x86-64 has no product of 32-bit lanes.
#[cfg(all(feature = "std", target_arch = "x86_64"))]
#[target_feature(enable = "avx2")]
fn avx2(weights: &[i32], bytes: &[u8], stride: usize, out: &mut [u8; LANES]) {
    scalar(weights, bytes, stride, out);
}

#[inline(always)]
pub(super) fn scalar(weights: &[i32], bytes: &[u8], stride: usize, out: &mut [u8; LANES]) {
    let mut sums = [1_i32 << (FRACTION - 1); LANES];
    for (weight, row) in weights.iter().zip(bytes.chunks(stride)) {
        for (sum, value) in sums.iter_mut().zip(&row[..LANES]) {
            *sum += weight * i32::from(*value);
        }
    }
    for (value, sum) in out.iter_mut().zip(sums) {
        *value = clip(sum);
    }
}

pub(super) fn clip(sum: i32) -> u8 {
    (sum >> FRACTION).clamp(0, 255) as u8
}

#[cfg(test)]
mod tests {
    use alloc::vec::Vec;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn every_form_is_the_definition(
            weights in prop::collection::vec(-(1 << 17)..1_i32 << 18, 0..30), seed in any::<u32>(), extra in 0_usize..70,
        ) {
            let stride = LANES + extra;
            let noise = |at: usize| (at as u32 ^ seed).wrapping_mul(0x9E37_79B9) >> 24;
            let bytes: Vec<u8> = (0..weights.len() * stride).map(|at| noise(at) as u8).collect();
            let expected: Vec<u8> = (0..LANES).map(|lane| {
                let sum: i64 = (0..).zip(&weights).map(|(i, w)| i64::from(*w) * i64::from(bytes[i * stride + lane])).sum();
                ((sum + (1 << 21)) >> 22).clamp(0, 255) as u8
            }).collect();
            let mut out = [1; LANES];
            scalar(&weights, &bytes, stride, &mut out);
            prop_assert_eq!(&out[..], &expected);
            #[cfg(all(feature = "std", target_arch = "x86_64"))]
            if std::is_x86_feature_detected!("avx2") {
                let mut out = [1; LANES];
                // SAFETY: the processor has AVX2.
                unsafe { avx2(&weights, &bytes, stride, &mut out) };
                prop_assert_eq!(&out[..], &expected);
            }
        }
    }
}

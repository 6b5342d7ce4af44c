//! Random weights, made directly as quantised blocks: no float rows are quantised, so gigabytes take seconds.

use crate::random::Random;
use skep_quant::Type;

/// Fills `bytes` with blocks of `ty` whose values have about the standard deviation `std` and mean zero.
///
/// Types other than those a synthetic model uses are a programmer's error.
pub(crate) fn fill(ty: Type, std: f32, random: &mut Random, bytes: &mut [u8]) {
    match ty {
        Type::F32 => {
            for value in bytes.chunks_exact_mut(4) {
                value.copy_from_slice(&(random.signed() * 3.0_f32.sqrt() * std).to_le_bytes());
            }
        }
        Type::BF16 => {
            for value in bytes.chunks_exact_mut(2) {
                let number = half::bf16::from_f32(random.signed() * 3.0_f32.sqrt() * std);
                value.copy_from_slice(&number.to_le_bytes());
            }
        }
        Type::Q5_0 => {
            // Value = d * (q - 16) with q in 0..32, uniform.
            let d = f16(std / Q5_0_STD);
            random.fill(bytes);
            bytes.chunks_exact_mut(22).for_each(|block| block[..2].copy_from_slice(&d));
        }
        Type::Q8_0 => {
            // Value = d * q with q in -128..128, uniform.
            let d = f16(std / Q8_0_STD);
            random.fill(bytes);
            bytes.chunks_exact_mut(34).for_each(|block| block[..2].copy_from_slice(&d));
        }
        Type::Q4_K => {
            // Value = d * sc * q - dmin * m with sc, m in 0..64 and q in 0..16, all uniform: centred by dmin = 7.5 d.
            let (d, dmin) = (f16(std / Q4_K_STD), f16(7.5 * std / Q4_K_STD));
            random.fill(bytes);
            for block in bytes.chunks_exact_mut(144) {
                block[..2].copy_from_slice(&d);
                block[2..4].copy_from_slice(&dmin);
            }
        }
        Type::Q6_K => {
            // Value = d * sc * (q - 32) with sc in -128..128 and q in 0..64, all uniform.
            let d = f16(std / Q6_K_STD);
            random.fill(bytes);
            for block in bytes.chunks_exact_mut(210) {
                block[208..].copy_from_slice(&d);
            }
        }
        other => unreachable!("no synthetic weights of type {}", other.name()),
    }
}

/// Zeroes rows of `bytes`, each of `row_bytes`: every supported type decodes all-zero blocks to zeros.
pub(crate) fn zero_row(bytes: &mut [u8], row_bytes: usize, row: usize) {
    bytes[row * row_bytes..(row + 1) * row_bytes].fill(0);
}

/// Makes the first value of a row about `value`, leaving the others of its block a little off their distribution.
///
/// Types other than those of a synthetic embedding are a programmer's error.
pub(crate) fn set_first(ty: Type, row: &mut [u8], value: f32) {
    match ty {
        Type::Q4_K => {
            const SCALE: u8 = 63;
            let d = half::f16::from_le_bytes([row[0], row[1]]).to_f32();
            // The first group's scale and minimum are the low six bits of bytes 4 and 8: full scale, no minimum.
            row[4] = (row[4] & 0xc0) | SCALE;
            row[8] &= 0xc0;
            // The largest value that this block's d reaches, or the nearest quant below.
            let quant = (value / (d * f32::from(SCALE))).round().clamp(0.0, 15.0) as u8;
            row[16] = (row[16] & 0xf0) | quant;
        }
        Type::Q6_K => {
            const SCALE: i8 = i8::MAX;
            let d = half::f16::from_le_bytes([row[208], row[209]]).to_f32();
            // Values are d * scale * (quant - 32); four bits of the quant are in byte 0, two in byte 128.
            row[192] = SCALE as u8;
            let quant = ((value / (d * f32::from(SCALE))).round() + 32.0).clamp(32.0, 63.0) as u8;
            row[0] = (row[0] & 0xf0) | (quant & 0x0f);
            row[128] = (row[128] & 0xfc) | (quant >> 4);
        }
        other => unreachable!("no synthetic embedding of type {}", other.name()),
    }
}

/// Standard deviation of Q4_K values with d = 1, dmin = 7.5 and uniform bits.
const Q4_K_STD: f32 = 257.0;
/// Standard deviation of Q5_0 values with d = 1 and uniform bits.
const Q5_0_STD: f32 = 9.233;
/// Standard deviation of Q8_0 values with d = 1 and uniform bits.
const Q8_0_STD: f32 = 73.9;
/// Standard deviation of Q6_K values with d = 1 and uniform bits.
const Q6_K_STD: f32 = 1365.0;

fn f16(value: f32) -> [u8; 2] {
    half::f16::from_f32(value).to_le_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_have_the_deviation_asked_for() {
        for ty in [Type::F32, Type::BF16, Type::Q5_0, Type::Q8_0, Type::Q4_K, Type::Q6_K] {
            let cols = 256 * 256;
            let mut bytes = vec![0; ty.row_bytes(cols).unwrap()];
            fill(ty, 0.02, &mut Random::new(7), &mut bytes);
            let mut values = vec![0.0; cols];
            skep_quant::decode(ty, &bytes, &mut values).unwrap();
            let mean = values.iter().sum::<f32>() / cols as f32;
            let std = (values.iter().map(|v| (v - mean).powi(2)).sum::<f32>() / cols as f32).sqrt();
            assert!((0.019..0.021).contains(&std), "{}: deviation {std}", ty.name());
            // The integers of 32-blocks reach one step further down than up.
            assert!(mean.abs() < 0.0013, "{}: mean {mean}", ty.name());
        }
    }

    #[test]
    fn the_first_value_is_set_and_no_other() {
        for (ty, std, value) in [(Type::Q4_K, 0.25, 0.5), (Type::Q6_K, 0.02, 0.02), (Type::Q6_K, 0.02, 0.05)]
        {
            let mut row = vec![0; ty.row_bytes(256).unwrap()];
            fill(ty, std, &mut Random::new(3), &mut row);
            let decoded = |row: &[u8]| {
                let mut values = vec![0.0; 256];
                skep_quant::decode(ty, row, &mut values).unwrap();
                values
            };
            let before = decoded(&row);
            set_first(ty, &mut row, value);
            let after = decoded(&row);
            assert!((after[0] / value - 1.0).abs() < 0.15, "{}: {} instead of {value}", ty.name(), after[0]);
            let changed = before.iter().zip(&after).filter(|(a, b)| a != b).count();
            assert!(changed <= 32, "{changed} values changed");
        }
    }

    #[test]
    fn a_seed_gives_the_same_bytes() {
        let make = |seed| {
            let mut bytes = vec![0; 144 * 9];
            fill(Type::Q4_K, 0.02, &mut Random::new(seed), &mut bytes);
            bytes
        };
        assert_eq!(make(1), make(1));
        assert_ne!(make(1), make(2));
    }
}

//! What an architecture can do.

use core::fmt;

/// An architecture; the vendor is the variant, so that one vendor's numbers are never read as another's.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Arch {
    /// Compute capability times ten: 90 is `sm_90`.
    Nvidia(u32),
    /// The processor's name without features: `gfx1151`.
    Amd(String),
    /// The emulated device.
    Emulated,
}

impl fmt::Display for Arch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Nvidia(sm) => write!(f, "sm_{sm}"),
            Self::Amd(name) => f.write_str(name),
            Self::Emulated => f.write_str("emulated"),
        }
    }
}

/// How four products of bytes are summed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Dot4 {
    /// One instruction: `dp4a`, `v_dot4_i32_i8`, `v_dot4_i32_iu8`.
    Native,
    /// Shifts and multiply-adds.
    Scalar,
}

/// The form of matrix instructions for f16 with sums in f32.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Matrix {
    /// None that kernels use.
    None,
    /// `mma.sync`, from sm_75.
    Mma,
    /// WMMA with operands repeated in both halves of a wave: gfx11.
    Wmma11,
    /// WMMA with operands split over both halves of a wave: gfx12.
    Wmma12,
}

/// What a device can do.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct Caps {
    /// Its architecture.
    pub arch: Arch,
    /// Lanes of a wave (warp): 32 or 64.
    pub wave: u32,
    /// Byte products.
    pub dot4: Dot4,
    /// Whether pairs of f16 are multiplied and summed in f32 by one instruction.
    pub f16_dot: bool,
    /// Whether pairs of bf16 are; never on AMD before gfx11.
    pub bf16_dot: bool,
    /// Matrix instructions.
    pub matrix: Matrix,
    /// Shared memory that a block may have, in bytes.
    pub shared_bytes: usize,
    /// Multiprocessors or compute units; 1 until a driver says more.
    pub units: u32,
    /// Whether the device shares the host's memory.
    pub integrated: bool,
}

impl Caps {
    /// The row of an NVIDIA architecture, `None` below sm_75.
    pub fn nvidia(sm: u32) -> Option<Self> {
        (sm >= 75).then_some(Self {
            arch: Arch::Nvidia(sm),
            wave: 32,
            dot4: Dot4::Native,
            f16_dot: true,
            bf16_dot: sm >= 80,
            matrix: Matrix::Mma,
            shared_bytes: 48 << 10,
            units: 1,
            integrated: false,
        })
    }

    /// The row of an AMD processor, by its name with or without features (`gfx90a:sramecc+:xnack-`); `None` if it is not in
    /// the table.
    pub fn amd(name: &str) -> Option<Self> {
        let name = name.split(':').next().unwrap_or_default();
        // name, wave, dot4, f16 dot, bf16 dot, matrix, shared KiB
        const NATIVE: Dot4 = Dot4::Native;
        let (wave, dot4, f16_dot, bf16_dot, matrix, shared) = match name {
            "gfx900" | "gfx902" | "gfx904" => (64, Dot4::Scalar, false, false, Matrix::None, 64),
            "gfx906" | "gfx908" | "gfx90a" | "gfx940" | "gfx941" | "gfx942" => {
                (64, NATIVE, true, false, Matrix::None, 64)
            }
            "gfx950" => (64, NATIVE, true, true, Matrix::None, 160),
            "gfx1010" | "gfx1013" => (32, Dot4::Scalar, false, false, Matrix::None, 64),
            "gfx1011" | "gfx1012" | "gfx1030" | "gfx1031" | "gfx1032" | "gfx1033" | "gfx1034" | "gfx1035"
            | "gfx1036" => (32, NATIVE, true, false, Matrix::None, 64),
            "gfx1100" | "gfx1101" | "gfx1102" | "gfx1103" | "gfx1150" | "gfx1151" | "gfx1152" | "gfx1153" => {
                (32, NATIVE, true, true, Matrix::Wmma11, 64)
            }
            "gfx1200" | "gfx1201" => (32, NATIVE, true, true, Matrix::Wmma12, 64),
            "gfx1250" => (32, NATIVE, false, false, Matrix::None, 320),
            _ => return None,
        };
        Some(Self {
            arch: Arch::Amd(name.to_owned()),
            wave,
            dot4,
            f16_dot,
            bf16_dot,
            matrix,
            shared_bytes: shared << 10,
            units: 1,
            integrated: false,
        })
    }

    /// The emulated device with waves of 32 or 64 lanes.
    pub(crate) fn emulated(wave: u32) -> Self {
        Self {
            arch: Arch::Emulated,
            wave,
            dot4: Dot4::Scalar,
            f16_dot: false,
            bf16_dot: false,
            matrix: Matrix::None,
            shared_bytes: 64 << 10,
            units: 1,
            integrated: false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_carry_features_and_nothing_is_guessed() {
        assert_eq!(Caps::amd("gfx90a:sramecc+:xnack-").unwrap().arch, Arch::Amd("gfx90a".to_owned()));
        for unknown in ["", "gfx", "gfx9999", "gfx115", "11.5", ":gfx1151"] {
            assert_eq!(Caps::amd(unknown), None, "{unknown}");
        }
        assert_eq!(Caps::nvidia(70), None);
    }

    #[test]
    fn bf16_dots_start_at_gfx11() {
        for name in ["gfx906", "gfx90a", "gfx1010", "gfx1011", "gfx1030", "gfx1036"] {
            assert!(!Caps::amd(name).unwrap().bf16_dot, "{name}");
        }
        for name in ["gfx1100", "gfx1151", "gfx1201"] {
            assert!(Caps::amd(name).unwrap().bf16_dot, "{name}");
        }
        assert!(!Caps::nvidia(75).unwrap().bf16_dot && Caps::nvidia(80).unwrap().bf16_dot);
    }

    #[test]
    fn waves_are_wide_before_rdna_only() {
        for (name, wave) in [("gfx900", 64), ("gfx942", 64), ("gfx1010", 32), ("gfx1201", 32)] {
            assert_eq!(Caps::amd(name).unwrap().wave, wave, "{name}");
        }
    }
}

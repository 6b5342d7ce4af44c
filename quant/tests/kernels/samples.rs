//! Weights and activations for tests: seeded, of every kind that has caused trouble.

use skep_quant::Type;

/// A small generator (xorshift64*), the same numbers on every machine.
pub(crate) struct Random(u64);

impl Random {
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    pub(crate) fn bits(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    /// Uniform in -1..1.
    pub(crate) fn unit(&mut self) -> f32 {
        (self.bits() >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    }

    /// Roughly normal.
    pub(crate) fn normal(&mut self) -> f32 {
        (0..6).map(|_| self.unit()).sum::<f32>() / 1.414
    }
}

/// Random blocks with scales of ordinary size: any codes, any sub-scales.
pub(crate) fn weights(ty: Type, rows: usize, cols: usize, random: &mut Random) -> Vec<u8> {
    let mut bytes: Vec<u8> = Vec::new();
    let half = |x: f32| half::f16::from_f32(x).to_le_bytes();
    while bytes.len() < rows * ty.row_bytes(cols).unwrap() {
        let at = bytes.len();
        match ty {
            Type::F32 => bytes.extend(random.normal().to_le_bytes()),
            Type::F16 => bytes.extend(half(random.normal())),
            Type::BF16 => bytes.extend(half::bf16::from_f32(random.normal()).to_le_bytes()),
            _ => {
                bytes.extend((0..ty.block_bytes()).map(|_| (random.bits() >> 32) as u8));
                let d = half(random.unit() * 0.01);
                let m = half(random.unit() * 0.01);
                match ty {
                    Type::Q6_K => bytes[at + 208..][..2].copy_from_slice(&d),
                    Type::Q4_0 | Type::Q5_0 | Type::Q8_0 => bytes[at..][..2].copy_from_slice(&d),
                    _ => {
                        bytes[at..][..2].copy_from_slice(&d);
                        bytes[at + 2..][..2].copy_from_slice(&m);
                    }
                }
            }
        }
    }
    bytes
}

/// Kinds of activation rows.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Kind {
    Normal,
    /// A few values a thousand times larger than the rest.
    HeavyTailed,
    AllEqual,
    Zero,
    /// +3e4, -3e4, ...
    Alternating,
    /// Runs of 32 times 2048: their sum does not fit a half.
    Large,
}

pub(crate) const KINDS: [Kind; 6] =
    [Kind::Normal, Kind::HeavyTailed, Kind::AllEqual, Kind::Zero, Kind::Alternating, Kind::Large];

pub(crate) fn activations(kind: Kind, len: usize, random: &mut Random) -> Vec<f32> {
    (0..len)
        .map(|i| match kind {
            Kind::Normal => random.normal(),
            Kind::HeavyTailed => {
                let x = random.normal();
                if random.bits() >> 58 == 0 { x * 1e3 } else { x }
            }
            Kind::AllEqual => 0.731,
            Kind::Zero => 0.0,
            Kind::Alternating => 3e4 * (1 - 2 * (i as i32 % 2)) as f32,
            Kind::Large => 2048.0,
        })
        .collect()
}

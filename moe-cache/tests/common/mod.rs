//! Seeded weights in GGUF blocks, activations, and threads for the tests of the CPU experts.

use skep_quant::Type;

/// SplitMix64.
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// In −1 … 1.
    pub(crate) fn unit(&mut self) -> f32 {
        (self.next() >> 40) as f32 / (1 << 23) as f32 - 1.0
    }

    pub(crate) fn floats(&mut self, len: usize) -> Vec<f32> {
        (0..len).map(|_| self.unit()).collect()
    }
}

/// Random codes with scales that give weights of magnitude 0.1 or so.
pub(crate) fn weights(ty: Type, len: usize, random: &mut Random) -> Vec<u8> {
    if ty.block_len() == 1 {
        let values = random.floats(len).into_iter().map(|x| x * 0.1);
        return match ty {
            Type::F32 => values.flat_map(f32::to_le_bytes).collect(),
            Type::BF16 => values.flat_map(|x| ((x.to_bits() >> 16) as u16).to_le_bytes()).collect(),
            _ => panic!("no test weights of type {}", ty.name()),
        };
    }
    // Half floats, 2^-7 or so for the K types, whose scales have scales, 2^-9 for the others.
    let (scale, small): (u16, u16) = (0x1c00, 0x0c00);
    let mut data = Vec::new();
    for _ in 0..len / ty.block_len() {
        let start = data.len();
        data.extend((0..ty.block_bytes()).map(|_| random.next() as u8));
        let block = &mut data[start..];
        let mut put = |at: usize, half: u16| block[at..at + 2].copy_from_slice(&half.to_le_bytes());
        match ty {
            Type::Q4_K | Type::Q5_K => {
                [(0, small), (2, small)].into_iter().for_each(|(at, half)| put(at, half))
            }
            Type::Q6_K => put(208, small),
            Type::Q4_1 | Type::Q5_1 => {
                [(0, scale), (2, scale | 0x8000)].into_iter().for_each(|(at, h)| put(at, h))
            }
            _ => put(0, scale),
        }
    }
    data
}

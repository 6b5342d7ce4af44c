//! Decoding against golden blocks; `data/make.py` says how they were made.

use skep_quant::{ErrorKind, Type, decode};

macro_rules! golden {
    ($($ty:ident $name:literal)*) => {
        [$((
            Type::$ty,
            include_bytes!(concat!("data/", $name, ".blocks")).as_slice(),
            include_bytes!(concat!("data/", $name, ".f32")).as_slice(),
        )),*]
    };
}

const GOLDEN: [(Type, &[u8], &[u8]); 10] = golden! {
    F16 "f16" BF16 "bf16" Q4_0 "q4_0" Q4_1 "q4_1" Q5_0 "q5_0" Q5_1 "q5_1" Q8_0 "q8_0"
    Q4_K "q4_k" Q5_K "q5_k" Q6_K "q6_k"
};

#[test]
fn decoding_has_the_bits_of_the_gguf_package() {
    for (ty, blocks, expected) in GOLDEN {
        let expected: Vec<f32> = expected.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect();
        assert!(expected.iter().any(|x| x.is_nan()) && expected.iter().any(|x| x.is_finite() && *x != 0.0));
        let mut out = vec![0.0; expected.len()];
        decode(ty, blocks, &mut out).unwrap();
        for (i, (a, b)) in out.iter().zip(&expected).enumerate() {
            let same = a.to_bits() == b.to_bits() || (a.is_nan() && b.is_nan());
            assert!(same, "{ty} block {} element {i}: {a:e} for {b:e}", i / ty.block_len());
        }
        // Part of a tensor decodes alone, at any address.
        let (len, bytes) = (ty.block_len(), ty.block_bytes());
        let mut shifted = vec![0; bytes + 1];
        shifted[1..].copy_from_slice(&blocks[3 * bytes..4 * bytes]);
        let mut one = vec![0.0; len];
        decode(ty, &shifted[1..], &mut one).unwrap();
        let bits = |x: &[f32]| x.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
        assert_eq!(bits(&one), bits(&out[3 * len..4 * len]), "{ty}");
    }
}

#[test]
fn f32_is_copied() {
    let mut out = [0.0; 2];
    decode(Type::F32, &[0, 0, 0x80, 0x3f, 1, 0, 0, 0], &mut out).unwrap();
    assert_eq!(out, [1.0, f32::from_bits(1)]);
}

#[test]
fn wrong_lengths_are_refused() {
    for ty in Type::ALL {
        let len = ty.block_len();
        let bytes = vec![0; 2 * ty.block_bytes() + 1];
        for got in [0, ty.block_bytes() - 1, 2 * ty.block_bytes() - 1, 2 * ty.block_bytes() + 1] {
            let error = decode(ty, &bytes[..got], &mut vec![0.0; 2 * len]).unwrap_err();
            assert_eq!(error.kind(), &ErrorKind::DataLength { ty, expected: 2 * ty.block_bytes(), got });
        }
        if len > 1 {
            let error = decode(ty, &bytes, &mut vec![0.0; 2 * len - 1]).unwrap_err();
            assert_eq!(error.kind(), &ErrorKind::PartialBlock { ty, cols: 2 * len - 1 });
        }
    }
}

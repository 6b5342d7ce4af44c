"""Makes the golden blocks in this folder: `<type>.blocks` as stored in GGUF files, `<type>.f32` as decoded by
the dequantiser of ggml's Python package `gguf` (little-endian floats).

    pip install gguf numpy && python make.py
"""

from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType as T
from gguf.constants import GGML_QUANT_SIZES
from gguf.quants import dequantize

HERE = Path(__file__).parent
# Where the half-precision scales of a block lie.
SCALES = {
    T.Q4_0: [0], T.Q4_1: [0, 2], T.Q5_0: [0], T.Q5_1: [0, 2], T.Q8_0: [0],
    T.Q4_K: [0, 2], T.Q5_K: [0, 2], T.Q6_K: [208],
}
# Zero, smallest and largest subnormal, smallest normal, one, largest, infinities, NaNs, negatives.
HALVES = [0x0000, 0x0001, 0x03FF, 0x0400, 0x3C00, 0x7BFF, 0x7C00, 0x7E00, 0xFC00, 0xFFFF, 0x8000, 0x8001, 0xBC01, 0xFBFF]

rng = np.random.default_rng(20260901)
for ty, offsets in SCALES.items():
    size = GGML_QUANT_SIZES[ty][1]
    blocks = [np.zeros(size, np.uint8), np.full(size, 255, np.uint8)]
    for i, half in enumerate(HALVES):
        block = rng.integers(0, 256, size, dtype=np.uint8)
        for k, at in enumerate(offsets):
            # The second scale (the minimum) takes another value, so that a swap of the two shows.
            block[at:at + 2] = np.array([HALVES[(i + 5 * k) % len(HALVES)]], "<u2").view(np.uint8)
        blocks.append(block)
    for i in range(8):
        block = rng.integers(0, 256, size, dtype=np.uint8)
        for at in offsets:
            block[at:at + 2] = np.array([rng.normal() * 0.01], "<f2").view(np.uint8)
        blocks.append(block)
    blocks = np.concatenate(blocks)
    with np.errstate(all="ignore"):
        floats = dequantize(blocks, ty)
    (HERE / f"{ty.name.lower()}.blocks").write_bytes(blocks.tobytes())
    (HERE / f"{ty.name.lower()}.f32").write_bytes(floats.astype("<f4").tobytes())

for ty in (T.F16, T.BF16):
    bits = np.concatenate([np.array(HALVES, "<u2"), rng.integers(0, 65536, 242, dtype=np.uint16)])
    blocks = bits.view(np.uint8)
    floats = bits.view("<f2").astype("<f4") if ty == T.F16 else dequantize(blocks, ty)
    (HERE / f"{ty.name.lower()}.blocks").write_bytes(blocks.tobytes())
    (HERE / f"{ty.name.lower()}.f32").write_bytes(floats.astype("<f4").tobytes())

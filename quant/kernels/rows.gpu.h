// Rows of activations in the forms that products take.

// A row of numbers in three forms; null pointers are forms that nobody asked for.
struct QuantOut {
    // As they are.
    float *x;
    // Codes of 8 bits and, for every 32 of them, their scale and scale times sum.
    i8 *q;
    f32x2 *s;
    // f16 after a division by the row's `scale`, a power of two that keeps every number in range.
    u16 *h;
    float *scale;
};

// Writes the number v at `at`; 32 neighbouring lanes hold a unit. All lanes of a wave come here, those that are not `there`
// for company.
DEVICE void quant_write_unit(const QuantOut &out, u64 at, float v, bool there) {
    if (out.q) {
        // A maximum drops NaN, so that numbers that are not finite are looked for by themselves.
        const float odd = group_max<32>(abs_(v) <= 3.4028235e38f ? 0.0f : 1.0f);
        const float most = group_max<32>(abs_(v));
        const float inverse = 127.0f / most;
        // A scale that overflows belongs to numbers too small to count.
        const bool zero = !(abs_(inverse) <= 3.4028235e38f);
        const i32 code = odd > 0.0f || zero ? 0 : (i32)round_(v * inverse);
        const float d = odd > 0.0f ? from_bits(0x7fc00000u) : zero ? 0.0f : most / 127.0f;
        const i32 sum = group_sum<32>(code);
        if (there) {
            out.q[at] = (i8)code;
            if (lane() % 32 == 0) out.s[at / 32] = f32x2{d, d * (float)sum};
        }
    }
    if (there && out.x) out.x[at] = v;
}

// The power of two that numbers up to `most` are divided by to lie below 2^15 and not far below it.
DEVICE float quant_half_scale(float most) {
    const u32 exponent = bits(most) >> 23;
    return most > 0.0f ? from_bits((exponent > 15 ? exponent - 14 : 1) << 23) : 1.0f;
}

// Writes a row of `cols` numbers that the threads of the block hold: thread t has numbers t, t + THREADS, ...
template <u32 MOST, u32 THREADS>
DEVICE void quant_write_row(const QuantOut &out, u64 index, u32 cols, const float *held, float *scratch) {
    const u64 start = index * cols;
    float most = 0.0f;
    UNROLL for (u32 k = 0; k < MOST; k++)
        if (k * THREADS < cols) {
            const u32 i = k * THREADS + thread_index();
            quant_write_unit(out, start + i, i < cols ? held[k] : 0.0f, i < cols);
            if (i < cols) most = max_(most, abs_(held[k]));
        }
    if (!out.h) return;
    const float by = quant_half_scale(block_max<THREADS>(most, scratch));
    const float inverse = 1.0f / by;
    UNROLL for (u32 k = 0; k < MOST; k++) {
        const u32 i = k * THREADS + thread_index();
        if (i < cols) out.h[start + i] = f2h(held[k] * inverse);
    }
    if (thread_index() == 0) out.scale[index] = by;
}

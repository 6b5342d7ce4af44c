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

// How 32 numbers become codes, from the largest of their magnitudes.
struct QuantSteps {
    float d, inverse;
};
DEVICE QuantSteps quant_steps(float most) {
    // What is not finite makes the whole unit NaN; a scale that overflows belongs to numbers too small to count.
    if (!(most <= 3.4028235e38f)) return QuantSteps{from_bits(0x7fc00000u), 0.0f};
    const float inverse = 127.0f / most;
    return inverse <= 3.4028235e38f ? QuantSteps{most / 127.0f, inverse} : QuantSteps{0.0f, 0.0f};
}
// A maximum drops NaN: infinity stands for it.
DEVICE float quant_magnitude(float v) { return abs_(v) <= 3.4028235e38f ? abs_(v) : from_bits(0x7f800000u); }
DEVICE i32 quant_code(float v, QuantSteps steps) { return steps.inverse > 0.0f ? (i32)round_(v * steps.inverse) : 0; }

// Writes the number v at `at`; 32 neighbouring lanes hold a unit. All lanes of a wave come here, those that are not `there`
// for company.
DEVICE void quant_write_unit(const QuantOut &out, u64 at, float v, bool there) {
    if (out.q) {
        const QuantSteps steps = quant_steps(group_max<32>(quant_magnitude(v)));
        const i32 code = quant_code(v, steps);
        const i32 sum = group_sum<32>(code);
        if (there) {
            out.q[at] = (i8)code;
            if (lane() % 32 == 0) out.s[at / 32] = f32x2{steps.d, steps.d * (float)sum};
        }
    }
    if (there && out.x) out.x[at] = v;
}
// The same for four numbers from `at`; 8 neighbouring lanes hold a unit.
DEVICE void quant_write_four(const QuantOut &out, u64 at, f32x4 v, bool there) {
    if (out.q) {
        const float most = max_(max_(quant_magnitude(v.x), quant_magnitude(v.y)), max_(quant_magnitude(v.z), quant_magnitude(v.w)));
        const QuantSteps steps = quant_steps(group_max<8>(most));
        const i32 x = quant_code(v.x, steps), y = quant_code(v.y, steps), z = quant_code(v.z, steps), w = quant_code(v.w, steps);
        const i32 sum = group_sum<8>(x + y + z + w);
        if (there) {
            *(u32 *)(out.q + at) = (u32)(x & 255) | (u32)(y & 255) << 8 | (u32)(z & 255) << 16 | (u32)w << 24;
            if (lane() % 8 == 0) out.s[at / 32] = f32x2{steps.d, steps.d * (float)sum};
        }
    }
    if (there && out.x) *(f32x4 *)(out.x + at) = v;
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

// The same for threads that hold four numbers beside one another: thread t has numbers 4 t .. 4 t + 3 of every piece of
// 4 THREADS from `first`, a multiple of 4 THREADS. Blocks can share a row only where nobody asks for f16.
template <u32 PIECES, u32 THREADS>
DEVICE void quant_write_pieces(const QuantOut &out, u64 index, u32 first, u32 cols, const f32x4 *held, float *scratch) {
    const u64 start = index * cols;
    float most = 0.0f;
    UNROLL for (u32 k = 0; k < PIECES; k++)
        if (first + 4 * k * THREADS < cols) {
            const u32 i = first + 4 * (k * THREADS + thread_index());
            quant_write_four(out, start + i, i < cols ? held[k] : f32x4{0, 0, 0, 0}, i < cols);
            if (out.h && i < cols) {
                most = max_(most, max_(abs_(held[k].x), abs_(held[k].y)));
                most = max_(most, max_(abs_(held[k].z), abs_(held[k].w)));
            }
        }
    if (!out.h) return;
    const float by = quant_half_scale(block_max<THREADS>(most, scratch));
    const float inverse = 1.0f / by;
    UNROLL for (u32 k = 0; k < PIECES; k++) {
        const u32 i = first + 4 * (k * THREADS + thread_index());
        if (i < cols) {
            *(u32x2 *)(out.h + start + i) = u32x2{f2h2(held[k].x * inverse, held[k].y * inverse),
                                                  f2h2(held[k].z * inverse, held[k].w * inverse)};
        }
    }
    if (thread_index() == 0) out.scale[index] = by;
}

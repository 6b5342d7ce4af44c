// Weights as they lie on the device: rows of units of 32 weights, the parts of all units of a row in planes one after the
// other, every plane and row at a multiple of 16 bytes. A lane loads its unit by one or two wide loads, neighbouring lanes
// from neighbouring addresses, whatever the type. `nb` is the number of units of a row.
//
//   plane      Q4_0  Q4_1  Q5_0  Q5_1  Q8_0  Q4_K  Q5_K  Q6_K   bytes a unit
//   low         16    16    16    16    32    16    16    16    byte i: weight i in the low nibble, i + 16 in the high one;
//                                                               Q8_0: signed codes, weights 0 to 15 of all units, then
//                                                               weights 16 to 31: a load of a wave touches whole lines
//   high                     4     4           0     4     8    5 bits: bit 8 b + j is the fifth bit of weight 4 j + b
//                                                               6 bits: bits 8 b + 2 (j % 4) of word j / 4, of the same
//   scale                                      2     2     2    scale and minimum of the unit; of its two halves in Q6_K
//   super        2     4     2     4     2    4/8   4/8   2/8   f16 d, and m or dmin; one for 8 units in the K types
//
// F32, F16 and BF16 rows are as in a file.

#define QUANT_F32 0
#define QUANT_F16 1
#define QUANT_Q4_0 2
#define QUANT_Q4_1 3
#define QUANT_Q5_0 6
#define QUANT_Q5_1 7
#define QUANT_Q8_0 8
#define QUANT_Q4_K 12
#define QUANT_Q5_K 13
#define QUANT_Q6_K 14
#define QUANT_BF16 30

DEVICE constexpr bool quant_is_float(u32 type) { return type == QUANT_F32 || type == QUANT_F16 || type == QUANT_BF16; }
DEVICE constexpr u32 quant_low_bytes(u32 type) { return type == QUANT_Q8_0 ? 32 : 16; }
DEVICE constexpr u32 quant_high_bytes(u32 type) {
    return type == QUANT_Q5_0 || type == QUANT_Q5_1 || type == QUANT_Q5_K ? 4 : type == QUANT_Q6_K ? 8 : 0;
}
DEVICE constexpr bool quant_is_k(u32 type) { return type == QUANT_Q4_K || type == QUANT_Q5_K || type == QUANT_Q6_K; }
DEVICE constexpr u32 quant_round16(u32 bytes) { return (bytes + 15) & ~15u; }
DEVICE constexpr u32 quant_high_at(u32 type, u32 nb) { return quant_low_bytes(type) * nb; }
DEVICE constexpr u32 quant_scale_at(u32 type, u32 nb) {
    return quant_high_at(type, nb) + quant_round16(quant_high_bytes(type) * nb);
}
DEVICE constexpr u32 quant_super_at(u32 type, u32 nb) {
    return quant_scale_at(type, nb) + (quant_is_k(type) ? quant_round16(2 * nb) : 0);
}
DEVICE constexpr u32 quant_super_bytes(u32 type) {
    return type == QUANT_Q4_1 || type == QUANT_Q5_1 || type == QUANT_Q4_K || type == QUANT_Q5_K ? 4 : 2;
}
// Bytes from one row to the next.
DEVICE constexpr u32 quant_stride(u32 type, u32 cols) {
    return type == QUANT_F32             ? quant_round16(4 * cols)
           : quant_is_float(type)        ? quant_round16(2 * cols)
           : quant_is_k(type)            ? quant_super_at(type, cols / 32) + quant_round16(quant_super_bytes(type) * cols / 256)
                                         : quant_super_at(type, cols / 32) + quant_round16(quant_super_bytes(type) * cols / 32);
}

// What a lane loads of a unit.
template <u32 TYPE> struct QuantRaw {
    u32x4 low, more;
    u32 high0, high1, scale, super;
};

template <u32 TYPE> DEVICE QuantRaw<TYPE> quant_load(const u8 *row, u32 nb, u32 unit) {
    QuantRaw<TYPE> raw;
    raw.low = stream16(row + 16 * unit);
    if (TYPE == QUANT_Q8_0) raw.more = stream16(row + 16 * (nb + unit));
    const u8 *high = row + quant_high_at(TYPE, nb);
    if (quant_high_bytes(TYPE) == 4) raw.high0 = stream4(high + 4 * unit);
    if (quant_high_bytes(TYPE) == 8) {
        const u32x2 two = stream8(high + 8 * unit);
        raw.high0 = two.x;
        raw.high1 = two.y;
    }
    if (quant_is_k(TYPE)) raw.scale = stream2(row + quant_scale_at(TYPE, nb) + 2 * unit);
    const u8 *super = row + quant_super_at(TYPE, nb) + quant_super_bytes(TYPE) * (quant_is_k(TYPE) ? unit / 8 : unit);
    raw.super = quant_super_bytes(TYPE) == 4 ? stream4(super) : stream2(super);
    return raw;
}

// The codes of a unit as 8 words of 4 bytes, weight 4 j + b in byte b of word j, signed in Q8_0 and Q6_K, and the two numbers
// of each half of 16 that turn codes into weights: weight = scale * code + shift.
struct QuantUnit {
    i32 words[8];
    float scale[2], shift[2];
};

template <u32 TYPE> DEVICE QuantUnit quant_unpack(const QuantRaw<TYPE> &raw) {
    QuantUnit unit;
    if (TYPE == QUANT_Q8_0) {
        unit.words[0] = (i32)raw.low.x, unit.words[1] = (i32)raw.low.y;
        unit.words[2] = (i32)raw.low.z, unit.words[3] = (i32)raw.low.w;
        unit.words[4] = (i32)raw.more.x, unit.words[5] = (i32)raw.more.y;
        unit.words[6] = (i32)raw.more.z, unit.words[7] = (i32)raw.more.w;
    } else {
        const u32 low[4] = {raw.low.x, raw.low.y, raw.low.z, raw.low.w};
        UNROLL for (u32 j = 0; j < 4; j++) {
            u32 first = low[j] & 0x0f0f0f0fu, second = (low[j] >> 4) & 0x0f0f0f0fu;
            if (quant_high_bytes(TYPE) == 4) {
                first |= ((raw.high0 >> j) & 0x01010101u) << 4;
                second |= ((raw.high0 >> (j + 4)) & 0x01010101u) << 4;
            }
            if (quant_high_bytes(TYPE) == 8) {
                // 32 less in every byte: the top bit keeps bytes from borrowing.
                first |= ((raw.high0 >> (2 * j) << 4) & 0x30303030u) | 0x80808080u;
                second |= ((raw.high1 >> (2 * j) << 4) & 0x30303030u) | 0x80808080u;
                first = (first - 0x20202020u) ^ 0x80808080u;
                second = (second - 0x20202020u) ^ 0x80808080u;
            }
            unit.words[j] = (i32)first;
            unit.words[j + 4] = (i32)second;
        }
    }
    const float d = h2f((u16)raw.super), m = h2f((u16)(raw.super >> 16));
    if (TYPE == QUANT_Q4_K || TYPE == QUANT_Q5_K) {
        unit.scale[0] = unit.scale[1] = d * (float)(raw.scale & 255);
        unit.shift[0] = unit.shift[1] = -mul_(m, (float)(raw.scale >> 8));
    } else if (TYPE == QUANT_Q6_K) {
        UNROLL for (u32 h = 0; h < 2; h++) {
            unit.scale[h] = d * (float)(i8)(raw.scale >> (8 * h));
            unit.shift[h] = 0.0f;
        }
    } else {
        unit.scale[0] = unit.scale[1] = d;
        unit.shift[0] = unit.shift[1] = TYPE == QUANT_Q4_0   ? -8.0f * d
                                        : TYPE == QUANT_Q5_0 ? -16.0f * d
                                        : TYPE == QUANT_Q8_0 ? 0.0f
                                                             : m;
    }
    return unit;
}

// 32 activations: their codes, 4 to a word, and (d, d * sum of codes).
struct QuantActs {
    i32 words[8];
    f32x2 s;
};
DEVICE QuantActs quant_load_acts(const i8 *q, const f32x2 *s, u32 unit) {
    const u32x4 *at = (const u32x4 *)(q + 32 * unit);
    const u32x4 low = at[0], high = at[1];
    QuantActs acts;
    acts.words[0] = (i32)low.x, acts.words[1] = (i32)low.y, acts.words[2] = (i32)low.z, acts.words[3] = (i32)low.w;
    acts.words[4] = (i32)high.x, acts.words[5] = (i32)high.y, acts.words[6] = (i32)high.z, acts.words[7] = (i32)high.w;
    acts.s = s[unit];
    return acts;
}

// The product of 32 weights with 32 activations.
template <u32 TYPE> DEVICE float quant_dot(const QuantUnit &unit, const QuantActs &acts) {
    i32 sum = 0, rest = 0;
    UNROLL for (u32 j = 0; j < 4; j++) {
        sum = dot4(unit.words[j], acts.words[j], sum);
        rest = dot4(unit.words[j + 4], acts.words[j + 4], rest);
    }
    if (TYPE == QUANT_Q6_K) return acts.s.x * fma_(unit.scale[0], (float)sum, unit.scale[1] * (float)rest);
    const float codes = unit.scale[0] * (acts.s.x * (float)(sum + rest));
    return TYPE == QUANT_Q8_0 ? codes : codes + unit.shift[0] * acts.s.y;
}

// Weight i of a unit.
template <u32 TYPE> DEVICE float quant_weight(const QuantUnit &unit, u32 i) {
    const i32 byte = unit.words[i / 4] >> (8 * (i % 4));
    const float code = TYPE == QUANT_Q8_0 || TYPE == QUANT_Q6_K ? (float)(i8)byte : (float)(byte & 255);
    if (TYPE == QUANT_Q4_0) return unit.scale[0] * (code - 8.0f);
    if (TYPE == QUANT_Q5_0) return unit.scale[0] * (code - 16.0f);
    if (TYPE == QUANT_Q6_K) return unit.scale[i / 16] * code;
    if (TYPE == QUANT_Q8_0) return unit.scale[0] * code;
    // Rounded twice, as in the reference.
    return mul_(unit.scale[0], code) + unit.shift[0];
}

// Weight i of a unit for products in f16, which round it anyway.
template <u32 TYPE> DEVICE float quant_weight_near(const QuantUnit &unit, u32 i) {
    const i32 byte = unit.words[i / 4] >> (8 * (i % 4));
    if (TYPE == QUANT_Q8_0 || TYPE == QUANT_Q6_K) return unit.scale[i / 16] * (float)(i8)byte;
    return fma_(unit.scale[0], (float)(byte & 255), unit.shift[0]);
}

// Weight i of a row of floats.
template <u32 TYPE> DEVICE float quant_float(const u8 *row, u32 i) {
    if (TYPE == QUANT_F32) return ((const float *)row)[i];
    const u16 half = ((const u16 *)row)[i];
    return TYPE == QUANT_F16 ? h2f(half) : bf2f(half);
}

// Calls `name<TYPE>` for the type of a weight; the whole block takes the same way.
#define QUANT_SWITCH(type, name, ...)                           \
    switch (type) {                                             \
    case QUANT_F32: name<QUANT_F32>(__VA_ARGS__); break;        \
    case QUANT_F16: name<QUANT_F16>(__VA_ARGS__); break;        \
    case QUANT_BF16: name<QUANT_BF16>(__VA_ARGS__); break;      \
    case QUANT_Q4_0: name<QUANT_Q4_0>(__VA_ARGS__); break;      \
    case QUANT_Q4_1: name<QUANT_Q4_1>(__VA_ARGS__); break;      \
    case QUANT_Q5_0: name<QUANT_Q5_0>(__VA_ARGS__); break;      \
    case QUANT_Q5_1: name<QUANT_Q5_1>(__VA_ARGS__); break;      \
    case QUANT_Q8_0: name<QUANT_Q8_0>(__VA_ARGS__); break;      \
    case QUANT_Q4_K: name<QUANT_Q4_K>(__VA_ARGS__); break;      \
    case QUANT_Q5_K: name<QUANT_Q5_K>(__VA_ARGS__); break;      \
    case QUANT_Q6_K: name<QUANT_Q6_K>(__VA_ARGS__); break;      \
    }

// The units of a row that fall to a lane: part, part + step, ...
struct QuantShare {
    u32 part, step;
};

// Sums of R rows, `apart` bytes from one to the next, with N rows of activations, over the units that fall to this lane:
// sums[r * N + t]. Activations beyond `n` repeat the last. The next units are loaded before these are multiplied.
template <u32 TYPE, u32 N, u32 R>
DEVICE void quant_unit_sums(const u8 *row, u64 apart, u32 cols, QuantShare share, const i8 *q, const f32x2 *s, u32 n,
                            float *sums) {
    // Two units ahead for one row.
    constexpr u32 AHEAD = R == 1 ? 2 : 1;
    const u32 nb = cols / 32;
    QuantRaw<TYPE> raw[AHEAD][R];
    UNROLL for (u32 p = 0; p < AHEAD; p++)
        if (share.part + p * share.step < nb)
            UNROLL for (u32 r = 0; r < R; r++) raw[p][r] = quant_load<TYPE>(row + r * apart, nb, share.part + p * share.step);
    for (u32 start = share.part; start < nb; start += AHEAD * share.step) {
        UNROLL for (u32 p = 0; p < AHEAD; p++) {
            const u32 unit = start + p * share.step, later = unit + AHEAD * share.step;
            if (unit < nb) {
                QuantUnit units[R];
                UNROLL for (u32 r = 0; r < R; r++) units[r] = quant_unpack<TYPE>(raw[p][r]);
                if (later < nb)
                    UNROLL for (u32 r = 0; r < R; r++) raw[p][r] = quant_load<TYPE>(row + r * apart, nb, later);
                UNROLL for (u32 t = 0; t < N; t++) {
                    const QuantActs acts = quant_load_acts(q, s, min_u32(t, n - 1) * nb + unit);
                    UNROLL for (u32 r = 0; r < R; r++) sums[r * N + t] += quant_dot<TYPE>(units[r], acts);
                }
            }
        }
    }
}

// The same for rows of floats, in pieces of 16 bytes.
template <u32 TYPE, u32 N, u32 R>
DEVICE void quant_float_sums(const u8 *row, u64 apart, u32 cols, QuantShare share, const float *x, u32 n, float *sums) {
    constexpr u32 PIECE = TYPE == QUANT_F32 ? 4 : 8, AHEAD = 4 / R;
    const u32 pieces = cols / PIECE;
    for (u32 start = share.part; start < pieces; start += AHEAD * share.step) {
        u32x4 raw[AHEAD][R];
        UNROLL for (u32 p = 0; p < AHEAD; p++)
            if (start + p * share.step < pieces)
                UNROLL for (u32 r = 0; r < R; r++) raw[p][r] = stream16(row + r * apart + 16 * (start + p * share.step));
        UNROLL for (u32 p = 0; p < AHEAD; p++)
            if (start + p * share.step < pieces)
                UNROLL for (u32 t = 0; t < N; t++) {
                    const f32x4 *at = (const f32x4 *)(x + min_u32(t, n - 1) * cols + PIECE * (start + p * share.step));
                    UNROLL for (u32 half = 0; half < PIECE / 4; half++) {
                        const f32x4 v = at[half];
                        UNROLL for (u32 r = 0; r < R; r++) {
                            const u32x4 w = raw[p][r];
                            const u32 words[4] = {w.x, w.y, w.z, w.w};
                            const float a[4] = {v.x, v.y, v.z, v.w};
                            UNROLL for (u32 i = 0; i < 4; i++) {
                                const u16 bits = (u16)(words[half * 2 + i / 2 & 3] >> (16 * (i % 2)));
                                const float weight = TYPE == QUANT_F32   ? from_bits(words[i])
                                                     : TYPE == QUANT_F16 ? h2f(bits)
                                                                         : bf2f(bits);
                                sums[r * N + t] = fma_(weight, a[i], sums[r * N + t]);
                            }
                        }
                    }
                }
    }
}

template <u32 TYPE, u32 N, u32 R>
DEVICE void quant_sums(const u8 *row, u64 apart, u32 cols, QuantShare share, const i8 *q, const f32x2 *s, const float *x,
                       u32 n, float *sums) {
    if constexpr (quant_is_float(TYPE))
        quant_float_sums<TYPE, N, R>(row, apart, cols, share, x, n, sums);
    else
        quant_unit_sums<TYPE, N, R>(row, apart, cols, share, q, s, n, sums);
}

// Sums of one row.
template <u32 TYPE, u32 N>
DEVICE void quant_row_sums(const u8 *row, u32 cols, QuantShare share, const i8 *q, const f32x2 *s, const float *x,
                           u32 n, float *sums) {
    quant_sums<TYPE, N, 1>(row, 0, cols, share, q, s, x, n, sums);
}

// Operations on rows of activations, each of which can leave the rows quantised for the products that follow.

#define QUANT_ROW_THREADS 256

DEVICE f32x4 quant_times(f32x4 v, float by) { return f32x4{v.x * by, v.y * by, v.z * by, v.w * by}; }
DEVICE f32x4 quant_times(f32x4 v, f32x4 by) { return f32x4{v.x * by.x, v.y * by.y, v.z * by.z, v.w * by.w}; }

// A row of up to 1024 PIECES numbers: x += delta, where there is a delta; then RMS normalisation with weights, where there
// are any. `norm` is 0 for rows that are only quantised.
template <u32 PIECES>
DEVICE void quant_norm_row(float *x, const float *delta, const float *weight, float eps, u32 norm, u32 cols,
                           const QuantOut &out, float *scratch) {
    // Weights of short rows are on their way while the sum is taken.
    constexpr bool EARLY = PIECES <= 4;
    const u64 start = (u64)block_x() * cols;
    f32x4 held[PIECES], weights[EARLY ? PIECES : 1];
    float sum = 0.0f;
    UNROLL for (u32 k = 0; k < PIECES; k++) {
        const u32 i = 4 * (k * QUANT_ROW_THREADS + thread_index());
        if (i < cols) {
            held[k] = *(const f32x4 *)(x + start + i);
            if (EARLY && weight) weights[k] = *(const f32x4 *)(weight + i);
        }
    }
    UNROLL for (u32 k = 0; k < PIECES; k++) {
        const u32 i = 4 * (k * QUANT_ROW_THREADS + thread_index());
        if (i < cols) {
            if (delta) {
                const f32x4 d = *(const f32x4 *)(delta + start + i);
                held[k] = f32x4{held[k].x + d.x, held[k].y + d.y, held[k].z + d.z, held[k].w + d.w};
                *(f32x4 *)(x + start + i) = held[k];
            }
            sum = fma_(held[k].x, held[k].x, fma_(held[k].y, held[k].y, sum));
            sum = fma_(held[k].z, held[k].z, fma_(held[k].w, held[k].w, sum));
        }
    }
    if (norm) {
        sum = block_sum<QUANT_ROW_THREADS>(sum, scratch);
        const float by = 1.0f / sqrt_(sum / (float)cols + eps);
        UNROLL for (u32 k = 0; k < PIECES; k++) {
            const u32 i = 4 * (k * QUANT_ROW_THREADS + thread_index());
            if (i < cols) {
                held[k] = quant_times(held[k], by);
                if (weight) held[k] = quant_times(held[k], EARLY ? weights[EARLY ? k : 0] : *(const f32x4 *)(weight + i));
            }
        }
    }
    quant_write_pieces<PIECES, QUANT_ROW_THREADS>(out, block_x(), 0, cols, held, scratch);
}

// Row by row: activation(gate) * up, 1024 PIECES numbers a block.
template <u32 PIECES>
DEVICE void quant_gated_row(const float *gate, const float *up, u32 gelu, u32 cols, u32 up_stride, const QuantOut &out,
                            float *scratch) {
    const u64 start = (u64)block_x() * cols, up_start = (u64)block_x() * up_stride;
    const u32 first = block_y() * 4 * PIECES * QUANT_ROW_THREADS;
    f32x4 held[PIECES];
    UNROLL for (u32 k = 0; k < PIECES; k++) {
        const u32 i = first + 4 * (k * QUANT_ROW_THREADS + thread_index());
        if (i < cols) {
            const f32x4 g = *(const f32x4 *)(gate + start + i), u = *(const f32x4 *)(up + up_start + i);
            const f32x4 act = gelu ? f32x4{gelu_(g.x), gelu_(g.y), gelu_(g.z), gelu_(g.w)}
                                   : f32x4{silu_(g.x), silu_(g.y), silu_(g.z), silu_(g.w)};
            held[k] = quant_times(act, u);
        }
    }
    quant_write_pieces<PIECES, QUANT_ROW_THREADS>(out, block_x(), first, cols, held, scratch);
}

#define QUANT_NORM(PIECES)                                                                                                \
    KERNEL(quant_norm_##PIECES, QUANT_ROW_THREADS)                                                                        \
    (float *x, const float *delta, const float *weight, float eps, u32 norm, u32 cols, float *out, i8 *q, f32x2 *s,       \
     u16 *h, float *scale) {                                                                                              \
        SHARED(float, scratch, QUANT_ROW_THREADS / 32);                                                                   \
        quant_norm_row<PIECES>(x, delta, weight, eps, norm, cols, QuantOut{out, q, s, h, scale}, scratch);                \
    }                                                                                                                     \
    EXPORT(quant_norm_##PIECES)
QUANT_NORM(2)
QUANT_NORM(4)
QUANT_NORM(12)

#define QUANT_GATED(PIECES)                                                                                               \
    KERNEL(quant_gated_##PIECES, QUANT_ROW_THREADS)                                                                       \
    (const float *gate, const float *up, u32 gelu, u32 cols, u32 up_stride, float *out, i8 *q, f32x2 *s, u16 *h,          \
     float *scale) {                                                                                                      \
        SHARED(float, scratch, QUANT_ROW_THREADS / 32);                                                                   \
        quant_gated_row<PIECES>(gate, up, gelu, cols, up_stride, QuantOut{out, q, s, h, scale}, scratch);                 \
    }                                                                                                                     \
    EXPORT(quant_gated_##PIECES)
// A block for every 1024 numbers, or for a row.
QUANT_GATED(1)
QUANT_GATED(4)
QUANT_GATED(12)

// out[i] = scale * row ids[i] of the table.
template <u32 TYPE>
DEVICE void quant_embed_row(const u8 *table, u32 rows, u32 id, float scale, u32 cols, float *out) {
    // A row outside of the table becomes NaN, which no later step hides.
    const u8 *row = table + (u64)min_u32(id, rows - 1) * quant_stride(TYPE, cols);
    const float by = id < rows ? scale : from_bits(0x7fc00000u);
    if (quant_is_float(TYPE)) {
        for (u32 i = thread_index(); i < cols; i += QUANT_ROW_THREADS) out[i] = by * quant_float<TYPE>(row, i);
    } else {
        const u32 nb = cols / 32;
        for (u32 unit = thread_index(); unit < nb; unit += QUANT_ROW_THREADS) {
            const QuantUnit u = quant_unpack<TYPE>(quant_load<TYPE>(row, nb, unit));
            UNROLL for (u32 i = 0; i < 32; i++) out[32 * unit + i] = by * quant_weight<TYPE>(u, i);
        }
    }
}

KERNEL(quant_embed, QUANT_ROW_THREADS)
(const u8 *table, u32 type, u32 rows, const u32 *ids, float scale, u32 cols, float *out) {
    QUANT_SWITCH(type, quant_embed_row, table, rows, ids[block_x()], scale, cols, out + (u64)block_x() * cols)
}
EXPORT(quant_embed)

// x = (x + by * delta) * scale, where `by` is 1 or the sigmoid of the row's gate.
KERNEL(quant_add, QUANT_ROW_THREADS)(float *x, const float *delta, const float *gates, float scale, u32 cols, u32 n) {
    const u64 i = (u64)block_x() * QUANT_ROW_THREADS + thread_index();
    if (i < (u64)n * cols) {
        const float by = gates ? sigmoid_(gates[i / cols]) : 1.0f;
        x[i] = fma_(by, delta[i], x[i]) * scale;
    }
}
EXPORT(quant_add)

// x = cap * tanh(x / cap)
KERNEL(quant_softcap, QUANT_ROW_THREADS)(float *x, float cap, u32 n) {
    const u32 i = block_x() * QUANT_ROW_THREADS + thread_index();
    if (i < n) x[i] = cap * tanh_(x[i] / cap);
}
EXPORT(quant_softcap)

// A number and its place in a row as one key: larger numbers first, then smaller places; -0 counts as 0, and 0 is the key of
// NaN.
DEVICE u64 quant_key(float v, u32 i) {
    if (v != v) return 0;
    const u32 u = bits(v == 0.0f ? 0.0f : v);
    return (u64)(u & 0x80000000u ? ~u : u | 0x80000000u) << 32 | (0xffffffffu - i);
}
DEVICE float quant_key_value(u64 key) {
    const u32 u = (u32)(key >> 32);
    return from_bits(u & 0x80000000u ? u ^ 0x80000000u : ~u);
}
DEVICE u64 quant_more(u64 a, u64 b) { return a > b ? a : b; }

// The index of the largest number of every row, the lowest of equals; a row without numbers gives the largest index there is.
#define QUANT_ARGMAX_PART 2048
KERNEL(quant_argmax, QUANT_ROW_THREADS)(const float *logits, u32 cols, u64 *best) {
    constexpr u32 EACH = QUANT_ARGMAX_PART / QUANT_ROW_THREADS;
    SHARED(u64, found, QUANT_ROW_THREADS / WAVE);
    const float *row = logits + (u64)block_y() * cols;
    const u32 first = block_x() * QUANT_ARGMAX_PART + thread_index();
    float held[EACH];
    UNROLL for (u32 k = 0; k < EACH; k++) {
        const u32 i = first + k * QUANT_ROW_THREADS;
        held[k] = i < cols ? row[i] : from_bits(0x7fc00000u);
    }
    u64 most = 0;
    UNROLL for (u32 k = 0; k < EACH; k++) most = quant_more(most, quant_key(held[k], first + k * QUANT_ROW_THREADS));
    for (u32 m = WAVE / 2; m > 0; m >>= 1)
        most = quant_more(most, (u64)shfl_xor((u32)(most >> 32), m) << 32 | shfl_xor((u32)most, m));
    if (lane() == 0) found[wave_index()] = most;
    barrier();
    if (thread_index() == 0) {
        for (u32 i = 1; i < QUANT_ROW_THREADS / WAVE; i++) most = quant_more(most, found[i]);
        if (most) atomic_max(best + block_y(), most);
    }
}
EXPORT(quant_argmax)

KERNEL(quant_argmax_ids, 64)(u64 *best, u32 n, u32 *ids) {
    const u32 i = block_x() * 64 + thread_index();
    if (i < n) {
        ids[i] = best[i] ? 0xffffffffu - (u32)best[i] : 0xffffffffu;
        // Ready for the next step.
        best[i] = 0;
    }
}
EXPORT(quant_argmax_ids)

// The k largest of every part, `length` long, of a row of numbers or of keys, sorted; in the end of one part, which is the row.
#define QUANT_TOP_PART 4096 // at most
#define QUANT_TOP_MOST 64
#define QUANT_TOP_THREADS 512
// Puts the larger of two keys first, or second.
DEVICE void quant_order(u64 *a, u64 *b, bool larger_first) {
    const u64 x = *a, y = *b;
    if ((x < y) == larger_first) *a = y, *b = x;
}
KERNEL(quant_top, QUANT_TOP_THREADS)
(const float *logits, const u64 *keys, u32 cols, u32 length, u32 k, u64 *kept, float *values, u32 *ids) {
    SHARED(u64, part, QUANT_TOP_PART);
    const u32 first = block_x() * length, there = min_u32(cols - first, length), t = thread_index();
    const u64 row = (u64)block_y() * cols + first;
    u32 size = QUANT_TOP_MOST;
    while (size < there) size *= 2;
    for (u32 i = t; i < size; i += QUANT_TOP_THREADS)
        part[i] = i >= there ? 0 : logits ? quant_key(logits[row + i], first + i) : keys[row + i];
    // Batcher's bitonic network sorts runs of 64, in turn the largest and the smallest first.
    for (u32 run = 1; run <= 6; run++)
        for (u32 step = run; step-- > 0;) {
            barrier();
            for (u32 i = t; i < size / 2; i += QUANT_TOP_THREADS) {
                const u32 low = (i >> step << (step + 1)) | (i & ((1u << step) - 1));
                quant_order(part + low, part + low + (1u << step), !(low >> run & 1));
            }
        }
    // Of two such runs the larger of each pair are the 64 largest of both, in an order that six steps more make a sorted one.
    for (u32 apart = QUANT_TOP_MOST; apart < size; apart *= 2) {
        const u32 pairs = size / (2 * apart) * QUANT_TOP_MOST;
        barrier();
        for (u32 i = t; i < pairs; i += QUANT_TOP_THREADS) {
            const u32 to = i / QUANT_TOP_MOST * 2 * apart + i % QUANT_TOP_MOST;
            part[to] = quant_more(part[to], part[to + apart]);
        }
        for (u32 step = 6; step-- > 0;) {
            barrier();
            for (u32 i = t; i < pairs / 2; i += QUANT_TOP_THREADS) {
                const u32 run = i / (QUANT_TOP_MOST / 2), j = i % (QUANT_TOP_MOST / 2);
                u64 *low = part + run * 2 * apart + ((j >> step << (step + 1)) | (j & ((1u << step) - 1)));
                quant_order(low, low + (1u << step), run % 2 == 0);
            }
        }
    }
    barrier();
    if (t < k) {
        const u64 key = part[t];
        if (kept) kept[((u64)block_y() * ((cols + length - 1) / length) + block_x()) * k + t] = key;
        if (ids) {
            ids[block_y() * k + t] = key ? 0xffffffffu - (u32)key : 0xffffffffu;
            values[block_y() * k + t] = key ? quant_key_value(key) : from_bits(0xff800000u);
        }
    }
}
EXPORT(quant_top)

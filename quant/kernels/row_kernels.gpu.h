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
    quant_write_pieces<PIECES, QUANT_ROW_THREADS>(out, block_x(), cols, held, scratch);
}

// Row by row: activation(gate) * up.
template <u32 PIECES>
DEVICE void quant_gated_row(const float *gate, const float *up, u32 gelu, u32 cols, u32 up_stride, const QuantOut &out,
                            float *scratch) {
    const u64 start = (u64)block_x() * cols, up_start = (u64)block_x() * up_stride;
    f32x4 held[PIECES];
    UNROLL for (u32 k = 0; k < PIECES; k++) {
        const u32 i = 4 * (k * QUANT_ROW_THREADS + thread_index());
        if (i < cols) {
            const f32x4 g = *(const f32x4 *)(gate + start + i), u = *(const f32x4 *)(up + up_start + i);
            const f32x4 act = gelu ? f32x4{gelu_(g.x), gelu_(g.y), gelu_(g.z), gelu_(g.w)}
                                   : f32x4{silu_(g.x), silu_(g.y), silu_(g.z), silu_(g.w)};
            held[k] = quant_times(act, u);
        }
    }
    quant_write_pieces<PIECES, QUANT_ROW_THREADS>(out, block_x(), cols, held, scratch);
}

// Rows of up to 2048, 4096 and 12288 numbers.
#define QUANT_ROWS(PIECES)                                                                                                \
    KERNEL(quant_norm_##PIECES, QUANT_ROW_THREADS)                                                                        \
    (float *x, const float *delta, const float *weight, float eps, u32 norm, u32 cols, float *out, i8 *q, f32x2 *s,       \
     u16 *h, float *scale) {                                                                                              \
        SHARED(float, scratch, QUANT_ROW_THREADS / 32);                                                                   \
        quant_norm_row<PIECES>(x, delta, weight, eps, norm, cols, QuantOut{out, q, s, h, scale}, scratch);                \
    }                                                                                                                     \
    EXPORT(quant_norm_##PIECES)                                                                                           \
    KERNEL(quant_gated_##PIECES, QUANT_ROW_THREADS)                                                                       \
    (const float *gate, const float *up, u32 gelu, u32 cols, u32 up_stride, float *out, i8 *q, f32x2 *s, u16 *h,          \
     float *scale) {                                                                                                      \
        SHARED(float, scratch, QUANT_ROW_THREADS / 32);                                                                   \
        quant_gated_row<PIECES>(gate, up, gelu, cols, up_stride, QuantOut{out, q, s, h, scale}, scratch);                 \
    }                                                                                                                     \
    EXPORT(quant_gated_##PIECES)
QUANT_ROWS(2)
QUANT_ROWS(4)
QUANT_ROWS(12)

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

// The index of the largest number of every row, the lowest of equals; a row without numbers gives the largest index there is.
KERNEL(quant_argmax, QUANT_ROW_THREADS)(const float *logits, u32 cols, u64 *best) {
    // Blocks of a row keep the greatest of (order of the number, order of the index).
    u64 most = 0;
    const float *row = logits + (u64)block_y() * cols;
    for (u32 i = block_x() * 4096 + thread_index(); i < min_u32(cols, block_x() * 4096 + 4096); i += QUANT_ROW_THREADS) {
        const float v = row[i];
        if (v == v) {
            // Bits of floats in the order of the numbers; -0 counts as 0.
            const u32 u = bits(v == 0.0f ? 0.0f : v);
            const u32 ordered = u & 0x80000000u ? ~u : u | 0x80000000u;
            const u64 key = (u64)ordered << 32 | (0xffffffffu - i);
            most = key > most ? key : most;
        }
    }
    if (most) atomic_max(best + block_y(), most);
}
EXPORT(quant_argmax)

KERNEL(quant_argmax_ids, 64)(u64 *best, u32 n, u32 *ids) {
    const u32 i = thread_index();
    if (i < n) {
        ids[i] = best[i] ? 0xffffffffu - (u32)best[i] : 0xffffffffu;
        // Ready for the next step.
        best[i] = 0;
    }
}
EXPORT(quant_argmax_ids)

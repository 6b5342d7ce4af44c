// What every form ends with: the gated norm, and the window's move past the span. Both in one launch, after all that read the
// window: blocks of one launch cannot wait for each other.

// Channels c to c + 3 of row `at` of the window followed by the span.
DEVICE f32x4 gdn_seen(const float *past, const float *rows, u32 channels, u32 history, u32 at, u32 c) {
    const float *from = at < history ? past + (u64)at * channels : rows + (u64)(at - history) * channels;
    return *(const f32x4 *)(from + c);
}

// The new window is the last rows of the old one followed by the span. A block has 1024 channels, a thread four.
DEVICE void gdn_move_window(const float *qkv, const GdnSpan &span, u32 channels, u32 kernel, u32 block, float *window) {
    const u32 history = kernel - 1;
    const float *rows = qkv + (u64)span.first * channels;
    float *past = window + (u64)span.slot * history * channels;
    const u32 c = 4 * (block * 256 + thread_index());
    if (c < channels && span.rows > 0)
        for (u32 j = 0; j < history; j += 3) {
            // Three at once, all loads first: sources lie after what is written here, and those of the next three after what
            // these read.
            const u32 last = history - 1, j1 = min_u32(j + 1, last), j2 = min_u32(j + 2, last);
            const f32x4 x0 = gdn_seen(past, rows, channels, history, j + span.rows, c);
            const f32x4 x1 = gdn_seen(past, rows, channels, history, j1 + span.rows, c);
            const f32x4 x2 = gdn_seen(past, rows, channels, history, j2 + span.rows, c);
            *(f32x4 *)(past + (u64)j * channels + c) = x0;
            *(f32x4 *)(past + (u64)j1 * channels + c) = x1;
            *(f32x4 *)(past + (u64)j2 * channels + c) = x2;
        }
}

// o * rsqrt(mean(o^2) + eps) * norm * silu(z) for `heads` heads of a row, 32 lanes a head; these are part `part` of the row.
#define GDN_MOST 48
template <u32 UNITS>
DEVICE void gdn_norm(const float *o, const float *z, const float *norm, float eps, u32 v_heads, u32 heads,
                     u32 row, u32 part, const QuantOut &out, float *scratch) {
    const u32 group = thread_index() / 32, l = thread_index() % 32, dim = 32 * UNITS;
    const u64 start = (u64)row * v_heads * dim;
    float held[GDN_MOST];
    float most = 0.0f;
    UNROLL for (u32 k = 0; k < GDN_MOST / UNITS; k++)
        if (8 * k < heads) {
            const u32 head = part * heads + 8 * k + group;
            const bool there = head < v_heads;
            float sum = 0.0f;
            UNROLL for (u32 e = 0; e < UNITS; e++) {
                held[k * UNITS + e] = there ? o[start + head * dim + 32 * e + l] : 0.0f;
                sum = fma_(held[k * UNITS + e], held[k * UNITS + e], sum);
            }
            sum = group_sum<32>(sum);
            const float by = 1.0f / sqrt_(sum / (float)dim + eps);
            UNROLL for (u32 e = 0; e < UNITS; e++) {
                const u32 i = 32 * e + l;
                float &v = held[k * UNITS + e];
                v = there ? v * by * norm[i] * silu_(z[start + head * dim + i]) : 0.0f;
                most = max_(most, abs_(v));
                quant_write_unit(out, start + head * dim + i, v, there);
            }
        }
    // The scale of f16 is that of the whole row, which then is one block's.
    if (!out.h) return;
    const float by = quant_half_scale(block_max<256>(most, scratch)), inverse = 1.0f / by;
    UNROLL for (u32 k = 0; k < GDN_MOST / UNITS; k++)
        UNROLL for (u32 e = 0; e < UNITS; e++) {
            const u32 head = 8 * k + group;
            if (head < v_heads) out.h[start + head * dim + 32 * e + l] = f2h(held[k * UNITS + e] * inverse);
        }
    if (thread_index() == 0) out.scale[row] = by;
}

// `per_row` blocks for every one of n rows, then `per_span` for the window of every span.
#define GDN_NORM(UNITS)                                                                                               \
    KERNEL(gdn_norm_##UNITS, 256)                                                                                     \
    (const float *o, const float *z, const float *norm, float eps, u32 v_heads, u32 heads, u32 per_row, u32 n,        \
     const float *qkv, const GdnSpan *spans, u32 per_span, u32 channels, u32 kernel, float *window, float *out,       \
     i8 *q, f32x2 *s, u16 *h, float *scale) {                                                                         \
        SHARED(float, scratch, 8);                                                                                    \
        if (block_x() < per_row * n) {                                                                                \
            gdn_norm<UNITS>(o, z, norm, eps, v_heads, heads, block_x() / per_row, block_x() % per_row,                \
                            QuantOut{out, q, s, h, scale}, scratch);                                                  \
        } else {                                                                                                      \
            const u32 i = block_x() - per_row * n;                                                                    \
            gdn_move_window(qkv, spans[i / per_span], channels, kernel, i % per_span, window);                        \
        }                                                                                                             \
    }                                                                                                                 \
    EXPORT(gdn_norm_##UNITS)
GDN_NORM(1)
GDN_NORM(2)
GDN_NORM(4)

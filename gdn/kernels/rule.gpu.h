// The delta rule, row by row.

// Rows that are brought to shared memory at once.
#define GDN_STAGE 16
// Columns of the state that a block has, and lanes that share one: 128 blocks of 8 waves for 32 heads of 128 columns.
#define GDN_COLUMNS 32
#define GDN_LANES 8

// One span, one head, GDN_COLUMNS columns of the state, which lies as [slot, v_head, d_v, d_k]; lane p of a column has rows
// 32 j + 4 p to 32 j + 4 p + 3.
//
// The output is not read from the new state but with what is read for the correction, o = d S'q + (k q) u, so that a row costs
// one reduction instead of two, one after the other. Norms of queries and keys are factors of those scalars.
//
// `FUSED` convolves `from` = qkv here: every block of a key head repeats that, which costs less than a launch when rows are few.
// Otherwise `from` is what gdn_prepare left.
template <u32 DK, bool FUSED>
DEVICE void gdn_rule(const float *from, const float *beta, const float *alpha, const float *taps, const float *a,
                     const float *dt_bias, const float *window, const GdnSpan &span, u32 k_heads, u32 v_heads, u32 d_v,
                     u32 kernel, u32 grouped, float *states, float *out) {
    SHARED(float, keys, GDN_STAGE * DK);
    SHARED(float, queries, GDN_STAGE * DK);
    SHARED(float, values, GDN_STAGE * GDN_COLUMNS);
    SHARED(float, factors, 8 * GDN_STAGE);
    const u32 t = thread_index(), groups = d_v / GDN_COLUMNS;
    const u32 head = block_x() / groups, first = block_x() % groups * GDN_COLUMNS;
    const u32 k_head = gdn_k_head(head, k_heads, v_heads, grouped);
    const u32 column = t / GDN_LANES, part = t % GDN_LANES;
    const u32 channels = 2 * k_heads * DK + v_heads * d_v;
    const u32 q_at = k_head * DK, v_at = 2 * k_heads * DK + head * d_v + first;
    const float *rows = from + (u64)span.first * channels;
    const float *past = window + (u64)span.slot * (kernel - 1) * channels;

    float *mine = states + (((u64)span.slot * v_heads + head) * d_v + first + column) * DK + 4 * part;
    f32x4 s[DK / 32];
    UNROLL for (u32 j = 0; j < DK / 32; j++) s[j] = *(const f32x4 *)(mine + 32 * j);
    const float rate = a[head], bias = dt_bias[head];
    for (u32 start = 0; start < span.rows; start += GDN_STAGE) {
        const u32 count = min_u32(GDN_STAGE, span.rows - start);
        // Half of the threads have decays, the others write strengths: loaded with everything else, used at the end.
        const u32 gated = t % 128;
        const float gate = (t < 128 ? alpha : beta)[(span.first + start + min_u32(gated, count - 1)) * v_heads + head];
        barrier();
        // A row of queries and keys takes one round of 256 threads for heads of 128; values go along with it.
        for (u32 i = t; i < count * 2 * DK; i += 256) {
            const u32 r = i / (2 * DK), e = i % (2 * DK);
            const u32 c = q_at + (e < DK ? e : k_heads * DK + e - DK);
            const u32 vr = min_u32(i / GDN_COLUMNS, count - 1), vc = v_at + i % GDN_COLUMNS;
            float x, v;
            if (FUSED) {
                x = gdn_conv(past, rows, taps, channels, kernel, start + r, c);
                v = gdn_conv(past, rows, taps, channels, kernel, start + vr, vc);
            } else {
                x = rows[(u64)(start + r) * channels + c];
                v = rows[(u64)(start + vr) * channels + vc];
            }
            (e < DK ? queries + e : keys + (e - DK))[r * DK] = x;
            if (i < count * GDN_COLUMNS) values[i] = v;
        }
        if (gated < count) factors[8 * gated + t / 128] = t < 128 ? gdn_decay(rate, gate, bias) : sigmoid_(gate);
        barrier();
        for (u32 i = 0; i < count; i += 8) {
            const u32 r = i + t / 32;
            const bool there = r < count;
            float qq = 0.0f, kk = 0.0f, qk = 0.0f;
            if (there)
                UNROLL for (u32 e = 0; e < DK / 32; e++) {
                    const float q = queries[r * DK + 32 * e + t % 32], k = keys[r * DK + 32 * e + t % 32];
                    qq = fma_(q, q, qq), kk = fma_(k, k, kk), qk = fma_(q, k, qk);
                }
            qq = group_sum<32>(qq), kk = group_sum<32>(kk), qk = group_sum<32>(qk);
            if (there && t % 32 == 0) {
                const float q_by = 1.0f / (sqrt_((float)DK) * sqrt_(qq + 1e-6f)), k_by = 1.0f / sqrt_(kk + 1e-6f);
                const float decay = factors[8 * r];
                factors[8 * r + 2] = k_by, factors[8 * r + 3] = decay * k_by;
                factors[8 * r + 4] = decay * q_by, factors[8 * r + 5] = qk * q_by;
            }
        }
        barrier();
        for (u32 r = 0; r < count; r++) {
            const f32x4 *k = (const f32x4 *)(keys + r * DK + 4 * part), *q = (const f32x4 *)(queries + r * DK + 4 * part);
            const f32x4 by = *(const f32x4 *)(factors + 8 * r);
            const f32x2 out_by = *(const f32x2 *)(factors + 8 * r + 4);
            f32x4 w[DK / 32];
            // Two sums of every kind, for chains of half the length.
            float read[2] = {0.0f, 0.0f}, o[2] = {0.0f, 0.0f};
            UNROLL for (u32 j = 0; j < DK / 32; j++) {
                w[j] = k[8 * j];
                const f32x4 p = q[8 * j];
                read[0] = fma_(s[j].x, w[j].x, fma_(s[j].y, w[j].y, read[0]));
                read[1] = fma_(s[j].z, w[j].z, fma_(s[j].w, w[j].w, read[1]));
                o[0] = fma_(s[j].x, p.x, fma_(s[j].y, p.y, o[0]));
                o[1] = fma_(s[j].z, p.z, fma_(s[j].w, p.w, o[1]));
            }
            const float known = group_sum<GDN_LANES>(read[0] + read[1]), seen = group_sum<GDN_LANES>(o[0] + o[1]);
            const float fresh = by.z * by.y * fma_(-by.w, known, values[r * GDN_COLUMNS + column]);
            UNROLL for (u32 j = 0; j < DK / 32; j++) {
                s[j].x = fma_(w[j].x, fresh, by.x * s[j].x), s[j].y = fma_(w[j].y, fresh, by.x * s[j].y);
                s[j].z = fma_(w[j].z, fresh, by.x * s[j].z), s[j].w = fma_(w[j].w, fresh, by.x * s[j].w);
            }
            if (part == 0)
                out[((u64)(span.first + start + r) * v_heads + head) * d_v + first + column] =
                    fma_(out_by.x, seen, out_by.y * fresh);
        }
    }
    UNROLL for (u32 j = 0; j < DK / 32; j++) *(f32x4 *)(mine + 32 * j) = s[j];
}

// Spans with fewer rows than `below`.
#define GDN_RULE(NAME, DK, FUSED)                                                                                     \
    KERNEL_WIDE(NAME, 256)                                                                                            \
    (const float *from, const float *beta, const float *alpha, const float *taps, const float *a,                     \
     const float *dt_bias, const float *window, const GdnSpan *spans, u32 below, u32 k_heads, u32 v_heads, u32 d_v,   \
     u32 kernel, u32 grouped, float *states, float *out) {                                                            \
        const GdnSpan span = spans[block_y()];                                                                        \
        if (span.rows > 0 && span.rows < below)                                                                       \
            gdn_rule<DK, FUSED>(from, beta, alpha, taps, a, dt_bias, window, span, k_heads, v_heads, d_v, kernel,     \
                                grouped, states, out);                                                                \
    }                                                                                                                 \
    EXPORT(NAME)
GDN_RULE(gdn_step_32, 32, true)
GDN_RULE(gdn_step_64, 64, true)
GDN_RULE(gdn_step_128, 128, true)
GDN_RULE(gdn_rule_32, 32, false)
GDN_RULE(gdn_rule_64, 64, false)
GDN_RULE(gdn_rule_128, 128, false)

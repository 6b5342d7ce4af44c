// Gated DeltaNet between its projections: convolution, norms and gates; the delta rule; the gated norm.

// Most rows of a span in one launch of spans, and how they are given: slot, first row, rows, position of the first row.
struct GdnSpan {
    u32 slot, first, rows, start;
};

DEVICE GdnSpan gdn_span_of(const GdnSpan *spans, u32 n_spans, u32 row) {
    u32 i = 0;
    while (i + 1 < n_spans && row >= spans[i].first + spans[i].rows) i++;
    return spans[i];
}

// Convolution with SiLU of one row, a block for every head: queries, then keys, then values, `dim` channels each. Queries and
// keys are normalised, and the blocks of values also make the gates of their head.
KERNEL(gdn_prepare, 128)
(const float *qkv, const float *beta, const float *alpha, const float *taps, const float *a, const float *dt_bias,
 const float *window, const GdnSpan *spans, u32 n_spans, u32 k_heads, u32 v_heads, u32 d_k, u32 d_v, u32 kernel,
 float *mixed, float *gates) {
    SHARED(float, scratch, 4);
    const u32 row = block_y(), t = thread_index();
    const u32 channels = 2 * k_heads * d_k + v_heads * d_v;
    const bool is_value = block_x() >= 2 * k_heads;
    const u32 head = is_value ? block_x() - 2 * k_heads : block_x();
    const u32 dim = is_value ? d_v : d_k, c = (is_value ? 2 * k_heads * d_k : 0) + head * dim + t;
    const GdnSpan span = gdn_span_of(spans, n_spans, row);
    const u32 history = kernel - 1, seen = row - span.first;
    const float *past = window + (u64)span.slot * history * channels;
    float v = 0.0f;
    if (t < dim) {
        for (u32 j = 0; j < kernel; j++) {
            // Row `seen + j` of the window followed by the span.
            const u32 at = seen + j;
            const float x = at < history ? past[(u64)at * channels + c]
                                         : qkv[(u64)(span.first + at - history) * channels + c];
            v = fma_(taps[c * kernel + j], x, v);
        }
        v = silu_(v);
    }
    if (!is_value) {
        const float sum = block_sum<128>(v * v, scratch);
        const float scale = head < k_heads ? 1.0f / sqrt_((float)d_k) : 1.0f;
        v *= scale / sqrt_(sum + 1e-6f);
    }
    if (t < dim) mixed[(u64)row * channels + c] = v;
    if (is_value && t == 0) {
        const u32 at = row * v_heads + head;
        gates[2 * at] = exp_(a[head] * softplus_(alpha[at] + dt_bias[head]));
        gates[2 * at + 1] = sigmoid_(beta[at]);
    }
}
EXPORT(gdn_prepare)

// Rows that are brought to shared memory at once.
#define GDN_STAGE 16
// Columns of the state that a block has, and lanes that share one.
#define GDN_COLUMNS 32
#define GDN_LANES 4

// The delta rule for the rows of one span, one head, GDN_COLUMNS columns of the state, token by token. The state lies as
// [slot, v_head, d_v, d_k]; lane p of a column has rows 16 j + 4 p to 16 j + 4 p + 3.
template <u32 DK>
DEVICE void gdn_rule(const float *qkv, const float *mixed, const float *gates, const GdnSpan &span, u32 k_heads,
                     u32 v_heads, u32 d_v, u32 kernel, u32 grouped, float *window, float *states, float *out) {
    SHARED(float, keys, GDN_STAGE * DK);
    SHARED(float, queries, GDN_STAGE * DK);
    SHARED(float, values, GDN_STAGE * GDN_COLUMNS);
    SHARED(float, gate, 2 * GDN_STAGE);
    const u32 t = thread_index(), groups = d_v / GDN_COLUMNS;
    const u32 head = block_x() / groups, first = block_x() % groups * GDN_COLUMNS;
    const u32 k_head = grouped ? head / (v_heads / k_heads) : head % k_heads;
    const u32 column = t / GDN_LANES, part = t % GDN_LANES;
    const u32 channels = 2 * k_heads * DK + v_heads * d_v;

    float *mine = states + (((u64)span.slot * v_heads + head) * d_v + first + column) * DK + 4 * part;
    f32x4 s[DK / 16];
    UNROLL for (u32 j = 0; j < DK / 16; j++) s[j] = *(const f32x4 *)(mine + 16 * j);
    for (u32 start = 0; start < span.rows; start += GDN_STAGE) {
        const u32 count = min_u32(GDN_STAGE, span.rows - start);
        barrier();
        for (u32 i = t; i < count * DK; i += 128) {
            const float *row = mixed + (u64)(span.first + start + i / DK) * channels + k_head * DK + i % DK;
            queries[i] = row[0];
            keys[i] = row[k_heads * DK];
        }
        for (u32 i = t; i < count * GDN_COLUMNS; i += 128)
            values[i] = mixed[(u64)(span.first + start + i / GDN_COLUMNS) * channels + 2 * k_heads * DK + head * d_v + first +
                              i % GDN_COLUMNS];
        for (u32 i = t; i < 2 * count; i += 128)
            gate[i] = gates[2 * ((u64)(span.first + start + i / 2) * v_heads + head) + i % 2];
        barrier();
        for (u32 r = 0; r < count; r++) {
            const float decay = gate[2 * r], beta = gate[2 * r + 1];
            const float *k = keys + r * DK + 4 * part, *q = queries + r * DK + 4 * part;
            float read = 0.0f;
            UNROLL for (u32 j = 0; j < DK / 16; j++) {
                const f32x4 w = *(const f32x4 *)(k + 16 * j);
                s[j].x *= decay, s[j].y *= decay, s[j].z *= decay, s[j].w *= decay;
                read = fma_(s[j].x, w.x, fma_(s[j].y, w.y, fma_(s[j].z, w.z, fma_(s[j].w, w.w, read))));
            }
            const float fresh = beta * (values[r * GDN_COLUMNS + column] - group_sum<GDN_LANES>(read));
            float o = 0.0f;
            UNROLL for (u32 j = 0; j < DK / 16; j++) {
                const f32x4 w = *(const f32x4 *)(k + 16 * j), p = *(const f32x4 *)(q + 16 * j);
                s[j].x = fma_(w.x, fresh, s[j].x), s[j].y = fma_(w.y, fresh, s[j].y);
                s[j].z = fma_(w.z, fresh, s[j].z), s[j].w = fma_(w.w, fresh, s[j].w);
                o = fma_(s[j].x, p.x, fma_(s[j].y, p.y, fma_(s[j].z, p.z, fma_(s[j].w, p.w, o))));
            }
            o = group_sum<GDN_LANES>(o);
            if (part == 0) out[((u64)(span.first + start + r) * v_heads + head) * d_v + first + column] = o;
        }
    }
    UNROLL for (u32 j = 0; j < DK / 16; j++) *(f32x4 *)(mine + 16 * j) = s[j];

    // The window moves past the span; gdn_prepare has read it. Blocks of the span share the channels.
    const u32 history = kernel - 1;
    float *past = window + (u64)span.slot * history * channels;
    for (u32 c = block_x() * 128 + t; c < channels; c += v_heads * groups * 128)
        for (u32 j = 0; j < history; j++) {
            // Row j of the new window is row j + rows of the old one followed by the span: always a later one.
            const u32 at = j + span.rows;
            past[(u64)j * channels + c] = at < history ? past[(u64)at * channels + c]
                                                       : qkv[(u64)(span.first + at - history) * channels + c];
        }
}

#define GDN_RULE(DK)                                                                                                  \
    KERNEL(gdn_rule_##DK, 128)                                                                                        \
    (const float *qkv, const float *mixed, const float *gates, const GdnSpan *spans, u32 k_heads, u32 v_heads,        \
     u32 d_v, u32 kernel, u32 grouped, float *window, float *states, float *out) {                                    \
        gdn_rule<DK>(qkv, mixed, gates, spans[block_y()], k_heads, v_heads, d_v, kernel, grouped, window, states, out); \
    }                                                                                                                 \
    EXPORT(gdn_rule_##DK)
GDN_RULE(32)
GDN_RULE(64)
GDN_RULE(128)

// The gated norm of every head of a row, 32 lanes a head: o * rsqrt(mean(o^2) + eps) * norm * silu(z).
#define GDN_MOST 48
template <u32 UNITS>
DEVICE void gdn_norm(const float *o, const float *z, const float *norm, float eps, u32 v_heads, const QuantOut &out,
                     float *scratch) {
    const u32 group = thread_index() / 32, l = thread_index() % 32, dim = 32 * UNITS;
    const u64 start = (u64)block_x() * v_heads * dim;
    float held[GDN_MOST];
    float most = 0.0f;
    UNROLL for (u32 k = 0; k < GDN_MOST / UNITS; k++)
        if (8 * k < v_heads) {
            const u32 head = 8 * k + group;
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
    if (!out.h) return;
    const float by = quant_half_scale(block_max<256>(most, scratch)), inverse = 1.0f / by;
    UNROLL for (u32 k = 0; k < GDN_MOST / UNITS; k++)
        UNROLL for (u32 e = 0; e < UNITS; e++) {
            const u32 head = 8 * k + group;
            if (head < v_heads) out.h[start + head * dim + 32 * e + l] = f2h(held[k * UNITS + e] * inverse);
        }
    if (thread_index() == 0) out.scale[block_x()] = by;
}

#define GDN_NORM(UNITS)                                                                                               \
    KERNEL(gdn_norm_##UNITS, 256)                                                                                     \
    (const float *o, const float *z, const float *norm, float eps, u32 v_heads, float *out, i8 *q, f32x2 *s, u16 *h,  \
     float *scale) {                                                                                                  \
        SHARED(float, scratch, 8);                                                                                    \
        gdn_norm<UNITS>(o, z, norm, eps, v_heads, QuantOut{out, q, s, h, scale}, scratch);                            \
    }                                                                                                                 \
    EXPORT(gdn_norm_##UNITS)
GDN_NORM(1)
GDN_NORM(2)
GDN_NORM(4)

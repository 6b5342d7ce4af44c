// Angles of a step, and what happens to queries, keys and values before attention.

// Cosine and sine of an angle in radians. The angle is reduced in f64, where a turn at any position keeps its digits; what
// is left lies within a quarter of pi, where the series to the powers 9 and 10 end below the last digit of f32.
DEVICE f32x2 attn_cos_sin(double angle) {
    const double quarters = floor64(angle * 0.63661977236758134308 + 0.5);
    // Half of pi in two parts, the first short enough for exact products.
    const double rest64 = (angle - quarters * 1.57079632673412561417) - quarters * 6.07710050650619224932e-11;
    const u32 quadrant = (u32)(quarters - 4.0 * floor64(quarters * 0.25));
    const float r = (float)rest64, rr = r * r;
    float sine = fma_(rr, 2.75573192e-6f, -1.98412698e-4f);
    sine = fma_(rr, sine, 8.33333333e-3f);
    sine = fma_(rr, sine, -1.66666667e-1f);
    sine = fma_(rr * r, sine, r);
    float cosine = fma_(rr, -2.75573192e-7f, 2.48015873e-5f);
    cosine = fma_(rr, cosine, -1.38888889e-3f);
    cosine = fma_(rr, cosine, 4.16666667e-2f);
    cosine = fma_(rr, cosine, -0.5f);
    cosine = fma_(rr, cosine, 1.0f);
    const float c = quadrant & 1 ? sine : cosine, s = quadrant & 1 ? cosine : sine;
    return f32x2{quadrant == 1 || quadrant == 2 ? -c : c, quadrant >= 2 ? -s : s};
}

// table[row, pair] from the position of the row on the pair's axis: positions[axis * axis_stride + row].
KERNEL(attn_rope_table, 128)
(const double *freqs, const u32 *axes, const u32 *positions, f32x2 *table, u32 axis_stride, u32 pairs, u32 n) {
    const u32 i = block_x() * 128 + thread_index();
    if (i < n * pairs) {
        const u32 row = i / pairs, pair = i % pairs;
        table[i] = attn_cos_sin((double)positions[axes[pair] * axis_stride + row] * freqs[pair]);
    }
}
EXPORT(attn_rope_table)

DEVICE void attn_store(u16 *p, float x) { *p = attn_narrow(x); }
DEVICE void attn_store(float *p, float x) { *p = x; }

// 32 neighbouring threads take one head of a row: its queries, then its keys, then its values. RMS norm if its bit in `norms` is
// set (1 queries, 2 keys, 4 values), times its weight if there is one; queries and keys turn by the row's angles in
// `table` [n, pairs]. Rows whose sequence is none of the `n_slots` leave no keys and values.
template <class T>
DEVICE void attn_prepare(const float *q, const float *k, const float *v, const float *q_weight, const float *k_weight,
                         const float *v_weight, const f32x2 *table, const u32 *slots, const u32 *positions,
                         const u32 *pages, float *q_out, T *keys, T *values, u32 q_stride, u32 q_head_stride,
                         u32 k_stride, u32 v_stride, u32 norms, u32 pairs, u32 q_heads, u32 kv_heads, u32 k_dim,
                         u32 v_dim, u32 n_slots, u32 max_pages, u32 n_pages, float eps) {
    const u32 row = block_x(), l = thread_index() & 31;
    u32 head = block_y() * 8 + thread_index() / 32, kind = 0;
    if (head >= q_heads) kind = 1, head -= q_heads;
    if (kind == 1 && head >= kv_heads) kind = 2, head -= kv_heads;
    const bool any = kind < 2 || head < kv_heads;
    const float *from = q + (u64)row * q_stride + head * q_head_stride, *weight = q_weight;
    if (kind == 1) from = k + (u64)row * k_stride + head * k_dim, weight = k_weight;
    if (kind == 2) from = v + (u64)row * v_stride + head * v_dim, weight = v_weight;
    const u32 dim = !any ? 0 : kind == 2 ? v_dim : k_dim, turned = kind == 2 ? 0 : 2 * pairs;

    float squares = 0.0f;
    for (u32 i = l; i < dim; i += 32) squares = fma_(from[i], from[i], squares);
    squares = group_sum<32>(squares);
    const float factor = norms >> kind & 1 ? 1.0f / sqrt_(squares / (float)dim + eps) : 1.0f;

    float *query = q_out + ((u64)row * q_heads + head) * k_dim;
    T *cached = nullptr;
    if (kind > 0 && any && slots[row] < n_slots && positions[row] / ATTN_PAGE < max_pages) {
        const u32 position = positions[row];
        const u32 page = pages[(u64)slots[row] * max_pages + position / ATTN_PAGE];
        const u64 place = ((u64)page * kv_heads + head) * ATTN_PAGE + position % ATTN_PAGE;
        if (page < n_pages) cached = kind == 1 ? keys + place * k_dim : values + place * v_dim;
    }
    const f32x2 *angles = table + (u64)row * pairs;
    for (u32 i = l; i < dim; i += 32) {
        float x = from[i] * (weight ? factor * weight[i] : factor);
        if (i < turned) {
            const bool low = i < pairs;
            const u32 pair = low ? i : i - pairs, other = low ? i + pairs : pair;
            const float y = from[other] * (weight ? factor * weight[other] : factor);
            const f32x2 turn = angles[pair];
            x = low ? x * turn.x - y * turn.y : x * turn.x + y * turn.y;
        }
        if (kind == 0)
            query[i] = x;
        else if (cached)
            attn_store(cached + i, x);
    }
}

#define ATTN_PREPARE(name, T)                                                                                            \
    KERNEL(name, 256)                                                                                                    \
    (const float *q, const float *k, const float *v, const float *q_weight, const float *k_weight,                       \
     const float *v_weight, const f32x2 *table, const u32 *slots, const u32 *positions, const u32 *pages, float *q_out,  \
     T *keys, T *values, u32 q_stride, u32 q_head_stride, u32 k_stride, u32 v_stride, u32 norms, u32 pairs, u32 q_heads, \
     u32 kv_heads, u32 k_dim, u32 v_dim, u32 n_slots, u32 max_pages, u32 n_pages, float eps) {                           \
        attn_prepare<T>(q, k, v, q_weight, k_weight, v_weight, table, slots, positions, pages, q_out, keys, values,      \
                        q_stride, q_head_stride, k_stride, v_stride, norms, pairs, q_heads, kv_heads, k_dim, v_dim,      \
                        n_slots, max_pages, n_pages, eps);                                                               \
    }                                                                                                                    \
    EXPORT(name)
ATTN_PREPARE(attn_prepare_f16, u16)
ATTN_PREPARE(attn_prepare_f32, float)

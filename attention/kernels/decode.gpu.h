// Attention of single rows. A row's pages are cut into splits, and each block takes one split of one key/value head for up to G of
// the query heads that share it, so that keys and values are read once. What the splits found is merged by a second kernel.

// Sums of G values over LANES neighbouring lanes: each step halves the lanes that hold a sum and, while there are several, the sums
// a lane holds. Lane l of the group is left with sum l / (LANES / G).
template <u32 G, u32 LANES> DEVICE float attn_spread_sum(float *s) {
    static_assert(G <= LANES && LANES <= 32, "every sum needs a lane");
    UNROLL for (u32 m = LANES / 2, have = G; m > 0; m /= 2) {
        if (have > 1) {
            have /= 2;
            const bool high = lane() & m;
            UNROLL for (u32 i = 0; i < have; i++) {
                const float give = high ? s[i] : s[i + have], keep = high ? s[i + have] : s[i];
                s[i] = keep + shfl_xor(give, m);
            }
        } else {
            s[0] += shfl_xor(s[0], m);
        }
    }
    return s[0];
}

template <u32 G> DEVICE void attn_read(const float *from, float *to) {
    if constexpr (G % 4 == 0) {
        UNROLL for (u32 i = 0; i < G; i += 4) {
            const f32x4 x = *(const f32x4 *)(from + i);
            to[i] = x.x, to[i + 1] = x.y, to[i + 2] = x.z, to[i + 3] = x.w;
        }
    } else {
        UNROLL for (u32 i = 0; i < G; i++) to[i] = from[i];
    }
}

// Grid: kv_heads * ceil(group / G), rows, splits. Heads of up to DIM values. Leaves per row, head and split the weighted sum of values
// in `sums` [rows, q_heads, splits, v_dim], and the greatest score and the sum of weights in `stats` [rows, q_heads, splits].
template <class T, u32 DIM, u32 G>
DEVICE void attn_decode(const float *q, const T *keys, const T *values, const u32 *slots, const u32 *positions,
                        const u32 *ends, const u32 *pages, float *sums, f32x2 *stats, u32 q_heads, u32 kv_heads,
                        u32 k_dim, u32 v_dim, u32 n_slots, u32 max_pages, u32 n_pages, u32 window, u32 splits,
                        float scale) {
    constexpr u32 THREADS = 256, WAVES = THREADS / WAVE;
    // Scores: LANES threads take 8 values each of a key, or of half a key where it is longer than their reach.
    constexpr u32 PARTS = DIM > 256 ? DIM / 256 : 1, LANES = DIM / PARTS / 8, KEYS = THREADS / LANES / PARTS;
    constexpr u32 K_ROUNDS = ATTN_PAGE / KEYS, K_MOST = 16 / sizeof(T), K_AHEAD = K_ROUNDS < K_MOST ? K_ROUNDS : K_MOST;
    // Sums: QUADS threads take 4 values each of a token, TOKENS tokens at once.
    constexpr u32 QUADS = DIM / 4, TOKENS = THREADS / QUADS;
    constexpr u32 V_ROUNDS = ATTN_PAGE / TOKENS, V_AHEAD = V_ROUNDS < 8 ? V_ROUNDS : 8;
    constexpr u32 HEADS_PER_WAVE = (G + WAVES - 1) / WAVES, KEYS_PER_LANE = ATTN_PAGE / WAVE;
    // Two of each in turn, so that a page's scores need not wait for the sums of the page before.
    SHARED(float, all_scores, 2 * PARTS * ATTN_PAGE * G);
    SHARED(float, all_factors, 2 * G);
    SHARED(float, gathered, THREADS * 4 * G);

    const u32 t = thread_index(), row = block_y(), split = block_z();
    const u32 slot = slots[row], position = positions[row];
    if (slot >= n_slots) return;
    const AttnSeen seen = attn_seen(position, ends ? ends[row] : position + 1, window);
    const AttnSplit mine = attn_split(seen, splits, split);
    if (mine.from >= mine.to) return;

    const u32 group = q_heads / kv_heads, blocks = (group + G - 1) / G;
    const u32 kv_head = block_x() / blocks, first_head = kv_head * group + block_x() % blocks * G;
    const u32 heads = min_u32(G, (kv_head + 1) * group - first_head);

    const u32 unit = t / LANES, part = unit % PARTS, k_at = part * 256 + t % LANES * 8;
    const bool k_inside = k_at < k_dim;
    float query[G][8];
    UNROLL for (u32 g = 0; g < G; g++) {
        AttnRaw8<float> raw;
        raw.zero();
        if (g < heads && k_inside) raw.load(q + ((u64)row * q_heads + first_head + g) * k_dim + k_at);
        raw.widen(query[g]);
        UNROLL for (u32 i = 0; i < 8; i++) query[g][i] *= scale;
    }
    const u32 v_token = t / QUADS, v_at = t % QUADS * 4;
    const bool v_inside = v_at < v_dim;
    float sum[G][4], most[HEADS_PER_WAVE], weight[HEADS_PER_WAVE];
    UNROLL for (u32 g = 0; g < G; g++) UNROLL for (u32 i = 0; i < 4; i++) sum[g][i] = 0.0f;
    UNROLL for (u32 i = 0; i < HEADS_PER_WAVE; i++) most[i] = attn_unseen(), weight[i] = 0.0f;

    for (u32 index = mine.from; index < mine.to; index++) {
        float *scores = all_scores + (index & 1) * (PARTS * ATTN_PAGE * G), *factors = all_factors + (index & 1) * G;
        const u32 token0 = index * ATTN_PAGE;
        const u64 place = ((u64)attn_page(pages, max_pages, n_pages, slot, index) * kv_heads + kv_head) * ATTN_PAGE;
        ATTN_BATCHES for (u32 r = 0; r < K_ROUNDS; r += K_AHEAD) {
            AttnRaw8<T> raw[K_AHEAD];
            UNROLL for (u32 i = 0; i < K_AHEAD; i++) {
                raw[i].zero();
                if (k_inside) raw[i].load(keys + (place + (r + i) * KEYS + unit / PARTS) * k_dim + k_at);
            }
            UNROLL for (u32 i = 0; i < K_AHEAD; i++) {
                float x[8], product[G];
                raw[i].widen(x);
                UNROLL for (u32 g = 0; g < G; g++) {
                    product[g] = 0.0f;
                    UNROLL for (u32 j = 0; j < 8; j++) product[g] = fma_(query[g][j], x[j], product[g]);
                }
                const float score = attn_spread_sum<G, LANES>(product);
                constexpr u32 SAME = LANES / G;
                const u32 key = (r + i) * KEYS + unit / PARTS;
                if (t % SAME == 0) scores[(part * ATTN_PAGE + key) * G + t % LANES / SAME] = score;
            }
        }
        // On their way while the weights are made.
        AttnRaw4<T> raw[V_AHEAD];
        UNROLL for (u32 i = 0; i < V_AHEAD; i++) {
            const u32 token = i * TOKENS + v_token;
            raw[i].zero();
            if (v_inside && token0 + token >= seen.first && token0 + token < seen.end)
                raw[i].load(values + (place + token) * v_dim + v_at);
        }
        barrier();

        UNROLL for (u32 h = 0; h < HEADS_PER_WAVE; h++) {
            const u32 g = wave_index() + h * WAVES;
            if (g >= G) continue;
            float s[KEYS_PER_LANE], now = most[h];
            UNROLL for (u32 i = 0; i < KEYS_PER_LANE; i++) {
                const u32 key = lane() + i * WAVE, token = token0 + key;
                s[i] = scores[key * G + g];
                if constexpr (PARTS > 1) s[i] += scores[(ATTN_PAGE + key) * G + g];
                if (token < seen.first || token >= seen.end) s[i] = attn_unseen();
                now = max_(now, s[i]);
            }
            now = wave_max(now);
            const bool none = now == attn_unseen();
            const float factor = none ? 1.0f : exp_(most[h] - now);
            most[h] = now;
            weight[h] *= factor;
            UNROLL for (u32 i = 0; i < KEYS_PER_LANE; i++) {
                const float p = s[i] == attn_unseen() ? 0.0f : exp_(s[i] - now);
                weight[h] += p;
                scores[(lane() + i * WAVE) * G + g] = p;
            }
            if (lane() == 0) factors[g] = factor;
        }
        barrier();

        float factor[G];
        attn_read<G>(factors, factor);
        UNROLL for (u32 g = 0; g < G; g++) UNROLL for (u32 i = 0; i < 4; i++) sum[g][i] *= factor[g];
        ATTN_BATCHES for (u32 r = 0; r < V_ROUNDS; r += V_AHEAD) {
            if (r > 0) {
                UNROLL for (u32 i = 0; i < V_AHEAD; i++) {
                    const u32 token = (r + i) * TOKENS + v_token;
                    raw[i].zero();
                    if (v_inside && token0 + token >= seen.first && token0 + token < seen.end)
                        raw[i].load(values + (place + token) * v_dim + v_at);
                }
            }
            UNROLL for (u32 i = 0; i < V_AHEAD; i++) {
                float x[4], p[G];
                raw[i].widen(x);
                attn_read<G>(scores + ((r + i) * TOKENS + v_token) * G, p);
                UNROLL for (u32 g = 0; g < G; g++)
                    UNROLL for (u32 j = 0; j < 4; j++) sum[g][j] = fma_(p[g], x[j], sum[g][j]);
            }
        }
    }

    UNROLL for (u32 g = 0; g < G; g++)
        *(f32x4 *)(gathered + (v_token * G + g) * DIM + v_at) = f32x4{sum[g][0], sum[g][1], sum[g][2], sum[g][3]};
    UNROLL for (u32 h = 0; h < HEADS_PER_WAVE; h++) {
        const u32 g = wave_index() + h * WAVES;
        const float all = wave_sum(weight[h]);
        if (g < heads && lane() == 0) stats[((u64)row * q_heads + first_head + g) * splits + split] = f32x2{most[h], all};
    }
    barrier();
    for (u32 i = t; i < heads * DIM; i += THREADS) {
        const u32 g = i / DIM, d = i % DIM;
        if (d < v_dim) {
            float all = 0.0f;
            UNROLL for (u32 k = 0; k < TOKENS; k++) all += gathered[(k * G + g) * DIM + d];
            sums[(((u64)row * q_heads + first_head + g) * splits + split) * v_dim + d] = all;
        }
    }
}

// Grid: q_heads, rows. The splits of a head and row become one, times the logistic function of the gate if there is one. Of single
// rows those splits are there that `attn_split` fills; of tiles, `every` one. Rows whose sequence is none of the `n_slots`
// become 0. Codes are asked for only of heads that are whole units.
KERNEL(attn_merge, 256)
(const float *sums, const f32x2 *stats, const u32 *slots, const u32 *positions, const u32 *ends, const float *gate,
 u32 gate_stride, u32 gate_head_stride, u32 q_heads, u32 v_dim, u32 n_slots, u32 window, u32 splits, u32 every,
 float *out, i8 *q, f32x2 *s, u16 *h, float *scale) {
    SHARED(float, weights, 256);
    SHARED(float, scratch, 16);
    SHARED(float, parts, 1024);
    const u32 t = thread_index(), head = block_x(), row = block_y(), position = positions[row];
    const AttnSeen seen = attn_seen(position, ends ? ends[row] : position + 1, window);
    const bool any = slots[row] < n_slots;
    const u32 used = !any ? 0 : every ? splits : attn_splits_used(seen, splits);
    const u64 first = ((u64)row * q_heads + head) * splits;

    const f32x2 stat = t < used ? stats[first + t] : f32x2{attn_unseen(), 0.0f};
    const float most = block_max<256>(stat.x, scratch);
    const float weight = stat.x == attn_unseen() ? 0.0f : exp_(stat.x - most);
    weights[t] = weight;
    const float total = block_sum<256>(weight * stat.y, scratch);

    u32 quads = 16;
    while (quads * 4 < v_dim) quads *= 2;
    const u32 at = t % quads * 4;
    f32x4 sum = {0.0f, 0.0f, 0.0f, 0.0f};
    if (at < v_dim) {
        for (u32 i = t / quads; i < used; i += 256 / quads) {
            const float w = weights[i];
            // A split that saw nothing has left nothing.
            if (w == 0.0f) continue;
            const f32x4 x = *(const f32x4 *)(sums + (first + i) * v_dim + at);
            sum.x = fma_(w, x.x, sum.x);
            sum.y = fma_(w, x.y, sum.y);
            sum.z = fma_(w, x.z, sum.z);
            sum.w = fma_(w, x.w, sum.w);
        }
    }
    *(f32x4 *)(parts + t * 4) = sum;
    barrier();
    for (u32 d0 = 0; d0 < v_dim; d0 += 256) {
        const u32 d = d0 + t;
        float all = 0.0f;
        if (d < v_dim && any) {
            for (u32 k = d; k < 1024; k += quads * 4) all += parts[k];
            all /= total;
            if (gate) all *= sigmoid_(gate[(u64)row * gate_stride + head * gate_head_stride + d]);
        }
        quant_write_unit(QuantOut{out, q, s, nullptr, nullptr}, ((u64)row * q_heads + head) * v_dim + d, all, d < v_dim);
    }
}
EXPORT(attn_merge)

// Rows that attention has left in `x`, in the other forms that products take.
#define ATTN_ROW_MOST 48
KERNEL(attn_forms, 256)(const float *x, u32 cols, float *out, i8 *q, f32x2 *s, u16 *h, float *scale) {
    SHARED(float, scratch, 16);
    float held[ATTN_ROW_MOST];
    UNROLL for (u32 k = 0; k < ATTN_ROW_MOST; k++) {
        const u32 i = k * 256 + thread_index();
        if (i < cols) held[k] = x[(u64)block_x() * cols + i];
    }
    quant_write_row<ATTN_ROW_MOST, 256>(QuantOut{nullptr, q, s, h, scale}, block_x(), cols, held, scratch);
}
EXPORT(attn_forms)

#define ATTN_DECODE(name, T, DIM, G)                                                                                     \
    KERNEL(name, 256)                                                                                                    \
    (const float *q, const T *keys, const T *values, const u32 *slots, const u32 *positions, const u32 *ends,            \
     const u32 *pages, float *sums, f32x2 *stats, u32 q_heads, u32 kv_heads, u32 k_dim, u32 v_dim, u32 n_slots,          \
     u32 max_pages, u32 n_pages, u32 window, u32 splits, float scale) {                                                  \
        attn_decode<T, DIM, G>(q, keys, values, slots, positions, ends, pages, sums, stats, q_heads, kv_heads, k_dim,    \
                               v_dim, n_slots, max_pages, n_pages, window, splits, scale);                               \
    }                                                                                                                    \
    EXPORT(name)
#define ATTN_DECODE_DIM(DIM)                               \
    ATTN_DECODE(attn_decode_f16_##DIM##_2, u16, DIM, 2)    \
    ATTN_DECODE(attn_decode_f16_##DIM##_4, u16, DIM, 4)    \
    ATTN_DECODE(attn_decode_f32_##DIM##_2, float, DIM, 2)  \
    ATTN_DECODE(attn_decode_f32_##DIM##_4, float, DIM, 4)
ATTN_DECODE_DIM(64)
ATTN_DECODE_DIM(128)
ATTN_DECODE_DIM(256)
ATTN_DECODE_DIM(512)
ATTN_DECODE(attn_decode_f16_64_8, u16, 64, 8)
ATTN_DECODE(attn_decode_f16_128_8, u16, 128, 8)
ATTN_DECODE(attn_decode_f16_256_8, u16, 256, 8)
ATTN_DECODE(attn_decode_f32_64_8, float, 64, 8)
ATTN_DECODE(attn_decode_f32_128_8, float, 128, 8)
ATTN_DECODE(attn_decode_f32_256_8, float, 256, 8)

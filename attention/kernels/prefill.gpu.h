// Attention of spans of rows, by matrix products of f16 with sums in f32. A tile is ROWS pairs of a row and a query head of one
// key/value head: all heads of a row before the next row. It goes over the pages that any of its rows sees; of each page, keys
// and then values pass through one buffer, PIECE values of a head at a time, the next piece on its way while one is used. Where tiles
// are too few to fill the device, their pages are cut into splits, which are merged as those of single rows are.

// The piece of keys at `at`: the values 8 * thread .. of [64, PIECE].
template <class T, u32 PIECE, u32 LOADS>
DEVICE void attn_fetch_keys(AttnRaw8<T> *raw, const T *keys, u32 dim, u32 at, u32 from, u32 to) {
    UNROLL for (u32 i = 0; i < LOADS; i++) {
        const u32 unit = thread_index() + i * 256, token = unit / (PIECE / 8), d = at + unit % (PIECE / 8) * 8;
        raw[i].zero();
        if (token >= from && token < to && d < dim) raw[i].load(keys + (u64)token * dim + d);
    }
}
template <class T, u32 PIECE, u32 LOADS> DEVICE void attn_put_keys(const AttnRaw8<T> *raw, u16 *buffer) {
    UNROLL for (u32 i = 0; i < LOADS; i++) {
        const u32 unit = thread_index() + i * 256;
        *(u32x4 *)(buffer + unit / (PIECE / 8) * (PIECE + 8) + unit % (PIECE / 8) * 8) = raw[i].narrow();
    }
}

// The same of values, which products need by token: a thread takes 8 values of two neighbouring tokens and puts each pair in one
// word. Lanes alternate between two neighbours of 8 values, so that memory is read in whole sectors, and go along the
// tokens, so that they write to different banks.
template <class T, u32 LOADS>
DEVICE void attn_fetch_values(AttnRaw8<T> *raw, const T *values, u32 dim, u32 at, u32 from, u32 to) {
    UNROLL for (u32 i = 0; i < LOADS; i++) {
        const u32 unit = thread_index() + i / 2 * 256, token = (unit >> 1 & 31) * 2 + i % 2;
        const u32 d = at + ((unit & 1) | unit >> 6 << 1) * 8;
        raw[i].zero();
        if (token >= from && token < to && d < dim) raw[i].load(values + (u64)token * dim + d);
    }
}
template <class T, u32 LOADS> DEVICE void attn_put_values(const AttnRaw8<T> *raw, u16 *buffer) {
    UNROLL for (u32 i = 0; i < LOADS; i += 2) {
        const u32 unit = thread_index() + i / 2 * 256, pair = unit >> 1 & 31, d = ((unit & 1) | unit >> 6 << 1) * 8;
        const u32x4 a = raw[i].narrow(), b = raw[i + 1].narrow();
        u32 *to = (u32 *)buffer + d * 36 + pair;
        to[0 * 36] = (a.x & 0xffff) | b.x << 16, to[1 * 36] = a.x >> 16 | (b.x & 0xffff0000u);
        to[2 * 36] = (a.y & 0xffff) | b.y << 16, to[3 * 36] = a.y >> 16 | (b.y & 0xffff0000u);
        to[4 * 36] = (a.z & 0xffff) | b.z << 16, to[5 * 36] = a.z >> 16 | (b.z & 0xffff0000u);
        to[6 * 36] = (a.w & 0xffff) | b.w << 16, to[7 * 36] = a.w >> 16 | (b.w & 0xffff0000u);
    }
}

// Grid: tiles (at least as many as the spans have), kv_heads, splits. One split leaves the rows in `out`; several leave sums and stats
// like `attn_decode`, stats of every split.
template <class T, u32 DIM, u32 ROWS>
DEVICE void attn_prefill(const float *q, const T *keys, const T *values, const u32x4 *spans, const u32 *ends,
                         const u32 *pages, const float *gate, float *out, float *sums, f32x2 *stats, u32 n_spans, u32 n_rows, u32 gate_stride,
                         u32 gate_head_stride, u32 q_heads, u32 kv_heads, u32 k_dim, u32 v_dim, u32 n_slots,
                         u32 max_pages, u32 n_pages, u32 window, u32 splits, float scale) {
    constexpr u32 THREADS = 256, WAVES = THREADS / WAVE, PIECE = DIM < 128 ? DIM : 128, PIECES = DIM / PIECE;
    constexpr u32 LOADS = ATTN_PAGE * PIECE / 8 / THREADS, V_STRIDE = ATTN_PAGE + 8;
    constexpr u32 Q_STRIDE = DIM + 8, K_STRIDE = PIECE + 8, S_STRIDE = ATTN_PAGE + 4, P_STRIDE = ATTN_PAGE + 8;
    constexpr u32 BLOCKS = ROWS / 16;
    // Waves share the 16 x 16 tiles of scores, and where there are more waves than tiles, the values of a piece.
    constexpr u32 S_TILES = BLOCKS * (ATTN_PAGE / 16), S_PARTS = WAVES > S_TILES ? WAVES / S_TILES : 1;
    constexpr u32 S_PER_WAVE = S_TILES * S_PARTS / WAVES, S_STEPS = PIECE / 16 / S_PARTS;
    constexpr u32 O_PER_WAVE = BLOCKS * (PIECE / 16) / WAVES;
    static_assert(S_PER_WAVE > 0 && O_PER_WAVE > 0 && S_STEPS > 0 && LOADS % 2 == 0, "a shape that fills the waves");
    static_assert(WAVES % BLOCKS == 0, "the output tiles of a wave lie in the same rows");
    // Softmax: THREADS / ROWS threads take a row, OWN scores each.
    constexpr u32 SHARE = THREADS / ROWS, OWN = ATTN_PAGE / SHARE;
    SHARED(u16, queries, ROWS * Q_STRIDE);
    SHARED(u16, buffer, (PIECE * V_STRIDE > ATTN_PAGE * K_STRIDE ? PIECE * V_STRIDE : ATTN_PAGE * K_STRIDE));
    SHARED(float, scores, S_PARTS * ROWS * S_STRIDE);
    SHARED(u16, weights, ROWS * P_STRIDE);
    SHARED(float, factors, ROWS);

    const u32 t = thread_index(), kv_head = block_y(), group = q_heads / kv_heads, per_tile = ROWS / group;
    u32 tile = block_x(), tiles = 0, s = 0;
    u32x4 span = {0, 0, 0, 0};
    for (; s < n_spans; s++) {
        span = spans[s];
        tiles = (span.z + per_tile - 1) / per_tile;
        if (tile < tiles) break;
        tile -= tiles;
    }
    if (s == n_spans || span.x >= n_slots || span.y >= n_rows || span.z > n_rows - span.y) return;
    // The last tiles see the most: they start first.
    tile = tiles - 1 - tile;
    const u32 slot = span.x, row0 = span.y + tile * per_tile, position0 = span.w + tile * per_tile;
    const u32 rows = min_u32(per_tile, span.z - tile * per_tile), pairs = rows * group;
    u32 end = position0 + rows;
    if (ends)
        for (u32 i = 0; i < rows; i++) end = max_u32(end, ends[row0 + i]);
    const u32 first = attn_seen(position0, 0, window).first;
    const u32 first_page = first / ATTN_PAGE, last_page = (end + ATTN_PAGE - 1) / ATTN_PAGE;
    const u32 each = (last_page - first_page + splits - 1) / splits, split = block_z();
    const u32 from_page = first_page + split * each, to_page = min_u32(from_page + each, last_page);
    if (from_page >= to_page) {
        for (u32 r = t; r < pairs; r += THREADS)
            stats[((u64)(row0 + r / group) * q_heads + kv_head * group + r % group) * splits + split] =
                f32x2{attn_unseen(), 0.0f};
        return;
    }

    for (u32 unit = t; unit < ROWS * DIM / 8; unit += THREADS) {
        const u32 r = unit / (DIM / 8), d = unit % (DIM / 8) * 8;
        AttnRaw8<float> raw;
        raw.zero();
        if (r < pairs && d < k_dim)
            raw.load(q + ((u64)(row0 + r / group) * q_heads + kv_head * group + r % group) * k_dim + d);
        raw.a = f32x4{raw.a.x * scale, raw.a.y * scale, raw.a.z * scale, raw.a.w * scale};
        raw.b = f32x4{raw.b.x * scale, raw.b.y * scale, raw.b.z * scale, raw.b.w * scale};
        *(u32x4 *)(queries + r * Q_STRIDE + d) = raw.narrow();
    }

    // The row of this thread's softmax; pairs beyond the tile see what its last row sees, and are not kept.
    const u32 my_pair = t / SHARE, my_row = min_u32(my_pair, pairs - 1) / group;
    const AttnSeen seen =
        attn_seen(position0 + my_row, ends ? ends[row0 + my_row] : position0 + my_row + 1, window);
    float most = attn_unseen(), weight = 0.0f;
    MmaC sum[PIECES][O_PER_WAVE];
    UNROLL for (u32 c = 0; c < PIECES; c++) UNROLL for (u32 i = 0; i < O_PER_WAVE; i++) sum[c][i] = mma_zero();
    const u32 wave = wave_index(), o_block = wave % BLOCKS, o_column = wave / BLOCKS;

    u32 index = from_page;
    u64 place = ((u64)attn_page(pages, max_pages, n_pages, slot, index) * kv_heads + kv_head) * ATTN_PAGE;
    AttnRaw8<T> raw[LOADS];
    // Tokens `from .. to` of the page are seen by a row of the tile: others may hold anything.
    u32 from = index == first_page ? first % ATTN_PAGE : 0, to = min_u32(end - index * ATTN_PAGE, ATTN_PAGE);
    attn_fetch_keys<T, PIECE, LOADS>(raw, keys + place * k_dim, k_dim, 0, from, to);
    for (; index < to_page; index++) {
        const u32 token0 = index * ATTN_PAGE;
        MmaC score[S_PER_WAVE];
        UNROLL for (u32 i = 0; i < S_PER_WAVE; i++) score[i] = mma_zero();
        UNROLL for (u32 c = 0; c < PIECES; c++) {
            if (c > 0) barrier();
            attn_put_keys<T, PIECE, LOADS>(raw, buffer);
            barrier();
            if (c + 1 < PIECES)
                attn_fetch_keys<T, PIECE, LOADS>(raw, keys + place * k_dim, k_dim, (c + 1) * PIECE, from, to);
            else
                attn_fetch_values<T, LOADS>(raw, values + place * v_dim, v_dim, 0, from, to);
            UNROLL for (u32 i = 0; i < S_PER_WAVE; i++) {
                const u32 id = wave + i * WAVES, block = id % BLOCKS, column = id / BLOCKS % (ATTN_PAGE / 16);
                const u32 step0 = id / S_TILES * S_STEPS;
                ATTN_STEPS for (u32 k = 0; k < S_STEPS; k++) {
                    const MmaA a = mma_load_a(queries + block * 16 * Q_STRIDE + c * PIECE + (step0 + k) * 16, Q_STRIDE);
                    const MmaB b = mma_load_b(buffer + column * 16 * K_STRIDE + (step0 + k) * 16, K_STRIDE);
                    mma(score[i], a, b);
                }
            }
        }
        UNROLL for (u32 i = 0; i < S_PER_WAVE; i++) {
            const u32 id = wave + i * WAVES, block = id % BLOCKS, column = id / BLOCKS % (ATTN_PAGE / 16);
            float *tile_scores = scores + id / S_TILES * (ROWS * S_STRIDE) + block * 16 * S_STRIDE + column * 16;
            UNROLL for (u32 e = 0; e < MMA_LANE; e++) tile_scores[mma_row(e) * S_STRIDE + mma_col(e)] = score[i].v[e];
        }
        barrier();
        attn_put_values<T, LOADS>(raw, buffer);
        {
            const u32 own0 = t % SHARE * OWN;
            float x[OWN], now = most;
            UNROLL for (u32 i = 0; i < OWN; i++) {
                const u32 token = token0 + own0 + i;
                x[i] = scores[my_pair * S_STRIDE + own0 + i];
                if constexpr (S_PARTS > 1) x[i] += scores[(ROWS + my_pair) * S_STRIDE + own0 + i];
                if (token < seen.first || token >= seen.end) x[i] = attn_unseen();
                now = max_(now, x[i]);
            }
            now = group_max<SHARE>(now);
            const float factor = now == attn_unseen() ? 1.0f : exp_(most - now);
            most = now;
            weight *= factor;
            UNROLL for (u32 i = 0; i < OWN; i += 2) {
                // The sum is of what the product sees.
                const float low = x[i] == attn_unseen() ? 0.0f : exp_(x[i] - now);
                const float high = x[i + 1] == attn_unseen() ? 0.0f : exp_(x[i + 1] - now);
                const u16 a = f2h(low), b = f2h(high);
                weight += h2f(a) + h2f(b);
                *(u32 *)(weights + my_pair * P_STRIDE + own0 + i) = a | (u32)b << 16;
            }
            if (t % SHARE == 0) factors[my_pair] = factor;
        }
        barrier();
        float factor[MMA_LANE];
        UNROLL for (u32 e = 0; e < MMA_LANE; e++) factor[e] = factors[o_block * 16 + mma_row(e)];
        const u32 next = index + 1;
        u64 next_place = place;
        UNROLL for (u32 c = 0; c < PIECES; c++) {
            if (c > 0) {
                attn_put_values<T, LOADS>(raw, buffer);
                barrier();
            }
            if (c + 1 < PIECES) {
                attn_fetch_values<T, LOADS>(raw, values + place * v_dim, v_dim, (c + 1) * PIECE, from, to);
            } else if (next < to_page) {
                next_place =
                    ((u64)attn_page(pages, max_pages, n_pages, slot, next) * kv_heads + kv_head) * ATTN_PAGE;
                from = 0;
                to = min_u32(end - next * ATTN_PAGE, ATTN_PAGE);
                attn_fetch_keys<T, PIECE, LOADS>(raw, keys + next_place * k_dim, k_dim, 0, from, to);
            }
            UNROLL for (u32 i = 0; i < O_PER_WAVE; i++)
                UNROLL for (u32 e = 0; e < MMA_LANE; e++) sum[c][i].v[e] *= factor[e];
            ATTN_STEPS for (u32 k = 0; k < ATTN_PAGE / 16; k++) {
                const MmaA a = mma_load_a(weights + o_block * 16 * P_STRIDE + k * 16, P_STRIDE);
                UNROLL for (u32 i = 0; i < O_PER_WAVE; i++) {
                    const u32 column = o_column + i * (WAVES / BLOCKS);
                    mma(sum[c][i], a, mma_load_b(buffer + column * 16 * V_STRIDE + k * 16, V_STRIDE));
                }
            }
            barrier();
        }
        place = next_place;
    }

    weight = group_sum<SHARE>(weight);
    if (t % SHARE == 0) {
        factors[my_pair] = splits == 1 ? 1.0f / weight : 1.0f;
        if (splits > 1 && my_pair < pairs)
            stats[((u64)(row0 + my_row) * q_heads + kv_head * group + my_pair % group) * splits + split] =
                f32x2{most, weight};
    }
    barrier();
    UNROLL for (u32 e = 0; e < MMA_LANE; e++) {
        const u32 r = o_block * 16 + mma_row(e), row = row0 + r / group, head = kv_head * group + r % group;
        const float factor = factors[r];
        if (r >= pairs) continue;
        const u64 place = (u64)row * q_heads + head;
        float *to = splits == 1 ? out + place * v_dim : sums + (place * splits + split) * v_dim;
        const float *opening = gate && splits == 1 ? gate + (u64)row * gate_stride + head * gate_head_stride : nullptr;
        UNROLL for (u32 c = 0; c < PIECES; c++) UNROLL for (u32 i = 0; i < O_PER_WAVE; i++) {
            const u32 d = c * PIECE + (o_column + i * (WAVES / BLOCKS)) * 16 + mma_col(e);
            if (d >= v_dim) continue;
            const float x = sum[c][i].v[e] * factor;
            to[d] = opening ? x * sigmoid_(opening[d]) : x;
        }
    }
}

#define ATTN_PREFILL(name, T, DIM, ROWS)                                                                                 \
    KERNEL(name, 256)                                                                                                    \
    (const float *q, const T *keys, const T *values, const u32x4 *spans, const u32 *ends, const u32 *pages,              \
     const float *gate, float *out, float *sums, f32x2 *stats, u32 n_spans, u32 n_rows, u32 gate_stride,                 \
     u32 gate_head_stride, u32 q_heads, u32 kv_heads, u32 k_dim, u32 v_dim, u32 n_slots, u32 max_pages, u32 n_pages,     \
     u32 window, u32 splits, float scale) {                                                                              \
        attn_prefill<T, DIM, ROWS>(q, keys, values, spans, ends, pages, gate, out, sums, stats, n_spans, n_rows,         \
                                   gate_stride, gate_head_stride, q_heads, kv_heads, k_dim, v_dim, n_slots, max_pages,   \
                                   n_pages, window, splits, scale);                                                      \
    }                                                                                                                    \
    EXPORT(name)
ATTN_PREFILL(attn_prefill_f16_64, u16, 64, 32)
ATTN_PREFILL(attn_prefill_f16_128, u16, 128, 32)
ATTN_PREFILL(attn_prefill_f16_256, u16, 256, 32)
ATTN_PREFILL(attn_prefill_f16_512, u16, 512, 16)
ATTN_PREFILL(attn_prefill_f32_64, float, 64, 32)
ATTN_PREFILL(attn_prefill_f32_128, float, 128, 32)
ATTN_PREFILL(attn_prefill_f32_256, float, 256, 32)
ATTN_PREFILL(attn_prefill_f32_512, float, 512, 16)

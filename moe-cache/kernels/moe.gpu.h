// Mixture-of-Experts: routing, and the feed-forward of the chosen experts.

// ----------------------------------------------------------------------------------------------------------- Routing
#define MOE_MOST_EXPERTS 512

// A wave for every token: the `k` largest logits, best first, the lower number of equals, and their softmax weights over the
// chosen (`over_all` 0) or over all. A logit that is NaN or infinite makes the token's weights NaN.
KERNEL(moe_route, 64)
(const float *logits, u32 n, u32 experts, u32 k, u32 over_all, const float *expert_scale, u32 *ids, float *weights) {
    constexpr u32 MINE = MOE_MOST_EXPERTS / WAVE;
    const u32 token = block_x() * (64 / WAVE) + wave_index();
    const bool there = token < n;
    const float *row = logits + (u64)(there ? token : 0) * experts;
    const float least = from_bits(0xff800000u);
    float held[MINE];
    float odd = 0.0f;
    UNROLL for (u32 j = 0; j < MINE; j++) {
        const u32 e = j * WAVE + lane();
        held[j] = e < experts ? row[e] : least;
        if (!(held[j] < from_bits(0x7f800000u))) odd = 1.0f, held[j] = least;
    }
    u32 taken = 0;
    float most = 0.0f, sum = 0.0f, chosen = 0.0f;
    u32 chosen_id = 0;
    for (u32 rank = 0; rank < k; rank++) {
        // The lane's best that is not taken; bit j of `taken` is its j-th logit.
        float best = least;
        u32 id = 0xffffffffu;
        UNROLL for (u32 j = 0; j < MINE; j++) {
            const u32 e = j * WAVE + lane();
            const bool open = e < experts && !(taken >> j & 1);
            if (open && (id == 0xffffffffu || held[j] > best)) best = held[j], id = e;
        }
        const float top = wave_max(best);
        u32 first = id != 0xffffffffu && best == top ? id : 0xffffffffu;
        for (u32 m = WAVE / 2; m > 0; m >>= 1) first = min_u32(first, shfl_xor(first, m));
        if (first % WAVE == lane()) taken |= 1u << (first / WAVE);
        if (rank == 0) most = top;
        const float weight = exp_(top - most);
        sum += weight;
        if (lane() == rank) chosen = weight, chosen_id = first;
    }
    if (over_all) {
        float all = 0.0f;
        UNROLL for (u32 j = 0; j < MINE; j++) all += j * WAVE + lane() < experts ? exp_(held[j] - most) : 0.0f;
        sum = wave_sum(all);
    }
    const bool bad = wave_max(odd) > 0.0f || most == least;
    if (there && lane() < k) {
        const u32 at = token * k + lane();
        ids[at] = chosen_id;
        const float scale = expert_scale ? expert_scale[chosen_id] : 1.0f;
        weights[at] = bad ? from_bits(0x7fc00000u) : chosen / sum * scale;
    }
}
EXPORT(moe_route)

// ------------------------------------------------------------------------------------------------------- Few tokens
// A matrix of every expert: `rows` rows of one expert to the next, those of this role from `first`.
struct MoeBank {
    const u8 *weight;
    u32 type, rows, first;
};

template <u32 TYPE>
DEVICE void moe_dot(const MoeBank &bank, u32 slot, u32 row, u32 cols, QuantShare share, const i8 *q, const f32x2 *s,
                    const float *x, float *sum) {
    const u8 *at = bank.weight + ((u64)slot * bank.rows + bank.first + row) * quant_stride(TYPE, cols);
    quant_row_sums<TYPE, 1>(at, cols, share, q, s, x, 1, sum);
}

// 32 numbers of the hidden row of one route: activation(gate) * up, quantised.
KERNEL(moe_up, 1024)
(const u8 *gate, u32 gate_type, u32 gate_rows, const u8 *up, u32 up_type, u32 up_rows, u32 up_first, const u32 *slots,
 const u32 *ids, u32 k, u32 cols, u32 ff, u32 gelu, const i8 *q, const f32x2 *s, const float *x, float *hidden, i8 *hidden_q,
 f32x2 *hidden_s) {
    SHARED(float, results, 64);
    const u32 route = block_y(), token = route / k, id = ids[route], slot = slots ? slots[id] : id;
    q += (u64)token * cols, s += (u64)token * (cols / 32), x += (u64)token * cols;
    const MoeBank gates = {gate, gate_type, gate_rows, 0}, ups = {up, up_type, up_rows, up_first};
    // 32 lanes a row, all rows side by side: a block or two fill a multiprocessor.
    const QuantShare share = {thread_index() % 32, 32};
    const u32 r = thread_index() / 32, row = block_x() * 32 + r;
    float g = 0.0f, u = 0.0f;
    QUANT_SWITCH(gate_type, moe_dot, gates, slot, row, cols, share, q, s, x, &g)
    QUANT_SWITCH(up_type, moe_dot, ups, slot, row, cols, share, q, s, x, &u)
    g = group_sum<32>(g), u = group_sum<32>(u);
    if (thread_index() % 32 == 0) results[r] = g, results[32 + r] = u;
    barrier();
    if (wave_index() == 0) {
        const bool there = lane() < 32;
        const u32 i = lane() % 32;
        const float gated = results[i], v = (gelu ? gelu_(gated) : silu_(gated)) * results[32 + i];
        const QuantOut out = {hidden, hidden_q, hidden_s, nullptr, nullptr};
        quant_write_unit(out, (u64)route * ff + block_x() * 32 + i, there ? v : 0.0f, there);
    }
}
EXPORT(moe_up)

// What the lanes of a wave find of a row of one token: the weighted sum over its routes.
template <u32 TYPE>
DEVICE void moe_down_row(const MoeBank &bank, const u32 *slots, const u32 *ids, const float *weights, u32 first, u32 k,
                         u32 row, u32 ff, u32 lanes, const float *hidden, const i8 *hidden_q, const f32x2 *hidden_s,
                         float *sum) {
    const QuantShare share = {lane() % lanes, lanes};
    const u32 nb = ff / 32, groups = WAVE / lanes;
    if (!quant_is_float(TYPE) && nb <= lanes) {
        // A lane has one unit of a row: those of four routes are under way together.
        const bool mine = share.part < nb;
        for (u32 start = lane() / lanes; start < k; start += 4 * groups) {
            QuantRaw<TYPE> raw[4];
            UNROLL for (u32 c = 0; c < 4; c++) {
                const u32 route = first + min_u32(start + c * groups, k - 1), id = ids[route];
                const u64 at = (u64)(slots ? slots[id] : id) * bank.rows + bank.first + row;
                raw[c] = quant_load<TYPE>(bank.weight + at * quant_stride(TYPE, ff), nb, mine ? share.part : 0);
            }
            UNROLL for (u32 c = 0; c < 4; c++) {
                const u32 j = start + c * groups;
                if (mine && j < k) {
                    const u32 route = first + j;
                    const QuantActs acts =
                        quant_load_acts(hidden_q + (u64)route * ff, hidden_s + (u64)route * nb, share.part);
                    *sum = fma_(weights[route], quant_dot<TYPE>(quant_unpack<TYPE>(raw[c]), acts), *sum);
                }
            }
        }
        return;
    }
    for (u32 j = lane() / lanes; j < k; j += groups) {
        const u32 route = first + j, id = ids[route], slot = slots ? slots[id] : id;
        float one = 0.0f;
        moe_dot<TYPE>(bank, slot, row, ff, share, hidden_q + (u64)route * ff, hidden_s + (u64)route * (ff / 32),
                      hidden + (u64)route * ff, &one);
        *sum = fma_(weights[route], one, *sum);
    }
}

// A row of the result of one token: the weighted sum over its routes. `lanes` lanes share a route's row.
KERNEL(moe_down, 256)
(const u8 *down, u32 type, u32 rows, const u32 *slots, const u32 *ids, const float *weights, u32 k, u32 ff, u32 lanes,
 const float *hidden, const i8 *hidden_q, const f32x2 *hidden_s, u32 add, float *out) {
    const u32 row = block_x() * (256 / WAVE) + wave_index(), token = block_y();
    const MoeBank bank = {down, type, rows, 0};
    float sum = 0.0f;
    if (row < rows)
        QUANT_SWITCH(type, moe_down_row, bank, slots, ids, weights, token * k, k, row, ff, lanes, hidden, hidden_q, hidden_s,
                     &sum)
    sum = wave_sum(sum);
    if (row < rows && lane() == 0) {
        float *to = out + (u64)token * rows + row;
        *to = add ? *to + sum : sum;
    }
}
EXPORT(moe_down)

// ------------------------------------------------------------------------------------------------------ Many tokens
// Routes of a tile: those at `first` to `first + count` in the list sorted by expert.
struct MoeTile {
    u32 expert, first, count, unused;
};

// Sorts routes by expert and cuts the list in tiles of `width`. One block. The order within an expert is open: no result
// depends on it.
KERNEL(moe_group, 256)
(const u32 *ids, u32 routes, u32 experts, u32 width, u32 *sorted, MoeTile *tiles, u32 most_tiles) {
    SHARED(u32, counts, MOE_MOST_EXPERTS);
    SHARED(u32, starts, MOE_MOST_EXPERTS);
    SHARED(u32, total, 1);
    const u32 t = thread_index();
    for (u32 e = t; e < experts; e += 256) counts[e] = 0;
    barrier();
    for (u32 i = t; i < routes; i += 256) atomic_add(counts + ids[i], 1u);
    barrier();
    if (t == 0) {
        u32 start = 0, tile = 0;
        for (u32 e = 0; e < experts; e++) {
            starts[e] = start;
            for (u32 at = 0; at < counts[e]; at += width)
                tiles[tile++] = MoeTile{e, start + at, min_u32(width, counts[e] - at), 0};
            start += counts[e];
        }
        total[0] = tile;
    }
    barrier();
    for (u32 tile = total[0] + t; tile < most_tiles; tile += 256) tiles[tile] = MoeTile{0, 0, 0, 0};
    for (u32 i = t; i < routes; i += 256) sorted[atomic_add(starts + ids[i], 1u)] = i;
}
EXPORT(moe_group)

// Rows of activations of a tile: route by route, or the token of every route where `per` routes have one.
struct MoeSide {
    const u16 *h;
    const float *scale;
    float *results;
    const u32 *sorted;
    u32 count, per, cols, rows;
    DEVICE const u16 *row(u32 i) const { return i < count ? h + (u64)(sorted[i] / per) * cols : nullptr; }
    DEVICE u32 place(u32 i) const { return i < count ? sorted[i] : QUANT_TILE_NO_PLACE; }
    DEVICE float factor(u32 i) const { return i < count ? scale[sorted[i] / per] : 0.0f; }
    DEVICE float *out() const { return results; }
    DEVICE bool add() const { return false; }
};

#define MOE_TILES(name, TN)                                                                                            \
    KERNEL(name, QUANT_TILE_THREADS)                                                                                   \
    (const u8 *weight, u32 type, u32 expert_rows, u32 first_row, u32 rows, u32 cols, const u32 *slots,                 \
     const MoeTile *tiles, const u32 *sorted, const u16 *h, const float *scale, u32 per, float *out) {                 \
        SHARED(u16, tile_a, QUANT_TILE_ROWS *QUANT_TILE_STRIDE);                                                       \
        SHARED(u16, tile_b, TN *QUANT_TILE_STRIDE);                                                                    \
        const MoeTile tile = tiles[block_y()];                                                                         \
        if (tile.count == 0) return;                                                                                   \
        const u32 slot = slots ? slots[tile.expert] : tile.expert, first = block_x() * QUANT_TILE_ROWS;                \
        const MoeSide side = {h, scale, out, sorted + tile.first, tile.count, per, cols, rows};                        \
        weight += ((u64)slot * expert_rows + first_row) * moe_stride(type, cols);                                      \
        switch (type) {                                                                                                \
        case QUANT_F32: quant_tile<QUANT_F32, TN>(weight, first, rows, cols, side, tile_a, tile_b); break;             \
        case QUANT_F16: quant_tile<QUANT_F16, TN>(weight, first, rows, cols, side, tile_a, tile_b); break;             \
        case QUANT_BF16: quant_tile<QUANT_BF16, TN>(weight, first, rows, cols, side, tile_a, tile_b); break;           \
        case QUANT_Q4_0: quant_tile<QUANT_Q4_0, TN>(weight, first, rows, cols, side, tile_a, tile_b); break;           \
        case QUANT_Q4_1: quant_tile<QUANT_Q4_1, TN>(weight, first, rows, cols, side, tile_a, tile_b); break;           \
        case QUANT_Q5_0: quant_tile<QUANT_Q5_0, TN>(weight, first, rows, cols, side, tile_a, tile_b); break;           \
        case QUANT_Q5_1: quant_tile<QUANT_Q5_1, TN>(weight, first, rows, cols, side, tile_a, tile_b); break;           \
        case QUANT_Q8_0: quant_tile<QUANT_Q8_0, TN>(weight, first, rows, cols, side, tile_a, tile_b); break;           \
        case QUANT_Q4_K: quant_tile<QUANT_Q4_K, TN>(weight, first, rows, cols, side, tile_a, tile_b); break;           \
        case QUANT_Q5_K: quant_tile<QUANT_Q5_K, TN>(weight, first, rows, cols, side, tile_a, tile_b); break;           \
        case QUANT_Q6_K: quant_tile<QUANT_Q6_K, TN>(weight, first, rows, cols, side, tile_a, tile_b); break;           \
        }                                                                                                              \
    }                                                                                                                  \
    EXPORT(name)

DEVICE u32 moe_stride(u32 type, u32 cols) {
    switch (type) {
    case QUANT_F32: return quant_stride(QUANT_F32, cols);
    case QUANT_Q4_0: return quant_stride(QUANT_Q4_0, cols);
    case QUANT_Q4_1: return quant_stride(QUANT_Q4_1, cols);
    case QUANT_Q5_0: return quant_stride(QUANT_Q5_0, cols);
    case QUANT_Q5_1: return quant_stride(QUANT_Q5_1, cols);
    case QUANT_Q8_0: return quant_stride(QUANT_Q8_0, cols);
    case QUANT_Q4_K: return quant_stride(QUANT_Q4_K, cols);
    case QUANT_Q5_K: return quant_stride(QUANT_Q5_K, cols);
    case QUANT_Q6_K: return quant_stride(QUANT_Q6_K, cols);
    default: return quant_stride(QUANT_F16, cols);
    }
}
MOE_TILES(moe_tiles_narrow, 32)
MOE_TILES(moe_tiles_wide, 64)

// The weighted sum of the routes of every token.
KERNEL(moe_reduce, 256)(const float *results, const float *weights, u32 n, u32 k, u32 cols, u32 add, float *out) {
    const u64 i = (u64)block_x() * 256 + thread_index();
    if (i < (u64)n * cols) {
        const u64 token = i / cols, col = i % cols;
        float sum = 0.0f;
        for (u32 j = 0; j < k; j++) sum = fma_(weights[token * k + j], results[(token * k + j) * cols + col], sum);
        out[i] = add ? out[i] + sum : sum;
    }
}
EXPORT(moe_reduce)

// The delta rule for chunks of 64 rows, on the matrix units. In the notation of the crate's reference, with decays as running
// products (of differences of sums nothing is left after a strong decay), and without U and W:
//
//   V' = T diag(beta) (V - diag(exp G) K S)      O = diag(exp G) Q S + P V'      S <- exp(G_C) S + K^T diag(exp(G_C - G)) V'
//
// gdn_chunk makes T diag(beta), T = (I + A)^-1, and P = Q K^T . Gamma of all chunks side by side; gdn_scan then goes over the
// chunks of a span with nothing but products of 64 x 64 tiles. The state, the decays and the inverse are f32. Factors of
// products are sums of two f16 numbers, which keep 22 bits of them for three products.

// Halves from row to row of a tile in shared memory: rows 16-byte aligned and in different banks.
#define GDN_STRIDE 72
// Halves of one row of a tile of T or P in memory: 64 upper parts, then 64 lower ones.
#define GDN_PAIR 128

// Numbers up to 1 - keys, queries, T diag(beta), P - are split after a multiplication by this, for small lower parts to be normal.
#define GDN_UNIT 256.0f

struct GdnHalves {
    u16 high, low;
};
DEVICE GdnHalves gdn_split(float x) {
    const u16 high = f2h(x);
    return GdnHalves{high, f2h(x - h2f(high))};
}

// Fragments of AMD are twice as large, and those of several steps at once do not fit into registers.
#if GPU_AMD
#define GDN_STEPS ROLLED
#else
#define GDN_STEPS UNROLL
#endif

// sum += A B over `steps` times 16 of k, for split factors.
DEVICE void gdn_product(MmaC &sum, const u16 *a_high, const u16 *a_low, u32 a_stride, const u16 *b_high, const u16 *b_low,
                        u32 b_stride, u32 steps) {
    GDN_STEPS for (u32 i = 0; i < steps; i++) {
        const MmaA ah = mma_load_a(a_high + 16 * i, a_stride), al = mma_load_a(a_low + 16 * i, a_stride);
        const MmaB bh = mma_load_b(b_high + 16 * i, b_stride), bl = mma_load_b(b_low + 16 * i, b_stride);
        mma(sum, al, bh);
        mma(sum, ah, bl);
        mma(sum, ah, bh);
    }
}

// Rows of a chunk; none where there is no chunk.
struct GdnRows {
    u32 first, count;
};

// The chunk at `place` among those of all spans of at least `from` rows.
DEVICE GdnRows gdn_chunk_at(const GdnSpan *spans, u32 n_spans, u32 from, u32 place) {
    for (u32 i = 0; i < n_spans; i++) {
        const u32 rows = spans[i].rows;
        if (rows < from) continue;
        const u32 chunks = (rows + GDN_CHUNK - 1) / GDN_CHUNK;
        if (place < chunks)
            return GdnRows{spans[i].first + place * GDN_CHUNK, min_u32(GDN_CHUNK, rows - place * GDN_CHUNK)};
        place -= chunks;
    }
    return GdnRows{0, 0};
}

// T = (I + A)^-1 for the part of `a` below the diagonal, both 64 x 65 in shared memory, by 256 threads: blocks of 16 by
// substitution, then pairs of blocks twice, T21 = -T22 A21 T11. What is above the diagonal of `t` is garbage.
#define GDN_WIDE (GDN_CHUNK + 1)
template <u32 SIZE> DEVICE void gdn_join(const float *a, float *t) {
    // All pairs of blocks of SIZE; A21 T11 goes above the diagonal.
    const u32 outputs = GDN_CHUNK / 2 * SIZE;
    for (u32 o = thread_index(); o < outputs; o += 256) {
        const u32 pair = o / (SIZE * SIZE) * 2 * SIZE, i = o / SIZE % SIZE, j = o % SIZE;
        float sum = 0.0f;
        for (u32 k = j; k < SIZE; k++)
            sum = fma_(a[(pair + SIZE + i) * GDN_WIDE + pair + k], t[(pair + k) * GDN_WIDE + pair + j], sum);
        t[(pair + i) * GDN_WIDE + pair + SIZE + j] = sum;
    }
    barrier();
    for (u32 o = thread_index(); o < outputs; o += 256) {
        const u32 pair = o / (SIZE * SIZE) * 2 * SIZE, i = o / SIZE % SIZE, j = o % SIZE;
        float sum = 0.0f;
        for (u32 k = 0; k <= i; k++)
            sum = fma_(t[(pair + SIZE + i) * GDN_WIDE + pair + SIZE + k], t[(pair + k) * GDN_WIDE + pair + SIZE + j], sum);
        t[(pair + SIZE + i) * GDN_WIDE + pair + j] = -sum;
    }
    barrier();
}
DEVICE void gdn_invert(const float *a, float *t) {
    if (thread_index() < GDN_CHUNK) {
        const u32 j = thread_index() % 16, at = thread_index() - j;
        float *column = t + at * GDN_WIDE + at + j;
        ROLLED for (u32 i = 0; i < 16; i++) {
            float sum = i == j ? 1.0f : 0.0f;
            for (u32 k = j; k < i; k++) sum = fma_(-a[(at + i) * GDN_WIDE + at + k], column[k * GDN_WIDE], sum);
            column[i * GDN_WIDE] = sum;
        }
    }
    barrier();
    gdn_join<16>(a, t);
    gdn_join<32>(a, t);
}

// Tiles of 16 x 16 up to the diagonal: ten of K K^T, then ten of Q K^T.
struct GdnTile {
    bool there, is_q;
    u32 row, col;
};
DEVICE GdnTile gdn_lower_tile(u32 i) {
    const u32 n = i % 10, row = n < 1 ? 0 : n < 3 ? 1 : n < 6 ? 2 : 3;
    return GdnTile{i < 20, i >= 10, 16 * row, 16 * (n - row * (row + 1) / 2)};
}

// One chunk, one key head and the value heads that read it. Queries and keys of `mixed` are made as long as GDN_UNIT, and split in
// place: 64 (or all 32) upper parts, then as many lower ones. `matrices` [rows, v_heads, T and P, GDN_PAIR], `decays` [rows, v_heads, 2]:
// exp(G_i) and exp(G_C - G_i).
template <u32 DK>
DEVICE void gdn_chunk_of_head(const float *beta, const float *alpha, const float *a_log, const float *dt_bias,
                              const GdnRows &rows, u32 k_heads, u32 v_heads, u32 d_v, u32 grouped, float *mixed,
                              u16 *matrices, float *decays) {
    const u32 piece = DK < 64 ? DK : 64, waves = 256 / WAVE, held = (20 + waves - 1) / waves;
    SHARED(float, pool, GDN_CHUNK *GDN_STRIDE * 2);
    SHARED(float, norms, 2 * GDN_CHUNK);
    SHARED(float, gate, 4 * GDN_CHUNK);
    u16 *kh = (u16 *)pool, *kl = kh + GDN_CHUNK * GDN_STRIDE;
    u16 *qh = kl + GDN_CHUNK * GDN_STRIDE, *ql = qh + GDN_CHUNK * GDN_STRIDE;
    float *a = pool, *t = pool + GDN_CHUNK * GDN_WIDE;
    const u32 x = thread_index(), k_head = block_x(), channels = 2 * k_heads * DK + v_heads * d_v;
    float *q_rows = mixed + (u64)rows.first * channels + k_head * DK, *k_rows = q_rows + k_heads * DK;

    for (u32 i = 0; i < 2 * GDN_CHUNK; i += 8) {
        const u32 r = (i + x / 32) / 2, is_k = (i + x / 32) % 2;
        float sum = 0.0f;
        if (r < rows.count)
            UNROLL for (u32 e = 0; e < DK / 32; e++) {
                const float v = (is_k ? k_rows : q_rows)[(u64)r * channels + 32 * e + x % 32];
                sum = fma_(v, v, sum);
            }
        sum = group_sum<32>(sum);
        if (x % 32 == 0) norms[2 * r + is_k] = GDN_UNIT / sqrt_(sum + 1e-6f);
    }

    MmaC sums[held];
    UNROLL for (u32 i = 0; i < held; i++) sums[i] = mma_zero();
    for (u32 p = 0; p < DK; p += piece) {
        barrier();
        for (u32 i = x; i < GDN_CHUNK * piece; i += 256) {
            const u32 r = i / piece, e = i % piece;
            const bool there = r < rows.count;
            const GdnHalves q = gdn_split(there ? q_rows[(u64)r * channels + p + e] * norms[2 * r] : 0.0f);
            const GdnHalves k = gdn_split(there ? k_rows[(u64)r * channels + p + e] * norms[2 * r + 1] : 0.0f);
            qh[r * GDN_STRIDE + e] = q.high, ql[r * GDN_STRIDE + e] = q.low;
            kh[r * GDN_STRIDE + e] = k.high, kl[r * GDN_STRIDE + e] = k.low;
        }
        barrier();
        // The piece has been read by all threads, so its split form can take its place.
        for (u32 i = x; i < rows.count * piece / 2; i += 256) {
            const u32 r = i / (piece / 2), e = i % (piece / 2);
            u32 *q_to = (u32 *)(q_rows + (u64)r * channels + p), *k_to = (u32 *)(k_rows + (u64)r * channels + p);
            q_to[e] = ((const u32 *)(qh + r * GDN_STRIDE))[e], q_to[piece / 2 + e] = ((const u32 *)(ql + r * GDN_STRIDE))[e];
            k_to[e] = ((const u32 *)(kh + r * GDN_STRIDE))[e], k_to[piece / 2 + e] = ((const u32 *)(kl + r * GDN_STRIDE))[e];
        }
        UNROLL for (u32 i = 0; i < held; i++) {
            const GdnTile tile = gdn_lower_tile(wave_index() + i * waves);
            const u32 row = (tile.is_q ? 2 * GDN_CHUNK : 0) + tile.row;
            if (tile.there)
                gdn_product(sums[i], kh + row * GDN_STRIDE, kl + row * GDN_STRIDE, GDN_STRIDE, kh + tile.col * GDN_STRIDE,
                            kl + tile.col * GDN_STRIDE, GDN_STRIDE, piece / 16);
        }
    }

    for (u32 member = 0; member < v_heads / k_heads; member++) {
        const u32 head = grouped ? k_head * (v_heads / k_heads) + member : member * k_heads + k_head;
        barrier();
        UNROLL for (u32 i = 0; i < held; i++) {
            const GdnTile tile = gdn_lower_tile(wave_index() + i * waves);
            float *to = (tile.is_q ? t : a) + tile.row * GDN_WIDE + tile.col;
            if (tile.there)
                UNROLL for (u32 e = 0; e < MMA_LANE; e++) to[mma_row(e) * GDN_WIDE + mma_col(e)] = 1.0f / (GDN_UNIT * GDN_UNIT) * sums[i].v[e];
        }
        if (x < GDN_CHUNK) {
            const u64 at = (u64)(rows.first + x) * v_heads + head;
            const bool there = x < rows.count;
            gate[x] = there ? gdn_decay(a_log[head], alpha[at], dt_bias[head]) : 1.0f;
            gate[GDN_CHUNK + x] = there ? sigmoid_(beta[at]) : 0.0f;
        }
        barrier();
        // Decays of a column, from its diagonal down.
        if (x < 2 * GDN_CHUNK) {
            const u32 j = x % GDN_CHUNK;
            float *column = (x < GDN_CHUNK ? a : t) + j, by = 1.0f;
            for (u32 i = j + 1; i < rows.count; i++) {
                by *= gate[i];
                column[i * GDN_WIDE] *= x < GDN_CHUNK ? by * gate[GDN_CHUNK + i] : by;
            }
            // The last one of the column is that from row j to the end.
            if (x < rows.count) gate[3 * GDN_CHUNK + j] = by;
        } else if (x == 2 * GDN_CHUNK) {
            float by = 1.0f;
            for (u32 i = 0; i < rows.count; i++) gate[2 * GDN_CHUNK + i] = by *= gate[i];
        }
        barrier();
        u16 *to = matrices + ((u64)rows.first * v_heads + head) * 2 * GDN_PAIR;
        for (u32 i = x; i < rows.count * GDN_CHUNK; i += 256) {
            const u32 r = i / GDN_CHUNK, j = i % GDN_CHUNK;
            const GdnHalves p = gdn_split(j <= r ? GDN_UNIT * t[r * GDN_WIDE + j] : 0.0f);
            u16 *row = to + (u64)r * v_heads * 2 * GDN_PAIR + GDN_PAIR;
            row[j] = p.high, row[GDN_CHUNK + j] = p.low;
        }
        barrier();
        gdn_invert(a, t);
        for (u32 i = x; i < rows.count * GDN_CHUNK; i += 256) {
            const u32 r = i / GDN_CHUNK, j = i % GDN_CHUNK;
            const GdnHalves p = gdn_split(j <= r ? GDN_UNIT * gate[GDN_CHUNK + j] * t[r * GDN_WIDE + j] : 0.0f);
            u16 *row = to + (u64)r * v_heads * 2 * GDN_PAIR;
            row[j] = p.high, row[GDN_CHUNK + j] = p.low;
        }
        if (x < rows.count) {
            f32x2 *decay = (f32x2 *)decays + (u64)(rows.first + x) * v_heads + head;
            *decay = f32x2{gate[2 * GDN_CHUNK + x], gate[3 * GDN_CHUNK + x]};
        }
    }
}

// Part of a tile of 64 rows of split numbers that a thread carries from memory to shared memory: 8 columns of two rows.
struct GdnPart {
    u32x4 high0, low0, high1, low1;
};
// Rows `stride` halves apart, 16-byte aligned, each `width` (32 or 64) upper parts and as many lower ones.
DEVICE GdnPart gdn_load(const u16 *tile, u64 stride, u32 width, u32 count) {
    const u32 r = thread_index() / 8 * 2, e = thread_index() % 8 * 8;
    const u32x4 zero = u32x4{0, 0, 0, 0};
    GdnPart part = GdnPart{zero, zero, zero, zero};
    if (e < width && r < count) {
        part.high0 = *(const u32x4 *)(tile + r * stride + e);
        part.low0 = *(const u32x4 *)(tile + r * stride + width + e);
        if (r + 1 < count) {
            part.high1 = *(const u32x4 *)(tile + (r + 1) * stride + e);
            part.low1 = *(const u32x4 *)(tile + (r + 1) * stride + width + e);
        }
    }
    return part;
}
DEVICE void gdn_store(u16 *high, u16 *low, const GdnPart &part) {
    const u32 at = thread_index() / 8 * 2 * GDN_STRIDE + thread_index() % 8 * 8;
    *(u32x4 *)(high + at) = part.high0, *(u32x4 *)(high + at + GDN_STRIDE) = part.high1;
    *(u32x4 *)(low + at) = part.low0, *(u32x4 *)(low + at + GDN_STRIDE) = part.low1;
}
// Columns 2 i and 2 i + 1 of a turned tile from the pairs a of two rows.
DEVICE void gdn_turn_pair(u32 *to, u32 a, u32 b) {
    to[0] = (a & 0xffffu) | b << 16;
    to[GDN_STRIDE / 2] = a >> 16 | (b & 0xffff0000u);
}
// The tile turned: columns become rows.
DEVICE void gdn_store_turned(u16 *high, u16 *low, const GdnPart &part) {
    const u32 at = thread_index() % 8 * 8 * GDN_STRIDE / 2 + thread_index() / 8;
    u32 *h = (u32 *)high + at, *l = (u32 *)low + at;
    gdn_turn_pair(h, part.high0.x, part.high1.x), gdn_turn_pair(l, part.low0.x, part.low1.x);
    gdn_turn_pair(h + GDN_STRIDE, part.high0.y, part.high1.y), gdn_turn_pair(l + GDN_STRIDE, part.low0.y, part.low1.y);
    gdn_turn_pair(h + 2 * GDN_STRIDE, part.high0.z, part.high1.z), gdn_turn_pair(l + 2 * GDN_STRIDE, part.low0.z, part.low1.z);
    gdn_turn_pair(h + 3 * GDN_STRIDE, part.high0.w, part.high1.w), gdn_turn_pair(l + 3 * GDN_STRIDE, part.low0.w, part.low1.w);
}

// One span, one head, GDN_COLUMNS columns of the state, chunk after chunk. Every wave holds tiles of 16 x 16: of the state
// turned [columns, d_k], and of what has a row of every token [64, columns].
template <u32 DK>
DEVICE void gdn_scan(const float *mixed, const u16 *matrices, const float *decays, const GdnSpan &span, u32 k_heads,
                     u32 v_heads, u32 d_v, u32 grouped, float *states, float *out) {
    const u32 piece = DK < 64 ? DK : 64, waves = 256 / WAVE, s_stride = DK + 8;
    const u32 s_tiles = GDN_COLUMNS / 16 * (DK / 16), s_held = (s_tiles + waves - 1) / waves;
    const u32 held = GDN_CHUNK / 16 * (GDN_COLUMNS / 16) / waves;
    SHARED(u16, sh, GDN_COLUMNS * s_stride);
    SHARED(u16, sl, GDN_COLUMNS * s_stride);
    SHARED(u16, vh, GDN_COLUMNS * GDN_STRIDE);
    SHARED(u16, vl, GDN_COLUMNS * GDN_STRIDE);
    SHARED(u16, th, GDN_CHUNK * GDN_STRIDE);
    SHARED(u16, tl, GDN_CHUNK * GDN_STRIDE);
    SHARED(f32x2, decay, GDN_CHUNK);
    SHARED(float, scratch, 8);
    const u32 groups = d_v / GDN_COLUMNS, head = block_x() / groups, first = block_x() % groups * GDN_COLUMNS;
    const u32 k_head = gdn_k_head(head, k_heads, v_heads, grouped), wave = wave_index();
    const u32 channels = 2 * k_heads * DK + v_heads * d_v;
    const u64 stride = 2 * (u64)channels, m_stride = (u64)v_heads * 2 * GDN_PAIR;

    float *mine = states + (((u64)span.slot * v_heads + head) * d_v + first) * DK;
    MmaC s[s_held];
    UNROLL for (u32 i = 0; i < s_held; i++) {
        const u32 tile = wave + i * waves, row = tile % 2 * 16, col = tile / 2 * 16;
        s[i] = mma_zero();
        if (tile < s_tiles)
            UNROLL for (u32 e = 0; e < MMA_LANE; e++) s[i].v[e] = mine[(row + mma_row(e)) * DK + col + mma_col(e)];
    }
    for (u32 start = 0; start < span.rows; start += GDN_CHUNK) {
        const u32 count = min_u32(GDN_CHUNK, span.rows - start), row0 = span.first + start;
        const u16 *q = (const u16 *)(mixed + (u64)row0 * channels + k_head * DK), *k = q + 2 * k_heads * DK;
        const u16 *t = matrices + ((u64)row0 * v_heads + head) * 2 * GDN_PAIR, *p = t + GDN_PAIR;
        const float *v = mixed + (u64)row0 * channels + 2 * k_heads * DK + head * d_v + first;

        GdnPart part = gdn_load(k, stride, piece, count);
        // Values, of tiles [64, columns].
        MmaC fresh[held];
        float most = 0.0f;
        UNROLL for (u32 i = 0; i < held; i++) {
            const u32 tile = wave + i * waves, row = tile / 2 * 16, col = tile % 2 * 16;
            UNROLL for (u32 e = 0; e < MMA_LANE; e++) {
                const u32 r = row + mma_row(e);
                fresh[i].v[e] = r < count ? v[(u64)r * channels + col + mma_col(e)] : 0.0f;
                most = max_(most, abs_(fresh[i].v[e]));
            }
        }
        UNROLL for (u32 i = 0; i < s_held; i++)
            UNROLL for (u32 e = 0; e < MMA_LANE; e++) most = max_(most, abs_(s[i].v[e]));
        if (thread_index() < GDN_CHUNK)
            decay[thread_index()] = thread_index() < count
                                        ? ((const f32x2 *)decays)[(u64)(row0 + thread_index()) * v_heads + head]
                                        : f32x2{0.0f, 0.0f};
        // Everything that is linear in values and state is divided by a power of two, so that f16 can hold it. Keys are no
        // longer than 1: |K S| and |V'| stay below 64 + sqrt(d_k) times the largest number, hence the 128. Of numbers far
        // smaller than the largest, what is below 2^-33 of it is lost.
        const float by = quant_half_scale(block_max<256>(most, scratch)) * 128.0f, inverse = 1.0f / by;
        // Queries are scaled where they leave.
        const float out_by = by / (GDN_UNIT * sqrt_((float)DK));
        UNROLL for (u32 i = 0; i < s_held; i++) {
            const u32 tile = wave + i * waves, row = tile % 2 * 16, col = tile / 2 * 16;
            if (tile < s_tiles)
                UNROLL for (u32 e = 0; e < MMA_LANE; e++) {
                    const GdnHalves x = gdn_split(s[i].v[e] * inverse);
                    const u32 at = (row + mma_row(e)) * s_stride + col + mma_col(e);
                    sh[at] = x.high, sl[at] = x.low;
                }
        }

        // K S, then Q S.
        MmaC known[held], seen[held];
        UNROLL for (u32 i = 0; i < held; i++) known[i] = mma_zero(), seen[i] = mma_zero();
        UNROLL for (u32 i = 0; i < 2 * (DK / piece); i++) {
            const u32 at = i % (DK / piece) * piece;
            gdn_store(th, tl, part);
            barrier();
            const u32 next = (i + 1) % (DK / piece) * piece;
            part = i + 1 == 2 * (DK / piece) ? gdn_load(t, m_stride, GDN_CHUNK, count)
                                             : gdn_load((i + 1 < DK / piece ? k : q) + 2 * next, stride, piece, count);
            UNROLL for (u32 j = 0; j < held; j++) {
                const u32 tile = wave + j * waves, row = tile / 2 * 16 * GDN_STRIDE, col = tile % 2 * 16 * s_stride + at;
                gdn_product(i < DK / piece ? known[j] : seen[j], th + row, tl + row, GDN_STRIDE, sh + col, sl + col, s_stride,
                            piece / 16);
            }
            barrier();
        }
        // What is to be written, turned: V - exp(G) K S.
        UNROLL for (u32 i = 0; i < held; i++) {
            const u32 tile = wave + i * waves, row = tile / 2 * 16, col = tile % 2 * 16;
            UNROLL for (u32 e = 0; e < MMA_LANE; e++) {
                const u32 r = row + mma_row(e);
                const GdnHalves x = gdn_split(fma_(-decay[r].x / GDN_UNIT, known[i].v[e], fresh[i].v[e] * inverse));
                vh[(col + mma_col(e)) * GDN_STRIDE + r] = x.high, vl[(col + mma_col(e)) * GDN_STRIDE + r] = x.low;
                seen[i].v[e] *= decay[r].x;
            }
            fresh[i] = mma_zero();
        }
        gdn_store(th, tl, part);
        barrier();
        // V' = T diag(beta) of that.
        part = gdn_load(p, m_stride, GDN_CHUNK, count);
        UNROLL for (u32 i = 0; i < held; i++) {
            const u32 tile = wave + i * waves, row = tile / 2 * 16 * GDN_STRIDE, col = tile % 2 * 16 * GDN_STRIDE;
            gdn_product(fresh[i], th + row, tl + row, GDN_STRIDE, vh + col, vl + col, GDN_STRIDE, tile / 2 + 1);
        }
        barrier();
        UNROLL for (u32 i = 0; i < held; i++) {
            const u32 tile = wave + i * waves, row = tile / 2 * 16, col = tile % 2 * 16;
            UNROLL for (u32 e = 0; e < MMA_LANE; e++) {
                const u32 at = (col + mma_col(e)) * GDN_STRIDE + row + mma_row(e);
                const GdnHalves x = gdn_split(fresh[i].v[e] *= 1.0f / GDN_UNIT);
                vh[at] = x.high, vl[at] = x.low;
            }
        }
        gdn_store(th, tl, part);
        barrier();
        part = gdn_load(k, stride, piece, count);
        UNROLL for (u32 i = 0; i < held; i++) {
            const u32 tile = wave + i * waves, row = tile / 2 * 16 * GDN_STRIDE, col = tile % 2 * 16 * GDN_STRIDE;
            gdn_product(seen[i], th + row, tl + row, GDN_STRIDE, vh + col, vl + col, GDN_STRIDE, tile / 2 + 1);
        }
        barrier();
        UNROLL for (u32 i = 0; i < held; i++) {
            const u32 tile = wave + i * waves, row = tile / 2 * 16, col = tile % 2 * 16;
            UNROLL for (u32 e = 0; e < MMA_LANE; e++) {
                const u32 r = row + mma_row(e), c = col + mma_col(e), at = c * GDN_STRIDE + r;
                if (r < count) out[((u64)(row0 + r) * v_heads + head) * d_v + first + c] = out_by * seen[i].v[e];
                const GdnHalves x = gdn_split(decay[r].y * fresh[i].v[e]);
                vh[at] = x.high, vl[at] = x.low;
            }
        }
        // The state, a piece of its columns with every turned piece of K.
        const float whole = decay[count - 1].x;
        UNROLL for (u32 i = 0; i < DK / piece; i++) {
            gdn_store_turned(th, tl, part);
            barrier();
            if (i + 1 < DK / piece) part = gdn_load(k + 2 * (i + 1) * piece, stride, piece, count);
            UNROLL for (u32 j = 0; j < s_held; j++) {
                const u32 tile = wave + j * waves, row = tile % 2 * 16 * GDN_STRIDE, col = tile / 2 * 16;
                if (tile < s_tiles && col / piece == i) {
                    MmaC sum = mma_zero();
                    const u32 b = col % piece * GDN_STRIDE;
                    gdn_product(sum, vh + row, vl + row, GDN_STRIDE, th + b, tl + b, GDN_STRIDE, GDN_CHUNK / 16);
                    UNROLL for (u32 e = 0; e < MMA_LANE; e++) s[j].v[e] = fma_(by / GDN_UNIT, sum.v[e], whole * s[j].v[e]);
                }
            }
            barrier();
        }
    }
    UNROLL for (u32 i = 0; i < s_held; i++) {
        const u32 tile = wave + i * waves, row = tile % 2 * 16, col = tile / 2 * 16;
        if (tile < s_tiles)
            UNROLL for (u32 e = 0; e < MMA_LANE; e++) mine[(row + mma_row(e)) * DK + col + mma_col(e)] = s[i].v[e];
    }
}

// Spans of at least `least` rows; gdn_chunk has a block for every chunk that there can be.
#define GDN_CHUNKED(DK)                                                                                               \
    KERNEL_WIDE(gdn_chunk_##DK, 256)                                                                                  \
    (const float *beta, const float *alpha, const float *a, const float *dt_bias, const GdnSpan *spans, u32 n_spans,  \
     u32 least, u32 k_heads, u32 v_heads, u32 d_v, u32 grouped, float *mixed, u16 *matrices, float *decays) {         \
        const GdnRows rows = gdn_chunk_at(spans, n_spans, least, block_y());                                          \
        if (rows.count > 0)                                                                                           \
            gdn_chunk_of_head<DK>(beta, alpha, a, dt_bias, rows, k_heads, v_heads, d_v, grouped, mixed, matrices,     \
                                  decays);                                                                            \
    }                                                                                                                 \
    EXPORT(gdn_chunk_##DK)                                                                                            \
    KERNEL_WIDE(gdn_scan_##DK, 256)                                                                                   \
    (const float *mixed, const u16 *matrices, const float *decays, const GdnSpan *spans, u32 least, u32 k_heads,      \
     u32 v_heads, u32 d_v, u32 grouped, float *states, float *out) {                                                  \
        const GdnSpan span = spans[block_y()];                                                                        \
        if (span.rows >= least)                                                                                       \
            gdn_scan<DK>(mixed, matrices, decays, span, k_heads, v_heads, d_v, grouped, states, out);                 \
    }                                                                                                                 \
    EXPORT(gdn_scan_##DK)
GDN_CHUNKED(32)
GDN_CHUNKED(64)
GDN_CHUNKED(128)

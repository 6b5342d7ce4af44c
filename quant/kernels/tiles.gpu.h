// Products of weights with many rows of activations, tile by tile.

#define QUANT_TILE_THREADS 256
// Rows of weights and columns of a tile, and halves from one row of it to the next: 16 bytes more than a multiple of 128, so
// that the eight rows of a fragment lie in different banks.
#define QUANT_TILE_ROWS 128
#define QUANT_TILE_COLS 64
#define QUANT_TILE_STRIDE 72
#define QUANT_TILE_NO_PLACE 0xffffffffu
#define QUANT_TILE_NO_ROW (-2147483647 - 1)

// What a thread holds of the next tile of weights: one unit. Floats are halved or kept as they are.
template <u32 TYPE> struct QuantTileUnit {
    QuantRaw<TYPE> raw;
    DEVICE void load(const u8 *row, u32 nb, u32 unit) { raw = quant_load<TYPE>(row, nb, unit); }
    DEVICE void store(u16 *to) const {
        const QuantUnit unit = quant_unpack<TYPE>(raw);
        UNROLL for (u32 j = 0; j < 4; j++) {
            u32 words[4];
            UNROLL for (u32 k = 0; k < 4; k++) {
                const u32 i = 8 * j + 2 * k;
                words[k] = f2h2(quant_weight_near<TYPE>(unit, i), quant_weight_near<TYPE>(unit, i + 1));
            }
            ((u32x4 *)to)[j] = u32x4{words[0], words[1], words[2], words[3]};
        }
    }
};
template <> struct QuantTileUnit<QUANT_F16> {
    u32x4 raw[4];
    DEVICE void load(const u8 *row, u32, u32 unit) {
        UNROLL for (u32 j = 0; j < 4; j++) raw[j] = stream16(row + 64 * unit + 16 * j);
    }
    DEVICE void store(u16 *to) const {
        UNROLL for (u32 j = 0; j < 4; j++) ((u32x4 *)to)[j] = raw[j];
    }
};
template <> struct QuantTileUnit<QUANT_F32> {
    u32x4 raw[4];
    DEVICE void load(const u8 *row, u32, u32 unit) {
        UNROLL for (u32 j = 0; j < 4; j++) {
            u32 words[4];
            UNROLL for (u32 k = 0; k < 4; k++) {
                const float *at = (const float *)row + 32 * unit + 8 * j + 2 * k;
                words[k] = f2h2(at[0], at[1]);
            }
            raw[j] = u32x4{words[0], words[1], words[2], words[3]};
        }
    }
    DEVICE void store(u16 *to) const {
        UNROLL for (u32 j = 0; j < 4; j++) ((u32x4 *)to)[j] = raw[j];
    }
};
DEVICE u32 quant_bf_pair(u32 pair) { return f2h2(bf2f((u16)pair), bf2f((u16)(pair >> 16))); }
template <> struct QuantTileUnit<QUANT_BF16> {
    u32x4 raw[4];
    DEVICE void load(const u8 *row, u32, u32 unit) {
        UNROLL for (u32 j = 0; j < 4; j++) raw[j] = stream16(row + 64 * unit + 16 * j);
    }
    DEVICE void store(u16 *to) const {
        UNROLL for (u32 j = 0; j < 4; j++)
            ((u32x4 *)to)[j] = u32x4{quant_bf_pair(raw[j].x), quant_bf_pair(raw[j].y), quant_bf_pair(raw[j].z),
                                     quant_bf_pair(raw[j].w)};
    }
};

// Where the rows of activations of a tile come from and where its sums go.
//   const u16 *row(u32 i)       the halves of row i of the tile, null for a row that is not there; all rows are within 2^31
//                               halves of the first, which is there if any is
//   u32 place(u32 i)            the row of `out` for row i of the tile, QUANT_TILE_NO_PLACE for a row that is not there
//   float factor(u32 i)         what its sums are multiplied by
//   float *out(), bool add()    [places, rows of weights]; whether to add to what is there; known after a barrier

// Sums of QUANT_TILE_ROWS rows of weights from `first` with TN rows of activations.
template <u32 TYPE, u32 TN, class Side>
DEVICE void quant_tile(const u8 *weight, u32 first, u32 rows, u32 cols, const Side &side, u16 *tile_a, u16 *tile_b) {
    constexpr u32 WAVES_N = QUANT_TILE_THREADS / WAVE / 4, PART = TN / WAVES_N;
    constexpr u32 CHUNKS = TN * QUANT_TILE_COLS / 8 / QUANT_TILE_THREADS;
    const u32 t = thread_index(), wave = wave_index(), nb = cols / 32;
    const u32 row_a = wave / WAVES_N * 32, row_b = wave % WAVES_N * PART;
    MmaC sums[2][PART / 16];
    UNROLL for (u32 i = 0; i < 2; i++) UNROLL for (u32 j = 0; j < PART / 16; j++) sums[i][j] = mma_zero();

    // This thread's unit of weights: row t / 2, unit t % 2 of the two that are as wide as a tile.
    const u32 my_row = first + t / 2;
    const bool row_there = my_row < rows;
    const u8 *my_weight = weight + (u64)(row_there ? my_row : first) * quant_stride(TYPE, cols);
    QuantTileUnit<TYPE> unit;
    u32x4 acts[CHUNKS];
    // Rows of activations by their distance from the first: pointers would take twice the registers.
    const u16 *base = side.row(0);
    i32 from[CHUNKS];
    UNROLL for (u32 c = 0; c < CHUNKS; c++) {
        const u16 *row = side.row((t + c * QUANT_TILE_THREADS) / 8);
        from[c] = row ? (i32)(row - base) : QUANT_TILE_NO_ROW;
    }
    base += t % 8 * 8;
    const u32 steps = (cols + QUANT_TILE_COLS - 1) / QUANT_TILE_COLS;
#define QUANT_TILE_LOAD(step)                                                                                 \
    {                                                                                                         \
        const u32 mine = 2 * (step) + t % 2, at = (step) * QUANT_TILE_COLS;                                   \
        if (mine < nb) unit.load(my_weight, nb, mine);                                                        \
        UNROLL for (u32 c = 0; c < CHUNKS; c++)                                                               \
            acts[c] = from[c] != QUANT_TILE_NO_ROW && at + t % 8 * 8 < cols                                   \
                          ? *(const u32x4 *)(base + from[c] + at)                                             \
                          : u32x4{0, 0, 0, 0};                                                                \
    }
    QUANT_TILE_LOAD(0)
    for (u32 step = 0; step < steps; step++) {
        barrier();
        u16 *to = tile_a + t / 2 * QUANT_TILE_STRIDE + t % 2 * 32;
        if (row_there && 2 * step + t % 2 < nb) {
            unit.store(to);
        } else {
            UNROLL for (u32 j = 0; j < 4; j++) ((u32x4 *)to)[j] = u32x4{0, 0, 0, 0};
        }
        UNROLL for (u32 c = 0; c < CHUNKS; c++) {
            const u32 i = (t + c * QUANT_TILE_THREADS) / 8;
            *(u32x4 *)(tile_b + i * QUANT_TILE_STRIDE + t % 8 * 8) = acts[c];
        }
        barrier();
        if (step + 1 < steps) QUANT_TILE_LOAD(step + 1)
        UNROLL for (u32 k = 0; k < QUANT_TILE_COLS; k += 16) {
            MmaA a[2];
            UNROLL for (u32 i = 0; i < 2; i++) a[i] = mma_load_a(tile_a + (row_a + 16 * i) * QUANT_TILE_STRIDE + k, QUANT_TILE_STRIDE);
            UNROLL for (u32 j = 0; j < PART / 16; j++) {
                const MmaB b = mma_load_b(tile_b + (row_b + 16 * j) * QUANT_TILE_STRIDE + k, QUANT_TILE_STRIDE);
                UNROLL for (u32 i = 0; i < 2; i++) mma(sums[i][j], a[i], b);
            }
        }
    }
#undef QUANT_TILE_LOAD
    // Through shared memory, so that neighbouring lanes write neighbouring sums, with all places and factors loaded before the
    // first is written.
    constexpr u32 STAGE = QUANT_TILE_ROWS + 4, SUMS = WAVES_N * 16 * QUANT_TILE_ROWS / QUANT_TILE_THREADS;
    float *stage = (float *)tile_a, *factors = (float *)tile_b + TN;
    u32 *places = (u32 *)tile_b;
    float *const out = side.out();
    const bool add = side.add();
    barrier();
    if (t < TN) places[t] = side.place(t), factors[t] = side.factor(t);
    UNROLL for (u32 j = 0; j < PART / 16; j++) {
        UNROLL for (u32 i = 0; i < 2; i++)
            UNROLL for (u32 e = 0; e < MMA_LANE; e++)
                stage[(wave % WAVES_N * 16 + mma_col(e)) * STAGE + row_a + 16 * i + mma_row(e)] = sums[i][j].v[e];
        barrier();
        // Four at a time, which registers hold beside the sums.
        for (u32 start = 0; start < SUMS; start += 4) {
            float before[4];
            UNROLL for (u32 k = 0; k < 4; k++) {
                const u32 col = (t + (start + k) * QUANT_TILE_THREADS) / QUANT_TILE_ROWS, row = first + t % QUANT_TILE_ROWS;
                const u32 place = places[col / 16 * PART + 16 * j + col % 16];
                before[k] = add && place != QUANT_TILE_NO_PLACE && row < rows ? out[(u64)place * rows + row] : 0.0f;
            }
            UNROLL for (u32 k = 0; k < 4; k++) {
                const u32 col = (t + (start + k) * QUANT_TILE_THREADS) / QUANT_TILE_ROWS, row = first + t % QUANT_TILE_ROWS;
                const u32 i = col / 16 * PART + 16 * j + col % 16, place = places[i];
                if (place != QUANT_TILE_NO_PLACE && row < rows)
                    out[(u64)place * rows + row] = fma_(stage[col * STAGE + t % QUANT_TILE_ROWS], factors[i], before[k]);
            }
        }
        barrier();
    }
}

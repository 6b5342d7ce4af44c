// Products of weights with many rows of activations.

// Rows of activations one after the other, and sums beside one another.
struct QuantPlainSide {
    const u16 *h;
    const float *scale;
    // In shared memory: registers are short where it is needed last.
    const QuantJob *job;
    u32 first, n, cols;
    DEVICE const u16 *row(u32 i) const { return first + i < n ? h + (u64)(first + i) * cols : nullptr; }
    DEVICE float *out() const { return job->out; }
    DEVICE bool add() const { return job->add; }
    DEVICE u32 place(u32 i) const { return first + i < n ? first + i : QUANT_TILE_NO_PLACE; }
    DEVICE float factor(u32 i) const { return first + i < n ? scale[first + i] : 0.0f; }
};

#define QUANT_TILES(name, TN)                                                                                         \
    KERNEL_TWO(name, QUANT_TILE_THREADS)                                                                              \
    (u32 cols, const u16 *h, const float *scale, u32 n, QUANT_JOB_PARAMETERS) {                                       \
        SHARED(u16, tile_a, QUANT_TILE_ROWS *QUANT_TILE_STRIDE);                                                      \
        SHARED(u16, tile_b, TN *QUANT_TILE_STRIDE);                                                                   \
        u32 block = block_x();                                                                                        \
        const QuantJob job = QUANT_JOB(block, QUANT_TILE_ROWS);                                                       \
        SHARED(QuantJob, kept, 1);                                                                                    \
        if (thread_index() == 0) kept[0] = job;                                                                       \
        const QuantPlainSide side = {h, scale, kept, block_y() * TN, n, cols};                                        \
        const u32 first = block * QUANT_TILE_ROWS;                                                                    \
        switch (job.type) {                                                                                           \
        case QUANT_F16: quant_tile<QUANT_F16, TN>(job.weight, first, job.rows, cols, side, tile_a, tile_b); break;    \
        case QUANT_BF16: quant_tile<QUANT_BF16, TN>(job.weight, first, job.rows, cols, side, tile_a, tile_b); break;  \
        case QUANT_Q4_0: quant_tile<QUANT_Q4_0, TN>(job.weight, first, job.rows, cols, side, tile_a, tile_b); break;  \
        case QUANT_Q4_1: quant_tile<QUANT_Q4_1, TN>(job.weight, first, job.rows, cols, side, tile_a, tile_b); break;  \
        case QUANT_Q5_0: quant_tile<QUANT_Q5_0, TN>(job.weight, first, job.rows, cols, side, tile_a, tile_b); break;  \
        case QUANT_Q5_1: quant_tile<QUANT_Q5_1, TN>(job.weight, first, job.rows, cols, side, tile_a, tile_b); break;  \
        case QUANT_Q8_0: quant_tile<QUANT_Q8_0, TN>(job.weight, first, job.rows, cols, side, tile_a, tile_b); break;  \
        case QUANT_Q4_K: quant_tile<QUANT_Q4_K, TN>(job.weight, first, job.rows, cols, side, tile_a, tile_b); break;  \
        case QUANT_Q5_K: quant_tile<QUANT_Q5_K, TN>(job.weight, first, job.rows, cols, side, tile_a, tile_b); break;  \
        case QUANT_Q6_K: quant_tile<QUANT_Q6_K, TN>(job.weight, first, job.rows, cols, side, tile_a, tile_b); break;  \
        }                                                                                                             \
    }                                                                                                                 \
    EXPORT(name)
QUANT_TILES(quant_tiles_narrow, 64)
// As wide as the registers hold.
#if GPU_AMD
QUANT_TILES(quant_tiles_wide, 64)
#else
QUANT_TILES(quant_tiles_wide, 128)
#endif

// F32 weights with f32 activations, 64 by 64 sums a block: routers decide by small differences.
KERNEL(quant_tiles_f32, QUANT_TILE_THREADS)
(const u8 *weight, u32 rows, u32 cols, const float *x, u32 n, float *out, u32 add) {
    SHARED(float, tile_a, 16 * 68);
    SHARED(float, tile_b, 16 * 68);
    const u32 t = thread_index(), first_row = block_x() * 64, first = block_y() * 64;
    const u32 stride = quant_stride(QUANT_F32, cols);
    float sums[4][4];
    UNROLL for (u32 i = 0; i < 4; i++) UNROLL for (u32 j = 0; j < 4; j++) sums[i][j] = 0.0f;
    for (u32 start = 0; start < cols; start += 16) {
        barrier();
        // Transposed, so that a thread reads its four rows at once.
        const u32 i = t / 4, k = t % 4 * 4;
        f32x4 a = {0, 0, 0, 0}, b = {0, 0, 0, 0};
        if (first_row + i < rows && start + k < cols)
            a = *(const f32x4 *)(weight + (u64)(first_row + i) * stride + 4 * (start + k));
        if (first + i < n && start + k < cols) b = *(const f32x4 *)(x + (u64)(first + i) * cols + start + k);
        tile_a[k * 68 + i] = a.x, tile_a[(k + 1) * 68 + i] = a.y, tile_a[(k + 2) * 68 + i] = a.z, tile_a[(k + 3) * 68 + i] = a.w;
        tile_b[k * 68 + i] = b.x, tile_b[(k + 1) * 68 + i] = b.y, tile_b[(k + 2) * 68 + i] = b.z, tile_b[(k + 3) * 68 + i] = b.w;
        barrier();
        UNROLL for (u32 c = 0; c < 16; c++) {
            const f32x4 va = *(const f32x4 *)(tile_a + c * 68 + t % 16 * 4), vb = *(const f32x4 *)(tile_b + c * 68 + t / 16 * 4);
            const float wa[4] = {va.x, va.y, va.z, va.w}, wb[4] = {vb.x, vb.y, vb.z, vb.w};
            UNROLL for (u32 p = 0; p < 4; p++) UNROLL for (u32 r = 0; r < 4; r++) sums[p][r] = fma_(wa[r], wb[p], sums[p][r]);
        }
    }
    UNROLL for (u32 p = 0; p < 4; p++)
        UNROLL for (u32 r = 0; r < 4; r++) {
            const u32 token = first + t / 16 * 4 + p, row = first_row + t % 16 * 4 + r;
            if (token < n && row < rows) {
                float *to = out + (u64)token * rows + row;
                *to = add ? *to + sums[p][r] : sums[p][r];
            }
        }
}
EXPORT(quant_tiles_f32)

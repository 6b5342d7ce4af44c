// Products of weights with 1 to 8 rows of activations: up to four weights by one launch.

#define QUANT_MATVEC_THREADS 256
// Lanes that share a row. Lanes of the other rows of a wave read the same activations at the same time, so that more of them
// would cost more cache traffic than the weights themselves.
#define QUANT_MATVEC_LANES 8

// Rows of R * WAVES / split * groups from `block` times that. `split` waves share their rows.
template <u32 TYPE, u32 N, u32 R>
DEVICE void quant_matvec_rows(const QuantJob &job, u32 block, u32 cols, u32 n, u32 split, const i8 *q, const f32x2 *s,
                              const float *x, float *partial) {
    constexpr u32 LANES = QUANT_MATVEC_LANES, WAVES = QUANT_MATVEC_THREADS / WAVE, GROUPS = WAVE / LANES;
    const u32 group = lane() / LANES, wave = wave_index(), rows = WAVES / split * GROUPS * R;
    const u32 slot = (wave / split * GROUPS + group) * R, row = block * rows + slot;
    float sums[R * N];
    UNROLL for (u32 i = 0; i < R * N; i++) sums[i] = 0.0f;
    if (row < job.rows) {
        const u64 stride = quant_stride(TYPE, cols);
        const u8 *at = job.weight + row * stride;
        const QuantShare share = {lane() % LANES + wave % split * LANES, LANES * split};
        // The last row of all may stand for one that is not there.
        quant_sums<TYPE, N, R>(at, row + R <= job.rows ? stride : 0, cols, share, q, s, x, n, sums);
    }
    UNROLL for (u32 i = 0; i < R * N; i++) sums[i] = group_sum<LANES>(sums[i]);
    if (lane() % LANES == 0)
        UNROLL for (u32 r = 0; r < R; r++)
            UNROLL for (u32 t = 0; t < N; t++) partial[(t * split + wave % split) * rows + slot + r] = sums[r * N + t];
    barrier();
    for (u32 i = thread_index(); i < N * rows; i += QUANT_MATVEC_THREADS) {
        const u32 t = i / rows, r = block * rows + i % rows;
        if (t < n && r < job.rows) {
            float sum = 0.0f;
            for (u32 part = 0; part < split; part++) sum += partial[(t * split + part) * rows + i % rows];
            float *out = job.out + (u64)t * job.rows + r;
            *out = job.add ? *out + sum : sum;
        }
    }
}

template <u32 N, u32 R>
DEVICE void quant_matvec(const i8 *q, const f32x2 *s, const float *x, u32 cols, u32 n, u32 split, QUANT_JOB_PARAMETERS) {
    SHARED(float, partial, N *R *QUANT_MATVEC_THREADS / QUANT_MATVEC_LANES);
    const u32 rows = R * QUANT_MATVEC_THREADS / QUANT_MATVEC_LANES / split;
    const u32 token = block_y() * N;
    u32 block = block_x();
    QuantJob job = QUANT_JOB(block, rows);
    q += (u64)token * cols, s += (u64)token * (cols / 32), x += (u64)token * cols, n -= token;
    job.out += (u64)token * job.rows;
#define QUANT_CALL(T) quant_matvec_rows<T, N, R>(job, block, cols, n, split, q, s, x, partial)
    switch (job.type) {
    case QUANT_F32: QUANT_CALL(QUANT_F32); break;
    case QUANT_F16: QUANT_CALL(QUANT_F16); break;
    case QUANT_BF16: QUANT_CALL(QUANT_BF16); break;
    case QUANT_Q4_0: QUANT_CALL(QUANT_Q4_0); break;
    case QUANT_Q4_1: QUANT_CALL(QUANT_Q4_1); break;
    case QUANT_Q5_0: QUANT_CALL(QUANT_Q5_0); break;
    case QUANT_Q5_1: QUANT_CALL(QUANT_Q5_1); break;
    case QUANT_Q8_0: QUANT_CALL(QUANT_Q8_0); break;
    case QUANT_Q4_K: QUANT_CALL(QUANT_Q4_K); break;
    case QUANT_Q5_K: QUANT_CALL(QUANT_Q5_K); break;
    case QUANT_Q6_K: QUANT_CALL(QUANT_Q6_K); break;
    }
#undef QUANT_CALL
}

// A product of N rows of activations takes R rows of weights at a time; `block_y` counts groups of N rows.
#define QUANT_MATVEC(N, R)                                                                                           \
    KERNEL(quant_matvec_##N, QUANT_MATVEC_THREADS)                                                                   \
    (const i8 *q, const f32x2 *s, const float *x, u32 cols, u32 n, u32 split, QUANT_JOB_PARAMETERS) {                \
        quant_matvec<N, R>(q, s, x, cols, n, split, QUANT_JOB_ARGUMENTS);                                            \
    }                                                                                                                \
    EXPORT(quant_matvec_##N)
QUANT_MATVEC(1, 2)
QUANT_MATVEC(2, 2)
QUANT_MATVEC(4, 2)
// As many as the registers hold.
#if GPU_AMD
QUANT_MATVEC(8, 1)
#else
QUANT_MATVEC(8, 2)
#endif

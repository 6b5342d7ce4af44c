// Products of weights with 1 to 8 rows of activations: up to four weights by one launch.

#define QUANT_MATVEC_THREADS 256

struct QuantJob {
    const u8 *weight;
    float *out;
    u32 rows, type, add;
};

template <u32 TYPE, u32 N>
DEVICE void quant_matvec_rows(const QuantJob &job, u32 block, u32 cols, u32 n, u32 lanes, u32 split, const i8 *q,
                              const f32x2 *s, const float *x, float *partial) {
    constexpr u32 WAVES = QUANT_MATVEC_THREADS / WAVE;
    const u32 groups = WAVE / lanes, group = lane() / lanes, wave = wave_index();
    const u32 slot = wave / split * groups + group, rows = WAVES / split * groups;
    const u32 row = block * rows + slot;
    float sums[N];
    UNROLL for (u32 t = 0; t < N; t++) sums[t] = 0.0f;
    if (row < job.rows) {
        const u8 *at = job.weight + (u64)row * quant_stride(TYPE, cols);
        const QuantShare share = {lane() % lanes + wave % split * lanes, lanes * split};
        quant_row_sums<TYPE, N>(at, cols, share, q, s, x, n, sums);
    }
    UNROLL for (u32 t = 0; t < N; t++)
        for (u32 m = lanes / 2; m > 0; m >>= 1) sums[t] += shfl_xor(sums[t], m);
    if (split > 1) {
        if (lane() % lanes == 0)
            UNROLL for (u32 t = 0; t < N; t++) partial[(t * WAVES + wave) * groups + group] = sums[t];
        barrier();
        UNROLL for (u32 t = 0; t < N; t++) {
            sums[t] = 0.0f;
            for (u32 i = 0; i < split; i++) sums[t] += partial[(t * WAVES + wave / split * split + i) * groups + group];
        }
    }
    if (row < job.rows && lane() % lanes == 0 && wave % split == 0)
        UNROLL for (u32 t = 0; t < N; t++)
            if (t < n) {
                float *out = job.out + (u64)t * job.rows + row;
                *out = job.add ? *out + sums[t] : sums[t];
            }
}

template <u32 N>
DEVICE void quant_matvec(const i8 *q, const f32x2 *s, const float *x, u32 cols, u32 n, u32 lanes, u32 split,
                         const u8 *w0, float *o0, u32 r0, u32 t0, u32 a0, const u8 *w1, float *o1, u32 r1, u32 t1, u32 a1,
                         const u8 *w2, float *o2, u32 r2, u32 t2, u32 a2, const u8 *w3, float *o3, u32 r3, u32 t3,
                         u32 a3) {
    // One number per token, wave and group of lanes.
    SHARED(float, partial, N * QUANT_MATVEC_THREADS / 8);
    const u32 rows = QUANT_MATVEC_THREADS / lanes / split;
    QuantJob job = {w0, o0, r0, t0, a0};
    u32 block = block_x(), blocks = (r0 + rows - 1) / rows;
    if (block >= blocks) {
        block -= blocks, blocks = (r1 + rows - 1) / rows, job = QuantJob{w1, o1, r1, t1, a1};
        if (block >= blocks) {
            block -= blocks, blocks = (r2 + rows - 1) / rows, job = QuantJob{w2, o2, r2, t2, a2};
            if (block >= blocks) block -= blocks, job = QuantJob{w3, o3, r3, t3, a3};
        }
    }
#define QUANT_CALL(T) quant_matvec_rows<T, N>(job, block, cols, n, lanes, split, q, s, x, partial)
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

#define QUANT_MATVEC(N)                                                                                              \
    KERNEL(quant_matvec_##N, QUANT_MATVEC_THREADS)                                                                   \
    (const i8 *q, const f32x2 *s, const float *x, u32 cols, u32 n, u32 lanes, u32 split, const u8 *w0, float *o0,   \
     u32 r0, u32 t0, u32 a0, const u8 *w1, float *o1, u32 r1, u32 t1, u32 a1, const u8 *w2, float *o2, u32 r2,      \
     u32 t2, u32 a2, const u8 *w3, float *o3, u32 r3, u32 t3, u32 a3) {                                              \
        quant_matvec<N>(q, s, x, cols, n, lanes, split, w0, o0, r0, t0, a0, w1, o1, r1, t1, a1, w2, o2, r2, t2, a2, \
                        w3, o3, r3, t3, a3);                                                                         \
    }                                                                                                                \
    EXPORT(quant_matvec_##N)
QUANT_MATVEC(1)
QUANT_MATVEC(2)
QUANT_MATVEC(4)
QUANT_MATVEC(8)

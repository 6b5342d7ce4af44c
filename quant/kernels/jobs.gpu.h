// Up to four products with the same activations by one launch, as arguments of a kernel: blocks of the first come first.

struct QuantJob {
    const u8 *weight;
    float *out;
    u32 rows, type, add;
};

#define QUANT_JOB_PARAMETERS                                                                                            \
    const u8 *w0, float *o0, u32 r0, u32 t0, u32 a0, const u8 *w1, float *o1, u32 r1, u32 t1, u32 a1, const u8 *w2,     \
        float *o2, u32 r2, u32 t2, u32 a2, const u8 *w3, float *o3, u32 r3, u32 t3, u32 a3
#define QUANT_JOB_ARGUMENTS w0, o0, r0, t0, a0, w1, o1, r1, t1, a1, w2, o2, r2, t2, a2, w3, o3, r3, t3, a3
// The product that `block` is of, and `block` within it, where a block has `rows` rows.
#define QUANT_JOB(block, rows) quant_job(block, rows, QUANT_JOB_ARGUMENTS)

DEVICE QuantJob quant_job(u32 &block, u32 rows, QUANT_JOB_PARAMETERS) {
    u32 blocks = (r0 + rows - 1) / rows;
    if (block < blocks) return QuantJob{w0, o0, r0, t0, a0};
    block -= blocks, blocks = (r1 + rows - 1) / rows;
    if (block < blocks) return QuantJob{w1, o1, r1, t1, a1};
    block -= blocks, blocks = (r2 + rows - 1) / rows;
    if (block < blocks) return QuantJob{w2, o2, r2, t2, a2};
    block -= blocks;
    return QuantJob{w3, o3, r3, t3, a3};
}

KERNEL(reversed_sums, 128)(const float *x, float *y, float by, u32 n) {
    SHARED(float, s, 128);
    const u32 t = thread_index(), i = block_x() * 128 + t;
    s[t] = i < n ? x[i] : 0.0f;
    barrier();
    const float sum = wave_sum(s[127 - t]) * by;
    if (i < n) y[i] = sum;
}
EXPORT(reversed_sums)

KERNEL(racy, 128)(u32 *y) {
    SHARED(u32, s, 128);
    const u32 t = thread_index();
    s[t] = t;
    y[t] = s[127 - t];
}
EXPORT(racy)

KERNEL(half_barrier, 128)(u32 *y) {
    if (thread_index() < 64) barrier();
    y[thread_index()] = 1;
}
EXPORT(half_barrier)

KERNEL(half_shuffle, 128)(u32 *y) {
    if (lane() & 1) y[thread_index()] = shfl_xor(thread_index(), 2);
    barrier();
}
EXPORT(half_shuffle)

KERNEL(unwritten_shared, 128)(float *y) {
    SHARED(float, s, 128);
    const float before = s[thread_index()];
    s[thread_index()] = 1.0f;
    barrier();
    y[thread_index()] = before + s[0];
}
EXPORT(unwritten_shared)

// A compiler for cards refuses this one.
#if GPU_EMULATED
KERNEL(too_much_shared, 128)(u32 *y) {
    SHARED(u32, a, 8192);
    SHARED(u32, b, 8193);
    a[thread_index()] = b[thread_index()] = 0;
    y[thread_index()] = a[0] + b[0];
}
EXPORT(too_much_shared)
#endif

KERNEL(misaligned, 128)(const u8 *y) {
    const u32x4 v = stream16(y + 4);
    if (v.x == 1 && v.y == 2) barrier();
}
EXPORT(misaligned)

KERNEL(products, 128)(const u16 *a, const u16 *b, float *c) {
    SHARED(u16, sa, 256);
    SHARED(u16, sb, 256);
    for (u32 i = thread_index(); i < 256; i += 128) {
        sa[i] = a[i];
        sb[i] = b[i];
    }
    barrier();
    MmaC sum = mma_zero();
    mma(sum, mma_load_a(sa, 16), mma_load_b(sb, 16));
    if (wave_index() == 0)
        for (u32 i = 0; i < MMA_LANE; i++) c[mma_row(i) * 16 + mma_col(i)] = sum.v[i];
}
EXPORT(products)

KERNEL(counts, 128)(u32 *n) {
    atomic_add(n, 1u);
    atomic_add((float *)(n + 1), 1.0f);
}
EXPORT(counts)

KERNEL(lanes, 128)(u32 *y) {
    const u32 t = thread_index();
    u32 *row = y + 4 * t;
    row[0] = shfl_xor(t, 5);
    row[1] = shfl(t, 3);
    const u64 odd = wave_ballot(lane() & 1);
    u32 n = 0;
    for (u32 i = 0; i < WAVE; i++) n += (u32)(odd >> i) & 1;
    row[2] = n;
    row[3] = group_sum<8>(lane());
}
EXPORT(lanes)

KERNEL(wrong_threads, 128)(u32 *y) { y[thread_index()] = 0; }
EXPORT(wrong_threads)

KERNEL(not_exported, 64)(u32 *y) { y[thread_index()] = 0; }

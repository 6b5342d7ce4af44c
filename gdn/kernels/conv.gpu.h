// Gated DeltaNet between its projections: what every form of it begins with.

// A run of rows that belong to one sequence; the position of the first one is not needed here.
struct GdnSpan {
    u32 slot, first, rows, start;
};

// Rows of a chunk.
#define GDN_CHUNK 64
// Taps whose loads are issued together; longer convolutions add the others one by one.
#define GDN_TAPS 4

// Convolution with SiLU of channel c at row `seen` of a span. `past` are the rows of the window, `rows` those of the span. The
// same numbers in the same order wherever it is called from, so that results do not depend on the path.
DEVICE float gdn_conv(const float *past, const float *rows, const float *taps, u32 channels, u32 kernel, u32 seen, u32 c) {
    const u32 history = kernel - 1;
    float x[GDN_TAPS], w[GDN_TAPS];
    UNROLL for (u32 back = 0; back < GDN_TAPS; back++) {
        // Without branches, so that all loads go out at once; a tap that is not there loads the first one again.
        const u32 b = min_u32(back, history);
        const float *from = seen >= b ? rows + (u64)(seen - b) * channels : past + (u64)(seen + history - b) * channels;
        x[back] = from[c];
        w[back] = taps[c * kernel + history - b];
    }
    float v = 0.0f;
    for (u32 back = history; back >= GDN_TAPS; back--) {
        const float *from = seen >= back ? rows + (u64)(seen - back) * channels
                                         : past + (u64)(seen + history - back) * channels;
        v = fma_(taps[c * kernel + history - back], from[c], v);
    }
    UNROLL for (u32 i = 0; i < GDN_TAPS; i++) {
        const u32 back = GDN_TAPS - 1 - i;
        if (back < kernel) v = fma_(w[back], x[back], v);
    }
    return silu_(v);
}

// The span that a row belongs to; spans ascend.
DEVICE GdnSpan gdn_span_of(const GdnSpan *spans, u32 n_spans, u32 row) {
    u32 low = 0, high = n_spans;
    while (low + 1 < high) {
        const u32 middle = (low + high) / 2;
        if (spans[middle].first <= row) low = middle;
        else high = middle;
    }
    return spans[low];
}

// Rows that a block convolves: neighbours read the same inputs, which the first cache then holds.
#define GDN_CONV_ROWS 4

// mixed = conv and SiLU of all channels of all rows, for spans that are long enough that it pays to do so once.
KERNEL(gdn_prepare, 256)
(const float *qkv, const float *taps, const float *window, const GdnSpan *spans, u32 n_spans, u32 n, u32 channels,
 u32 kernel, float *mixed) {
    const u32 c = block_x() * 256 + thread_index();
    if (c < channels)
        for (u32 i = 0; i < GDN_CONV_ROWS; i++) {
            const u32 row = block_y() * GDN_CONV_ROWS + i;
            if (row >= n) break;
            const GdnSpan span = gdn_span_of(spans, n_spans, row);
            const float *past = window + (u64)span.slot * (kernel - 1) * channels;
            mixed[(u64)row * channels + c] =
                gdn_conv(past, qkv + (u64)span.first * channels, taps, channels, kernel, row - span.first, c);
        }
}
EXPORT(gdn_prepare)

DEVICE float gdn_decay(float a, float alpha, float dt_bias) { return exp_(a * softplus_(alpha + dt_bias)); }

DEVICE u32 gdn_k_head(u32 head, u32 k_heads, u32 v_heads, u32 grouped) {
    return grouped ? head / (v_heads / k_heads) : head % k_heads;
}

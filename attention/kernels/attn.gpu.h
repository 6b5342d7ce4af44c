// What the kernels of attention share. A page holds 64 tokens: keys [pages, kv_heads, 64, k_dim], values [pages, kv_heads,
// 64, v_dim], both f16 (as u16) or f32, with head sizes that are multiples of 8.

#define ATTN_PAGE 64

// Before loops over batches of loads, and over the steps of a product. Unrolled, they hold the addresses and fragments of all
// their turns at once: the compilers for AMD run out of registers so, where those for NVIDIA keep to what they have.
#if GPU_EMULATED
#define ATTN_BATCHES
#define ATTN_STEPS
#elif GPU_NVIDIA
#define ATTN_BATCHES _Pragma("unroll 1")
#define ATTN_STEPS UNROLL
#else
#define ATTN_BATCHES _Pragma("unroll 1")
#if MMA_PLAIN
#define ATTN_STEPS _Pragma("unroll 1")
#else
#define ATTN_STEPS _Pragma("unroll 2")
#endif
#endif

// Page number `index` of a sequence. Whatever the table holds, the page is one of the cache.
DEVICE u32 attn_page(const u32 *pages, u32 max_pages, u32 n_pages, u32 slot, u32 index) {
    return min_u32(pages[(u64)slot * max_pages + min_u32(index, max_pages - 1)], n_pages - 1);
}

// Tokens that a row sees.
struct AttnSeen {
    u32 first, end;
};
DEVICE AttnSeen attn_seen(u32 position, u32 end, u32 window) {
    AttnSeen seen;
    seen.first = window && position + 1 > window ? position + 1 - window : 0;
    seen.end = max_u32(end, seen.first + 1);
    return seen;
}

// Pages `from .. to` of one split of the pages that hold the tokens seen.
struct AttnSplit {
    u32 from, to;
};
DEVICE u32 attn_pages_per_split(AttnSeen seen, u32 splits) {
    const u32 pages = (seen.end + ATTN_PAGE - 1) / ATTN_PAGE - seen.first / ATTN_PAGE;
    return (pages + splits - 1) / splits;
}
DEVICE AttnSplit attn_split(AttnSeen seen, u32 splits, u32 split) {
    const u32 last = (seen.end + ATTN_PAGE - 1) / ATTN_PAGE, each = attn_pages_per_split(seen, splits);
    AttnSplit s;
    s.from = min_u32(seen.first / ATTN_PAGE + split * each, last);
    s.to = min_u32(s.from + each, last);
    return s;
}
DEVICE u32 attn_splits_used(AttnSeen seen, u32 splits) {
    const u32 pages = (seen.end + ATTN_PAGE - 1) / ATTN_PAGE - seen.first / ATTN_PAGE;
    const u32 each = attn_pages_per_split(seen, splits);
    return min_u32((pages + each - 1) / each, splits);
}

// The score of a token that is not seen.
DEVICE float attn_unseen() { return from_bits(0xff800000u); }

// Finite numbers beyond f16 become its largest; infinities and NaN stay what they are.
DEVICE u16 attn_narrow(float x) {
    const float inside = max_(min_(x, 65504.0f), -65504.0f);
    return f2h((bits(x) & 0x7f800000u) == 0x7f800000u ? x : inside);
}
DEVICE u32 attn_narrow2(float low, float high) { return attn_narrow(low) | (u32)attn_narrow(high) << 16; }

DEVICE void attn_widen2(u32 word, float *x) {
    x[0] = h2f((u16)(word & 0xffff));
    x[1] = h2f((u16)(word >> 16));
}

// 8 and 4 neighbouring values as they lie in memory, so that loads can be under way long before they are used.
template <class T> struct AttnRaw8;
template <> struct AttnRaw8<u16> {
    u32x4 bits;
    DEVICE void load(const u16 *p) { bits = *(const u32x4 *)p; }
    DEVICE void zero() { bits = u32x4{0, 0, 0, 0}; }
    DEVICE void widen(float *x) const {
        attn_widen2(bits.x, x);
        attn_widen2(bits.y, x + 2);
        attn_widen2(bits.z, x + 4);
        attn_widen2(bits.w, x + 6);
    }
    DEVICE u32x4 narrow() const { return bits; }
};
template <> struct AttnRaw8<float> {
    f32x4 a, b;
    DEVICE void load(const float *p) {
        a = *(const f32x4 *)p;
        b = *(const f32x4 *)(p + 4);
    }
    DEVICE void zero() { a = b = f32x4{0.0f, 0.0f, 0.0f, 0.0f}; }
    DEVICE void widen(float *x) const {
        x[0] = a.x, x[1] = a.y, x[2] = a.z, x[3] = a.w;
        x[4] = b.x, x[5] = b.y, x[6] = b.z, x[7] = b.w;
    }
    DEVICE u32x4 narrow() const {
        return u32x4{attn_narrow2(a.x, a.y), attn_narrow2(a.z, a.w), attn_narrow2(b.x, b.y), attn_narrow2(b.z, b.w)};
    }
};
template <class T> struct AttnRaw4;
template <> struct AttnRaw4<u16> {
    u32x2 bits;
    DEVICE void load(const u16 *p) { bits = *(const u32x2 *)p; }
    DEVICE void zero() { bits = u32x2{0, 0}; }
    DEVICE void widen(float *x) const {
        attn_widen2(bits.x, x);
        attn_widen2(bits.y, x + 2);
    }
};
template <> struct AttnRaw4<float> {
    f32x4 a;
    DEVICE void load(const float *p) { a = *(const f32x4 *)p; }
    DEVICE void zero() { a = f32x4{0.0f, 0.0f, 0.0f, 0.0f}; }
    DEVICE void widen(float *x) const { x[0] = a.x, x[1] = a.y, x[2] = a.z, x[3] = a.w; }
};

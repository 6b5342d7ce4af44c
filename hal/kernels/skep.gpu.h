// The kernel language of Skep: one C++17 subset for CUDA (nvcc, NVRTC), HIP (clang without ROCm headers, hipRTC) and the
// emulated device (the host's C++ compiler). Kernels use nothing beyond what is declared here.
//
//   KERNEL(name, threads)(arguments) { ... }   an entry point of exactly `threads` threads per block, a multiple of WAVE
//   KERNEL_TWO(name, threads)(arguments) { ... }   the same, with few enough registers for two blocks at a time where the
//                                              compiler is the one to ration them
//   KERNEL_WIDE(name, threads)(arguments) ...  the same for kernels that live on registers, not on many blocks at a time
//   EXPORT(name)                               after it, makes it known to the emulated device
//   UNROLL, ROLLED                             before a loop: all of its rounds written out, or none
//   SHARED(type, name, n)                      n elements of memory that the block shares, at most 64 KiB in all
//
// Rules: every thread of a block reaches every barrier(), every lane of a wave every shuffle and sum; nobody returns
// before one. Grid sizes are passed as arguments. Nothing reads what another block of the same launch writes, except
// through the atomics.

#if defined(__HIP__) || defined(__HIPCC_RTC__)
#define GPU_AMD 1
#elif defined(__CUDACC__) || defined(__CUDACC_RTC__)
#define GPU_NVIDIA 1
#else
#define GPU_EMULATED 1
#endif

typedef signed char i8;
typedef unsigned char u8;
typedef short i16;
typedef unsigned short u16;
typedef int i32;
typedef unsigned int u32;
typedef long long i64;
typedef unsigned long long u64;

// 16 bytes, the widest load and store.
struct alignas(16) u32x4 {
    u32 x, y, z, w;
};
struct alignas(8) u32x2 {
    u32 x, y;
};
struct alignas(16) f32x4 {
    float x, y, z, w;
};
struct alignas(8) f32x2 {
    float x, y;
};

#if GPU_EMULATED
#include "emulated.h"
#elif GPU_NVIDIA
// ---------------------------------------------------------------------------------------------------------- NVIDIA
#define WAVE 32
#define DEVICE __device__ __forceinline__
#define KERNEL(name, threads) extern "C" __global__ void __launch_bounds__(threads) name
// Turing splits matrix products, and needs more registers for them.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
#define KERNEL_TWO(name, threads) KERNEL(name, threads)
#else
#define KERNEL_TWO(name, threads) extern "C" __global__ void __launch_bounds__(threads, 2) name
#endif
// Without the 1, ptxas spills registers to make room for one more block.
#define KERNEL_WIDE(name, threads) extern "C" __global__ void __launch_bounds__(threads, 1) name
#define EXPORT(name)
#define SHARED(T, name, n) __shared__ __align__(16) T name[n]
#define UNROLL _Pragma("unroll")
#define ROLLED _Pragma("unroll 1")

DEVICE u32 thread_index() { return threadIdx.x; }
DEVICE u32 block_x() { return blockIdx.x; }
DEVICE u32 block_y() { return blockIdx.y; }
DEVICE u32 block_z() { return blockIdx.z; }
DEVICE u32 lane() { return threadIdx.x & 31; }
DEVICE void barrier() { __syncthreads(); }
// Orders what the lanes of a wave wrote to shared memory before what they read.
DEVICE void wave_barrier() { __syncwarp(); }

DEVICE float shfl(float v, u32 from) { return __shfl_sync(0xffffffffu, v, from); }
DEVICE i32 shfl(i32 v, u32 from) { return __shfl_sync(0xffffffffu, v, from); }
DEVICE u32 shfl(u32 v, u32 from) { return __shfl_sync(0xffffffffu, v, from); }
DEVICE float shfl_xor(float v, u32 mask) { return __shfl_xor_sync(0xffffffffu, v, mask); }
DEVICE i32 shfl_xor(i32 v, u32 mask) { return __shfl_xor_sync(0xffffffffu, v, mask); }
DEVICE u32 shfl_xor(u32 v, u32 mask) { return __shfl_xor_sync(0xffffffffu, v, mask); }
DEVICE u64 wave_ballot(bool v) { return __ballot_sync(0xffffffffu, v); }

DEVICE i32 dot4(i32 a, i32 b, i32 c) { return __dp4a(a, b, c); }

DEVICE float h2f(u16 h) {
    float f;
    asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(h));
    return f;
}
DEVICE u16 f2h(float f) {
    u16 h;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(f));
    return h;
}
// Two halves in a word, the first in its low half.
DEVICE u32 f2h2(float low, float high) {
#if __CUDA_ARCH__ >= 800
    u32 h;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(h) : "f"(high), "f"(low));
    return h;
#else
    return (u32)f2h(low) | (u32)f2h(high) << 16;
#endif
}
DEVICE u32 bits(float f) { return __float_as_uint(f); }
DEVICE float from_bits(u32 u) { return __uint_as_float(u); }
DEVICE float exp_(float x) { return __expf(x); }
DEVICE float log_(float x) { return logf(x); }
DEVICE float log1p_(float x) { return log1pf(x); }
DEVICE float tanh_(float x) { return tanhf(x); }
DEVICE float sqrt_(float x) { return sqrtf(x); }
DEVICE float rsqrt_(float x) { return rsqrtf(x); }
DEVICE float floor_(float x) { return floorf(x); }
DEVICE float round_(float x) { return rintf(x); }
DEVICE double floor64(double x) { return floor(x); }
DEVICE float fma_(float a, float b, float c) { return __fmaf_rn(a, b, c); }
// A product that is rounded by itself, whatever is done with it: compilers fuse others into sums.
DEVICE float mul_(float a, float b) { return __fmul_rn(a, b); }
DEVICE float max_(float a, float b) { return fmaxf(a, b); }
DEVICE float min_(float a, float b) { return fminf(a, b); }
DEVICE float abs_(float a) { return fabsf(a); }

// Weights are read once: past the first cache, and first to leave the second.
DEVICE u32x4 stream16(const void *p) {
    u32x4 v;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(p));
    return v;
}
DEVICE u32x2 stream8(const void *p) {
    u32x2 v;
    asm volatile("ld.global.nc.L1::no_allocate.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(p));
    return v;
}
DEVICE u32 stream4(const void *p) {
    u32 v;
    asm volatile("ld.global.nc.L1::no_allocate.u32 %0, [%1];" : "=r"(v) : "l"(p));
    return v;
}
DEVICE u32 stream2(const void *p) {
    u16 v;
    asm volatile("ld.global.nc.L1::no_allocate.u16 %0, [%1];" : "=h"(v) : "l"(p));
    return v;
}

DEVICE float atomic_add(float *p, float v) { return atomicAdd(p, v); }
DEVICE u32 atomic_add(u32 *p, u32 v) { return atomicAdd(p, v); }
DEVICE u64 atomic_max(u64 *p, u64 v) { return atomicMax(p, v); }

// 16 x 16 x 16 products of f16 matrices in shared memory, summed in f32 by a wave. `a` is [m, k] and `b` is [n, k], both
// with k contiguous, rows `stride` elements apart and 16-byte aligned; element i of a lane's accumulator is row mma_row(i),
// column mma_col(i) of [m, n].
#define MMA_LANE 8
struct MmaA {
    u32 r[4];
};
struct MmaB {
    u32 r[4];
};
struct MmaC {
    float v[MMA_LANE];
};
DEVICE u32 shared_address(const void *p) { return (u32)__cvta_generic_to_shared(p); }
DEVICE void ldmatrix4(u32 *r, const void *p) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared_address(p)));
}
DEVICE MmaA mma_load_a(const u16 *p, u32 stride) {
    MmaA a;
    const u32 l = lane();
    ldmatrix4(a.r, p + (l & 15) * stride + (l >> 4) * 8);
    return a;
}
DEVICE MmaB mma_load_b(const u16 *p, u32 stride) {
    MmaB b;
    const u32 l = lane();
    ldmatrix4(b.r, p + ((l & 7) + (l >> 4) * 8) * stride + ((l >> 3) & 1) * 8);
    return b;
}
DEVICE void mma16x8(float *c, const u32 *a, const u32 *b) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
DEVICE void mma(MmaC &c, const MmaA &a, const MmaB &b) {
#if __CUDA_ARCH__ >= 800
    mma16x8(c.v, a.r, b.r);
    mma16x8(c.v + 4, a.r, b.r + 2);
#else
    // sm_75 has the same product in two halves of k.
    for (u32 n = 0; n < 2; n++)
        for (u32 k = 0; k < 2; k++)
            asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, "
                         "{%0, %1, %2, %3};"
                         : "+f"(c.v[4 * n]), "+f"(c.v[4 * n + 1]), "+f"(c.v[4 * n + 2]), "+f"(c.v[4 * n + 3])
                         : "r"(a.r[2 * k]), "r"(a.r[2 * k + 1]), "r"(b.r[2 * n + k]));
#endif
}
DEVICE u32 mma_row(u32 i) { return (lane() >> 2) + ((i >> 1) & 1) * 8; }
DEVICE u32 mma_col(u32 i) { return (lane() & 3) * 2 + (i & 1) + (i >> 2) * 8; }

#else
// ------------------------------------------------------------------------------------------------------------- AMD
#ifndef WAVE
#error "WAVE (32 or 64) is a compiler option on AMD"
#endif
#if !defined(__HIPCC_RTC__)
#define __global__ __attribute__((global))
#define __device__ __attribute__((device))
#define __shared__ __attribute__((shared))
#endif
#define DEVICE __device__ inline __attribute__((always_inline))
#define KERNEL(name, threads) \
    extern "C" __global__ void __attribute__((amdgpu_flat_work_group_size(threads, threads))) name
#define KERNEL_TWO(name, threads) KERNEL(name, threads)
#define KERNEL_WIDE KERNEL
#define EXPORT(name)
#define SHARED(T, name, n) __shared__ __attribute__((aligned(16))) T name[n]
#define UNROLL _Pragma("unroll")
#define ROLLED _Pragma("unroll 1")

DEVICE u32 thread_index() { return __builtin_amdgcn_workitem_id_x(); }
DEVICE u32 block_x() { return __builtin_amdgcn_workgroup_id_x(); }
DEVICE u32 block_y() { return __builtin_amdgcn_workgroup_id_y(); }
DEVICE u32 block_z() { return __builtin_amdgcn_workgroup_id_z(); }
DEVICE u32 lane() {
#if WAVE == 64
    return __builtin_amdgcn_mbcnt_hi(~0u, __builtin_amdgcn_mbcnt_lo(~0u, 0u));
#else
    return __builtin_amdgcn_mbcnt_lo(~0u, 0u);
#endif
}
DEVICE void barrier() {
    __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
    __builtin_amdgcn_s_barrier();
    __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");
}
DEVICE void wave_barrier() {
    __builtin_amdgcn_fence(__ATOMIC_RELEASE, "wavefront");
    __builtin_amdgcn_wave_barrier();
    __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "wavefront");
}

DEVICE i32 shfl(i32 v, u32 from) { return __builtin_amdgcn_ds_bpermute((from & (WAVE - 1)) << 2, v); }
DEVICE u32 shfl(u32 v, u32 from) { return (u32)shfl((i32)v, from); }
DEVICE float shfl(float v, u32 from) { return __builtin_bit_cast(float, shfl(__builtin_bit_cast(i32, v), from)); }
DEVICE i32 shfl_xor(i32 v, u32 mask) { return shfl(v, lane() ^ mask); }
DEVICE u32 shfl_xor(u32 v, u32 mask) { return shfl(v, lane() ^ mask); }
DEVICE float shfl_xor(float v, u32 mask) { return shfl(v, lane() ^ mask); }
DEVICE u64 wave_ballot(bool v) {
#if WAVE == 64
    return __builtin_amdgcn_ballot_w64(v);
#else
    return __builtin_amdgcn_ballot_w32(v);
#endif
}

DEVICE i32 dot4(i32 a, i32 b, i32 c) {
#if defined(__GFX11__) || defined(__GFX12__)
    return __builtin_amdgcn_sudot4(true, a, true, b, c, false);
#elif defined(__gfx906__) || defined(__gfx908__) || defined(__gfx90a__) || defined(__gfx942__) ||                     \
    defined(__gfx950__) || defined(__gfx1011__) || defined(__gfx1012__) || defined(__gfx1030__) ||                     \
    defined(__gfx1031__) || defined(__gfx1032__) || defined(__gfx1034__) || defined(__gfx1035__) ||                    \
    defined(__gfx1036__) || defined(__gfx10_3_generic__)
    return __builtin_amdgcn_sdot4(a, b, c, false);
#else
    UNROLL for (u32 i = 0; i < 32; i += 8) c += (i32)(i8)(a >> i) * (i32)(i8)(b >> i);
    return c;
#endif
}

DEVICE float h2f(u16 h) { return (float)__builtin_bit_cast(_Float16, h); }
DEVICE u16 f2h(float f) { return __builtin_bit_cast(u16, (_Float16)f); }
DEVICE u32 f2h2(float low, float high) { return (u32)f2h(low) | (u32)f2h(high) << 16; }
DEVICE u32 bits(float f) { return __builtin_bit_cast(u32, f); }
DEVICE float from_bits(u32 u) { return __builtin_bit_cast(float, u); }
DEVICE float exp_(float x) { return __builtin_elementwise_exp(x); }
DEVICE float log_(float x) { return __builtin_elementwise_log(x); }
DEVICE float sqrt_(float x) { return __builtin_elementwise_sqrt(x); }
DEVICE float rsqrt_(float x) { return __builtin_amdgcn_rsqf(x); }
DEVICE float floor_(float x) { return __builtin_elementwise_floor(x); }
DEVICE float round_(float x) { return __builtin_elementwise_roundeven(x); }
DEVICE double floor64(double x) { return __builtin_elementwise_floor(x); }
DEVICE float fma_(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
DEVICE float mul_(float a, float b) {
#pragma clang fp contract(off)
    return a * b;
}
DEVICE float max_(float a, float b) { return __builtin_fmaxf(a, b); }
DEVICE float min_(float a, float b) { return __builtin_fminf(a, b); }
DEVICE float abs_(float a) { return __builtin_fabsf(a); }
// Without a device library: ln(1+x) keeps its digits near 0 by the correction of Kahan, tanh by its odd series.
DEVICE float log1p_(float x) {
    const float u = 1.0f + x;
    return u == 1.0f ? x : log_(u) * (x / (u - 1.0f));
}
DEVICE float tanh_(float x) {
    const float a = abs_(x);
    if (a < 0.05f) return x * (1.0f - x * x * (1.0f / 3.0f));
    const float t = 1.0f - 2.0f / (exp_(2.0f * min_(a, 20.0f)) + 1.0f);
    return x < 0.0f ? -t : t;
}

typedef u32 amd_u32x4 __attribute__((ext_vector_type(4)));
typedef u32 amd_u32x2 __attribute__((ext_vector_type(2)));
DEVICE u32x4 stream16(const void *p) {
    const amd_u32x4 v = __builtin_nontemporal_load((const amd_u32x4 *)p);
    return u32x4{v.x, v.y, v.z, v.w};
}
DEVICE u32x2 stream8(const void *p) {
    const amd_u32x2 v = __builtin_nontemporal_load((const amd_u32x2 *)p);
    return u32x2{v.x, v.y};
}
DEVICE u32 stream4(const void *p) { return __builtin_nontemporal_load((const u32 *)p); }
DEVICE u32 stream2(const void *p) { return __builtin_nontemporal_load((const u16 *)p); }

DEVICE float atomic_add(float *p, float v) {
    return __hip_atomic_fetch_add(p, v, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
}
DEVICE u32 atomic_add(u32 *p, u32 v) {
    return __hip_atomic_fetch_add(p, v, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
}
DEVICE u64 atomic_max(u64 *p, u64 v) {
    return __hip_atomic_fetch_max(p, v, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
}

#define MMA_LANE (256 / WAVE)
struct MmaC {
    float v[MMA_LANE];
};
#if defined(__GFX12__) && WAVE == 32
typedef _Float16 amd_f16x8 __attribute__((ext_vector_type(8)));
typedef float amd_f32x8 __attribute__((ext_vector_type(8)));
struct MmaA {
    amd_f16x8 r;
};
struct MmaB {
    amd_f16x8 r;
};
DEVICE MmaA mma_load_a(const u16 *p, u32 stride) {
    return MmaA{*(const amd_f16x8 *)(p + (lane() & 15) * stride + (lane() >> 4) * 8)};
}
DEVICE MmaB mma_load_b(const u16 *p, u32 stride) {
    return MmaB{*(const amd_f16x8 *)(p + (lane() & 15) * stride + (lane() >> 4) * 8)};
}
DEVICE void mma(MmaC &c, const MmaA &a, const MmaB &b) {
    amd_f32x8 &sum = *(amd_f32x8 *)c.v;
    sum = __builtin_amdgcn_wmma_f32_16x16x16_f16_w32_gfx12(a.r, b.r, sum);
}
DEVICE u32 mma_row(u32 i) { return i + (lane() >> 4) * 8; }
DEVICE u32 mma_col(u32) { return lane() & 15; }
#elif defined(__GFX11__) && WAVE == 32
typedef _Float16 amd_f16x8 __attribute__((ext_vector_type(8)));
typedef _Float16 amd_f16x16 __attribute__((ext_vector_type(16)));
typedef float amd_f32x8 __attribute__((ext_vector_type(8)));
struct MmaA {
    amd_f16x16 r;
};
struct MmaB {
    amd_f16x16 r;
};
// Lanes 16 to 31 repeat what lanes 0 to 15 hold.
DEVICE amd_f16x16 mma_row16(const u16 *p) {
    const amd_f16x8 low = *(const amd_f16x8 *)p, high = *(const amd_f16x8 *)(p + 8);
    return __builtin_shufflevector(low, high, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
}
DEVICE MmaA mma_load_a(const u16 *p, u32 stride) { return MmaA{mma_row16(p + (lane() & 15) * stride)}; }
DEVICE MmaB mma_load_b(const u16 *p, u32 stride) { return MmaB{mma_row16(p + (lane() & 15) * stride)}; }
DEVICE void mma(MmaC &c, const MmaA &a, const MmaB &b) {
    amd_f32x8 &sum = *(amd_f32x8 *)c.v;
    sum = __builtin_amdgcn_wmma_f32_16x16x16_f16_w32(a.r, b.r, sum);
}
DEVICE u32 mma_row(u32 i) { return 2 * i + (lane() >> 4); }
DEVICE u32 mma_col(u32) { return lane() & 15; }
#else
#define MMA_PLAIN 1
#endif
#endif

// ----------------------------------------------------------------------------------------------------- All devices
#if MMA_PLAIN
// No matrix instruction: a fragment remembers where its matrix lies, so shared memory must not change before mma().
struct MmaA {
    const u16 *p;
    u32 stride;
};
struct MmaB {
    const u16 *p;
    u32 stride;
};
DEVICE MmaA mma_load_a(const u16 *p, u32 stride) { return MmaA{p, stride}; }
DEVICE MmaB mma_load_b(const u16 *p, u32 stride) { return MmaB{p, stride}; }
DEVICE u32 mma_row(u32 i) { return (lane() >> 4) + i * (WAVE / 16); }
DEVICE u32 mma_col(u32) { return lane() & 15; }
DEVICE void mma(MmaC &c, const MmaA &a, const MmaB &b) {
    const u16 *column = b.p + mma_col(0) * b.stride;
    UNROLL for (u32 i = 0; i < MMA_LANE; i++) {
        const u16 *row = a.p + mma_row(i) * a.stride;
        for (u32 k = 0; k < 16; k++) c.v[i] = fma_(h2f(row[k]), h2f(column[k]), c.v[i]);
    }
}
#endif

DEVICE MmaC mma_zero() {
    MmaC c;
    UNROLL for (u32 i = 0; i < MMA_LANE; i++) c.v[i] = 0.0f;
    return c;
}

#if GPU_AMD
// Said to be the same in all lanes, which the compiler does not see: branches on it then need no masks.
DEVICE u32 wave_index() { return __builtin_amdgcn_readfirstlane(thread_index() / WAVE); }
#else
DEVICE u32 wave_index() { return thread_index() / WAVE; }
#endif

#if !GPU_EMULATED
// Sums and maxima over groups of `width` neighbouring lanes, a power of two up to WAVE; every lane gets the result.
template <u32 width, class T> DEVICE T group_sum(T v) {
    UNROLL for (u32 m = width / 2; m > 0; m >>= 1) v += shfl_xor(v, m);
    return v;
}
template <u32 width> DEVICE float group_max(float v) {
    UNROLL for (u32 m = width / 2; m > 0; m >>= 1) v = max_(v, shfl_xor(v, m));
    return v;
}
#endif
template <class T> DEVICE T wave_sum(T v) { return group_sum<WAVE>(v); }
DEVICE float wave_max(float v) { return group_max<WAVE>(v); }

DEVICE float bf2f(u16 b) { return from_bits((u32)b << 16); }
// Rounds to nearest even; NaN stays NaN.
DEVICE u16 f2bf(float f) {
    const u32 u = bits(f);
    if ((u & 0x7fffffffu) > 0x7f800000u) return (u16)((u >> 16) | 0x40);
    return (u16)((u + 0x7fffu + ((u >> 16) & 1)) >> 16);
}
DEVICE float sigmoid_(float x) { return 1.0f / (1.0f + exp_(-x)); }
DEVICE float silu_(float x) { return x / (1.0f + exp_(-x)); }
// ln(1 + e^x) without overflow.
DEVICE float softplus_(float x) { return x > 20.0f ? x : log1p_(exp_(x)); }
// The tanh form of GELU.
DEVICE float gelu_(float x) {
    return 0.5f * x * (1.0f + tanh_(0.7978845608028654f * x * (1.0f + 0.044715f * x * x)));
}
DEVICE u32 min_u32(u32 a, u32 b) { return a < b ? a : b; }
DEVICE u32 max_u32(u32 a, u32 b) { return a > b ? a : b; }

// Sum over the block of `threads` threads; every thread gets it. Ends in a barrier, so `scratch` may be used again.
template <u32 threads> DEVICE float block_sum(float v, float *scratch) {
    v = wave_sum(v);
    if (lane() == 0) scratch[wave_index()] = v;
    barrier();
    float sum = 0.0f;
    UNROLL for (u32 i = 0; i < threads / WAVE; i++) sum += scratch[i];
    barrier();
    return sum;
}
template <u32 threads> DEVICE float block_max(float v, float *scratch) {
    v = wave_max(v);
    if (lane() == 0) scratch[wave_index()] = v;
    barrier();
    float most = scratch[0];
    UNROLL for (u32 i = 1; i < threads / WAVE; i++) most = max_(most, scratch[i]);
    barrier();
    return most;
}

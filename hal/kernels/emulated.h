// The emulated device: kernels run on the host, one fiber per GPU thread. A block runs to its end before the next one of
// the same OS thread starts; barriers, shuffles and sums are where fibers change. The order of threads is chosen by the
// caller, shared memory is filled with 0xFF before every block, and a barrier or shuffle that not all threads reach ends
// the launch with an error.
#if !defined(__x86_64__) || defined(_WIN32)
#error "the emulated device needs x86-64 and the System V calling convention"
#endif
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <sys/mman.h>
#ifndef WAVE
#define WAVE 32
#endif
#define DEVICE inline
#define UNROLL
#define ROLLED
#define KERNEL(name, threads)                     \
    static constexpr unsigned name##_threads = threads; \
    static void name
#define KERNEL_TWO(name, threads) KERNEL(name, threads)
#define KERNEL_WIDE KERNEL
#define EXPORT(name)                                                           \
    extern "C" __attribute__((visibility("default"))) const emulated::Entry    \
        skep_entry_##name = emulated::entry<&name>(name##_threads);
#define SHARED(T, name, n)                                   \
    static const unsigned name##_slot = emulated::new_slot(); \
    T *const name = (T *)emulated::shared(name##_slot, sizeof(T) * (n))

namespace emulated {
constexpr unsigned MOST_THREADS = 1024, MOST_SLOTS = 256;
constexpr size_t SHARED_BYTES = 64 << 10, STACK = 64 << 10, PAGE = 4096;

enum Wait : unsigned char { READY, BLOCK_BARRIER, WAVE_BARRIER, SHUFFLE, SUM, MAXIMUM, BALLOT, DONE };

struct Fiber {
    void *stack_pointer;
    Wait wait;
    unsigned char turn;
};

struct Block {
    Fiber fibers[MOST_THREADS];
    u64 exchanged[2][MOST_THREADS];
    void *shared_slots[MOST_SLOTS];
    char *shared_memory, *stacks;
    void *scheduler;
    size_t used;
    u32 x, y, z, current;
    void (*call)(void **);
    void **arguments;
    const char *failure;
};

// One per OS thread; kernels on it find it here.
inline thread_local __attribute__((tls_model("initial-exec"))) Block *block = nullptr;

extern "C" void skep_emulated_switch(void **from, void *to);
asm(R"(.text
.globl skep_emulated_switch
.hidden skep_emulated_switch
.type skep_emulated_switch,@function
skep_emulated_switch:
    push %rbp; push %rbx; push %r12; push %r13; push %r14; push %r15
    mov %rsp,(%rdi); mov %rsi,%rsp
    pop %r15; pop %r14; pop %r13; pop %r12; pop %rbx; pop %rbp; ret
)");

inline void pause(Wait wait) {
    Fiber &fiber = block->fibers[block->current];
    fiber.wait = wait;
    skep_emulated_switch(&fiber.stack_pointer, block->scheduler);
}

// Ends the launch.
inline void fail(const char *why) {
    block->failure = why;
    pause(READY);
    abort();
}

inline unsigned new_slot() {
    static unsigned slots = 0;
    return __atomic_fetch_add(&slots, 1, __ATOMIC_RELAXED);
}

inline void *shared(unsigned slot, size_t bytes) {
    if (slot >= MOST_SLOTS) fail("more shared arrays than the emulated device knows");
    void *&place = block->shared_slots[slot];
    if (!place) {
        bytes = (bytes + 15) & ~size_t(15);
        if (block->used + bytes > SHARED_BYTES) fail("more than 64 KiB of shared memory");
        place = block->shared_memory + block->used;
        block->used += bytes;
    }
    return place;
}

inline void thread_main() {
    block->call(block->arguments);
    pause(DONE);
    abort();
}

// What Rust finds of a kernel.
struct Entry {
    void (*call)(void **);
    unsigned threads, arguments;
    const unsigned char *sizes;
};

template <class... A> struct Sizes {
    static constexpr unsigned char list[sizeof...(A) + 1] = {sizeof(A)..., 0};
};
template <size_t... I> struct Indices {};
template <size_t N, size_t... I> struct Count : Count<N - 1, N - 1, I...> {};
template <size_t... I> struct Count<0, I...> {
    typedef Indices<I...> type;
};

template <auto F> struct Call;
template <class... A, void (*F)(A...)> struct Call<F> {
    template <size_t... I> static void spread(void **arguments, Indices<I...>) { F(*(A *)arguments[I]...); }
    static void run(void **arguments) { spread(arguments, typename Count<sizeof...(A)>::type()); }
    static constexpr Entry entry(unsigned threads) { return {&run, threads, sizeof...(A), Sizes<A...>::list}; }
};
template <auto F> constexpr Entry entry(unsigned threads) { return Call<F>::entry(threads); }

// Blocks that have been set up are kept for the next launch on the same OS thread.
struct Keeper {
    Block *kept = nullptr;
    ~Keeper() {
        if (!kept) return;
        munmap(kept->shared_memory, SHARED_BYTES);
        munmap(kept->stacks, MOST_THREADS * STACK);
        free(kept);
    }
};
inline thread_local Keeper keeper;

inline Block *set_up() {
    if (keeper.kept) return keeper.kept;
    Block *made = (Block *)calloc(1, sizeof(Block));
    if (!made) return nullptr;
    const int access = PROT_READ | PROT_WRITE, kind = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    made->shared_memory = (char *)mmap(nullptr, SHARED_BYTES, access, kind, -1, 0);
    made->stacks = (char *)mmap(nullptr, MOST_THREADS * STACK, access, kind, -1, 0);
    if (made->shared_memory == MAP_FAILED || made->stacks == MAP_FAILED) return nullptr;
    memset(made->shared_memory, 0xFF, SHARED_BYTES);
    for (unsigned i = 0; i < MOST_THREADS; i++) mprotect(made->stacks + i * STACK, PAGE, PROT_NONE);
    return keeper.kept = made;
}

struct Random {
    u64 state;
    u32 below(u32 n) {
        state = state * 6364136223846793005ull + 1442695040888963407ull;
        return (u32)((state >> 33) % n);
    }
};

enum Order : u32 { FORWARD, REVERSE, RANDOM };

inline void arrange(u32 *list, u32 n, u32 order, Random &random) {
    for (u32 i = 0; i < n; i++) list[i] = order == REVERSE ? n - 1 - i : i;
    if (order == RANDOM)
        for (u32 i = n - 1; i > 0; i--) {
            const u32 j = random.below(i + 1), kept = list[i];
            list[i] = list[j];
            list[j] = kept;
        }
}

// Lets the lanes of a wave run until each waits for something; says whether any did.
inline bool advance(Block &b, u32 wave, u32 order, Random &random) {
    u32 lanes[WAVE];
    bool moved = false;
    arrange(lanes, WAVE, order, random);
    for (u32 i = 0; i < WAVE; i++) {
        Fiber &fiber = b.fibers[b.current = wave * WAVE + lanes[i]];
        if (fiber.wait != READY) continue;
        skep_emulated_switch(&b.scheduler, fiber.stack_pointer);
        if (b.failure) return false;
        moved = true;
    }
    // All lanes at the same operation of the wave go on together.
    Fiber *fibers = b.fibers + wave * WAVE;
    const Wait wait = fibers[0].wait;
    bool any = false, all = true;
    for (u32 i = 0; i < WAVE; i++) {
        any |= fibers[i].wait > BLOCK_BARRIER && fibers[i].wait < DONE;
        all &= fibers[i].wait == wait;
    }
    if (any && !all) {
        b.failure = "a shuffle or wave barrier that not all lanes of the wave reach";
        return false;
    }
    if (any)
        for (u32 i = 0; i < WAVE; i++) fibers[i].wait = READY;
    return moved;
}

inline void run_block(Block &b, u32 threads, u32 order, Random &random) {
    memset(b.shared_memory, 0xFF, b.used);
    memset(b.shared_slots, 0, sizeof b.shared_slots);
    b.used = 0;
    for (u32 i = 0; i < threads; i++) {
        void **top = (void **)(b.stacks + (i + 1) * STACK - 64);
        *--top = nullptr;
        *--top = (void *)thread_main;
        for (int k = 0; k < 6; k++) *--top = nullptr;
        b.fibers[i] = Fiber{top, READY, 0};
    }
    const u32 waves = threads / WAVE;
    u32 list[MOST_THREADS / WAVE];
    for (;;) {
        bool moved = false;
        arrange(list, waves, order, random);
        for (u32 i = 0; i < waves; i++) {
            // In random order the waves take turns within what lies between two barriers too.
            while (advance(b, list[i], order, random)) {
                moved = true;
                if (order == RANDOM) break;
            }
            if (b.failure) return;
        }
        if (moved) continue;
        u32 done = 0, waiting = 0;
        for (u32 i = 0; i < threads; i++) {
            done += b.fibers[i].wait == DONE;
            waiting += b.fibers[i].wait == BLOCK_BARRIER;
        }
        if (done == threads) return;
        if (waiting != threads) {
            b.failure = "a barrier that not all threads of the block reach";
            return;
        }
        for (u32 i = 0; i < threads; i++) b.fibers[i].wait = READY;
    }
}

template <class T> inline u64 *exchange(T value, Wait kind) {
    Fiber &fiber = block->fibers[block->current];
    // Two boards in turn: a lane can write the next one before its neighbours have read this one, never the one after.
    u64 *board = block->exchanged[fiber.turn ^= 1];
    board[block->current] = 0;
    memcpy(board + block->current, &value, sizeof value);
    pause(kind);
    return board + block->current / WAVE * WAVE;
}
template <class T> inline T taken(const u64 *board, u32 lane) {
    T value;
    memcpy(&value, board + (lane & (WAVE - 1)), sizeof value);
    return value;
}
} // namespace emulated

// Runs blocks `first .. first + count` of a grid of `gx * gy * gz`; 0, or 1 with the reason in `message`.
extern "C" __attribute__((visibility("default"))) int
skep_emulated_run(const emulated::Entry *entry, void **arguments, u32 gx, u32 gy, u64 first, u64 count, u32 order,
                  u64 seed, const char **message, u64 *failed_block) {
    using namespace emulated;
    Block *b = block = set_up();
    if (!b) {
        *message = "no memory for the stacks of a block";
        return 1;
    }
    b->call = entry->call;
    b->arguments = arguments;
    b->failure = nullptr;
    Random random{seed * 2 + 1};
    for (u64 i = first; i < first + count; i++) {
        b->x = (u32)(i % gx);
        b->y = (u32)(i / gx % gy);
        b->z = (u32)(i / gx / gy);
        run_block(*b, entry->threads, order, random);
        if (b->failure) {
            *message = b->failure;
            *failed_block = i;
            return 1;
        }
    }
    return 0;
}

DEVICE u32 thread_index() { return emulated::block->current; }
DEVICE u32 block_x() { return emulated::block->x; }
DEVICE u32 block_y() { return emulated::block->y; }
DEVICE u32 block_z() { return emulated::block->z; }
DEVICE u32 lane() { return emulated::block->current & (WAVE - 1); }
DEVICE void barrier() { emulated::pause(emulated::BLOCK_BARRIER); }
DEVICE void wave_barrier() { emulated::pause(emulated::WAVE_BARRIER); }
template <class T> DEVICE T shfl(T v, u32 from) { return emulated::taken<T>(emulated::exchange(v, emulated::SHUFFLE), from); }
template <class T> DEVICE T shfl_xor(T v, u32 mask) {
    const u32 from = lane() ^ mask;
    return emulated::taken<T>(emulated::exchange(v, emulated::SHUFFLE), from);
}
DEVICE u64 wave_ballot(bool v) {
    const u64 *board = emulated::exchange<u64>(v, emulated::BALLOT);
    u64 mask = 0;
    for (u32 i = 0; i < WAVE; i++) mask |= board[i] << i;
    return mask;
}
// The same tree as the shuffles of a GPU make, in one exchange.
template <u32 width, class T> DEVICE T group_sum(T v) {
    const u32 start = lane() & ~(width - 1);
    const u64 *board = emulated::exchange(v, emulated::SUM);
    T tree[width];
    for (u32 i = 0; i < width; i++) tree[i] = emulated::taken<T>(board, start + i);
    for (u32 m = width / 2; m > 0; m >>= 1)
        for (u32 i = 0; i < m; i++) tree[i] += tree[i + m];
    return tree[0];
}
template <u32 width> DEVICE float group_max(float v) {
    const u32 start = lane() & ~(width - 1);
    const u64 *board = emulated::exchange(v, emulated::MAXIMUM);
    float most = emulated::taken<float>(board, start);
    for (u32 i = 1; i < width; i++) most = __builtin_fmaxf(most, emulated::taken<float>(board, start + i));
    return most;
}

DEVICE i32 dot4(i32 a, i32 b, i32 c) {
    for (u32 i = 0; i < 32; i += 8) c += (i32)(i8)(a >> i) * (i32)(i8)(b >> i);
    return c;
}
DEVICE float h2f(u16 h) {
    _Float16 f;
    memcpy(&f, &h, 2);
    return (float)f;
}
DEVICE u16 f2h(float f) {
    const _Float16 half = (_Float16)f;
    u16 h;
    memcpy(&h, &half, 2);
    return h;
}
DEVICE u32 f2h2(float low, float high) { return (u32)f2h(low) | (u32)f2h(high) << 16; }
DEVICE u32 bits(float f) {
    u32 u;
    memcpy(&u, &f, 4);
    return u;
}
DEVICE float from_bits(u32 u) {
    float f;
    memcpy(&f, &u, 4);
    return f;
}
DEVICE float exp_(float x) { return expf(x); }
DEVICE float log_(float x) { return logf(x); }
DEVICE float log1p_(float x) { return log1pf(x); }
DEVICE float tanh_(float x) { return tanhf(x); }
DEVICE float sqrt_(float x) { return sqrtf(x); }
DEVICE float rsqrt_(float x) { return 1.0f / sqrtf(x); }
DEVICE float floor_(float x) { return floorf(x); }
DEVICE float round_(float x) { return rintf(x); }
DEVICE double floor64(double x) { return floor(x); }
DEVICE float fma_(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
DEVICE float mul_(float a, float b) { return a * b; } // The host's compiler fuses nothing.
DEVICE float max_(float a, float b) { return __builtin_fmaxf(a, b); }
DEVICE float min_(float a, float b) { return __builtin_fminf(a, b); }
DEVICE float abs_(float a) { return __builtin_fabsf(a); }

// Device loads of n bytes need addresses that are multiples of n.
template <class T> DEVICE T stream(const void *p) {
    if ((u64)p % sizeof(T)) emulated::fail("a load from an address that is not a multiple of its width");
    T v;
    memcpy(&v, p, sizeof v);
    return v;
}
DEVICE u32x4 stream16(const void *p) { return stream<u32x4>(p); }
DEVICE u32x2 stream8(const void *p) { return stream<u32x2>(p); }
DEVICE u32 stream4(const void *p) { return stream<u32>(p); }
DEVICE u32 stream2(const void *p) { return stream<u16>(p); }

DEVICE float atomic_add(float *p, float v) {
    u32 old = __atomic_load_n((u32 *)p, __ATOMIC_RELAXED);
    while (!__atomic_compare_exchange_n((u32 *)p, &old, bits(from_bits(old) + v), true, __ATOMIC_RELAXED,
                                        __ATOMIC_RELAXED)) {
    }
    return from_bits(old);
}
DEVICE u32 atomic_add(u32 *p, u32 v) { return __atomic_fetch_add(p, v, __ATOMIC_RELAXED); }
DEVICE u64 atomic_max(u64 *p, u64 v) {
    u64 old = __atomic_load_n(p, __ATOMIC_RELAXED);
    while (old < v && !__atomic_compare_exchange_n(p, &old, v, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
    }
    return old;
}

#define MMA_LANE (256 / WAVE)
#define MMA_PLAIN 1
struct MmaC {
    float v[MMA_LANE];
};

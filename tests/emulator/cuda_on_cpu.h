// CUDA C++ as plain C++, for one block at a time: each thread is a fiber, and every barrier switches fibers.
//
// It has what the tested kernels use. Values that the threads of a warp exchange go through arrays between two
// barriers of the warp. Tensor-core instructions are computed lane by lane in double precision. Shared memory is full
// of NaN at first.
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <map>
#include <utility>
#include <vector>

#define __device__
#define __global__
#define __forceinline__ inline
#define __restrict__
#define __constant__ static
#ifdef RACES
#include "races_on_cpu.h"
#else
#define UNWATCHED
namespace races {
struct Pause {
    Pause() {}
};
}  // namespace races
#endif
#define __shared__ static
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))

using std::max;
using std::min;
inline unsigned min(unsigned a, int b) { return a < unsigned(b) ? a : unsigned(b); }

struct Index {
    unsigned x, y, z;
};
static Index threadIdx, blockIdx, gridDim;

struct alignas(16) float4 { float x, y, z, w; };
struct alignas(8) float2 { float x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
struct alignas(8) uint2 { unsigned x, y; };
struct alignas(8) int2 { int x, y; };
struct alignas(4) ushort2 { unsigned short x, y; };
inline float4 make_float4(float a, float b, float c, float d) { return {a, b, c, d}; }
inline uint4 make_uint4(unsigned a, unsigned b, unsigned c, unsigned d) { return {a, b, c, d}; }
inline float2 make_float2(float a, float b) { return {a, b}; }
inline int2 make_int2(int a, int b) { return {a, b}; }

alignas(1024) static unsigned char shared_memory[256 * 1024];
inline size_t __cvta_generic_to_shared(const void *p) { return static_cast<const unsigned char *>(p) - shared_memory; }

template <typename T>
void require_aligned(const T *p, size_t bytes = sizeof(T)) {
    if (reinterpret_cast<uintptr_t>(p) % bytes) std::abort();
}
template <typename T>
void __stcs(T *p, T v) { require_aligned(p), *p = v; }
template <typename T>
T __ldg(const T *p) { return require_aligned(p), *p; }
inline unsigned __float_as_uint(float f) { unsigned u; std::memcpy(&u, &f, 4); return u; }
inline float __uint_as_float(unsigned u) { float f; std::memcpy(&f, &u, 4); return f; }

// ---------------------------------------------------------------------------------------------- fibers

constexpr size_t STACK = 256 * 1024;
constexpr int MOST_IDLE = 64;  // passes over all threads in which none arrives at a barrier: a deadlock

static ucontext_t scheduler;
static std::vector<ucontext_t> fibers;
static std::vector<std::vector<char>> stacks;
static std::vector<char> finished;
static int current, idle;
static void (*body)();

UNWATCHED inline void yield() {
    const races::Pause pause;
    swapcontext(&fibers[current], &scheduler);
    threadIdx.x = current;
}

// A barrier orders all accesses in front of it before all behind it.
struct Order {
#ifdef RACES
    races::Clock pending, opened;
    UNWATCHED void arrived() { races::release(current, pending); }
    UNWATCHED void complete() { races::join(opened, pending), pending.clear(); }
    UNWATCHED void passed() { races::acquire(current, opened); }
#else
    void arrived() {}
    void complete() {}
    void passed() {}
#endif
};

#ifdef RACES
// What lies in the library's static memory is shared memory, or this file's own, which only UNWATCHED functions write.
extern "C" __attribute__((visibility("hidden"))) unsigned char __bss_start[], _end[];
UNWATCHED inline void watch(void *p, int bytes, races::Kind kind, const void *code) {
    if (races::off || races::found || p < __bss_start || p >= _end) return;
    const races::Pause pause;
    for (int i = 0; i < bytes; i += 2)
        if (!races::watch(uintptr_t(p) / 2 * 2 + i, current, kind, code)) return;
}
#define HERE __builtin_return_address(0)
#define WATCH(n)                                                                                   \
    extern "C" UNWATCHED void __tsan_read##n(void *p) { watch(p, n, races::READ, HERE); }            \
    extern "C" UNWATCHED void __tsan_write##n(void *p) { watch(p, n, races::WRITE, HERE); }          \
    extern "C" UNWATCHED void __tsan_unaligned_read##n(void *p) { watch(p, n, races::READ, HERE); }  \
    extern "C" UNWATCHED void __tsan_unaligned_write##n(void *p) { watch(p, n, races::WRITE, HERE); }
WATCH(1) WATCH(2) WATCH(4) WATCH(8) WATCH(16)
extern "C" UNWATCHED void __tsan_read_range(void *p, long n) { watch(p, n, races::READ, HERE); }
extern "C" UNWATCHED void __tsan_write_range(void *p, long n) { watch(p, n, races::WRITE, HERE); }
extern "C" UNWATCHED void __tsan_init() {}
extern "C" UNWATCHED void __tsan_func_entry(void *) {}
extern "C" UNWATCHED void __tsan_func_exit() {}
extern "C" UNWATCHED void __tsan_vptr_update(void **, void *) {}
extern "C" int races_found() { return races::found; }
#endif

static std::map<void *, Order> of_mbarriers;

UNWATCHED inline int atomicExch(int *p, int v) {
#ifdef RACES
    watch(p, 4, races::ATOMIC, HERE);
#endif
    const int old = *p;
    *p = v;
    return old;
}
UNWATCHED inline int atomicAdd(int *p, int v) { return atomicExch(p, *p + v); }
UNWATCHED inline unsigned atomicMax(unsigned *p, unsigned v) {
    const unsigned before = *p;
    *p = before > v ? before : v;
    return before;
}
// The larger of each half of two words.
inline unsigned __vmaxu2(unsigned a, unsigned b) {
    const unsigned low = max(a & 0xffff, b & 0xffff), high = max(a >> 16, b >> 16);
    return high << 16 | low;
}

struct ThreadBarrier {
    int arrived = 0;
    long generation = 0;
    Order order;
    UNWATCHED void sync(int count, bool orders = true) {
        const races::Pause pause;
        const long mine = generation;
        idle = 0;
        if (orders) order.arrived();
        if (++arrived == count) arrived = 0, generation++, order.complete();
        while (generation == mine) yield();
        if (orders) order.passed();
    }
};
static ThreadBarrier named[16], of_warp[32], of_warpgroup[8];
inline void __syncthreads() { named[0].sync(fibers.size()); }
UNWATCHED inline int __syncthreads_or(int condition) {
    static int any;
    __syncthreads();
    any = 0;
    __syncthreads();
    any |= condition;
    __syncthreads();
    return any;
}
inline void __syncwarp() { of_warp[threadIdx.x / 32].sync(32); }
inline void exchange() { of_warp[threadIdx.x / 32].sync(32, false); }  // of registers: it orders no memory

UNWATCHED inline void start() {
    threadIdx.x = current;
#ifdef RACES
    races::off = false;
#endif
    body();
    const races::Pause pause;
    finished[current] = 1;
    yield();
}

// Run one block. Returns 0 if all threads end and leave no barrier half used.
UNWATCHED inline int run_block(int threads, void (*entry)()) {
    std::memset(shared_memory, 0xff, sizeof shared_memory);
    for (auto [first, last] : {std::pair(named, named + 16), {of_warp, of_warp + 32}, {of_warpgroup, of_warpgroup + 8}})
        std::fill(first, last, ThreadBarrier());
    of_mbarriers.clear();
#ifdef RACES
    races::begin(threads);
#endif
    fibers.assign(threads, ucontext_t()), finished.assign(threads, 0), body = entry;
    while (int(stacks.size()) < threads) stacks.emplace_back(STACK);
    for (int i = 0; i < threads; i++) {
        getcontext(&fibers[i]);
        fibers[i].uc_stack.ss_sp = stacks[i].data(), fibers[i].uc_stack.ss_size = STACK;
        makecontext(&fibers[i], start, 0);
    }
    for (idle = 0; idle < MOST_IDLE; idle++) {
        bool left = false;
        for (current = 0; current < threads; current++)
            if (!finished[current]) left = true, swapcontext(&scheduler, &fibers[current]);
        if (!left) return std::any_of(named, named + 16, [](const ThreadBarrier &b) { return b.arrived; });
    }
    return 1;
}

// ---------------------------------------------------------------------------------------------- warps

static long long exchanged[32][32];
template <typename T, typename F>
UNWATCHED T of_all_lanes(T value, F f) {
    long long *const mine = exchanged[threadIdx.x / 32];
    mine[threadIdx.x % 32] = value;
    exchange();
    T result = T(mine[0]);
    for (int i = 1; i < 32; i++) result = f(result, T(mine[i]));
    exchange();
    return result;
}
template <typename T>
T __reduce_max_sync(unsigned, T v) { return of_all_lanes(v, [](T a, T b) { return max(a, b); }); }
template <typename T>
T __reduce_or_sync(unsigned, T v) { return of_all_lanes(v, [](T a, T b) { return a | b; }); }
template <typename T>
T __reduce_min_sync(unsigned, T v) { return of_all_lanes(v, [](T a, T b) { return min(a, b); }); }
inline int __all_sync(unsigned, bool condition) { return __reduce_min_sync(~0u, unsigned(condition)); }
template <typename T>
UNWATCHED T __shfl_sync(unsigned, T v, int lane) {
    static_assert(sizeof(T) == 4, "one register");
    long long *const all = exchanged[threadIdx.x / 32];
    std::memcpy(all + threadIdx.x % 32, &v, 4);
    exchange();
    T result;
    std::memcpy(&result, all + lane, 4);
    exchange();
    return result;
}

template <typename T>
T __shfl_xor_sync(unsigned mask, T v, int distance) { return __shfl_sync(mask, v, threadIdx.x % 32 ^ distance); }

// ---------------------------------------------------------------------------------------------- tensor cores

inline double half_of(unsigned word, int k) {
    _Float16 value;
    const unsigned short bits = word >> (16 * (k % 2));
    std::memcpy(&value, &bits, 2);
    return value;
}

static unsigned rows_of[32][32][4], columns_of[32][32][2];  // A and B, by warp and lane

// Product k of row r of the warp's 16 x 16 matrix A.
UNWATCHED inline double row_value(int warp, int r, int k) {
    return half_of(rows_of[warp][r % 8 * 4 + k % 8 / 2][r / 8 + k / 8 * 2], k);
}

// A tensor core's sum of 17 terms: each is truncated two bits behind the last bit of a float as large as the largest
// term, and the sum at its own last bit, both towards zero. Two bits, as an H200's sums show (docs/numerics.md).
UNWATCHED inline float truncated_sum(const double (&terms)[17]) {
    double largest = 0, sum = 0;
    for (const double term : terms) largest = std::fmax(largest, std::fabs(term)), sum += term;
    if (!(largest > 0) || !std::isfinite(sum)) return float(sum);
    const double unit = std::ldexp(1.0, std::ilogb(largest) - 25);
    sum = 0;
    for (const double term : terms) sum += std::trunc(term / unit);
    sum *= unit;
    const float nearest = float(sum);
    return std::fabs(double(nearest)) > std::fabs(sum) ? std::nextafter(nearest, 0.0f) : nearest;
}

UNWATCHED inline void emulated_mma(float *d, const unsigned *a, unsigned b0, unsigned b1) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    std::memcpy(rows_of[warp][lane], a, 16);
    columns_of[warp][lane][0] = b0, columns_of[warp][lane][1] = b1;
    exchange();
    for (int v = 0; v < 4; v++) {
        double terms[17] = {d[v]};
        for (int k = 0; k < 16; k++) {
            const unsigned word = columns_of[warp][(lane % 4 * 2 + v % 2) * 4 + k % 8 / 2][k / 8];
            terms[1 + k] = row_value(warp, lane / 4 + v / 2 * 8, k) * half_of(word, k);
        }
        d[v] = truncated_sum(terms);
    }
    exchange();
}

// Without a swizzle: core matrices of 8 rows or columns x 16 bytes, their distances in the descriptor. With one: rows of
// 128, 64 or 32 bytes, of which each has its 16 bytes in another order; the address counts from multiples of 1024.
inline unsigned described(unsigned long long at, int row, int k) {
    const auto field = [&](int bit) { return (at >> bit & 0x3fff) << 4; };
    unsigned word;
    if (at >> 62) {
        const int width = 256 >> (at >> 62), from = field(0) + row / 8 * field(32) + row % 8 * width + k / 2 * 4;
        std::memcpy(&word, shared_memory + (from ^ (from >> 3 & (width - 16))), 4);
        return word;
    }
    const unsigned char *const matrix = shared_memory + field(0) + row / 8 * field(32) + k / 8 * field(16);
    std::memcpy(&word, matrix + row % 8 * 16 + k % 8 / 2 * 4, 4);
    return word;
}

// A warpgroup's 64 x 16, in registers, times 16 x columns in shared memory, added to d.
inline void emulated_wgmma(float *d, const unsigned *a, unsigned long long b, int columns) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    std::memcpy(rows_of[warp][lane], a, 16);
    of_warpgroup[warp / 4].sync(128, false);
    for (int i = 0; i < columns / 2; i++) {
        double terms[17] = {d[i]};
        for (int k = 0; k < 16; k++)
            terms[1 + k] = row_value(warp, lane / 4 + i % 4 / 2 * 8, k) *
                           half_of(described(b, i / 4 * 8 + lane % 4 * 2 + i % 2, k), k);
        d[i] = truncated_sum(terms);
    }
    of_warpgroup[warp / 4].sync(128, false);
}

// The same with A, 64 rows, in shared memory too: a lane reads the words that it would have in registers.
inline void emulated_wgmma(float *d, unsigned long long a, unsigned long long b, int columns) {
    const int row = threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4, k = threadIdx.x % 4 * 2;
    const unsigned own[4] = {described(a, row, k), described(a, row + 8, k), described(a, row, k + 8),
                             described(a, row + 8, k + 8)};
    emulated_wgmma(d, own, b, columns);
}
template <typename A>
void wgmma_overwrite(float *d, A a, unsigned long long b, int columns) {
    std::fill_n(d, columns / 2, 0.0f);
    emulated_wgmma(d, a, b, columns);
}

// denormals.cuh
inline float multiply(float a, float b) { return a * b; }
inline float multiply_add(float a, float b, float c) { return std::fma(a, b, c); }

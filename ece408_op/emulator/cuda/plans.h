// What stands in front of kernels of the package: CUDA, and the functions of their headers split_precision/instructions.cuh
// and tma.cuh, which are made of instructions of Hopper. Bulk copies are done at once. What a GPU requires of
// addresses and sizes is checked.
#pragma once
#include "ece408_emulator.h"
#include "ptx.h"

// An argument of a launch: a pointer of any type.
struct Ece408Buffer {
    void *p;
    template <typename T>
    ECE408_PLAIN operator T *() const { return static_cast<T *>(p); }
};

namespace emulator {

template <typename T>
ECE408_PLAIN inline void require_aligned(const T *p, size_t bytes = sizeof(T)) {
    if (reinterpret_cast<uintptr_t>(p) % bytes)
        stop("misaligned", "an address that is no multiple of the copy's size", __builtin_return_address(0));
}
namespace instructions {

typedef unsigned long long Descriptor;

inline unsigned shared_address(const void *p) { return __cvta_generic_to_shared(p); }

// Without an effect here, as copies and products are done at once. The number is of pending groups, or of registers.
#define ECE408_NOTHING(name) template <int = 0> inline void name() {}
ECE408_NOTHING(wait_for_previous_grid) ECE408_NOTHING(allow_next_grid)
ECE408_NOTHING(bulk_store_commit) ECE408_NOTHING(bulk_store_wait_read) ECE408_NOTHING(bulk_store_wait)
ECE408_NOTHING(wgmma_fence) ECE408_NOTHING(wgmma_commit) ECE408_NOTHING(wgmma_wait)
ECE408_NOTHING(fence_async_proxy) ECE408_NOTHING(raise_registers) ECE408_NOTHING(lower_registers)
#undef ECE408_NOTHING

using emulator::named_barrier;

// An mbarrier, 8 bytes: arrivals of a phase, those still missing, and the phases completed.
struct alignas(8) Barrier {
    short count, missing;
    int phases;
};
ECE408_PLAIN inline void mbarrier_init(Barrier *barrier, int count) { *barrier = {short(count), short(count), 0}; }
ECE408_PLAIN inline void mbarrier_arrive(Barrier *barrier) {
    Ordering *const order = ordering_of(barrier);
    made_progress();
    release(order);
    if (--barrier->missing == 0) barrier->missing = barrier->count, barrier->phases++, complete(order);
}
inline void mbarrier_arrive_expect_bytes(Barrier *barrier, int) { mbarrier_arrive(barrier); }
ECE408_PLAIN inline void mbarrier_wait_thread(Barrier *barrier, int phase) {
    while (barrier->phases % 2 == phase % 2) yield_thread();
    acquire(ordering_of(barrier));
}
inline void mbarrier_wait(Barrier *barrier, int phase) {
    mbarrier_wait_thread(barrier, phase);
    __syncwarp();
}

inline void copy_bytes(float *to, const float *from, int bytes, int alignment) {
    require_aligned(to, alignment), require_aligned(from, alignment);
    if (bytes % alignment) stop("misaligned", "a copy of no multiple of its alignment", __builtin_return_address(0));
    for (int i = 0; i < bytes / 4; i++) to[i] = from[i];
}
inline void store_if(bool condition, uint4 *to, const uint4 &value) {
    if (condition) *to = value;
}
inline void bulk_load(float *to, const float *from, int bytes, Barrier *) { copy_bytes(to, from, bytes, 16); }
inline void bulk_store(float *to, const float *from, int bytes) { copy_bytes(to, from, bytes, 16); }

inline unsigned to_fp16x2(float first, float second) {
    return ptx::half_bits(first) | unsigned(ptx::half_bits(second)) << 16;
}
inline unsigned fp16x2_residual(float first, float second, unsigned word) {
    return to_fp16x2((first - float(half_of(word, 0))) * 2048, (second - float(half_of(word, 1))) * 2048);
}
inline float from_fp16(unsigned short bits) { return half_of(bits, 0); }

// Lane l gives the address of row l % 8 of matrix l / 8.
inline void store_matrices(void *to, unsigned a, unsigned b, unsigned c, unsigned d) {
    require_aligned(static_cast<unsigned char *>(to), 16);
    const unsigned words[4] = {a, b, c, d};
    const unsigned lane = threadIdx.x % 32;
    for (int i = 0; i < 4; i++) {
        const auto row = __shfl_sync(~0u, reinterpret_cast<unsigned long long>(to), 8 * i + lane / 4);
        reinterpret_cast<unsigned *>(row)[lane % 4] = words[i];
    }
}

inline void mma(float (&d)[4], const unsigned *a, unsigned b0, unsigned b1) { mma_fp16(d, a, b0, b1); }
using emulator::wgmma;
inline Descriptor matrix_descriptor(unsigned address, int leading, int stride) {
    return (address >> 4) | Descriptor(leading >> 4) << 16 | Descriptor(stride >> 4) << 32;
}
template <typename T>
inline void hide_from_compiler(T &) {}

}  // namespace instructions

// TMA: copies of boxes of a tensor, done at once.
namespace tma {
using instructions::Barrier;

// What a CUtensorMap says (ece408_op/runtime/launch.py): sizes of each dimension, the innermost first; the box; and of
// im2col mode where the first and the last window begin, and the steps between windows, columns first.
struct TensorMap {
    const unsigned char *from;
    long long sizes[4];
    int box[3], lower[2], upper[2], step[2];
};

inline void fence_mbarrier_init() {}

// Where element c of row `row` of the box lies, whose rows are swizzled over their own width.
ECE408_PLAIN inline int box_offset(const TensorMap &map, int row, int c) {
    const int width = 2 * map.box[0], at = row * width + 2 * c;
    return at ^ (at >> 3 & (width - 16));
}
// An element of the box; zero outside the tensor.
ECE408_PLAIN inline void copy_element(void *to, const TensorMap &map, int row, int c, bool inside, long long from) {
    unsigned short value = 0;
    if (inside) std::memcpy(&value, map.from + 2 * from, 2);
    std::memcpy(static_cast<unsigned char *>(to) + box_offset(map, row, c), &value, 2);
}
ECE408_PLAIN inline void tma_load(void *to, const TensorMap &map, Barrier *, int i, int j, int k) {
    require_aligned(static_cast<unsigned char *>(to), 8 * 2 * map.box[0]);
    for (int n = 0; n < map.box[2]; n++)
        for (int c = 0; c < map.box[0]; c++)
            copy_element(to, map, n, c, i + c < map.sizes[0] && k + n < map.sizes[2],
                         ((k + n) * map.sizes[1] + j) * map.sizes[0] + i + c);
}
template <bool = false>
inline void tma_store(const TensorMap &map, const void *from, int i, int j, int k) {
    require_aligned(static_cast<const unsigned char *>(from), 8 * 2 * map.box[0]);
    for (int n = 0; n < map.box[2] && k + n < map.sizes[2]; n++)
        for (int c = 0; c < map.box[0] && i + c < map.sizes[0]; c++) {
            const long long to = ((k + n) * map.sizes[1] + j) * map.sizes[0] + i + c;
            reinterpret_cast<unsigned short *>(const_cast<unsigned char *>(map.from))[to] =
                *reinterpret_cast<const unsigned short *>(static_cast<const unsigned char *>(from) + box_offset(map, n, c));
        }
}
template <bool = false>
ECE408_PLAIN inline void tma_load_im2col(void *to, const TensorMap &map, Barrier *, int channel, int column, int row,
                                         int image, int tap_column, int tap_row) {
    require_aligned(static_cast<unsigned char *>(to), 8 * 2 * map.box[0]);
    if (channel % 8) stop("misaligned", "TMA: a channel that is no multiple of 8", __builtin_return_address(0));
    for (int n = 0; n < map.box[1]; n++) {
        const int w = column + tap_column, h = row + tap_row;
        const bool inside = w >= 0 && w < map.sizes[1] && h >= 0 && h < map.sizes[2] && image < map.sizes[3];
        for (int c = 0; c < map.box[0]; c++)
            copy_element(to, map, n, c, inside && channel + c < map.sizes[0],
                         ((image * map.sizes[2] + h) * map.sizes[1] + w) * map.sizes[0] + channel + c);
        column += map.step[0];
        if (column > map.sizes[1] - 1 + map.upper[0]) column = map.lower[0], row += map.step[1];
        if (row > map.sizes[2] - 1 + map.upper[1]) row = map.lower[1], image++;
    }
}
}  // namespace tma

}  // namespace emulator

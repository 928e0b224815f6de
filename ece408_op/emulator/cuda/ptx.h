// PTX instructions: `asm("op %0, [%1], 4;" : "=r"(a) : "r"(b))` becomes op(a, b, 4). The rewriter reads the names here.
#pragma once
#include "ece408_emulator.h"

namespace emulator {
namespace ptx {

inline unsigned short half_bits(float value) { return ece408_bits<unsigned short>(_Float16(value)); }

inline void ld_global_nc_f32(float &d, const float *p) { d = *p; }
inline void mov_u32(unsigned &d, unsigned a) { d = a; }
inline void cvt_rn_f16_f32(unsigned short &d, float a) { d = half_bits(a); }
inline void cvt_f32_f16(float &d, unsigned short a) { d = float(ece408_bits<_Float16>(a)); }
inline void cvt_rn_f16x2_f32(unsigned &d, float high, float low) { d = unsigned(half_bits(high)) << 16 | half_bits(low); }
// To nearest at 10 bits behind the point, ties away from zero.
inline void cvt_rna_tf32_f32(unsigned &d, float a) {
    d = __float_as_uint(a);
    if ((d >> 23 & 255) != 255) d = (d + 0x1000) & ~0x1fffu;
}
inline void mul_rn_f32(float &d, float a, float b) { d = a * b; }
inline void fma_rn_f32(float &d, float a, float b, float c) { d = std::fma(a, b, c); }

// Copies from global to shared memory that do not wait.
inline void cp_async_cg_shared_global(unsigned to, const void *from, int bytes) { copy_later(to, from, bytes); }
inline void cp_async_ca_shared_global(unsigned to, const void *from, int bytes) { copy_later(to, from, bytes); }
inline void cp_async_commit_group() { commit_copies(); }
inline void cp_async_wait_group(int pending) { wait_for_copies(pending); }
inline void cp_async_wait_all() { commit_copies(), wait_for_copies(0); }

// Barrier 0 of all threads is that of __syncthreads().
__forceinline__ void bar_sync(int number, int threads) { named_barrier(number, threads); }
__forceinline__ void bar_arrive(int number, int threads) { named_barrier(number, threads, false); }
__forceinline__ void bar_sync(int number) {
    if (number == 0) __syncthreads();
    else named_barrier(number, blockDim.x * blockDim.y * blockDim.z);
}

// Matrices of 8 x 8 halves: each lane has the address of a row, and gets two neighbours of a row, or of a column, of each.
// Findings name the kernel's line of an access only where all functions around it are inlined.
template <bool COLUMNS, typename... Words>
static __forceinline__ void load_matrices(unsigned address, Words &...d) {
    unsigned long long rows[32];
    gather(~0u, address, rows);
    const int lane = lane_number(), own = lane / 4, first = lane % 4 * 2;
    if (lane < int(8 * sizeof...(d)) && address % 16) misaligned();
    const auto element = [&](int row, int column) -> unsigned {
        return static_cast<const unsigned short *>(shared_pointer(unsigned(rows[row])))[column];
    };
    int row = 0;  // the first one of the next matrix
    const auto load = [&](unsigned &word) __attribute__((always_inline)) {
        word = COLUMNS ? element(row + first, own) | element(row + first + 1, own) << 16
                       : static_cast<const unsigned *>(shared_pointer(unsigned(rows[row + own])))[lane % 4];
        row += 8;
    };
    (load(d), ...);
}
__forceinline__ void ldmatrix_sync_aligned_m8n8_x1_shared_b16(unsigned &d0, unsigned address) {
    load_matrices<false>(address, d0);
}
__forceinline__ void ldmatrix_sync_aligned_m8n8_x1_trans_shared_b16(unsigned &d0, unsigned address) {
    load_matrices<true>(address, d0);
}
__forceinline__ void ldmatrix_sync_aligned_m8n8_x2_shared_b16(unsigned &d0, unsigned &d1, unsigned address) {
    load_matrices<false>(address, d0, d1);
}
__forceinline__ void ldmatrix_sync_aligned_m8n8_x2_trans_shared_b16(unsigned &d0, unsigned &d1, unsigned address) {
    load_matrices<true>(address, d0, d1);
}
__forceinline__ void ldmatrix_sync_aligned_m8n8_x4_shared_b16(unsigned &d0, unsigned &d1, unsigned &d2,
                                                              unsigned &d3, unsigned address) {
    load_matrices<false>(address, d0, d1, d2, d3);
}
__forceinline__ void ldmatrix_sync_aligned_m8n8_x4_trans_shared_b16(unsigned &d0, unsigned &d1, unsigned &d2,
                                                                    unsigned &d3, unsigned address) {
    load_matrices<true>(address, d0, d1, d2, d3);
}

inline void mma_sync_aligned_m16n8k16_row_col_f32_f16_f16_f32(float &d0, float &d1, float &d2, float &d3, unsigned a0,
                                                              unsigned a1, unsigned a2, unsigned a3, unsigned b0,
                                                              unsigned b1, float c0, float c1, float c2, float c3) {
    float d[4] = {c0, c1, c2, c3};
    const unsigned a[4] = {a0, a1, a2, a3};
    mma_fp16(d, a, b0, b1);
    d0 = d[0], d1 = d[1], d2 = d[2], d3 = d[3];
}
inline void mma_sync_aligned_m16n8k8_row_col_f32_tf32_tf32_f32(float &d0, float &d1, float &d2, float &d3, unsigned a0,
                                                               unsigned a1, unsigned a2, unsigned a3, unsigned b0,
                                                               unsigned b1, float c0, float c1, float c2, float c3) {
    float d[4] = {c0, c1, c2, c3};
    const unsigned a[4] = {a0, a1, a2, a3};
    mma_tf32(d, a, b0, b1);
    d0 = d[0], d1 = d[1], d2 = d[2], d3 = d[3];
}

}  // namespace ptx
}  // namespace emulator

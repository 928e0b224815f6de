// Cooperative groups: a block, tiles of a warp, and thread_group, which is one of them.
#pragma once
#include "ece408_emulator.h"

namespace cooperative_groups {

struct thread_block {
    __forceinline__ static void sync() { __syncthreads(); }
    static unsigned thread_rank() { return threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z); }
    static unsigned size() { return blockDim.x * blockDim.y * blockDim.z; }
    static unsigned num_threads() { return size(); }
    static dim3 group_index() { return blockIdx; }
    static dim3 thread_index() { return threadIdx; }
    static dim3 group_dim() { return blockDim; }
    static dim3 dim_threads() { return blockDim; }
};
inline thread_block this_thread_block() { return {}; }

template <unsigned N, typename Parent = void>
struct thread_block_tile {
    static_assert(N <= 32, "the emulator lacks tiles of more than 32 threads");
    static unsigned mask() { return (~0u >> (32 - N)) << emulator::lane_number() / N * N; }
    static unsigned thread_rank() { return emulator::lane_number() % N; }
    static unsigned size() { return N; }
    static unsigned num_threads() { return N; }
    static unsigned meta_group_rank() { return thread_block::thread_rank() / N; }
    static unsigned meta_group_size() { return (thread_block::size() + N - 1) / N; }
    __forceinline__ static void sync() { __syncwarp(mask()); }
    template <typename T>
    __forceinline__ T shfl(T v, int lane) const { return __shfl_sync(mask(), v, lane, N); }
    template <typename T>
    __forceinline__ T shfl_up(T v, unsigned n) const { return __shfl_up_sync(mask(), v, n, N); }
    template <typename T>
    __forceinline__ T shfl_down(T v, unsigned n) const { return __shfl_down_sync(mask(), v, n, N); }
    template <typename T>
    __forceinline__ T shfl_xor(T v, int n) const { return __shfl_xor_sync(mask(), v, n, N); }
    static unsigned ballot(int condition) { return __ballot_sync(mask(), condition) >> emulator::lane_number() / N * N; }
    static int any(int condition) { return ballot(condition) != 0; }
    static int all(int condition) { return ballot(!condition) == 0; }
};
template <unsigned N, typename Group>
inline thread_block_tile<N> tiled_partition(const Group &) { return {}; }

struct thread_group {
    unsigned lanes;  // of a tile; 0: the block
    thread_group(const thread_block &, unsigned n = 0) : lanes(n) {}
    template <unsigned N>
    thread_group(const thread_block_tile<N> &) : lanes(N) {}
    unsigned size() const { return lanes ? lanes : thread_block::size(); }
    unsigned num_threads() const { return size(); }
    unsigned thread_rank() const { return thread_block::thread_rank() % size(); }
    __forceinline__ void sync() const {
        if (lanes) __syncwarp((~0u >> (32 - lanes)) << emulator::lane_number() / lanes * lanes);
        else __syncthreads();
    }
};
inline thread_group tiled_partition(const thread_group &, unsigned n) { return {thread_block(), n}; }

template <typename Group>
__forceinline__ void sync(const Group &group) { group.sync(); }

template <typename T>
struct plus { T operator()(T a, T b) const { return a + b; } };
template <typename T>
struct less { T operator()(T a, T b) const { return b < a ? b : a; } };
template <typename T>
struct greater { T operator()(T a, T b) const { return a < b ? b : a; } };
template <unsigned N, typename T, typename Join>
inline T reduce(const thread_block_tile<N> &tile, T value, Join join) {
    for (unsigned n = N / 2; n; n /= 2) value = join(value, tile.shfl_xor(value, n));
    return value;
}

}  // namespace cooperative_groups

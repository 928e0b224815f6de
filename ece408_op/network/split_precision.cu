// FullyConnected in split precision (fp16x3) on Hopper's tensor cores (wgmma, sm_90a): y = ACTIVATION(x w^T + bias).
//
// A float32 factor is split into two fp16 numbers, with a power of two for each row of x and of w:
//
//     factor = (high + low / 2048) scale      scale puts the row's largest element between 2^14 and 2^15
//
// high has the first 11 bits of the factor and low the next 11. A product takes three fp16 products, high x high,
// high x low and low x high, each exact in float32; low x low is below float32's last bit and is left out (S. Markidis
// et al., NVIDIA Tensor Core Programmability, Performance and Precision, 2018; H. Ootomo and R. Yokota, Recovering
// Single Precision Accuracy from Tensor Cores, 2022; CUTLASS, example 28, 3xTF32). The tensor cores truncate after each
// addition, so that the error grows with the number of additions and with the sum: the accumulator is promoted to
// float32 registers after each k-step of 64 products.
//
//     x (rows, K) --split_x--> tiles of x    \                        one block: a tile of y, 128 x tile_columns
//                                             }--product--> y         full    +-------------------------+   empty
//     w (N, K) --split_w--> tiles of w       /                     producer ->| stage 0 | 1 | 2: x and w |-> 2 consumer
//                                                                   warp      +-------------------------+   warpgroups
//     rows marked by split_x --recompute_rows--> y
//
// A tile of x has tile_rows rows and 64 columns, once high and once low. A k-step of a block copies
// (128 + tile_columns) x 256 bytes and computes 3 x 2 x 128 x tile_columns x 64 FLOP: 109 FLOP per byte for 168
// columns. Tensor cores limit the time, since L2 holds the tiles of w. Rows with an element more than 2^36 below the row's
// largest, where high and low have fewer bits than a float32 sum of over 1024 products may lose, and rows with NaN or
// infinity are marked, and computed from the float32 elements.
//
// Restrictions: compute capability 9.0; x and w C-contiguous; 16-byte aligned tiles; tile_columns a multiple of 8, at
// most 168. Constants, in front of this text: struct Config, and the activation ACTIVATION(v).
//     length        elements of a row (K), k_steps of 64      columns       of y (N), in column_tiles tiles
//     tile_rows, tile_columns, stages                         biased        whether there is a bias

#ifndef ACTIVATION
#define ACTIVATION(v) (v)
#endif

typedef unsigned short half_bits;
typedef unsigned long long descriptor;

constexpr int K_STEP = 64, ROW_BYTES = 2 * K_STEP;  // the tiles' rows, as wgmma reads them with the 128-byte swizzle
constexpr int SPLIT_THREADS = 256;
constexpr int CONSUMERS = Config::tile_rows / 64, CONSUMER_THREADS = CONSUMERS * 128;
constexpr int ACCUMULATORS = Config::tile_columns / 2;  // per thread: a warpgroup computes 64 rows
constexpr int X_BYTES = 2 * Config::tile_rows * ROW_BYTES, W_BYTES = 2 * Config::tile_columns * ROW_BYTES;
constexpr int STAGE_BYTES = X_BYTES + W_BYTES;

// ---- Convert: split rows into high and low

__device__ __forceinline__ half_bits to_half(float v) {
    half_bits h;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(v));
    return h;
}

__device__ __forceinline__ float to_float(half_bits h) {
    float v;
    asm("cvt.f32.f16 %0, %1;" : "=f"(v) : "h"(h));
    return v;
}

// Return the bits of the largest |element| of a row, in all threads of the block; synchronises the block. The bits of
// positive floats are in the floats' order; NaN and infinity come last.
__device__ __forceinline__ int largest_magnitude(const float *from) {
    __shared__ int warp_largest[SPLIT_THREADS / 32];
    int largest = 0;
#pragma unroll 4
    for (int i = threadIdx.x; i < Config::length; i += SPLIT_THREADS)
        largest = max(largest, __float_as_int(from[i]) & 0x7fffffff);
    for (int other = 16; other; other /= 2) largest = max(largest, __shfl_xor_sync(0xffffffffu, largest, other));
    if (threadIdx.x % 32 == 0) warp_largest[threadIdx.x / 32] = largest;
    __syncthreads();
    for (int i = 0; i < SPLIT_THREADS / 32; i++) largest = max(largest, warp_largest[i]);
    return largest;
}

// Split one row per block into tiles of TILE_ROWS rows. A tile is stored as the tensor cores read it, so that one bulk
// copy loads it: rows of 128 bytes, whose 16-byte units are permuted by the row's last three bits; high before low; the
// tiles of one row range in order; columns from K on are zero. Also store the row's scale, and whether it is marked.
template <int TILE_ROWS>
__device__ __forceinline__ void split(const float *__restrict__ x, uint4 *__restrict__ tiles,
                                      float *__restrict__ scales, int *__restrict__ marks) {
    const size_t row = blockIdx.x;
    const float *from = x + row * Config::length;
    const int largest = largest_magnitude(from), exponent = (largest >> 23) - 127;
    const bool fits = largest == 0 || (exponent >= -100 && exponent <= 127);
    const float inverse_scale = largest && fits ? __int_as_float((14 - exponent + 127) << 23) : 1.f;
    const int tile_row = row % TILE_ROWS;
    uint4 *tile = tiles + row / TILE_ROWS * (size_t)(Config::k_steps * 2 * TILE_ROWS * 8) + tile_row * 8;
    bool small = false;
    for (int unit = threadIdx.x; unit < Config::k_steps * 8; unit += SPLIT_THREADS) {
        alignas(16) half_bits high[8], low[8];
#pragma unroll
        for (int e = 0; e < 8; e++) {
            const int i = unit * 8 + e;
            const float v = i < Config::length && fits ? from[i] * inverse_scale : 0.f;
            small |= v != 0.f && fabsf(v) < 2.38418579e-7f;
            high[e] = to_half(v);
            low[e] = to_half((v - to_float(high[e])) * 2048.f);
        }
        uint4 *to = tile + unit / 8 * (2 * TILE_ROWS * 8) + (unit % 8 ^ tile_row % 8);
        to[0] = *(const uint4 *)high;
        to[TILE_ROWS * 8] = *(const uint4 *)low;
    }
    const int marked = __syncthreads_or(small || !fits);
    if (threadIdx.x == 0) {
        scales[row] = largest && fits ? __int_as_float((exponent - 14 + 127) << 23) : 1.f;
        marks[row] = marked;
    }
}

extern "C" __global__ void __launch_bounds__(SPLIT_THREADS)
split_x(const float *__restrict__ x, uint4 *__restrict__ tiles, float *__restrict__ scales, int *__restrict__ marks) {
    split<Config::tile_rows>(x, tiles, scales, marks);
}

extern "C" __global__ void __launch_bounds__(SPLIT_THREADS)
split_w(const float *__restrict__ x, uint4 *__restrict__ tiles, float *__restrict__ scales, int *__restrict__ marks) {
    split<Config::tile_columns>(x, tiles, scales, marks);
}

// ---- Load: mbarriers of the pipeline stages, and the bulk copies that fill them

__device__ __forceinline__ unsigned shared_address(const void *p) { return (unsigned)__cvta_generic_to_shared(p); }

__device__ __forceinline__ void wait_for(unsigned barrier, int phase) {
    asm volatile(
        "{\n.reg .pred done;\n"
        "again:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@done bra over;\nbra again;\nover:\n}" ::"r"(barrier), "r"(phase) : "memory");
}

__device__ __forceinline__ void initialise(unsigned barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// Arrive at a full barrier that waits for this many bytes of bulk copies.
__device__ __forceinline__ void expect(unsigned barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

__device__ __forceinline__ void arrive(unsigned barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ void bulk_copy(unsigned to, const void *from, int bytes, unsigned barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
                 "l"(from), "r"(bytes), "r"(barrier)
                 : "memory");
}

// ---- Main loop: the consumer warpgroups multiply

// The descriptor of a matrix in shared memory: 128-byte swizzle, 1024 bytes from eight rows to the next eight.
__device__ __forceinline__ descriptor matrix_at(unsigned address) {
    return (descriptor)(address >> 4) | 1ull << 16 | 64ull << 32 | 1ull << 62;
}

// accumulators = x w^T + (accumulate ? accumulators : 0) for 64 rows of x and 16 elements; queued.
__device__ __forceinline__ void mma(float (&accumulators)[ACCUMULATORS], descriptor x, descriptor w, int accumulate) {
    WGMMA
}

__device__ __forceinline__ void fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

__device__ __forceinline__ void wait_for_mma() {
    asm volatile("wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 0;" ::: "memory");
}

// Sum the k-steps of a warpgroup's 64 rows into ``total``, without the scales. Arrives at a stage's empty barrier after
// its products.
__device__ __forceinline__ void main_loop(float (&total)[ACCUMULATORS], unsigned stages, const descriptor *full,
                                          const descriptor *empty, int warpgroup) {
    float accumulators[ACCUMULATORS];
#pragma unroll
    for (int i = 0; i < ACCUMULATORS; i++) total[i] = 0.f;
    for (int step = 0; step < Config::k_steps; step++) {
        const int stage = step % Config::stages;
        wait_for(shared_address(full + stage), step / Config::stages % 2);
        const unsigned tile = stages + stage * STAGE_BYTES;
        const descriptor x_high = matrix_at(tile + warpgroup * 64 * ROW_BYTES);
        const descriptor x_low = x_high + (Config::tile_rows * ROW_BYTES >> 4);
        const descriptor w_high = matrix_at(tile + X_BYTES), w_low = w_high + (Config::tile_columns * ROW_BYTES >> 4);
        // The products of 16 elements read 32 bytes of a row: 2 in a descriptor's units.
        fence();
#pragma unroll
        for (int k = 0; k < K_STEP / 16; k++) {
            mma(accumulators, x_high + 2 * k, w_low + 2 * k, k > 0);
            mma(accumulators, x_low + 2 * k, w_high + 2 * k, 1);
        }
        wait_for_mma();
        // The large products are added to the small ones, so that the promotion rounds once for both.
#pragma unroll
        for (int i = 0; i < ACCUMULATORS; i++) accumulators[i] *= 1.f / 2048.f;
        fence();
#pragma unroll
        for (int k = 0; k < K_STEP / 16; k++) mma(accumulators, x_high + 2 * k, w_high + 2 * k, 1);
        wait_for_mma();
        arrive(shared_address(empty + stage));
        // Accumulator promotion: float32 additions round, where the tensor cores truncate.
#pragma unroll
        for (int i = 0; i < ACCUMULATORS; i++) total[i] += accumulators[i];
    }
}

// ---- Epilogue: scales, bias and activation; each thread stores its pairs of columns of two rows

__device__ __forceinline__ void epilogue(const float (&total)[ACCUMULATORS], const float *__restrict__ x_scales,
                                         const float *__restrict__ w_scales, const float *__restrict__ bias,
                                         float *__restrict__ y, int rows, int first_row, int first_column) {
#pragma unroll
    for (int lower = 0; lower < 2; lower++) {
        const int row = first_row + 8 * lower;
        if (row >= rows) continue;
        const float scale = x_scales[row];
#pragma unroll
        for (int i = 0; i < Config::tile_columns / 8; i++)
#pragma unroll
            for (int odd = 0; odd < 2; odd++) {
                const int column = first_column + 8 * i + odd;
                if (column >= Config::columns) continue;
                const float sum = total[4 * i + 2 * lower + odd] * scale * w_scales[column];
                const float v = sum + (Config::biased ? bias[column] : 0.f);
                y[(size_t)row * Config::columns + column] = ACTIVATION(v);
            }
    }
}

// One block computes one tile of y; its last warp is the producer.
extern "C" __global__ void __launch_bounds__(CONSUMER_THREADS + 128, 1)
product(const unsigned char *__restrict__ x, const unsigned char *__restrict__ w, const float *__restrict__ x_scales,
        const float *__restrict__ w_scales, const float *__restrict__ bias, float *__restrict__ y, int rows) {
    extern __shared__ unsigned char shared[];
    __shared__ descriptor full[Config::stages], empty[Config::stages];
    const unsigned stages = (shared_address(shared) + 1023) / 1024 * 1024;
    const int column_tile = blockIdx.x % Config::column_tiles, row_tile = blockIdx.x / Config::column_tiles;
    if (threadIdx.x == 0) {
        for (int i = 0; i < Config::stages; i++) {
            initialise(shared_address(full + i), 1);
            initialise(shared_address(empty + i), CONSUMER_THREADS);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    }
    __syncthreads();
    // Producer: one thread fills each stage when the consumers have emptied it. Of 168 registers per thread, its
    // warpgroup gives most to the consumers.
    if (threadIdx.x >= CONSUMER_THREADS) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        if (threadIdx.x > CONSUMER_THREADS) return;
        const unsigned char *x_tiles = x + (size_t)row_tile * Config::k_steps * X_BYTES;
        const unsigned char *w_tiles = w + (size_t)column_tile * Config::k_steps * W_BYTES;
        for (int step = 0; step < Config::k_steps; step++) {
            const int stage = step % Config::stages;
            const unsigned barrier = shared_address(full + stage), to = stages + stage * STAGE_BYTES;
            if (step >= Config::stages) wait_for(shared_address(empty + stage), (step / Config::stages - 1) % 2);
            expect(barrier, STAGE_BYTES);
            bulk_copy(to, x_tiles + (size_t)step * X_BYTES, X_BYTES, barrier);
            bulk_copy(to + X_BYTES, w_tiles + (size_t)step * W_BYTES, W_BYTES, barrier);
        }
        return;
    }
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);
    const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
    float total[ACCUMULATORS];
    main_loop(total, stages, full, empty, warpgroup);
    const int first_row = row_tile * Config::tile_rows + warpgroup * 64 + warp * 16 + lane / 4;
    const int first_column = column_tile * Config::tile_columns + lane % 4 * 2;
    epilogue(total, x_scales, w_scales, bias, y, rows, first_row, first_column);
}

// ---- Fallback: a block computes one marked row of y in float32, a warp one column at a time

extern "C" __global__ void __launch_bounds__(256)
recompute_rows(const int *__restrict__ marks, const float *__restrict__ x, const float *__restrict__ w,
               const float *__restrict__ bias, float *__restrict__ y) {
    constexpr int LENGTH = Config::length, COLUMNS = Config::columns;
    const size_t row = blockIdx.x;
    if (!marks[row]) return;
    const int lane = threadIdx.x % 32;
    for (int column = threadIdx.x / 32; column < COLUMNS; column += 8) {
        float sum = 0.f;
#pragma unroll 8
        for (int i = lane; i < LENGTH; i += 32) sum = fmaf(x[row * LENGTH + i], w[(size_t)column * LENGTH + i], sum);
        for (int other = 16; other; other /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, other);
        const float v = sum + (Config::biased ? bias[column] : 0.f);
        if (lane == 0) y[row * COLUMNS + column] = ACTIVATION(v);
    }
}

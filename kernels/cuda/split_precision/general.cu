// Implicit GEMM in split precision for any number of channels and filters: TMA loads, wgmma multiplies (sm_90a).
//
// The convolution is a matrix product of output pixels by filters, summed over C K K products. The product's left
// matrix, the input windows, is never written down: TMA's im2col mode gathers its rows from the images.
//
//     a block           128 output pixels (numbered through all images) x 128 or 64 filters
//     a pipeline stage  stage_channels channels of one filter element (tap):
//
//                       channels               channels
//             pixels [ x high | x low ]  filters [ w high | w low ]      in shared memory, rows swizzled
//
//     a consumer        64 of the pixels: y += high high + (high low + low high) / 2^11
//
// Split precision (Markidis et al. 2018; Ootomo and Yokota 2022; CUTLASS's 3xTF32): a float32 value is the sum of a
// 16-bit float and of what that leaves, times 2^-11, so three tensor-core products make one float32 product. The
// errors are derived in split_precision.py. Every image and every filter is scaled by a power of two of its own.
//
// Arithmetic intensity: per channel of a stage, 128 x 128 multiply-adds of three products each for 4 (128 + 128) bytes
// from L2, that is 96 FLOP per byte. Layers with long sums are limited by the tensor cores, those with short sums by
// device memory: the split copy adds one pass over the images.
//
// Launches, in order: split_filters (once per call); then for every group of images range_of_images, split_images,
// implicit_gemm_tma, recompute_images.

// Config beyond wide_tile.cuh's: promote_every, stages between two accumulator promotions; range_blocks, blocks that
// search an image's largest value.

// The range of values of each image, range_blocks partial results per image. Also empties the list of images to
// recompute.
extern "C" __global__ void __launch_bounds__(512)
    range_of_images(const float *__restrict__ x, Range *__restrict__ ranges, int *__restrict__ listed,
                    long long first) {
    __shared__ Range warps[16];
    if (first && blockIdx.x == 0 && blockIdx.y == 0 && threadIdx.x == 0)
        listed[0] = 0;  // split_filters did, for the first images
    const float *const image = image_of(x, first + blockIdx.y, IMAGE);
    constexpr index_t SHARE = (IMAGE + Config::range_blocks - 1) / Config::range_blocks;
    const index_t begin = blockIdx.x * SHARE, end = min(begin + SHARE, IMAGE);
    Range range;
#pragma unroll 8
    for (index_t i = begin + threadIdx.x; i < end; i += 512) range.add(image[i]);
    range.reduce_warp();
    if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = range;
    __syncthreads();
    if (threadIdx.x) return;
    for (int i = 1; i < 16; i++) range.add(warps[i]);
    ranges[blockIdx.y * Config::range_blocks + blockIdx.x] = range;
}

// Convert: images (B, C, H, W) to [part][image][pixel][channel]. A block turns 64 channels of 64 pixels.
extern "C" __global__ void __launch_bounds__(256)
    split_images(const float *__restrict__ x, const Range *__restrict__ ranges, uint4 *__restrict__ split,
                 int *__restrict__ exponents, int *__restrict__ listed, long long first, int images) {
    constexpr int AREA = H * W;
    __shared__ float tile[64][65];
    const int image = blockIdx.z, c0 = blockIdx.y * 64, pixel0 = blockIdx.x * 64;
    Range range;
    for (int i = 0; i < Config::range_blocks; i++) range.add(ranges[image * Config::range_blocks + i]);
    const int exponent = range.exponent();
    if (blockIdx.x == 0 && blockIdx.y == 0 && threadIdx.x == 0) {
        exponents[image] = exponent;
        if (exponent == UNSPLIT) listed[1 + atomicAdd(listed, 1)] = image;
    }
    const float scale = power_of_two(exponent == UNSPLIT ? 0 : exponent);
    const float *const from = image_of(x, first + image, IMAGE);
    const int column = threadIdx.x % 64, pixel = pixel0 + column;
#pragma unroll
    for (int i = 0; i < 16; i++) {
        const int row = threadIdx.x / 64 + 4 * i;
        tile[row][column] =
            c0 + row < C && pixel < AREA ? multiply(from[index_t(c0 + row) * AREA + pixel], scale) : 0.0f;
    }
    __syncthreads();
    const long long part = (long long)images * AREA * (Config::channels / 8);
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const int row = threadIdx.x / 8 + 32 * i, c = threadIdx.x % 8 * 8;
        if (pixel0 + row >= AREA || c0 + c >= Config::channels) continue;
        unsigned high[4], low[4];
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const float a = tile[c + 2 * j][row], b = tile[c + 2 * j + 1][row];
            high[j] = high_parts(a, b), low[j] = low_parts(a, b, high[j]);
        }
        uint4 *const to = split + ((long long)image * AREA + pixel0 + row) * (Config::channels / 8) + (c0 + c) / 8;
        to[0] = make_uint4(high[0], high[1], high[2], high[3]);
        if (Config::low_parts) to[part] = make_uint4(low[0], low[1], low[2], low[3]);
    }
}

// The rows of tile_pixels output pixels from (image, row, column) on, channels c to c + stage_channels, of tap (p, q).
__device__ __forceinline__ void load_pixels(unsigned to, const TensorMap &map, unsigned barrier, int c, int column,
                                            int row, int image, int p, int q) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes "
        "[%0], [%1, {%3, %4, %5, %6}], [%2], {%7, %8};" ::"r"(to),
        "l"(&map), "r"(barrier), "r"(c), "r"(column), "r"(row), "r"(image), "h"((short)q), "h"((short)p)
        : "memory");
}

// Load: one thread fills the stages in turn. Each waits until both consumers have left it.
__device__ __forceinline__ void produce(unsigned stages, unsigned full, unsigned empty, int tiles,
                                        const TensorMap &x_high, const TensorMap &x_low, const TensorMap &w_high,
                                        const TensorMap &w_low) {
    int stage = 0, parity = 1;
    for (int number = blockIdx.x; number < tiles; number += gridDim.x) {
        const Tile tile(number);
        const int image = tile.pixel / (OH * OW), rest = tile.pixel % (OH * OW), row = rest / OW, column = rest % OW;
        for (int tap = 0; tap < K * K; tap++)
            for (int c = 0; c < C; c += Config::stage_channels) {
                wait_for(empty + 8 * stage, parity);
                const unsigned barrier = full + 8 * stage, pixels = stages + stage * STAGE_BYTES;
                const unsigned filters = pixels + PARTS * PIXEL_BYTES;
                arrive_expecting(barrier, STAGE_BYTES);
                load_pixels(pixels, x_high, barrier, c, column, row, image, tap / K, tap % K);
                load_filters(filters, w_high, barrier, c, tap, tile.filter);
                if (Config::low_parts) {
                    load_pixels(pixels + PIXEL_BYTES, x_low, barrier, c, column, row, image, tap / K, tap % K);
                    load_filters(filters + FILTER_BYTES, w_low, barrier, c, tap, tile.filter);
                }
                if (++stage == Config::stages) stage = 0, parity ^= 1;
            }
    }
}

// Main loop of one tile. On entry the stage's barrier `full` completes when its loads have arrived; on exit every stage
// that was read is released to the producer.
__device__ __forceinline__ void multiply_tile(Accumulators &sums, unsigned stages, unsigned full, unsigned empty,
                                              int consumer, int &stage, int &parity) {
    const auto release = [&](int which) {
        if (threadIdx.x % 128 == 0) arrive(empty + 8 * which);
    };
    sums.clear();
#pragma unroll 1
    for (int step = 0; step < STEPS;) {
        const int last = min(STEPS, step + Config::promote_every);
        int before = -1;
#pragma unroll 1
        for (; step < last; step++) {
            wait_for(full + 8 * stage, parity);
            multiply_stage(sums, stages + stage * STAGE_BYTES, consumer);
            wait_mma<1>();
            if (before >= 0) release(before);
            before = stage;
            if (++stage == Config::stages) stage = 0, parity ^= 1;
        }
        wait_mma<0>();
        release(before);
        // Accumulator promotion: tensor cores truncate a long sum, ordinary additions round it.
#pragma unroll
        for (int i = 0; i < SUMS; i++) sums.promoted[i] += sums.high[i], sums.high[i] = 0;
    }
}

extern "C" __global__ void __launch_bounds__(128 * (Config::consumers + 1), 1)
    implicit_gemm_tma(const __grid_constant__ TensorMap x_high, const __grid_constant__ TensorMap x_low,
                      const __grid_constant__ TensorMap w_high, const __grid_constant__ TensorMap w_low,
                      const int *__restrict__ x_exponents, const int *__restrict__ w_exponents, float *__restrict__ y,
                      long long first, int images) {
    extern __shared__ unsigned char memory[];
    const unsigned stages = (shared_address(memory) + 1023) & ~1023u;  // the swizzle counts from multiples of 1024
    unsigned char *const after_stages = memory + (stages - shared_address(memory)) + Config::stages * STAGE_BYTES;
    const unsigned full = shared_address(after_stages), empty = full + 8 * Config::stages;
    init_barriers(full, empty, 1);
    const int tiles = (images * (OH * OW) + Config::tile_pixels - 1) / Config::tile_pixels * FILTER_TILES;
    if (threadIdx.x < 128) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
        if (threadIdx.x == 0) produce(stages, full, empty, tiles, x_high, x_low, w_high, w_low);
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
        const int consumer = threadIdx.x / 128 - 1;
        float *const staging = reinterpret_cast<float *>(after_stages + 16 * Config::stages) + consumer * (32 * PITCH);
        int stage = 0, parity = 0;
        for (int number = blockIdx.x; number < tiles; number += gridDim.x) {
            Accumulators sums;
            multiply_tile(sums, stages, full, empty, consumer, stage, parity);
            store_tile(sums, staging, Tile(number), consumer, images, x_exponents, w_exponents,
                       image_of(y, first, OUTPUTS));
        }
    }
}

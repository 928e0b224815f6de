// 1 x 1 filters in split precision: producer warpgroups convert float32 pixels on their way to shared memory (sm_90a).
//
// With one filter element every input is read once per tile of filters, so a split copy of the images (general.cu)
// would cost more than the product. Here a producer thread loads one pixel's channels of a stage, scales them by a
// power of two of that pixel's own, and writes both parts as a row of the left matrix:
//
//     a block     128 output pixels (numbered through all images) x 64 filters
//     producers   2 warpgroups, a pixel per thread, every second stage each;  consumers   2 warpgroups, 64 pixels each
//
//             float32 x ---- producer: scale, split ---->  [ x high | x low ]
//             split filters -------- TMA --------------->  [ w high | w low ]  ---- consumers: wgmma ----> y
//
// The accumulators are promoted after every stage, by the scale that the stage's pixels had.
//
// Arithmetic intensity: C M multiply-adds for 4 (C + M) bytes of device memory per pixel: limited by memory up to some
// 150 channels and filters.
//
// Launches: split_filters, pointwise_gemm, recompute_images.

constexpr int PRODUCERS = Config::producers;
constexpr int MOST_EXPONENT = 90;  // of a pixel: its unscaled sums then stay within float32

// A stage's row of a pixel, swizzled over ROW_BYTES as wgmma's descriptor says.
__device__ __forceinline__ int swizzled(int offset) { return offset ^ (offset >> 3 & (ROW_BYTES - 16)); }

// Load and convert. On exit of a stage its pixels and scales are in shared memory, visible to wgmma (the proxy fence),
// and its filters under way; the barrier `full` counts both.
__device__ __forceinline__ void produce(unsigned char *stages, float *scales, unsigned full, unsigned empty, int tiles,
                                        const float *x, int images, const TensorMap &w_high, const TensorMap &w_low,
                                        int *listed) {
    const int warpgroup = threadIdx.x / 128, row = threadIdx.x % 128;
    int filled = 0;  // stages filled so far, by both producers
    for (int number = blockIdx.x; number < tiles; number += gridDim.x) {
        const Tile tile(number);
        const int pixel = tile.pixel + row, image = pixel / (OH * OW);
        const bool real = image < images;
        const float *const from = image_of(x, image, IMAGE) + pixel % (OH * OW);
#pragma unroll 1
        for (int c0 = 0; c0 < C; c0 += Config::stage_channels, filled++) {
            if (filled % PRODUCERS != warpgroup) continue;
            const int stage = filled % Config::stages, parity = filled / Config::stages % 2 ^ 1;
            float value[Config::stage_channels];
            Range range;
#pragma unroll
            for (int c = 0; c < Config::stage_channels; c++)
                value[c] = real && c0 + c < C ? __ldg(from + index_t(c0 + c) * (H * W)) : 0.0f;
#pragma unroll
            for (int c = 0; c < Config::stage_channels; c++) range.add(value[c]);
            int exponent = range.exponent();
            if (max(exponent, -exponent) > MOST_EXPONENT) {  // UNSPLIT too
                if (atomicExch(listed + 1 + images + image, 1) == 0) listed[1 + atomicAdd(listed, 1)] = image;
                exponent = 0;
            }
            const float scale = power_of_two(exponent);
            wait_for(empty + 8 * stage, parity);
            if (row == 0) {
                const unsigned filters = shared_address(stages) + stage * STAGE_BYTES + PARTS * PIXEL_BYTES;
                arrive_expecting(full + 8 * stage, PARTS * FILTER_BYTES);
                load_filters(filters, w_high, full + 8 * stage, c0, 0, tile.filter);
                if (Config::low_parts)
                    load_filters(filters + FILTER_BYTES, w_low, full + 8 * stage, c0, 0, tile.filter);
            }
            unsigned char *const to = stages + stage * STAGE_BYTES;
#pragma unroll
            for (int c = 0; c < Config::stage_channels; c += 8) {
                unsigned high[4], low[4];
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    const float a = multiply(value[c + 2 * j], scale), b = multiply(value[c + 2 * j + 1], scale);
                    high[j] = high_parts(a, b), low[j] = low_parts(a, b, high[j]);
                }
                const int at = swizzled(row * ROW_BYTES + 2 * c);
                *reinterpret_cast<uint4 *>(to + at) = make_uint4(high[0], high[1], high[2], high[3]);
                if (Config::low_parts)
                    *reinterpret_cast<uint4 *>(to + PIXEL_BYTES + at) = make_uint4(low[0], low[1], low[2], low[3]);
            }
            scales[stage * Config::tile_pixels + row] = power_of_two(-exponent);
            asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
            arrive(full + 8 * stage);
        }
    }
}

// Main loop of one tile: each stage's products, unscaled, are added to the sums.
__device__ __forceinline__ void multiply_tile(Accumulators &sums, unsigned stages, const float *scales, unsigned full,
                                              unsigned empty, int consumer, int &stage, int &parity) {
    const int row = consumer * 64 + threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4;
    sums.clear();
#pragma unroll 1
    for (int step = 0; step < STEPS; step++) {
        wait_for(full + 8 * stage, parity);
        const float *const own = scales + stage * Config::tile_pixels + row;
        const float scale[2] = {own[0], own[8]};
        multiply_stage(sums, stages + stage * STAGE_BYTES, consumer);
        wait_mma<0>();
        if (threadIdx.x % 128 == 0) arrive(empty + 8 * stage);
#pragma unroll
        for (int i = 0; i < SUMS; i++) {
            const float sum = Config::low_parts ? fmaf(sums.low[i], 1.0f / 2048, sums.high[i]) : sums.high[i];
            sums.promoted[i] = fmaf(sum, scale[i / 2 % 2], sums.promoted[i]);
            sums.high[i] = sums.low[Config::low_parts ? i : 0] = 0;
        }
        if (++stage == Config::stages) stage = 0, parity ^= 1;
    }
}

extern "C" __global__ void __launch_bounds__(128 * (Config::consumers + PRODUCERS), 1)
    pointwise_gemm(const float *__restrict__ x, const __grid_constant__ TensorMap w_high,
                   const __grid_constant__ TensorMap w_low, const int *__restrict__ w_exponents, float *__restrict__ y,
                   int *__restrict__ listed, long long first, int images) {
    extern __shared__ unsigned char memory[];
    const unsigned stages = (shared_address(memory) + 1023) & ~1023u;  // the swizzle counts from multiples of 1024
    unsigned char *const first_stage = memory + (stages - shared_address(memory)), *const after_stages =
                                                                                       first_stage +
                                                                                       Config::stages * STAGE_BYTES;
    const unsigned full = shared_address(after_stages), empty = full + 8 * Config::stages;
    float *const scales = reinterpret_cast<float *>(after_stages + 16 * Config::stages);
    float *const staging = scales + Config::stages * Config::tile_pixels;
    // The barriers `full` count the thread that expects the filters and each thread of a producer.
    init_barriers(full, empty, 1 + 128);
    const int tiles = (images * (OH * OW) + Config::tile_pixels - 1) / Config::tile_pixels * FILTER_TILES;
    if (threadIdx.x < 128 * PRODUCERS) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 112;");
        produce(first_stage, scales, full, empty, tiles, image_of(x, first, IMAGE), images, w_high, w_low, listed);
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 144;");
        const int consumer = threadIdx.x / 128 - PRODUCERS;
        int stage = 0, parity = 0;
        for (int number = blockIdx.x; number < tiles; number += gridDim.x) {
            Accumulators sums;
            multiply_tile(sums, stages, scales, full, empty, consumer, stage, parity);
            store_tile(sums, staging + consumer * (32 * PITCH), Tile(number), consumer, images, nullptr, w_exponents,
                       image_of(y, first, OUTPUTS));
        }
    }
}

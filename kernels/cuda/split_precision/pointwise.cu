// 1 x 1 filters in split precision: producer warpgroups convert float32 pixels on their way to shared memory (sm_90a).
//
// With one filter element every input is read once per tile of filters, so a split copy of the images (general.cu)
// would cost more than the product. Here a producer thread loads one pixel's channels of a stage, scales them by a
// power of two that fits these channels, and writes both components as a row of the left matrix:
//
//     a block     128 output pixels (numbered through all images) x 64 filters
//     producers   2 warpgroups, a pixel per thread, every second stage each;  consumers   2 warpgroups, 64 pixels each
//
//             float32 x ---- producer: scale, split ---->  [ x high | x low ]
//             split filters -------- TMA --------------->  [ w high | w low ]  ---- consumers: wgmma ----> y
//
// After every stage the sums, times the inverse of their pixels' scales, are added to the promoted sums.
//
// Arithmetic intensity: C M multiply-adds for 4 (C + M) bytes of device memory per pixel, C / 4 FLOP per byte for
// C = M. An H200 balances at 69 (warpgroup_mma.cu), so memory limits layers of fewer than some 280 channels and
// filters. Restrictions: sm_90a; 1 x 1 filters, no padding; stride 1 for a data gradient. See CUTLASS's
// warp-specialized kernels with mixed input types, which also convert an operand before they multiply.
//
// Launches: split_filters, pointwise_gemm, recompute_images. Config of 256 channels of 56 x 56 and 64 filters:
// tile_pixels 128, tile_filters 64, stage_channels 64, stages 4, consumers 2, producers 2, promotion_stages 1.

constexpr int PRODUCERS = Config::producers;
static_assert(Config::tile_pixels == 128 && Config::consumers == 2, "a producer thread loads a pixel of 128");
static_assert(PRODUCERS == 2 && PROMOTES, "the register counts are for two producers; a stage's sums are unscaled");

// Load and convert. After each stage its pixels and scales are in shared memory, visible to wgmma (the proxy fence),
// and the load of its filters is pending; the barrier `full` counts both.
__device__ __forceinline__ void produce(const Pipeline &pipeline, int tiles, const float *x, int images,
                                        const TensorMap &w_high, const TensorMap &w_low, int *listed) {
    const int warpgroup = threadIdx.x / 128, row = threadIdx.x % 128;
    int filled = 0;  // stages filled so far, by both producers
    for (int number = blockIdx.x; number < tiles; number += gridDim.x) {
        const Tile tile(number);
        const int pixel = tile.pixel + row, image = pixel / OUTPUT_AREA, in_image = pixel % OUTPUT_AREA;
        const bool real = image < images;
        const float *const from = x + image * IMAGE + tile.group * C * (long long)AREA +
                                  in_image / OUTPUT_WIDTH * Config::stride_height * Config::width +
                                  in_image % OUTPUT_WIDTH * Config::stride_width;
#pragma unroll 1
        for (int c0 = 0; c0 < C; c0 += Config::stage_channels, filled++) {
            if (filled % PRODUCERS != warpgroup) continue;
            const int stage = filled % Config::stages, phase = filled / Config::stages % 2 ^ 1;
            float value[Config::stage_channels];
            Range range;
#pragma unroll
            for (int c = 0; c < Config::stage_channels; c++)
                value[c] = real && c0 + c < C ? __ldg(from + (c0 + c) * (long long)AREA) : 0.0f;
#pragma unroll
            for (int c = 0; c < Config::stage_channels; c++) range.add(value[c]);
            int exponent = range.exponent(Config::transposed);
            if (max(exponent, -exponent) > LARGEST_EXPONENT) {  // UNSPLITTABLE too
                if (atomicExch(listed + 1 + images + image, 1) == 0) listed[1 + atomicAdd(listed, 1)] = image;
                exponent = 0;
            }
            const float scale = power_of_two(exponent);
            mbarrier_wait(pipeline.empty + stage, phase);
            if (row == 0) {
                mbarrier_arrive_expect_bytes(pipeline.full + stage, COMPONENTS * FILTER_BYTES);
                load_filters(pipeline.filters(stage, 0), pipeline.full + stage, w_high, w_low, c0, 0, tile.filter);
            }
            unsigned char *const to = pipeline.pixels(stage);
#pragma unroll
            for (int c = 0; c < Config::stage_channels; c += 8) {
                uint4 high, low;
                split_channels([&](int i) { return multiply(value[c + i], scale); }, high, low);
                const int at = swizzled(row * ROW_BYTES + 2 * c, ROW_BYTES);
                *reinterpret_cast<uint4 *>(to + at) = high;
                if (COMPONENTS == 2) *reinterpret_cast<uint4 *>(to + PIXEL_BYTES + at) = low;
            }
            pipeline.epilogue_storage[stage * Config::tile_pixels + row] = power_of_two(-exponent);
            fence_async_proxy();
            mbarrier_arrive(pipeline.full + stage);
        }
    }
}

// Main loop of one tile: each stage's products, unscaled, are added to sums.promoted. The other sums are zero on exit.
__device__ __forceinline__ void multiply_tile(Accumulators &sums, const Pipeline &pipeline, int consumer, int &stage,
                                              int &phase) {
    const int row = consumer * 64 + threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4;
#pragma unroll 1
    for (int step = 0; step < K_TILES; step++) {
        mbarrier_wait(pipeline.full + stage, phase);
        const float *const inverse_scales = pipeline.epilogue_storage + stage * Config::tile_pixels + row;
        const float inverse_scale[2] = {inverse_scales[0], inverse_scales[8]};
        __syncwarp();  // every lane has read its scales before lane 0 releases them
        multiply_stage(sums, pipeline, stage, 0, consumer, true);
        wgmma_wait<0>();
        if (threadIdx.x % 32 == 0) mbarrier_arrive(pipeline.empty + stage);
#pragma unroll
        for (int i = 0; i < SUMS; i++) {
            const float sum = COMPONENTS == 2 ? fmaf(sums.low[i], 1.0f / 2048, sums.high[i]) : sums.high[i];
            sums.promoted[i] = fmaf(sum, inverse_scale[i / 2 % 2], sums.promoted[i]);
        }
        if (++stage == Config::stages) stage = 0, phase ^= 1;
    }
#pragma unroll
    for (int i = 0; i < SUMS; i++) sums.high[i] = sums.low[COMPONENTS == 2 ? i : 0] = 0;
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    pointwise_gemm(const float *__restrict__ x, const __grid_constant__ TensorMap w_high,
                   const __grid_constant__ TensorMap w_low, const int *__restrict__ w_exponents, float *__restrict__ y,
                   int *__restrict__ listed, long long first, int images) {
    extern __shared__ __align__(16) unsigned char memory[];
    const Pipeline pipeline(memory);  // its other arrays: the pixels' inverse scales of each stage, staged outputs
    // `full`: the arrival that expects the filters and a producer's 128 threads; `empty`: each consumer's four warps.
    pipeline.init(1 + 128, 4);
    const int tiles = tiles_of(images);
    if (threadIdx.x < 128 * PRODUCERS) {
        lower_registers<112>();
        produce(pipeline, tiles, x + first * IMAGE, images, w_high, w_low, listed);
    } else {
        raise_registers<144>();
        float *const staging = pipeline.epilogue_storage + Config::stages * Config::tile_pixels;
        const int consumer = threadIdx.x / 128 - PRODUCERS;
        const FloatEpilogue epilogue{images, nullptr, w_exponents, y + first * OUTPUTS};
        int stage = 0, phase = 0;
        for (int number = blockIdx.x; number < tiles; number += gridDim.x) {
            Accumulators sums = {};
            multiply_tile(sums, pipeline, consumer, stage, phase);
            epilogue.store(sums, staging, Tile(number).of(consumer), consumer);
        }
    }
}

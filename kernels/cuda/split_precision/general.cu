// Implicit GEMM in split precision for any number of channels and filters: TMA loads, wgmma multiplies (sm_90a).
// Compiled behind the .cuh files of wide.SHARED_SOURCES.
//
// The convolution is a matrix product of output pixels by filters, with GEMM K = C K K. The left matrix, the input
// windows, is not materialized: TMA's im2col mode gathers its rows from the images, with stride, padding and dilation.
// The data gradient of a convolution of stride 1 is the convolution of y with flipped filters.
//
//     a block           64 to 256 output pixels (numbered through all images) x 32 to 256 filters
//     a pipeline stage  stage_channels channels of one filter element (tap):
//
//                       channels               channels
//             pixels [ x high | x low ]  filters [ w high | w low ]      in shared memory, rows swizzled
//
//     a consumer        its share of these outputs: y += high high + (high low + low high) / 2^11
//
// Every image and every filter is scaled by a power of two of its own. split.cuh has the arithmetic, wide.py the error.
//
// Arithmetic intensity: per channel of a stage, 128 x 128 multiply-adds of three products each for 4 (128 + 128) bytes
// from L2, that is 96 FLOP per byte. Layers with a long reduction are limited by L2 and the tensor cores, those with a
// short one by device memory: the split copy adds one pass over the images.
//
// Restrictions (_wide_tiles.limits): sm_90a; fewer than 2^30 pixels per image; windows within TMA's offsets; stride 1
// for a data gradient. See "Im2col mode" and "Asynchronous warpgroup level matrix instructions" in the PTX
// ISA, and CUTLASS's warp-specialized persistent kernels, cooperative and ping-pong.
//
// Launches, in order: split_filters (once per call); then for each chunk of the batch range_of_images, split_images,
// implicit_gemm_tma, recompute_images.
//
// Config beyond wide_tile.cuh's: range_blocks, blocks that search an image's largest value. That of 64 channels of
// 56 x 56 and 64 filters of 3 x 3: tile_pixels 128, tile_filters 64, stage_channels 64, stages 4, consumers 2,
// promotion_interval 2. With the macro SPLIT_FORM, only what split_form.cu shares with this file is compiled; in
// recompute.cuh the macro leaves out the entry point recompute_images.

static_assert(Config::tile_filters % 32 == 0, "epilogues store 32 filters at a time");

#ifndef SPLIT_FORM
// The range of values of each image, range_blocks partial results per image. Also empties the list of images to
// recompute.
extern "C" __global__ void __launch_bounds__(512)
    range_of_images(const float *__restrict__ x, Range *__restrict__ ranges, int *__restrict__ listed,
                    long long first) {
    // split_filters empties the list for the first chunk.
    if (first && blockIdx.x == 0 && blockIdx.y == 0 && threadIdx.x == 0) listed[0] = 0;
    const float *const image = x + (first + blockIdx.y) * IMAGE;
    constexpr long long SHARE = (IMAGE + Config::range_blocks - 1) / Config::range_blocks;
    const long long begin = blockIdx.x * SHARE, end = min(begin + SHARE, IMAGE);
    Range range;
#pragma unroll 8
    for (long long i = begin + threadIdx.x; i < end; i += 512) range.add(image[i]);
    range.join_block<512>();
    if (threadIdx.x == 0) ranges[blockIdx.y * Config::range_blocks + blockIdx.x] = range;
}

// Convert: images (B, C, H, W) to [component][image][pixel][group][channel].
extern "C" __global__ void __launch_bounds__(256)
    split_images(const float *__restrict__ x, const Range *__restrict__ ranges, uint4 *__restrict__ split,
                 ImageScale *__restrict__ scales, int *__restrict__ listed, long long first, int images) {
    const int image = blockIdx.z;
    Range range;
    for (int i = 0; i < Config::range_blocks; i++) range.add(ranges[image * Config::range_blocks + i]);
    const int exponent = Config::any_spread_scale ? range.largest_exponent() : range.exponent(Config::transposed);
    if (blockIdx.x == 0 && blockIdx.y == 0 && threadIdx.x == 0) {
        scales[image] = {exponent, range.largest};
        if (exponent == Range::UNSPLITTABLE) listed[1 + atomicAdd(listed, 1)] = image;
    }
    const float scale = power_of_two(exponent == Range::UNSPLITTABLE ? 0 : exponent);
    const float *const from = x + (first + image) * IMAGE;
    const auto load = [&](int channel, int pixel) {
        const int group = channel / Config::padded_channels, c = channel % Config::padded_channels;
        return c < C && group < Config::groups && pixel < AREA ? from[(group * C + c) * (long long)AREA + pixel] : 0.0f;
    };
    split_block<Config::groups * Config::padded_channels, AREA>(split, images, load, [&](int) { return scale; });
}
#endif

// Load: one thread fills the stages in turn. Before it refills a stage, the thread waits until all consumers have
// released it. TMA takes tile_pixels output pixels from (image, row, column) on, which lie `stride` input pixels apart,
// at tap (p, q) of their windows. All taps of a stage's channels follow one another: they read the same pixels, and L2
// holds those of all blocks for a few channels. Where one tile of other filters alone reads the pixels of a layer of
// 1 x 1 too, they leave L2 first: it writes other lines back less often. With one tile of filters, or more than two,
// that took longer.
constexpr bool EVICTS_PIXELS = Config::buffers && TAPS == 1 && FILTER_TILES == 2;
__device__ __forceinline__ void produce(const Pipeline &pipeline, int tiles, const TensorMap &x_high,
                                        const TensorMap &x_low, const TensorMap &w_high, const TensorMap &w_low) {
    if (Config::resident) {
        mbarrier_arrive_expect_bytes(pipeline.resident, RESIDENT_BYTES);
        for (int step = 0; step < K_TILES; step++)
            load_filters(pipeline.filters(0, step), pipeline.resident, w_high, w_low,
                         step / TAPS * Config::stage_channels, step % TAPS, Tile(blockIdx.x).filter);
    }
    int stage = 0, phase = 1;
    for (int number = blockIdx.x; number < tiles; number += gridDim.x) {
        const Tile tile(number);
        const int image = tile.pixel / OUTPUT_AREA;
        const Window window(tile.pixel % OUTPUT_AREA);
        for (int c = 0; c < C; c += Config::stage_channels) {
            for (int tap = 0; tap < TAPS; tap++) {
                const int p = tap / Config::kernel_width * Config::dilate_height;
                const int q = tap % Config::kernel_width * Config::dilate_width;
                Barrier *const full = pipeline.full + stage;
                unsigned char *const pixels = pipeline.pixels(stage);
                mbarrier_wait_thread(pipeline.empty + stage, phase);
                mbarrier_arrive_expect_bytes(full, STAGE_BYTES);
                const int channel = tile.group * Config::padded_channels + c;
                tma_load_im2col<EVICTS_PIXELS>(pixels, x_high, full, channel, window.column, window.row, image, q, p);
                if (COMPONENTS == 2)
                    tma_load_im2col(pixels + PIXEL_BYTES, x_low, full, channel, window.column, window.row, image, q, p);
                if (!Config::resident)
                    load_filters(pipeline.filters(stage, 0), full, w_high, w_low, c, tap, tile.filter);
                if (++stage == Config::stages) stage = 0, phase ^= 1;
            }
        }
    }
}

// Whether epilogue.prepare runs behind the first stage's products, which hide it. With two components and stages of
// fewer than 64 channels it took longer there (96 channels, 3 x 3; `ece408-bench layers` times it).
constexpr bool PREPARES_LATE = !Config::ping_pong && (COMPONENTS == 1 || Config::stage_channels == 64);
// A block's whole work: producer and consumers, tile after tile. epilogue.store(sums, staging, tile, consumer, outputs)
// takes the sums of a consumer's share of a tile, after prepare(staging, tile, consumer).
// Ping-pong consumers are ordered: each begins its products when the one before has issued its last, so that the
// epilogue of one overlaps the products of the others. The order also keeps a parity wait from lagging two phases.
template <typename Epilogue>
__device__ __forceinline__ void implicit_gemm(const TensorMap &x_high, const TensorMap &x_low, const TensorMap &w_high,
                                              const TensorMap &w_low, int images, const Epilogue &epilogue) {
    extern __shared__ __align__(16) unsigned char memory[];
    const Pipeline pipeline(memory);
    pipeline.init(1);
    const int tiles = tiles_of(images);
    if (threadIdx.x < 128) {
        lower_registers<24>();
        if (threadIdx.x == 0) produce(pipeline, tiles, x_high, x_low, w_high, w_low);
    } else {
        constexpr int LAUNCH_REGISTERS = 65536 / THREADS / 8 * 8;
        raise_registers<(LAUNCH_REGISTERS * (Config::consumers + 1) - 24) / Config::consumers / 8 * 8>();
        // A ping-pong consumer's stages depend on its number: known to be uniform, it leaves descriptors in uniform
        // registers. Where a tile is one stage (64 channels, 1 x 1) that took longer.
        constexpr bool UNIFORM = Config::ping_pong && K_TILES > 1;
        const int warpgroup = UNIFORM ? __shfl_sync(~0u, threadIdx.x / 128, 0) : threadIdx.x / 128;
        const int consumer = warpgroup - 1;
        int stage = 0, phase = 0;
        if (Config::resident) mbarrier_wait(pipeline.resident, 0);
        constexpr int TILES_IN_FLIGHT = Config::consumers / CONSUMERS_PER_TILE;
        int i = Config::ping_pong ? consumer : 0;  // the tile's index in the block
        for (int number = blockIdx.x + i * gridDim.x; number < tiles;
             number += TILES_IN_FLIGHT * gridDim.x, i += TILES_IN_FLIGHT) {
            const Tile tile = Tile(number).of(consumer);
            const auto begin_products = [&](Accumulators &sums, int which, int step) {
                multiply_stage(sums, pipeline, which, step, consumer);
                if (Config::ping_pong && step == K_TILES - 1 && threadIdx.x % 128 == 0)
                    mbarrier_arrive(pipeline.turns + (consumer + 1) % Config::consumers);
                if (PREPARES_LATE && step == 0) epilogue.prepare(pipeline.epilogue_storage, tile, consumer);
            };
            if (!PREPARES_LATE) epilogue.prepare(pipeline.epilogue_storage, tile, consumer);
            Accumulators sums;
            sums.clear();
            if (Config::ping_pong) {
                stage = i * K_TILES % Config::stages, phase = i * K_TILES / Config::stages % 2;
                if (i) mbarrier_wait(pipeline.turns + consumer, (i - 1) / TILES_IN_FLIGHT);
            }
            multiply_stages(sums, pipeline, K_TILES, stage, phase, begin_products);
            epilogue.store(sums, pipeline.epilogue_storage, tile, consumer, pipeline.outputs);
        }
        epilogue.end();
    }
}

#ifndef SPLIT_FORM
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    implicit_gemm_tma(const __grid_constant__ TensorMap x_high, const __grid_constant__ TensorMap x_low,
                      const __grid_constant__ TensorMap w_high, const __grid_constant__ TensorMap w_low,
                      const ImageScale *__restrict__ x_scales, const int *__restrict__ w_exponents,
                      float *__restrict__ y, long long first, int images) {
    const FloatEpilogue epilogue{images, x_scales, w_exponents, y + first * OUTPUTS};
    implicit_gemm(x_high, x_low, w_high, w_low, images, epilogue);
}
#endif

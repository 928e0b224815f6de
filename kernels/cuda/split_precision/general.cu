// Implicit GEMM in split precision for any number of channels and filters: TMA loads, wgmma multiplies (sm_90a).
// Compiled after the .cuh files of wide.GEMM_SOURCES.
//
// The convolution is a matrix product of output pixels by filters, with GEMM K = C K K. The left matrix, the input
// windows, is not materialized: TMA's im2col mode gathers its rows from the images, with stride, padding and dilation.
// The data gradient of a convolution of stride 1 is the convolution of y with flipped filters.
//
//     a block           128 to 256 output pixels (numbered through all images) x 32 to 256 filters
//     a pipeline stage  stage_channels channels of one filter element (tap):
//
//                       channels               channels
//             pixels [ x high | x low ]  filters [ w high | w low ]      in shared memory, rows swizzled
//
//     a consumer        its share of these outputs: y += high high + (high low + low high) / 2^11
//
// Every image and every filter has its own scale, a power of two. split.cuh has the arithmetic, wide.py the error.
//
// Arithmetic intensity: per channel of a stage, 128 x 128 multiply-adds of three products each for 4 (128 + 128) bytes
// from L2, that is 96 FLOP per byte. Layers with a long reduction are limited by L2 and the tensor cores, those with a
// short one by device memory: the split copy adds one pass over the images.
//
// Restrictions (_wide_tiles.limits): sm_90a; fewer than 2^30 pixels per image; windows within TMA's offsets; stride 1
// for a data gradient. See "Im2col mode" and "Asynchronous warpgroup level matrix instructions" in the PTX ISA, and
// CUTLASS's warp-specialized persistent kernels: cooperative, and ping-pong, which only split_form.cu's tiles are.
//
// Launches, in order: split_filters (once per call); then for each chunk of the batch range_of_images, split_images,
// implicit_gemm_tma, recompute_images.
//
// Config beyond wide_tile.cuh's: range_blocks, the blocks that find the range of an image. Config for 64 channels of
// 56 x 56 and 64 filters of 3 x 3: tile_pixels 128, tile_filters 64, stage_channels 64, stages 4, consumers 2,
// promotion_stages 2.

// Find the range of each image's values, range_blocks partial results per image. From the second chunk of the batch on,
// also empty the list of images to recompute; for the first chunk, split_filters empties it.
extern "C" __global__ void __launch_bounds__(512)
    range_of_images(const float *__restrict__ x, Range *__restrict__ ranges, int *__restrict__ listed,
                    long long first) {
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

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    implicit_gemm_tma(const __grid_constant__ TensorMap x_high, const __grid_constant__ TensorMap x_low,
                      const __grid_constant__ TensorMap w_high, const __grid_constant__ TensorMap w_low,
                      const ImageScale *__restrict__ x_scales, const int *__restrict__ w_exponents,
                      float *__restrict__ y, long long first, int images) {
    const FloatEpilogue epilogue{images, x_scales, w_exponents, y + first * OUTPUTS};
    run_block(x_high, x_low, w_high, w_low, images, epilogue);
}

// split_form: fp16x3_general between layers whose activations stay split, from one layer to the next.
//
//     x, y, residual   [component][image][pixel][channel] of fp16, each group's channels padded to a multiple of eight
//     their scales     per image: its exponent, and its largest magnitude
//
// A value takes the four bytes of a float32, and no pass converts it. Before y is computed, all that is known is that no
// value exceeds (the largest |x|) (the reduction length) (the largest |w|), so this limit decides y's exponent. Its true
// largest value is found as it is stored, and serves for the next layer's limit. A stored value v errs by 2^-22 |v| or
// 2^-51 of the limit, whichever is more; the limit is some 2^10 times the largest value.
//
// y = relu(convolution + bias + residual); Config says which of bias, residual and relu there are. Images with an
// infinity or a NaN, and all images where a filter cannot be split, are recomputed in float32; their values are then
// within the range of fp16 or become infinite.
//
// Launches: split_filters (once), scale_outputs, implicit_gemm_split, recompute_split_images.

constexpr int INPUT_CHANNELS = Config::groups * Config::padded_channels;
constexpr int OUTPUT_CHANNELS = (Config::groups * M + 7) / 8 * 8;  // with several groups, M is a multiple of eight

// The exponent of each image of y. Lists the images to recompute. One block.
extern "C" __global__ void __launch_bounds__(256)
    scale_outputs(const ImageScale *__restrict__ x_scales, const int *__restrict__ w_exponents,
                  const float *__restrict__ bias, const ImageScale *__restrict__ residual_scales,
                  ImageScale *__restrict__ y_scales, int *__restrict__ listed, int images) {
    __shared__ int lowest, highest;  // exponents of the filters: their largest weight is below 2^(15 - lowest)
    __shared__ unsigned largest_bias;
    if (threadIdx.x == 0) lowest = Range::UNSPLITTABLE, highest = -Range::UNSPLITTABLE, largest_bias = 0, listed[0] = 0;
    __syncthreads();
    for (int m = threadIdx.x; m < Config::groups * M; m += 256) {
        atomicMin(&lowest, w_exponents[m]), atomicMax(&highest, w_exponents[m]);
        if (Config::bias) atomicMax(&largest_bias, __float_as_uint(bias[m]) & 0x7fffffff);
    }
    __syncthreads();
    for (int image = threadIdx.x; image < images; image += 256) {
        const bool finite = x_scales[image].largest < 0x7f800000;
        if (!finite) listed[1 + atomicAdd(listed, 1)] = image;
        float limit = scaled(__uint_as_float(x_scales[image].largest) * (C * TAPS), 15 - lowest);
        limit += __uint_as_float(largest_bias);
        if (Config::residual) limit += __uint_as_float(residual_scales[image].largest);
        Range range;
        range.largest = __float_as_uint(fminf(limit, 0x1p127f));
        y_scales[image] = {finite && highest != Range::UNSPLITTABLE ? range.largest_exponent() : 0, 0};
    }
}

// A value of a split activation; of an image with an infinity or a NaN, the high component where that is one.
__device__ __forceinline__ float joined(unsigned short high, unsigned short low, const ImageScale &own) {
    const float value = from_fp16(high), sum = fmaf(from_fp16(low), 1.0f / 2048, value);
    return multiply(own.largest < 0x7f800000 || (high & 0x7c00) != 0x7c00 ? sum : value, power_of_two(-own.exponent));
}

// What follows the convolution, and the scales of y. Words have two channels.
struct Finish {
    const float *bias;
    const unsigned *residual;
    const ImageScale *residual_scales;
    ImageScale *scales;
    int images;

    // Words from the high components of a split y to the low ones.
    __device__ __forceinline__ long long component() const {
        return (long long)images * OUTPUT_AREA * (OUTPUT_CHANNELS / 2);
    }
    // Add the residual's word at `at` to two filters' values, biases included, and apply relu.
    __device__ __forceinline__ float2 operator()(float2 value, const ImageScale &own, long long at) const {
        if (Config::residual) {
            const unsigned high = residual[at], low = COMPONENTS == 2 ? residual[component() + at] : 0;
            value.x += joined(high, low, own), value.y += joined(high >> 16, low >> 16, own);
        }
        return Config::relu ? make_float2(value.x < 0 ? 0.0f : value.x, value.y < 0 ? 0.0f : value.y) : value;
    }
    __device__ __forceinline__ ImageScale residual_scale(int image) const {
        return Config::residual ? residual_scales[image] : ImageScale{0, 0};
    }
    __device__ __forceinline__ void note(int image, unsigned largest) const {
        if (largest) atomicMax(&scales[image].largest, largest);
    }
};

// Transpose the words of four lanes: word j of lane t becomes word t of lane j.
__device__ __forceinline__ void transpose_quad(unsigned (&words)[4]) {
    const int t = threadIdx.x % 4;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const unsigned got = __shfl_xor_sync(~0u, t & 2 ? words[i] : words[i + 2], 2);
        if (t & 2) words[i] = got;
        else words[i + 2] = got;
    }
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
        const unsigned got = __shfl_xor_sync(~0u, t & 1 ? words[i] : words[i + 1], 1);
        if (t & 1) words[i] = got;
        else words[i + 1] = got;
    }
}

// Epilogue: a lane has two filters of a pixel, four lanes exchange theirs, and each stores eight neighbouring ones.
// Without branches, so that loads are not waited for one by one: `columns` in shared memory has the scale and the bias of
// each filter of the tile, zeros beyond the last, and lanes beyond the last pixel compute the first one's.
__device__ __forceinline__ void store_split_tile(const Accumulators &sums, float *staging, const Tile &tile,
                                                 int consumer, const ImageScale *x_scales, const int *w_exponents,
                                                 uint4 *y, const Finish &finish) {
    constexpr bool WHOLE = M % Config::tile_filters == 0;  // every filter of a tile exists
    const int lane = threadIdx.x % 32, t = lane % 4;
    float2 *const columns = reinterpret_cast<float2 *>(staging) + consumer * Config::tile_filters;
    named_barrier(1 + consumer, 128);
    for (int i = threadIdx.x % 128; i < Config::tile_filters; i += 128) {
        const int filter = tile.filter + i;
        const bool exists = filter < tile.filters_end;
        columns[i] = make_float2(exists ? power_of_two(max(-w_exponents[filter], -126)) : 0.0f,
                                 exists && Config::bias ? finish.bias[filter] : 0.0f);
    }
    named_barrier(1 + consumer, 128);
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int wanted = tile.pixel + 64 * consumer + threadIdx.x / 32 % 4 * 16 + 8 * half + lane / 4;
        const bool real = wanted < finish.images * OUTPUT_AREA;
        const int pixel = real ? wanted : 0, image = pixel / OUTPUT_AREA, exponent = finish.scales[image].exponent;
        const float unscale = power_of_two(-x_scales[image].exponent), scale = power_of_two(exponent);
        const ImageScale residual_scale = finish.residual_scale(image);
        const long long row = (long long)pixel * OUTPUT_CHANNELS;
        unsigned largest = 0;  // two magnitudes, fp16
#pragma unroll
        for (int chunk = 0; chunk < Config::tile_filters / 32; chunk++) {
            unsigned high[4], low[4];
#pragma unroll
            for (int j = 0; j < 4; j++) {
                const int column = 8 * (4 * chunk + j) + 2 * t, i = 4 * (4 * chunk + j) + 2 * half;
                const float4 own = *reinterpret_cast<const float4 *>(columns + column);
                float2 value;
                value.x = multiply(multiply(sums.total(i), own.x), unscale) + own.y;
                value.y = multiply(multiply(sums.total(i + 1), own.z), unscale) + own.w;
                value = finish(value, residual_scale, (row + min(tile.filter + column, OUTPUT_CHANNELS - 2)) / 2);
                value.x = WHOLE || own.x != 0 ? value.x * scale : 0.0f;
                value.y = WHOLE || own.z != 0 ? value.y * scale : 0.0f;
                high[j] = to_fp16x2(value.x, value.y), low[j] = fp16x2_residual(value.x, value.y, high[j]);
                largest = __vmaxu2(largest, high[j] & 0x7fff7fff);
            }
            transpose_quad(high), transpose_quad(low);
            const int filter = tile.filter + 8 * (4 * chunk + t);
            if (!real || filter >= tile.filters_end) continue;
            uint4 *const to = y + (row + filter) / 8;
            to[0] = make_uint4(high[0], high[1], high[2], high[3]);
            if (COMPONENTS == 2) to[finish.component() / 4] = make_uint4(low[0], low[1], low[2], low[3]);
        }
        // The largest magnitude as float32, rounded up. Pixels of a warp mostly belong to one image.
        largest = real ? max(largest & 0xffff, largest >> 16) : 0;
        largest = __float_as_uint(scaled(from_fp16(largest + (largest && largest < 0x7c00)), -exponent));
        const bool one = __all_sync(~0u, !real || image == __shfl_sync(~0u, image, 0));
        if (one) largest = __reduce_max_sync(~0u, largest);
        if (real && (lane == 0 || !one)) finish.note(image, largest);
    }
}

extern "C" __global__ void __launch_bounds__(128 * (Config::consumers + 1), 1)
    implicit_gemm_split(const __grid_constant__ TensorMap x_high, const __grid_constant__ TensorMap x_low,
                        const __grid_constant__ TensorMap w_high, const __grid_constant__ TensorMap w_low,
                        const ImageScale *__restrict__ x_scales, const int *__restrict__ w_exponents,
                        const float *__restrict__ bias, const unsigned *__restrict__ residual,
                        const ImageScale *__restrict__ residual_scales, uint4 *__restrict__ y, ImageScale *y_scales,
                        int images) {
    const Finish finish{bias, residual, residual_scales, y_scales, images};
    const auto store = [&](const Accumulators &sums, float *staging, const Tile &tile, int consumer) {
        store_split_tile(sums, staging, tile, consumer, x_scales, w_exponents, y, finish);
    };
    implicit_gemm(x_high, x_low, w_high, w_low, images, store);
}

extern "C" __global__ void __launch_bounds__(256)
    recompute_split_images(const unsigned short *__restrict__ x, const ImageScale *__restrict__ x_scales,
                           const float *__restrict__ w, const int *__restrict__ w_exponents,
                           const float *__restrict__ bias, const unsigned *__restrict__ residual,
                           const ImageScale *__restrict__ residual_scales, unsigned short *__restrict__ y,
                           ImageScale *y_scales, const int *__restrict__ listed, int images) {
    const Finish finish{bias, residual, residual_scales, y_scales, images};
    recompute(
        w, w_exponents, listed, images,
        [&](int image, int group, int c, int pixel) {
            const int channel = group * Config::padded_channels + c;
            const long long at = ((long long)image * AREA + pixel) * INPUT_CHANNELS + channel;
            const long long component = (long long)images * AREA * INPUT_CHANNELS;
            return joined(x[at], COMPONENTS == 2 ? x[component + at] : 0, x_scales[image]);
        },
        [&](int image, int filter, int pixel, float value) {
            const long long at = ((long long)image * OUTPUT_AREA + pixel) * OUTPUT_CHANNELS + filter;
            if (Config::bias) value += bias[filter];
            const float2 both = finish(make_float2(value, value), finish.residual_scale(image), at / 2);
            value = filter % 2 ? both.y : both.x;
            finish.note(image, __float_as_uint(value) & 0x7fffffff);
            value *= power_of_two(y_scales[image].exponent);
            const unsigned high = to_fp16x2(value, 0);
            y[at] = high;
            if (COMPONENTS == 2) y[2 * finish.component() + at] = fp16x2_residual(value, 0, high);
        });
}

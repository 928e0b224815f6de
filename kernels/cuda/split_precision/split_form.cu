// split_form: fp16x3_general between layers whose activations stay split (split_arrays.cuh), from one layer to the next.
//
// y = activated(convolution + bias + residual); Config says which of bias and residual there are. Before y is computed,
// all that is known is that no value exceeds (the largest |x|) (the largest sum of a filter's |w|) + (the largest |bias|)
// + (the largest |residual|), so this limit decides y's exponent. Its true largest value is found as it is stored, and
// serves for the next layer's limit. Images with an infinity or a NaN, and all images where a filter has one, are
// computed in float32 by the blocks that have no more tiles.
//
// Launches: split_filters (once), implicit_gemm_split. y_scales is zero before.

constexpr int INPUT_CHANNELS = Config::groups * Config::padded_channels;
constexpr int OUTPUT_CHANNELS = (Config::groups * M + 7) / 8 * 8;  // with several groups, M is a multiple of eight

// What follows the convolution, and the scales of y.
struct Finish {
    const ImageScale *x_scales, *residual_scales;
    const float *limits, *bias;  // limits: of y per largest |x|, and of the bias
    const uint4 *residual;
    ImageScale *scales;
    int images;

    // Values from the high components of a split y to the low ones.
    __device__ __forceinline__ long long component() const { return (long long)images * OUTPUT_AREA * OUTPUT_CHANNELS; }
    __device__ __forceinline__ ImageScale residual_scale(int image) const {
        return Config::residual ? residual_scales[image] : ImageScale{0, 0};
    }
    // The scale of an image of y; that of an image to recompute is not finite.
    __device__ __forceinline__ ImageScale scale(int image) const {
        const ImageScale added = residual_scale(image);
        const float gain = limits[0], limit = fmaf(x_scales[image].magnitude(), gain, limits[1]) + added.magnitude();
        const bool finite = x_scales[image].finite() && added.finite() && __float_as_uint(gain) < 0x7f800000;
        return finite ? scale_of(fminf(limit, 0x1p127f)) : ImageScale{0, 0x7f800000};
    }
    // Add the residual of two filters, words of its components, to their values, biases included, and activate them.
    __device__ __forceinline__ float2 operator()(float2 value, const ImageScale &own, unsigned high, unsigned low) const {
        if (Config::residual) value.x += joined(high, low, own), value.y += joined(high >> 16, low >> 16, own);
        return make_float2(activated(value.x), activated(value.y));
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

// Epilogue: a lane has two filters of a pixel, four lanes exchange theirs, and each stores eight neighbouring ones. The
// residual comes the same way back, all of it before its first use. Without branches, so that loads are not waited for one
// by one: `columns` in shared memory has the scale and the bias of each filter of the tile, zeros beyond the last, and
// lanes beyond the last pixel compute the first one's.
__device__ __forceinline__ void store_split_tile(const Accumulators &sums, float *staging, const Tile &tile,
                                                 int consumer, const int *w_exponents, uint4 *y,
                                                 const Finish &finish) {
    constexpr bool WHOLE = M % Config::tile_filters == 0;  // every filter of a tile exists
    constexpr int CHUNKS = Config::tile_filters / 32, UNITS = OUTPUT_CHANNELS / 8;
    const int lane = threadIdx.x % 32, t = lane % 4;
    const int first_pixel = tile.pixel + 64 * consumer + threadIdx.x / 32 % 4 * 16 + lane / 4;
    uint4 added_high[2][CHUNKS], added_low[2][CHUNKS];
#pragma unroll
    for (int half = 0; half < 2; half++) {
#pragma unroll
        for (int chunk = 0; chunk < CHUNKS; chunk++) {
            if (!Config::residual) continue;
            const int pixel = first_pixel + 8 * half, filter = tile.filter + 8 * (4 * chunk + t);
            const bool exists = pixel < finish.images * OUTPUT_AREA && filter < tile.filters_end;
            const uint4 *const from = finish.residual + (exists ? (long long)pixel * UNITS + filter / 8 : 0);
            added_high[half][chunk] = from[0];
            if (COMPONENTS == 2) added_low[half][chunk] = from[finish.component() / 8];
        }
    }
    float totals[SUMS];
#pragma unroll
    for (int i = 0; i < SUMS; i++) totals[i] = sums.total(i);
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
        const int wanted = first_pixel + 8 * half;
        const bool exists = wanted < finish.images * OUTPUT_AREA;
        const int pixel = exists ? wanted : 0, image = pixel / OUTPUT_AREA;
        const ImageScale own_scale = finish.scale(image), residual_scale = finish.residual_scale(image);
        const int exponent = own_scale.exponent;
        const bool real = exists && own_scale.finite();
        if (real && pixel % OUTPUT_AREA == 0 && tile.filter == 0 && t == 0) finish.scales[image].exponent = exponent;
        const float unscale = power_of_two(-finish.x_scales[image].exponent), scale = power_of_two(exponent);
        unsigned largest = 0;  // two magnitudes, fp16
#pragma unroll
        for (int chunk = 0; chunk < CHUNKS; chunk++) {
            unsigned high[4], low[4];
            if (Config::residual) {
                const uint4 a = added_high[half][chunk], b = COMPONENTS == 2 ? added_low[half][chunk] : a;
                high[0] = a.x, high[1] = a.y, high[2] = a.z, high[3] = a.w;
                low[0] = b.x, low[1] = b.y, low[2] = b.z, low[3] = b.w;
                transpose_quad(high);
                if (COMPONENTS == 2) transpose_quad(low);
            }
#pragma unroll
            for (int j = 0; j < 4; j++) {
                const int column = 8 * (4 * chunk + j) + 2 * t, i = 4 * (4 * chunk + j) + 2 * half;
                const float4 own = *reinterpret_cast<const float4 *>(columns + column);
                float2 value;
                value.x = multiply(multiply(totals[i], own.x), unscale) + own.y;
                value.y = multiply(multiply(totals[i + 1], own.z), unscale) + own.w;
                value = finish(value, residual_scale, high[j], COMPONENTS == 2 ? low[j] : 0);
                value.x = WHOLE || own.x != 0 ? value.x * scale : 0.0f;
                value.y = WHOLE || own.z != 0 ? value.y * scale : 0.0f;
                high[j] = to_fp16x2(value.x, value.y), low[j] = fp16x2_residual(value.x, value.y, high[j]);
                largest = __vmaxu2(largest, high[j] & 0x7fff7fff);
            }
            transpose_quad(high), transpose_quad(low);
            const int filter = tile.filter + 8 * (4 * chunk + t);
            if (!real || filter >= tile.filters_end) continue;
            uint4 *const to = y + (long long)pixel * UNITS + filter / 8;
            to[0] = make_uint4(high[0], high[1], high[2], high[3]);
            if (COMPONENTS == 2) to[finish.component() / 8] = make_uint4(low[0], low[1], low[2], low[3]);
        }
        // The largest magnitude as float32, rounded up. Pixels of a warp mostly belong to one image.
        largest = real ? max(largest & 0xffff, largest >> 16) : 0;
        largest = __float_as_uint(scaled(from_fp16(largest + (largest && largest < 0x7c00)), -exponent));
        const int first_image = __shfl_sync(~0u, image, 0);
        const bool one = __all_sync(~0u, !real || image == first_image);
        if (one) largest = __reduce_max_sync(~0u, largest);
        if (one ? lane == 0 : real) finish.note(image, largest);
    }
}

extern "C" __global__ void __launch_bounds__(128 * (Config::consumers + 1), 1)
    implicit_gemm_split(const __grid_constant__ TensorMap x_high, const __grid_constant__ TensorMap x_low,
                        const __grid_constant__ TensorMap w_high, const __grid_constant__ TensorMap w_low,
                        const ImageScale *__restrict__ x_scales, const int *__restrict__ w_exponents,
                        const float *__restrict__ limits, const float *__restrict__ bias,
                        const uint4 *__restrict__ residual, const ImageScale *__restrict__ residual_scales,
                        uint4 *__restrict__ y, ImageScale *y_scales, int images) {
    const Finish finish{x_scales, residual_scales, limits, bias, residual, y_scales, images};
    const auto store = [&](const Accumulators &sums, float *staging, const Tile &tile, int consumer) {
        store_split_tile(sums, staging, tile, consumer, w_exponents, y, finish);
    };
    implicit_gemm(x_high, x_low, w_high, w_low, images, store);
}

// The images that implicit_gemm_split leaves out.
extern "C" __global__ void __launch_bounds__(256)
    recompute_split_images(const unsigned short *__restrict__ x, const ImageScale *__restrict__ x_scales,
                           const float *__restrict__ w, const float *__restrict__ limits,
                           const float *__restrict__ bias, const uint4 *__restrict__ residual,
                           const ImageScale *__restrict__ residual_scales, unsigned short *__restrict__ y,
                           ImageScale *y_scales, int images) {
    const Finish finish{x_scales, residual_scales, limits, bias, residual, y_scales, images};
    bool finite = true;
#pragma unroll 4
    for (int image = threadIdx.x; image < images; image += 256) finite &= finish.scale(image).finite();
    if (!__syncthreads_or(!finite)) return;
    recompute(
        w, images, blockIdx.x * 8 + threadIdx.x / 32, gridDim.x * 8,
        [&](int image) { return finish.scale(image).finite() ? -1 : image; },
        [&](int image, int group, int c, int pixel) {
            const int channel = group * Config::padded_channels + c;
            const long long at = ((long long)image * AREA + pixel) * INPUT_CHANNELS + channel;
            const long long component = (long long)images * AREA * INPUT_CHANNELS;
            return joined(x[at], COMPONENTS == 2 ? x[component + at] : 0, x_scales[image]);
        },
        [&](int image, int filter, int pixel, float value) {
            const long long at = ((long long)image * OUTPUT_AREA + pixel) * OUTPUT_CHANNELS + filter;
            if (Config::bias) value += bias[filter];
            const unsigned short *const added = reinterpret_cast<const unsigned short *>(residual) + at;
            const unsigned high_added = Config::residual ? added[0] : 0;
            const unsigned low_added = Config::residual && COMPONENTS == 2 ? added[finish.component()] : 0;
            value = finish(make_float2(value, 0), finish.residual_scale(image), high_added, low_added).x;
            const unsigned high = to_fp16x2(value, 0);
            // The high component may be above the value, even infinite.
            finish.note(image, __float_as_uint(fmaxf(fabsf(value), fabsf(from_fp16(high)))));
            y[at] = high;
            if (COMPONENTS == 2) y[finish.component() + at] = fp16x2_residual(value, 0, high);
            // The channels beyond the last.
            if (filter == Config::groups * M - 1)
                for (int more = 1; filter + more < OUTPUT_CHANNELS; more++) {
                    y[at + more] = 0;
                    if (COMPONENTS == 2) y[finish.component() + at + more] = 0;
                }
        });
}

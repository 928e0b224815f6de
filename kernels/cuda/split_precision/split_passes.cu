// split_passes: the layers between convolutions whose activations stay split (split_arrays.cuh): pooling, depthwise
// convolution, a factor and an offset per channel, a factor per image and channel, sums, Concat; and conversions from
// and to float32 in NCHW.
//
// A thread computes eight channels of one output pixel, 16 bytes of each component; neighbouring threads have
// neighbouring channels. Memory bandwidth limits all of them: pooling and depthwise convolution with 3 x 3 windows have
// some two FLOP per byte, the others less than one. The exponent of y follows from an upper limit of |y|. For a
// maximum, a mean and Concat, it is the largest magnitude of the inputs; for a sum, that times the elements of a
// window; for a depthwise convolution, `limits` has the largest |y| per largest |x|, and the largest |bias|.
//
// A macro with a kernel's name selects the kernel to compile; ACTIVATION(v) comes last. Config: components; channels;
// the input's height and width, the output's output_height and output_width; window_height, window_width, stride_...,
// pad_...; maximum, mean, count_pad, as in Pooling; below_zero: see depthwise_split; has_factor, residual: what
// combine_split reads; inputs and end_0 to end_3, the channels up to each input's end; unfolded_channels, of an unfolded
// pixel, and unfolded_rows, of a thread.

constexpr int C = Config::channels, UNITS = (C + 7) / 8;  // of a pixel
constexpr int OUTPUT_AREA = Config::output_height * Config::output_width, AREA = Config::height * Config::width;

// The output unit of this thread; 32 bits count the units of y.
struct Unit {
    unsigned index;
    int unit, pixel, image;

    __device__ __forceinline__ Unit() : index(blockIdx.x * 256 + threadIdx.x) {
        unit = index % UNITS, pixel = index / UNITS % OUTPUT_AREA, image = index / UNITS / OUTPUT_AREA;
    }
    __device__ __forceinline__ void store(uint4 *y, ImageScale *scales, int images, const ImageScale &own,
                                          const float (&values)[8]) const {
        store_channels(y, (long long)images * OUTPUT_AREA * UNITS, index, own.exponent, values);
        if (unit == 0 && pixel == 0) scales[image] = own;
    }
};

// Call tap(index of the tap, index of its unit in x) for each tap of a window that lies inside the image.
template <typename Tap>
__device__ __forceinline__ void for_each_tap(const Unit &out, const Tap &tap) {
    const int top = out.pixel / Config::output_width * Config::stride_height - Config::pad_height;
    const int left = out.pixel % Config::output_width * Config::stride_width - Config::pad_width;
#pragma unroll(Config::window_height <= 3 ? Config::window_height : 1)
    for (int p = 0; p < Config::window_height; p++) {
        if (unsigned(top + p) >= Config::height) continue;
#pragma unroll(Config::window_width <= 3 ? Config::window_width : 1)
        for (int q = 0; q < Config::window_width; q++) {
            if (unsigned(left + q) >= Config::width) continue;
            const long long pixel = (long long)out.image * AREA + (top + p) * Config::width + left + q;
            tap(p * Config::window_width + q, pixel * UNITS + out.unit);
        }
    }
}

#if defined POOL_SPLIT || defined GLOBAL_POOL_SPLIT
// The maximum, which is NaN if either is NaN.
__device__ __forceinline__ float larger(float maximum, float v) {
    return !(v <= maximum) && maximum == maximum ? v : maximum;
}
__device__ __forceinline__ float pooled(float a, float b) { return Config::maximum ? larger(a, b) : a + b; }
__device__ __forceinline__ float nothing() { return Config::maximum ? __uint_as_float(0xff800000) : 0.0f; }
#endif

#ifdef POOL_SPLIT
// y is the maximum, mean or sum of each window of x.
extern "C" __global__ void __launch_bounds__(256)
    pool_split(const uint4 *__restrict__ x, const ImageScale *__restrict__ x_scales, uint4 *__restrict__ y,
               ImageScale *__restrict__ y_scales, int images) {
    const Unit out;
    if (out.image >= images) return;
    ImageScale own = x_scales[out.image];
    float result[8];
    for (int i = 0; i < 8; i++) result[i] = nothing();
    for_each_tap(out, [&](int, long long at) {
        float values[8];
        load_channels(x, (long long)images * AREA * UNITS, at, own, values);
        for (int i = 0; i < 8; i++) result[i] = pooled(result[i], values[i]);
    });
    const int top = out.pixel / Config::output_width * Config::stride_height - Config::pad_height;
    const int left = out.pixel % Config::output_width * Config::stride_width - Config::pad_width;
    int rows = min(top + Config::window_height, Config::height + Config::pad_height) - top;
    int columns = min(left + Config::window_width, Config::width + Config::pad_width) - left;
    if (!Config::count_pad) {
        rows = min(top + Config::window_height, Config::height) - max(top, 0);
        columns = min(left + Config::window_width, Config::width) - max(left, 0);
    }
    if (!Config::maximum && !Config::mean) own = output_scale(own, Config::window_height * Config::window_width, 0.0f);
    for (int i = 0; i < 8; i++) result[i] = activated(Config::mean ? result[i] / (rows * columns) : result[i]);
    out.store(y, y_scales, images, own, result);
}
#endif

#ifdef GLOBAL_POOL_SPLIT
// y (B, C, 1, 1) is the maximum, mean or sum of each image of x. A block has eight units of an image, and 32 threads
// share the pixels of a unit.
extern "C" __global__ void __launch_bounds__(256)
    global_pool_split(const uint4 *__restrict__ x, const ImageScale *__restrict__ x_scales, uint4 *__restrict__ y,
                      ImageScale *__restrict__ y_scales, int images) {
    __shared__ float partial[8][8][8];  // [warp][unit][channel]
    const int image = blockIdx.y, own_unit = threadIdx.x % 8, unit = blockIdx.x * 8 + own_unit;
    ImageScale own = x_scales[image];
    float result[8];
    for (int i = 0; i < 8; i++) result[i] = nothing();
    if (unit < UNITS) {
#pragma unroll 4
        for (int pixel = threadIdx.x / 8; pixel < AREA; pixel += 32) {
            float values[8];
            load_channels(x, (long long)images * AREA * UNITS, ((long long)image * AREA + pixel) * UNITS + unit, own,
                          values);
            for (int i = 0; i < 8; i++) result[i] = pooled(result[i], values[i]);
        }
    }
#pragma unroll
    for (int i = 0; i < 8; i++) {
        for (int other = 8; other < 32; other *= 2)
            result[i] = pooled(result[i], __shfl_xor_sync(0xffffffffu, result[i], other));
        if (threadIdx.x % 32 < 8) partial[threadIdx.x / 32][own_unit][i] = result[i];
    }
    __syncthreads();
    if (threadIdx.x >= 8 || unit >= UNITS) return;
    if (!Config::maximum && !Config::mean) own = output_scale(own, AREA, 0.0f);
#pragma unroll
    for (int i = 0; i < 8; i++) {
        for (int warp = 1; warp < 8; warp++) result[i] = pooled(result[i], partial[warp][own_unit][i]);
        result[i] = activated(Config::mean ? result[i] / AREA : result[i]);
    }
    store_channels(y, (long long)images * UNITS, (long long)image * UNITS + unit, own.exponent, result);
    if (unit == 0) y_scales[image] = own;
}
#endif

#ifdef DEPTHWISE_SPLIT
// Depthwise convolution: w [tap][channel], with as many channels as a pixel of x; then bias and activation. With
// windows of one pixel it multiplies each channel by a factor and adds a number. below_zero: only negative values are
// multiplied, as in PReLU.
extern "C" __global__ void __launch_bounds__(256)
    depthwise_split(const uint4 *__restrict__ x, const ImageScale *__restrict__ x_scales, const float4 *__restrict__ w,
                    const float4 *__restrict__ bias, const float *__restrict__ limits, uint4 *__restrict__ y,
                    ImageScale *__restrict__ y_scales, int images) {
    const Unit out;
    if (out.image >= images) return;
    const ImageScale from = x_scales[out.image], own = output_scale(from, limits[0], limits[1]);
    const float4 first = bias[2 * out.unit], second = bias[2 * out.unit + 1];
    float result[8] = {first.x, first.y, first.z, first.w, second.x, second.y, second.z, second.w};
    for_each_tap(out, [&](int tap, long long at) {
        float values[8];
        load_channels(x, (long long)images * AREA * UNITS, at, from, values);
        const float4 a = w[2 * (tap * UNITS + out.unit)], b = w[2 * (tap * UNITS + out.unit) + 1];
        const float weights[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
        for (int i = 0; i < 8; i++) {
            const float weight = Config::below_zero && values[i] > 0.0f ? 1.0f : weights[i];
            result[i] = fmaf(values[i], weight, result[i]);
        }
    });
    for (int i = 0; i < 8; i++) result[i] = activated(result[i]);
    out.store(y, y_scales, images, own, result);
}
#endif

#ifdef COMBINE_SPLIT
// y = x factor + residual, with a factor (B, C) of magnitudes up to one, which leaves the limit of |x| as it is.
extern "C" __global__ void __launch_bounds__(256)
    combine_split(const uint4 *__restrict__ x, const ImageScale *__restrict__ x_scales, const float *__restrict__ factor,
                  const uint4 *__restrict__ residual, const ImageScale *__restrict__ residual_scales,
                  uint4 *__restrict__ y, ImageScale *__restrict__ y_scales, int images) {
    const Unit out;
    if (out.image >= images) return;
    const long long component = (long long)images * AREA * UNITS;
    ImageScale own = x_scales[out.image];
    float result[8];
    load_channels(x, component, out.index, own, result);
    if (Config::has_factor) {
#pragma unroll
        for (int i = 0; i < 8; i++)
            result[i] *= out.unit * 8 + i < C ? factor[(long long)out.image * C + out.unit * 8 + i] : 0.0f;
    }
    if (Config::residual) {
        const ImageScale other = residual_scales[out.image];
        float values[8];
        load_channels(residual, component, out.index, other, values);
        for (int i = 0; i < 8; i++) result[i] += values[i];
        own = output_scale(own, 1.0f, other.magnitude());
    }
    for (int i = 0; i < 8; i++) result[i] = activated(result[i]);
    out.store(y, y_scales, images, own, result);
}
#endif

#ifdef CONCAT_SPLIT
// Join up to four inputs along their channels; each input has a multiple of eight.
extern "C" __global__ void __launch_bounds__(256)
    concat_split(const uint4 *__restrict__ x0, const uint4 *__restrict__ x1, const uint4 *__restrict__ x2,
                 const uint4 *__restrict__ x3, const ImageScale *__restrict__ scales0,
                 const ImageScale *__restrict__ scales1, const ImageScale *__restrict__ scales2,
                 const ImageScale *__restrict__ scales3, uint4 *__restrict__ y, ImageScale *__restrict__ y_scales,
                 int images) {
    const Unit out;
    if (out.image >= images) return;
    constexpr int ENDS[4] = {Config::end_0 / 8, Config::end_1 / 8, Config::end_2 / 8, Config::end_3 / 8};
    const uint4 *const inputs[4] = {x0, x1, x2, x3};
    const ImageScale *const scales[4] = {scales0, scales1, scales2, scales3};
    unsigned largest = 0;
    ImageScale from = {0, 0};
    const uint4 *x = x0;
    int begin = 0, units = ENDS[0];
#pragma unroll
    for (int i = 0; i < Config::inputs; i++) {
        const ImageScale one = scales[i][out.image];
        largest = max(largest, one.largest);  // the bits of an infinity and of a NaN come last
        const int start = i ? ENDS[i ? i - 1 : 0] : 0;
        if (out.unit >= start) from = one, x = inputs[i], begin = start, units = ENDS[i] - start;
    }
    const ImageScale own = scale_of(__uint_as_float(largest));
    const long long pixel = (long long)out.image * AREA + out.pixel;
    float values[8];
    load_channels(x, (long long)images * AREA * units, pixel * units + out.unit - begin, from, values);
    for (int i = 0; i < 8; i++) values[i] = activated(values[i]);
    out.store(y, y_scales, images, own, values);
}
#endif

#ifdef UNFOLD_COLUMNS
// Find the largest magnitude of each float32 image. The caller zeroes y_scales.
extern "C" __global__ void __launch_bounds__(256)
    largest_of_images(const float *__restrict__ x, ImageScale *__restrict__ y_scales, int images) {
    constexpr long long IMAGE = (long long)C * AREA;
    unsigned largest = 0;
#pragma unroll 8
    for (long long i = blockIdx.x * 256 + threadIdx.x; i < IMAGE; i += gridDim.x * 256)
        largest = max(largest, __float_as_uint(x[blockIdx.y * IMAGE + i]) & 0x7fffffff);
    largest = __reduce_max_sync(~0u, largest);
    if (threadIdx.x % 32 == 0) atomicMax(&y_scales[blockIdx.y].largest, largest);
}

// Convert float32 images (B, C, H, W) of few channels to split images whose pixels have the columns of a window as
// channels: channel q C + c of pixel (row, column) is x[c][row][column stride - pad + q], and further channels are
// zero. The filters of a convolution of y have one column. A thread converts one unit in several rows. The last images
// come first: L2 still has them from largest_of_images, and then has the first images for the convolution.
extern "C" __global__ void __launch_bounds__(256)
    unfold_columns(const float *__restrict__ x, uint4 *__restrict__ y, ImageScale *__restrict__ y_scales, int images) {
    constexpr int UNFOLDED = Config::unfolded_channels / 8, ROWS = Config::unfolded_rows;
    const int index = blockIdx.x * 256 + threadIdx.x, image = images - 1 - blockIdx.y;
    const int unit = index % UNFOLDED, column = index / UNFOLDED % Config::output_width;
    const int first = index / UNFOLDED / Config::output_width * ROWS;
    if (first >= Config::height) return;
    const int exponent = scale_of(y_scales[image].magnitude()).exponent;
    const float *const from = x + ((long long)image * C * Config::height + first) * Config::width;
    int offsets[8];  // negative: zero
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const int channel = unit * 8 + i, at = column * Config::stride_width - Config::pad_width + channel / C;
        const bool inside = channel < C * Config::window_width && unsigned(at) < Config::width;
        offsets[i] = inside ? channel % C * AREA + at : -1;
    }
#pragma unroll
    for (int row = 0; row < ROWS; row++) {
        if (first + row >= Config::height) break;
        float values[8];
#pragma unroll
        for (int i = 0; i < 8; i++) values[i] = offsets[i] >= 0 ? from[row * Config::width + offsets[i]] : 0.0f;
        const long long at = ((long long)image * Config::height + first + row) * Config::output_width + column;
        store_channels(y, (long long)images * OUTPUT_AREA * UNFOLDED, at * UNFOLDED + unit, exponent, values);
    }
    if (index == 0) y_scales[image].exponent = exponent;
}
#endif

#ifdef JOIN_IMAGES
// Convert split activations to float32 in NCHW; a block transposes 64 channels of 32 pixels.
extern "C" __global__ void __launch_bounds__(256)
    join_images(const uint4 *__restrict__ x, const ImageScale *__restrict__ x_scales, float *__restrict__ y, int images) {
    __shared__ float tile[32][65];
    const int image = blockIdx.z, c0 = blockIdx.y * 64, pixel0 = blockIdx.x * 32;
    const int row = threadIdx.x / 8, unit = c0 / 8 + threadIdx.x % 8;
    if (pixel0 + row < AREA && unit < UNITS) {
        float values[8];
        load_channels(x, (long long)images * AREA * UNITS, ((long long)image * AREA + pixel0 + row) * UNITS + unit,
                      x_scales[image], values);
        for (int i = 0; i < 8; i++) tile[row][threadIdx.x % 8 * 8 + i] = values[i];
    }
    __syncthreads();
    const int pixel = pixel0 + threadIdx.x % 32;
    for (int c = c0 + threadIdx.x / 32; c < min(C, c0 + 64); c += 8)
        if (pixel < AREA) y[((long long)image * C + c) * AREA + pixel] = tile[threadIdx.x % 32][c - c0];
}
#endif

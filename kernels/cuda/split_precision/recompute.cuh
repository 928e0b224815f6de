// recompute: the images that cannot be split, again in float32, for all kernels of the family. Config has the
// convolution (Convolution of _convolution.py).

constexpr int TAPS = Config::kernel_height * Config::kernel_width;
constexpr int AREA = Config::height * Config::width, OUTPUT_WIDTH = Config::output_width;
constexpr int OUTPUT_AREA = Config::output_height * OUTPUT_WIDTH;

// The first pixel of an output pixel's window of inputs; it may be padding.
struct Window {
    int row, column;

    __device__ __forceinline__ explicit Window(int pixel)
        : row(pixel / OUTPUT_WIDTH * Config::stride_height - Config::pad_height),
          column(pixel % OUTPUT_WIDTH * Config::stride_width - Config::pad_width) {}
};

// Where the weight of a filter lies, for channel c of its group. A data gradient is the convolution of y by filters
// whose channels and filters have changed places and whose rows and columns are reversed.
__device__ __forceinline__ long long weight_index(int filter, int c, int tap) {
    constexpr int CHANNELS = Config::channels, FILTERS = Config::filters;
    return Config::transposed
               ? ((long long)(filter / FILTERS * CHANNELS + c) * FILTERS + filter % FILTERS) * TAPS + (TAPS - 1 - tap)
               : ((long long)filter * CHANNELS + c) * TAPS + tap;
}

// Whether a filter cannot be split: then all images are recomputed. All threads of a block call it.
__device__ __forceinline__ bool filters_unsplittable(const int *filter_scales);

// One thread: a pixel of RECOMPUTED filters of a group from `filter0` on, fewer where the group ends, over every
// `step`-th channel from `first` on. The sums have two levels: the products of a channel, and the channels. Padding is
// zeros, whose product with an infinite weight is NaN; a data gradient leaves out the taps that lie outside y.
// load(image, group, channel, pixel) returns an input; store(image, filter, pixel, sum) takes a sum.
constexpr int RECOMPUTED = 8;
template <typename Load, typename Store>
__device__ __forceinline__ void recompute_pixel(const float *w, int image, int group, int filter0, int pixel,
                                                const Load &load, const Store &store, int first = 0, int step = 1) {
    constexpr int FILTERS = Config::filters;
    const Window window(pixel);
    float sums[RECOMPUTED] = {};
    for (int c = first; c < Config::channels; c += step) {
        float products[RECOMPUTED] = {};
#pragma unroll 1
        for (int tap = 0; tap < TAPS; tap++) {
            const int row = window.row + tap / Config::kernel_width * Config::dilate_height;
            const int column = window.column + tap % Config::kernel_width * Config::dilate_width;
            const bool inside = unsigned(row) < Config::height && unsigned(column) < Config::width;
            if (Config::transposed && !inside) continue;
            const float value = inside ? load(image, group, c, row * Config::width + column) : 0.0f;
#pragma unroll
            for (int f = 0; f < RECOMPUTED; f++) {
                const int filter = group * FILTERS + min(filter0 + f, FILTERS - 1);
                products[f] = multiply_add(value, w[weight_index(filter, c, tap)], products[f]);
            }
        }
#pragma unroll
        for (int f = 0; f < RECOMPUTED; f++) sums[f] = multiply_add(products[f], 1.0f, sums[f]);
    }
#pragma unroll
    for (int f = 0; f < RECOMPUTED; f++)
        if (filter0 + f < FILTERS) store(image, group * FILTERS + filter0 + f, pixel, sums[f]);
}

// All blocks of RECOMPUTE_WARPS warps: a lane computes RECOMPUTED filters of a pixel. image_of(number) returns the
// image of a number below `count`, or -1 to leave it out. The list is short, and an image of 7 x 7 pixels occupies few
// warps, which wait for memory at each channel: so the warps of a block share the channels where there are many, and
// then each adds up the sums of one filter.
constexpr int RECOMPUTE_WARPS = 8;
template <typename ImageOf, typename Load, typename Store>
__device__ __forceinline__ void recompute(const float *w, int count, const ImageOf &image_of, const Load &load,
                                          const Store &store) {
    static_assert(RECOMPUTE_WARPS == RECOMPUTED, "one filter per warp");
    constexpr bool SHARES_CHANNELS = Config::channels >= 64;
    constexpr int FILTER_BLOCKS = (Config::filters + RECOMPUTED - 1) / RECOMPUTED;
    constexpr long long PIXEL_BLOCKS = (OUTPUT_AREA + 31) / 32;
    constexpr long long IMAGE_BLOCKS = PIXEL_BLOCKS * FILTER_BLOCKS * Config::groups;
    __shared__ float sums[SHARES_CHANNELS ? RECOMPUTE_WARPS : 1][RECOMPUTED][32];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, items = SHARES_CHANNELS ? 1 : RECOMPUTE_WARPS;
    const long long item = (long long)blockIdx.x * items + (SHARES_CHANNELS ? 0 : warp);
    for (long long i = item; i < count * IMAGE_BLOCKS; i += gridDim.x * items) {
        const int block = i % IMAGE_BLOCKS / PIXEL_BLOCKS, image = image_of(int(i / IMAGE_BLOCKS));
        const int group = block / FILTER_BLOCKS, filter0 = block % FILTER_BLOCKS * RECOMPUTED;
        const int pixel = i % PIXEL_BLOCKS * 32 + lane;
        if (image < 0) continue;
        if (!SHARES_CHANNELS) {
            if (pixel < OUTPUT_AREA) recompute_pixel(w, image, group, filter0, pixel, load, store);
            continue;
        }
        const auto keep = [&](int, int filter, int, float sum) {
            sums[warp][filter - group * Config::filters - filter0][lane] = sum;
        };
        if (pixel < OUTPUT_AREA)
            recompute_pixel(w, image, group, filter0, pixel, load, keep, warp, RECOMPUTE_WARPS);
        __syncthreads();
        if (pixel < OUTPUT_AREA && filter0 + warp < Config::filters) {
            float sum = 0;
            for (int from = 0; from < RECOMPUTE_WARPS; from++) sum = multiply_add(sums[from][warp][lane], 1.0f, sum);
            store(image, group * Config::filters + filter0 + warp, pixel, sum);
        }
        __syncthreads();
    }
}

#ifndef SPLIT_FORM
// The listed images (their number, then their indices), or all of them where a filter cannot be split. With an empty
// list the launch costs an idle grid. What an epilogue adds to y, this kernel must add too. `listed` is not
// __restrict__: convolution.cu, which may still run, writes it.
extern "C" __global__ void __launch_bounds__(32 * RECOMPUTE_WARPS)
    recompute_images(const float *__restrict__ x, const float *__restrict__ w, float *__restrict__ y,
                     const int *__restrict__ filter_scales, const int *listed, long long first, int images) {
    constexpr long long IMAGE_SIZE = (long long)Config::groups * Config::channels * AREA;
    constexpr long long OUTPUT_SIZE = (long long)Config::groups * Config::filters * OUTPUT_AREA;
    wait_for_previous_grid();
    const bool all = filters_unsplittable(filter_scales);
    recompute(
        w, all ? images : listed[0],
        [&](int number) { return all ? number : listed[1 + number]; },
        [&](int image, int group, int c, int pixel) {
            return x[(first + image) * IMAGE_SIZE + (group * Config::channels + c) * (long long)AREA + pixel];
        },
        [&](int image, int filter, int pixel, float value) {
            y[(first + image) * OUTPUT_SIZE + filter * (long long)OUTPUT_AREA + pixel] = value;
        });
}
#endif

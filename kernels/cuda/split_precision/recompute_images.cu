// recompute_images: compute the listed images in float32, or all images if a filter cannot be split. This kernel must
// also add whatever an epilogue adds to y.
//
// A lane computes RECOMPUTED filters of a pixel. The list is short (with an empty one the launch costs an idle grid),
// and an image of 7 x 7 pixels occupies few warps, which wait for memory at each channel: so the warps of a block share
// the channels where there are many, and then each adds up the sums of one filter.

constexpr int RECOMPUTE_WARPS = 8;

// `listed`: the number of images, then their indices; not __restrict__: convolution.cu, which may still run, writes it.
extern "C" __global__ void __launch_bounds__(32 * RECOMPUTE_WARPS)
    recompute_images(const float *__restrict__ x, const float *__restrict__ w, float *__restrict__ y,
                     const int *__restrict__ filter_scales, const int *listed, long long first, int images) {
    static_assert(RECOMPUTE_WARPS == RECOMPUTED, "one filter per warp");
    constexpr bool SHARES_CHANNELS = Config::channels >= 64;
    constexpr int BLOCKS = (Config::filters + RECOMPUTED - 1) / RECOMPUTED;  // of filters
    constexpr long long PIXEL_BLOCKS = (OUTPUT_AREA + 31) / 32, IMAGE_BLOCKS = PIXEL_BLOCKS * BLOCKS * Config::groups;
    constexpr long long IMAGE_SIZE = (long long)Config::groups * Config::channels * AREA;
    constexpr long long OUTPUT_SIZE = (long long)Config::groups * Config::filters * OUTPUT_AREA;
    __shared__ float sums[SHARES_CHANNELS ? RECOMPUTE_WARPS : 1][RECOMPUTED][32];
    wait_for_previous_grid();
    const bool all = filters_unsplittable(filter_scales);
    const auto load = [&](int image, int group, int c, int pixel) {
        return x[(first + image) * IMAGE_SIZE + (group * Config::channels + c) * (long long)AREA + pixel];
    };
    const auto store = [&](int image, int filter, int pixel, float value) {
        y[(first + image) * OUTPUT_SIZE + filter * (long long)OUTPUT_AREA + pixel] = value;
    };
    const int count = all ? images : listed[0];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, items = SHARES_CHANNELS ? 1 : RECOMPUTE_WARPS;
    const long long item = (long long)blockIdx.x * items + (SHARES_CHANNELS ? 0 : warp);
    for (long long i = item; i < count * IMAGE_BLOCKS; i += gridDim.x * items) {
        const int block = i % IMAGE_BLOCKS / PIXEL_BLOCKS, number = i / IMAGE_BLOCKS;
        const int image = all ? number : listed[1 + number];
        const int group = block / BLOCKS, filter0 = block % BLOCKS * RECOMPUTED;
        const int pixel = i % PIXEL_BLOCKS * 32 + lane;
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

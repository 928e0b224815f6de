// recompute: an output pixel in float32, for images that cannot be split; and the sizes of the convolution, which
// Config takes from Convolution in _convolution.py.

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

// The index in w of a filter's weight for channel c of its group. A data gradient is a convolution of y: its filters
// are those of w with channels and filters exchanged, and with rows and columns reversed.
__device__ __forceinline__ long long weight_index(int filter, int c, int tap) {
    constexpr int CHANNELS = Config::channels, FILTERS = Config::filters;
    return Config::transposed
               ? ((long long)(filter / FILTERS * CHANNELS + c) * FILTERS + filter % FILTERS) * TAPS + (TAPS - 1 - tap)
               : ((long long)filter * CHANNELS + c) * TAPS + tap;
}

// One thread computes a pixel of RECOMPUTED filters of a group from `filter0` on, or fewer at the group's end, over
// every `step`-th channel from `first` on. The sums have two levels: the products of a channel, and the channels.
// Padding counts as zeros, whose product with an infinite weight is NaN; a data gradient skips the taps that lie
// outside y. load(image, group, channel, pixel) returns an input; store(image, filter, pixel, sum) stores a sum.
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

// wide_weight_gradient: the weight gradient of a layer with many channels and filters, an implicit GEMM in split
// precision by TMA and wgmma (sm_90a). Compiled after the .cuh files of wide.SHARED_SOURCES.
//
//     w[m, c, p, q] = sum over images and outputs i, j of y[b, m, i, j] * x[b, c, i stride + p dilate - pad, ...]
//
// y: the gradient with respect to the outputs, (B, M, OH, OW); x: (B, C, H, W); w: (M, C, K, L); all float32.
//
// Both operands are split into fp16 components and converted to NHWC once, so a row of shared memory has 64 channels of
// one pixel. Both operands are stored with the reduction index (the pixel) outermost; wgmma reads them through its
// transpose flags.
//
//     a unit            64 channels of x at one tap: 64 rows of the product; TMA's im2col mode moves them by the tap
//     a block           `consumers` units x `tile_filters` filters, one unit per consumer warpgroup
//     a pipeline stage  64 output pixels, numbered through all images:
//
//                             units                filters
//             pixels    [ x high | x low ]    [ y high | y low ]      in shared memory, rows swizzled
//
// The stages of all tiles are one sequence; each block takes an equal share of it (stream-K, Osama et al., PPoPP 2023).
// A tile whose stages belong to several blocks has one partial sum per block. sum_tiles adds these in a fixed order, so
// the result is bitwise equal on all GPUs with the same number of multiprocessors.
//
// Each channel of x and each filter of y is scaled by its own power of two, at most 2^120, so that its largest
// magnitude lies in [2^14, 2^15). sum_tiles computes channels and filters with an infinity or a NaN in float64.
//
// Arithmetic intensity: 96 FLOP per byte from L2 with 128 x 128 sums, as in general.cu. L2 and splitting limit it.
// Launches, for each chunk of the batch: channel_ranges, split_inputs, split_gradients, weight_gradient_tiles,
// sum_tiles.
//
// Where wide_tile.cuh says pixels, a tile and a stage have the rows of x; the output pixels are the reduction.
//
// Config beyond wide_tile.cuh's. tile_pixels: 64 per unit. x_parts, y_parts: blocks per channel in channel_ranges.
// x_vector, y_vector: floats per load there. blocks: the grid of weight_gradient_tiles. low_stages: stages after which
// the sums of low products are promoted. Config for 64 channels of 56 x 56 and 64 filters of 3 x 3: consumers 3,
// tile_filters 64, stages 3, blocks 132, x_parts and y_parts 32, x_vector and y_vector 4, low_stages 64.

constexpr int STAGE_PIXELS = 64, BLOCK = 64, BLOCK_BYTES = STAGE_PIXELS * ROW_BYTES;  // 64 pixels of 64 channels
constexpr int CHANNEL_BLOCKS = (C + BLOCK - 1) / BLOCK, UNITS = TAPS * CHANNEL_BLOCKS, TILE_UNITS = Config::consumers;
constexpr int UNIT_TILES = (UNITS + TILE_UNITS - 1) / TILE_UNITS, TILES = UNIT_TILES * FILTER_TILES;
constexpr int ROWS = BLOCK * TILE_UNITS, TILE_SUMS = ROWS * Config::tile_filters;

// Range: find the bits of one channel's largest magnitude in every parts-th image.
template <int VECTOR, int CHANNELS, int PIXELS>
__device__ __forceinline__ void channel_range(const float *x, unsigned *ranges, int block, int parts, int images) {
    struct alignas(4 * VECTOR) Values { float of[VECTOR]; };
    constexpr int LENGTH = PIXELS / VECTOR;
    const int channel = block / parts, part = block % parts, count = (images - part + parts - 1) / parts;
    Range range;
#pragma unroll 4
    for (int k = threadIdx.x; k < count * LENGTH; k += 256) {
        const long long plane = (part + k / LENGTH * (long long)parts) * CHANNELS + channel;
        const Values values = reinterpret_cast<const Values *>(x)[plane * LENGTH + k % LENGTH];
#pragma unroll
        for (int i = 0; i < VECTOR; i++) range.add(values.of[i]);
    }
    range.join_block<256>();
    if (threadIdx.x == 0) ranges[block] = range.largest;
}

extern "C" __global__ void __launch_bounds__(256)
    channel_ranges(const float *__restrict__ x, const float *__restrict__ y, unsigned *__restrict__ ranges,
                   long long first, int images) {
    constexpr int X_BLOCKS = C * Config::x_parts;
    const int block = blockIdx.x;
    x += first * IMAGE, y += first * OUTPUTS;
    if (block < X_BLOCKS) channel_range<Config::x_vector, C, AREA>(x, ranges, block, Config::x_parts, images);
    else
        channel_range<Config::y_vector, M, OUTPUT_AREA>(y, ranges + X_BLOCKS, block - X_BLOCKS, Config::y_parts, images);
}

// Convert: images to [component][image][pixel][channel]. Store each channel's exponent, or UNSPLITTABLE.
template <int CHANNELS, int PIXELS, int PARTS>
__device__ __forceinline__ void split_by_channel(const float *__restrict__ x, const unsigned *__restrict__ ranges,
                                                 uint4 *__restrict__ split, int *__restrict__ exponents,
                                                 long long first, int images) {
    __shared__ float scales[64];
    const int image = blockIdx.z;
    if (threadIdx.x < 64) {
        const int channel = blockIdx.y * 64 + threadIdx.x;
        Range range;
        for (int i = 0; i < PARTS; i++)
            range.largest = max(range.largest, channel < CHANNELS ? ranges[channel * PARTS + i] : 0);
        const int exponent = range.largest_exponent();
        scales[threadIdx.x] = power_of_two(exponent);
        if (image == 0 && blockIdx.x == 0 && channel < CHANNELS)
            exponents[channel] = range.largest < 0x7f800000 ? exponent : Range::UNSPLITTABLE;
    }
    const float *const from = x + (first + image) * CHANNELS * PIXELS;
    const auto load = [&](int c, int pixel) {
        return c < CHANNELS && pixel < PIXELS ? from[c * (long long)PIXELS + pixel] : 0.0f;
    };
    split_block<(CHANNELS + 7) / 8 * 8, PIXELS>(split, images, load, [&](int c) { return scales[c]; });
}

extern "C" __global__ void __launch_bounds__(256)
    split_inputs(const float *__restrict__ x, const unsigned *__restrict__ ranges, uint4 *__restrict__ split_x,
                 int *__restrict__ exponents, long long first, int images) {
    split_by_channel<C, AREA, Config::x_parts>(x, ranges, split_x, exponents, first, images);
}

extern "C" __global__ void __launch_bounds__(256)
    split_gradients(const float *__restrict__ y, const unsigned *__restrict__ ranges, uint4 *__restrict__ split_y,
                    int *__restrict__ exponents, long long first, int images) {
    split_by_channel<M, OUTPUT_AREA, Config::y_parts>(y, ranges + C * Config::x_parts, split_y, exponents + C, first,
                                                      images);
}

// The stages of all tiles in one sequence, and the blocks' shares of it.
struct Shares {
    long long stages, total, blocks;  // stages of a tile and of all; blocks that have some

    __device__ __forceinline__ explicit Shares(int images)
        : stages(((long long)images * OUTPUT_AREA + STAGE_PIXELS - 1) / STAGE_PIXELS), total(stages * TILES),
          blocks(min((long long)Config::blocks, total)) {}
    __device__ __forceinline__ long long begin(int block) const { return min((long long)block, blocks) * total / blocks; }
    __device__ __forceinline__ int owner(long long stage) const { return int(((stage + 1) * blocks - 1) / total); }
    __device__ __forceinline__ int first_block(int tile) const { return owner(tile * stages); }
    __device__ __forceinline__ int last_block(int tile) const { return owner((tile + 1) * stages - 1); }
};

// Load: one thread issues all TMA loads of the block's share. Past the last unit it loads the last unit again;
// sum_tiles ignores those rows.
__device__ __forceinline__ void produce(const Pipeline &pipeline, const Shares &shares, const TensorMap &x_high,
                                        const TensorMap &x_low, const TensorMap &y_high, const TensorMap &y_low) {
    int stage = 0, phase = 1;
    const long long end = shares.begin(blockIdx.x + 1);
    for (long long item = shares.begin(blockIdx.x); item < end; item++) {
        const int tile = int(item / shares.stages), pixel = int(item % shares.stages) * STAGE_PIXELS;
        const int image = pixel / OUTPUT_AREA;
        const Window window(pixel % OUTPUT_AREA);
        Barrier *const full = pipeline.full + stage;
        mbarrier_wait_thread(pipeline.empty + stage, phase);
        mbarrier_arrive_expect_bytes(full, STAGE_BYTES);
#pragma unroll
        for (int i = 0; i < TILE_UNITS; i++) {
            const int unit = min(tile / FILTER_TILES * TILE_UNITS + i, UNITS - 1), tap = unit / CHANNEL_BLOCKS;
            const int c = unit % CHANNEL_BLOCKS * BLOCK, p = tap / Config::kernel_width * Config::dilate_height;
            const int q = tap % Config::kernel_width * Config::dilate_width;
            unsigned char *const to = pipeline.pixels(stage) + i * BLOCK_BYTES;
            tma_load_im2col(to, x_high, full, c, window.column, window.row, image, q, p);
            tma_load_im2col(to + PIXEL_BYTES, x_low, full, c, window.column, window.row, image, q, p);
        }
#pragma unroll
        for (int i = 0; i < Config::tile_filters / BLOCK; i++) {
            const int filter = tile % FILTER_TILES * Config::tile_filters + i * BLOCK;
            // Of y [pixel][filter], a load takes 64 filters where other kernels' take channels, and pixels for filters.
            load_filters(pipeline.filters(stage, 0) + i * BLOCK_BYTES, full, y_high, y_low, filter, 0, pixel);
        }
        if (++stage == Config::stages) stage = 0, phase ^= 1;
    }
}

// partials: [block + tile][consumer's unit][channel][filter]. Along the sequence of stages, each partial sum has a
// larger block, a larger tile or both than the previous one, so no two have the same block + tile.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    weight_gradient_tiles(const __grid_constant__ TensorMap x_high, const __grid_constant__ TensorMap x_low,
                          const __grid_constant__ TensorMap y_high, const __grid_constant__ TensorMap y_low,
                          float *__restrict__ partials, int images) {
    extern __shared__ __align__(16) unsigned char memory[];
    const Pipeline pipeline(memory);
    pipeline.init(1);
    const Shares shares(images);
    if (threadIdx.x < 128) {
        lower_registers<PRODUCER_REGISTERS>();
        if (threadIdx.x == 0) produce(pipeline, shares, x_high, x_low, y_high, y_low);
        return;
    }
    raise_registers<CONSUMER_REGISTERS>();
    const int consumer = threadIdx.x / 128 - 1, warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
    const auto multiply = [&](Accumulators &sums, int stage, int step) {
        multiply_stage(sums, pipeline, stage, step, consumer, false);
    };
    int stage = 0, phase = 0;
    const long long end = shares.begin(blockIdx.x + 1);
    for (long long item = shares.begin(blockIdx.x); item < end;) {
        const int tile = int(item / shares.stages);
        const long long tile_end = min(end, (tile + 1) * shares.stages);
        Accumulators sums = {};
        while (item < tile_end) {
            const int steps = int(min(tile_end - item, (long long)Config::low_stages));
            multiply_stages(sums, pipeline, steps, stage, phase, multiply);
#pragma unroll
            for (int i = 0; i < SUMS; i++) sums.promoted[i] = sums.total(i), sums.low[i] = 0;
            item += steps;
        }
        float *const to =
            partials + ((long long)blockIdx.x + tile) * TILE_SUMS + consumer * (BLOCK * Config::tile_filters);
#pragma unroll
        for (int i = 0; i < SUMS; i += 2) {
            const int row = 16 * warp + i / 2 % 2 * 8 + lane / 4, column = i / 4 * 8 + lane % 4 * 2;
            *reinterpret_cast<float2 *>(to + row * Config::tile_filters + column) =
                make_float2(sums.promoted[i], sums.promoted[i + 1]);
        }
    }
}

// Compute one weight in float64, for a channel or filter that contains an infinity or a NaN. Padding counts as zeros.
__device__ __noinline__ float weight_in_float64(const float *x, const float *y, int m, int c, int tap, int images) {
    double sum = 0;
    // Not unrolled: registers for more iterations would be charged to every thread of sum_tiles.
#pragma unroll 1
    for (int image = 0; image < images; image++)
#pragma unroll 1
        for (int pixel = 0; pixel < OUTPUT_AREA; pixel++) {
            const Window window(pixel);
            const int row = window.row + tap / Config::kernel_width * Config::dilate_height;
            const int column = window.column + tap % Config::kernel_width * Config::dilate_width;
            const bool inside = unsigned(row) < Config::height && unsigned(column) < Config::width;
            const long long at = image * IMAGE + c * (long long)AREA + row * Config::width + column;
            sum += (inside ? double(x[at]) : 0.0) * double(y[image * OUTPUTS + m * (long long)OUTPUT_AREA + pixel]);
        }
    return float(sum);
}

// w = (w of the batch's earlier chunks) + the unscaled sum of the tile's partials. A block computes eight consecutive
// weights of 32 filters.
extern "C" __global__ void __launch_bounds__(256)
    sum_tiles(const float *__restrict__ partials, const int *__restrict__ exponents, const float *__restrict__ x,
              const float *__restrict__ y, float *__restrict__ w, long long first, int images) {
    __shared__ float tile[8][33];
    const int e = blockIdx.x * 8 + threadIdx.x / 32, m = blockIdx.y * 32 + threadIdx.x % 32;
    if (e < C * TAPS && m < M) {
        const int c = e / TAPS, tap = e % TAPS, unit = tap * CHANNEL_BLOCKS + c / BLOCK;
        const int number = unit / TILE_UNITS * FILTER_TILES + m / Config::tile_filters;
        const int row = unit % TILE_UNITS * BLOCK + c % BLOCK, x_exponent = exponents[c], y_exponent = exponents[C + m];
        const Shares shares(images);
        const int first_block = shares.first_block(number), count = shares.last_block(number) - first_block + 1;
        const float *const from = partials + ((long long)first_block + number) * TILE_SUMS + row * Config::tile_filters +
                                  m % Config::tile_filters;
        float sum = 0.0f;
#pragma unroll 8
        for (int n = 0; n < count; n++) sum += from[n * (long long)TILE_SUMS];
        const bool special = x_exponent == Range::UNSPLITTABLE || y_exponent == Range::UNSPLITTABLE;
        tile[threadIdx.x / 32][threadIdx.x % 32] =
            special ? weight_in_float64(x + first * IMAGE, y + first * OUTPUTS, m, c, tap, images)
                    : scaled(sum, -(x_exponent + y_exponent));
    }
    __syncthreads();
    const int own = blockIdx.x * 8 + threadIdx.x % 8, filter = blockIdx.y * 32 + threadIdx.x / 8;
    if (own >= C * TAPS || filter >= M) return;
    float *const to = w + (long long)filter * (C * TAPS) + own;
    *to = (first ? *to : 0.0f) + tile[threadIdx.x % 8][threadIdx.x / 8];
}

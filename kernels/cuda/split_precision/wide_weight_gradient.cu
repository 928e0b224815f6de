// Weight gradients of layers with many channels in split precision: TMA loads, wgmma multiplies (sm_90a).
//
//     w[m, c, p, q] = sum over images and outputs i, j of y[b, m, i, j] x[b, c, i STRIDE + p DILATE - PAD, ...]
//
// This is a matrix product of filters by columns (tap, channel), summed over all output pixels of all images. Both
// factors are read as they lie in split arrays, a pixel's channels next to one another: wgmma takes operands whose rows
// run along the sum (MN-major). TMA's im2col mode gathers the pixels of x that a tap meets.
//
//     a block           64 or 128 filters x 64 to 256 columns, in boxes of one tap's 64, 32 or 16 channels
//     a pipeline stage  stage_pixels output pixels:
//
//                  64 filters                    box_channels
//             y [ high ] [ low ]  ...       x [ high ] [ low ]  ...    in shared memory, a row per pixel, swizzled
//
//     a consumer        64 filters x consumer_columns: w += high high + (high low + low high) / 2^11
//
// All products, tile after tile and pixel after pixel, lie on a line, of which every block computes an equal share
// ("Stream-K", Osama et al. 2023). A share is in up to a few tiles; each leaves its sums as a partial tile, and
// sum_tiles adds those of a tile in the order of the blocks, so results are the same at every run.
//
// Split precision as in general.cu, but every channel of x and every filter of y has a power of two of its own, for all
// images. Values below 2^-14 after scaling err by up to 2^-36, so a product by up to 2^-20; they are counted. Where a
// sum is not far above its count, and where a value is infinite or NaN, the weight is computed again in float32.
//
// Arithmetic intensity: as general.cu's, 96 FLOP per byte from L2. The split copies add two passes over x and y.
//
// Launches: ranges_of_channels (once per call); then for every group of images split_operands, weight_gradient_tma, and
// after the last group sum_tiles and recompute_weights.
//
// With few channels, a window's columns become channels of their own when x is split (folded_columns): they fill more of
// a box. With one column or one row per filter, only the pixels that filters meet are split. Both are convolutions of
// other sizes. Config has these sizes; folds, and then of x itself source_height, source_width and the windows' stride,
// pad and dilate (window_...); padded_channels and padded_filters, of a pixel in the split arrays; range_blocks;
// filter_boxes, consumer_columns, box_channels, stage_pixels: the tile; slices, threads that add one sum's partial tiles;
// stages, consumers and promote_every.

constexpr int C = Config::channels, M = Config::filters, TAPS = Config::kernel_height * Config::kernel_width;
constexpr int AREA = Config::height * Config::width, OUTPUT_WIDTH = Config::output_width;
constexpr int OUTPUT_AREA = Config::output_height * OUTPUT_WIDTH;

constexpr int PIXELS = Config::stage_pixels, FILTER_BOX = 64, BOX = Config::box_channels, COLUMNS = Config::consumer_columns;
constexpr int TILE_FILTERS = FILTER_BOX * Config::filter_boxes;
constexpr int BOXES = COLUMNS / BOX * (Config::consumers / Config::filter_boxes);  // of x in a stage
constexpr int Y_BOX_BYTES = PIXELS * 2 * FILTER_BOX, X_BOX_BYTES = PIXELS * 2 * BOX;
constexpr int Y_BYTES = Config::filter_boxes * Y_BOX_BYTES, X_BYTES = BOXES * X_BOX_BYTES;  // of one component
constexpr int CHANNEL_BOXES = (C + BOX - 1) / BOX, COLUMN_TILES = (TAPS * CHANNEL_BOXES + BOXES - 1) / BOXES;
constexpr int TILES = (M + TILE_FILTERS - 1) / TILE_FILTERS * COLUMN_TILES;
constexpr int SUMS = COLUMNS / 2, CONSUMER_THREADS = 128 * Config::consumers;  // accumulators of a thread
constexpr int TILE_SUMS = SUMS * CONSUMER_THREADS;
using Pipeline = PipelineOf<COMPONENTS *(Y_BYTES + X_BYTES)>;

// Images of x: which element is that channel of a pixel of the convolution; -1 outside the image.
struct Inputs {
    static constexpr int CHANNELS = C, PADDED = Config::padded_channels, PIXELS = AREA, FOLD = Config::folded_columns;
    static constexpr int HEIGHT = Config::source_height, WIDTH = Config::source_width;
    static constexpr long long IMAGE = (long long)C / FOLD * HEIGHT * WIDTH;
    __device__ __forceinline__ static long long index(long long image, int channel, int pixel) {
        if (!Config::folds) return (image * C + channel) * AREA + pixel;
        const int row = pixel / Config::width * Config::window_stride_height - Config::window_pad_height;
        const int column = pixel % Config::width * Config::window_stride_width - Config::window_pad_width +
                           channel % FOLD * Config::window_dilate_width;
        if (unsigned(row) >= HEIGHT || unsigned(column) >= WIDTH) return -1;
        return image * IMAGE + (channel / FOLD * HEIGHT + row) * (long long)WIDTH + column;
    }
};
// The same of y.
struct Outputs {
    static constexpr int CHANNELS = M, PADDED = Config::padded_filters, PIXELS = OUTPUT_AREA;
    static constexpr long long IMAGE = (long long)M * OUTPUT_AREA;
    __device__ __forceinline__ static long long index(long long image, int channel, int pixel) {
        return (image * M + channel) * OUTPUT_AREA + pixel;
    }
};
template <typename Images>
__device__ __forceinline__ float element(const float *from, long long image, int channel, int pixel) {
    const long long index = Images::index(image, channel, pixel);
    return index >= 0 ? from[index] : 0.0f;
}

// What is known of a channel of x or, from number C on, of a filter of y.
struct Channel {
    unsigned largest;  // the bits of its largest magnitude
    int tiny;          // how many of its values are below 2^-14 after scaling, except zeros

    __device__ __forceinline__ int exponent() const {
        Range range;
        range.largest = largest;
        return range.largest_exponent();
    }
};

// A thread's walk through the pixels of a batch, `STEP` pixels at a time.
template <int STEP, int SIZE>
struct Walk {
    long long image;
    int pixel;

    __device__ __forceinline__ explicit Walk(long long at) : image(at / SIZE), pixel(at % SIZE) {}
    __device__ __forceinline__ void advance() {
        image += STEP / SIZE, pixel += STEP % SIZE;
        if (pixel >= SIZE) pixel -= SIZE, image++;
    }
};

// The largest magnitude in a block's share of one channel, in all images.
template <typename Images>
__device__ __forceinline__ unsigned largest_in_share(const float *from, int channel, long long batch) {
    const long long all = batch * Images::PIXELS, share = all / Config::range_blocks, begin = blockIdx.y * share;
    const long long end = blockIdx.y == Config::range_blocks - 1 ? all : begin + share;
    Range range;
    Walk<512, Images::PIXELS> at(begin + threadIdx.x);
#pragma unroll 8
    for (long long i = begin + threadIdx.x; i < end; i += 512) {
        range.add(element<Images>(from, at.image, channel, at.pixel));
        at.advance();
    }
    range.join_warp();
    return range.largest;
}

// Grid: a channel or filter, range_blocks partial results each. Also empties the counts and the list of weights.
extern "C" __global__ void __launch_bounds__(512)
    ranges_of_channels(const float *__restrict__ x, const float *__restrict__ y, unsigned *__restrict__ ranges,
                       Channel *__restrict__ channels, int *__restrict__ listed, long long batch) {
    __shared__ unsigned of_warps[16];
    const int channel = blockIdx.x;
    unsigned largest = channel < C ? largest_in_share<Inputs>(x, channel, batch)
                                   : largest_in_share<Outputs>(y, channel - C, batch);
    if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = largest;
    __syncthreads();
    if (threadIdx.x) return;
    for (int i = 1; i < 16; i++) largest = max(largest, of_warps[i]);
    ranges[channel * Config::range_blocks + blockIdx.y] = largest;
    if (blockIdx.y == 0) channels[channel].tiny = 0;
    if (blockIdx.y == 0 && channel == 0) listed[0] = 0;
}

// Convert: images (B, channel, pixel) to [component][image][pixel][channel]. A block turns 64 channels of 64 pixels.
template <typename Images>
__device__ __forceinline__ void split_tile(const float *from, int block, const unsigned *ranges, Channel *channels,
                                           uint4 *split, int images) {
    constexpr int PITCH = 65, CHANNELS = Images::CHANNELS, PADDED = Images::PADDED;
    __shared__ float tile[64][PITCH], scales[64];
    const long long pixels = (long long)images * Images::PIXELS, pixel_blocks = (pixels + 63) / 64;
    const long long pixel0 = block % pixel_blocks * 64;
    const int c0 = int(block / pixel_blocks) * 64, column = threadIdx.x % 64, row0 = threadIdx.x / 64;
    const Walk<1, Images::PIXELS> at(pixel0 + column);
    float values[16];
#pragma unroll
    for (int i = 0; i < 16; i++) {
        const int c = c0 + row0 + 4 * i;
        const bool exists = c < CHANNELS && at.image < images;
        values[i] = exists ? element<Images>(from, at.image, c, at.pixel) : 0.0f;
    }
    if (threadIdx.x < 64 && c0 + threadIdx.x < CHANNELS) {
        Channel own = {};
        for (int i = 0; i < Config::range_blocks; i++)
            own.largest = max(own.largest, ranges[(c0 + threadIdx.x) * Config::range_blocks + i]);
        if (pixel0 == 0) channels[c0 + threadIdx.x].largest = own.largest;
        scales[threadIdx.x] = power_of_two(own.exponent());
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 16; i++) {
        const int row = row0 + 4 * i;
        const float value = c0 + row < CHANNELS ? multiply(values[i], scales[row]) : 0.0f;
        const unsigned tiny = __ballot_sync(~0u, values[i] != 0.0f && fabsf(value) < 0x1p-14f);
        if (tiny && threadIdx.x % 32 == 0) atomicAdd(&channels[c0 + row].tiny, __popc(tiny));
        tile[row][column] = value;
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const int row = threadIdx.x / 8 + 32 * i, c = threadIdx.x % 8 * 8;
        if (pixel0 + row >= pixels || c0 + c >= PADDED) continue;
        uint4 high, low;
        split_channels(&tile[c][row], PITCH, 1.0f, high, low);
        uint4 *const to = split + (pixel0 + row) * (PADDED / 8) + (c0 + c) / 8;
        to[0] = high, to[pixels * (PADDED / 8)] = low;
    }
}

// Grid: the tiles of x, then those of y.
extern "C" __global__ void __launch_bounds__(256)
    split_operands(const float *__restrict__ x, const float *__restrict__ y, const unsigned *__restrict__ ranges,
                   Channel *__restrict__ channels, uint4 *__restrict__ split_x, uint4 *__restrict__ split_y,
                   long long first, int images) {
    const int x_blocks = int(((long long)images * AREA + 63) / 64) * ((Config::padded_channels + 63) / 64);
    if (int(blockIdx.x) < x_blocks)
        split_tile<Inputs>(x + first * Inputs::IMAGE, blockIdx.x, ranges, channels, split_x, images);
    else
        split_tile<Outputs>(y + first * Outputs::IMAGE, blockIdx.x - x_blocks, ranges + C * Config::range_blocks,
                            channels + C, split_y, images);
}

// Where a weight lies: a column of a filter may have become a channel.
__device__ __forceinline__ int weight_index(int m, int c, int tap) {
    constexpr int FOLD = Inputs::FOLD;
    return ((m * (C / FOLD) + c / FOLD) * TAPS + tap) * FOLD + c % FOLD;
}

// A block's share of the line of products, in units of stages: `chunks` stages per tile. next() returns false at its end.
struct Share {
    long long at, end;
    int chunks, tile, begin, stages;  // of the current tile: its first stage, and their number

    __device__ __forceinline__ static long long start(int block, int blocks, int chunks) {
        return (long long)TILES * chunks * block / blocks;
    }
    // The block that has that unit: the last that does not begin behind it.
    __device__ __forceinline__ static int block_of(long long unit, int blocks, int chunks) {
        return int(((unit + 1) * blocks - 1) / ((long long)TILES * chunks));
    }
    __device__ __forceinline__ explicit Share(int chunks)
        : at(start(blockIdx.x, gridDim.x, chunks)), end(start(blockIdx.x + 1, gridDim.x, chunks)), chunks(chunks) {}
    // `real`: the stages per tile that have pixels, fewer than `chunks` in a last group of fewer images.
    __device__ __forceinline__ bool next(int real) {
        if (at >= end) return false;
        tile = int(at / chunks), begin = int(at % chunks);
        const int last = int(min((long long)chunks, begin + (end - at)));
        at += last - begin, stages = max(0, min(last, real) - begin);
        return true;
    }
    __device__ __forceinline__ int filter() const { return tile / COLUMN_TILES * TILE_FILTERS; }
    __device__ __forceinline__ int box() const { return tile % COLUMN_TILES * BOXES; }
};

// Load: one thread fills the stages in turn. TMA takes PIXELS output pixels, and those of x that a box's tap meets.
// Boxes beyond the last tap are not loaded: what lies there reaches only sums that are left out.
__device__ __forceinline__ void produce(const Pipeline &pipeline, int chunks, int real, const TensorMap &x_high,
                                        const TensorMap &x_low, const TensorMap &y_high, const TensorMap &y_low) {
    int stage = 0, phase = 1;
    for (Share share(chunks); share.next(real);) {
        const int boxes = min(BOXES, TAPS * CHANNEL_BOXES - share.box());
        for (int chunk = share.begin; chunk < share.begin + share.stages; chunk++) {
            const int pixel = chunk * PIXELS, image = pixel / OUTPUT_AREA, rest = pixel % OUTPUT_AREA;
            const int row = rest / OUTPUT_WIDTH * Config::stride_height - Config::pad_height;
            const int column = rest % OUTPUT_WIDTH * Config::stride_width - Config::pad_width;
            Barrier *const full = pipeline.full + stage;
            unsigned char *to = pipeline[stage];
            mbarrier_wait_thread(pipeline.empty + stage, phase);
            mbarrier_arrive_expect_bytes(full, COMPONENTS * (Y_BYTES + boxes * X_BOX_BYTES));
            for (int i = 0; i < Config::filter_boxes; i++, to += Y_BOX_BYTES) {
                tma_load(to, y_high, full, share.filter() + i * FILTER_BOX, 0, pixel);
                tma_load(to + Y_BYTES, y_low, full, share.filter() + i * FILTER_BOX, 0, pixel);
            }
            to += Y_BYTES;
            for (int i = 0; i < boxes; i++, to += X_BOX_BYTES) {
                const int box = share.box() + i, tap = box / CHANNEL_BOXES, c = box % CHANNEL_BOXES * BOX;
                const int p = tap / Config::kernel_width * Config::dilate_height;
                const int q = tap % Config::kernel_width * Config::dilate_width;
                tma_load_im2col(to, x_high, full, c, column, row, image, q, p);
                tma_load_im2col(to + X_BYTES, x_low, full, c, column, row, image, q, p);
            }
            if (++stage == Config::stages) stage = 0, phase ^= 1;
        }
    }
}

// The descriptor of an operand whose pixels are rows of WIDTH bytes, swizzled over them; boxes follow one another.
template <int WIDTH>
__device__ __forceinline__ Descriptor pixel_rows(const unsigned char *box) {
    constexpr Descriptor SWIZZLE = WIDTH == 128 ? 1 : WIDTH == 64 ? 2 : 3;
    return matrix_descriptor(shared_address(box), PIXELS * WIDTH, 8 * WIDTH) | SWIZZLE << 62;
}

// The sums of a consumer's part of a tile: since the last promotion, of high by high and of the other products; and all
// before it.
struct Accumulators {
    float high[SUMS], low[SUMS], promoted[SUMS];

    // One stage's products, begun and committed.
    __device__ __forceinline__ void multiply_stage(const unsigned char *stage, int consumer) {
        const Descriptor y = pixel_rows<2 * FILTER_BOX>(stage + consumer % Config::filter_boxes * Y_BOX_BYTES);
        const Descriptor x = pixel_rows<2 * BOX>(stage + COMPONENTS * Y_BYTES +
                                                 consumer / Config::filter_boxes * (COLUMNS / BOX) * X_BOX_BYTES);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < PIXELS / 16; k++) {
            const Descriptor a = y + k * (16 * 2 * FILTER_BOX >> 4), b = x + k * (16 * 2 * BOX >> 4);
            WGMMA_MN(high, a, b);
            WGMMA_MN(low, a, b + (X_BYTES >> 4));
            WGMMA_MN(low, a + (Y_BYTES >> 4), b);
        }
        wgmma_commit();
    }
    __device__ __forceinline__ void promote() {
#pragma unroll
        for (int i = 0; i < SUMS; i++) promoted[i] += fmaf(low[i], 1.0f / 2048, high[i]), high[i] = low[i] = 0;
    }
};

// partials: partial tiles [slot][sum of a thread][thread]. Of the tiles and blocks in order, each share of a tile has the
// slot tile + block. Later groups of images add to those of the first.
extern "C" __global__ void __launch_bounds__(128 * (Config::consumers + 1), 1)
    weight_gradient_tma(const __grid_constant__ TensorMap x_high, const __grid_constant__ TensorMap x_low,
                        const __grid_constant__ TensorMap y_high, const __grid_constant__ TensorMap y_low,
                        float *__restrict__ partials, int chunks, long long first, int images) {
    extern __shared__ __align__(16) unsigned char memory[];
    const Pipeline pipeline(memory);
    pipeline.init(1);
    const int real = int(((long long)images * OUTPUT_AREA + PIXELS - 1) / PIXELS);
    if (threadIdx.x < 128) {
        lower_registers<24>();
        if (threadIdx.x == 0) produce(pipeline, chunks, real, x_high, x_low, y_high, y_low);
    } else {
        raise_registers<240>();
        const int thread = threadIdx.x - 128, consumer = thread / 128;
        int stage = 0, phase = 0;
        for (Share share(chunks); share.next(real);) {
            Accumulators sums;
#pragma unroll
            for (int i = 0; i < SUMS; i++) sums.high[i] = sums.low[i] = sums.promoted[i] = 0;
            const auto multiply = [&](int which) { sums.multiply_stage(pipeline[which], consumer); };
            consume(pipeline, share.stages, stage, phase, multiply, [&] { sums.promote(); });
            float *const to = partials + (long long)(share.tile + blockIdx.x) * TILE_SUMS + thread;
#pragma unroll
            for (int i = 0; i < SUMS; i++)
                to[i * CONSUMER_THREADS] = first ? to[i * CONSUMER_THREADS] + sums.promoted[i] : sums.promoted[i];
        }
    }
}

// Epilogue, after the last images: add a tile's partial tiles, undo the scales, list the weights to compute again. A
// block has 256 / SLICES sums; SLICES threads share one.
constexpr int SLICES = Config::slices, BLOCK_SUMS = 256 / SLICES;
extern "C" __global__ void __launch_bounds__(256)
    sum_tiles(const float *__restrict__ partials, float *__restrict__ w, const Channel *__restrict__ channels,
              int *__restrict__ listed, int chunks, int blocks, long long batch, long long first, int images) {
    __shared__ float of_slices[SLICES][BLOCK_SUMS];
    if (first + images < batch) return;
    const long long e = (long long)blockIdx.x * BLOCK_SUMS + threadIdx.x % BLOCK_SUMS;
    const int tile = int(e / TILE_SUMS), at = int(e % TILE_SUMS), slice = threadIdx.x / BLOCK_SUMS;
    const int last = Share::block_of((tile + 1LL) * chunks - 1, blocks, chunks);
    float sum = 0.0f;
#pragma unroll 4
    for (int block = Share::block_of((long long)tile * chunks, blocks, chunks) + slice; block <= last; block += SLICES)
        sum += partials[(long long)(tile + block) * TILE_SUMS + at];
    of_slices[slice][threadIdx.x % BLOCK_SUMS] = sum;
    __syncthreads();
    if (slice) return;
    for (int i = 1; i < SLICES; i++) sum += of_slices[i][threadIdx.x];

    // wgmma's accumulator i of a thread: PTX ISA, "Register Fragments for wgmma.mma_async.m64nNk16", matrix D.
    const int i = at / CONSUMER_THREADS, thread = at % CONSUMER_THREADS, consumer = thread / 128, lane = thread % 32;
    const int row = thread / 32 % 4 * 16 + lane / 4 + i / 2 % 2 * 8;
    const int column = consumer / Config::filter_boxes * COLUMNS + i / 4 * 8 + lane % 4 * 2 + i % 2;
    const int m = tile / COLUMN_TILES * TILE_FILTERS + consumer % Config::filter_boxes * FILTER_BOX + row;
    const int box = tile % COLUMN_TILES * BOXES + column / BOX, tap = box / CHANNEL_BOXES;
    const int c = box % CHANNEL_BOXES * BOX + column % BOX;
    if (m >= M || tap >= TAPS || c >= C) return;
    const Channel of_x = channels[c], of_y = channels[C + m];
    const int weight = (m * C + c) * TAPS + tap;
    const bool finite = max(of_x.largest, of_y.largest) < 0x7f800000, zero = of_x.largest == 0 || of_y.largest == 0;
    if (!finite || (!zero && fabsf(sum) < 8.0f * of_x.tiny + 8.0f * of_y.tiny)) listed[1 + atomicAdd(listed, 1)] = weight;
    else w[weight_index(m, c, tap)] = scaled(sum, -(of_x.exponent() + of_y.exponent()));
}

// The listed weights in float32, a block each: the sums of threads, then of the block.
extern "C" __global__ void __launch_bounds__(256)
    recompute_weights(const float *__restrict__ x, const float *__restrict__ y, float *__restrict__ w,
                      const int *__restrict__ listed, long long batch, long long first, int images) {
    __shared__ float of_warps[8];
    if (first + images < batch) return;
    for (int n = blockIdx.x; n < listed[0]; n += gridDim.x) {
        const int weight = listed[1 + n], tap = weight % TAPS, c = weight / TAPS % C, m = weight / TAPS / C;
        const int p = tap / Config::kernel_width * Config::dilate_height - Config::pad_height;
        const int q = tap % Config::kernel_width * Config::dilate_width - Config::pad_width;
        float sum = 0.0f;
        Walk<256, OUTPUT_AREA> at(threadIdx.x);
        for (; at.image < batch; at.advance()) {
            const int row = at.pixel / OUTPUT_WIDTH * Config::stride_height + p;
            const int column = at.pixel % OUTPUT_WIDTH * Config::stride_width + q;
            const bool inside = unsigned(row) < Config::height && unsigned(column) < Config::width;
            // An infinite y times the padding's zero is NaN.
            const float value = inside ? element<Inputs>(x, at.image, c, row * Config::width + column) : 0.0f;
            sum = multiply_add(value, element<Outputs>(y, at.image, m, at.pixel), sum);
        }
        for (int i = 16; i; i /= 2) sum += __shfl_xor_sync(~0u, sum, i);
        if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = sum;
        __syncthreads();
        if (threadIdx.x == 0) {
            for (int i = 1; i < 8; i++) sum += of_warps[i];
            w[weight_index(m, c, tap)] = sum;
        }
        __syncthreads();
    }
}

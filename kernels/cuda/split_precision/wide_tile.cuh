// wide_tile: code that the split-precision kernels for wide layers share (general.cu, pointwise.cu, split_form.cu,
// dense.cu and wide_weight_gradient.cu): the filters, the pipeline's barriers, the matrix products and the epilogue.
//
//     producer --full--> stage 0 | 1 | ... --wgmma--> sums in registers --epilogue--> shared memory --> y
//              <-empty--                consumers
//
// Config: WideTile.config of _wide_tiles.py, with the fields of Convolution of _convolution.py.

constexpr int C = Config::channels, M = Config::filters;
constexpr long long IMAGE = (long long)Config::groups * C * AREA, OUTPUTS = (long long)Config::groups * M * OUTPUT_AREA;

constexpr int ROW_BYTES = 2 * Config::stage_channels;  // a pixel's or a filter's row of a stage: one swizzle width
constexpr int PIXEL_BYTES = Config::tile_pixels * ROW_BYTES, FILTER_BYTES = Config::tile_filters * ROW_BYTES;
constexpr int STAGE_BYTES = COMPONENTS * (PIXEL_BYTES + (Config::resident ? 0 : FILTER_BYTES));
constexpr int THREADS = 128 * (Config::producers + Config::consumers);
// Registers per thread after setmaxnreg, where the block has one producer: the consumers get what it leaves. A single
// consumer gets as many as each of two, because a thread has at most 255.
constexpr int PRODUCER_REGISTERS = 24, LAUNCH_REGISTERS = 65536 / THREADS / 8 * 8;
constexpr int LEFT_REGISTERS = LAUNCH_REGISTERS * (Config::consumers + 1) - PRODUCER_REGISTERS;
constexpr int CONSUMER_REGISTERS = Config::consumers == 1 ? 240 : LEFT_REGISTERS / Config::consumers / 8 * 8;
constexpr int CONSUMERS_PER_TILE = Config::ping_pong ? 1 : Config::consumers;
constexpr int M_BLOCKS = Config::tile_pixels / 64 / CONSUMERS_PER_TILE;  // a consumer's: 64 pixels, one wgmma each
constexpr int SHARE_PIXELS = Config::ping_pong ? 0 : 64 * M_BLOCKS;      // from one consumer's share to the next one's
constexpr int BLOCK_SUMS = Config::tile_filters / 2, SUMS = M_BLOCKS * BLOCK_SUMS;  // accumulators of a thread, per sum
constexpr bool PROMOTES = Config::promotion_stages > 0;
constexpr int K_TILES = TAPS * ((C + Config::stage_channels - 1) / Config::stage_channels);  // a stage holds one
constexpr int GROUP_FILTER_TILES = (M + Config::tile_filters - 1) / Config::tile_filters;
constexpr int FILTER_TILES = Config::groups * GROUP_FILTER_TILES;
// dense.cu's sums are long, so a larger spread is harmless: a value 2^36 below the largest errs by 2^-50 of that.
constexpr int SPREAD = Config::dense ? 36 : MAX_SPREAD;
// The largest magnitude of x's exponent in kernels that undo it before they undo the filter's: between the two, a sum
// is at most C 2^(30 - exponent), which may reach 2^127. At most 90, so that small sums are no denormal numbers.
__device__ constexpr int ceil_log2(int n) { return n > 1 ? 1 + ceil_log2((n + 1) / 2) : 0; }
constexpr int LARGEST_EXPONENT = 97 - ceil_log2(C > 128 ? C : 128);
constexpr int RESIDENT_BYTES = Config::resident ? K_TILES * COMPONENTS * FILTER_BYTES : 0;
static_assert(Config::stages >= 2, "a consumer waits for the next stage before it releases one");
static_assert(Config::tile_pixels % (64 * CONSUMERS_PER_TILE) == 0, "consumers share the pixels of a tile");
static_assert(!Config::ping_pong || Config::consumers <= 4, "Pipeline has four barriers for turns");

// The index of a filter's pair of channels for dense.cu: [64 channels][filter][pair]. Of 16 pairs, lane t of four
// multiplies 4 t to 4 t + 3; these are stored at t, t + 4, t + 8 and t + 12.
__device__ __forceinline__ long long dense_pair(int filter, int pair) {
    return (pair / 32 * (long long)M + filter) * 32 + pair % 32 / 16 * 16 + pair % 4 * 4 + pair % 16 / 4;
}

// Convert: the filters to [component][filter][tap][channel], a block per filter.
extern "C" __global__ void __launch_bounds__(256)
    split_filters(const float *__restrict__ w, unsigned *__restrict__ split, int *__restrict__ exponents,
                  int *__restrict__ listed, int images) {
    // Empty the list of images to recompute: their number, their indices, and a flag per image, set if it is listed.
    if (blockIdx.x == 0 && threadIdx.x == 0) listed[0] = 0;
    for (int i = blockIdx.x * 256 + threadIdx.x; i < images; i += gridDim.x * 256) listed[1 + images + i] = 0;
    const int filter = blockIdx.x;
    Range range;
    for (int i = threadIdx.x; i < C * TAPS; i += 256) range.add(w[weight_index(filter, i / TAPS, i % TAPS)]);
    range.join_block<256>();
    const int exponent = Config::any_spread_scale ? range.largest_exponent()
                                                  : range.exponent(Config::transposed, SPREAD);
    if (threadIdx.x == 0) exponents[filter] = exponent;
    const float scale = power_of_two(exponent == Range::UNSPLITTABLE ? 0 : exponent);
    constexpr int PAIRS = Config::padded_channels / 2, WORDS = TAPS * PAIRS;
    for (int i = threadIdx.x; i < WORDS; i += 256) {
        const int tap = i / PAIRS, c = i % PAIRS * 2;
        const float first = c < C ? multiply(w[weight_index(filter, c, tap)], scale) : 0.0f;
        const float second = c + 1 < C ? multiply(w[weight_index(filter, c + 1, tap)], scale) : 0.0f;
        const unsigned high = to_fp16x2(first, second);
        const long long at = Config::dense ? dense_pair(filter, i) : (long long)filter * WORDS + i;
        split[at] = high;
        if (COMPONENTS == 2) split[(long long)Config::groups * M * WORDS + at] = fp16x2_residual(first, second, high);
    }
}

// Convert: a block transposes 64 channels of 64 pixels of an image to [component][image][pixel][channel]. CHANNELS is a
// pixel's number of channels, a multiple of eight. load(channel, pixel) returns a value, or 0 outside the image;
// scale(c) returns the scale of the block's channel c, and is called only after all threads have loaded.
template <int CHANNELS, int PIXELS, typename Load, typename Scale>
__device__ __forceinline__ void split_block(uint4 *split, int images, const Load &load, const Scale &scale) {
    __shared__ float tile[64][65];
    const int image = blockIdx.z, c0 = blockIdx.y * 64, pixel0 = blockIdx.x * 64, column = threadIdx.x % 64;
#pragma unroll
    for (int i = 0; i < 16; i++) {
        const int row = threadIdx.x / 64 + 4 * i;
        tile[row][column] = load(c0 + row, pixel0 + column);
    }
    __syncthreads();
    const long long component = (long long)images * PIXELS * (CHANNELS / 8);
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const int row = threadIdx.x / 8 + 32 * i, c = threadIdx.x % 8 * 8;
        if (pixel0 + row >= PIXELS || c0 + c >= CHANNELS) continue;
        uint4 high, low;
        split_channels([&](int j) { return multiply(tile[c + j][row], scale(c + j)); }, high, low);
        uint4 *const to = split + ((long long)image * PIXELS + pixel0 + row) * (CHANNELS / 8) + (c0 + c) / 8;
        to[0] = high;
        if (COMPONENTS == 2) to[component] = low;
    }
}

// Whether a filter cannot be split: then all images are recomputed. All 256 threads of a block call it.
__device__ __forceinline__ bool filters_unsplittable(const int *exponents) {
    int unsplittable = 0;
    for (int m = threadIdx.x; m < Config::groups * M; m += 256) unsplittable |= exponents[m] == Range::UNSPLITTABLE;
    return __syncthreads_or(unsplittable);
}

// An offset in rows of 32, 64 or 128 bytes that are swizzled over their own width.
__device__ __forceinline__ int swizzled(int offset, int row) { return offset ^ (offset >> 3 & (row - 16)); }

// The descriptor of a matrix whose rows of ROW_BYTES are swizzled over their own width, eight rows 8 ROW_BYTES apart.
// reduction_outermost: 64 such rows, then the next 64 columns.
__device__ __forceinline__ Descriptor row_descriptor(unsigned address) {
    constexpr Descriptor SWIZZLE = ROW_BYTES == 128 ? 1 : ROW_BYTES == 64 ? 2 : 3;
    return matrix_descriptor(address, Config::reduction_outermost ? 64 * ROW_BYTES : 16, 8 * ROW_BYTES) | SWIZZLE << 62;
}

// The pipeline in shared memory, in this order: the stages, aligned to 1024 bytes as the swizzle requires, each with
// the components of its pixels and then of its filters; resident filters, if the stages have none; staged outputs; a
// full and an empty barrier per stage; a barrier for resident filters; four that order the main loops of ping-pong
// consumers (CUTLASS's OrderedSequenceBarrier); the epilogue's storage.
struct Pipeline {
    unsigned char *stages, *outputs;
    Barrier *full, *empty, *resident, *turns;
    float *epilogue_storage;

    __device__ __forceinline__ explicit Pipeline(unsigned char *memory)
        : stages(memory + (-shared_address(memory) & 1023)),
          outputs(stages + Config::stages * STAGE_BYTES + RESIDENT_BYTES),
          full(reinterpret_cast<Barrier *>(outputs + Config::output_bytes)), empty(full + Config::stages),
          resident(empty + Config::stages), turns(resident + 1),
          epilogue_storage(reinterpret_cast<float *>(resident + (Config::ping_pong ? 6 : 2))) {}

    // All threads call this. A full barrier completes after `arrivals`, an empty one after `releases` of each consumer.
    __device__ __forceinline__ void init(int arrivals, int releases = 1) const {
        if (threadIdx.x == 0) {
            for (int i = 0; i < Config::stages; i++)
                mbarrier_init(full + i, arrivals), mbarrier_init(empty + i, releases * CONSUMERS_PER_TILE);
            if (Config::resident) mbarrier_init(resident, 1);
            for (int i = 0; i < Config::consumers && Config::ping_pong; i++) mbarrier_init(turns + i, 1);
            fence_mbarrier_init();
        }
        __syncthreads();
    }
    __device__ __forceinline__ unsigned char *pixels(int stage) const { return stages + stage * STAGE_BYTES; }
    // The filters of a stage; resident: those of K tile `step`.
    __device__ __forceinline__ unsigned char *filters(int stage, int step) const {
        return Config::resident ? stages + Config::stages * STAGE_BYTES + step * COMPONENTS * FILTER_BYTES
                                : pixels(stage) + COMPONENTS * PIXEL_BYTES;
    }
};

// The tile of an index: filters change fastest, so that blocks at work at the same time share pixels in L2. `filter`
// is the first of the tile, `filters_end` the end of its group.
struct Tile {
    int pixel, group, filter, filters_end;

    __device__ __forceinline__ explicit Tile(int index) {
        group = index % FILTER_TILES / GROUP_FILTER_TILES;
        pixel = index / FILTER_TILES * Config::tile_pixels;
        filter = group * M + index % GROUP_FILTER_TILES * Config::tile_filters;
        filters_end = (group + 1) * M;
    }
    // A consumer's share.
    __device__ __forceinline__ Tile of(int consumer) const {
        Tile own = *this;
        own.pixel += consumer * SHARE_PIXELS;
        return own;
    }
};
__device__ __forceinline__ int tiles_of(int images) {
    return (images * OUTPUT_AREA + Config::tile_pixels - 1) / Config::tile_pixels * FILTER_TILES;
}

// One thread loads the filters of a tile, channels c to c + stage_channels of their group. Channels beyond the last
// read as zero, so the pixels' channels there, which are another group's, add nothing.
__device__ __forceinline__ void load_filters(unsigned char *to, Barrier *barrier, const TensorMap &high,
                                             const TensorMap &low, int c, int tap, int filter) {
    tma_load(to, high, barrier, c, tap, filter);
    if (COMPONENTS == 2) tma_load(to + FILTER_BYTES, low, barrier, c, tap, filter);
}

// A thread's sums: `high` by high products since the last promotion, those `promoted` before, and the `low` products.
struct Accumulators {
    float high[SUMS], promoted[PROMOTES ? SUMS : 1], low[COMPONENTS == 2 ? SUMS : 1];

    __device__ __forceinline__ float total(int i) const {
        const float sum = PROMOTES ? promoted[i] + high[i] : high[i];
        return COMPONENTS == 2 ? fmaf(low[i], 1.0f / 2048, sum) : sum;
    }
};

// Issue and commit the wgmmas of a consumer's share of one stage; the caller waits. With `overwrite` the products
// replace the high and low sums: if a stage started from sums set to zero, the compiler would serialize its wgmmas.
__device__ __forceinline__ void multiply_stage(Accumulators &sums, const Pipeline &pipeline, int stage, int step,
                                               int consumer, bool overwrite = K_TILES == 1) {
    constexpr int K_STEP_BYTES = Config::reduction_outermost ? 16 * ROW_BYTES : 32;
    const unsigned first_pixel = shared_address(pipeline.pixels(stage)) + consumer * (SHARE_PIXELS * ROW_BYTES);
    const Descriptor pixels = row_descriptor(first_pixel);
    const Descriptor filters = row_descriptor(shared_address(pipeline.filters(stage, step)));
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < Config::stage_channels / 16; k++) {
#pragma unroll
        for (int block = 0; block < M_BLOCKS; block++) {
            const Descriptor b = filters + k * (K_STEP_BYTES >> 4);
            const Descriptor a = pixels + k * (K_STEP_BYTES >> 4) + block * (64 * ROW_BYTES >> 4);
            WGMMA_HIGH(sums.high + block * BLOCK_SUMS, a, b, overwrite && k == 0);
            if (COMPONENTS == 2) {
                WGMMA_LOW(sums.low + block * BLOCK_SUMS, a, b + (FILTER_BYTES >> 4), overwrite && k == 0);
                WGMMA_LOW(sums.low + block * BLOCK_SUMS, a + (PIXEL_BYTES >> 4), b, false);
            }
        }
    }
    wgmma_commit();
}

// Main loop: the products of `steps` stages, which begin(sums, stage, step) issues. On entry a stage's barrier `full`
// completes when its loads have arrived; on exit every stage that was read is released to the producer.
template <typename Begin>
__device__ __forceinline__ void multiply_stages(Accumulators &sums, const Pipeline &pipeline, int steps, int &stage,
                                                int &phase, const Begin &begin) {
    const auto release = [&](int which) {
        if (threadIdx.x % 128 == 0) mbarrier_arrive(pipeline.empty + which);
    };
#pragma unroll 1
    for (int step = 0; step < steps;) {
        const int last = PROMOTES ? min(steps, step + Config::promotion_stages) : steps;
        int before = -1;
#pragma unroll 1
        for (; step < last; step++) {
            mbarrier_wait(pipeline.full + stage, phase);
            begin(sums, stage, step);
            wgmma_wait<1>();
            if (before >= 0) release(before);
            before = stage;
            if (++stage == Config::stages) stage = 0, phase ^= 1;
        }
        wgmma_wait<0>();
        release(before);
        // Accumulator promotion: tensor cores truncate a long sum, ordinary additions round it. wide.bound follows from
        // the interval.
#pragma unroll
        for (int i = 0; i < SUMS && PROMOTES; i++)
            sums.promoted[PROMOTES ? i : 0] += sums.high[i], sums.high[i] = 0;
    }
}

// Epilogue of a consumer's share of a tile: the sums go through shared memory, 32 filters at a time, so that a warp
// stores 32 neighbouring pixels.
constexpr int STAGING_PITCH = 64 + 4;  // floats from one filter's row to the next: rows two apart are 8 banks apart
struct FloatEpilogue {
    int images;
    const ImageScale *x_scales;  // by image; null where the sums are unscaled already
    const int *w_exponents;
    float *y;

    // Only split_form.cu's epilogue has work to do here.
    __device__ __forceinline__ void prepare(float *, const Tile &, int) const {}
    static __device__ __forceinline__ void end() {}
    __device__ __forceinline__ void store(const Accumulators &sums, float *staging, const Tile &tile,
                                          int consumer, unsigned char * = nullptr) const {
        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
        staging += consumer * (32 * STAGING_PITCH);
#pragma unroll
        for (int block = 0; block < M_BLOCKS; block++) {
            const int first = tile.pixel + 64 * block;
            float *to[2];
            int exponent[2];
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const int pixel = first + 32 * half + lane, image = pixel / OUTPUT_AREA;
                to[half] = image < images ? y + image * OUTPUTS + pixel % OUTPUT_AREA : nullptr;
                exponent[half] = x_scales && image < images ? x_scales[image].exponent : 0;
            }
#pragma unroll
            for (int chunk = 0; chunk < Config::tile_filters / 32; chunk++) {
                named_barrier(1 + consumer, 128);
#pragma unroll
                for (int j = 0; j < 16; j++) {
                    const int filter = 8 * (j / 4) + lane % 4 * 2 + j % 2, pixel = 16 * warp + j / 2 % 2 * 8 + lane / 4;
                    staging[filter * STAGING_PITCH + pixel] = sums.total(block * BLOCK_SUMS + 16 * chunk + j);
                }
                named_barrier(1 + consumer, 128);
#pragma unroll
                for (int i = 0; i < 8; i++) {
                    const int row = 8 * warp + i, filter = tile.filter + 32 * chunk + row;
                    if (filter >= tile.filters_end) break;
                    const int own = w_exponents[filter];
#pragma unroll
                    for (int half = 0; half < 2; half++) {
                        if (to[half] == nullptr) continue;
                        const float sum = staging[row * STAGING_PITCH + 32 * half + lane];
                        __stcs(to[half] + (long long)filter * OUTPUT_AREA, scaled(sum, -(exponent[half] + own)));
                    }
                }
            }
        }
    }
};

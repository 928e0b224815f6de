// block: what the five kernels share: sizes, the tile scheduler, the shared-memory layout, and the pipeline's
// barriers.
//
//     filters (L2) ------------------------------> shared memory or registers, once per block
//     x (global) --copy--> input --split--> pipeline stage 0 / 1 --tensor cores--> registers --epilogue--> y (global)
//                  \____ producer warps ____/        \_________________ math warps _________________/
//
// A block is persistent: it computes one tile after another. A tile is `tile_lines` x `tile_columns` positions of each
// of `tile_images` images; a position is `position_rows` x `position_columns` outputs of every filter. Producer warps
// fill one pipeline stage while math warps (consumers) multiply the other. Two mbarriers per stage keep them apart:
// `full` completes when all producer threads have written the stage, `empty` when all math threads have read it.

// The im2col tap table: where the words of each k-step lie, seen from a position's first input; eight words per
// k-step. The order of a sum's products is free, and chosen such that the reads of a warp fall on different banks.
struct Tap {
    short plane, row, column;  // plane < 0: no word, its filter is zero
    __device__ int offset() const {
        return plane < 0 ? 0 : plane * Config::plane_stride + row * Config::row_stride + column;
    }
};
__constant__ const Tap TAPS[] = {TAP_TABLE};

constexpr int POSITIONS = Config::tile_images * Config::tile_lines * Config::tile_columns;
constexpr int MATH_THREADS = 32 * Config::math_warps, PRODUCER_THREADS = 32 * Config::producer_warps;
constexpr int ALL_THREADS = MATH_THREADS + PRODUCER_THREADS;
constexpr int TILES_PER_IMAGE = Config::tiles_across * Config::tiles_down;
constexpr int TILE_ROWS = Config::position_rows * Config::tile_lines;         // of outputs
constexpr int IMAGE_WORDS = Config::planes * Config::plane_stride;            // of a stage; a word is two fp16
constexpr int LOW = Config::tile_images * IMAGE_WORDS;                        // words from high to low components
constexpr bool WHOLE_ROWS = Config::tiles_across == 1, WHOLE_IMAGES = WHOLE_ROWS && Config::input_rows == H;
constexpr int INPUT_SIZE = C * Config::input_rows * Config::input_columns;    // floats of one image's input
// Floats of the staged input; input that is not staged is read from global memory twice, from L2 the second time.
constexpr int STAGED_INPUT = Config::input_from_global ? 0 : Config::tile_images * INPUT_SIZE;
constexpr int INPUT_ROW = Config::input_from_global ? W : Config::input_columns;
constexpr index_t INPUT_CHANNEL = Config::input_from_global ? index_t(H) * W : index_t(Config::input_rows) * INPUT_ROW;
constexpr index_t INPUT_IMAGE = Config::input_from_global ? IMAGE : index_t(INPUT_SIZE);
// Where math warps keep their filters in registers, a table holds where each position's words begin: no divisions.
constexpr int POSITION_TABLE = Config::filters_in_registers ? (POSITIONS + 15) / 16 * 16 : 0;

// Named barriers: of the producers; of a warpgroup (one per warpgroup); of all math warps.
constexpr int PRODUCERS = 1, WARPGROUP = 2, MATH = 15;
// mbarriers: two of each kind, and how many arrivals complete a phase of each.
constexpr int FULL = 0, EMPTY = 2;                            // of the pipeline stages
constexpr int MAY_MULTIPLY = 4;                               // of two warpgroups that multiply in turn
constexpr int OUTPUT_STAGED = 6, OUTPUT_STORED = 8;           // of outputs that the copy engine stores
constexpr int INPUT_LOADED = 10;                              // of inputs that the copy engine loads

// One tile: its first image and their number, its first output row, and its first column of positions.
struct WorkTile {
    int image, images, row, column;

    __device__ WorkTile(int number, int all_images) {
        const int in_image = number % TILES_PER_IMAGE;
        image = number / TILES_PER_IMAGE * Config::tile_images;
        images = min(Config::tile_images, all_images - image);
        row = in_image / Config::tiles_across * TILE_ROWS;
        column = in_image % Config::tiles_across * Config::tile_columns;
    }
    __device__ int input_rows() const { return Config::input_rows == H ? H : min(Config::input_rows, H - row); }
    __device__ int input_columns() const { return WHOLE_ROWS ? W : min(Config::input_columns, W - column); }
};

// The scratch buffer `state`: the number of images that cannot be split, their list, a flag per image, and for each
// group of blocks that have the same filters the number of tiles taken: the dynamic tile scheduler. Multiprocessors
// store at speeds that differ by up to a third, so a block takes its next tile when it needs one.
__device__ __forceinline__ int *tile_counter(int *state, int images) {
    return state + 1 + 2ll * images + blockIdx.x % Config::filter_blocks;
}
__device__ __forceinline__ void list_for_fallback(int *state, const WorkTile &tile, int images) {
    for (int i = tile.image; i < tile.image + tile.images; i++)
        if (atomicExch(state + 1 + images + i, 1) == 0) state[1 + atomicAdd(state, 1)] = i;
}

// The shared-memory layout. Each array begins at a multiple of 128 bytes.
struct Shared {
    unsigned *filters;            // split, in the tensor cores' order; implicit GEMM: the low components alone
    float *input;                 // of one tile, or of two with Config::prefetch_input
    unsigned *stages;             // two pipeline stages of split input
    int2 *taps;                   // bytes from a position's words to words t and t + 4 of each k-step
    float *output;                // staged outputs
    int *filter_scales;
    int *exponents;               // of both stages; then: the next tile of each stage; one or two tiles further
    unsigned *ranges;             // of each producer warp
    unsigned short *positions;    // POSITION_TABLE
    Barrier *barriers;

    __device__ explicit Shared(unsigned char *at) {
        const auto take = [&](int bytes) {
            unsigned char *const array = at;
            at += (bytes + 127) / 128 * 128;
            return static_cast<void *>(array);
        };
        filters = static_cast<unsigned *>(take(Config::filters_in_shared ? 4 * Config::filter_words : 0));
        input = static_cast<float *>(take(4 * (1 + Config::prefetch_input) * STAGED_INPUT));
        stages = static_cast<unsigned *>(take(4 * (2 * Config::stage_words)));
        taps = static_cast<int2 *>(take(Config::k_steps * 4 * 8));
        output = static_cast<float *>(take(Config::staged_outputs * 4));
        filter_scales = static_cast<int *>(take(Config::filter_blocks * Config::groups * Config::group_tiles * 8 * 4));
        exponents = static_cast<int *>(take(24));
        ranges = static_cast<unsigned *>(take(4 * Config::producer_warps * 4));
        positions = static_cast<unsigned short *>(take(2 * POSITION_TABLE));
        barriers = static_cast<Barrier *>(take(Config::barriers * 8));
    }
};
constexpr int NEXT_TILE = 2, LATER_TILE = 4;  // indices of Shared::exponents

// All threads, before the filters are there: the tap table, the barriers and the position table.
__device__ __forceinline__ void prepare_tables(const Shared &s) {
    for (int i = threadIdx.x; i < Config::k_steps * 4; i += ALL_THREADS) {
        const int k = i / 4 * 8 + i % 4;
        s.taps[i] = make_int2(4 * TAPS[k].offset(), 4 * TAPS[k + 4].offset());
    }
    // One thread: stores to all four taps by four lanes are reported by compute-sanitizer, wrongly.
    if (threadIdx.x == 0) {
#pragma unroll
        for (int i = 0; i < Config::barriers; i++) {
            constexpr int arrivals[] = {PRODUCER_THREADS, PRODUCER_THREADS, MATH_THREADS, MATH_THREADS, 128, 128,
                                        MATH_THREADS, MATH_THREADS, 128, 128, 1, 1};
            mbarrier_init(s.barriers + i, arrivals[i]);
        }
    }
    for (int i = threadIdx.x; i < POSITION_TABLE; i += ALL_THREADS) {
        const int at = min(i, POSITIONS - 1), line = at / Config::tile_columns, image = line / Config::tile_lines;
        s.positions[i] = image * IMAGE_WORDS +
                         (line - image * Config::tile_lines) * (Config::position_rows * Config::row_stride) +
                         (at - line * Config::tile_columns);
    }
}

// All threads: copy the block's split filters and all filter scales to shared memory.
__device__ __forceinline__ void load_filters(const Shared &s, const unsigned *filters, const int *filter_scales) {
    if (Config::filters_in_shared) {
        const int block = blockIdx.x % Config::filter_blocks;
        const int first = Config::implicit_gemm ? block * COMPONENTS + COMPONENTS - 1 : block;
        const uint4 *const from = reinterpret_cast<const uint4 *>(filters) + first * (Config::filter_words / 4);
        uint4 *const to = reinterpret_cast<uint4 *>(s.filters);
        for (int i = threadIdx.x; i < Config::filter_words / 4; i += ALL_THREADS) to[i] = from[i];
    }
    for (int i = threadIdx.x; i < Config::column_tiles * 8; i += ALL_THREADS) s.filter_scales[i] = filter_scales[i];
}

// Producers: start copying the input rows of a tile to shared memory.
__device__ __forceinline__ void load_input(float *to, const float *x, const WorkTile &tile, int thread) {
    if (Config::input_from_global) return;
    constexpr int FLOATS = Config::copy_floats;
    const float *const from = image_of(x, tile.image, IMAGE) + index_t(tile.row) * W + tile.column;
    if (WHOLE_IMAGES) {
        for (int i = thread * FLOATS; i < tile.images * INPUT_SIZE; i += PRODUCER_THREADS * FLOATS)
            copy_async<FLOATS>(to + i, from + i);
    } else if (WHOLE_ROWS) {
        const int length = tile.input_rows() * W;
        for (int c = 0; c < C; c++)
            for (int i = thread * FLOATS; i < length; i += PRODUCER_THREADS * FLOATS)
                copy_async<FLOATS>(to + c * (Config::input_rows * W) + i, from + c * (index_t(H) * W) + i);
    } else {
        const int columns = tile.input_columns(), rows = tile.input_rows();
        for (int run = thread / 32; run < C * rows; run += Config::producer_warps) {
            const int c = run / rows, row = run - c * rows;
            for (int i = thread % 32; i < columns; i += 32)
                copy_async<1>(to + (c * Config::input_rows + row) * Config::input_columns + i,
                              from + (c * index_t(H) + row) * W + i);
        }
    }
    copy_async_commit();
}
__device__ __forceinline__ void wait_for_input() {
    if (!Config::input_from_global) copy_async_wait();
}

// Producers: the smallest and the largest power of two of the filters, or 0.
__device__ __forceinline__ void find_filter_exponents(const Shared &s, int &lowest, int &highest) {
    for (int i = threadIdx.x % 32; i < Config::filter_columns; i += 32) {
        lowest = min(lowest, filter_exponent(s.filter_scales[i]));
        highest = max(highest, filter_exponent(s.filter_scales[i]));
    }
    lowest = __reduce_min_sync(~0u, lowest), highest = __reduce_max_sync(~0u, highest);
}

// Consumers: the tile after the one in that stage; the number of tiles or more where there is none. From lane 0, so
// that the compiler knows that a warp takes one branch.
__device__ __forceinline__ int next_tile(const Shared &s, int stage) {
    return __shfl_sync(~0u, s.exponents[NEXT_TILE + stage], 0);
}

// Bulk store: the copy engine reads a tile's staged outputs while the math warps go on, and writes whole runs of y, of
// which only the ends are parts of a 32-byte sector.
__device__ __forceinline__ void fence_staged_output() {
    if (Config::bulk_store || Config::implicit_gemm) fence_async_proxy();
}
__device__ __forceinline__ void wait_until_output_is_read() {
    if (Config::bulk_store) bulk_store_wait_read();
}
__device__ __forceinline__ void store_staged_output(const float *staged, float *y, const WorkTile &tile, int thread,
                                                    int threads) {
    constexpr int RUN = TILE_ROWS * OW, PITCH = Config::output_pitch, FILTERS_HERE = Config::block_filters;
    const int bytes = 4 * min(RUN, (OH - tile.row) * OW);
    if (RUN == PIXELS && PITCH == PIXELS && Config::filter_blocks == 1) {  // staged images lie as they do in y
        if (thread == 0) bulk_store(image_of(y, tile.image, OUTPUTS), staged, 4 * tile.images * OUTPUTS);
    } else {
        const int first = blockIdx.x % Config::filter_blocks * FILTERS_HERE;
        for (int i = thread; i < tile.images * FILTERS_HERE; i += threads) {
            const int m = first + i % FILTERS_HERE;
            float *const to =
                image_of(y, tile.image + i / FILTERS_HERE, OUTPUTS) + m * PIXELS + tile.row * index_t(OW);
            if (Config::filter_blocks == 1 || m < M) bulk_store(to, staged + i * PITCH, bytes);
        }
    }
    if (Config::bulk_store) bulk_store_commit();
}

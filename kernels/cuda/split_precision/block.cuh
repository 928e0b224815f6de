// block: sizes, the tile scheduler, the shared-memory layout and the pipeline's barriers. They are the same in all four
// kernels, which differ in their `consume`.
//
//     filters (L2) ------------------------------> shared memory or registers, once per block
//     x (global) --copy--> input --split--> pipeline stage 0 / 1 --tensor cores--> registers --epilogue--> y (global)
//                  \____ producer warps ____/        \_________________ math warps _________________/
//
// In mma_sync.cu and one_channel.cu, filters that fit neither shared memory nor registers are read from L2 per unit.
//
// A block is persistent: it computes one tile after another. A tile is `tile_lines` whole lines of positions in each of
// `tile_images` images; a position is `position_rows` x `position_columns` outputs of every filter. Producer
// warps fill one pipeline stage while math warps (consumers) multiply the other. Two mbarriers per stage keep them
// apart: `full` completes when all producer threads have written the stage, `empty` when all math threads have read it.
//
// A GEMM column is one filter, or one of the `filter_shifts` copies of a filter that are moved down (one_channel: to
// the right) by 0, 1, ... places, so that one position gives that many neighbouring outputs. Eight GEMM columns are a
// column tile, `group_tiles` column tiles a column group. A tile's work is divided into units: some positions times a
// column group, for one math warp or warpgroup. A k-step is one tensor-core instruction's share of a sum: 16 products,
// which are eight words.
//
// The files, in the order in which data passes through them: split_filters.cu; the producers of convolution.cu, which
// split a tile by operands.cu or implicit_gemm_operands.cu; the consumers of one_channel.cu, implicit_gemm.cu,
// warpgroup_mma.cu or mma_sync.cu. convolution.cu also has the kernel, which calls `produce` and `consume`. In the
// compiled text split_filters.cu and convolution.cu come last, because they call the others. split.cuh has the
// arithmetic, recompute_images.cu the fallback in float32, instructions.cuh the PTX.
//
// The pipeline stage includes the padding's zeros; the float32 input buffer does not. A data gradient is the
// convolution of the output gradient, padded, by the filters with rows and columns reversed and with channels and filters
// exchanged (Config::transposed): C, M, H and W are this convolution's.

// Fields of Config that most files use; _tiles.py explains them.
constexpr int TILE_IMAGES = Config::tile_images, TILE_LINES = Config::tile_lines, TILE_COLUMNS = Config::tile_columns;
constexpr int INPUT_ROWS = Config::input_rows;
constexpr int ROW_STRIDE = Config::row_stride, PLANE_STRIDE = Config::plane_stride, PLANES = Config::planes;
constexpr int STAGE_WORDS = Config::stage_words, K_STEPS = Config::k_steps, ROW_STEPS = Config::row_k_steps;
constexpr int POSITION_ROWS = Config::position_rows, POSITION_COLUMNS = Config::position_columns;
constexpr int OUTPUT_ROWS = Config::row_accumulators, FILTER_SHIFTS = Config::filter_shifts;
constexpr int GEMM_COLUMNS = Config::gemm_columns, COLUMN_TILES = Config::column_tiles;
constexpr int GROUP_TILES = Config::group_tiles, COLUMN_GROUPS = Config::column_groups;
constexpr int FILTER_BLOCKS = Config::filter_blocks;
constexpr int MATH_WARPS = Config::math_warps, PRODUCER_WARPS = Config::producer_warps;

// The im2col tap table: eight words per k-step, as offsets from a position's first input. The order of a sum's products
// is free; it is chosen so that the reads of a warp fall on different banks.
struct Tap {
    short plane, row, column;  // plane < 0: no word, its filter is zero
    __device__ int offset() const { return plane < 0 ? 0 : plane * PLANE_STRIDE + row * ROW_STRIDE + column; }
};
__constant__ const Tap WORD_TAPS[] = {TAP_TABLE};

constexpr int POSITIONS = Config::positions, UNITS = Config::units;  // of a tile
constexpr int MATH_THREADS = 32 * MATH_WARPS, PRODUCER_THREADS = 32 * PRODUCER_WARPS;
constexpr int ALL_THREADS = MATH_THREADS + PRODUCER_THREADS;
constexpr int TILES_PER_IMAGE = Config::tiles_per_image;
constexpr int TILE_ROWS = POSITION_ROWS * TILE_LINES;  // of outputs
constexpr int PLANE_ROWS = TILE_ROWS + K - 1;          // of a stage
constexpr int IMAGE_WORDS = PLANES * PLANE_STRIDE;     // of a stage; a word is two fp16
constexpr int LOW = TILE_IMAGES * IMAGE_WORDS;         // words from high to low components
constexpr bool WHOLE_IMAGES = TILES_PER_IMAGE == 1 && INPUT_ROWS == H, PADDED = PAD_H > 0 || PAD_W > 0;
constexpr int INPUT_SIZE = C * INPUT_ROWS * W;  // floats of one image's input
// Floats of the staged input; input that is not staged is read from global memory twice, from L2 the second time.
constexpr int STAGED_INPUT = Config::input_from_global ? 0 : TILE_IMAGES * INPUT_SIZE;
constexpr index_t INPUT_CHANNEL = (Config::input_from_global ? H : INPUT_ROWS) * index_t(W);
constexpr index_t INPUT_IMAGE = Config::input_from_global ? IMAGE : index_t(INPUT_SIZE);
constexpr int STAGES = 2;  // of the pipeline: math warps read one while producers fill the other
constexpr int INPUT_BUFFERS = Config::input_buffers;  // tiles whose input is staged or being copied

// Where math warps keep their filters in registers, a table holds where each position's words begin: without it, the
// divisions take 7 % of the time of the first layer of the course's 2018 spring on an H200.
constexpr int POSITION_TABLE = Config::filters_in_registers ? (POSITIONS + 15) / 16 * 16 : 0;

// Named barriers: of the producers; of a warpgroup (one per warpgroup); of all math warps.
constexpr int PRODUCERS_BARRIER = 1, WARPGROUP_BARRIER = 2, MATH_BARRIER = 15;
// mbarriers, two of each kind: a constant is the index of the first. ARRIVALS per phase, by kind.
constexpr int FULL = 0, EMPTY = 2;                   // of the pipeline stages
constexpr int MAY_MULTIPLY = 4;                      // of two warpgroups that multiply in turn
constexpr int OUTPUT_STAGED = 6, OUTPUT_STORED = 8;  // of outputs that the TMA unit stores
constexpr int INPUT_LOADED = 10, BARRIERS = 12;      // of inputs that the TMA unit loads; all
constexpr int ARRIVALS[] = {PRODUCER_THREADS, MATH_THREADS, 128, MATH_THREADS, 128, 1};
static_assert(STAGES == 2, "two barriers per kind, and two elements per stage's value in Shared::exponents");

// One tile: its first image and their number, and its first output row.
struct WorkTile {
    int image, images, row;

    __device__ WorkTile(int number, int all_images) {
        image = number / TILES_PER_IMAGE * TILE_IMAGES;
        images = min(TILE_IMAGES, all_images - image);
        row = number % TILES_PER_IMAGE * TILE_ROWS;
    }
    // The first input row, and the number of input rows.
    __device__ int input_row() const { return PADDED ? max(row - PAD_H, 0) : row; }
    __device__ int input_rows() const {
        if (PADDED) return min(row - PAD_H + PLANE_ROWS, H) - input_row();
        return INPUT_ROWS == H ? H : min(INPUT_ROWS, H - row);
    }
};

// The scratch buffer `state`: the number of images that cannot be split, their list, a flag per image, and the dynamic
// tile scheduler: the number of tiles claimed, per set of blocks with the same filters. Multiprocessors store at speeds
// that differ by up to a third, so a block claims its next tile only when it needs one.
__device__ __forceinline__ int *tile_counter(int *state, int images) {
    return state + 1 + 2ll * images + blockIdx.x % FILTER_BLOCKS;
}
__device__ __forceinline__ void list_for_fallback(int *state, const WorkTile &tile, int images) {
    for (int i = tile.image; i < tile.image + tile.images; i++)
        if (atomicExch(state + 1 + images + i, 1) == 0) state[1 + atomicAdd(state, 1)] = i;
}

// The shared-memory layout. Each array begins at a multiple of 128 bytes.
struct Shared {
    unsigned *filters;  // split, in the tensor cores' order; implicit GEMM: the low components alone
    float *input;       // of INPUT_BUFFERS tiles
    unsigned *stages;   // pipeline stages of split input
    int2 *taps;         // bytes from a position's words to words t and t + 4 of each k-step
    float *output;      // the staging area of outputs
    int *filter_scales;
    int *exponents;  // [0, 1] of each stage's tile; also tile numbers: [2, 3] of the next tiles, [4, 5] of those after
    Range *ranges;   // of each producer warp; of two passes
    unsigned short *positions;  // POSITION_TABLE
    Barrier *barriers;

    __device__ explicit Shared(unsigned char *at) {
        const auto take = [&](int bytes) {
            unsigned char *const array = at;
            at += (bytes + 127) / 128 * 128;
            return static_cast<void *>(array);
        };
        filters = static_cast<unsigned *>(take(Config::filters_in_shared ? 4 * Config::filter_words : 0));
        input = static_cast<float *>(take(4 * INPUT_BUFFERS * STAGED_INPUT));
        stages = static_cast<unsigned *>(take(4 * (STAGES * STAGE_WORDS)));
        taps = static_cast<int2 *>(take(K_STEPS * 4 * 8));
        output = static_cast<float *>(take(Config::staged_outputs * 4));
        filter_scales = static_cast<int *>(take(FILTER_BLOCKS * COLUMN_GROUPS * GROUP_TILES * 8 * 4));
        exponents = static_cast<int *>(take(24));
        ranges = static_cast<Range *>(take(2 * PRODUCER_WARPS * 8));
        positions = static_cast<unsigned short *>(take(2 * POSITION_TABLE));
        barriers = static_cast<Barrier *>(take(BARRIERS * 8));
    }
};
constexpr int NEXT_TILE = 2, LATER_TILE = 4;  // indices of Shared::exponents

// Words from the beginning of a stage to the first one of a position.
__device__ __forceinline__ int first_word(int position) {
    const int at = min(position, POSITIONS - 1), line = at / TILE_COLUMNS, image = TILE_IMAGES == 1 ? 0 : line / TILE_LINES;
    return image * IMAGE_WORDS + (line - image * TILE_LINES) * (POSITION_ROWS * ROW_STRIDE) + (at - line * TILE_COLUMNS);
}

// All threads fill the tables and initialise the barriers, before they wait for the filters.
__device__ __forceinline__ void prepare_tables(const Shared &s) {
    for (int i = threadIdx.x; i < K_STEPS * 4; i += ALL_THREADS) {
        const int k = i / 4 * 8 + i % 4;
        s.taps[i] = make_int2(4 * WORD_TAPS[k].offset(), 4 * WORD_TAPS[k + 4].offset());
    }
    // One thread initialises all barriers: with several lanes, compute-sanitizer reports a false positive.
    // fence_async_proxy in convolution.cu makes the barriers visible to the TMA unit.
    if (threadIdx.x == 0) {
#pragma unroll
        for (int i = 0; i < BARRIERS; i++) mbarrier_init(s.barriers + i, ARRIVALS[i / 2]);
    }
    for (int i = threadIdx.x; i < POSITION_TABLE; i += ALL_THREADS) s.positions[i] = first_word(i);
}

// All threads: copy the block's split filters and all filter scales to shared memory.
__device__ __forceinline__ void load_filters(const Shared &s, const unsigned *filters, const int *filter_scales) {
    if (Config::filters_in_shared) {
        const int first = Config::implicit_gemm ? COMPONENTS - 1 : blockIdx.x % FILTER_BLOCKS;
        const uint4 *const from = reinterpret_cast<const uint4 *>(filters) + first * (Config::filter_words / 4);
        uint4 *const to = reinterpret_cast<uint4 *>(s.filters);
        for (int i = threadIdx.x; i < Config::filter_words / 4; i += ALL_THREADS) to[i] = from[i];
    }
    for (int i = threadIdx.x; i < COLUMN_TILES * 8; i += ALL_THREADS) s.filter_scales[i] = filter_scales[i];
}

// Consumers: the number of the next tile; at least `tiles` if there is none. From lane 0, so that the compiler knows
// that a warp takes one branch.
__device__ __forceinline__ int next_tile(const Shared &s, int stage) {
    return __shfl_sync(~0u, s.exponents[NEXT_TILE + stage], 0);
}

// Math warps: the loop over tiles. work(tile, stage, unit) computes every WORKERS-th of a tile's units from `unit` on,
// and returns its first unit beyond the last. Workers take the units of all tiles in turn, so that no worker waits for
// others that have one more unit of a tile.
template <int UNITS, typename Work>
__device__ __forceinline__ void for_each_tile(const Shared &s, int worker, int images, int tiles, const Work &work) {
    int next_unit = worker, number = blockIdx.x / FILTER_BLOCKS;
    for (int iteration = 0; number < tiles; iteration++) {
        const WorkTile tile(number, images);
        const int stage = iteration % STAGES;
        mbarrier_wait(s.barriers + FULL + stage, iteration / STAGES);
        number = next_tile(s, stage);
        next_unit = work(tile, stage, next_unit) - UNITS;
        mbarrier_arrive(s.barriers + EMPTY + stage);
    }
}

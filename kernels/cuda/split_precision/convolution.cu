// convolution: the producers' loop, and the main kernel, in which a block's warps become producers or math warps.

// Producers: start copying a tile's input rows to a buffer in shared memory. All producer threads issue cp.async or,
// with BULK_LOADS, one thread issues bulk copies by the TMA unit.
constexpr bool BULK_LOADS = Config::implicit_gemm && Config::copy_floats == 4;
__device__ __forceinline__ void load_input(const Shared &s, const float *x, const WorkTile &tile, int buffer,
                                           int thread) {
    if (Config::input_from_global || (BULK_LOADS && thread)) return;
    constexpr int FLOATS = Config::copy_floats, COPIES = WHOLE_IMAGES ? 1 : C;
    const int length = WHOLE_IMAGES ? tile.images * INPUT_SIZE : tile.input_rows() * W;
    const float *const from = image_of(x, tile.image, IMAGE) + tile.input_row() * index_t(W);
    float *const to = s.input + buffer * STAGED_INPUT;
    for (int c = 0; c < COPIES; c++) {
        const float *const row = from + c * (index_t(H) * W);
        float *const target = to + c * (INPUT_ROWS * W);
        if constexpr (BULK_LOADS) {
            bulk_load(target, row, 4 * length, s.barriers + INPUT_LOADED + buffer);
        } else {
            for (int i = thread * FLOATS; i < length; i += PRODUCER_THREADS * FLOATS)
                copy_async<FLOATS>(target + i, row + i);
        }
    }
    if (BULK_LOADS) mbarrier_arrive_expect_bytes(s.barriers + INPUT_LOADED + buffer, COPIES * 4 * length);
    else commit_copies();
}
// Wait for the `turn`-th input in this buffer; copies to other buffers may still be pending.
__device__ __forceinline__ void wait_for_input(const Shared &s, int buffer, int turn) {
    if (Config::input_from_global) return;
    if (BULK_LOADS) mbarrier_wait(s.barriers + INPUT_LOADED + buffer, turn);
    else wait_for_copies<INPUT_BUFFERS - 1>(), named_barrier(PRODUCERS_BARRIER, PRODUCER_THREADS);
}
__device__ __forceinline__ void load_first_inputs(const Shared &s, const float *x, int images, int tiles, int thread) {
#pragma unroll
    for (int i = 0; i < INPUT_BUFFERS; i++) {
        const int number = blockIdx.x / FILTER_BLOCKS + i * (gridDim.x / FILTER_BLOCKS);
        if (number < tiles) load_input(s, x, WorkTile(number, images), i, thread);
        else commit_copies();  // an empty group
    }
}

// Producers: return the range of this thread's share of a tile's input.
__device__ __forceinline__ Range find_range(const float *input, const WorkTile &tile, int thread) {
    constexpr bool ALIGNED = Config::copy_floats == 4 || !Config::input_from_global;
    constexpr bool VECTORS = WHOLE_IMAGES && INPUT_SIZE % 4 == 0 && ALIGNED;
    struct alignas(VECTORS ? 16 : 4) Values {
        float of[VECTORS ? 4 : 1];
    };
    const int length = WHOLE_IMAGES ? tile.images * INPUT_SIZE : tile.input_rows() * W;
    Range range;
    for (int c = 0; c < (WHOLE_IMAGES ? 1 : C); c++)
#pragma unroll(VECTORS ? 4 : 8)
        for (int i = thread; i < length / (VECTORS ? 4 : 1); i += PRODUCER_THREADS) {
            const Values values = reinterpret_cast<const Values *>(input + c * INPUT_CHANNEL)[i];
            for (const float value : values.of) range.add(value);
        }
    return range;
}

// The power of two that scales a tile of x, and whether the tile cannot be split: tile scale times filter scale must be
// a normal float32 number. Denormal values of x count as too small.
struct TileScale {
    int exponent = 0;
    bool unsplittable = false;
    int lowest = 0, highest = 0;  // least and greatest of 0 and the exponents of the filters' scales
    int passes = 0;               // ranges found so far

    __device__ explicit TileScale(const Shared &s) {
        for (int i = threadIdx.x % 32; i < GEMM_COLUMNS; i += 32) {
            lowest = min(lowest, filter_exponent(s.filter_scales[i]));
            highest = max(highest, filter_exponent(s.filter_scales[i]));
        }
        lowest = __reduce_min_sync(~0u, lowest), highest = __reduce_max_sync(~0u, highest);
    }
    // All producer threads call this with the ranges of their shares. It sets `exponent` to the one that the tile's
    // range needs, if the tile can be split, and returns whether that changed it.
    __device__ __forceinline__ bool update(const Shared &s, Range range) {
        range.join_warp();
        Range *const ranges = s.ranges + passes++ % 2 * PRODUCER_WARPS;
        if (threadIdx.x % 32 == 0) ranges[threadIdx.x / 32 - MATH_WARPS] = range;
        named_barrier(PRODUCERS_BARRIER, PRODUCER_THREADS);
#pragma unroll
        for (int i = 0; i < PRODUCER_WARPS; i++) range.add(ranges[i]);
        const int wanted = range.exponent(), before = exponent;  // UNSPLITTABLE is above 126
        unsplittable = wanted + lowest < -126 || wanted + highest > 126;
        if (!unsplittable && range.largest) exponent = min(wanted, MAX_EXPONENT);
        return exponent != before;
    }
};

// The producer warps' loop over tiles: load, wait for an empty stage, split, announce the full stage. While they split
// a tile, they claim a later one from the tile scheduler; with two input buffers, the next tile's input is copied
// meanwhile.
//
// A tile's exponent follows from the range of its input. The producers find the range in a separate pass, before they
// wait for the empty stage. implicit_gemm lacks the shared-memory bandwidth for that pass: it splits with the previous
// tile's exponent, finds the range on the way, and splits again only if the range needs another exponent.
__device__ __forceinline__ void produce(const Shared &s, const float *x, int *state, int images, int tiles) {
    constexpr bool SPECULATES = Config::implicit_gemm;
    constexpr int CLAIMED = INPUT_BUFFERS == 2 ? LATER_TILE : NEXT_TILE;
    const int thread = threadIdx.x - MATH_THREADS, blocks = gridDim.x / FILTER_BLOCKS;
    const WordOffsets kept(thread);
    TileScale scale(s);
    if (BULK_LOADS) load_first_inputs(s, x, images, tiles, thread);  // its barriers are initialised only now
    int number = blockIdx.x / FILTER_BLOCKS, next = number + blocks;
    for (int iteration = 0; number < tiles; iteration++) {
        const WorkTile tile(number, images);
        const int stage = iteration % STAGES, buffer = iteration % INPUT_BUFFERS;
        // `claimed` is used late: adding to it here would stall on the atomic.
        const int claimed = thread == 0 ? atomicAdd(tile_counter(state, images), 1) : 0;
        const float *const global = image_of(x, tile.image, IMAGE) + tile.input_row() * index_t(W);
        const float *const input = Config::input_from_global ? global : s.input + buffer * STAGED_INPUT;
        wait_for_input(s, buffer, iteration / INPUT_BUFFERS);
        if (!SPECULATES) scale.update(s, find_range(input, tile, thread));
        if (iteration >= STAGES) mbarrier_wait(s.barriers + EMPTY + stage, iteration / STAGES - 1);
        Range range;
        do {
            range = split_input(s.stages + stage * STAGE_WORDS, input, tile, power_of_two(scale.exponent), kept, thread);
            if (thread == 0) s.exponents[CLAIMED + stage] = INPUT_BUFFERS * blocks + claimed;
        } while (SPECULATES && scale.update(s, range));

        if (thread == 0) {
            s.exponents[stage] = scale.exponent;
            if (INPUT_BUFFERS == 2) s.exponents[NEXT_TILE + stage] = next;
            if (scale.unsplittable) list_for_fallback(state, tile, images);
        }
        if (SPECULATES) fence_async_proxy();  // wgmma reads the stage from shared memory
        mbarrier_arrive(s.barriers + FULL + stage);
        // All have read the input; thread 0's next tile number is visible. Otherwise scale.update has the barrier.
        if (!SPECULATES) named_barrier(PRODUCERS_BARRIER, PRODUCER_THREADS);
        const int later = s.exponents[CLAIMED + stage];
        if (later < tiles) load_input(s, x, WorkTile(later, images), buffer, thread);
        else if (INPUT_BUFFERS > 1) commit_copies();
        number = INPUT_BUFFERS == 2 ? next : later, next = later;
    }
}

// Programmatic dependent launch: this grid may start while split_precision_filters still runs, and recompute_images may
// start while this grid still runs. split_precision_filters itself is launched normally, so all earlier work has ended
// and this grid may read x at once. It reads the output of split_precision_filters only after the wait, and not through
// const __restrict__ pointers: their loads (ld.global.nc) require memory that nothing writes while the grid runs.
// recompute_images waits before it writes y.
extern "C" __global__ void __launch_bounds__(ALL_THREADS, 1)
    split_precision_convolution(const float *__restrict__ x, float *__restrict__ y,
                                const unsigned *filters, const int *filter_scales, int *state, long long first,
                                int images) {
    extern __shared__ __align__(128) unsigned char memory[];
    const Shared s(memory);
    const int tiles = (images + TILE_IMAGES - 1) / TILE_IMAGES * TILES_PER_IMAGE;
    if (blockIdx.x / FILTER_BLOCKS >= tiles) return;  // never, but the compiler then knows that the first tile exists
    // Work that does not depend on the filters comes before the wait for split_precision_filters.
    if (!BULK_LOADS && threadIdx.x >= MATH_THREADS)
        load_first_inputs(s, image_of(x, first, IMAGE), images, tiles, threadIdx.x - MATH_THREADS);
    prepare_tables(s);
    wait_for_previous_grid();
    allow_next_grid();
    if (filters_unsplittable(filter_scales)) {  // recompute_images computes all images
        wait_for_copies<0>();
        return;
    }
    load_filters(s, filters, filter_scales);
    if (Config::wgmma) fence_async_proxy();
    __syncthreads();
    // The shuffle shows the compiler that all lanes of a warp take the same branch.
    if (__shfl_sync(~0u, threadIdx.x, 0) >= MATH_THREADS) {
        if constexpr (Config::wgmma) lower_registers<Config::producer_registers>();
        produce(s, image_of(x, first, IMAGE), state, images, tiles);
    } else {
        if constexpr (Config::wgmma) raise_registers<Config::consumer_registers>();
        consume(s, image_of(y, first, OUTPUTS), filters, images, tiles);
    }
}

// convolution: the main kernel, in which a block's warps become producers or math warps, and the fallback in float32.

extern "C" __global__ void __launch_bounds__(ALL_THREADS, 1)
    split_precision_convolution(const float *__restrict__ x, float *__restrict__ y,
                                const unsigned *__restrict__ filters, const int *__restrict__ filter_scales, int *state,
                                long long first, int images) {
    extern __shared__ __align__(128) unsigned char memory[];
    const Shared s(memory);
    const int tiles = (images + TILE_IMAGES - 1) / TILE_IMAGES * TILES_PER_IMAGE;
    const int first_tile = blockIdx.x / FILTER_BLOCKS;
    if (first_tile >= tiles) return;
    // What does not depend on the filters comes before the wait for the kernel that splits them.
    if (!Config::implicit_gemm && threadIdx.x >= MATH_THREADS)
        load_input(s.input, image_of(x, first, IMAGE), WorkTile(first_tile, images), threadIdx.x - MATH_THREADS);
    prepare_tables(s);
    wait_for_previous_grid();
    allow_next_grid();
    bool unsplittable = false;
    for (int n = 0; n < COLUMN_TILES; n++) unsplittable = unsplittable || filter_scales[8 * COLUMN_TILES + n];
    if (unsplittable) {  // the fallback computes all images
        wait_for_input();
        return;
    }
    load_filters(s, filters, filter_scales);
    if (Config::wgmma) fence_async_proxy();
    __syncthreads();
    // From lane 0, so that the compiler knows that a warp takes one branch.
    if (__shfl_sync(~0u, threadIdx.x, 0) >= MATH_THREADS) {
        if constexpr (Config::wgmma) lower_registers<Config::producer_registers>();
        produce(s, image_of(x, first, IMAGE), state, images, tiles);
    } else {
        if constexpr (Config::wgmma) raise_registers<Config::consumer_registers>();
        consume(s, image_of(y, first, OUTPUTS), filters, images, tiles);
    }
}

// `register_tiled` for the listed images, or for all where the filters cannot be split. With an empty list the launch
// costs an idle grid.
extern "C" __global__ void __launch_bounds__(BLOCK_THREADS, 1)
    split_precision_fallback(const float *__restrict__ x, const float *__restrict__ w, float *__restrict__ y,
                             const int *__restrict__ filter_scales, const int *__restrict__ state, long long first,
                             int images) {
    wait_for_previous_grid();
    bool all = false;
    for (int n = 0; n < COLUMN_TILES; n++) all = all || filter_scales[8 * COLUMN_TILES + n];
    const unsigned listed = all ? images : state[0];
    constexpr unsigned BLOCKS_PER_IMAGE = (PIXELS + BLOCK_PIXELS - 1) / BLOCK_PIXELS * FILTER_GROUPS;
    for (unsigned long long i = blockIdx.x; i < (unsigned long long)listed * BLOCKS_PER_IMAGE; i += gridDim.x) {
        const unsigned number = i / BLOCKS_PER_IMAGE;
        register_tile(x, w, y, first + (all ? number : state[1 + number]), 1, i % BLOCKS_PER_IMAGE);
        __syncthreads();  // before the next block writes to shared memory
    }
}

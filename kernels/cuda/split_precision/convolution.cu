// convolution: the main kernel, in which a block's warps become producers or math warps.
//
// Programmatic dependent launch: this grid may start while split_precision_filters still runs, and recompute_images
// while this one does. split_precision_filters starts without it, so what came before has ended, and x may be read at
// once. What the grid in front writes is read behind the wait, and not through const __restrict__ pointers, whose loads
// (ld.global.nc) require memory that nothing writes while the grid runs. recompute_images waits before it writes y.

extern "C" __global__ void __launch_bounds__(ALL_THREADS, 1)
    split_precision_convolution(const float *__restrict__ x, float *__restrict__ y,
                                const unsigned *filters, const int *filter_scales, int *state, long long first,
                                int images) {
    extern __shared__ __align__(128) unsigned char memory[];
    const Shared s(memory);
    const int tiles = (images + TILE_IMAGES - 1) / TILE_IMAGES * TILES_PER_IMAGE;
    const int first_tile = blockIdx.x / FILTER_BLOCKS;
    if (first_tile >= tiles) return;  // never, but the compiler then knows that the first tile exists
    // What does not depend on the filters comes before the wait for the kernel that splits them.
    if (!Config::implicit_gemm && threadIdx.x >= MATH_THREADS)
        load_input(s.input, image_of(x, first, IMAGE), WorkTile(first_tile, images), threadIdx.x - MATH_THREADS);
    prepare_tables(s);
    wait_for_previous_grid();
    allow_next_grid();
    if (filters_unsplittable(filter_scales)) {  // recompute_images computes all images
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

// fallback: `register_tiled` for the images that mma_sync.cu has put on its list, or for all of them where
// split_filters.cu could not split the filters. With an empty list it costs the launch of an idle grid.

extern "C" __global__ void __launch_bounds__(BLOCK_THREADS, 1)
split_repair(const float *__restrict__ x, const float *__restrict__ w, float *__restrict__ y,
             const int *__restrict__ columns, const int *__restrict__ marks, long long first, int images) {
    await_launch_before();
    bool all = false;
    for (int n = 0; n < NTILES; n++) all = all || columns[8 * NTILES + n];
    const unsigned listed = all ? images : marks[0];
    constexpr unsigned BLOCKS_AN_IMAGE = (PIXELS + BLOCK_PIXELS - 1) / BLOCK_PIXELS * FILTER_GROUPS;
    for (unsigned long long i = blockIdx.x; i < (unsigned long long)listed * BLOCKS_AN_IMAGE; i += gridDim.x) {
        const unsigned number = i / BLOCKS_AN_IMAGE;
        register_tile(x, w, y, first + (all ? number : marks[1 + number]), 1, i % BLOCKS_AN_IMAGE);
        __syncthreads();  // the shared memory is the next one's
    }
}

// split_filters: splits the filters into fp16 components, in the order that the tensor cores read. One block per 8
// columns.
//
// A filter's scale puts its largest weight into [2^14, 2^15). A filter with a weight below 2^-28 of its largest, or
// with a NaN or an infinity, cannot be split: the block then writes 1 after the scales, and recompute_images computes
// all images in float32. The kernel also empties the list of images to recompute and resets the tile scheduler's
// counters.

// Whether a filter cannot be split: then all images are recomputed.
__device__ __forceinline__ bool filters_unsplittable(const int *filter_scales) {
    bool found = false;
    for (int n = 0; n < COLUMN_TILES; n++) found = found || filter_scales[8 * COLUMN_TILES + n];
    return found;
}

extern "C" __global__ void __launch_bounds__(256)
    split_precision_filters(const float *__restrict__ w, unsigned *__restrict__ filters,
                            int *__restrict__ filter_scales, int *state, int images) {
    __shared__ int exponent[8], unsplittable[8], k_steps[8], k_steps_with_low[8];  // of the block's columns
    __shared__ float weight_sum[8];  // of |w|, scaled; for the same-sign correction
    allow_next_grid();
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, tile = blockIdx.x;
    for (int i = tile * 256 + threadIdx.x; i < images; i += gridDim.x * 256) state[1 + images + i] = 0;
    if (tile == 0 && threadIdx.x == 0) state[0] = 0;
    if (tile < FILTER_BLOCKS && threadIdx.x == 0) *tile_counter(state, images) = 0;  // of filter block `tile`

    // Warp n finds the range of column n, a column of filter_of(n).
    const auto filter_of = [&](int n) { return min(tile * 8 + n, GEMM_COLUMNS - 1) / FILTER_SHIFTS; };
    Range range;
    for (int i = lane; i < REDUCTION; i += 32) range.add(w[weight_index(filter_of(warp), i / (K * K), i % (K * K))]);
    range.join_warp();
    const int wanted = range.exponent(), own = min(wanted, MAX_EXPONENT);
    if (CORRECTS_SAME_SIGN) {
        float sum = 0;
        for (int i = lane; i < REDUCTION; i += 32)
            sum += fabsf(w[weight_index(filter_of(warp), i / (K * K), i % (K * K))]) * power_of_two(own);
        for (int i = 16; i; i /= 2) sum += __shfl_sync(~0u, sum, lane ^ i);
        if (lane == 0) weight_sum[warp] = sum;
    }
    if (lane == 0) {
        unsplittable[warp] = wanted == Range::UNSPLITTABLE, exponent[warp] = own;
        k_steps[warp] = k_steps_with_low[warp] = 0;
    }
    __syncthreads();
    if (threadIdx.x == 0 && tile < COLUMN_TILES) {
        int any = 0;
        for (int i = 0; i < 8; i++) any |= unsplittable[i];
        filter_scales[8 * COLUMN_TILES + tile] = any;
    }

    // Each warp splits whole k-steps. It counts those in which column `lane` has a weight other than zero, and those in
    // which it has a low component other than zero.
    int used = 0, used_low = 0;
    for (int i = threadIdx.x; i < K_STEPS * 32; i += 256) {
        const int k_step = i / 32, n = i % 32 / 4, t = i % 4;
        unsigned columns = split_filter_step(filters, w, filter_of(n), power_of_two(exponent[n]), k_step, tile, n, t);
        columns = __reduce_or_sync(~0u, columns) >> lane % 8;
        used += columns & 1, used_low += columns >> 8 & 1;
    }
    if (lane < 8) atomicAdd(k_steps + lane, used), atomicAdd(k_steps_with_low + lane, used_low);
    __syncthreads();
    if (tile < COLUMN_TILES && threadIdx.x < 8)
        filter_scales[tile * 8 + threadIdx.x] = pack_filter_scale(
            exponent[threadIdx.x], k_steps_with_low[threadIdx.x] ? k_steps[threadIdx.x] : 0, weight_sum[threadIdx.x]);
}

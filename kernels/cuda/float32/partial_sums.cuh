// partial_sums: the second level of a sum in two levels, after each block has added a share: w[e] = sum of
// partials[n][e].
//
// A block adds the shares of 32 weights. Each of its warps adds every WARPS-th share, and the first warp adds the sums
// of the warps. The order is fixed, so every run has the same result. Memory: partials once.

constexpr int PARTIAL_WARPS = 16;

extern "C" __global__ void __launch_bounds__(32 * PARTIAL_WARPS)
sum_partials(const float *__restrict__ partials, float *__restrict__ w, int count) {
    __shared__ float warp_sums[PARTIAL_WARPS][32];
    constexpr index_t WEIGHTS = index_t(M) * (C / G) * K * L;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const index_t e = index_t(blockIdx.x) * 32 + lane;
    float sum = 0.0f;
    if (e < WEIGHTS) {
#pragma unroll 8
        for (int n = warp; n < count; n += PARTIAL_WARPS) sum += image_of(partials, n, WEIGHTS)[e];
    }
    warp_sums[warp][lane] = sum;
    __syncthreads();
    if (warp > 0 || e >= WEIGHTS) return;
#pragma unroll
    for (int n = 1; n < PARTIAL_WARPS; n++) sum += warp_sums[n][lane];
    w[e] = sum;
}

// shared: the image's tile and one filter at a time in shared memory.
//
//     x --> window[C][TILE_H + K - 1][TILE_W + K - 1]     once a block
//     w --> filter[FILTER_C][K][K]                        for each filter, FILTER_C channels at a time
//
// Arithmetic: 2 C K K operations an output. Bytes: a pixel is read from global memory once a block (its
// halo once more for each neighbour) rather than M K K times; the multiply-adds read shared memory, two
// words for each. Each filter costs the block two barriers for every FILTER_C channels. Many channels with
// large kernels leave room for a few pixels only, and most threads idle: 60 channels of 10 x 10 ran slower
// than `naive` on an H200.

extern "C" __global__ void __launch_bounds__(THREADS)
shared_tile(const float *x, const float *w, float *y, long long first) {
    __shared__ float window[C * WINDOW];
    __shared__ float filter[FILTER_C * K * K];
    const Place at(first);
    load_window(window, x, at);

    for (int m = 0; m < M; m++) {
        float sum[EACH] = {};
        for (int c0 = 0; c0 < C; c0 += FILTER_C) {
            const int channels = min(FILTER_C, C - c0);
            __syncthreads();  // the window is complete; nobody reads the last filter any more
            for (int t = threadIdx.x; t < channels * K * K; t += THREADS)
                filter[t] = w[index_t(m) * REDUCTION + c0 * K * K + t];
            __syncthreads();
#pragma unroll
            for (int u = 0; u < EACH; u++) {
                const float *corner = window + c0 * WINDOW + window_of(u);
#pragma unroll 1
                for (int c = 0; c < channels; c++)
#pragma unroll 1
                    for (int p = 0; p < K; p++)
#pragma unroll 1
                        for (int q = 0; q < K; q++)
                            sum[u] += corner[c * WINDOW + p * WINDOW_W + q] * filter[(c * K + p) * K + q];
            }
        }
#pragma unroll
        for (int u = 0; u < EACH; u++) store(y, at, m, u, sum[u]);
    }
}

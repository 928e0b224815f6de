// constant: `shared` with all filters in constant memory.
//
// All threads of a warp need the same weight at a time. The constant cache broadcasts it to the warp, so shared memory
// is left to the pixels, and there is no barrier after the first.
//
//     w  --> weights[M][C][K][K]                        copied before the launch, 64 KB at most
//     x  --> window[C][window rows][window columns]     once per block
//
// Example, 6 x 30 x 30 inputs and 16 filters of 5 x 5: the tile of `shared`; the filters take 9,600 bytes.
//
// Arithmetic intensity: as `shared` from global memory. Each multiply-add reads one word of shared memory and one of
// the constant cache. While the filters fit that cache (a few KB), shared memory's bandwidth is the limit; beyond it,
// the cache's misses are, and the kernel is slower than `shared`.
// Source: Kirk and Hwu, Programming Massively Parallel Processors, chapter 7 (constant memory and caching).
// Restrictions: as `shared`, and all filters fit 64 KB.

__constant__ float weights[M * REDUCTION];

extern "C" __global__ void __launch_bounds__(Config::threads)
constant_weights(const float *x, float *y, long long first) {
    __shared__ float window[C * WINDOW_PIXELS];
    const Tile tile(first);
    load_window(window, x, tile);
    __syncthreads();

#pragma unroll 1
    for (int m = 0; m < M; m++) {
#pragma unroll
        for (int n = 0; n < OUTPUTS_PER_THREAD; n++) {
            const float *corner = window + window_offset(n);
            float sum = 0.0f;
#pragma unroll 1
            for (int c = 0; c < C; c++)
#pragma unroll 1
                for (int p = 0; p < K; p++)
#pragma unroll 1
                    for (int q = 0; q < K; q++)
                        sum += corner[c * WINDOW_PIXELS + p * WINDOW_COLUMNS + q] *
                               weights[((m * C + c) * K + p) * K + q];
            store_output(y, tile, m, n, sum);
        }
    }
}

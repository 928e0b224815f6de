// unrolled: `constant` with its inner loops unrolled and its pointers declared __restrict__.
//
// The compiler writes out the K x K products of a channel. All shared-memory offsets become immediate operands, and a
// weight is read once for all outputs of a thread.
//
//     for each filter and channel:   K K x outputs per thread times   load pixel, multiply-add
//     instead of                     the same with loop counters, address arithmetic and a load of the weight
//
// Example, 6 x 30 x 30 inputs and 16 filters of 5 x 5: the tile of `shared`; a thread's 3 outputs take 75 multiply-adds
// per channel, one after another without a branch.
//
// Arithmetic intensity: as `constant` from global memory. Each multiply-add reads one word of shared memory, which is
// the limit: a multiprocessor reads 32 words per cycle and could do 128 multiply-adds.
// Source: CUDA C++ Programming Guide, sections on #pragma unroll and __restrict__.
// Restrictions: as `constant`.

__constant__ float weights[M * REDUCTION];

extern "C" __global__ void __launch_bounds__(Config::threads)
unrolled(const float *__restrict__ x, float *__restrict__ y, long long first) {
    __shared__ float window[C * WINDOW_PIXELS];
    const Tile tile(first);
    load_window(window, x, tile);
    __syncthreads();

    int corner[OUTPUTS_PER_THREAD];
#pragma unroll
    for (int n = 0; n < OUTPUTS_PER_THREAD; n++) corner[n] = window_offset(n);

#pragma unroll 1
    for (int m = 0; m < M; m++) {
        float sum[OUTPUTS_PER_THREAD] = {};
#pragma unroll 1
        for (int c = 0; c < C; c++) {
            const float *filter = weights + (m * C + c) * K * K;
#pragma unroll
            for (int p = 0; p < K; p++)
#pragma unroll
                for (int q = 0; q < K; q++)
#pragma unroll
                    for (int n = 0; n < OUTPUTS_PER_THREAD; n++)
                        sum[n] += window[c * WINDOW_PIXELS + corner[n] + p * WINDOW_COLUMNS + q] * filter[p * K + q];
        }
#pragma unroll
        for (int n = 0; n < OUTPUTS_PER_THREAD; n++) store_output(y, tile, m, n, sum[n]);
    }
}

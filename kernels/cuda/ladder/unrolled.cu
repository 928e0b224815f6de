// unrolled: `constant` with its inner loops unrolled and its pointers restricted.
//
// The K x K products of a channel are written out by the compiler, all offsets in shared memory becoming
// immediate operands, and a weight is read once for the EACH output pixels of a thread rather than once
// for each. What is left of an inner step is a shared-memory read and a multiply-add.
//
// Arithmetic: 2 C K K operations an output. Bytes: as `constant` from global memory; one shared-memory
// word for each multiply-add, which is what bounds it (a multiprocessor reads 32 words a clock and could
// do 128 multiply-adds).

__constant__ float weights[M * REDUCTION];

extern "C" __global__ void __launch_bounds__(THREADS)
unrolled(const float *__restrict__ x, float *__restrict__ y, long long first) {
    __shared__ float window[C * WINDOW];
    const Place at(first);
    load_window(window, x, at);
    __syncthreads();

    int corner[EACH];
#pragma unroll
    for (int u = 0; u < EACH; u++) corner[u] = window_of(u);

#pragma unroll 1
    for (int m = 0; m < M; m++) {
        float sum[EACH] = {};
#pragma unroll 1
        for (int c = 0; c < C; c++) {
            const float *filter = weights + (m * C + c) * K * K;
#pragma unroll
            for (int p = 0; p < K; p++)
#pragma unroll
                for (int q = 0; q < K; q++)
#pragma unroll
                    for (int u = 0; u < EACH; u++)
                        sum[u] += window[c * WINDOW + corner[u] + p * WINDOW_W + q] * filter[p * K + q];
        }
#pragma unroll
        for (int u = 0; u < EACH; u++) store(y, at, m, u, sum[u]);
    }
}

// shared: the tile's input window and one filter at a time in shared memory.
//
// A pixel serves K K M products; `naive` loads it for each of them. Here a block loads it once.
//
//     x  --> window[C][window rows][window columns]     once per block
//     w  --> filter[filter_channels][K][K]              once per filter, filter_channels channels at a time
//
// Example, 6 x 30 x 30 inputs and 16 filters of 5 x 5: one tile of 26 x 26 outputs per image, whose window takes 21,600
// bytes and a filter 600; each of 256 threads has up to 3 outputs.
//
// Arithmetic intensity: 2 C K K FLOP per output. Global memory: the window once per tile, so about 2 M K K FLOP per 4
// bytes less the halo. Each multiply-add reads two words of shared memory, whose bandwidth limits the kernel.
// Source: the tiled convolution of Kirk and Hwu, Programming Massively Parallel Processors, chapter 7.
// Restrictions: one window of all channels fits 48 KB. Where it nearly fills them, a tile has few pixels and most
// threads idle. Each filter costs two barriers per filter_channels channels.

extern "C" __global__ void __launch_bounds__(Config::threads)
shared_tile(const float *x, const float *w, float *y, long long first) {
    __shared__ float window[C * WINDOW_PIXELS];
    __shared__ float filter[Config::filter_channels * K * K];
    const Tile tile(first);
    load_window(window, x, tile);

    for (int m = 0; m < M; m++) {
        float sum[OUTPUTS_PER_THREAD] = {};
        for (int first_channel = 0; first_channel < C; first_channel += Config::filter_channels) {
            const int channels = min(Config::filter_channels, C - first_channel);
            __syncthreads();  // the window is complete; no thread reads the previous filter any more
            for (int t = threadIdx.x; t < channels * K * K; t += Config::threads)
                filter[t] = w[index_t(m) * REDUCTION + first_channel * K * K + t];
            __syncthreads();
#pragma unroll
            for (int n = 0; n < OUTPUTS_PER_THREAD; n++) {
                const float *corner = window + first_channel * WINDOW_PIXELS + window_offset(n);
#pragma unroll 1
                for (int c = 0; c < channels; c++)
#pragma unroll 1
                    for (int p = 0; p < K; p++)
#pragma unroll 1
                        for (int q = 0; q < K; q++)
                            sum[n] += corner[c * WINDOW_PIXELS + p * WINDOW_COLUMNS + q] * filter[(c * K + p) * K + q];
            }
        }
#pragma unroll
        for (int n = 0; n < OUTPUTS_PER_THREAD; n++) store_output(y, tile, m, n, sum[n]);
    }
}

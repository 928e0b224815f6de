// naive: one thread computes one output element, straight from global memory.
//
// The thread walks through the C x K x K window of its output and multiplies each pixel by its weight.
//
//     y[b][m]   +----+----+----+      one block: block_columns x block_rows neighbouring outputs of one filter
//               |    |    |    |                 and image (a thread each)
//               +----+----+----+
//               |    | :: |    |      one thread: the sum over c, p, q of
//               +----+----+----+                  x[b][c][i + p][j + q] * w[m][c][p][q]
//
// Example, 6 x 30 x 30 inputs and 16 filters of 5 x 5: one block of 32 x 32 threads per image and filter; 676 threads
// have an output of the 26 x 26 map and add 150 products.
//
// Arithmetic intensity: 2 C K K FLOP per output; 8 bytes loaded, one pixel and one weight, per 2 FLOP: 0.25 FLOP per
// byte. The caches serve nearly all loads, so the load units limit it, not memory.
// Source: the direct convolution of D. Kirk and W. Hwu, Programming Massively Parallel Processors, 3rd edition, 2016,
// chapters 7 and 16.
// Restriction: the blocks of one image fit a grid.
//
// Config: block_columns x block_rows threads. With pixels_in_row they are 1024 x 1 and follow the map's pixels in
// memory order, so that no lane idles at the end of a short row. A block loops over filters_per_block filters: 1 or M.
// With sum_in_global the running sum stays in y: a load and a store of global memory per product.

// These loops are not unrolled: the kernel `unrolled` shows the gain from unrolling.
template <typename T>
__device__ __forceinline__ void add_products(T &sum, const float *window, const float *filter) {
#pragma unroll 1
    for (int c = 0; c < C; c++)
#pragma unroll 1
        for (int p = 0; p < K; p++)
#pragma unroll 1
            for (int q = 0; q < K; q++)
                sum = sum + window[index_t(c) * H * W + index_t(p) * W + q] * filter[(c * K + p) * K + q];
}

extern "C" __global__ void __launch_bounds__(Config::block_columns *Config::block_rows, 1)
naive(const float *x, const float *w, float *y, long long first) {
    constexpr int TILES_IN_ROW = (YW + Config::block_columns - 1) / Config::block_columns;
    constexpr int TILE_ROWS = (YH + Config::block_rows - 1) / Config::block_rows;
    constexpr index_t TILES = Config::pixels_in_row ? (PIXELS + Config::block_columns - 1) / Config::block_columns
                                                    : index_t(TILES_IN_ROW) * TILE_ROWS;
    constexpr int FILTER_GROUPS = (M + Config::filters_per_block - 1) / Config::filters_per_block;
    const unsigned tile = blockIdx.x % unsigned(TILES), rest = blockIdx.x / unsigned(TILES);
    const int first_filter = rest % FILTER_GROUPS * Config::filters_per_block;
    const long long b = first + rest / FILTER_GROUPS;

    int i, j;  // row and column of the thread's element of y
    if constexpr (Config::pixels_in_row) {
        const index_t pixel = index_t(tile) * Config::block_columns + threadIdx.x;
        if (pixel >= PIXELS) return;
        i = pixel / YW, j = pixel % YW;
    } else {
        i = tile / TILES_IN_ROW * Config::block_rows + threadIdx.y;
        j = tile % TILES_IN_ROW * Config::block_columns + threadIdx.x;
        if (i >= YH || j >= YW) return;
    }

    const float *image = image_of(x, b, IMAGE);
    for (int m = first_filter; m < min(first_filter + Config::filters_per_block, M); m++) {
        const float *filter = w + index_t(m) * REDUCTION;
        float *out = image_of(y, b, OUTPUTS) + m * PIXELS + index_t(i) * YW + j;
        if constexpr (POOL) {  // the four outputs of the maximum, one after another
            float largest = 0.0f;
#pragma unroll 1
            for (int corner = 0; corner < 4; corner++) {
                float sum = 0.0f;
                add_products(sum, image + index_t(corner_row(i, corner)) * W + corner_column(j, corner), filter);
                largest = corner == 0 ? sum : fmaxf(largest, sum);
            }
            *out = tanhf(largest);
        } else if constexpr (Config::sum_in_global) {
            volatile float &sum = *out;  // volatile: the compiler may not keep it in a register
            sum = 0.0f;
            add_products(sum, image + index_t(i) * W + j, filter);
        } else {
            float sum = 0.0f;
            add_products(sum, image + index_t(i) * W + j, filter);
            *out = sum;
        }
    }
}

// sliding_window: sliding-window direct convolution: a thread keeps the whole input window of its outputs in registers
// while it goes through all filters.
//
//     x   [ (ROWS + K - 1) x (COLUMNS + K - 1) inputs ]   read once, straight from global memory
//     y   [ ROWS x COLUMNS sums ] x FILTERS               filter after filter:  sum[r][j] += x[r + p][j + q] * w[p][q]
//
// With one channel the window serves all M filters, and the loop over them reads nothing but weights: 4 per load from
// shared memory, for 4 ROWS COLUMNS multiply-adds. With a few channels it is read again per channel and FILTERS
// filters. There is no tile of x in shared memory and no barrier in the loop: a warp computes and stores by itself. The
// last tile of a row or column is moved back to end at the edge; the outputs that two tiles share are computed twice.
//
// Example, 28 x 28 inputs and 50 filters of 5 x 5: a thread keeps a window of 12 x 8 inputs and computes 8 x 4 outputs,
// filter after filter; 5 blocks share the filters of a tile, 10 each.
//
// With POOL, ROWS and COLUMNS are even, and a thread takes the maxima of its own sums; an odd last row or column, which
// no maximum covers, is not computed.
//
// Arithmetic intensity: 2 M C K K FLOP per output pixel; for 50 filters of 5 x 5, 95 % of all instructions are
// multiply-adds. Memory: x once, its overlaps from the caches; y once. With one channel the stores of y limit it, so
// neighbouring lanes store neighbouring vectors: with gaps between the lanes, stores take twice as long.
// Source: V. Volkov, Better Performance at Lower Occupancy, 2010 (outputs per thread instead of threads).
// Restrictions: a few channels; a window that fits the registers; POOL 1 only at an odd edge.

constexpr int ROWS = Config::rows, COLUMNS = Config::columns, FILTERS = Config::filters;  // outputs per thread
constexpr int THREADS = Config::threads, STORE = Config::store_vector, LOAD = Config::load_vector;
constexpr int STEP = POOL ? 2 : 1;                                      // from one element of y to the next, in outputs
constexpr int MAP_ROWS = STEP * YH, MAP_COLUMNS = STEP * YW;            // outputs of a map that are computed
constexpr int TILES_IN_ROW = (MAP_COLUMNS + COLUMNS - 1) / COLUMNS, TILE_ROWS = (MAP_ROWS + ROWS - 1) / ROWS;
constexpr int WINDOW_ROWS = ROWS + K - 1, WINDOW_COLUMNS = COLUMNS + K - 1;
constexpr int WINDOW_PITCH = (WINDOW_COLUMNS + LOAD - 1) / LOAD * LOAD;  // whole vectors
constexpr int CHANNEL_WEIGHTS = (K * K * FILTERS + 3) / 4 * 4;           // of FILTERS filters, padded
constexpr int PASSES = (M + FILTERS - 1) / FILTERS;                      // over the tile, FILTERS filters each
constexpr int BLOCK_PASSES = (PASSES + Config::parts - 1) / Config::parts;

// Fill [pass][channel][tap][filter] with the weights of the block's passes, padded with zeros. The caller synchronises.
__device__ __forceinline__ void load_weights(float *weights, const float *w, int first_pass) {
    for (int e = threadIdx.x; e < BLOCK_PASSES * C * CHANNEL_WEIGHTS; e += THREADS) {
        const int in_channel = e % CHANNEL_WEIGHTS, c = e / CHANNEL_WEIGHTS % C;
        const int m = (first_pass + e / (CHANNEL_WEIGHTS * C)) * FILTERS + in_channel % FILTERS;
        const bool exists = in_channel < K * K * FILTERS && m < M;
        weights[e] = exists ? __ldg(w + (index_t(m) * C + c) * (K * K) + in_channel / FILTERS) : 0.0f;
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, Config::blocks)
sliding_window(const float *__restrict__ x, const float *__restrict__ w, float *__restrict__ y, long long first,
               int images) {
    extern __shared__ __align__(16) float weights[];
    const int first_pass = blockIdx.x % Config::parts * BLOCK_PASSES;  // `parts` blocks share the filters of a tile
    load_weights(weights, w, first_pass);
    __syncthreads();

    const unsigned tiles = images * unsigned(TILES_IN_ROW * TILE_ROWS);
    const unsigned stride = gridDim.x / Config::parts * THREADS;  // from one of the thread's tiles to the next
    for (unsigned tile = blockIdx.x / Config::parts * THREADS + threadIdx.x; tile < tiles; tile += stride) {
        const unsigned tile_row = tile / TILES_IN_ROW, image = tile_row / TILE_ROWS;
        const int column = min(int(tile - tile_row * TILES_IN_ROW) * COLUMNS, MAP_COLUMNS - COLUMNS);
        const int row = min(int(tile_row - image * TILE_ROWS) * ROWS, MAP_ROWS - ROWS);
        const float *const in = image_of(x, first + image, IMAGE) + index_t(row) * W + column;
        float *out = image_of(y, first + image, OUTPUTS) + first_pass * FILTERS * PIXELS + index_t(row / STEP) * YW +
                     column / STEP;

        float window[WINDOW_ROWS][WINDOW_PITCH];
        const auto load_window = [&](int c) {
#pragma unroll
            for (int i = 0; i < WINDOW_ROWS; i++)
#pragma unroll
                for (int j = 0; j < WINDOW_COLUMNS; j += LOAD)
                    load_read_only<LOAD>(&window[i][j], in + (c * index_t(H) + i) * W + j);
        };
        if (C == 1) load_window(0);

        const float *channel_weights = weights;
#pragma unroll 1
        for (int m = first_pass * FILTERS; m < min(M, (first_pass + BLOCK_PASSES) * FILTERS);
             m += FILTERS, out += FILTERS * PIXELS) {
            float sum[FILTERS][ROWS * COLUMNS] = {};
#pragma unroll 1
            for (int c = 0; c < C; c++, channel_weights += CHANNEL_WEIGHTS) {  // main loop
                if (C > 1) load_window(c);
                float weight[CHANNEL_WEIGHTS];
#pragma unroll
                for (int e = 0; e < CHANNEL_WEIGHTS; e += 4) read<4>(weight + e, channel_weights + e);
#pragma unroll
                for (int e = 0; e < K * K; e++)
#pragma unroll
                    for (int f = 0; f < FILTERS; f++)
#pragma unroll
                        for (int i = 0; i < ROWS * COLUMNS; i++)
                            sum[f][i] = fmaf(window[i / COLUMNS + e / K][i % COLUMNS + e % K],
                                             weight[e * FILTERS + f], sum[f][i]);
            }
            // Epilogue. A loop of one iteration keeps all stores after the last sum. Otherwise the compiler separates
            // the stores of a row, and two that share a sector reach L2 as two requests.
            do {
#pragma unroll
                for (int f = 0; f < FILTERS; f++)
                    if (M % FILTERS == 0 || m + f < M)
#pragma unroll
                        for (int r = 0; r < ROWS; r += STEP) {
                            const float *const row = &sum[f][r * COLUMNS];
                            float pooled[COLUMNS / STEP];
                            const float *const values = POOL ? pooled : row;
                            if constexpr (POOL) {
#pragma unroll
                                for (int j = 0; j < COLUMNS; j += 2)
                                    pooled[j / 2] =
                                        tanh_of_max(row[j], row[j + 1], row[COLUMNS + j], row[COLUMNS + j + 1]);
                            }
#pragma unroll
                            for (int j = 0; j < COLUMNS / STEP; j += STORE)
                                write_streaming<STORE>(out + f * PIXELS + r / STEP * index_t(YW) + j, values + j);
                        }
            } while (images < 0);
        }
    }
}

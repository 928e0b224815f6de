// depthwise: a convolution with one group per channel, and both of its gradients, by one thread per column of a map.
//
//     lanes          neighbouring columns j of a map       loads and stores of a warp are neighbouring floats
//     a thread       ROWS rows i of column j               sum[r] over the K x L taps, in registers
//
// A thread loads each element that its rows need once per column of taps, straight from global memory, and uses it for
// all pairs of rows and taps that need it, a list known at compile time. The data gradient is the same with x and y
// exchanged: a pixel (h, w) takes tap (p, q) of the output ((h + PAD_H - p DILATE_H) / STRIDE_H, ...) if both
// divisions have no remainder. The weight gradient uses the loads of the forward pass: instead of sums for ROWS
// outputs, a thread has sums for all taps, over its share of the images; a block adds the sums of its threads.
//
// Example, maps of 112 x 112, 3 x 3 filters, padding 1: a thread loads 10 rows of 3 columns for 8 outputs of a column.
//
// Arithmetic intensity: 2 K L FLOP per output, 8 bytes: memory limits it. (ROWS - 1) STRIDE_H + K rows and L columns
// are loaded per ROWS outputs, mostly from the L1 cache.
// Source: P. Micikevicius, 3D finite difference computation on GPUs using CUDA, 2009 (a thread per column, along rows).
// Restrictions: as many groups as channels; filters small enough for registers. If a weight is infinite, the gradient
// of a pixel that does not use it may be NaN, because the kernel multiplies the weight by zeros for outputs that do not
// exist.

constexpr int ROWS = Config::rows, THREADS = Config::threads, FILTERS = M / C;  // FILTERS of each channel
constexpr bool DATA = Config::data_gradient;
// The sampled maps, and the maps of the sums.
constexpr int SOURCE_H = DATA ? OH : H, SOURCE_W = DATA ? OW : W;
constexpr int MAP_H = DATA ? H : OH, MAP_W = DATA ? W : OW, ROW_TILES = (MAP_H + ROWS - 1) / ROWS;
constexpr index_t SOURCE_MAP = index_t(SOURCE_H) * SOURCE_W, MAP = index_t(MAP_H) * MAP_W;
constexpr int TILES = ROW_TILES * MAP_W;  // work items of one map

// The row of the sample that row r of the tile needs for tap row p. It is counted from the sample of r = 0, p = 0: in
// rows of the sampled map or, for a data gradient, in rows of x (before the division by STRIDE_H).
__device__ constexpr int sample_row(int r, int p) { return DATA ? r - p * DILATE_H : r * STRIDE_H + p * DILATE_H; }
constexpr int FIRST_SAMPLE = DATA ? -(K - 1) * DILATE_H : 0;
constexpr int LAST_SAMPLE = DATA ? ROWS - 1 : (ROWS - 1) * STRIDE_H + (K - 1) * DILATE_H;

__device__ constexpr bool is_needed(int sample) {
    for (int r = 0; r < ROWS; r++)
        for (int p = 0; p < K; p++)
            if (sample_row(r, p) == sample) return true;
    return false;
}

// Call use(r, p, q, value) for every row r of the tile and every tap (p, q), with the sample's value; samples outside
// the map are zeros. `first_row` is a multiple of ROWS, which for a data gradient is a multiple of STRIDE_H.
template <typename Use>
__device__ __forceinline__ void for_each_sample(const float *map, int first_row, int column, const Use &use) {
#pragma unroll
    for (int q = 0; q < L; q++) {
        const int from = DATA ? column + PAD_W - q * DILATE_W : column * STRIDE_W - PAD_W + q * DILATE_W;
        const int source_column = DATA ? from / STRIDE_W : from;
        const bool inside = from >= 0 && source_column < SOURCE_W && (!DATA || from % STRIDE_W == 0);
#pragma unroll
        for (int s = FIRST_SAMPLE; s <= LAST_SAMPLE; s++) {
            // first_row is a multiple of STRIDE_H, so the remainder is the same for all threads.
            if (!is_needed(s) || (DATA && (s + PAD_H) % STRIDE_H != 0)) continue;
            const int row = DATA ? first_row / STRIDE_H + (s + PAD_H) / STRIDE_H : first_row * STRIDE_H - PAD_H + s;
            const bool exists = inside && row >= 0 && row < SOURCE_H;
            const float value = exists ? __ldg(map + index_t(row) * SOURCE_W + source_column) : 0.0f;
#pragma unroll
            for (int r = 0; r < ROWS; r++)
#pragma unroll
                for (int p = 0; p < K; p++)
                    if (sample_row(r, p) == s) use(r, p, q, value);
        }
    }
}

#ifndef WEIGHT_GRADIENT
// Fill `out`, y or the gradient x, from the samples of `source`, x or the gradient y.
extern "C" __global__ void __launch_bounds__(THREADS)
depthwise(const float *__restrict__ source, const float *__restrict__ w, float *__restrict__ out, long long first,
          int images) {
    constexpr int MAPS = DATA ? C : M;
    const long long item = blockIdx.x * (long long)THREADS + threadIdx.x, map = item / TILES, image = map / MAPS;
    if (image >= images) return;
    const int tile = item - map * TILES, tile_row = tile / MAP_W, column = tile - tile_row * MAP_W;
    const int number = map - image * MAPS, first_row = tile_row * ROWS;

    float sum[ROWS];
#pragma unroll
    for (int r = 0; r < ROWS; r++) sum[r] = 0.0f;
#pragma unroll 1
    for (int f = 0; f < (DATA ? FILTERS : 1); f++) {
        const int m = DATA ? number * FILTERS + f : number, source_number = DATA ? m : number / FILTERS;
        const float *const source_map =
            image_of(source, first + image, DATA ? OUTPUTS : IMAGE) + source_number * SOURCE_MAP;
        const float *const weights = w + m * (K * L);
        for_each_sample(source_map, first_row, column, [&](int r, int p, int q, float value) {
            sum[r] = fmaf(value, __ldg(weights + p * L + q), sum[r]);
        });
    }
    float *const to = image_of(out, first + image, MAPS * MAP) + number * MAP + column;
#pragma unroll
    for (int r = 0; r < ROWS; r++)
        if (first_row + r < MAP_H) to[index_t(first_row + r) * MAP_W] = sum[r];
}
#else
// Fill partials [share][M][K][L]: block (filter, share) adds up `length` of all images' work items, of ROWS outputs
// each.
extern "C" __global__ void __launch_bounds__(THREADS)
depthwise_weights(const float *__restrict__ x, const float *__restrict__ y, float *__restrict__ partials,
                  long long items, int length) {
    __shared__ float warp_sums[THREADS / 32][K * L];
    const int m = blockIdx.x % M, share = blockIdx.x / M;
    float sum[K][L] = {};
#pragma unroll 1
    for (int i = threadIdx.x; i < length; i += THREADS) {
        const long long item = share * (long long)length + i, image = item / TILES;
        if (item >= items) break;
        const int tile = item - image * TILES, tile_row = tile / OW, column = tile - tile_row * OW;
        const float *const y_column = image_of(y, image, OUTPUTS) + m * PIXELS + column;
        float gradient[ROWS];
#pragma unroll
        for (int r = 0; r < ROWS; r++)
            gradient[r] = tile_row * ROWS + r < OH ? __ldg(y_column + index_t(tile_row * ROWS + r) * OW) : 0.0f;
        // Skip rows beyond the last: they have no gradient, but their samples may be infinite.
        const int rows = min(ROWS, OH - tile_row * ROWS);
        for_each_sample(image_of(x, image, IMAGE) + m / FILTERS * SOURCE_MAP, tile_row * ROWS, column,
                        [&](int r, int p, int q, float value) {
                            sum[p][q] = fmaf(r < rows ? value : 0.0f, gradient[r], sum[p][q]);
                        });
    }
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
    for (int i = 0; i < K * L; i++) {
        float warp_sum = sum[i / L][i % L];
#pragma unroll
        for (int distance = 16; distance > 0; distance /= 2)
            warp_sum += __shfl_xor_sync(0xffffffffu, warp_sum, distance);
        if (lane == 0) warp_sums[warp][i] = warp_sum;
    }
    __syncthreads();
    for (int i = threadIdx.x; i < K * L; i += THREADS) {
        float block_sum = warp_sums[0][i];
        for (int n = 1; n < THREADS / 32; n++) block_sum += warp_sums[n][i];
        image_of(partials, share, index_t(M) * (K * L))[m * (K * L) + i] = block_sum;
    }
}
#endif

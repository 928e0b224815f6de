// register_tiled: `implicit_gemm` in which each thread accumulates a tile of outputs in registers.
//
// A value read from shared memory serves a whole row or column of the thread's tile instead of one multiply-add.
//
//     thread    filters_per_thread (at most 8) x 8 outputs in registers
//     warp      the same filters x 256 pixels: 8 pixels per lane, 32 apart, so that a warp reads 32 neighbouring words
//     block     warps_along_filters x warps_along_pixels warps; its pixels run on through the images
//
//               global memory --> registers --> shared memory [2 buffers][k_per_step][block pixels] --> registers
//                step s + 1        step s + 1                     step s                              multiply-add
//
// Example, 6 x 30 x 30 inputs and 16 filters of 5 x 5: 2 x 2 warps, so a block computes 16 filters x 512 pixels in 38
// steps of 4 of the 150 products; a thread has 8 x 8 sums.
//
// Double buffering: a step loads the next one's values into registers before its multiply-adds and stores them to the
// other buffer after them, so arithmetic hides the latency of global memory (prefetch distance: one step).
//
// Arithmetic intensity: 2 M C K K FLOP per output pixel; x is read once per block of filters, y written once. A thread
// reads shared memory ten times per 64 multiply-adds, where `implicit_gemm` needs 128 reads. The float32 units limit
// it; some of their work is lost on the filters that round M up to a block's.
// Source: V. Volkov and J. Demmel, Benchmarking GPUs to Tune Dense Linear Algebra, 2008; CUTLASS, efficient GEMM.
// Restriction: the blocks of one image fit a grid.
//
// With POOL a warp's pixels are in another order, 32 first corners of 2 x 2 squares, then their 32 second corners and
// so on, so that one thread has the four corners of a maximum.
//
// half.cu defines its own stored_t before this text.

#ifndef HAS_STORED_TYPE
typedef float stored_t;  // of the tiles in shared memory

__device__ __forceinline__ stored_t to_stored(float value) { return value; }

// Return the index of a thread's pixel u in the warp's 256 pixels.
__device__ __forceinline__ int pixel_in_warp(int lane, int u) { return lane + 32 * u; }

__device__ __forceinline__ void read_pixels(float (&values)[8], const stored_t *row, int lane) {
#pragma unroll
    for (int u = 0; u < 8; u++) values[u] = row[lane + 32 * u];
}

__device__ __forceinline__ void read_weights(float (&values)[8], const stored_t *row) {
    const float4 low = *reinterpret_cast<const float4 *>(row), high = *reinterpret_cast<const float4 *>(row + 4);
    values[0] = low.x, values[1] = low.y, values[2] = low.z, values[3] = low.w;
    values[4] = high.x, values[5] = high.y, values[6] = high.z, values[7] = high.w;
}
#endif

constexpr int THREAD_FILTERS = Config::filters_per_thread, K_PER_STEP = Config::k_per_step;
constexpr int BLOCK_THREADS = 32 * Config::warps_along_filters * Config::warps_along_pixels;
constexpr int BLOCK_FILTERS = THREAD_FILTERS * Config::warps_along_filters;
constexpr int BLOCK_PIXELS = 256 * Config::warps_along_pixels;
constexpr int FILTER_GROUPS = (M + BLOCK_FILTERS - 1) / BLOCK_FILTERS;
constexpr int PIXEL_LOADS = BLOCK_PIXELS / BLOCK_THREADS;  // per thread and row of a step
constexpr int WEIGHTS = K_PER_STEP * BLOCK_FILTERS, WEIGHT_LOADS = (WEIGHTS + BLOCK_THREADS - 1) / BLOCK_THREADS;
constexpr int CORNERS = POOL ? 4 : 1;  // pixels that become one element of y
constexpr int BLOCK_ELEMENTS = BLOCK_PIXELS / CORNERS;

// Return the index, in the block's elements of y, of the element that the block's pixel n belongs to.
__device__ __forceinline__ int element_of(int n) { return POOL ? n / 128 * 32 + n % 32 : n; }

// Return the offset in an image of x of the window of the block's pixel n; `element` is the pixel's element of a map of
// y.
__device__ __forceinline__ index_t window_offset(index_t element, int n) {
    if (!POOL) return element / YW * W + element % YW;
    const int corner = n / 32 % 4;
    return index_t(corner_row(element / YW, corner)) * W + corner_column(element % YW, corner);
}

extern "C" __global__ void __launch_bounds__(BLOCK_THREADS, BLOCK_THREADS == 128 ? 4 : 1)
register_tiled(const float *__restrict__ x, const float *__restrict__ w, float *__restrict__ y, long long first,
               int images) {
    __shared__ __align__(16) stored_t pixels[2][K_PER_STEP][BLOCK_PIXELS];
    __shared__ __align__(16) stored_t weights[2][K_PER_STEP][8 * Config::warps_along_filters];  // padded to 8 per warp
    __shared__ index_t offset[2][K_PER_STEP];  // of product k in a window; -1 beyond the last

    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int filter_warp = warp % Config::warps_along_filters, pixel_warp = warp / Config::warps_along_filters;
    const int first_filter = blockIdx.x % FILTER_GROUPS * BLOCK_FILTERS;

    // The block's first element of y: element r0 of image b0. From there on indices fit index_t.
    const long long n0 = blockIdx.x / FILTER_GROUPS * (long long)BLOCK_ELEMENTS;
    const long long b0 = n0 / PIXELS;
    const index_t r0 = n0 % PIXELS;
    const long long left = images * (long long)PIXELS - n0;
    const int elements = left < BLOCK_ELEMENTS ? (int)left : BLOCK_ELEMENTS;
    const float *block_x = image_of(x, first + b0, IMAGE);
    float *block_y = image_of(y, first + b0, OUTPUTS);

    // The address of a window's element is the sum of two tables: where the pixel's window begins, in registers, and
    // the offset of product k in a window, in shared memory, computed once per step by K_PER_STEP threads.
    index_t window[PIXEL_LOADS], weight[WEIGHT_LOADS];  // weight: -1 where the thread loads none
#pragma unroll
    for (int s = 0; s < PIXEL_LOADS; s++) {
        const int n = threadIdx.x + s * BLOCK_THREADS;
        const index_t r = r0 + min(element_of(n), elements - 1);  // beyond the last, any window will do
        window[s] = r / PIXELS * IMAGE + window_offset(r % PIXELS, n);
    }
#pragma unroll
    for (int s = 0; s < WEIGHT_LOADS; s++) {
        const int t = threadIdx.x + s * BLOCK_THREADS, m = first_filter + t / K_PER_STEP;
        weight[s] = t < WEIGHTS && m < M ? index_t(m) * REDUCTION + t % K_PER_STEP : index_t(-1);
    }

    auto fill_offsets = [&](int step) {
        if (threadIdx.x < K_PER_STEP) {
            const int k = step * K_PER_STEP + threadIdx.x;
            offset[step % 2][threadIdx.x] =
                k < REDUCTION ? (index_t(k / (K * K)) * H + k / K % K) * W + k % K : index_t(-1);
        }
    };
    float next_pixels[K_PER_STEP][PIXEL_LOADS], next_weights[WEIGHT_LOADS];
    auto load_global = [&](int step) {
#pragma unroll
        for (int k = 0; k < K_PER_STEP; k++) {
            const index_t in_window = offset[step % 2][k];
#pragma unroll
            for (int s = 0; s < PIXEL_LOADS; s++)
                next_pixels[k][s] = in_window < 0 ? 0.0f : block_x[window[s] + in_window];
        }
#pragma unroll
        for (int s = 0; s < WEIGHT_LOADS; s++) {
            const bool exists = weight[s] >= 0 &&
                                step * K_PER_STEP + int(threadIdx.x + s * BLOCK_THREADS) % K_PER_STEP < REDUCTION;
            next_weights[s] = exists ? w[weight[s] + step * K_PER_STEP] : 0.0f;
        }
    };
    auto store_shared = [&](int step) {
#pragma unroll
        for (int k = 0; k < K_PER_STEP; k++)
#pragma unroll
            for (int s = 0; s < PIXEL_LOADS; s++)
                pixels[step % 2][k][threadIdx.x + s * BLOCK_THREADS] = to_stored(next_pixels[k][s]);
#pragma unroll
        for (int s = 0; s < WEIGHT_LOADS; s++) {
            const int t = threadIdx.x + s * BLOCK_THREADS, f = t / K_PER_STEP;
            if (t < WEIGHTS)
                weights[step % 2][t % K_PER_STEP][f / THREAD_FILTERS * 8 + f % THREAD_FILTERS] =
                    to_stored(next_weights[s]);
        }
    };

    constexpr int STEPS = (REDUCTION + K_PER_STEP - 1) / K_PER_STEP;
    fill_offsets(0);
    fill_offsets(1);
    __syncthreads();
    load_global(0);
    store_shared(0);
    __syncthreads();

    float sum[THREAD_FILTERS][8] = {};
#pragma unroll 1
    for (int step = 0; step < STEPS; step++) {
        if (step + 1 < STEPS) load_global(step + 1);
#pragma unroll
        for (int k = 0; k < K_PER_STEP; k++) {
            float a[8], b[8];
            read_weights(a, &weights[step % 2][k][8 * filter_warp]);
            read_pixels(b, &pixels[step % 2][k][256 * pixel_warp], lane);
#pragma unroll
            for (int f = 0; f < THREAD_FILTERS; f++)
#pragma unroll
                for (int u = 0; u < 8; u++) sum[f][u] = fmaf(a[f], b[u], sum[f][u]);
        }
        if (step + 1 < STEPS) store_shared(step + 1);
        fill_offsets(step + 2);  // over this step's, which the threads read before the previous barrier
        __syncthreads();
    }

#pragma unroll
    for (int u = 0; u < 8; u += CORNERS) {
        const int n = element_of(256 * pixel_warp + pixel_in_warp(lane, u));
        if (n >= elements) continue;
        const index_t r = r0 + n;
        float *out = image_of(block_y, r / PIXELS, OUTPUTS) + r % PIXELS;
#pragma unroll
        for (int f = 0; f < THREAD_FILTERS; f++) {
            const int m = first_filter + filter_warp * THREAD_FILTERS + f;
            if (m >= M) continue;
            if constexpr (POOL)
                out[m * PIXELS] = tanh_of_max(sum[f][u], sum[f][u + 1], sum[f][u + 2], sum[f][u + 3]);
            else
                out[m * PIXELS] = sum[f][u];
        }
    }
}

// register_tiled: `implicit_gemm` with each thread's outputs in a register tile.
//
//     a block  BLOCK_M filters x BLOCK_N output pixels (of all images in a row), 32 WARPS_M WARPS_N threads
//     a warp   8 filters at most x 256 pixels;  a thread  FILTERS filters x 8 pixels in registers
//
// A step reads DEPTH rows of both matrices into one half of shared memory while the other half is multiplied:
// into registers before the multiply-adds, from there into shared memory after them, so that global memory's
// latency passes behind the arithmetic. Each row costs a thread 8 pixels, which
// lie 32 apart so that a warp reads 32 neighbouring words at a time, and two 16-byte reads of weights,
// which are the same for the whole warp, for 8 FILTERS multiply-adds: ten reads for 64, where `implicit_gemm`
// does two reads for one.
//
// Arithmetic: 2 M C K K operations an output pixel, plus the filters that round M up to BLOCK_M. Bytes:
// x once for every BLOCK_M filters, with its K K-fold reuse in the caches and shared memory; y once.
//
// With POOL the pixels stand in another order, 32 first corners of maxima before their 32 second ones and so on, so
// that the four corners of a maximum are in one thread; the maxima go out side by side.
//
// The index arithmetic of a window element is a sum of two tables: where the pixel's window starts, kept
// in registers, and where product k lies in a window, computed once a step by DEPTH threads.
//
// `half` puts other definitions of stored_t and its functions in front of this text, `fp16x3_mma_sync` those of denormals.cuh.

#ifndef MULTIPLY_ADD
#define MULTIPLY_ADD fmaf
#endif

#ifndef STORED
#define STORED
typedef float stored_t;

__device__ __forceinline__ stored_t to_stored(float value) { return value; }

// The place in the warp's 256 pixels of a thread's u-th pixel, and the reads that go with it.
__device__ __forceinline__ int place_of(int lane, int u) { return lane + 32 * u; }

__device__ __forceinline__ void read_pixels(float (&value)[8], const stored_t *row, int lane) {
#pragma unroll
    for (int u = 0; u < 8; u++) value[u] = row[lane + 32 * u];
}

__device__ __forceinline__ void read_filters(float (&value)[8], const stored_t *row) {
    const float4 low = *reinterpret_cast<const float4 *>(row), high = *reinterpret_cast<const float4 *>(row + 4);
    value[0] = low.x, value[1] = low.y, value[2] = low.z, value[3] = low.w;
    value[4] = high.x, value[5] = high.y, value[6] = high.z, value[7] = high.w;
}
#endif

constexpr int BLOCK_THREADS = 32 * WARPS_M * WARPS_N;
constexpr int BLOCK_M = FILTERS * WARPS_M, BLOCK_N = 256 * WARPS_N;
constexpr int LOADS = BLOCK_N / BLOCK_THREADS;  // pixels of a row that one thread reads from global memory
constexpr int WEIGHTS = DEPTH * BLOCK_M, WEIGHT_LOADS = (WEIGHTS + BLOCK_THREADS - 1) / BLOCK_THREADS;
constexpr int CORNERS = POOL ? 4 : 1;           // pixels that become one element of y
constexpr int BLOCK_ELEMENTS = BLOCK_N / CORNERS;
constexpr int GROUPS = (M + BLOCK_M - 1) / BLOCK_M;

// Which of the block's elements of y its pixel n belongs to, and where that pixel's window starts, in an image of x.
__device__ __forceinline__ int element_of(int n) { return POOL ? n / 128 * 32 + n % 32 : n; }

__device__ __forceinline__ index_t window_at(index_t element, int n) {
#if POOL
    const int corner = n / 32 % 4;
    return index_t(corner_row(element / YW, corner)) * W + corner_column(element % YW, corner);
#else
    return element / YW * W + element % YW;
#endif
}

// Block number `block` of the product for so many images.
__device__ __forceinline__ void register_tile(const float *__restrict__ x, const float *__restrict__ w,
                                              float *__restrict__ y, long long first, int images, unsigned block) {
    __shared__ __align__(16) stored_t pixels[2][DEPTH][BLOCK_N];
    __shared__ __align__(16) stored_t filters[2][DEPTH][8 * WARPS_M];  // 8 a warp, the last 8 - FILTERS unused
    __shared__ index_t offset[2][DEPTH];                               // of product k in a window; -1 beyond the last

    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int warp_m = warp % WARPS_M, warp_n = warp / WARPS_M;
    const int m0 = block % GROUPS * BLOCK_M;

    // The block's first element of y: element r0 of image b0. From there on indices fit index_t.
    const long long n0 = block / GROUPS * (long long)BLOCK_ELEMENTS;
    const long long b0 = n0 / PIXELS;
    const index_t r0 = n0 % PIXELS;
    const long long left = images * (long long)PIXELS - n0;
    const int inside = left < BLOCK_ELEMENTS ? (int)left : BLOCK_ELEMENTS;
    const float *block_x = image_of(x, first + b0, IMAGE);
    float *block_y = image_of(y, first + b0, OUTPUTS);

    // What this thread reads from global memory at each step: LOADS windows, and some weights (-1: none).
    index_t window[LOADS], weight[WEIGHT_LOADS];
#pragma unroll
    for (int s = 0; s < LOADS; s++) {
        const int n = threadIdx.x + s * BLOCK_THREADS;
        const index_t r = r0 + min(element_of(n), inside - 1);  // any will do beyond the last
        window[s] = r / PIXELS * IMAGE + window_at(r % PIXELS, n);
    }
#pragma unroll
    for (int s = 0; s < WEIGHT_LOADS; s++) {
        const int t = threadIdx.x + s * BLOCK_THREADS, m = m0 + t / DEPTH;
        weight[s] = t < WEIGHTS && m < M ? index_t(m) * REDUCTION + t % DEPTH : index_t(-1);
    }

    auto fill_offsets = [&](int step) {
        if (threadIdx.x < DEPTH) {
            const int k = step * DEPTH + threadIdx.x;
            offset[step % 2][threadIdx.x] =
                k < REDUCTION ? (index_t(k / (K * K)) * H + k / K % K) * W + k % K : index_t(-1);
        }
    };
    float next_pixels[DEPTH][LOADS], next_weights[WEIGHT_LOADS];
    auto read_global = [&](int step) {
#pragma unroll
        for (int k = 0; k < DEPTH; k++) {
            const index_t at = offset[step % 2][k];
#pragma unroll
            for (int s = 0; s < LOADS; s++) next_pixels[k][s] = at < 0 ? 0.0f : block_x[window[s] + at];
        }
#pragma unroll
        for (int s = 0; s < WEIGHT_LOADS; s++) {
            const bool real = weight[s] >= 0 && step * DEPTH + int(threadIdx.x + s * BLOCK_THREADS) % DEPTH < REDUCTION;
            next_weights[s] = real ? w[weight[s] + step * DEPTH] : 0.0f;
        }
    };
    auto write_shared = [&](int step) {
#pragma unroll
        for (int k = 0; k < DEPTH; k++)
#pragma unroll
            for (int s = 0; s < LOADS; s++)
                pixels[step % 2][k][threadIdx.x + s * BLOCK_THREADS] = to_stored(next_pixels[k][s]);
#pragma unroll
        for (int s = 0; s < WEIGHT_LOADS; s++) {
            const int t = threadIdx.x + s * BLOCK_THREADS, f = t / DEPTH;
            if (t < WEIGHTS) filters[step % 2][t % DEPTH][f / FILTERS * 8 + f % FILTERS] = to_stored(next_weights[s]);
        }
    };

    constexpr int STEPS = (REDUCTION + DEPTH - 1) / DEPTH;
    fill_offsets(0);
    fill_offsets(1);
    __syncthreads();
    read_global(0);
    write_shared(0);
    __syncthreads();

    float sum[FILTERS][8] = {};
#pragma unroll 1
    for (int step = 0; step < STEPS; step++) {
        if (step + 1 < STEPS) read_global(step + 1);
#pragma unroll
        for (int k = 0; k < DEPTH; k++) {
            float a[8], b[8];
            read_filters(a, &filters[step % 2][k][8 * warp_m]);
            read_pixels(b, &pixels[step % 2][k][256 * warp_n], lane);
#pragma unroll
            for (int f = 0; f < FILTERS; f++)
#pragma unroll
                for (int u = 0; u < 8; u++) sum[f][u] = MULTIPLY_ADD(a[f], b[u], sum[f][u]);
        }
        if (step + 1 < STEPS) write_shared(step + 1);
        fill_offsets(step + 2);  // over those of this step, which were read a barrier ago
        __syncthreads();
    }

#pragma unroll
    for (int u = 0; u < 8; u += CORNERS) {
        const int n = element_of(256 * warp_n + place_of(lane, u));
        if (n >= inside) continue;
        const index_t r = r0 + n;
        float *out = image_of(block_y, r / PIXELS, OUTPUTS) + r % PIXELS;
#pragma unroll
        for (int f = 0; f < FILTERS; f++) {
            const int m = m0 + warp_m * FILTERS + f;
            if (m >= M) continue;
#if POOL
            out[m * PIXELS] = tanh_of_max(sum[f][u], sum[f][u + 1], sum[f][u + 2], sum[f][u + 3]);
#else
            out[m * PIXELS] = sum[f][u];
#endif
        }
    }
}

extern "C" __global__ void __launch_bounds__(BLOCK_THREADS, BLOCK_THREADS == 128 ? 4 : 1)
register_tiled(const float *__restrict__ x, const float *__restrict__ w, float *__restrict__ y, long long first,
               int images) {
    register_tile(x, w, y, first, images, blockIdx.x);
}

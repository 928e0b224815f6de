// naive: one thread computes one output, straight from global memory.
//
//     block = BLOCK_X x BLOCK_Y output pixels of FILTERS filters of one image
//     grid  = tiles of an output map, filter groups and images, in one dimension
//
// Arithmetic: 2 C K K operations an output. Bytes: each thread loads C K K pixels and as many weights,
// 8 bytes for each multiply-add, nearly all of them from the caches: the loads are what it waits for.
//
// BLOCK_X, BLOCK_Y   32 x 32 tiles the map; PIXELS_IN_ROW = 1 lays 1024 x 1 threads along its pixels
//                    in memory order, so that no lane idles at the end of a short row
// FILTERS            1: one block an image and filter; M: one block an image, which loops over filters
// SUM_IN_GLOBAL      1: the sum is kept in y itself, a load and a store of global memory for each product
// POOL               not 0: a thread computes the outputs of one maximum, one after another

// The loops are left as loops here: `unrolled` shows what unrolling them is worth.
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

extern "C" __global__ void __launch_bounds__(BLOCK_X *BLOCK_Y, 1)
naive(const float *x, const float *w, float *y, long long first) {
#if PIXELS_IN_ROW
    constexpr index_t TILES = (PIXELS + BLOCK_X - 1) / BLOCK_X;
#else
    constexpr int ACROSS = (YW + BLOCK_X - 1) / BLOCK_X;
    constexpr index_t TILES = index_t(ACROSS) * ((YH + BLOCK_Y - 1) / BLOCK_Y);
#endif
    constexpr int GROUPS = (M + FILTERS - 1) / FILTERS;
    const unsigned tile = blockIdx.x % unsigned(TILES);
    const unsigned rest = blockIdx.x / unsigned(TILES);
    const int m0 = rest % GROUPS * FILTERS;
    const long long b = first + rest / GROUPS;

#if PIXELS_IN_ROW
    const index_t pixel = index_t(tile) * BLOCK_X + threadIdx.x;
    if (pixel >= PIXELS) return;
    const int i = pixel / YW, j = pixel % YW;
#else
    const int i = tile / ACROSS * BLOCK_Y + threadIdx.y, j = tile % ACROSS * BLOCK_X + threadIdx.x;
    if (i >= YH || j >= YW) return;
#endif

    const float *image = image_of(x, b, IMAGE);
    for (int m = m0; m < min(m0 + FILTERS, M); m++) {
        const float *filter = w + index_t(m) * REDUCTION;
        float *out = image_of(y, b, OUTPUTS) + m * PIXELS + index_t(i) * YW + j;
#if POOL
        float largest = 0.0f;
#pragma unroll 1
        for (int corner = 0; corner < 4; corner++) {
            float sum = 0.0f;
            add_products(sum, image + index_t(corner_row(i, corner)) * W + corner_column(j, corner), filter);
            largest = corner == 0 ? sum : fmaxf(largest, sum);
        }
        *out = tanhf(largest);
#elif SUM_IN_GLOBAL
        volatile float &kept = *out;  // volatile: the compiler may not keep it in a register
        kept = 0.0f;
        add_products(kept, image + index_t(i) * W + j, filter);
#else
        float sum = 0.0f;
        add_products(sum, image + index_t(i) * W + j, filter);
        *out = sum;
#endif
    }
}

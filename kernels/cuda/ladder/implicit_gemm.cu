// implicit_gemm: the tiled matrix product of `im2col_gemm`, whose columns exist in shared memory only.
//
//     y [M] x [images * OH * OW]  =  w [M] x [C K K]  times  columns [C K K] x [images * OH * OW]
//
//     a block computes TILE x TILE outputs; per step of TILE products it loads
//         weights[TILE][TILE]  a tile of w
//         pixels[TILE][TILE]   a tile of the columns, each element straight from its place in x
//
// Example, 6 x 30 x 30 inputs and 16 filters of 5 x 5: a block computes 16 pixels of all filters in 10 steps of 16 of
// the 150 products.
//
// Arithmetic intensity: 2 M C K K FLOP per output pixel. Memory: x once per TILE filters, mostly from the caches, and y
// once; the columns, K K times the input, are gone. The price is index arithmetic: two divisions by constants per
// element of a tile. A multiply-add still reads two words of shared memory, whose bandwidth limits the kernel.
// Source: S. Chetlur et al., cuDNN: Efficient Primitives for Deep Learning, 2014, section 3.
// Restriction: the blocks of one image fit a grid.

constexpr int TILE = Config::tile;

extern "C" __global__ void __launch_bounds__(TILE *TILE)
implicit_gemm(const float *__restrict__ x, const float *__restrict__ w, float *__restrict__ y, long long first,
              int images) {
    __shared__ float weights[TILE][TILE], pixels[TILE][TILE];
    constexpr int FILTER_GROUPS = (M + TILE - 1) / TILE;
    const int tx = threadIdx.x % TILE, ty = threadIdx.x / TILE;
    const int m = blockIdx.x % FILTER_GROUPS * TILE + ty;
    const long long n = blockIdx.x / FILTER_GROUPS * (long long)TILE + tx;
    const bool inside = n < images * (long long)PIXELS;
    const long long image = first + (inside ? n / PIXELS : 0);
    const index_t pixel = inside ? n % PIXELS : 0;
    const float *window = image_of(x, image, IMAGE) + pixel / OW * W + pixel % OW;

    float sum = 0.0f;
    for (int k0 = 0; k0 < REDUCTION; k0 += TILE) {
        weights[ty][tx] = m < M && k0 + tx < REDUCTION ? w[index_t(m) * REDUCTION + k0 + tx] : 0.0f;
        const int k = k0 + ty, c = k / (K * K), p = k / K % K, q = k % K;
        pixels[ty][tx] = k < REDUCTION ? window[(index_t(c) * H + p) * W + q] : 0.0f;
        __syncthreads();
#pragma unroll
        for (int t = 0; t < TILE; t++) sum += weights[ty][t] * pixels[t][tx];
        __syncthreads();
    }
    if (m < M && inside) image_of(y, image, OUTPUTS)[m * PIXELS + pixel] = sum;
}

// implicit_gemm: the tiled matrix product of `im2col_gemm`, which reads the windows straight from the images.
//
//     y = w as [M][C K K]  times  columns [C K K][images x OH OW],   columns never stored
//
// Arithmetic: 2 M C K K operations an output pixel. Bytes: the input once for every TILE filters, mostly
// from the caches, and the output once; columns, K K times the input written and read, is gone. The price
// is index arithmetic, two divisions by constants for each element of a tile.

extern "C" __global__ void __launch_bounds__(TILE *TILE)
implicit_gemm(const float *__restrict__ x, const float *__restrict__ w, float *__restrict__ y, long long first,
           int images) {
    __shared__ float a[TILE][TILE], b[TILE][TILE];
    constexpr int GROUPS = (M + TILE - 1) / TILE;
    const int tx = threadIdx.x % TILE, ty = threadIdx.x / TILE;
    const int m = blockIdx.x % GROUPS * TILE + ty;
    const long long n = blockIdx.x / GROUPS * (long long)TILE + tx;
    const bool inside = n < images * (long long)PIXELS;
    const long long image = first + (inside ? n / PIXELS : 0);
    const index_t pixel = inside ? n % PIXELS : 0;
    const float *window = image_of(x, image, IMAGE) + pixel / OW * W + pixel % OW;

    float sum = 0.0f;
    for (int k0 = 0; k0 < REDUCTION; k0 += TILE) {
        a[ty][tx] = m < M && k0 + tx < REDUCTION ? w[index_t(m) * REDUCTION + k0 + tx] : 0.0f;
        const int k = k0 + ty, c = k / (K * K), p = k / K % K, q = k % K;
        b[ty][tx] = k < REDUCTION ? window[(index_t(c) * H + p) * W + q] : 0.0f;
        __syncthreads();
#pragma unroll
        for (int t = 0; t < TILE; t++) sum += a[ty][t] * b[t][tx];
        __syncthreads();
    }
    if (m < M && inside) image_of(y, image, OUTPUTS)[m * PIXELS + pixel] = sum;
}

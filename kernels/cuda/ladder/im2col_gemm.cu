// im2col_gemm: unroll the windows into a matrix in global memory, then multiply by the filters.
//
//     columns[C K K][n images x OH OW]   row (c, p, q) holds the pixel that w[m][c][p][q] meets at each output
//     y = w as [M][C K K]  times  columns
//
// Arithmetic: 2 M C K K operations an output pixel, in the product. Bytes: each output pixel has C K K
// floats written to columns and read back for every TILE filters: K K times the input, the price that
// `implicit_gemm` does not pay. The product reads TILE x TILE tiles of both matrices into shared memory, so a
// multiply-add reads two shared words, and each global word serves TILE of them.

extern "C" __global__ void __launch_bounds__(TILE *TILE)
unroll(const float *__restrict__ x, float *__restrict__ columns, long long first, int images) {
    // One thread writes the K x K entries of one channel at one output pixel.
    const long long wide = images * (long long)PIXELS;  // the row length; the host keeps columns below 2**31 elements
    const long long task = blockIdx.x * (long long)(TILE * TILE) + threadIdx.x;
    if (task >= wide * C) return;
    const int n = task % wide, c = task / wide;
    const int pixel = n % PIXELS, i = pixel / OW, j = pixel % OW;
    const float *window = image_of(x, first + n / PIXELS, IMAGE) + (index_t(c) * H + i) * W + j;
    float *column = columns + c * K * K * wide + n;
    for (int p = 0; p < K; p++)
        for (int q = 0; q < K; q++) column[(p * K + q) * wide] = window[index_t(p) * W + q];
}

extern "C" __global__ void __launch_bounds__(TILE *TILE)
multiply(const float *__restrict__ w, const float *__restrict__ columns, float *__restrict__ y, long long first,
         int images) {
    __shared__ float a[TILE][TILE], b[TILE][TILE];
    constexpr int GROUPS = (M + TILE - 1) / TILE;
    const int wide = images * (int)PIXELS;
    const int tx = threadIdx.x % TILE, ty = threadIdx.x / TILE;
    // Neighbouring blocks share their part of columns.
    const int m = blockIdx.x % GROUPS * TILE + ty, n = blockIdx.x / GROUPS * TILE + tx;
    float sum = 0.0f;
    for (int k0 = 0; k0 < REDUCTION; k0 += TILE) {
        a[ty][tx] = m < M && k0 + tx < REDUCTION ? w[index_t(m) * REDUCTION + k0 + tx] : 0.0f;
        b[ty][tx] = k0 + ty < REDUCTION && n < wide ? columns[(k0 + ty) * (long long)wide + n] : 0.0f;
        __syncthreads();
#pragma unroll
        for (int k = 0; k < TILE; k++) sum += a[ty][k] * b[k][tx];
        __syncthreads();
    }
    if (m < M && n < wide) image_of(y, first + n / (int)PIXELS, OUTPUTS)[m * PIXELS + n % (int)PIXELS] = sum;
}

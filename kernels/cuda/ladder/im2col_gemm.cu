// im2col_gemm: write every window of the images as a column of a matrix in global memory, then multiply by the filters.
//
//                                          columns  [C K K] x [images * OH * OW]
//                                          +-------+------+------+
//                                          |       |  ||  |      |    row (c, p, q): the pixel that
//                                          |       |  \/  |      |    w[m][c][p][q] multiplies
//       w  [M] x [C K K]                   +-------+------+------+
//       +--------------------+             +-------+------+------+
//       | ---> TILE x TILE   |             |       |block |      |    one block: TILE x TILE outputs of y
//       +--------------------+             +-------+------+------+
//
// Example, 6 x 30 x 30 inputs and 16 filters of 5 x 5: an image's columns are 150 x 676 floats, 406 KB for inputs of 22
// KB; a block multiplies 16 x 16 weights by 16 x 16 entries in each of 10 steps.
//
// Arithmetic intensity: 2 M C K K FLOP per output pixel. Memory: each output pixel's C K K floats are written once and
// read once per `tile` filters, K K times the input; this traffic is what `implicit_gemm` avoids. In the product, a
// multiply-add reads two words of shared memory, whose bandwidth limits it.
// Source: K. Chellapilla, S. Puri, P. Simard, High Performance Convolutional Neural Networks for Document Processing,
// 2006; the tiled matrix product of Kirk and Hwu, Programming Massively Parallel Processors, chapter 4.
// Restriction: the columns of one image fit the scratch memory.

constexpr int TILE = Config::tile, THREADS = TILE * TILE;

// One thread writes the K x K entries of one channel at one output pixel.
extern "C" __global__ void __launch_bounds__(THREADS)
unroll(const float *__restrict__ x, float *__restrict__ columns, long long first, int images) {
    const long long row_length = images * (long long)PIXELS;  // the host keeps columns below 2**31 elements
    const long long task = blockIdx.x * (long long)THREADS + threadIdx.x;
    if (task >= row_length * C) return;
    const int n = task % row_length, c = task / row_length;
    const int pixel = n % PIXELS, i = pixel / OW, j = pixel % OW;
    const float *window = image_of(x, first + n / PIXELS, IMAGE) + (index_t(c) * H + i) * W + j;
    float *column = columns + c * K * K * row_length + n;
    for (int p = 0; p < K; p++)
        for (int q = 0; q < K; q++) column[(p * K + q) * row_length] = window[index_t(p) * W + q];
}

extern "C" __global__ void __launch_bounds__(THREADS)
multiply(const float *__restrict__ w, const float *__restrict__ columns, float *__restrict__ y, long long first,
         int images) {
    __shared__ float weights[TILE][TILE], pixels[TILE][TILE];
    constexpr int FILTER_GROUPS = (M + TILE - 1) / TILE;
    const int row_length = images * (int)PIXELS;
    const int tx = threadIdx.x % TILE, ty = threadIdx.x / TILE;
    // Consecutive blocks differ in their filters, so they find their columns in L2.
    const int m = blockIdx.x % FILTER_GROUPS * TILE + ty, n = blockIdx.x / FILTER_GROUPS * TILE + tx;
    float sum = 0.0f;
    for (int k0 = 0; k0 < REDUCTION; k0 += TILE) {
        weights[ty][tx] = m < M && k0 + tx < REDUCTION ? w[index_t(m) * REDUCTION + k0 + tx] : 0.0f;
        pixels[ty][tx] = k0 + ty < REDUCTION && n < row_length ? columns[(k0 + ty) * (long long)row_length + n] : 0.0f;
        __syncthreads();
#pragma unroll
        for (int k = 0; k < TILE; k++) sum += weights[ty][k] * pixels[k][tx];
        __syncthreads();
    }
    if (m < M && n < row_length) image_of(y, first + n / (int)PIXELS, OUTPUTS)[m * PIXELS + n % (int)PIXELS] = sum;
}

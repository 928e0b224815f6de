// tensor_core: the fused product on the matrix units (mma.sync), sums in float32.
//
//     y^T = columns^T [images x OH OW][C K K]  times  w^T [C K K][M]
//
//     a block  128 output pixels (of all images in a row) x BLOCK_M filters, four warps
//     a warp   32 pixels x BLOCK_M filters: 2 x BLOCK_M / 8 instructions of 16 pixels x 8 filters
//
// Both matrices lie in shared memory as 32-bit words: two 16-bit floats of neighbouring products
// (PER_WORD 2, m16n8k16) or one tf32 (PER_WORD 1, m16n8k8). Seen in words the two instructions have the
// same fragments, so one text serves both. Of lane (g, t), g = lane / 4, t = lane % 4:
//
//     a: (pixel g, word t) (g + 8, t) (g, t + 4) (g + 8, t + 4)        b: (word t, filter g) (t + 4, g)
//     d: (pixel g, filter 2t) (g, 2t + 1) (g + 8, 2t) (g + 8, 2t + 1)
//
// Rows of words are 8 or 24 modulo 32 words apart, so that a fragment's 32 reads fall on 32 banks. The
// result goes through shared memory, so that a warp stores 32 neighbouring pixels at a time.
//
// Arithmetic: 2 M C K K operations an output pixel, C K K rounded up to WORDS PER_WORD and M to BLOCK_M.
// Bytes: x once for every BLOCK_M filters, y once. Inputs are rounded to 11 bits; 16-bit floats beyond
// 65504 become infinite and below 2**-14 keep fewer bits, tf32 has the range of float32.

constexpr int BLOCK_THREADS = 128;
constexpr int BLOCK_N = BLOCK_THREADS;                              // pixels: one a thread to load and to store
constexpr int ROW_N = BLOCK_N + 8;                                  // words between rows of pixels
constexpr int ROW_M = BLOCK_M / 8 % 2 ? BLOCK_M : BLOCK_M + 8;      // words between rows of filters
constexpr int ROW_OUT = BLOCK_N + 4;                                // floats between the result's rows
constexpr int STEP = WORDS * PER_WORD;                              // products a step
constexpr int FRAGMENTS = BLOCK_M / 8;
constexpr int GROUPS = (M + BLOCK_M - 1) / BLOCK_M;
constexpr int TILE_WORDS = WORDS * (ROW_N + ROW_M), OUT_WORDS = BLOCK_M * ROW_OUT;
constexpr int WEIGHT_ROWS = BLOCK_THREADS / WORDS;                  // filters that the block reads at a time
constexpr int WEIGHT_LOADS = (BLOCK_M + WEIGHT_ROWS - 1) / WEIGHT_ROWS;

// Two 16-bit floats in a word, the first product in its lower half.
__device__ __forceinline__ unsigned to_half_pair(float low, float high) {
    unsigned word;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
    return word;
}

__device__ __forceinline__ unsigned to_tf32(float value) {
    unsigned word;
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(word) : "f"(value));
    return word;
}

__device__ __forceinline__ void mma(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
#if PER_WORD == 2
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#else
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#endif
}

// The word of PER_WORD neighbouring values.
__device__ __forceinline__ unsigned to_word(const float *values) {
#if PER_WORD == 2
    return to_half_pair(values[0], values[1]);
#else
    return to_tf32(values[0]);
#endif
}

extern "C" __global__ void __launch_bounds__(BLOCK_THREADS)
tensor_core(const float *__restrict__ x, const float *__restrict__ w, float *__restrict__ y, long long first,
            int images) {
    __shared__ unsigned shared[2 * TILE_WORDS > OUT_WORDS ? 2 * TILE_WORDS : OUT_WORDS];
    __shared__ __align__(16) index_t offset[2][STEP];  // of product k in a window; -1 beyond the last

    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
    const int m0 = blockIdx.x % GROUPS * BLOCK_M;
    const long long n = blockIdx.x / GROUPS * (long long)BLOCK_N + threadIdx.x;
    const bool inside = n < images * (long long)PIXELS;
    const long long image = first + (inside ? n / PIXELS : 0);  // any window will do beyond the last
    const index_t pixel = inside ? n % PIXELS : 0;
    const float *window = image_of(x, image, IMAGE) + pixel / OW * W + pixel % OW;

    auto fill_offsets = [&](int step) {
        if (threadIdx.x < STEP) {
            const int k = step * STEP + threadIdx.x;
            offset[step % 2][threadIdx.x] =
                k < REDUCTION ? (index_t(k / (K * K)) * H + k / K % K) * W + k % K : index_t(-1);
        }
    };
    // A step's values go into registers before the products of the step before, into shared memory after them.
    float next_pixels[STEP], next_weights[WEIGHT_LOADS][PER_WORD];
    const int weight_k = threadIdx.x % WORDS, weight_f = threadIdx.x / WORDS;
    auto read_global = [&](int step) {
#pragma unroll
        for (int i = 0; i < STEP; i++) {
            const index_t at = offset[step % 2][i];
            next_pixels[i] = at < 0 ? 0.0f : window[at];
        }
#pragma unroll
        for (int s = 0; s < WEIGHT_LOADS; s++)
#pragma unroll
            for (int i = 0; i < PER_WORD; i++) {
                const int m = m0 + weight_f + s * WEIGHT_ROWS, k = step * STEP + weight_k * PER_WORD + i;
                next_weights[s][i] = m < M && k < REDUCTION ? w[index_t(m) * REDUCTION + k] : 0.0f;
            }
    };
    auto write_shared = [&](int step) {
        unsigned *pixels = shared + step % 2 * TILE_WORDS, *filters = pixels + WORDS * ROW_N;
#pragma unroll
        for (int k = 0; k < WORDS; k++) pixels[k * ROW_N + threadIdx.x] = to_word(next_pixels + k * PER_WORD);
#pragma unroll
        for (int s = 0; s < WEIGHT_LOADS; s++) {
            const int f = weight_f + s * WEIGHT_ROWS;
            if (f < BLOCK_M) filters[weight_k * ROW_M + f] = to_word(next_weights[s]);
        }
    };

    constexpr int STEPS = (REDUCTION + STEP - 1) / STEP;
    fill_offsets(0);
    fill_offsets(1);
    __syncthreads();
    read_global(0);
    write_shared(0);
    __syncthreads();

    float sum[2][FRAGMENTS][4] = {};
#pragma unroll 1
    for (int step = 0; step < STEPS; step++) {
        if (step + 1 < STEPS) read_global(step + 1);
        const unsigned *pixels = shared + step % 2 * TILE_WORDS, *filters = pixels + WORDS * ROW_N;
#pragma unroll
        for (int k = 0; k < WORDS; k += 8) {
            unsigned a[2][4];
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const unsigned *corner = pixels + (k + t) * ROW_N + 32 * warp + 16 * i + g;
                a[i][0] = corner[0], a[i][1] = corner[8], a[i][2] = corner[4 * ROW_N], a[i][3] = corner[4 * ROW_N + 8];
            }
#pragma unroll
            for (int j = 0; j < FRAGMENTS; j++) {
                const unsigned *corner = filters + (k + t) * ROW_M + 8 * j + g;
                const unsigned b[2] = {corner[0], corner[4 * ROW_M]};
                mma(sum[0][j], a[0], b);
                mma(sum[1][j], a[1], b);
            }
        }
        if (step + 1 < STEPS) write_shared(step + 1);
        fill_offsets(step + 2);  // over those of this step, which were read a barrier ago
        __syncthreads();
    }

    float *result = reinterpret_cast<float *>(shared);  // [BLOCK_M][ROW_OUT]
#pragma unroll
    for (int i = 0; i < 2; i++)
#pragma unroll
        for (int j = 0; j < FRAGMENTS; j++)
#pragma unroll
            for (int v = 0; v < 4; v++)
                result[(8 * j + 2 * t + v % 2) * ROW_OUT + 32 * warp + 16 * i + g + v / 2 * 8] = sum[i][j][v];
    __syncthreads();
    if (!inside) return;
    float *out = image_of(y, image, OUTPUTS) + pixel;
    for (int f = 0; f < min(BLOCK_M, M - m0); f++) out[(m0 + f) * PIXELS] = result[f * ROW_OUT + threadIdx.x];
}

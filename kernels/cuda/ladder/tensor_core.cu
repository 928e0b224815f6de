// tensor_core: the implicit GEMM on tensor cores (mma.sync), inputs rounded to fp16 or tf32, sums in float32.
//
//     y^T [images * OH * OW] x [M]  =  columns^T [images * OH * OW] x [C K K]  times  w^T [C K K] x [M]
//
//     block   128 output pixels, which run on through the images, x block_filters filters; four warps
//     warp    32 pixels x block_filters filters: 2 x block_filters / 8 mma.sync of 16 pixels x 8 filters per 8 words
//
//     global memory --> registers --> shared memory [2 buffers] --> fragments --> mma.sync --> shared memory --> y
//     (prefetch distance: one step)   rounded, values_per_word                  float32 sums   (epilogue)
//
// In shared memory both matrices consist of 32-bit words: two fp16 values of neighbouring k (m16n8k16) or one tf32
// value (m16n8k8). In words the two instructions have the same fragments, so one text serves both. For lane 4 g + t:
//
//     a: (pixel g, word t) (g + 8, t) (g, t + 4) (g + 8, t + 4)        b: (word t, filter g) (t + 4, g)
//     d: (pixel g, filter 2t) (g, 2t + 1) (g + 8, 2t) (g + 8, 2t + 1)
//
// Shared-memory layout: rows of words are 8 or 24 modulo 32 words apart, so the 32 reads of a fragment hit 32 banks.
//
// Example, 6 x 30 x 30 inputs and 16 filters of 5 x 5, fp16: a block computes 128 pixels x 16 filters in 5 steps of 32
// of the 150 products; a warp issues 2 x 2 mma.sync per 16 products.
//
// Arithmetic intensity: 2 M C K K FLOP per output pixel, with C K K and M rounded up to a step and a block. x is read
// once per block_filters filters, y written once. With few filters, the load units limit it: a thread loads
// and converts C K K pixels one by one for products that the tensor cores do 16 x 8 x 8 at a time.
// Source: PTX ISA, warp-level matrix instructions (mma.sync, fragment layouts).
// Restrictions: compute capability 8.0. Inputs are rounded to 11 bits. As fp16, values beyond 65504 become infinite,
// and below 2**-14 they keep fewer bits; tf32 has float32's range.

constexpr int BLOCK_FILTERS = Config::block_filters, BLOCK_THREADS = 128;
constexpr int BLOCK_PIXELS = BLOCK_THREADS;  // one per thread to load and to store
constexpr int WORDS = Config::words_per_step, PER_WORD = Config::values_per_word;
constexpr int K_PER_STEP = WORDS * PER_WORD;
constexpr int FRAGMENTS = BLOCK_FILTERS / 8;
constexpr int FILTER_GROUPS = (M + BLOCK_FILTERS - 1) / BLOCK_FILTERS;
constexpr int PIXEL_PITCH = BLOCK_PIXELS + 8;                                            // words from row to row
constexpr int FILTER_PITCH = BLOCK_FILTERS / 8 % 2 ? BLOCK_FILTERS : BLOCK_FILTERS + 8;  // the same
constexpr int OUTPUT_PITCH = BLOCK_PIXELS + 4;                                           // floats from row to row
constexpr int BUFFER_WORDS = WORDS * (PIXEL_PITCH + FILTER_PITCH), OUTPUT_WORDS = BLOCK_FILTERS * OUTPUT_PITCH;
constexpr int FILTERS_PER_LOAD = BLOCK_THREADS / WORDS;
constexpr int WEIGHT_LOADS = (BLOCK_FILTERS + FILTERS_PER_LOAD - 1) / FILTERS_PER_LOAD;

// Return two fp16 values in a word, the first one in its lower half.
__device__ __forceinline__ unsigned to_fp16_pair(float low, float high) {
    unsigned word;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
    return word;
}

__device__ __forceinline__ unsigned to_tf32(float value) {
    unsigned word;
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(word) : "f"(value));
    return word;
}

// Add the product of a fragment of 16 pixels x 8 words and one of 8 words x 8 filters to d.
__device__ __forceinline__ void mma(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
    if constexpr (PER_WORD == 2)
        asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
            "{%0, %1, %2, %3};"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
    else
        asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
            "{%0, %1, %2, %3};"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// Return the word of PER_WORD neighbouring values.
__device__ __forceinline__ unsigned to_word(const float *values) {
    if constexpr (PER_WORD == 2)
        return to_fp16_pair(values[0], values[1]);
    else
        return to_tf32(values[0]);
}

extern "C" __global__ void __launch_bounds__(BLOCK_THREADS)
tensor_core(const float *__restrict__ x, const float *__restrict__ w, float *__restrict__ y, long long first,
            int images) {
    __shared__ unsigned shared[2 * BUFFER_WORDS > OUTPUT_WORDS ? 2 * BUFFER_WORDS : OUTPUT_WORDS];
    __shared__ __align__(16) index_t offset[2][K_PER_STEP];  // of product k in a window; -1 beyond the last

    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
    const int first_filter = blockIdx.x % FILTER_GROUPS * BLOCK_FILTERS;
    const long long n = blockIdx.x / FILTER_GROUPS * (long long)BLOCK_PIXELS + threadIdx.x;
    const bool inside = n < images * (long long)PIXELS;
    const long long image = first + (inside ? n / PIXELS : 0);  // beyond the last, any window will do
    const index_t pixel = inside ? n % PIXELS : 0;
    const float *window = image_of(x, image, IMAGE) + pixel / OW * W + pixel % OW;

    auto fill_offsets = [&](int step) {
        if (threadIdx.x < K_PER_STEP) {
            const int k = step * K_PER_STEP + threadIdx.x;
            offset[step % 2][threadIdx.x] =
                k < REDUCTION ? (index_t(k / (K * K)) * H + k / K % K) * W + k % K : index_t(-1);
        }
    };
    // Double buffering: the next step's values go into registers before this step's products, and into shared memory
    // after them.
    float next_pixels[K_PER_STEP], next_weights[WEIGHT_LOADS][PER_WORD];
    const int weight_word = threadIdx.x % WORDS, weight_filter = threadIdx.x / WORDS;
    auto load_global = [&](int step) {
#pragma unroll
        for (int i = 0; i < K_PER_STEP; i++) {
            const index_t in_window = offset[step % 2][i];
            next_pixels[i] = in_window < 0 ? 0.0f : window[in_window];
        }
#pragma unroll
        for (int s = 0; s < WEIGHT_LOADS; s++)
#pragma unroll
            for (int i = 0; i < PER_WORD; i++) {
                const int m = first_filter + weight_filter + s * FILTERS_PER_LOAD;
                const int k = step * K_PER_STEP + weight_word * PER_WORD + i;
                next_weights[s][i] = m < M && k < REDUCTION ? w[index_t(m) * REDUCTION + k] : 0.0f;
            }
    };
    auto store_shared = [&](int step) {
        unsigned *pixels = shared + step % 2 * BUFFER_WORDS, *filters = pixels + WORDS * PIXEL_PITCH;
#pragma unroll
        for (int k = 0; k < WORDS; k++) pixels[k * PIXEL_PITCH + threadIdx.x] = to_word(next_pixels + k * PER_WORD);
#pragma unroll
        for (int s = 0; s < WEIGHT_LOADS; s++) {
            const int f = weight_filter + s * FILTERS_PER_LOAD;
            if (f < BLOCK_FILTERS) filters[weight_word * FILTER_PITCH + f] = to_word(next_weights[s]);
        }
    };

    constexpr int STEPS = (REDUCTION + K_PER_STEP - 1) / K_PER_STEP;
    fill_offsets(0);
    fill_offsets(1);
    __syncthreads();
    load_global(0);
    store_shared(0);
    __syncthreads();

    float sum[2][FRAGMENTS][4] = {};
#pragma unroll 1
    for (int step = 0; step < STEPS; step++) {
        if (step + 1 < STEPS) load_global(step + 1);
        const unsigned *pixels = shared + step % 2 * BUFFER_WORDS, *filters = pixels + WORDS * PIXEL_PITCH;
#pragma unroll
        for (int k = 0; k < WORDS; k += 8) {
            unsigned a[2][4];
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const unsigned *corner = pixels + (k + t) * PIXEL_PITCH + 32 * warp + 16 * i + g;
                a[i][0] = corner[0], a[i][1] = corner[8];
                a[i][2] = corner[4 * PIXEL_PITCH], a[i][3] = corner[4 * PIXEL_PITCH + 8];
            }
#pragma unroll
            for (int j = 0; j < FRAGMENTS; j++) {
                const unsigned *corner = filters + (k + t) * FILTER_PITCH + 8 * j + g;
                const unsigned b[2] = {corner[0], corner[4 * FILTER_PITCH]};
                mma(sum[0][j], a[0], b);
                mma(sum[1][j], a[1], b);
            }
        }
        if (step + 1 < STEPS) store_shared(step + 1);
        fill_offsets(step + 2);  // over this step's, which the threads read before the previous barrier
        __syncthreads();
    }

    // Epilogue: through shared memory, so that a warp stores 32 neighbouring pixels at a time.
    float *result = reinterpret_cast<float *>(shared);  // [BLOCK_FILTERS][OUTPUT_PITCH]
#pragma unroll
    for (int i = 0; i < 2; i++)
#pragma unroll
        for (int j = 0; j < FRAGMENTS; j++)
#pragma unroll
            for (int v = 0; v < 4; v++)
                result[(8 * j + 2 * t + v % 2) * OUTPUT_PITCH + 32 * warp + 16 * i + g + v / 2 * 8] = sum[i][j][v];
    __syncthreads();
    if (!inside) return;
    float *out = image_of(y, image, OUTPUTS) + pixel;
    for (int f = 0; f < min(BLOCK_FILTERS, M - first_filter); f++)
        out[(first_filter + f) * PIXELS] = result[f * OUTPUT_PITCH + threadIdx.x];
}

// weight_gradient: the weight gradient of a layer with few channels and filters by mma.sync, all of its sums in a
// block's registers.
//
//     w[m, c, p, q] = sum over images and outputs i, j of y[b, m, i, j] * x[b, c, i + p - PAD_H, j + q - PAD_W]
//
//                          filters: FILTER_TILES x 8, B: words of two neighbouring outputs of y
//                         +------------------------------------------+
//     taps (c, p, q):     |  main:   y_high x_high, promoted every   |  reduction: pairs of outputs, eight per k-step,
//     TAP_TILES x 16, A:  |          PROMOTION k-steps               |  row after row
//     words of pixels     |  cross:  y_low x_high + y_high x_low     |
//     j + q and j + q + 1 +------------------------------------------+
//
// A block goes through its share of the images in steps of STEP_ROWS output rows. It finds the ranges of the step's
// rows of x and y, splits them into words in shared memory, and multiplies, while the next step's rows are copied. A
// word of x begins at every pixel, since taps begin at odd ones, too. A warp has M_TILES x N_TILES tiles of sums;
// SLICES warps have the same tiles and divide the k-steps. partial_sums.cuh adds the slices of all blocks. Steps that
// cannot be split are computed in float32.
//
// Arithmetic intensity: 2 C K L FLOP per element of y, 3 times; x and y are read once, with K - 1 more rows of x per
// step. Tensor cores and the reads of shared memory limit it, or memory with one channel.
// Config of the course's last layer: step_rows 14, m_tiles 5, n_tiles 3, slices 1, blocks 1, promotion 8.
// Source: "Warp level matrix instructions" in the PTX ISA; split.cuh has the arithmetic, weight_gradient.py the bound.
// Restrictions: stride 1, no dilation, one group; all sums and a step fit a block.

constexpr int M_TILES = Config::m_tiles, N_TILES = Config::n_tiles, SLICES = Config::slices, TILES = M_TILES * N_TILES;
constexpr int TAPS = C * K * L, TAP_TILES = (TAPS + 15) / 16, FILTER_TILES = (M + 7) / 8, PROMOTION = Config::promotion;
constexpr int TAP_WARPS = (TAP_TILES + M_TILES - 1) / M_TILES, FILTER_WARPS = (FILTER_TILES + N_TILES - 1) / N_TILES;
constexpr int WARPS = TAP_WARPS * FILTER_WARPS * SLICES, THREADS = 32 * WARPS;
constexpr int STEP_ROWS = Config::step_rows, STEPS_IN_IMAGE = (OH + STEP_ROWS - 1) / STEP_ROWS;
constexpr int PAIRS = (OW + 1) / 2, K_STEPS = (STEP_ROWS * PAIRS + 7) / 8;
// Raw rows and words of a step: x [C][X_ROWS], y [M]; pitches in words.
constexpr int X_ROWS = STEP_ROWS + K - 1, X_WORDS = 2 * PAIRS - 2 + L, X_PITCH = Config::x_pitch, Y_PITCH = Config::y_pitch;
constexpr int X_LOW = C * X_ROWS * X_PITCH, Y_LOW = 8 * FILTER_WARPS * N_TILES * Y_PITCH;  // from high to low words
constexpr int X_FLOATS = (C * X_ROWS * W + 3) / 4 * 4, Y_FLOATS = (M * STEP_ROWS * OW + 3) / 4 * 4;

// Load: issue copies of a step's rows of x and y. Rows outside become zeros.
template <int VECTOR, int CHANNELS, int ROWS, int IMAGE_ROWS, int WIDTH>
__device__ __forceinline__ void load_rows(float *to, const float *from, int first_row) {
    constexpr int COPIES = WIDTH / VECTOR;
    for (int e = threadIdx.x; e < CHANNELS * ROWS * COPIES; e += THREADS) {
        const int line = e / COPIES, channel = line / ROWS, row = first_row + line - channel * ROWS;
        const int column = (e - line * COPIES) * VECTOR;
        float *const target = to + line * WIDTH + column;
        if (unsigned(row) < unsigned(IMAGE_ROWS)) {
            copy_async<VECTOR>(target, from + (channel * index_t(IMAGE_ROWS) + row) * WIDTH + column);
        } else {
#pragma unroll
            for (int i = 0; i < VECTOR; i++) target[i] = 0.0f;
        }
    }
}

// This thread's share of the range of raw rows.
template <int FLOATS>
__device__ __forceinline__ Range range_of(const float *raw) {
    Range range;
#pragma unroll 4
    for (int i = threadIdx.x; i < FLOATS / 4; i += THREADS) {
        const float4 v = reinterpret_cast<const float4 *>(raw)[i];
        range.add(v.x), range.add(v.y), range.add(v.z), range.add(v.w);
    }
    range.join_warp();
    return range;
}

__device__ __forceinline__ void write_word(unsigned *to, int low, float first, float second, float scale) {
    const float a = multiply(first, scale), b = multiply(second, scale);
    const unsigned high = to_fp16x2(a, b);
    to[0] = high, to[low] = fp16x2_residual(a, b, high);
}

// All threads: split a step's raw rows.
__device__ __forceinline__ void split_step(unsigned *x_words, unsigned *y_words, const float *x, const float *y,
                                           float x_scale, float y_scale) {
#pragma unroll 4
    for (int e = threadIdx.x; e < C * X_ROWS * X_WORDS; e += THREADS) {
        const int line = e / X_WORDS, word = e - line * X_WORDS, column = word - PAD_W;
        const float first = unsigned(column) < unsigned(W) ? x[line * W + column] : 0.0f;
        const float second = unsigned(column + 1) < unsigned(W) ? x[line * W + column + 1] : 0.0f;
        write_word(x_words + line * X_PITCH + word, X_LOW, first, second, x_scale);
    }
#pragma unroll 4
    for (int e = threadIdx.x; e < M * (STEP_ROWS * PAIRS); e += THREADS) {
        const int line = e / PAIRS, pair = e - line * PAIRS, m = line / STEP_ROWS;
        const float *const from = y + line * OW + 2 * pair;
        const float second = OW % 2 == 0 || 2 * pair + 1 < OW ? from[1] : 0.0f;
        write_word(y_words + m * Y_PITCH + e - m * (STEP_ROWS * PAIRS), Y_LOW, from[0], second, y_scale);
    }
}

// The tiles of sums of a warp. Lane 4 g + t has taps g and g + 8 and filters 2 t and 2 t + 1 of each.
struct Sums {
    float promoted[TILES][4];
    int first_tap, first_filter, slice;

    __device__ __forceinline__ Sums() : promoted{} {
        const int warp = threadIdx.x / 32;
        first_tap = warp % TAP_WARPS * (16 * M_TILES) + threadIdx.x % 32 / 4;
        first_filter = warp / TAP_WARPS % FILTER_WARPS * (8 * N_TILES);
        slice = warp / (TAP_WARPS * FILTER_WARPS);
    }
    __device__ __forceinline__ int tap(int tile, int v) const { return first_tap + tile / N_TILES * 16 + v / 2 * 8; }
    __device__ __forceinline__ int filter(int tile, int v) const {
        return first_filter + tile % N_TILES * 8 + threadIdx.x % 4 * 2 + v % 2;
    }

    // Main loop: this slice's k-steps of a step whose words are scaled by 2^exponent.
    __device__ __forceinline__ void multiply_step(const unsigned *x_words, const unsigned *y_words, const int *offsets,
                                                  int exponent) {
        const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
        const unsigned char *of[2 * M_TILES];
#pragma unroll
        for (int i = 0; i < 2 * M_TILES; i++) {
            const int own = min(first_tap + 8 * i, TAPS - 1), line = own / L;
            of[i] = reinterpret_cast<const unsigned char *>(x_words + (line / K * X_ROWS + line % K) * X_PITCH + own % L);
        }
        const unsigned *const of_y = y_words + (first_filter + g) * Y_PITCH + t;
        const float scale = power_of_two(-exponent / 2), rest = power_of_two(-exponent - -exponent / 2);
        float main[TILES][4] = {}, cross[TILES][4] = {};
        const int end = K_STEPS * (slice + 1) / SLICES;
#pragma unroll 1
        for (int begin = K_STEPS * slice / SLICES; begin < end; begin += PROMOTION) {
#pragma unroll(TILES > 12 ? 1 : 2)  // with more sums there is no register left for a second k-step
            for (int k = begin; k < min(begin + PROMOTION, end); k++) {
                const int first = offsets[8 * k + t], second = offsets[8 * k + t + 4];
                unsigned b[N_TILES][4];  // high, high, low, low
#pragma unroll
                for (int i = 0; i < 4 * N_TILES; i++)
                    b[i / 4][i % 4] = of_y[i / 4 * (8 * Y_PITCH) + i % 4 / 2 * Y_LOW + 8 * k + i % 2 * 4];
#pragma unroll
                for (int i = 0; i < M_TILES; i++) {
                    unsigned high[4], low[4];
#pragma unroll
                    for (int v = 0; v < 4; v++) {
                        const unsigned char *const word = of[2 * i + v % 2] + (v < 2 ? first : second);
                        high[v] = *reinterpret_cast<const unsigned *>(word);
                        low[v] = *reinterpret_cast<const unsigned *>(word + 4 * X_LOW);
                    }
#pragma unroll
                    for (int n = 0; n < N_TILES; n++) {
                        mma(main[i * N_TILES + n], high, b[n][0], b[n][1]);
                        mma(cross[i * N_TILES + n], high, b[n][2], b[n][3]);
                        mma(cross[i * N_TILES + n], low, b[n][0], b[n][1]);
                    }
                }
            }
#pragma unroll
            for (int e = 0; e < 4 * TILES; e++) {
                promoted[e / 4][e % 4] += multiply(multiply(main[e / 4][e % 4], scale), rest);
                main[e / 4][e % 4] = 0.0f;
            }
        }
#pragma unroll
        for (int e = 0; e < 4 * TILES; e++)
            promoted[e / 4][e % 4] += multiply(multiply(cross[e / 4][e % 4] * (1.0f / 2048), scale), rest);
    }

    // Add the same products in float32 from the raw rows; rows of y that do not exist are skipped.
    __device__ __forceinline__ void add_in_float32(const float *x, const float *y, int rows) {
#pragma unroll 1
        for (int e = 0; e < 4 * TILES; e++) {
            const int own = tap(e / 4, e % 4), m = filter(e / 4, e % 4), q = own % L;
            if (own >= TAPS || m >= M) continue;
            const float *const of_x = x + (own / L / K * X_ROWS + own / L % K) * W, *const of_y = y + m * (STEP_ROWS * OW);
            float sum = 0.0f;
#pragma unroll 1
            for (int row = slice; row < rows; row += SLICES)
#pragma unroll 3  // so that the latencies of the reads overlap: the other blocks wait for one with such a step
                for (int j = 0; j < OW; j++) {
                    const int column = j + q - PAD_W;
                    const float value = unsigned(column) < unsigned(W) ? of_x[row * W + column] : 0.0f;
                    sum = multiply_add(value, of_y[row * OW + j], sum);
                }
#pragma unroll
            for (int f = 0; f < 4 * TILES; f++) promoted[f / 4][f % 4] += f == e ? sum : 0.0f;
        }
    }
};

// Fill partials [block][slice][M][taps] with the sums over the block's share of the steps of all images.
extern "C" __global__ void __launch_bounds__(THREADS, Config::blocks)
weight_gradient(const float *__restrict__ x, const float *__restrict__ y, float *__restrict__ partials, long long steps) {
    extern __shared__ __align__(16) unsigned char memory[];
    __shared__ Range ranges[2][WARPS];
    float *const x_raw = reinterpret_cast<float *>(memory), *const y_raw = x_raw + X_FLOATS;
    unsigned *const x_words = reinterpret_cast<unsigned *>(y_raw + Y_FLOATS), *const y_words = x_words + 2 * X_LOW;
    int *const offsets = reinterpret_cast<int *>(y_words + 2 * Y_LOW);  // [8 K_STEPS] bytes from a tap's first word to a pair's
    // Pairs and filters beyond the last, and the ends of raw arrays, stay zero.
    for (int i = threadIdx.x; i < X_FLOATS + Y_FLOATS; i += THREADS) x_raw[i] = 0.0f;
    for (int i = threadIdx.x; i < 2 * Y_LOW; i += THREADS) y_words[i] = 0;
    for (int i = threadIdx.x; i < 8 * K_STEPS; i += THREADS)
        offsets[i] = i < STEP_ROWS * PAIRS ? 4 * (i / PAIRS * X_PITCH + i % PAIRS * 2) : 0;
    __syncthreads();

    const long long begin = blockIdx.x * steps / gridDim.x, end = (blockIdx.x + 1) * steps / gridDim.x;
    const auto load = [&](long long step) {
        if (step < end) {
            const long long image = step / STEPS_IN_IMAGE;
            const int first_row = int(step - image * STEPS_IN_IMAGE) * STEP_ROWS;
            load_rows<Config::x_vector, C, X_ROWS, H, W>(x_raw, image_of(x, image, IMAGE), first_row - PAD_H);
            load_rows<Config::y_vector, M, STEP_ROWS, OH, OW>(y_raw, image_of(y, image, OUTPUTS), first_row);
        }
        commit_copies();
    };
    Sums sums;
    load(begin);
#pragma unroll 1
    for (long long step = begin; step < end; step++) {
        wait_for_copies<0>();
        __syncthreads();  // the raw rows have arrived, and no warp reads the words of the previous step
        Range of_x = range_of<X_FLOATS>(x_raw), of_y = range_of<Y_FLOATS>(y_raw);
        if (threadIdx.x % 32 == 0) ranges[0][threadIdx.x / 32] = of_x, ranges[1][threadIdx.x / 32] = of_y;
        __syncthreads();
        for (int i = 0; i < WARPS; i++) of_x.add(ranges[0][i]), of_y.add(ranges[1][i]);
        const int x_exponent = of_x.exponent(), y_exponent = of_y.exponent();
        const bool in_float32 = x_exponent == Range::UNSPLITTABLE || y_exponent == Range::UNSPLITTABLE;
        if (in_float32)
            sums.add_in_float32(x_raw, y_raw, min(STEP_ROWS, OH - int(step % STEPS_IN_IMAGE) * STEP_ROWS));
        else
            split_step(x_words, y_words, x_raw, y_raw, power_of_two(x_exponent), power_of_two(y_exponent));
        __syncthreads();  // the words are complete, and no warp reads the raw rows
        load(step + 1);
        if (!in_float32) sums.multiply_step(x_words, y_words, offsets, x_exponent + y_exponent);
    }

    float *const to = image_of(partials, blockIdx.x * SLICES + sums.slice, M * TAPS);
#pragma unroll
    for (int e = 0; e < 4 * TILES; e++) {
        const int tap = sums.tap(e / 4, e % 4), m = sums.filter(e / 4, e % 4);
        if (tap < TAPS && m < M) to[m * TAPS + tap] = sums.promoted[e / 4][e % 4];
    }
}

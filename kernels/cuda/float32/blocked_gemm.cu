// blocked_gemm: every convolution and both of its gradients as an implicit GEMM, its sums blocked in registers.
//
//                  rows             columns                          reduction
//     forward      M / G filters    images x OH x OW outputs         C / G x K x L taps
//     to the data  C / G channels   images x H x W pixels            M / G x K x L taps
//     to w         M / G filters    C / G x K x L taps               images x OH x OW outputs, in splits
//
//                   [ DEPTH x TILE_COLUMNS ] b       A block computes TILE_ROWS x TILE_COLUMNS outputs of one group.
//     [ TILE_ROWS ] [                      ]         Per step it loads DEPTH columns of a and rows of b into one stage
//     [ x DEPTH   ] [       sums           ]         of shared memory while it multiplies the other stage. A thread
//     [ a         ] [                      ]         has ROWS x COLUMNS sums.
//
// A data gradient with a stride consists of STRIDE_H x STRIDE_W smaller problems: a pixel h uses only the taps p with
// (h + PAD_H - p DILATE_H) % STRIDE_H == 0, which are the same for all pixels with the same h % STRIDE_H. For these
// pixels the rows of y are evenly spaced, so forward pass and data gradient sample their images in the same way: at row
// step x i + dilation x p.
//
// The weight gradient has few outputs and a long reduction. Each block adds one split of the reduction;
// partial_sums.cuh adds the splits in a fixed order, so every run has the same result. The error grows with the length
// of a split plus the number of splits, not with the whole reduction.
//
// Example, forward, 6 x 30 x 30 inputs and 16 filters of 5 x 5: a block computes 16 filters x 128 outputs in 19 steps
// of 8 of the 150 taps, a thread 4 x 4.
//
// Arithmetic intensity: an 8 x 8 thread tile multiplies 64 times for 16 floats from shared memory; the float32 lanes
// limit it. Index arithmetic, by constants, is about 10 instructions per loaded element, for TILE_ROWS products each.
// Source: S. Chetlur et al., cuDNN: Efficient Primitives for Deep Learning, 2014; V. Volkov, Better Performance at
// Lower Occupancy, 2010.
// Restrictions: none. If a weight is infinite, the gradient of a pixel near the border is NaN, because the kernel
// treats outputs that do not exist as zeros, and multiplies them.

constexpr bool DATA = Config::data_gradient;
constexpr int TILE_ROWS = Config::tile_rows, TILE_COLUMNS = Config::tile_columns, DEPTH = Config::depth;
constexpr int ROWS = Config::thread_rows, COLUMNS = Config::thread_columns;
constexpr int ROW_THREADS = TILE_ROWS / ROWS, COLUMN_THREADS = TILE_COLUMNS / COLUMNS;
constexpr int THREADS = ROW_THREADS * COLUMN_THREADS;
constexpr int A_LOADS = TILE_ROWS * DEPTH / THREADS, B_LOADS = TILE_COLUMNS * DEPTH / THREADS;
constexpr int VECTOR = COLUMNS < 4 ? COLUMNS : 4;  // neighbouring columns of a thread

constexpr int GROUP_CHANNELS = C / G, GROUP_FILTERS = M / G;
__device__ constexpr int common_divisor(int a, int b) { return b ? common_divisor(b, a % b) : a; }
constexpr int COMMON_H = DATA ? common_divisor(STRIDE_H, DILATE_H) : 1;
constexpr int COMMON_W = DATA ? common_divisor(STRIDE_W, DILATE_W) : 1;
// The distance between the taps that a pixel uses, and the most such taps.
constexpr int TAP_STEP_H = DATA ? STRIDE_H / COMMON_H : 1, TAPS_H = (K + TAP_STEP_H - 1) / TAP_STEP_H;
constexpr int TAP_STEP_W = DATA ? STRIDE_W / COMMON_W : 1, TAPS_W = (L + TAP_STEP_W - 1) / TAP_STEP_W;
// The size of the sampled images (y for the data gradient, else x), and the position of a sample by output and tap.
constexpr int SOURCE_CHANNELS = DATA ? GROUP_FILTERS : GROUP_CHANNELS;
constexpr int SOURCE_H = DATA ? OH : H, SOURCE_W = DATA ? OW : W;
constexpr int ROW_STEP = DATA ? 1 : STRIDE_H, ROW_DILATE = DATA ? -DILATE_H / COMMON_H : DILATE_H;
constexpr int COLUMN_STEP = DATA ? 1 : STRIDE_W, COLUMN_DILATE = DATA ? -DILATE_W / COMMON_W : DILATE_W;
constexpr index_t SOURCE_MAP = index_t(SOURCE_H) * SOURCE_W, SOURCE_IMAGE = DATA ? OUTPUTS : IMAGE;
constexpr bool BORDERS = DATA || PAD_H || PAD_W;  // some samples lie outside the image
// The outputs of one image that use the same taps: all of y, or every STRIDE_H-th row of x.
constexpr int CLASSES_W = DATA ? STRIDE_W : 1, CLASSES = DATA ? STRIDE_H * CLASSES_W : 1;
constexpr int MAP_H = DATA ? (H + STRIDE_H - 1) / STRIDE_H : OH, MAP_W = DATA ? (W + STRIDE_W - 1) / STRIDE_W : OW;
constexpr index_t MAP = index_t(MAP_H) * MAP_W;
constexpr int TAPS = SOURCE_CHANNELS * TAPS_H * TAPS_W;
constexpr int GEMM_ROWS = DATA ? GROUP_CHANNELS : GROUP_FILTERS, ROW_TILES = (GEMM_ROWS + TILE_ROWS - 1) / TILE_ROWS;

// One axis of the outputs that use the same taps: their first tap (beyond the filter if they use none), and the sample
// of output 0 and that tap.
struct Axis {
    int tap, sample;
};

__device__ __forceinline__ Axis axis_of(int residue, int stride, int pad, int dilate, int tap_step) {
    for (int tap = 0; DATA && tap < tap_step; tap++)
        if ((residue + pad - tap * dilate) % stride == 0) return {tap, (residue + pad - tap * dilate) / stride};
    return DATA ? Axis{1 << 24, 0} : Axis{0, -pad};
}

// An output's first sample: the maps of its group in its image, and the row and column there.
struct Window {
    const float *maps;
    int row, column;
};

// Return the sample of a window and tap, 0 outside the image or beyond the last tap.
__device__ __forceinline__ float sample(const Window &window, int tap, const Axis &rows, const Axis &columns) {
    const int c = tap / (TAPS_H * TAPS_W), p = tap / TAPS_W % TAPS_H, q = tap % TAPS_W;
    const int row = window.row + p * ROW_DILATE, column = window.column + q * COLUMN_DILATE;
    bool exists = tap < TAPS;
    if (DATA) exists = exists && rows.tap + p * TAP_STEP_H < K && columns.tap + q * TAP_STEP_W < L;
    if (BORDERS) exists = exists && unsigned(row) < unsigned(SOURCE_H) && unsigned(column) < unsigned(SOURCE_W);
    return exists ? __ldg(window.maps + c * SOURCE_MAP + index_t(row) * SOURCE_W + column) : 0.0f;
}

// The k and the rows of a that a thread loads.
__device__ __forceinline__ int a_depth() { return threadIdx.x % DEPTH; }
__device__ __forceinline__ int a_row(int n) { return threadIdx.x / DEPTH + n * (THREADS / DEPTH); }

// The operands of a forward pass or data gradient: a is w, b has samples. Neighbouring threads load neighbouring
// weights, and samples of neighbouring outputs.
struct WeightsAndSamples {
    const float *w;  // of the group
    int first_row, reduction;
    Axis rows, columns;
    Window window;  // of the thread's column

    static __device__ int b_depth(int n) { return threadIdx.x / TILE_COLUMNS + n * (THREADS / TILE_COLUMNS); }
    static __device__ int b_column(int) { return threadIdx.x % TILE_COLUMNS; }

    __device__ __forceinline__ void load(int step, float (&a)[A_LOADS], float (&b)[B_LOADS]) const {
        const int tap = step + a_depth(), m = tap / (TAPS_H * TAPS_W);
        const int p = rows.tap + tap / TAPS_W % TAPS_H * TAP_STEP_H, q = columns.tap + tap % TAPS_W * TAP_STEP_W;
        const bool exists = tap < TAPS && (!DATA || (p < K && q < L));
#pragma unroll
        for (int n = 0; n < A_LOADS; n++) {
            const int row = first_row + a_row(n);
            const index_t offset =
                DATA ? ((index_t(m) * GROUP_CHANNELS + row) * K + p) * L + q : row * index_t(TAPS) + tap;
            a[n] = exists && row < GEMM_ROWS ? __ldg(w + offset) : 0.0f;
        }
#pragma unroll
        for (int n = 0; n < B_LOADS; n++) b[n] = sample(window, step + b_depth(n), rows, columns);
    }
};

// The operands of a split of the weight gradient: a is y, b has samples of x. Neighbouring threads load from a and from
// b for neighbouring outputs.
struct OutputsAndSamples {
    const float *x, *y;  // of the group, in the image where the split begins
    index_t first_output;
    int first_row, first_tap, reduction;

    static __device__ int b_depth(int) { return a_depth(); }
    static __device__ int b_column(int n) { return a_row(n); }

    __device__ __forceinline__ void load(int step, float (&a)[A_LOADS], float (&b)[B_LOADS]) const {
        const bool exists = step + a_depth() < reduction;
        const index_t output = first_output + (exists ? step + a_depth() : 0), image = output / MAP;
        const index_t pixel = output - image * MAP;
        const int i = pixel / OW, j = pixel - index_t(i) * OW;
        const float *const y_pixel = image_of(y, image, OUTPUTS) + pixel;
        const Window window = {image_of(x, image, IMAGE), i * STRIDE_H - PAD_H, j * STRIDE_W - PAD_W};
#pragma unroll
        for (int n = 0; n < A_LOADS; n++) {
            const int row = first_row + a_row(n);
            a[n] = exists && row < GEMM_ROWS ? __ldg(y_pixel + row * PIXELS) : 0.0f;
        }
#pragma unroll
        for (int n = 0; n < B_LOADS; n++)
            b[n] = exists ? sample(window, first_tap + b_column(n), {0, 0}, {0, 0}) : 0.0f;
    }
};

// Row r and column c of the thread's sums in the tile: groups of 4 rows and of VECTOR columns, spread over the tile.
__device__ __forceinline__ int tile_row(int r) {
    return r / 4 * (ROW_THREADS * 4) + threadIdx.x / COLUMN_THREADS * 4 + r % 4;
}
__device__ __forceinline__ int tile_column(int c) {
    return c / VECTOR * (COLUMN_THREADS * VECTOR) + threadIdx.x % COLUMN_THREADS * VECTOR + c % VECTOR;
}

// Main loop: add the products of the whole reduction to the thread's sums.
template <typename Operands>
__device__ __forceinline__ void multiply(const Operands &operands, float (&sum)[ROWS][COLUMNS]) {
    // A warp stores a column of a: 4 floats of padding per row keep its stores in different banks.
    __shared__ __align__(16) float shared_a[2][DEPTH][TILE_ROWS + 4], shared_b[2][DEPTH][TILE_COLUMNS + 4];
    float a_next[A_LOADS], b_next[B_LOADS];
    const auto store = [&](int stage) {
#pragma unroll
        for (int n = 0; n < A_LOADS; n++) shared_a[stage][a_depth()][a_row(n)] = a_next[n];
#pragma unroll
        for (int n = 0; n < B_LOADS; n++) shared_b[stage][Operands::b_depth(n)][Operands::b_column(n)] = b_next[n];
    };
#pragma unroll
    for (int i = 0; i < ROWS * COLUMNS; i++) sum[i / COLUMNS][i % COLUMNS] = 0.0f;
    if (operands.reduction == 0) return;
    operands.load(0, a_next, b_next);
    store(0);
    __syncthreads();
    int stage = 0;
#pragma unroll 1
    for (int step = DEPTH;; step += DEPTH, stage ^= 1) {
        const bool more = step < operands.reduction;
        if (more) operands.load(step, a_next, b_next);
#pragma unroll
        for (int k = 0; k < DEPTH; k++) {
            float a[ROWS], b[COLUMNS];
#pragma unroll
            for (int r = 0; r < ROWS; r += 4) read<4>(a + r, &shared_a[stage][k][tile_row(r)]);
#pragma unroll
            for (int c = 0; c < COLUMNS; c += VECTOR) read<VECTOR>(b + c, &shared_b[stage][k][tile_column(c)]);
#pragma unroll
            for (int i = 0; i < ROWS * COLUMNS; i++)
                sum[i / COLUMNS][i % COLUMNS] = fmaf(a[i / COLUMNS], b[i % COLUMNS], sum[i / COLUMNS][i % COLUMNS]);
        }
        if (!more) return;
        store(stage ^ 1);  // no thread reads that stage since the last barrier
        __syncthreads();
    }
}

#ifndef WEIGHT_GRADIENT
// Fill `out`, y or the gradient x, from the samples of `source`, x or the gradient y.
extern "C" __global__ void __launch_bounds__(THREADS, Config::blocks)
blocked_gemm(const float *__restrict__ source, const float *__restrict__ w, float *__restrict__ out, long long first,
             int images) {
    // Blocks that share their samples are neighbours.
    const int row_tile = blockIdx.x % ROW_TILES, rest = blockIdx.x / ROW_TILES, group = rest % G;
    const int residue = rest / G % CLASSES, residue_h = residue / CLASSES_W, residue_w = residue % CLASSES_W;
    const long long begin = (long long)(rest / (G * CLASSES)) * TILE_COLUMNS, outputs = images * (long long)MAP;
    const long long first_image = begin / MAP;
    const index_t first_output = begin - first_image * MAP;

    WeightsAndSamples operands;
    operands.w = w + index_t(group) * GROUP_FILTERS * GROUP_CHANNELS * (K * L);
    operands.first_row = row_tile * TILE_ROWS;
    operands.rows = axis_of(residue_h, STRIDE_H, PAD_H, DILATE_H, TAP_STEP_H);
    operands.columns = axis_of(residue_w, STRIDE_W, PAD_W, DILATE_W, TAP_STEP_W);
    operands.reduction = operands.rows.tap < K && operands.columns.tap < L ? TAPS : 0;
    {
        const int column = WeightsAndSamples::b_column(0);
        const index_t output = first_output + (begin + column < outputs ? column : 0), image = output / MAP;
        const index_t pixel = output - image * MAP;
        const int i = pixel / MAP_W, j = pixel - index_t(i) * MAP_W;
        operands.window = {image_of(source, first + first_image + image, SOURCE_IMAGE) +
                               index_t(group) * SOURCE_CHANNELS * SOURCE_MAP,
                           i * ROW_STEP + operands.rows.sample, j * COLUMN_STEP + operands.columns.sample};
    }
    float sum[ROWS][COLUMNS];
    multiply(operands, sum);

    constexpr int STORE = Config::store_vector;
    constexpr index_t OUT_MAP = DATA ? index_t(H) * W : PIXELS;
#pragma unroll
    for (int c = 0; c < COLUMNS; c += STORE) {
        if (begin + tile_column(c) >= outputs) continue;
        const index_t output = first_output + tile_column(c), image = output / MAP, pixel = output - image * MAP;
        index_t offset = pixel;
        if (DATA && CLASSES > 1) {
            const int i = pixel / MAP_W, h = i * STRIDE_H + residue_h;
            const int column = int(pixel - index_t(i) * MAP_W) * STRIDE_W + residue_w;
            if (h >= H || column >= W) continue;
            offset = index_t(h) * W + column;
        }
        float *const to = image_of(out, first + first_image + image, G * GEMM_ROWS * OUT_MAP) +
                          index_t(group * GEMM_ROWS + operands.first_row) * OUT_MAP + offset;
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            if (operands.first_row + tile_row(r) >= GEMM_ROWS) continue;
            float *const target = to + tile_row(r) * OUT_MAP;
            write<STORE>(target, &sum[r][c]);
        }
    }
}
#else
// Fill partials [split][M][taps] with the sums of each split: `length` of the `outputs` of all images.
extern "C" __global__ void __launch_bounds__(THREADS, Config::blocks)
blocked_gemm_weights(const float *__restrict__ x, const float *__restrict__ y, float *__restrict__ partials,
                     long long outputs, long long length) {
    constexpr int COLUMN_TILES = (TAPS + TILE_COLUMNS - 1) / TILE_COLUMNS;
    // Blocks of one split are neighbours.
    const int row_tile = blockIdx.x % ROW_TILES, column_tile = blockIdx.x / ROW_TILES % COLUMN_TILES;
    const int group = blockIdx.x / (ROW_TILES * COLUMN_TILES) % G, split = blockIdx.x / (ROW_TILES * COLUMN_TILES * G);
    const long long begin = split * length, first_image = begin / MAP;

    OutputsAndSamples operands;
    operands.x = image_of(x, first_image, IMAGE) + group * GROUP_CHANNELS * SOURCE_MAP;
    operands.y = image_of(y, first_image, OUTPUTS) + group * GROUP_FILTERS * PIXELS;
    operands.first_output = begin - first_image * MAP;
    operands.first_row = row_tile * TILE_ROWS;
    operands.first_tap = column_tile * TILE_COLUMNS;
    operands.reduction = min(length, outputs - begin);
    float sum[ROWS][COLUMNS];
    multiply(operands, sum);

    float *const to = image_of(partials, split, index_t(M) * TAPS) + index_t(group) * GROUP_FILTERS * TAPS;
#pragma unroll
    for (int r = 0; r < ROWS; r++)
#pragma unroll
        for (int c = 0; c < COLUMNS; c++) {
            const int row = operands.first_row + tile_row(r), tap = operands.first_tap + tile_column(c);
            if (row < GEMM_ROWS && tap < TAPS) to[row * index_t(TAPS) + tap] = sum[r][c];
        }
}
#endif

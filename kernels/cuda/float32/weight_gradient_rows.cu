// weight_gradient_rows: the weight gradient of a layer with few filters and channels, all of its sums in registers.
//
//     w[m, c, p, q] = sum over images and outputs i, j of y[b, m, i, j] * x[b, c, i + p - PAD_H, j + q - PAD_W]
//
//     y row i        [ . . . 4 outputs . . . ]             of FILTERS filters, read from shared memory as vectors
//     x row i + p    [ . . . 4 + L - 1 pixels . . ]        a window in registers that slides by 4 pixels
//
// w and y are the gradients to the filters and to the output; L is a filter's columns. A thread has the sums of FILTERS
// filters, one channel and one filter row p, FILTERS x L of them; C x K x FILTER_GROUPS threads have all sums of the
// layer, so one block reads an image once. A block has SLICES such sets of threads, each for other output rows. It goes
// through a share of the images in steps of STEP_ROWS output rows, and copies the next STAGES - 1 steps while it
// computes. At the end the slices are added one after another, and partial_sums.cuh adds the blocks.
//
// Example, 28 x 28 inputs and 50 filters of 5 x 5: a thread has 13 x 5 sums, 5 x 4 threads have all sums, and 3 slices
// of these threads fill 64 threads, which take 3 output rows per step.
//
// Arithmetic intensity: 2 C K L FLOP per element of y, which is read once; x is read once, with K - 1 more rows per
// step. From shared memory, FILTERS + 1 vectors per 4 FILTERS L multiply-adds, so the float32 lanes limit it, or memory
// with one channel.
// Source: A. Lavin, maxDNN, 2015 (weight gradients); V. Volkov, Better Performance at Lower Occupancy, 2010.
// Restrictions: stride 1, no dilation, no convolution groups (G is 1); all sums and two stages fit a block.

constexpr int FILTERS = Config::filters, FILTER_GROUPS = (M + FILTERS - 1) / FILTERS;
constexpr int STAGES = Config::stages, SLICES = Config::slices, STEP_ROWS = Config::step_rows;
constexpr int SET_THREADS = C * K * FILTER_GROUPS;
constexpr int THREADS = (SET_THREADS * SLICES + 31) / 32 * 32;
constexpr int STEPS_IN_IMAGE = (OH + STEP_ROWS - 1) / STEP_ROWS;
constexpr int WINDOW = (L + 6) / 4 * 4;  // 4 + L - 1 pixels in whole vectors
constexpr int X_ROWS = STEP_ROWS + K - 1, X_PITCH = Config::x_pitch, Y_PITCH = Config::y_pitch;
constexpr int X_FLOATS = C * X_ROWS * X_PITCH, STAGE_FLOATS = X_FLOATS + FILTER_GROUPS * FILTERS * STEP_ROWS * Y_PITCH;
constexpr int WEIGHTS = M * C * K * L;

// Load: issue copies of a step's output rows and of the padded rows of x that they need. Rows of x outside the image
// become zeros.
__device__ __forceinline__ void load_step(float *to, const float *x, const float *y, int first_row) {
    constexpr int X_VECTOR = Config::x_vector, Y_VECTOR = Config::y_vector;
    constexpr int X_COPIES = (W + 2 * PAD_W) / X_VECTOR, Y_COPIES = OW / Y_VECTOR;
    const int rows = min(STEP_ROWS, OH - first_row);
    for (int e = threadIdx.x; e < C * X_ROWS * X_COPIES; e += THREADS) {
        const int line = e / X_COPIES, c = line / X_ROWS, row = line % X_ROWS;
        const int column = (e - line * X_COPIES) * X_VECTOR;
        const int h = first_row + row - PAD_H, w = column - PAD_W;
        float *const target = to + line * X_PITCH + column;
        if (h >= 0 && h < H && w >= 0 && w < W)
            copy_async<X_VECTOR>(target, x + (c * index_t(H) + h) * W + w);
        else if (PAD_H > 0 || PAD_W > 0)
            *target = 0.0f;
    }
    for (int e = threadIdx.x; e < M * rows * Y_COPIES; e += THREADS) {
        const int line = e / Y_COPIES, m = line / rows, row = line - m * rows;
        const int column = (e - line * Y_COPIES) * Y_VECTOR;
        copy_async<Y_VECTOR>(to + X_FLOATS + (m * STEP_ROWS + row) * Y_PITCH + column,
                             y + (m * index_t(OH) + first_row + row) * OW + column);
    }
}

// Fill partials [block][M][C][K][L] with the sums over the block's share of the steps. `steps`: those of all images.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
weight_gradient_rows(const float *__restrict__ x, const float *__restrict__ y, float *__restrict__ partials,
                     long long steps) {
    extern __shared__ __align__(16) float shared[];  // [STAGES][STAGE_FLOATS], at the end [WEIGHTS]
    const int slice = threadIdx.x / SET_THREADS, in_set = threadIdx.x % SET_THREADS, group = in_set / (C * K);
    const int c = in_set / K % C, p = in_set % K;
    const long long begin = blockIdx.x * steps / gridDim.x, end = (blockIdx.x + 1) * steps / gridDim.x;

    float sum[FILTERS][L];
#pragma unroll
    for (int i = 0; i < FILTERS * L; i++) sum[i / L][i % L] = 0.0f;

    const auto load = [&](long long step) {
        if (step < end) {
            const long long image = step / STEPS_IN_IMAGE;
            load_step(shared + int((step - begin) % STAGES) * STAGE_FLOATS, image_of(x, image, IMAGE),
                      image_of(y, image, OUTPUTS), int(step - image * STEPS_IN_IMAGE) * STEP_ROWS);
        }
        commit_copies();
    };
    // Main loop: add the products of one output row.
    const auto add_row = [&](const float *x_row, const float *y_row) {
        float window[WINDOW];
        const auto add = [&](int column, int outputs) {
            read<4>(window + WINDOW - 4, x_row + column + WINDOW - 4);
#pragma unroll
            for (int f = 0; f < FILTERS; f++) {
                float gradient[4];
                read<4>(gradient, y_row + f * (STEP_ROWS * Y_PITCH) + column);
#pragma unroll
                for (int j = 0; j < 4; j++)
#pragma unroll
                    for (int q = 0; q < L; q++)
                        if (j < outputs) sum[f][q] = fmaf(gradient[j], window[j + q], sum[f][q]);
            }
#pragma unroll
            for (int i = 0; i < WINDOW - 4; i++) window[i] = window[i + 4];
        };
#pragma unroll
        for (int i = 0; i < WINDOW - 4; i += 4) read<4>(window + i, x_row + i);
#pragma unroll 1
        for (int column = 0; column < OW / 4 * 4; column += 4) add(column, 4);
        // Add only the outputs that exist: padded with zeros to four, they would turn an infinite pixel into NaN.
        if (OW % 4) add(OW / 4 * 4, OW % 4);
    };

    for (int stage = 0; stage < STAGES - 1; stage++) load(begin + stage);
#pragma unroll 1
    for (long long step = begin; step < end; step++) {
        wait_for_copies<STAGES - 2>();
        __syncthreads();  // the step is complete, and no warp reads the one before it
        load(step + STAGES - 1);
        const int rows = min(STEP_ROWS, OH - int(step % STEPS_IN_IMAGE) * STEP_ROWS);
        const float *const x_rows = shared + int((step - begin) % STAGES) * STAGE_FLOATS, *const y_rows = x_rows + X_FLOATS;
        if (slice < SLICES)
#pragma unroll 1
            for (int row = slice; row < rows; row += SLICES)
                add_row(x_rows + (c * X_ROWS + row + p) * X_PITCH, y_rows + (group * FILTERS * STEP_ROWS + row) * Y_PITCH);
    }
    __syncthreads();

    // Epilogue: add the slices in shared memory, in order.
    for (int turn = 0; turn < SLICES; turn++) {
        if (slice == turn)
#pragma unroll
            for (int f = 0; f < FILTERS; f++)
#pragma unroll
                for (int q = 0; q < L; q++) {
                    const int m = group * FILTERS + f, e = ((m * C + c) * K + p) * L + q;
                    if (m < M) shared[e] = turn ? shared[e] + sum[f][q] : sum[f][q];
                }
        __syncthreads();
    }
    float *const to = image_of(partials, blockIdx.x, WEIGHTS);
    for (int e = threadIdx.x; e < WEIGHTS; e += THREADS) to[e] = shared[e];
}

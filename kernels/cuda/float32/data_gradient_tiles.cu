// data_gradient_tiles: the data gradient of a layer with few channels, as a direct convolution of the output gradient,
// bordered with zeros, by the flipped filters.
//
//     x[b, c, h, w] = sum over m, p', q' of bordered y[b, m, h + p', w + q'] * w[m, c, K - 1 - p', L - 1 - q']
//
//     bordered y    [ (ROWS + K - 1) x (COLUMNS + L - 1) ]   row after row from shared memory, as vectors
//     x             [ ROWS x COLUMNS sums ] x CHANNELS       of a thread, in two levels: PROMOTION filters, and all
//
// A block computes whole images, IMAGES at a time, for CHANNEL_GROUPS groups of channels. It goes through the filters
// in steps of STEP_FILTERS maps of y, and copies the next STAGES - 1 steps while it computes. The borders in shared
// memory are zeroed once: the copies never touch them. All weights stay in shared memory, flipped.
//
// Example, 28 x 28 inputs and 50 filters of 5 x 5: a thread computes 7 x 4 pixels, a block of 256 threads 9 images, one
// map of y per step; the sums are promoted after 6 filters.
//
// Arithmetic intensity: 2 C K L FLOP per element of y, and per zero of its borders; y is read and x written once.
// With one channel, a row of y in registers serves up to ROWS rows of taps; with several, all of them. The float32
// lanes limit it, or memory with one channel.
// Source: V. Volkov, Better Performance at Lower Occupancy, 2010 (outputs per thread).
// Restrictions: stride 1, no dilation, one group, less padding than taps; the weights and two maps fit a block.

constexpr int ROWS = Config::rows, COLUMNS = Config::columns, CHANNELS = Config::channels;
constexpr int IMAGES = Config::images, STAGES = Config::stages;
constexpr int STEP_FILTERS = Config::step_filters, STEPS = (M + STEP_FILTERS - 1) / STEP_FILTERS;  // of IMAGES images
constexpr int CHANNEL_GROUPS = (C + CHANNELS - 1) / CHANNELS;
constexpr int TILES_IN_ROW = (W + COLUMNS - 1) / COLUMNS, TILES = (H + ROWS - 1) / ROWS * TILES_IN_ROW;
constexpr int USED = IMAGES * CHANNEL_GROUPS * TILES, THREADS = (USED + 31) / 32 * 32;
constexpr int TOP = K - 1 - PAD_H, LEFT = L - 1 - PAD_W;          // zeros above and before y
constexpr int SHIFT = (4 - LEFT % 4) % 4;                         // moves y to whole vectors
constexpr int ROW_FLOATS = (SHIFT + COLUMNS + L - 1 + 3) / 4 * 4;  // a row of a thread's window, in whole vectors
constexpr int PITCH = Config::pitch, MAP_ROWS = Config::map_rows, MAP_FLOATS = MAP_ROWS * PITCH;
// Floats from one image to the next. Neighbouring threads go on from a row of one image to the same row of the next
// image: with this pitch, the latter begins in the bank after the former's last.
constexpr int IMAGE_FLOATS = STEP_FILTERS * MAP_FLOATS;
constexpr int IMAGE_PITCH = IMAGE_FLOATS + (TILES_IN_ROW * COLUMNS % 32 + 32 - IMAGE_FLOATS % 32) % 32;
constexpr int STAGE_FLOATS = IMAGES * IMAGE_PITCH;
constexpr int TAP_PITCH = (L + 3) / 4 * 4, FILTER_FLOATS = CHANNEL_GROUPS * CHANNELS * K * TAP_PITCH;
constexpr int PROMOTION = Config::promotion;  // filters from one promotion of the sums to the next
constexpr int COPY = Config::copy_vector, STORE = Config::store_vector;

// Load: issue copies of STEP_FILTERS maps of each of `images` images to shared memory, inside their borders.
__device__ __forceinline__ void load_step(float *to, const float *y, int first_filter, int images) {
    constexpr int COPIES = OW / COPY;
    const int filters = min(STEP_FILTERS, M - first_filter);
    for (int e = threadIdx.x; e < images * filters * (OH * COPIES); e += THREADS) {
        const int line = e / COPIES, column = (e - line * COPIES) * COPY, map = line / OH, row = line - map * OH;
        const int image = map / filters, f = map - image * filters;
        copy_async<COPY>(to + image * IMAGE_PITCH + f * MAP_FLOATS + (row + TOP) * PITCH + LEFT + SHIFT + column,
                         image_of(y, image, OUTPUTS) + ((first_filter + f) * index_t(OH) + row) * OW + column);
    }
}

// Compute one image if a weight is infinite or NaN: like the definition, this skips the taps outside y, instead of
// multiplying such a weight by the borders' zeros. The sums have two levels: the taps of a filter, and the filters.
__device__ __forceinline__ void compute_without_borders(const float *y, const float *w, float *x) {
    for (index_t e = threadIdx.x; e < IMAGE; e += THREADS) {
        const int c = e / (index_t(H) * W), h = e / W % H, column = e % W;
        float sum = 0.0f;
#pragma unroll 1
        for (int m = 0; m < M; m++) {
            float filter_sum = 0.0f;
#pragma unroll 1
            for (int p = 0; p < K; p++)
#pragma unroll 1
                for (int q = 0; q < L; q++) {
                    const int i = h + PAD_H - p, j = column + PAD_W - q;
                    if (unsigned(i) < unsigned(OH) && unsigned(j) < unsigned(OW))
                        filter_sum = fmaf(y[m * PIXELS + i * OW + j], w[((m * C + c) * K + p) * L + q], filter_sum);
                }
            sum += filter_sum;
        }
        x[e] = sum;
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, Config::blocks)
data_gradient_tiles(const float *__restrict__ y, const float *__restrict__ w, float *__restrict__ x, long long first,
                    int images) {
    extern __shared__ __align__(16) float shared[];
    float *const maps = shared, *const weights = shared + STAGES * STAGE_FLOATS;  // [STAGES][STAGE_FLOATS], [M][FILTER_FLOATS]
    for (int e = threadIdx.x; e < STAGES * STAGE_FLOATS; e += THREADS) maps[e] = 0.0f;
    bool infinite = false;
    for (int e = threadIdx.x; e < M * FILTER_FLOATS; e += THREADS) {
        const int q = e % TAP_PITCH, p = e / TAP_PITCH % K, c = e / (TAP_PITCH * K) % (CHANNEL_GROUPS * CHANNELS);
        const int m = e / FILTER_FLOATS;
        weights[e] = q < L && c < C ? __ldg(w + ((m * C + c) * K + K - 1 - p) * L + L - 1 - q) : 0.0f;
        infinite = infinite || weights[e] - weights[e] != 0.0f;  // NaN, too
    }
    if (__syncthreads_or(infinite)) {  // such a weight times a zero of the borders is NaN
        for (int n = blockIdx.x; n < images; n += gridDim.x)
            compute_without_borders(image_of(y, first + n, OUTPUTS), w, image_of(x, first + n, IMAGE));
        return;
    }

    // A warp has few rows, so that its threads skip the same rows of taps: those that read only the zeros above or
    // below y.
    const int thread = min(int(threadIdx.x), USED - 1), column = thread % TILES_IN_ROW * COLUMNS;
    const int group = thread / TILES_IN_ROW % CHANNEL_GROUPS, image = thread / (TILES_IN_ROW * CHANNEL_GROUPS) % IMAGES;
    const int row = thread / (TILES_IN_ROW * CHANNEL_GROUPS * IMAGES) * ROWS;
    const int first_i = ROWS > 1 ? 0 : max(0, TOP - row), end_i = ROWS > 1 ? ROWS + K - 1 : min(K, TOP + OH - row);
    const float *const window = maps + image * IMAGE_PITCH + row * PITCH + column;

    const int items = (images + IMAGES - 1) / IMAGES;
    // The number of steps of all of the block's items.
    const int own_steps = blockIdx.x < items ? (items - 1 - int(blockIdx.x)) / int(gridDim.x) * STEPS + STEPS : 0;
    const auto load = [&](int step) {
        if (step < own_steps) {
            const int item = blockIdx.x + step / STEPS * gridDim.x;
            load_step(maps + step % STAGES * STAGE_FLOATS, image_of(y, first + item * (long long)IMAGES, OUTPUTS),
                      step % STEPS * STEP_FILTERS, min(IMAGES, images - item * IMAGES));
        }
        commit_copies();
    };
    for (int stage = 0; stage < STAGES - 1; stage++) load(stage);
    int step = 0;
#pragma unroll 1
    for (int item = blockIdx.x; item < items; item += gridDim.x) {
        float sum[CHANNELS][ROWS][COLUMNS] = {}, promoted[CHANNELS][ROWS][COLUMNS] = {};
        int filters_added = 0;  // since the last promotion
#pragma unroll 1
        for (int first_filter = 0; first_filter < M; first_filter += STEP_FILTERS, step++) {
            wait_for_copies<STAGES - 2>();
            __syncthreads();  // the step is complete, and no warp reads the one before it
            load(step + STAGES - 1);
            const int filters = min(STEP_FILTERS, M - first_filter);
            const float *from = window + step % STAGES * STAGE_FLOATS;
            const float *filter_weights = weights + first_filter * FILTER_FLOATS + group * (CHANNELS * K * TAP_PITCH);
            // Main loop: a filter's taps. With one row of sums per thread, no tap serves two rows of y.
#pragma unroll 1
            for (int f = 0; f < filters; f++, from += MAP_FLOATS, filter_weights += FILTER_FLOATS) {
#pragma unroll(ROWS > 1 ? ROWS + K - 1 : 1)
                for (int i = first_i; i < end_i; i++) {
                    float input[ROW_FLOATS];
#pragma unroll
                    for (int j = 0; j < ROW_FLOATS; j += 4) read<4>(input + j, from + i * PITCH + j);
#pragma unroll
                    for (int c = 0; c < CHANNELS; c++)
#pragma unroll
                        for (int r = 0; r < ROWS; r++) {
                            if (i - r < 0 || i - r >= K) continue;
                            float weight[TAP_PITCH];
#pragma unroll
                            for (int q = 0; q < TAP_PITCH; q += 4)
                                read<4>(weight + q, filter_weights + (c * K + i - r) * TAP_PITCH + q);
#pragma unroll
                            for (int q = 0; q < L; q++)
#pragma unroll
                                for (int j = 0; j < COLUMNS; j++)
                                    sum[c][r][j] = fmaf(input[SHIFT + j + q], weight[q], sum[c][r][j]);
                        }
                }
            }
            if ((filters_added += filters) < PROMOTION && first_filter + STEP_FILTERS < M) continue;
            filters_added = 0;
#pragma unroll
            for (int i = 0; i < CHANNELS * ROWS * COLUMNS; i++) {
                float &filter_sum = sum[i / (ROWS * COLUMNS)][i / COLUMNS % ROWS][i % COLUMNS];
                promoted[i / (ROWS * COLUMNS)][i / COLUMNS % ROWS][i % COLUMNS] += filter_sum;
                filter_sum = 0.0f;
            }
        }
        // Epilogue.
        if (threadIdx.x >= USED || item * IMAGES + image >= images) continue;
        float *const to = image_of(x, first + item * (long long)IMAGES + image, IMAGE);
#pragma unroll
        for (int c = 0; c < CHANNELS; c++)
#pragma unroll
            for (int r = 0; r < ROWS; r++) {
                if (group * CHANNELS + c >= C || row + r >= H) continue;
                float *const target = to + ((group * CHANNELS + c) * index_t(H) + row + r) * W + column;
#pragma unroll
                for (int j = 0; j < COLUMNS; j += STORE)
                    if (column + j < W) write<STORE>(target + j, &promoted[c][r][j]);
            }
    }
}

// register_blocked: direct convolution along rows, register-blocked: a thread computes a strip of one output row for
// several filters, with its sums, inputs and weights in registers.
//
//     x row   [ . . . STRIP + K - 1 inputs . . . ]     read once per filter row, for K taps
//     y row     [ . . .  STRIP sums  . . . ]           x FILTERS:   sum[f][j] += x[j + q] * w[f][q]
//
// The strips of all images follow one another: STRIPS_IN_ROW per row, OH rows per image. A block computes STRIPS
// neighbouring strips, which may begin and end within an image, for FILTER_GROUPS * PASSES groups of FILTERS filters:
//
//                    32 strips   32 strips
//     group 0        warp 0      warp 1        The lanes of a warp have different strips and the same filters, so a
//     group 1        warp 2      warp 3        weight is the same for the whole warp. With PASSES > 1 a warp computes
//                                              that many groups one after another.
//
//     global memory --cp.async--> input rows of CHANNELS channels in shared memory --> registers: main loop
//     --> epilogue: shared memory, so that a warp stores neighbouring floats --> y (non-temporal stores)
//
// Example, 6 x 30 x 30 inputs and 16 filters of 5 x 5: a strip is a whole row of 26 outputs, a thread has 26 x 4 sums,
// and a block of 4 warps, one per group of 4 filters, computes 32 rows. All channels lie in shared memory, 44 rows
// each.
//
// A block goes on to its next strips, `stride` items further. With PASSES == 1 it loads their input during the
// epilogue; meanwhile other blocks of the multiprocessor multiply.
//
// UNIFORM (register_blocked_uniform): all weights lie in constant memory and reach the multiply-adds through uniform
// registers. A multiply-add then reads two vector registers at most.
//
// Arithmetic intensity: 2 C K K FLOP per output; from shared memory, STRIP + K - 1 inputs and K FILTERS weights per
// K STRIP FILTERS multiply-adds: with STRIP 13, FILTERS 8, K 5, 520 of 552 instructions are multiply-adds. From global
// memory, x once per block of filters, with K - 1 more rows per block; y once. The register file limits it: a
// multiply-add with three operands from the register banks takes two cycles, so a weight serves STRIP multiply-adds in
// a row, and the next weight begins with the pixel that the previous one ended with (docs/performance.md).
// Source: V. Volkov, Better Performance at Lower Occupancy, 2010; S. Gray, the SGEMM of maxas, 2014 (register banks and
// the operand cache).
// Restrictions: plain convolutions only (stride 1, no padding or dilation, square filters, no groups); a tile fits
// shared memory; UNIFORM: the weights fit constant memory.

constexpr int STRIP = Config::strip_pixels, FILTERS = Config::filters, FILTER_GROUPS = Config::filter_groups;
constexpr int PASSES = Config::passes, STRIPS = Config::strips, CHANNELS = Config::channels;
constexpr int ROW_PITCH = Config::row_pitch;
constexpr int WARPS_PER_GROUP = STRIPS / 32, THREADS = 32 * WARPS_PER_GROUP * FILTER_GROUPS;
constexpr int STRIPS_IN_ROW = (OW + STRIP - 1) / STRIP, STRIPS_IN_IMAGE = OH * STRIPS_IN_ROW;
constexpr int BLOCK_FILTERS = FILTERS * FILTER_GROUPS * PASSES, FILTER_BLOCKS = (M + BLOCK_FILTERS - 1) / BLOCK_FILTERS;
constexpr int CHUNKS = (C + CHANNELS - 1) / CHANNELS;         // of channels
constexpr int UNROLLED_COPIES = CHUNKS == 1 && C <= 8 ? C : 4;
constexpr int INPUTS = STRIP + K - 1;                         // of a strip and filter row
constexpr int INPUT_FLOATS = (INPUTS + Config::input_vector - 1) / Config::input_vector * Config::input_vector;
constexpr int WEIGHT_FLOATS = (K * FILTERS + 3) / 4 * 4;      // of a filter row for FILTERS filters, padded
constexpr int CHANNEL_PITCH = Config::rows * ROW_PITCH;       // floats of one channel in shared memory
constexpr int CHUNK_INPUTS = (CHANNELS * CHANNEL_PITCH + Config::input_slack + 3) / 4 * 4;
constexpr int CHUNK_WEIGHTS = UNIFORM ? 0 : PASSES * FILTER_GROUPS * CHANNELS * K * WEIGHT_FLOATS;
constexpr int OUTPUT_FLOATS = 32 * STRIP;                     // that a warp stages for one filter
constexpr int STORE = Config::store_vector, STORES = (OUTPUT_FLOATS / STORE + 31) / 32;  // of a lane for one filter
static_assert(PASSES == 1 || CHUNKS == 1, "a pass adds and stores all channels' products");
constexpr bool WHOLE_ROWS = OW % STRIP == 0;                  // strips cover their rows exactly
constexpr bool KEEP_ADDRESSES = STORES <= 8;                  // registers suffice for the stores' addresses

// A block's strips: `count` of them from strip `first` of the image on.
struct BlockStrips {
    int image, first, count;
};

// A strip's row, counted through the images from the block's first one on, and its first column.
struct StripPosition {
    int row, column;
};

__device__ __forceinline__ BlockStrips strips_of(unsigned item, int images) {
    const unsigned start = item * STRIPS;
    BlockStrips s;
    s.image = start / STRIPS_IN_IMAGE;
    s.first = start - s.image * STRIPS_IN_IMAGE;
    const unsigned left = images * unsigned(STRIPS_IN_IMAGE) - start;
    s.count = left < STRIPS ? left : STRIPS;
    return s;
}

// Load: issue copies of all rows that the strips need, for the chunk's channels. In shared memory the rows are
// contiguous, each image's after those of the previous image.
__device__ __forceinline__ void load_rows(float *to, const float *x, const BlockStrips &s, int first_channel) {
    constexpr int VECTOR = Config::copy_vector;
    const int first_row = s.first / STRIPS_IN_ROW, last_row = (s.first + s.count - 1) / STRIPS_IN_ROW;
    const int rows = last_row / OH * H + last_row % OH + K - first_row;
    constexpr int WIDTH = W / VECTOR;
    const float *from = image_of(x, s.image, IMAGE) + index_t(first_channel) * (H * index_t(W));
    const int channels = CHUNKS == 1 ? C : min(CHANNELS, C - first_channel);
    for (int e = threadIdx.x; e < rows * WIDTH; e += THREADS) {
        const int row = e / WIDTH, column = (e - row * WIDTH) * VECTOR;
        const int x_row = first_row + row, image = x_row / H;
        const float *source = from + image * IMAGE + (x_row - image * H) * index_t(W) + column;
        float *target = to + row * ROW_PITCH + column;
#pragma unroll UNROLLED_COPIES
        for (int c = 0; c < channels; c++)
            copy_async<VECTOR>(target + c * CHANNEL_PITCH, source + c * (H * index_t(W)));
    }
}

// Load: fill [group][channel][p][q][filter] with the chunk's weights, padded with zeros.
__device__ __forceinline__ void load_weights(float *to, const float *w, int first_filter, int first_channel) {
    for (int e = threadIdx.x; e < CHUNK_WEIGHTS; e += THREADS) {
        const int in_row = e % WEIGHT_FLOATS, p = e / WEIGHT_FLOATS % K, c = e / (WEIGHT_FLOATS * K) % CHANNELS;
        const int group = e / (WEIGHT_FLOATS * K * CHANNELS);
        const int q = in_row / FILTERS, m = first_filter + group * FILTERS + in_row % FILTERS;
        const bool exists = q < K && m < M && first_channel + c < C;
        to[e] = exists ? __ldg(w + (index_t(m) * C + first_channel + c) * (K * K) + p * K + q) : 0.0f;
    }
}

constexpr int WEIGHT_VECTOR = UNIFORM ? 2 : 4;  // floats of one load of weights
#if UNIFORM
constexpr int ALL_WEIGHTS = FILTER_BLOCKS * PASSES * FILTER_GROUPS * C * K * WEIGHT_FLOATS;
__constant__ __align__(16) float uniform_weights[ALL_WEIGHTS];

// Arrange w as uniform_weights has it: [group][channel][p][q][filter], padded with zeros.
extern "C" __global__ void __launch_bounds__(256)
register_blocked_weights(const float *__restrict__ w, float *__restrict__ to) {
    for (int e = blockIdx.x * 256 + threadIdx.x; e < ALL_WEIGHTS; e += gridDim.x * 256) {
        const int in_row = e % WEIGHT_FLOATS, p = e / WEIGHT_FLOATS % K, c = e / (WEIGHT_FLOATS * K) % C;
        const int q = in_row / FILTERS, m = e / (WEIGHT_FLOATS * K * C) * FILTERS + in_row % FILTERS;
        to[e] = q < K && m < M ? w[(index_t(m) * C + c) * (K * K) + p * K + q] : 0.0f;
    }
}
#endif

extern "C" __global__ void __launch_bounds__(THREADS, Config::blocks)
register_blocked(const float *__restrict__ x, const float *__restrict__ w, float *__restrict__ y, long long first,
                 int images) {
    extern __shared__ __align__(16) float shared[];
    float *const x_rows = shared;                  // [CHUNK_INPUTS]
    float *const weights = shared + CHUNK_INPUTS;  // [CHUNKS or 1][CHUNK_WEIGHTS]
    float *const all_staged = weights + (Config::keep_weights ? CHUNKS : 1) * CHUNK_WEIGHTS;  // [warp][OUTPUT_FLOATS]

    const unsigned items = (images * unsigned(STRIPS_IN_IMAGE) + STRIPS - 1) / STRIPS;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int warp_strip = warp % WARPS_PER_GROUP * 32;
    // The shuffle shows the compiler that all lanes agree.
    const int group_of_warp = UNIFORM ? __shfl_sync(0xffffffffu, warp / WARPS_PER_GROUP, 0) : warp / WARPS_PER_GROUP;
    const int block_filter = blockIdx.x % FILTER_BLOCKS * BLOCK_FILTERS;  // the first of the block's filters
    const unsigned stride = gridDim.x / FILTER_BLOCKS;  // from one of the block's items to the next
    unsigned item = blockIdx.x / FILTER_BLOCKS;

    for (int k = 0; k < (Config::keep_weights ? CHUNKS : 1) && !UNIFORM; k++)
        load_weights(weights + k * CHUNK_WEIGHTS, w, block_filter, k * CHANNELS);
    load_rows(x_rows, image_of(x, first, IMAGE), strips_of(item, images), 0);
    commit_copies();

    for (; item < items; item += stride) {
        // A lane beyond the block's last strip computes that strip again and stores nothing.
        const auto position_of = [&](const BlockStrips &s) {
            const int strip = min(s.first + warp_strip + lane, s.first + s.count - 1), row = strip / STRIPS_IN_ROW;
            return StripPosition{row, (strip - row * STRIPS_IN_ROW) * STRIP};
        };
        // The offset of the thread's first input in the rows in shared memory.
        const int input_offset = [&] {
            const BlockStrips s = strips_of(item, images);
            const StripPosition position = position_of(s);
            const int image = position.row / OH;
            return (image * H + (position.row - image * OH) - s.first / STRIPS_IN_ROW) * ROW_PITCH + position.column;
        }();

        float sum[FILTERS][STRIP];
        const auto clear = [&] {
#pragma unroll
            for (int f = 0; f < FILTERS; f++)
#pragma unroll
                for (int j = 0; j < STRIP; j++) sum[f][j] = 0.0f;
        };

        // Main loop: add the products of one chunk of channels. On entry its inputs and weights are in shared memory.
        const auto add_chunk = [&](int chunk, int group) {
            const float *inputs = x_rows + input_offset;
#if UNIFORM
            const int group_in_grid = blockIdx.x % FILTER_BLOCKS * (FILTER_GROUPS * PASSES) + group;
            const float *row_weights = uniform_weights + (group_in_grid * C + chunk * CHANNELS) * (K * WEIGHT_FLOATS);
#else
            const float *row_weights = weights + (Config::keep_weights ? chunk : 0) * CHUNK_WEIGHTS +
                                       group * (CHANNELS * K * WEIGHT_FLOATS);
#endif
            const int channels = CHUNKS == 1 ? C : min(CHANNELS, C - chunk * CHANNELS);
            const auto read_weights = [&](float (&weight)[WEIGHT_FLOATS], const float *from) {
#pragma unroll
                for (int e = 0; e < WEIGHT_FLOATS; e += WEIGHT_VECTOR) read<WEIGHT_VECTOR>(weight + e, from + e);
            };
            const auto read_inputs = [&](float (&input)[INPUT_FLOATS], const float *from) {
#pragma unroll
                for (int j = 0; j < INPUTS; j += Config::input_vector) read<Config::input_vector>(input + j, from + j);
            };
            const auto multiply_add = [&](const float (&input)[INPUT_FLOATS], const float (&weight)[WEIGHT_FLOATS]) {
#pragma unroll
                for (int q = 0; q < K; q++)
#pragma unroll
                    for (int f = 0; f < FILTERS; f++)
#pragma unroll
                        for (int i = 0; i < STRIP; i++) {
                            const int j = (q * FILTERS + f) % 2 ? STRIP - 1 - i : i;  // back and forth
                            sum[f][j] = fmaf(input[j + q], weight[q * FILTERS + f], sum[f][j]);
                        }
            };
#pragma unroll 1
            for (int c = 0; c < channels; c++, inputs += CHANNEL_PITCH - K * ROW_PITCH) {
#pragma unroll 1
                for (int p = 0; p < K; p++, inputs += ROW_PITCH, row_weights += WEIGHT_FLOATS) {
                    float input[INPUT_FLOATS], weight[WEIGHT_FLOATS];
                    read_inputs(input, inputs);
                    read_weights(weight, row_weights);
                    multiply_add(input, weight);
                }
            }
        };

        // Epilogue: store the warp's sums of one group of filters, filter by filter, through the warp's own part of
        // shared memory. Only the warp synchronises.
        const auto store = [&](int group) {
            // Hide from the compiler that these values were computed before: it would keep them in registers that the
            // sums need.
            unsigned same_item = item;
            asm volatile("" : "+r"(same_item));
            const BlockStrips s = strips_of(same_item, images);
            const StripPosition position = position_of(s);
            const int first_filter = block_filter + group * FILTERS;
            float *const staged = all_staged + warp * OUTPUT_FLOATS;
            // The pixels of the warp's strips, counted along the rows: from `begin` up to `end`.
            const int strip0 = s.first + warp_strip, strip1 = min(strip0 + 31, s.first + s.count - 1);
            const int begin = strip0 / STRIPS_IN_ROW * OW + strip0 % STRIPS_IN_ROW * STRIP;
            const int end = strip1 < strip0 ? begin
                                            : strip1 / STRIPS_IN_ROW * OW +
                                                  min(strip1 % STRIPS_IN_ROW * STRIP + STRIP, OW);
            const bool inside = warp_strip + lane < s.count;
            float *const out = image_of(y, first + s.image, OUTPUTS) + first_filter * PIXELS;
            // The lane's addresses in y. A warp's outputs lie in at most two maps if a map has at least as many pixels.
            float *to[KEEP_ADDRESSES ? STORES : 1];
            const int left = end - begin - lane * STORE;
            if (KEEP_ADDRESSES) {
                const int map = begin / (OH * OW), edge = (map + 1) * (OH * OW) - begin - lane * STORE;
#pragma unroll
                for (int u = 0; u < STORES; u++) {
                    const int b = OUTPUT_FLOATS <= OH * OW ? map + (u * 32 * STORE >= edge)
                                                           : (begin + (u * 32 + lane) * STORE) / (OH * OW);
                    to[KEEP_ADDRESSES ? u : 0] = out + b * (OUTPUTS - PIXELS) + begin + (u * 32 + lane) * STORE;
                }
            }
#pragma unroll
            for (int f = 0; f < FILTERS; f++) {
                if (first_filter + f >= M) break;
                if (WHOLE_ROWS) {
#pragma unroll
                    for (int j = 0; j < STRIP; j++) staged[lane * STRIP + j] = sum[f][j];
                } else if (inside) {
#pragma unroll
                    for (int j = 0; j < STRIP; j++)
                        if (position.column + j < OW)
                            staged[position.row * OW + position.column + j - begin] = sum[f][j];
                }
                __syncwarp();
                int from = begin;
                // With too many addresses to keep, compute them again.
                if (!KEEP_ADDRESSES) asm volatile("" : "+r"(from));
#pragma unroll
                for (int u = 0; u < STORES; u++) {
                    const int pixel = from + (u * 32 + lane) * STORE;
                    if (KEEP_ADDRESSES ? u * 32 * STORE >= left : pixel >= end) continue;
                    float v[STORE];
                    read<STORE>(v, staged + (u * 32 + lane) * STORE);
                    float *const target = KEEP_ADDRESSES ? to[KEEP_ADDRESSES ? u : 0]
                                                         : out + pixel / (OH * OW) * (OUTPUTS - PIXELS) + pixel;
                    write_streaming<STORE>(target + f * PIXELS, v);
                }
                __syncwarp();
            }
        };

        if (PASSES == 1) clear();
#pragma unroll 1
        for (int chunk = 0; chunk < CHUNKS; chunk++) {
            const bool last = chunk + 1 == CHUNKS;
            const int next_chunk = last ? 0 : chunk + 1;
            const unsigned next_item = last ? item + stride : item;
            wait_for_copies<0>();
            __syncthreads();  // the chunk's inputs and weights are complete
            if (PASSES == 1) {
                add_chunk(chunk, group_of_warp);
            } else {
#pragma unroll 1
                for (int group = group_of_warp; group < FILTER_GROUPS * PASSES; group += FILTER_GROUPS) {
                    clear();
                    add_chunk(0, group);
                    store(group);
                }
            }
            __syncthreads();  // no warp reads them any more
            if (next_item < items) {
                const BlockStrips next = strips_of(next_item, images);
                load_rows(x_rows, image_of(x, first, IMAGE), next, next_chunk * CHANNELS);
                if (!UNIFORM && !Config::keep_weights) load_weights(weights, w, block_filter, next_chunk * CHANNELS);
                commit_copies();
            }
        }
        if (PASSES == 1) store(group_of_warp);
    }
}

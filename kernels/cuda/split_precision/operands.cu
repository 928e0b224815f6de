// operands: the producer warps convert a tile of x to words of two fp16; the split filters are in the same order.
//
//     a stage   [component][image][plane][row][column] words; plane p holds channels 2 p and 2 p + 1 of one pixel
//
// An odd last channel has a separate plane, whose words hold two neighbouring rows (odd_channel_pairs_rows) or columns.
// With one_channel, word i of a row holds columns 2 i and 2 i + 1, so every input is in one word.
//
// The number of loads from global memory that can be in flight limits the producers.

constexpr int ROW_WORDS = (W + 2 * PAD_W + POSITION_COLUMNS - 1) / POSITION_COLUMNS;
constexpr int FILTER_WORDS = 2 * COMPONENTS;  // of a lane, for one k-step of one GEMM column

// The index in the split filters of word t or t + 4 of a k-step, in column n of a tile of eight.
__device__ __forceinline__ int filter_word(int k_step, int tile, int n, int t, int word, int component) {
    if (Config::wgmma) {  // per block and group: both components of a tile are two core matrices of eight columns
        const int group = tile / GROUP_TILES, block = group / COLUMN_GROUPS;
        const int index = (block * K_STEPS + k_step) * COLUMN_GROUPS + group - block * COLUMN_GROUPS;
        const int in_group = tile - group * GROUP_TILES;
        return ((index * COMPONENTS + component) * GROUP_TILES + in_group) * 64 + word * 32 + n * 4 + t;
    }
    return ((k_step * COLUMN_TILES + tile) * 32 + n * 4 + t) * FILTER_WORDS + 2 * component + word;
}

// Split lane (n, t)'s words of a k-step of column 8 tile + n: filter m = column / filter_shifts, moved down
// (one_channel: right) by column % filter_shifts. Returns bit n if a product is not zero, and bit 8 + n if a low
// component is not.
__device__ __forceinline__ unsigned split_filter_step(unsigned *filters, const float *w, int m, float scale, int k_step,
                                                      int tile, int n, int t) {
    unsigned used = 0;
    const int column = tile * 8 + n, shift = column % FILTER_SHIFTS;
#pragma unroll
    for (int word = 0; word < 2; word++) {
        const Tap tap = WORD_TAPS[k_step * 8 + t + 4 * word];
        const bool odd = C % 2 && tap.plane == C / 2, pairs_rows = Config::odd_channel_pairs_rows;
        float value[2];
#pragma unroll
        for (int j = 0; j < 2; j++) {
            const int c = 2 * tap.plane + (odd ? 0 : j);
            const int p = tap.row + (Config::one_channel ? 0 : (odd && pairs_rows ? j : 0) - shift);
            const int q = Config::one_channel ? 2 * tap.column + j - shift : tap.column + (odd && !pairs_rows ? j : 0);
            const bool real = tap.plane >= 0 && column < GEMM_COLUMNS && p >= 0 && p < K && q >= 0 && q < K;
            value[j] = real ? w[weight_index(m, c, p * K + q)] * scale : 0.0f;
        }
        const unsigned high = to_fp16x2(value[0], value[1]);
        filters[filter_word(k_step, tile, n, t, word, 0)] = high;
        if (value[0] != 0 || value[1] != 0) used |= 1u << n;
        if (COMPONENTS == 2) {
            const unsigned low = fp16x2_residual(value[0], value[1], high);
            filters[filter_word(k_step, tile, n, t, word, COMPONENTS - 1)] = low;
            if (low & 0x7fff7fff) used |= 256u << n;
        }
    }
    return used;
}

// The addresses of the first words of a lane's two positions.
struct FirstWords {
    const unsigned char *of[2];
};

// The A operand of one k-step for 16 positions: lane 4 g + t (the PTX ISA's groupID and threadID_in_group) has words t
// and t + 4 of positions g and g + 8, of both components.
struct Fragment {
    unsigned a[COMPONENTS][4];

    __device__ __forceinline__ void load(const unsigned char *first0, const unsigned char *first1,
                                         const unsigned char *second0, const unsigned char *second1) {
#pragma unroll
        for (int component = 0; component < COMPONENTS; component++) {
            const int offset = component * (4 * LOW);
            a[component][0] = *reinterpret_cast<const unsigned *>(first0 + offset);
            a[component][1] = *reinterpret_cast<const unsigned *>(first1 + offset);
            a[component][2] = *reinterpret_cast<const unsigned *>(second0 + offset);
            a[component][3] = *reinterpret_cast<const unsigned *>(second1 + offset);
        }
    }
    __device__ __forceinline__ void load(const FirstWords &first, int2 tap, int offset = 0) {
#pragma unroll
        for (int component = 0; component < COMPONENTS; component++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const unsigned char *const word = first.of[i % 2] + (i < 2 ? tap.x : tap.y) + offset;
                a[component][i] = *reinterpret_cast<const unsigned *>(word + component * (4 * LOW));
            }
    }
};

// The B operand of mma.sync for one k-step and tile of GEMM columns: products 2 t and 2 t + 1, and those 8 further.
struct __align__(4 * FILTER_WORDS) FilterFragment {
    unsigned word[FILTER_WORDS];  // high, then low
};

// Two scaled values as one word of the stage, high and low.
__device__ __forceinline__ void write_word(unsigned *to, float first, float second, bool real) {
    const unsigned high = to_fp16x2(first, second), low = COMPONENTS == 2 ? fp16x2_residual(first, second, high) : 0;
    if (real) {
        *to = high;
        if (COMPONENTS == 2) to[LOW] = low;
    }
}

// Without padding, a thread writes the same words of every plane, so it keeps their offsets in registers if they are
// few. With one channel, the planes of all images are contiguous: ONE_PLANE treats them as one.
constexpr bool ONE_PLANE = C == 1 && WHOLE_IMAGES && PLANE_ROWS == H && PLANE_STRIDE == PLANE_ROWS * ROW_STRIDE;
constexpr int PLANE_WORDS = (ONE_PLANE ? TILE_IMAGES * PLANE_ROWS : PLANE_ROWS) * ROW_WORDS;
constexpr int THREAD_WORDS = (PLANE_WORDS + PRODUCER_THREADS - 1) / PRODUCER_THREADS;
constexpr bool KEEPS_OFFSETS =
    !PADDED && THREAD_WORDS <= (Config::wgmma ? 14 : 24) && (POSITION_COLUMNS == 1 || W % 2 == 0);

struct WordOffsets {
    int offsets[KEEPS_OFFSETS ? THREAD_WORDS : 1];

    __device__ explicit WordOffsets(int thread) {
#pragma unroll
        for (int k = 0; k < (KEEPS_OFFSETS ? THREAD_WORDS : 0); k++) {
            const int word = thread + k * PRODUCER_THREADS;
            offsets[KEEPS_OFFSETS ? k : 0] = word / ROW_WORDS * ROW_STRIDE + word % ROW_WORDS;
        }
    }
};

// Producers: write every word of the stage, zeros outside the image. A thread reads several words before it writes the
// first: a write between two reads would have to wait for the first read. Returns an empty range: the caller knows it.
__device__ __forceinline__ Range split_input(unsigned *stage, const float *input, const WorkTile &tile, float scale,
                                             const WordOffsets &kept, int thread) {
    constexpr int ALONG = POSITION_COLUMNS;
    constexpr index_t ODD_PARTNER = Config::odd_channel_pairs_rows ? W : 1;
    const int rows = tile.input_rows();
    if (KEEPS_OFFSETS) {
        const int real = (ONE_PLANE ? tile.images * PLANE_ROWS : rows) * ROW_WORDS;
        constexpr int BATCH = THREAD_WORDS % 8 == 0 || THREAD_WORDS > 16 ? 8
                              : THREAD_WORDS > 8                         ? (THREAD_WORDS + 1) / 2
                                                                         : THREAD_WORDS;
#pragma unroll 1
        for (int plane = 0; plane < (ONE_PLANE ? 1 : tile.images * PLANES); plane++) {
            const int image = PLANES == 1 ? plane : TILE_IMAGES == 1 ? 0 : plane / PLANES;
            const int pair = plane - image * PLANES;
            const float *const from = input + image * INPUT_IMAGE + 2 * pair * INPUT_CHANNEL;
            unsigned *const to = stage + image * IMAGE_WORDS + pair * PLANE_STRIDE;
            const bool odd = C % 2 && pair == C / 2;
            const index_t partner = odd ? ODD_PARTNER : INPUT_CHANNEL;
            const int with_partner = odd ? (Config::odd_channel_pairs_rows ? real - ROW_WORDS
                                            : ALONG == 2                   ? real
                                                                           : real - 1)
                                         : real;
#pragma unroll
            for (int first = 0; first < THREAD_WORDS; first += BATCH) {
                float a[BATCH], b[BATCH];
#pragma unroll
                for (int k = 0; k < BATCH; k++) {
                    const int word = thread + (first + k) * PRODUCER_THREADS;
                    a[k] = first + k < THREAD_WORDS && word < real ? from[ALONG * word] : 0.0f;
                    b[k] = first + k < THREAD_WORDS && word < with_partner ? from[ALONG * word + partner] : 0.0f;
                }
#pragma unroll
                for (int k = 0; k < BATCH; k++)
                    if (first + k < THREAD_WORDS)
                        write_word(to + kept.offsets[KEEPS_OFFSETS && first + k < THREAD_WORDS ? first + k : 0],
                                   a[k] * scale, b[k] * scale, thread + (first + k) * PRODUCER_THREADS < PLANE_WORDS);
            }
        }
        return {};
    }
    const int lines = tile.images * (PLANES * PLANE_ROWS), zero_rows = PADDED ? tile.input_row() - tile.row + PAD_H : 0;
    // Consecutive words of a thread are PRODUCER_THREADS apart, counted along the rows: DOWN rows and ACROSS columns.
    constexpr int DOWN = PRODUCER_THREADS / ROW_WORDS, ACROSS = PRODUCER_THREADS % ROW_WORDS, BATCH = 8;
    int line = thread / ROW_WORDS, column = thread % ROW_WORDS;
    while (line < lines) {
        float a[BATCH], b[BATCH];
        int to[BATCH];
#pragma unroll
        for (int i = 0; i < BATCH; i++) {
            const bool real = line < lines;
            const int plane = PLANES * TILE_IMAGES == 1 ? 0 : line / PLANE_ROWS;  // of all images
            const int row = line - plane * PLANE_ROWS, image = TILE_IMAGES == 1 ? 0 : plane / PLANES;
            const int pair = plane - image * PLANES, input_row = row - zero_rows, input_column = ALONG * column - PAD_W;
            const float *const from =
                input + image * INPUT_IMAGE + 2 * pair * INPUT_CHANNEL + input_row * index_t(W) + input_column;
            const auto inside = [&](int down, int right) {
                const bool in_rows = (!PADDED && INPUT_ROWS == PLANE_ROWS && WHOLE_IMAGES && !down) ||
                                     unsigned(input_row + down) < unsigned(rows);
                return real && in_rows && ((!PADDED && ALONG == 1 && !right) || unsigned(input_column + right) < W);
            };
            const bool odd = C % 2 && pair == C / 2, pairs_rows = Config::odd_channel_pairs_rows;
            a[i] = inside(0, 0) ? from[0] : 0.0f;
            b[i] = inside(odd && pairs_rows, odd && !pairs_rows) ? from[odd ? ODD_PARTNER : INPUT_CHANNEL] : 0.0f;
            to[i] = real ? image * IMAGE_WORDS + pair * PLANE_STRIDE + row * ROW_STRIDE + column : -1;
            line += DOWN, column += ACROSS;
            if (column >= ROW_WORDS) column -= ROW_WORDS, line++;
        }
#pragma unroll
        for (int i = 0; i < BATCH; i++) write_word(stage + to[i], a[i] * scale, b[i] * scale, to[i] >= 0);
    }
    return {};
}

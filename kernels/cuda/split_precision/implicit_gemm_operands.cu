// implicit_gemm_operands: the operands of implicit_gemm.cu, which wgmma reads from shared memory without an im2col
// copy.
//
//     a stage   [component][image][unit][line][column pair] units of four words, 16 bytes: one row of a core matrix
//
// A line is `row_accumulators` input rows. Word (r, c) of a column pair holds both columns of row r of the line and
// channel c; four words in that order are a unit. Neighbouring column pairs lie 16 bytes apart, as wgmma requires of
// the columns of B.

constexpr int UNITS_PER_PAIR = (OUTPUT_ROWS * C + 3) / 4;
// Column pairs and lines that a filter covers.
constexpr int FILTER_PAIRS = (K + 2) / 2, FILTER_LINES = (K + 2 * OUTPUT_ROWS - 2) / OUTPUT_ROWS;
constexpr int FILTER_UNITS = UNITS_PER_PAIR * FILTER_PAIRS * FILTER_LINES;
// A piece is the output of one series of wgmmas: eight positions in each of PIECE_LINES lines. STRIPS pieces lie side
// by side in an image.
constexpr int PIECE_LINES = Config::wgmma_n / 8, STRIPS = (TILE_COLUMNS + 7) / 8;
constexpr int PIECES = (TILE_LINES + PIECE_LINES - 1) / PIECE_LINES * STRIPS;
// Column pairs and lines of a stage.
constexpr int INPUT_PAIRS = TILE_COLUMNS + FILTER_PAIRS - 1;
constexpr int INPUT_LINES = PLANE_STRIDE / 4 / ROW_STRIDE;

// row_of maps a filter to its row of A, of eight per warp; filter_of_row is the inverse. Where the staged outputs of
// neighbouring filters lie four banks apart, the order puts those of four lanes 16 banks apart.
constexpr bool SPREADS_FILTERS = Config::output_pitch % 8 == 4;
__device__ __forceinline__ int row_of(int filter) {
    if (!SPREADS_FILTERS) return filter;
    if (GROUP_TILES == 1) return filter / 2 + filter % 2 * 4;
    return filter / 16 * 16 + filter % 4 / 2 * 8 + filter % 2 * 4 + filter % 16 / 4;
}
__device__ __forceinline__ int filter_of_row(int row) {
    if (!SPREADS_FILTERS) return row;
    if (GROUP_TILES == 1) return row % 4 * 2 + row / 4;
    return row / 16 * 16 + row % 4 * 4 + row / 8 % 2 * 2 + row / 4 % 2;
}

// As in operands.cu, for filter 8 tile + n. The filter has one row of A per output of a position: two columns of each
// output row. The high components are in the order of a lane's A registers; the low ones follow as core matrices.
__device__ __forceinline__ unsigned split_filter_step(unsigned *filters, const float *w, int m, float scale, int k_step,
                                                      int tile, int n, int t) {
    unsigned used = 0;
#pragma unroll 1
    for (int output = 0; output < 4 * OUTPUT_ROWS; output++) {  // of a position, and of both units of the k-step
        const int word = output % 2, right = output / 2 % 2, down = output / 4, unit = 2 * k_step + word;
        const int at = unit / (FILTER_PAIRS * FILTER_LINES) * 4 + t, c = at % C, q = unit % FILTER_PAIRS * 2 - right;
        const int p = unit / FILTER_PAIRS % FILTER_LINES * OUTPUT_ROWS + at / C - down;
        const int row = row_of(tile * 8 + n);
        const int warp = down * GROUP_TILES + row / 8, g = row % 8;
        const bool real =
            unit < FILTER_UNITS && at < OUTPUT_ROWS * C && tile * 8 + n < GEMM_COLUMNS && p >= 0 && p < K;
        const float first = real && q >= 0 && q < K ? w[weight_index(m, c, p * K + q)] * scale : 0.0f;
        const float second = real && q >= -1 && q < K - 1 ? w[weight_index(m, c, p * K + q + 1)] * scale : 0.0f;
        const unsigned high = to_fp16x2(first, second);
        unsigned *const to = filters + k_step * 512;
        to[(warp * 32 + g * 4 + t) * 4 + right + 2 * word] = high;
        if (first != 0 || second != 0) used |= 1u << n;
        if (COMPONENTS == 2) {
            const unsigned low = fp16x2_residual(first, second, high);
            to[K_STEPS * 512 + (((warp * 2 + right) * 2 + word) * 8 + g) * 4 + t] = low;
            if (low & 0x7fff7fff) used |= 256u << n;
        }
    }
    return used;
}

constexpr int IMAGE_THREADS = INPUT_LINES * INPUT_PAIRS;

struct WordOffsets {  // none are kept
    __device__ explicit WordOffsets(int) {}
};

// Producers: write every unit of the stage; a thread writes all units of a column pair. Returns the range of this
// thread's share. Rows and columns beyond the input are multiplied by weights that are zero, so they must be finite.
__device__ __forceinline__ Range split_input(unsigned *stage, const float *input, const WorkTile &tile, float scale,
                                             const WordOffsets &, int thread) {
    constexpr bool ALL_ROWS = TILES_PER_IMAGE == 1 && INPUT_LINES * OUTPUT_ROWS <= H;
    constexpr bool ALL_COLUMNS = 2 * INPUT_PAIRS <= W;
    const int rows = tile.input_rows();
    Range range;
#pragma unroll 1
    for (int at = thread; at < tile.images * IMAGE_THREADS; at += PRODUCER_THREADS) {
        const int line_of_all = at / INPUT_PAIRS, pair = at - line_of_all * INPUT_PAIRS, column = 2 * pair;
        const int image = TILE_IMAGES == 1 ? 0 : at / IMAGE_THREADS, line = line_of_all - image * INPUT_LINES;
        const int row = line * OUTPUT_ROWS;
        const float *const from = input + image * INPUT_IMAGE + row * index_t(W) + column;
        unsigned *const to = stage + image * IMAGE_WORDS + (line * ROW_STRIDE + pair) * 4;
#pragma unroll
        for (int unit = 0; unit < UNITS_PER_PAIR; unit++) {
            unsigned high[4], low[4];
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int word = 4 * unit + i, down = word / C, c = word % C;
                const bool inside = word < OUTPUT_ROWS * C && (ALL_ROWS || row + down < rows);
                const float *const two = from + c * INPUT_CHANNEL + down * W;
                float a = 0.0f, b = 0.0f;
                if (W % 2 == 0) {
                    if (inside && (ALL_COLUMNS || column < W)) {
                        const float2 both = *reinterpret_cast<const float2 *>(two);
                        a = both.x, b = both.y;
                    }
                } else {
                    if (inside && (ALL_COLUMNS || column < W)) a = two[0];
                    if (inside && (ALL_COLUMNS || column + 1 < W)) b = two[1];
                }
                if (word < OUTPUT_ROWS * C) range.add(a), range.add(b);
                a *= scale, b *= scale;
                high[i] = to_fp16x2(a, b), low[i] = COMPONENTS == 2 ? fp16x2_residual(a, b, high[i]) : 0;
            }
            unsigned *const at_unit = to + unit * PLANE_STRIDE;
            *reinterpret_cast<uint4 *>(at_unit) = make_uint4(high[0], high[1], high[2], high[3]);
            if (COMPONENTS == 2) *reinterpret_cast<uint4 *>(at_unit + LOW) = make_uint4(low[0], low[1], low[2], low[3]);
        }
    }
    return range;
}

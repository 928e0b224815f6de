// output_rows: an implicit GEMM by mma.sync (sm_80 and later) for filters that fit registers. Output rows share their
// inputs.
//
//                        filters of group_tiles tiles, in registers
//                       +----------------------------+
//     16 positions      |  OUTPUT_ROWS rows of sums  |     input row p of a position serves output row r with filter
//     from shared       |  per filter, main + cross  |     row p - r: K + OUTPUT_ROWS - 1 rows are read, once each
//     memory            +----------------------------+
//
// A position is OUTPUT_ROWS outputs of one column. With filters_are_a the tensor core's A is 16 filters of two tiles
// and its B eight positions, so that sums of more output rows fit. With paired_stores a lane's two positions are
// neighbours.
//
// Arithmetic: 2 M C K K FLOP per output pixel, done 3 times (once with one component), k-steps of each filter row
// rounded up to 16 products. Bytes: x once, K - 1 rows more per tile, and y once: 50 FLOP per byte for the second
// layer of the course's 2018 spring. What limits it: the register file, from which all operands come. Restrictions: at
// most 14 k-steps, which are not promoted; OW even for paired_stores; bulk_store on sm_90. See "Warp level matrix
// instructions" in the PTX ISA.

constexpr bool FILTERS_ARE_A = Config::filters_are_a, PAIRS = Config::paired_stores;
constexpr int UNIT_POSITIONS = FILTERS_ARE_A ? 8 : 16, UNITS = (POSITIONS + UNIT_POSITIONS - 1) / UNIT_POSITIONS;
constexpr int SLOTS = MATH_WARPS / GROUPS;                           // warps with the same filters
constexpr int SETS = FILTERS_ARE_A ? GROUP_TILES / 2 : GROUP_TILES;  // accumulators per output row
constexpr int FRAGMENTS = (K + OUTPUT_ROWS - 1) * ROW_STEPS;         // read per position
constexpr index_t FILTER_PITCH = Config::bulk_store ? Config::output_pitch : PIXELS;

// One k-step of the unit's positions: 16 as A, or eight as B.
struct PositionFragment {
    static constexpr int WORDS = FILTERS_ARE_A ? 2 : 4;
    unsigned word[COMPONENTS][WORDS];

    __device__ __forceinline__ void load(const FirstWords &first, int2 tap, int offset) {
#pragma unroll
        for (int component = 0; component < COMPONENTS; component++)
#pragma unroll
            for (int i = 0; i < WORDS; i++) {
                const unsigned char *const at = first.of[FILTERS_ARE_A ? 0 : i % 2] + offset + component * (4 * LOW);
                word[component][i] = *reinterpret_cast<const unsigned *>(at + (i < WORDS / 2 ? tap.x : tap.y));
            }
    }
};

// The math warps' loop over tiles. Warps take the units of all tiles in turn, so that none waits for those that have
// one more unit of a tile.
__device__ __forceinline__ void consume(const Shared &s, float *y, const unsigned *global, int images, int tiles) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int warp = FILTERS_ARE_A ? __shfl_sync(~0u, threadIdx.x / 32, 0) : threadIdx.x / 32;
    const int slot = warp / GROUPS, first_tile = warp % GROUPS * GROUP_TILES;
    const int first_position = FILTERS_ARE_A ? 2 * t : PAIRS ? 2 * g : g;  // of a lane's two sums, and the other
    const int second_position = FILTERS_ARE_A || PAIRS ? first_position + 1 : first_position + 8;
    const FilterFragment *const from = reinterpret_cast<const FilterFragment *>(global) + lane;
    FilterFragment filters[K_STEPS][GROUP_TILES];
#pragma unroll
    for (int k = 0; k < K_STEPS; k++)
#pragma unroll
        for (int n = 0; n < GROUP_TILES; n++)
            filters[k][n] = from[(k * COLUMN_TILES + min(first_tile + n, COLUMN_TILES - 1)) * 32];
    int2 taps[ROW_STEPS];
#pragma unroll
    for (int j = 0; j < ROW_STEPS; j++) taps[j] = s.taps[j * 4 + t];
    int iteration = 0, next_unit = slot, number = blockIdx.x;
    for (; number < tiles; iteration++) {
        const WorkTile tile(number, images);
        const int stage = iteration % 2;
        mbarrier_wait(s.barriers + FULL + stage, iteration / 2);
        number = next_tile(s, stage);
        // All warps begin a tile together: parts of one line of y that two warps store then leave the cache as one.
        if (!Config::bulk_store) named_barrier<MATH, MATH_THREADS>();
        const unsigned char *const stage_words =
            reinterpret_cast<const unsigned char *>(s.stages + stage * STAGE_WORDS);
        const int exponent = s.exponents[stage];
        const auto words_of = [&](int unit) {
            const int first = unit * UNIT_POSITIONS + (FILTERS_ARE_A ? g : first_position);
            const int second = FILTERS_ARE_A ? first : unit * UNIT_POSITIONS + second_position;
            return FirstWords{{stage_words + 4 * s.positions[first], stage_words + 4 * s.positions[second]}};
        };
        const auto load = [&](PositionFragment &f, int number, const FirstWords &words) {
            f.load(words, taps[number % ROW_STEPS], number / ROW_STEPS * (4 * ROW_STRIDE));
        };
        int unit = next_unit;
        PositionFragment f[2];  // the next one is loaded while this one is multiplied
        FirstWords words = words_of(min(unit, UNITS - 1));
        load(f[0], 0, words);
#pragma unroll 1
        for (; unit < UNITS; unit += SLOTS) {
            // Main loop.
            float main[OUTPUT_ROWS][SETS][4] = {}, cross[OUTPUT_ROWS][SETS][4] = {};
            const FirstWords next_words = words_of(min(unit + SLOTS, UNITS - 1));
            // FILTERS_ARE_A: output rows that any of the eight positions has; others are not multiplied.
            const int line = unit * 8 / TILE_COLUMNS;
            const int last_line = min(unit * 8 + 7, POSITIONS - 1) / TILE_COLUMNS;
            const int down = tile.row + line % TILE_LINES * OUTPUT_ROWS;
            const bool one_image = line / TILE_LINES == last_line / TILE_LINES;
            const int existing_rows = OH % OUTPUT_ROWS == 0 || !one_image ? OUTPUT_ROWS : OH - down;
#pragma unroll
            for (int k = 0; k < FRAGMENTS; k++) {
                const PositionFragment &now = f[k % 2];
                if (k + 1 < FRAGMENTS) load(f[1 - k % 2], k + 1, words);
                else if (FRAGMENTS % 2 == 0) load(f[0], 0, next_words);
                // Between two products of one sum come those of other sums, as far as there are any.
                const auto add = [&](float (&sums)[OUTPUT_ROWS][SETS][4], int first, int last, int component,
                                     int word) {
#pragma unroll
                    for (int i = first; i < last; i++) {
                        const int r = i / SETS, row = k / ROW_STEPS - r;
                        if (row < 0 || row >= K) continue;
                        const FilterFragment *const step = filters[row * ROW_STEPS + k % ROW_STEPS];
                        const unsigned *const x = now.word[component];
                        if (FILTERS_ARE_A) {
                            const FilterFragment &top = step[i % SETS * 2], &bottom = step[i % SETS * 2 + 1];
                            const unsigned a[] = {top.word[word], bottom.word[word], top.word[word + 1],
                                                  bottom.word[word + 1]};
                            mma_if(r < existing_rows, sums[r][i % SETS], a, x[0], x[1]);
                        } else mma(sums[r][i % SETS], x, step[i % SETS].word[word], step[i % SETS].word[word + 1]);
                    }
                };
                constexpr int ALL = OUTPUT_ROWS * SETS, HALF = FILTERS_ARE_A ? ALL : (ALL + 1) / 2;
                if (COMPONENTS == 2) add(cross, 0, ALL, 0, FILTER_WORDS - 2);
                add(main, 0, HALF, 0, 0);
                if (COMPONENTS == 2) add(cross, 0, ALL, COMPONENTS - 1, 0);
                add(main, HALF, ALL, 0, 0);
            }
            if (FRAGMENTS % 2) load(f[0], 0, next_words);

            // Epilogue.
            float *to[2];
            int rows[2];  // output rows that exist, from the position's first on
#pragma unroll
            for (int h = 0; h < (PAIRS ? 1 : 2); h++) {
                const int at = unit * UNIT_POSITIONS + (h ? second_position : first_position);
                const int line = at / TILE_COLUMNS;
                const int image = TILE_IMAGES == 1 ? 0 : line / TILE_LINES;
                const int row = tile.row + (line - image * TILE_LINES) * OUTPUT_ROWS;
                const int column = tile.column + at - line * TILE_COLUMNS;
                rows[h] = image < tile.images && line - image * TILE_LINES < TILE_LINES && column < OW ? OH - row : 0;
                to[h] = Config::bulk_store ? s.output + stage * (Config::staged_outputs / 2) +
                                                 image * (M * Config::output_pitch) + (row - tile.row) * OW + column
                                           : image_of(y, tile.image + image, OUTPUTS) + row * index_t(OW) + column;
            }
#pragma unroll
            for (int i = 0; i < SETS; i++)
#pragma unroll
                for (int c = 0; c < 2; c++) {
                    const int m = FILTERS_ARE_A ? (first_tile + 2 * i + c) * 8 + g : (first_tile + i) * 8 + 2 * t + c;
                    const OutputScale scale(exponent, s.filter_scales[min(m, COLUMN_TILES * 8 - 1)]);
                    if ((COLUMN_TILES % GROUP_TILES || M % 8) && m >= M) continue;
#pragma unroll
                    for (int r = 0; r < OUTPUT_ROWS; r++) {
                        float v[2];
#pragma unroll
                        for (int h = 0; h < 2; h++) {
                            const int d = FILTERS_ARE_A ? 2 * c + h : 2 * h + c;
                            v[h] = scale(join_sums(main[r][i][d], cross[r][i][d]), main[r][i][d]);
                        }
                        if (PAIRS) {
                            float2 *const pair = reinterpret_cast<float2 *>(to[0] + m * FILTER_PITCH + r * index_t(OW));
                            if (r >= rows[0]) continue;
                            if (Config::bulk_store) *pair = make_float2(v[0], v[1]);
                            else __stcs(pair, make_float2(v[0], v[1]));
                        } else {
#pragma unroll
                            for (int h = 0; h < 2; h++)
                                if (r < rows[PAIRS ? 0 : h])
                                    __stcs(to[PAIRS ? 0 : h] + m * PIXELS + r * index_t(OW), v[h]);
                        }
                    }
                }
            words = next_words;
        }
        next_unit = unit - UNITS;
        fence_staged_output();
        mbarrier_arrive(s.barriers + EMPTY + stage);
    }
}

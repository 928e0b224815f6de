// one_channel: an implicit GEMM by mma.sync (sm_80 and later) for one input channel. A position is two neighbouring
// outputs.
//
//                                filters m, m + 1, m + 2, m + 3, each for both outputs of a position: 8 columns
//                               +-----+-----+-----+-----+
//     16 positions, in pairs    | o o | o o | o o | o o |     lane (g, t) has both outputs of positions 2 g and 2 g + 1
//     2 g and 2 g + 1 of lane g | o o | o o | o o | o o |     of filter t: four neighbours of a row of y
//                               +-----+-----+-----+-----+
//
// A word holds input columns 2 i and 2 i + 1, so each input is split once; the second output's GEMM column is the
// filter moved right by one. A lane's four sums are one 16-byte store, 128 bytes for the eight lanes of a filter: no
// staging.
//
// With filters_in_registers the filters stay in a warp's registers while it goes through the positions, 16 at a time,
// and a k-step's words are replaced by those of the next positions once they are used. Otherwise the words of 16
// m_tiles positions stay in registers while the warp goes through the filters in shared memory.
//
// Config of the course's 2018 fall, first layer, on an H200: tile_images 1, tile_lines 66, k_steps 4, column_tiles 3,
// m_tiles 1, math_warps 8, producer_warps 4, filters_in_registers, store_floats 4, copy_floats 4.
//
// Arithmetic: 2 M K K FLOP per output pixel, done 3 times (once with one component). Bytes: x once, K - 1 rows more
// per tile, and y once: 12 FLOP per byte for the course's 2017 layer. What limits it: stores to memory. Restrictions:
// C = 1, OW even, OH OW a multiple of four.

constexpr int M_TILES = Config::m_tiles;
constexpr int UNITS = (POSITIONS + 16 * M_TILES - 1) / (16 * M_TILES);
constexpr int IMAGE_POSITIONS = TILE_LINES * TILE_COLUMNS;

// Four neighbouring outputs to y, evict-first, so that L2 keeps the inputs.
__device__ __forceinline__ void store(float *to, const float (&v)[4]) {
    if constexpr (Config::store_floats == 4) {
        __stcs(reinterpret_cast<float4 *>(to), make_float4(v[0], v[1], v[2], v[3]));
    } else if constexpr (Config::store_floats == 2) {
        __stcs(reinterpret_cast<float2 *>(to), make_float2(v[0], v[1]));
        __stcs(reinterpret_cast<float2 *>(to) + 1, make_float2(v[2], v[3]));
    } else {
#pragma unroll
        for (int i = 0; i < 4; i++) __stcs(to + i, v[i]);
    }
}

// Epilogue of one tile of filters: the sums, rescaled, to y.
__device__ __forceinline__ void store_sums(float *to, float (&sums)[4], const float (&cross)[4], OutputScale scale,
                                           bool real) {
#pragma unroll
    for (int v = 0; v < 4; v++) {
        sums[v] = join_sums(sums[v], cross[v]);
        sums[v] = scale(sums[v], sums[v]);
    }
    if (real) store(to, sums);
}

// A tile, as a lane (g, t) sees it.
struct LaneTile {
    int g, t;
    const int2 (&taps)[K_STEPS];  // offsets of words t and t + 4 of each k-step
    const unsigned char *words;   // of the pipeline stage
    int exponent;
    int images, positions;  // images, and positions of each, that exist
    float *out;             // the tile's first output of filter t
};

// Main loop with filters in registers, of units `unit`, unit + MATH_WARPS, ... of a tile. Returns the first number beyond
// the tile. A unit's fragments replace those of the unit before, k-step by k-step.
template <int STEPS, int TILES>  // K_STEPS and COLUMN_TILES; 1 and 1 in a call that `if constexpr` discards
__device__ __forceinline__ int multiply_by_kept_filters(const Shared &s, const LaneTile &tile, int unit,
                                                        const FilterFragment (&kept)[STEPS][TILES]) {
    const int g = tile.g, t = tile.t;
    const auto words_of = [&](int unit) {
        const ushort2 at = *reinterpret_cast<const ushort2 *>(s.positions + unit * 16 + 2 * g);
        return FirstWords{{tile.words + 4 * at.x, tile.words + 4 * at.y}};
    };
    Fragment f[K_STEPS];
    const FirstWords first_words = words_of(min(unit, UNITS - 1));
#pragma unroll
    for (int k = 0; k < K_STEPS; k++) f[k].load(first_words, tile.taps[k]);
#pragma unroll 1
    for (; unit < UNITS; unit += MATH_WARPS) {
        const FirstWords next_words = words_of(min(unit + MATH_WARPS, UNITS - 1));
        const int first = unit * 16 + 2 * g, image = TILE_IMAGES == 1 ? 0 : first / IMAGE_POSITIONS;
        const int at = first - image * IMAGE_POSITIONS;
        const bool inside = image < tile.images && at < tile.positions;
        float *const to = tile.out + image * OUTPUTS + 2 * at;
        float main[COLUMN_TILES][4] = {}, cross[COLUMN_TILES][4] = {};
#pragma unroll
        for (int k = 0; k < K_STEPS; k++) {
            // Between two products of one sum come those of other sums, as far as there are any.
            const auto add = [&](float (&sums)[COLUMN_TILES][4], int n, int last, int component, int word) {
#pragma unroll
                for (; n < last; n++)
                    mma(sums[n], f[k].a[component], kept[k][n].word[word], kept[k][n].word[word + 1]);
            };
            constexpr int HALF = (COLUMN_TILES + 1) / 2;
            if (COMPONENTS == 2) add(cross, 0, COLUMN_TILES, 0, FILTER_WORDS - 2);
            add(main, 0, HALF, 0, 0);
            if (COMPONENTS == 2) add(cross, 0, COLUMN_TILES, COMPONENTS - 1, 0);
            add(main, HALF, COLUMN_TILES, 0, 0);
            f[k].load(next_words, tile.taps[k]);
        }
#pragma unroll
        for (int n = 0; n < COLUMN_TILES; n++)
            store_sums(to + n * (4 * PIXELS), main[n], cross[n],
                       OutputScale(tile.exponent, s.filter_scales[n * 8 + 2 * t]),
                       inside && (M % 4 == 0 || n * 4 + t < M));
    }
    return unit;
}

// The same with filters in shared memory or L2: the fragments of 16 m_tiles positions stay in registers while the warp
// goes through the column tiles.
__device__ __forceinline__ int multiply_kept_positions(const Shared &s, const LaneTile &tile, int unit,
                                                       const FilterFragment *filters) {
    const int g = tile.g, t = tile.t;
#pragma unroll 1
    for (; unit < UNITS; unit += MATH_WARPS) {
        Fragment f[M_TILES][K_STEPS];
        float *to[M_TILES];
        bool inside[M_TILES];
#pragma unroll
        for (int i = 0; i < M_TILES; i++) {
            const int first = unit * (16 * M_TILES) + 16 * i + 2 * g;
            const FirstWords words = {{tile.words + 4 * first_word(first), tile.words + 4 * first_word(first + 1)}};
#pragma unroll
            for (int k = 0; k < K_STEPS; k++) f[i][k].load(words, tile.taps[k]);
            const int image = TILE_IMAGES == 1 ? 0 : first / IMAGE_POSITIONS;
            const int at = first - image * IMAGE_POSITIONS;
            inside[i] = image < tile.images && at < tile.positions;
            to[i] = tile.out + image * OUTPUTS + 2 * at;
        }
#pragma unroll 2
        for (int n = 0; n < COLUMN_TILES; n++) {
            float main[M_TILES][4] = {}, cross[M_TILES][4] = {};
#pragma unroll
            for (int k = 0; k < K_STEPS; k++) {
                const FilterFragment b = filters[(k * COLUMN_TILES + n) * 32];
#pragma unroll
                for (int i = 0; i < M_TILES; i++) mma(main[i], f[i][k].a[0], b.word[0], b.word[1]);
                if (COMPONENTS == 2) {
#pragma unroll
                    for (int i = 0; i < M_TILES; i++)
                        mma(cross[i], f[i][k].a[0], b.word[FILTER_WORDS - 2], b.word[FILTER_WORDS - 1]);
#pragma unroll
                    for (int i = 0; i < M_TILES; i++) mma(cross[i], f[i][k].a[COMPONENTS - 1], b.word[0], b.word[1]);
                }
            }
            const OutputScale scale(tile.exponent, s.filter_scales[n * 8 + 2 * t]);
#pragma unroll
            for (int i = 0; i < M_TILES; i++)
                store_sums(to[i] + n * (4 * PIXELS), main[i], cross[i], scale,
                           inside[i] && (M % 4 == 0 || n * 4 + t < M));
        }
    }
    return unit;
}

// The math warps' loop over tiles. All warps begin a tile together: parts of one line of y that two warps store then
// merge in L2.
__device__ __forceinline__ void consume(const Shared &s, float *y, const unsigned *global, int images, int tiles) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
    const FilterFragment *const filters =
        reinterpret_cast<const FilterFragment *>(Config::filters_in_shared ? s.filters : global) + lane;
    constexpr bool KEEPS_FILTERS = Config::filters_in_registers;
    FilterFragment kept[KEEPS_FILTERS ? K_STEPS : 1][KEEPS_FILTERS ? COLUMN_TILES : 1];
    if constexpr (KEEPS_FILTERS)
#pragma unroll
        for (int k = 0; k < K_STEPS; k++)
#pragma unroll
            for (int n = 0; n < COLUMN_TILES; n++) kept[k][n] = filters[(k * COLUMN_TILES + n) * 32];
    int2 taps[K_STEPS];
#pragma unroll
    for (int k = 0; k < K_STEPS; k++) taps[k] = s.taps[k * 4 + t];
    for_each_tile<UNITS>(s, warp, images, tiles, [&](const WorkTile &tile, int stage, int unit) {
        const int positions = min(IMAGE_POSITIONS, (OH - tile.row) * TILE_COLUMNS);
        named_barrier(MATH_BARRIER, MATH_THREADS);
        const unsigned char *const words = reinterpret_cast<const unsigned char *>(s.stages + stage * STAGE_WORDS);
        float *const out = image_of(y, tile.image, OUTPUTS) + tile.row * index_t(OW) + t * PIXELS;
        const LaneTile own = {g, t, taps, words, s.exponents[stage], tile.images, positions, out};
        if constexpr (KEEPS_FILTERS) return multiply_by_kept_filters(s, own, unit, kept);
        else return multiply_kept_positions(s, own, unit, filters);
    });
}

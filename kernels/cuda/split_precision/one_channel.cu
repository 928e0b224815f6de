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
// filter moved right by one. Outputs need no staging: a lane's four sums are one 16-byte store, and the eight lanes of
// a filter store 128 contiguous bytes.
//
// The words of 16 m_tiles positions stay in registers while a warp goes through the filters. These are in the warp's
// registers (filters_in_registers), in shared memory (filters_in_shared) or, if they fit neither, in L2.
//
// Config of the first layer of the course's 2018 fall, on an H200: tile_images 1, tile_lines 66, k_steps 4,
// column_tiles 3, m_tiles 1, math_warps 8, producer_warps 4, filters_in_registers, store_floats 4, copy_floats 4.
//
// Arithmetic: 2 M K K FLOP per output pixel, done 3 times (once with one component). Bytes: x once, K - 1 rows more per
// tile, and y once: 12 FLOP per byte for the course's 2017 layer. What limits it: stores to memory. Restrictions: plain
// convolutions only (stride 1, no padding or dilation, square filters, no groups); C = 1, OW even, OH OW a multiple of
// four.

constexpr int M_TILES = Config::m_tiles;
constexpr int IMAGE_POSITIONS = TILE_LINES * TILE_COLUMNS;

// Store four neighbouring outputs to y, evict-first, so that L2 keeps the inputs.
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

// Epilogue of one tile of filters: rescale the sums and store them to y.
__device__ __forceinline__ void store_sums(float *to, float (&sums)[4], const float (&cross)[4], OutputScale scale,
                                           bool real) {
#pragma unroll
    for (int v = 0; v < 4; v++) {
        sums[v] = join_sums(sums[v], cross[v]);
        sums[v] = scale(sums[v], sums[v]);
    }
    if (real) store(to, sums);
}

// The math warps' loop over tiles. All warps begin a tile together, so that two stores to the same cache line of y
// by different warps merge in L2. A unit is 16 m_tiles positions; its fragments are loaded after the previous unit's
// products.
__device__ __forceinline__ void consume(const Shared &s, float *y, const unsigned *global, int images, int tiles) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
    const FilterFragment *const filters =
        reinterpret_cast<const FilterFragment *>(Config::filters_in_shared ? s.filters : global) + lane;
    constexpr bool KEEPS_FILTERS = Config::filters_in_registers;
    FilterFragment kept[KEEPS_FILTERS ? K_STEPS * COLUMN_TILES : 1];
#pragma unroll
    for (int i = 0; i < K_STEPS * COLUMN_TILES && KEEPS_FILTERS; i++) kept[i] = filters[i * 32];
    int2 taps[K_STEPS];
#pragma unroll
    for (int k = 0; k < K_STEPS; k++) taps[k] = s.taps[k * 4 + t];
    for_each_tile<UNITS>(s, warp, images, tiles, [&](const WorkTile &tile, int stage, int unit) {
        const int positions = min(IMAGE_POSITIONS, (OH - tile.row) * TILE_COLUMNS), exponent = s.exponents[stage];
        float *const out = image_of(y, tile.image, OUTPUTS) + tile.row * index_t(OW) + t * PIXELS;
        const unsigned char *const stage_words = reinterpret_cast<unsigned char *>(s.stages + stage * STAGE_WORDS);
        named_barrier(MATH_BARRIER, MATH_THREADS);
        Fragment f[M_TILES][K_STEPS];
        const auto load = [&](int unit) {
#pragma unroll
            for (int i = 0; i < M_TILES; i++) {
                const int first = (unit * M_TILES + i) * 16 + 2 * g;
                ushort2 words = {};  // of the positions, from the beginning of the stage; see POSITION_TABLE
                if (KEEPS_FILTERS)
                    words = *reinterpret_cast<const ushort2 *>(s.positions + min(first, POSITION_TABLE - 2));
                else
                    words = make_ushort2(first_word(first), first_word(first + 1));
                const FirstWords addresses = {stage_words + 4 * words.x, stage_words + 4 * words.y};
#pragma unroll
                for (int k = 0; k < K_STEPS; k++) f[i][k].load(addresses, taps[k]);
            }
        };
        load(unit);
#pragma unroll 1
        for (; unit < UNITS; unit += MATH_WARPS) {
            float *to[M_TILES];
            bool inside[M_TILES];
#pragma unroll
            for (int i = 0; i < M_TILES; i++) {
                const int first = (unit * M_TILES + i) * 16 + 2 * g;
                const int image = TILE_IMAGES == 1 ? 0 : first / IMAGE_POSITIONS;
                const int position = first - image * IMAGE_POSITIONS;
                inside[i] = image < tile.images && position < positions;
                to[i] = out + image * OUTPUTS + 2 * position;
            }
#pragma unroll(KEEPS_FILTERS ? COLUMN_TILES : 2)
            for (int n = 0; n < COLUMN_TILES; n++) {
                float main[M_TILES][4] = {}, cross[M_TILES][4] = {};
#pragma unroll
                for (int k = 0; k < K_STEPS; k++) {
                    const FilterFragment b = KEEPS_FILTERS ? kept[KEEPS_FILTERS ? k * COLUMN_TILES + n : 0]
                                                           : filters[(k * COLUMN_TILES + n) * 32];
#pragma unroll
                    for (int i = 0; i < M_TILES; i++) mma(main[i], f[i][k].a[0], b.word[0], b.word[1]);
                    if (COMPONENTS == 2) {
#pragma unroll
                        for (int i = 0; i < M_TILES; i++)
                            mma(cross[i], f[i][k].a[0], b.word[FILTER_WORDS - 2], b.word[FILTER_WORDS - 1]);
#pragma unroll
                        for (int i = 0; i < M_TILES; i++)
                            mma(cross[i], f[i][k].a[COMPONENTS - 1], b.word[0], b.word[1]);
                    }
                }
                if (KEEPS_FILTERS && n == COLUMN_TILES - 1) load(unit + MATH_WARPS);
                const OutputScale scale(exponent, s.filter_scales[n * 8 + 2 * t]);
#pragma unroll
                for (int i = 0; i < M_TILES; i++)
                    store_sums(to[i] + n * (4 * PIXELS), main[i], cross[i], scale,
                               inside[i] && (M % 4 == 0 || n * 4 + t < M));
            }
            if (!KEEPS_FILTERS) load(unit + MATH_WARPS);
        }
        return unit;
    });
}

// mma_sync: an implicit GEMM by mma.sync (sm_80 and later). A warp multiplies 16 x m_tiles positions by a group of
// column tiles.
//
//                            GEMM columns: group_tiles x 8, B, from shared memory or L2
//                           +--------------------------+
//     16 m_tiles positions  |  main: x_high w_high     |    D, in registers: two sums per output, main and cross,
//     A, from shared memory |  cross: x_high w_low     |    and one more with accumulator promotion
//                           |       + x_low w_high     |
//                           +--------------------------+
//
// A position is one output. The next k-step's A and B are loaded while the current ones are multiplied.
//
// Config of the course's last layer: tile_images 1, tile_lines 27, m_tiles 2, group_tiles 3, column_groups 1, k_steps
// 37, promotion_interval 6, math_warps 8, producer_warps 4, input_from_global, filters_in_shared.
//
// Arithmetic: 2 M C K K FLOP per output pixel, done 3 times (once with one component), with C K K rounded up to 16 and
// the GEMM columns to 8. Bytes: x once, K - 1 rows more per tile, and y once: 168 FLOP per byte for the course's last
// layer. Shared-memory reads limit it: the filters once per unit, the positions once per column group. Restriction:
// sm_80 or newer. See "Warp level matrix instructions" in the PTX ISA.

constexpr int M_TILES = Config::m_tiles;
static_assert(!PROMOTES || PROMOTION_INTERVAL % 2 == 0, "the main loop's iterations have two k-steps");
constexpr int STAGING_PITCH = 16 * M_TILES + 4;  // floats from one GEMM column to the next
constexpr int STORES = (M_TILES + 1) / 2;

// The addresses of a unit's positions, in the stage and in y. Of each 16 positions, a lane multiplies two, g and g + 8;
// of each 32, it stores one.
struct Positions {
    FirstWords words[M_TILES];
    float *to[STORES];  // of positions lane, lane + 32; null where there is no output

    __device__ Positions(const WorkTile &tile, int unit, int lane, const unsigned *stage, float *y) {
#pragma unroll
        for (int i = 0; i < 2 * M_TILES; i++) {
            const unsigned *const word = stage + first_word(unit * (16 * M_TILES) + i * 8 + lane / 4);
            words[i / 2].of[i % 2] = reinterpret_cast<const unsigned char *>(word);
        }
#pragma unroll
        for (int i = 0; i < STORES; i++) {
            const int at = unit * (16 * M_TILES) + i * 32 + lane;
            const int line = at / TILE_COLUMNS, image = line / TILE_LINES, row = tile.row + line % TILE_LINES;
            const bool real = image < tile.images && row < OH && (M_TILES % 2 == 0 || i * 32 + lane < 16 * M_TILES);
            float *const map = image_of(y, tile.image + image, OUTPUTS);
            to[i] = real ? map + row * index_t(OW) + at % TILE_COLUMNS : nullptr;
        }
    }
};

// A thread's sums of one column tile.
struct Accumulators {
    float main[M_TILES][4], cross[COMPONENTS == 2 ? M_TILES : 1][4], promoted[PROMOTES ? M_TILES : 1][4];

    __device__ __forceinline__ void promote_all() {
#pragma unroll
        for (int i = 0; i < M_TILES; i++)
#pragma unroll
            for (int v = 0; v < 4; v++) promote(main[i][v], promoted[PROMOTES ? i : 0][v]);
    }
    // Value v of the i-th 16 positions, not yet rescaled.
    __device__ __forceinline__ float total(int i, int v) const {
        const float sum = join_sums(main[i][v], cross[COMPONENTS == 2 ? i : 0][v]);
        return PROMOTES ? sum + promoted[PROMOTES ? i : 0][v] : sum;
    }
};

// Add the products of one k-step to the sums of the i-th 16 positions.
__device__ __forceinline__ void multiply_add(Accumulators *sums, const Fragment &f, const FilterFragment *b, int i) {
#pragma unroll
    for (int n = 0; n < GROUP_TILES; n++) mma(sums[n].main[i], f.a[0], b[n].word[0], b[n].word[1]);
    if (COMPONENTS == 2) {
#pragma unroll
        for (int n = 0; n < GROUP_TILES; n++)
            mma(sums[n].cross[i], f.a[0], b[n].word[FILTER_WORDS - 2], b[n].word[FILTER_WORDS - 1]);
#pragma unroll
        for (int n = 0; n < GROUP_TILES; n++) mma(sums[n].cross[i], f.a[COMPONENTS - 1], b[n].word[0], b[n].word[1]);
    }
}

// Main loop over the k-steps of GROUP_TILES column tiles from `first_tile` on.
__device__ __forceinline__ void main_loop(Accumulators *sums, const FirstWords (&words)[M_TILES], const int2 *taps,
                                          const FilterFragment *filters, int first_tile) {
    constexpr bool ALL_TILES = COLUMN_TILES % GROUP_TILES == 0;
    Fragment f[2];  // one is loaded while the other is multiplied
    FilterFragment b[2][GROUP_TILES];
    const auto load_filters = [&](int k, FilterFragment *to) {
#pragma unroll
        for (int n = 0; n < GROUP_TILES; n++)
            to[n] =
                filters[(k * COLUMN_TILES + (ALL_TILES ? first_tile + n : min(first_tile + n, COLUMN_TILES - 1))) * 32];
    };
    int2 tap = taps[0], next_tap = taps[min(1, K_STEPS - 1) * 4];
    f[0].load(words[0], tap);
    load_filters(0, b[0]);
    const auto k_step = [&](int k, int odd) {
        const bool more = k + 1 < K_STEPS;
#pragma unroll
        for (int i = 0; i < M_TILES; i++) {
            const int now = (odd * M_TILES + i) % 2;
            if (i + 1 < M_TILES) f[1 - now].load(words[i + 1], tap);
            else if (more) f[1 - now].load(words[0], next_tap);
            if (i == 0 && more) load_filters(k + 1, b[1 - odd]);
            multiply_add(sums, f[now], b[odd], i);
        }
        tap = next_tap;
        if (k + 2 < K_STEPS) next_tap = taps[(k + 2) * 4];
    };
    int since_promotion = 0;
#pragma unroll 1
    for (int k = 0; k < K_STEPS; k += 2) {
        k_step(k, 0);
        if (K_STEPS % 2 == 0 || k + 1 < K_STEPS) k_step(k + 1, 1);
        if (PROMOTES && (since_promotion += 2) == PROMOTION_INTERVAL) {
            since_promotion = 0;
#pragma unroll
            for (int n = 0; n < GROUP_TILES; n++) sums[n].promote_all();
        }
    }
}

// Epilogue of one column tile: rescale the sums, and store them to y through the warp's staging area.
__device__ __forceinline__ void store(float *staging, const int *filter_scales, const Accumulators &sums,
                                      const Positions &positions, int tile, int exponent, int lane) {
    const int g = lane / 4, t = lane % 4;
    OutputScale scale[2];
#pragma unroll
    for (int i = 0; i < 2; i++) scale[i] = OutputScale(exponent, filter_scales[tile * 8 + 2 * t + i]);
#pragma unroll
    for (int i = 0; i < M_TILES; i++)
#pragma unroll
        for (int v = 0; v < 4; v++) {
            const float sum = sums.total(i, v);
            staging[(2 * t + v % 2) * STAGING_PITCH + 16 * i + v / 2 * 8 + g] = scale[v % 2](sum, sum);
        }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < STORES; i++)
#pragma unroll
        for (int j = 0; j < 8; j++)
            if (tile * 8 + j < M && positions.to[i] != nullptr)
                __stcs(positions.to[i] + (tile * 8 + j) * PIXELS, staging[j * STAGING_PITCH + i * 32 + lane]);
    __syncwarp();
}

// A math warp's loop over units of all tiles.
__device__ __forceinline__ void consume(const Shared &s, float *y, const unsigned *global, int images, int tiles) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const FilterFragment *const filters =
        reinterpret_cast<const FilterFragment *>(Config::filters_in_shared ? s.filters : global) + lane;
    const int2 *const taps = s.taps + lane % 4;
    float *const staging = s.output + warp * (8 * STAGING_PITCH);
    for_each_tile<UNITS>(s, warp, images, tiles, [&](const WorkTile &tile, int stage, int unit) {
        const unsigned *const stage_words = s.stages + stage * STAGE_WORDS;
        const int exponent = s.exponents[stage];
#pragma unroll 1
        for (; unit < UNITS; unit += MATH_WARPS) {
            const Positions positions(tile, unit / COLUMN_GROUPS, lane, stage_words, y);
            const int first_tile = unit % COLUMN_GROUPS * GROUP_TILES;
            Accumulators sums[GROUP_TILES] = {};
            main_loop(sums, positions.words, taps, filters, first_tile);
#pragma unroll
            for (int n = 0; n < GROUP_TILES; n++)
                if (COLUMN_TILES % GROUP_TILES == 0 || first_tile + n < COLUMN_TILES)
                    store(staging, s.filter_scales, sums[n], positions, first_tile + n, exponent, lane);
        }
        return unit;
    });
}

// warpgroup_mma: an implicit GEMM by wgmma (sm_90a). A warpgroup multiplies 64 positions, whose words go from shared
// memory to registers (A), by a column group in shared memory (B), while producer warps convert the next tile's inputs
// to fp16 words (high and low components).
//
//                                 w_high           w_low          8 group_tiles GEMM columns each, B
//                          +----------------+----------------+
//     64 positions  x_high |  main sums     |  w_low sums    |    a wgmma m64 n(16 group_tiles) k16
//     A                    +----------------+----------------+
//                   x_low  |  x_low sums    |                     a wgmma m64 n(8 group_tiles) k16
//                          +----------------+
//
// Both wgmmas are issued per k-step and output row. With one component only the main sums exist. The cross sum of
// split.cuh is the w_low sum plus the x_low sum.
//
// A position is a vertical run of neighbouring outputs in one output column: OUTPUT_ROWS of them, each with
// separate accumulators, or filter_shifts of them, each with a separate GEMM column. The words of input row p serve
// output row r with filter row p - r, so they are read once for up to OUTPUT_ROWS products:
//
//     input row 0    filter row 0 -> output row 0
//     input row 1    filter row 1 -> output row 0,   filter row 0 -> output row 1
//     input row 2    filter row 2 -> output row 0,   filter row 1 -> output row 1,   filter row 0 -> output row 2   ...
//
// Only whole k-steps of a filter row are shared in this way, ROW_STEPS per row. Words that fill no whole k-step of a
// row are collected in rest_k_steps k-steps at the end, and read once per output row.
//
// A tile's work comes in units of 64 positions (a row block) times one column group. Per unit, a warpgroup
//   1. runs the main loop: for each k-step it loads the next A fragment while the tensor cores multiply this one, and
//      stores a few of the previous unit's outputs;
//   2. writes its sums to a staging area in shared memory, so that the lanes of a warp then store neighbouring outputs.
//
// Config of the course's last layer: tile_images 1, tile_lines 9, row_accumulators 3, filter_shifts 1, row_k_steps 5,
// rest_k_steps 2, k_steps 37, group_tiles 3, column_groups 1, math_warps 12, consumer_registers 152, input_from_global.
//
// Arithmetic: 2 M C K K FLOP per output pixel, done 3 times (once with one component). Bytes: x once, K - 1 rows more
// per tile, and y once. The course's last layer (12 x 33 x 33, 24 filters of 7 x 7) has 168 FLOP per byte; an H200
// balances at 69, a third of its fp16 rate over its memory's. What limits it: shared memory and tensor cores together,
// and the registers that hold the sums. Restrictions: sm_90a; group_tiles components <= 32; 2 to 104 A fragments per
// unit (ALL_STEPS), because the loop over them is unrolled; at most 24 k-steps if they do not go row by row
// (_candidate_tiles.py). See "Asynchronous warpgroup level matrix instructions" in the PTX ISA, and CUTLASS's
// persistent cooperative kernels.

constexpr int WARPGROUPS = MATH_WARPS / 4;
// A thread's sums per output row: one component of w, and all.
constexpr int COMPONENT_SUMS = 4 * GROUP_TILES, SUMS = COMPONENTS * COMPONENT_SUMS;
constexpr int SHARED_ROW_STEPS = ROW_STEPS * (K + OUTPUT_ROWS - 1);
constexpr int ALL_STEPS = SHARED_ROW_STEPS + OUTPUT_ROWS * Config::rest_k_steps;  // k-steps that are read
constexpr int PER_ROW = ROW_STEPS ? ROW_STEPS : 1;                                // divisors
constexpr int PER_REST = Config::rest_k_steps ? Config::rest_k_steps : 1;
constexpr int REST_BEGIN = K * ROW_STEPS;  // the filters' first rest k-step
constexpr int FILTER_STEP = COLUMN_GROUPS * COMPONENTS * GROUP_TILES * 16;  // of B per k-step, in 16 bytes
constexpr int ROW_BYTES = 4 * ROW_STRIDE;

// A thread's sums of one unit. In `with_x_high` those with w_high come first, then those with w_low.
struct Accumulators {
    float with_x_high[OUTPUT_ROWS][SUMS] = {}, with_x_low[OUTPUT_ROWS][COMPONENT_SUMS] = {};
    float promoted[PROMOTES ? OUTPUT_ROWS : 1][PROMOTES ? COMPONENT_SUMS : 1] = {};

    // Start the products of one k-step for output rows first to last, and commit them. `b` describes the filters'
    // k-step of row 0; that of each further row lies `row_step` before it. A unit's first k-step overwrites the sums of
    // row 0: if they began as zeros, the compiler would add a wait for all products (ptxas C7517). The sums of the
    // other rows do begin as zeros: if they were overwritten too, it would serialize all products for want of
    // registers (C7512).
    __device__ __forceinline__ void start_products(const Fragment &f, Descriptor b, int first, int last, int row_step,
                                                   bool overwrite) {
        wgmma_fence();
#pragma unroll
        for (int r = 0; r < OUTPUT_ROWS; r++) {
            if (OUTPUT_ROWS > 1 && (r < first || r > last)) continue;
            WGMMA_ALL_COMPONENTS(with_x_high[r], f.a[0], b - r * row_step, overwrite && r == 0);
        }
#pragma unroll
        for (int r = 0; r < OUTPUT_ROWS && COMPONENTS == 2; r++) {
            if (OUTPUT_ROWS > 1 && (r < first || r > last)) continue;
            WGMMA_HIGH_COMPONENT(with_x_low[r], f.a[COMPONENTS - 1], b - r * row_step, overwrite && r == 0);
        }
        wgmma_commit();
    }

    // Wait for all products, and promote the main sums.
    __device__ __forceinline__ void promote_all() {
        wgmma_wait<0>();
        // A loop of one iteration that the compiler cannot see through: sums that change between wgmmas in
        // straight-line code make it serialize all of them (ptxas, C7511).
        int once = 1;
        hide_from_compiler(once);
#pragma unroll 1
        for (int i = 0; i < once; i++) {
#pragma unroll
            for (int r = 0; r < OUTPUT_ROWS; r++)
#pragma unroll
                for (int v = 0; v < COMPONENT_SUMS; v++)
                    promote(with_x_high[r][v], promoted[PROMOTES ? r : 0][PROMOTES ? v : 0]);
        }
    }

    // Value v of column tile n and output row r, not yet rescaled.
    __device__ __forceinline__ float total(int r, int n, int v) const {
        const int at = 4 * n + v, at_low = (COMPONENTS - 1) * COMPONENT_SUMS + at;
        const float sum = join_sums(with_x_high[r][at], with_x_high[r][at_low] + with_x_low[r][at]);
        return PROMOTES ? sum + promoted[PROMOTES ? r : 0][PROMOTES ? at : 0] : sum;
    }
};

// ---- Epilogue, second half: from the staging area to y. It comes first here because it runs between the k-steps of
// the next unit's main loop: a warpgroup that stores starts no products, and the others cannot fill that gap.

// Floats from one GEMM column to the next, as in _tiles.py: columns 2 t of a warp then begin 8 banks apart.
constexpr int STAGING_PITCH = 64 + 4;
constexpr int STAGING = OUTPUT_ROWS * 8 * GROUP_TILES * STAGING_PITCH;  // floats of a warpgroup
constexpr int STORES = OUTPUT_ROWS * COMPONENT_SUMS;                    // outputs of a lane
constexpr int STORES_PER_STEP = (STORES + ALL_STEPS - 2) / (ALL_STEPS - 1);

// The staged outputs of a warpgroup's previous unit. Warps 0 and 1 store its positions 0 to 31, warps 2 and 3 positions
// 32 to 63. In each pair one warp takes the even GEMM columns and the other the odd ones: `first_column` is 0 or 1.
struct StagedOutput {
    static constexpr bool ALL_COLUMNS = GEMM_COLUMNS % (8 * GROUP_TILES * COLUMN_GROUPS * FILTER_BLOCKS) == 0;
    static constexpr bool ALL_ROWS = OH % POSITION_ROWS == 0;
    static_assert(8 % FILTER_SHIFTS == 0, "(first + n) / FILTER_SHIFTS is computed as two quotients");
    const float *from;
    float *to;
    int rows;     // output rows that exist, from the lane's first row on; 0 before the first unit
    int columns;  // GEMM columns that exist, from the lane's first on

    __device__ __forceinline__ explicit StagedOutput(const float *staging)
        : from(staging), to(nullptr), rows(0), columns(0) {}
    __device__ __forceinline__ StagedOutput(const float *staging, float *y, const WorkTile &tile, int row_block,
                                            int first_column_tile) {
        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
        const int first_column = warp % 2, in_unit = warp / 2 * 32 + lane;
        const int at = row_block * 64 + in_unit, line = at / TILE_COLUMNS, image = line / TILE_LINES;
        const int row = tile.row + line % TILE_LINES * POSITION_ROWS + first_column % FILTER_SHIFTS;
        const int column = at % TILE_COLUMNS;
        from = staging + first_column * STAGING_PITCH + in_unit;
        columns = GEMM_COLUMNS - first_column_tile * 8 - first_column;
        rows = image < tile.images ? OH - row : 0;
        to = image_of(y, tile.image + image, OUTPUTS) + row * index_t(OW) + column;
        to += index_t((first_column_tile * 8 + first_column) / FILTER_SHIFTS) * PIXELS;
    }
    // Output i of the lane is read in one k-step and stored in the next, so one k-step has no stores.
    __device__ __forceinline__ float read(int i) const {
        const int n = i % COMPONENT_SUMS * 2, r = i / COMPONENT_SUMS;
        return from[(r * (8 * GROUP_TILES) + n) * STAGING_PITCH];
    }
    __device__ __forceinline__ void store(int i, float value) const {
        const int n = i % COMPONENT_SUMS * 2, r = i / COMPONENT_SUMS, down = r * FILTER_SHIFTS + n % FILTER_SHIFTS;
        if ((ALL_COLUMNS || n < columns) && (ALL_ROWS ? 0 : down) < rows)
            __stcs(to + n / FILTER_SHIFTS * PIXELS + down * index_t(OW), value);
    }
    __device__ __forceinline__ void store_all() const {
#pragma unroll
        for (int i = 0; i < STORES; i++) store(i, read(i));
    }
};

// ---- Main loop: all k-steps of a unit, from the words at `words` and the filters at `b`. The last products may still
// be running on exit. While the products of one fragment are added, the next fragment is loaded.
//
// The loop over k-steps is unrolled. A pattern is the relative offsets of the four words of half a k-step; halves with
// the same pattern share an address register. HALF_STEPS has the offset of the first word and the pattern of each half;
// PATTERN_EXAMPLES has one half per pattern. With a prefetch distance of two fragments OUTPUT_ROWS 2 is faster, but
// OUTPUT_ROWS 3, which gains more, has too few registers for that.
constexpr int PATTERNS = Config::address_patterns > 0 ? Config::address_patterns : 1;
__device__ __forceinline__ void main_loop(Accumulators &accumulators, const FirstWords &words, const int2 *taps,
                                          Descriptor b, const StagedOutput &output) {
    // Static: the compiler then knows the values before it asks whether the addresses are in shared memory.
    static constexpr int HALF_STEPS[][2] = {HALF_STEP_TABLE}, PATTERN_EXAMPLES[] = {PATTERN_TABLE};
    const unsigned char *by_pattern[PATTERNS];
    const int second_position = words.of[1] - words.of[0];
#pragma unroll
    for (int i = 0; i < PATTERNS; i++) {
        const int2 tap = taps[PATTERN_EXAMPLES[i] / 2 * 4];
        by_pattern[i] = words.of[0] + ((PATTERN_EXAMPLES[i] % 2 ? tap.y : tap.x) - HALF_STEPS[PATTERN_EXAMPLES[i]][0]);
    }
    hide_from_compiler(b);  // otherwise it precomputes the descriptors of all k-steps, and keeps them
    Fragment fragments[2];
    const auto load = [&](int k) {
        Fragment &f = fragments[k % 2];
        const int rest = k - SHARED_ROW_STEPS;
        if (k < SHARED_ROW_STEPS && Config::address_patterns > 0) {
            const int half = k % PER_ROW * 2, row = k / PER_ROW * ROW_BYTES;
            const int x = HALF_STEPS[half][0] + row, y = HALF_STEPS[half + 1][0] + row;
            const auto first = by_pattern[HALF_STEPS[half][1]], second = by_pattern[HALF_STEPS[half + 1][1]];
            f.load(first + x, first + second_position + x, second + y, second + second_position + y);
        } else if (k < SHARED_ROW_STEPS) f.load(words, taps[k % PER_ROW * 4], k / PER_ROW * ROW_BYTES);
        else if (k < ALL_STEPS) f.load(words, taps[(REST_BEGIN + rest % PER_REST) * 4], rest / PER_REST * ROW_BYTES);
    };
    float outgoing[STORES_PER_STEP];
    load(0);
#pragma unroll
    for (int k = 0; k < ALL_STEPS; k++) {
        const int input_row = k / PER_ROW, rest = k - SHARED_ROW_STEPS, r = rest / PER_REST;
        const Fragment &f = fragments[k % 2];
        if (k < SHARED_ROW_STEPS)
            accumulators.start_products(f, b + k * FILTER_STEP, input_row - K + 1, input_row, ROW_STEPS * FILTER_STEP,
                                        k == 0);
        else accumulators.start_products(f, b + (REST_BEGIN + rest % PER_REST) * FILTER_STEP, r, r, 0, k == 0);
#pragma unroll
        for (int i = 0; i < STORES_PER_STEP; i++) {
            const int now = k * STORES_PER_STEP + i, before = now - STORES_PER_STEP;
            if (before >= 0 && before < STORES) output.store(before, outgoing[i]);
            if (now < STORES) outgoing[i] = output.read(now);
        }
        wgmma_wait<1>();
        // The wgmmas of k-step k - 1 read their fragment until this wait; the compiler must not overwrite it before.
#pragma unroll
        for (int i = 0; i < 4 * COMPONENTS && k > 0; i++) hide_from_compiler(fragments[(k + 1) % 2].a[i / 4][i % 4]);
        load(k + 1);
        if (PROMOTES && (k + 1) % PROMOTION_INTERVAL == 0) accumulators.promote_all();
    }
}

// ---- Epilogue, first half: rescale the sums and write them to the staging area. On entry all products are complete,
// and all threads of the warpgroup have stored the previous unit's outputs. The caller must synchronise the warpgroup
// (a named barrier) before any thread reads the staging area.
__device__ __forceinline__ void stage_output(const Shared &s, const Accumulators &accumulators, float *staging,
                                             int exponent, int first_column_tile) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4, g = lane / 4, t = lane % 4;
#pragma unroll
    for (int r = 0; r < OUTPUT_ROWS; r++)
#pragma unroll
        for (int n = 0; n < GROUP_TILES; n++) {
            OutputScale scales[2];
#pragma unroll
            for (int i = 0; i < 2; i++)
                scales[i] = OutputScale(exponent, s.filter_scales[(first_column_tile + n) * 8 + 2 * t + i]);
#pragma unroll
            for (int v = 0; v < 4; v++) {
                const int column = (r * GROUP_TILES + n) * 8 + 2 * t + v % 2;
                staging[column * STAGING_PITCH + 16 * warp + v / 2 * 8 + g] =
                    scales[v % 2](accumulators.total(r, n, v), accumulators.with_x_high[r][4 * n + v]);
            }
        }
}

// A warpgroup's loop over units of all tiles.
__device__ __forceinline__ void consume(const Shared &s, float *y, const unsigned *, int images, int tiles) {
    const int lane = threadIdx.x % 32, warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0), warp = threadIdx.x / 32 % 4;
    const int g = lane / 4;
    const int2 *const taps = s.taps + lane % 4;
    float *const staging = s.output + warpgroup * STAGING;
    StagedOutput output(staging);
    const Descriptor filters = matrix_descriptor(shared_address(s.filters), 128, 256);
    const int block_column_tile = blockIdx.x % FILTER_BLOCKS * (COLUMN_GROUPS * GROUP_TILES);
    for_each_tile<UNITS>(s, warpgroup, images, tiles, [&](const WorkTile &tile, int stage, int unit) {
        const unsigned *const stage_words = s.stages + stage * STAGE_WORDS;
        const int exponent = s.exponents[stage];
#pragma unroll 1
        for (; unit < UNITS; unit += WARPGROUPS) {
            const int row_block = unit / COLUMN_GROUPS, column_tile_in_block = unit % COLUMN_GROUPS * GROUP_TILES;
            const int first_column_tile = block_column_tile + column_tile_in_block;  // counted in the layer
            FirstWords words;  // of positions g and g + 8
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const unsigned *const first = stage_words + first_word(row_block * 64 + warp * 16 + i * 8 + g);
                words.of[i] = reinterpret_cast<const unsigned char *>(first);
            }
            const Descriptor b = filters + column_tile_in_block * (COMPONENTS * 16);
            Accumulators accumulators;
            main_loop(accumulators, words, taps, b, output);
            wgmma_wait<0>();

            named_barrier(WARPGROUP_BARRIER + warpgroup, 128);  // all have stored the previous unit's outputs
            stage_output(s, accumulators, staging, exponent, first_column_tile);
            named_barrier(WARPGROUP_BARRIER + warpgroup, 128);
            output = StagedOutput(staging, y, tile, row_block, first_column_tile);
        }
        return unit;
    });
    output.store_all();
}

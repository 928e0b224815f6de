// implicit_gemm: an implicit GEMM by wgmma (sm_90a) that reads its inputs from shared memory, without an im2col copy.
//
//                                   wgmma_n positions: eight neighbours of each of PIECE_LINES lines, in shared memory
//                                 +-----------------------------------------------+
//     64 rows of A: filters in    |  sums in registers: main (x_high w_high),     |
//     registers (high) and in     |  cross (x_high w_low + x_low w_high)          |
//     shared memory (low)         +-----------------------------------------------+
//
// A position is row_accumulators rows of two outputs. Row 16 w + 8 q + g of A is filter filter_of_row((w %
// group_tiles) 8 + g), moved w / group_tiles rows down and q columns to the right. A k-step is two units
// (implicit_gemm_operands.cu); the descriptors of two units differ only in their start addresses, so the im2col matrix
// exists only as addresses.
//
// Two warpgroups take turns ("ping-pong" in CUTLASS): one stores its sums while the tensor cores work for the other.
//
// Config of the second layer of the course's 2018 spring: tile_images 1, tile_lines 13, row_accumulators 2, wgmma_n
// 104, k_steps 14, group_tiles 2, math_warps 8, producer_warps 4, consumer_registers 216, bulk_store, output_pitch 676.
//
// Arithmetic: 3 (once with one component) times 64 x 16 k_steps products per position, of which row_accumulators x 2 x
// M x C K K are wanted. Bytes: x once, K - 1 rows more per tile, and y once: 50 FLOP per byte for the second layer of
// the course's 2018 spring. What limits it: shared-memory bandwidth, half of which B takes, and the registers of a
// thread: 4 k_steps for filters, wgmma_n / 2 or wgmma_n for sums. Restrictions: sm_90a; at most 32 / row_accumulators
// filters; at most 14 k-steps, which are not promoted. See "Asynchronous warpgroup level matrix instructions" in the
// PTX ISA.

constexpr int WARPGROUPS = 2;
constexpr int SUMS = Config::wgmma_n / 2;                    // of a thread
constexpr int FILTER_PITCH = Config::bulk_store ? Config::output_pitch : PIXELS;
constexpr int OUTPUT_STAGE = Config::staged_outputs / 2;     // floats of one tile's outputs; two tiles are staged
static_assert(UNITS >= WARPGROUPS, "a warpgroup releases a stage after its last unit of the tile");

constexpr bool ALL_LINES = OH % (OUTPUT_ROWS * TILE_LINES) == 0 && TILE_LINES % PIECE_LINES == 0;

// Offset from a position's first unit to the `unit`-th one that the filters multiply, in units of 16 bytes.
__device__ constexpr int unit_offset(int unit) {
    return unit / (FILTER_PAIRS * FILTER_LINES) * (PLANE_STRIDE / 4) + unit / FILTER_PAIRS % FILTER_LINES * ROW_STRIDE +
           unit % FILTER_PAIRS;
}

// Main loop of one piece, whose first position's units begin at `b`. On exit the sums are complete.
__device__ __forceinline__ void main_loop(const Shared &s, float (&main)[SUMS], float *cross,
                                          const unsigned (&filters)[K_STEPS][4], Descriptor low_filters, Descriptor b,
                                          int warpgroup) {
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < K_STEPS; k++) {
        if (k == K_STEPS - 1) mbarrier_arrive(s.barriers + MAY_MULTIPLY + 1 - warpgroup);
        // The k-step's two units. If there is only one, it is read twice; the second weights are zero.
        const int first = unit_offset(2 * k), second = unit_offset(min(2 * k + 1, FILTER_UNITS - 1));
        const Descriptor both = b + (first | (second - first) << 16);
        WGMMA_REGISTERS(main, filters[k], both, k == 0);
        if (COMPONENTS < 2) continue;
        WGMMA_SHARED(cross, low_filters + k * 128, both, k == 0);
        WGMMA_REGISTERS(cross, filters[k], both + LOW / 4, false);
    }
    wgmma_commit();
}

// Store both outputs of one position and row; the second may not exist.
__device__ __forceinline__ void store(float *to, float first, float second, int column) {
    if (Config::bulk_store) {
        *reinterpret_cast<float2 *>(to) = make_float2(first, second);
    } else {
        __stcs(to, first);
        if (OW % 2 == 0 || column + 1 < OW) __stcs(to + 1, second);
    }
}

// Epilogue of one piece, which begins at `line` and `strip` of an image: store the lane's outputs to the staging area
// or to y. These are outputs of `filter`, `down` rows below each position.
__device__ __forceinline__ void store_piece(const Shared &s, float *y, const WorkTile &tile, int stage, int image,
                                            int line, int strip, int filter, int down, int swap, int t,
                                            OutputScale scale, const float (&main)[SUMS], const float *cross) {
    const int column = 16 * strip + 4 * t;
    float *const staged =
        s.output + stage * OUTPUT_STAGE + image * (M * Config::output_pitch) + filter * FILTER_PITCH;
    float *const map =
        image_of(y, tile.image + image, OUTPUTS) + filter * index_t(FILTER_PITCH) + tile.row * index_t(OW);
    float *const to = (Config::bulk_store ? staged : map) + (line * OUTPUT_ROWS + down) * OW + column;
    const int lines = filter < M && image < tile.images
                          ? min(TILE_LINES, (OH - tile.row - down + OUTPUT_ROWS - 1) / OUTPUT_ROWS) - line
                          : 0;
    // The number of lines that have the position stored first, and of those that have the one stored second.
    const int first_lines = column + swap < 2 * TILE_COLUMNS ? lines : 0;
    const int second_lines = column + 2 - swap < 2 * TILE_COLUMNS ? lines : 0;
#pragma unroll
    for (int i = 0; i < PIECE_LINES; i++) {
        float v[2][2];  // of positions 2 t and 2 t + 1, both outputs
#pragma unroll
        for (int j = 0; j < 2; j++)
#pragma unroll
            for (int q = 0; q < 2; q++) {
                const int d = 4 * i + 2 * q + j;
                v[j][q] = scale(join_sums(main[d], cross[COMPONENTS == 2 ? d : 0]), main[d]);
            }
        float *const row = to + i * (OUTPUT_ROWS * OW);
        const float first[] = {swap ? v[1][0] : v[0][0], swap ? v[1][1] : v[0][1]};
        const float second[] = {swap ? v[0][0] : v[1][0], swap ? v[0][1] : v[1][1]};
        if (ALL_LINES ? first_lines > 0 : i < first_lines) store(row + swap, first[0], first[1], column + swap);
        if (ALL_LINES ? second_lines > 0 : i < second_lines)
            store(row + 2 - swap, second[0], second[1], column + 2 - swap);
    }
}

// Have the TMA unit store a tile's staged outputs while the math warps go on. It writes whole runs of y: only their
// ends are parts of a 32-byte sector.
__device__ __forceinline__ void store_staged_output(const float *staged, float *y, const WorkTile &tile, int thread) {
    constexpr int RUN = TILE_ROWS * OW, PITCH = Config::output_pitch;
    if (RUN == PIXELS && PITCH == PIXELS) {  // staged images lie as they do in y
        if (thread == 0) bulk_store(image_of(y, tile.image, OUTPUTS), staged, 4 * tile.images * OUTPUTS);
    } else {
        for (int i = thread; i < tile.images * M; i += 128)
            bulk_store(image_of(y, tile.image + i / M, OUTPUTS) + i % M * PIXELS + tile.row * index_t(OW),
                       staged + i * PITCH, 4 * min(RUN, (OH - tile.row) * OW));
    }
    bulk_store_commit();
}

// The math warps' loop over tiles. The warpgroups take the pieces of all tiles in turn, so that neither waits because
// the other has one more piece of a tile.
__device__ __forceinline__ void consume(const Shared &s, float *y, const unsigned *global, int images, int tiles) {
    const int lane = threadIdx.x % 32, warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0), g = lane / 4, t = lane % 4;
    const int warp = threadIdx.x / 32 % 4, down = warp / GROUP_TILES;
    const int filter = filter_of_row(warp % GROUP_TILES * 8 + g);
    // Some lanes stage the second of two neighbouring positions first, so that four filters' lie in different banks.
    const int swap = Config::bulk_store && (GROUP_TILES == 1 ? g % 2 : g / 2 % 2) ? 2 : 0;
    const uint4 *const from = reinterpret_cast<const uint4 *>(global) + threadIdx.x % 128;
    alignas(16) unsigned filters[K_STEPS][4];
#pragma unroll
    for (int k = 0; k < K_STEPS; k++) *reinterpret_cast<uint4 *>(filters[k]) = from[k * 128];
    const Descriptor low_filters = matrix_descriptor(shared_address(s.filters), 128, 256);
    int iteration = 0, next_unit = warpgroup, done = 0, storing = -1, number = blockIdx.x;
    for (; number < tiles; iteration++) {
        const WorkTile tile(number, images);
        const int stage = iteration % STAGES;
        mbarrier_wait(s.barriers + FULL + stage, iteration / STAGES);
        number = next_tile(s, stage);
        const OutputScale scale(s.exponents[stage], s.filter_scales[min(filter, COLUMN_TILES * 8 - 1)]);
        int unit = next_unit;
#pragma unroll 1
        for (; unit < UNITS; unit += WARPGROUPS) {
            const int image = unit / PIECES, strip = unit % STRIPS, line = unit % PIECES / STRIPS * PIECE_LINES;
            const unsigned at = shared_address(s.stages + stage * STAGE_WORDS + image * IMAGE_WORDS) / 16 +
                                line * ROW_STRIDE + 8 * strip;
            Descriptor b = at | Descriptor(ROW_STRIDE) << 32;  // the next line's eight positions
            hide_from_compiler(b);  // otherwise it precomputes the descriptors of all k-steps, and keeps them
            float main[SUMS], cross[COMPONENTS == 2 ? SUMS : 1];
            if (warpgroup || done) mbarrier_wait(s.barriers + MAY_MULTIPLY + warpgroup, done - 1 + warpgroup);
            main_loop(s, main, cross, filters, low_filters, b, warpgroup);
            done++;
            wgmma_wait<0>();
            if (unit + WARPGROUPS >= UNITS) mbarrier_arrive(s.barriers + EMPTY + stage);
            // Wait until the TMA unit has read the outputs of iteration `storing`, whose store this warpgroup issued.
            if (Config::bulk_store && storing >= 0) {
                bulk_store_wait_read();
                mbarrier_arrive(s.barriers + OUTPUT_STORED + storing % 2);
                storing = -1;
            }
            if (Config::bulk_store && iteration > 1) mbarrier_wait(s.barriers + OUTPUT_STORED + stage, iteration / 2 - 1);

            store_piece(s, y, tile, stage, image, line, strip, filter, down, swap, t, scale, main, cross);
        }
        next_unit = unit - UNITS;
        if (!Config::bulk_store) continue;
        fence_async_proxy();
        mbarrier_arrive(s.barriers + OUTPUT_STAGED + stage);
        // The warpgroup with the tile's last piece has the TMA unit store the tile's outputs, when all of them are
        // staged.
        if (next_unit != WARPGROUPS - 1) continue;
        mbarrier_wait(s.barriers + OUTPUT_STAGED + stage, iteration / 2);
        store_staged_output(s.output + stage * OUTPUT_STAGE, y, tile, lane * 4 + warp);
        storing = iteration;
    }
    if (Config::bulk_store) bulk_store_wait_read();
}

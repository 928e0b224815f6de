// implicit_gemm_operands: a tile's input for implicit_gemm.cu, in units of eight 16-bit floats, high and low.
//
// Word (r, c) of a pair of columns holds both of them of input row r of RA and channel c; four words in that order are a
// unit. A plane has one unit of every pair, S for a line of RA rows, then the next unit's plane begins.
//
// Inputs are split by the scale of the tile before, and looked at meanwhile; only where theirs is another, again.

// Tiles whose inputs are there or on their way; pairs of columns of a line, and of an image.
constexpr int RAWS = 1 + AHEAD, PAIRS_IN = TW + KP - 1, LINES_IN = PL / 4 / S;

// Threads of a line: sixteens, the last ones idle, where that takes no more rounds, for sixteen lanes that read one line
// read from different banks.
__device__ constexpr int rounds(int line_threads) { return (IMG * LINES_IN * line_threads + LOADERS - 1) / LOADERS; }
constexpr int SIXTEENS = (PAIRS_IN + 15) / 16 * 16;
constexpr int LINE_THREADS = rounds(SIXTEENS) == rounds(PAIRS_IN) ? SIXTEENS : PAIRS_IN, QUANTITY = LINES_IN * LINE_THREADS;

// The copy engine brings so many bytes, a multiple of 16, and tells the gate, which opens once it has had all of them.
__device__ __forceinline__ void bring(float *to, const float *from, int bytes, Gate *gate) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(address_of(to)),
                 "l"(from), "r"(bytes), "r"(address_of(gate)) : "memory");
}
__device__ __forceinline__ void expect(Gate *gate, int bytes) {
    asm volatile("{.reg .b64 state; mbarrier.arrive.expect_tx.shared::cta.b64 state, [%0], %1;}" ::"r"(address_of(gate)), "r"(bytes)
                 : "memory");
}

// By one lane of a warp; or, of rows that are not aligned, by all loading threads.
__device__ __forceinline__ void bring_tile(const Shared &s, const float *x, const Item &item, int buffer, int thread) {
    float *const raw = s.raw + buffer * RAW;
    if (XV < 4) {
        load(raw, x, item, thread);
    } else if (thread % 32 == 0) {
        const float *const from = image_of(x, item.image, IMAGE) + index_t(item.row) * W;
        Gate *const gate = s.gates + ARRIVED + buffer;
        const int bytes = WHOLE ? 4 * item.images * RAW_IMAGE : 4 * item.rows() * W;
        for (int c = 0; c < (WHOLE ? 1 : C); c++) bring(raw + c * (RAW_ROWS * W), from + c * (index_t(H) * W), bytes, gate);
        expect(gate, WHOLE ? bytes : C * bytes);
    }
}

// Every unit of the tile: a thread has all of a pair of columns. Of all inputs the largest magnitude and the smallest but
// zero, as bits; the smallest one less.
__device__ __forceinline__ void convert(unsigned *planes, const float *from, const Item &item, float scale, unsigned &most,
                                        unsigned &least, int thread) {
    // Rows and columns beyond the input meet filters of nothing, but must be numbers.
    constexpr bool ALL_ROWS = TILES_Y == 1 && LINES_IN * RA <= H, ALL_COLUMNS = 2 * PAIRS_IN <= W;
    const int rows = item.rows();
    most = 0, least = ~0u;
#pragma unroll 1
    for (int at = thread; at < item.images * QUANTITY; at += LOADERS) {
        const int line_of_all = at / LINE_THREADS, pair = at - line_of_all * LINE_THREADS, column = 2 * pair;
        const int image = IMG == 1 ? 0 : at / QUANTITY, line = line_of_all - image * LINES_IN, row = line * RA;
        if (pair >= PAIRS_IN) continue;
        const float *const x = from + image * INPUTS + row * index_t(ROW) + column;
        unsigned *const to = planes + image * IMAGE_WORDS + (line * S + pair) * 4;
#pragma unroll
        for (int unit = 0; unit < UP; unit++) {
            unsigned high[4], low[4];
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int word = 4 * unit + i, down = word / C, c = word % C;
                const bool inside = word < RA * C && (ALL_ROWS || row + down < rows);
                const float *const two = x + c * CHANNEL + down * ROW;
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
                if (word < RA * C) look_at(a, most, least), look_at(b, most, least);
                a *= scale, b *= scale;
                high[i] = to_halves(a, b), low[i] = PARTS == 2 ? to_rest(a, b, high[i]) : 0;
            }
            unsigned *const at_unit = to + unit * PL;
            *reinterpret_cast<uint4 *>(at_unit) = make_uint4(high[0], high[1], high[2], high[3]);
            if (PARTS == 2) *reinterpret_cast<uint4 *>(at_unit + LOW) = make_uint4(low[0], low[1], low[2], low[3]);
        }
    }
    most = __reduce_max_sync(~0u, most), least = __reduce_min_sync(~0u, least);
}

__device__ __forceinline__ void loader(const Shared &s, const float *x, float *y, int *marks, int images, int items) {
    const int thread = threadIdx.x - COMPUTE, blocks = gridDim.x / MBLOCKS;
    int number = blockIdx.x / MBLOCKS, coming = number + blocks, turn = 0, looks = 0, lowest = 0, highest = 0, e = 0;
    find_range(s.columns, lowest, highest);
    const bool brings = XV < 4 || __shfl_sync(~0u, thread / 32, 0) == 0;
    if (brings) {
        bring_tile(s, x, Item(number, images), 0, thread);
        if (AHEAD && coming < items) bring_tile(s, x, Item(coming, images), 1, thread);
    }
    for (; number < items; turn++) {
        const Item item(number, images);
        const int half = turn % 2, buffer = turn % RAWS;
        const int wanted = AHEAD ? coming : number;
        if (turn && wanted < items && brings)
            bring_tile(s, x, Item(wanted, images), (turn + RAWS - 1) % RAWS, thread);
        // To add to it here would wait for it.
        const int taken = thread == 0 ? atomicAdd(queue_of(marks, images), 1) : 0;
        if (XV == 4) await(s.gates + ARRIVED + buffer, turn / RAWS);
        else copies_arrived(), meet<LOADED, LOADERS>();
        if (turn > 1) await(s.gates + EMPTY + half, turn / 2 - 1);
        bool bad, again;
        do {
            unsigned most, least;
            convert(s.planes + half * STAGE, s.raw + buffer * RAW, item, __uint_as_float((127 + e) << 23), most, least, thread);
            unsigned *const found = s.found + looks++ % 2 * (2 * NP);
            if (thread % 32 == 0) found[thread / 32] = most, found[NP + thread / 32] = least;
            if (thread == 0) s.e[COMING + half] = 2 * blocks + taken;
            meet<LOADED, LOADERS>();
#pragma unroll
            for (int i = 0; i < NP; i++) most = max(most, found[i]), least = min(least, found[NP + i]);
            const Scale scale(most, least, lowest, highest);
            bad = scale.bad, again = !bad && most && scale.e != e;
            if (again) e = scale.e;
        } while (again);
        const int after_that = s.e[COMING + half];
        if (thread == 0) {
            s.e[half] = e, s.e[NEXT + half] = coming;
            if (bad) mark(marks, item.image, item.images, images);
        }
        make_visible();
        arrive(s.gates + FULL + half);
        number = coming, coming = after_that;
    }
}

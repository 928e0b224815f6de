// split_im2col_words: a tile's input for split_im2col.cu, in units of eight 16-bit floats, high and low.
//
// Word (r, c) of a pair of columns holds both of them of input row r of RA and channel c; four words in that order are a
// unit. A plane has one unit of every pair, S for a line of RA rows, then the next unit's plane begins.
//
// Inputs are split by the scale of the tile before, and looked at meanwhile; only where theirs is another, again.

// Tiles whose inputs are there or on their way; pairs of columns of a line, and of an image.
constexpr int RAWS = 1 + AHEAD, PAIRS_IN = TW + KP - 1, QUANTITY = PL / 4 / S * PAIRS_IN;

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
    constexpr bool ALL_ROWS = TILES_Y == 1 && QUANTITY / PAIRS_IN * RA <= H, ALL_COLUMNS = 2 * PAIRS_IN <= W;
    const int rows = item.rows();
    most = 0, least = ~0u;
    const auto look = [&](float value) {
        const unsigned bits = __float_as_uint(value) & 0x7fffffff;
        most = max(most, bits), least = min(least, bits - 1);
    };
#pragma unroll 1
    for (int at = thread; at < item.images * QUANTITY; at += LOADERS) {
        const int line_of_all = at / PAIRS_IN, pair = at - line_of_all * PAIRS_IN, column = 2 * pair;
        const int image = IMG == 1 ? 0 : at / QUANTITY, line = line_of_all - image * (QUANTITY / PAIRS_IN), row = line * RA;
        const float *const x = from + image * INPUTS + row * index_t(ROW) + column;
        unsigned *const to = planes + image * IMAGE_WORDS + (line * S + pair) * 4;
        // Some units are read before the first is written: the compiler does not know that they lie apart.
        constexpr int AT_ONCE = 2;
#pragma unroll
        for (int first = 0; first < UP; first += AT_ONCE) {
            float2 v[AT_ONCE][4];
#pragma unroll
            for (int i = 0; i < 4 * AT_ONCE; i++) {
                const int word = 4 * first + i, down = word / C, c = word % C;
                const bool inside = word < RA * C && (ALL_ROWS || row + down < rows);
                const float *const two = x + c * CHANNEL + down * ROW;
                float2 &to_fill = v[i / 4][i % 4];
                to_fill = make_float2(0.0f, 0.0f);
                if (W % 2 == 0) {
                    if (inside && (ALL_COLUMNS || column < W)) to_fill = *reinterpret_cast<const float2 *>(two);
                } else {
                    if (inside && (ALL_COLUMNS || column < W)) to_fill.x = two[0];
                    if (inside && (ALL_COLUMNS || column + 1 < W)) to_fill.y = two[1];
                }
                if (word < RA * C) look(to_fill.x), look(to_fill.y);
            }
#pragma unroll
            for (int i = 0; i < AT_ONCE; i++) {
                if (first + i >= UP) continue;
                unsigned high[4], low[4];
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    const float a = v[i][j].x * scale, b = v[i][j].y * scale;
                    high[j] = to_halves(a, b), low[j] = PARTS == 2 ? to_rest(a, b, high[j]) : 0;
                }
                unsigned *const unit = to + (first + i) * PL;
                *reinterpret_cast<uint4 *>(unit) = make_uint4(high[0], high[1], high[2], high[3]);
                if (PARTS == 2) *reinterpret_cast<uint4 *>(unit + LOW) = make_uint4(low[0], low[1], low[2], low[3]);
            }
        }
    }
    most = __reduce_max_sync(~0u, most), least = __reduce_min_sync(~0u, least);
}

__device__ __forceinline__ void loader(const Shared &s, const float *x, float *y, int *marks, int images, int items) {
    const int thread = threadIdx.x - COMPUTE, blocks = gridDim.x / MBLOCKS;
    int number = blockIdx.x / MBLOCKS, coming = number + blocks, turn = 0, looks = 0, lowest = 0, highest = 0, e = 0;
    find_range(s.columns, lowest, highest);
    // One warp asks the copy engine for inputs, and the last, which mostly has the least to split, gives it the outputs of
    // a tile that the teams have done: it takes hundreds of cycles, in which the others wait for inputs.
    constexpr int BEFORE = OUTS + 1;
    const int warp = __shfl_sync(~0u, thread / 32, 0);
    const bool helps = warp == NP - 1, brings = XV < 4 || warp == 1;
    int tiles[BEFORE] = {};
    const auto send_tile = [&](int turn) {
        await(s.gates + OUT_FULL + turn % 2, turn / 2);
        send(s.out + turn % OUTS * (OUT_FLOATS / OUTS), y, Item(tiles[BEFORE - 1], images), thread % 32, 32);
    };
    const auto sent = [&](int turn) {
        await_read();
        arrive(s.gates + OUT_EMPTY + turn % 2);
    };
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
        if (BULK && helps && turn >= BEFORE) send_tile(turn - BEFORE);
        const int next = thread == 0 ? 2 * blocks + atomicAdd(queue_of(marks, images), 1) : 0;
        if (XV == 4) await(s.gates + ARRIVED + buffer, turn / RAWS);
        else copies_arrived(), meet<LOADED, LOADERS>();
        if (turn > 1) await(s.gates + EMPTY + half, turn / 2 - 1);
        bool bad, again;
        do {
            unsigned most, least;
            convert(s.planes + half * STAGE, s.raw + buffer * RAW, item, __uint_as_float((127 + e) << 23), most, least, thread);
            unsigned *const found = s.found + looks++ % 2 * (2 * NP);
            if (thread % 32 == 0) found[thread / 32] = most, found[NP + thread / 32] = least;
            if (thread == 0) s.e[COMING + half] = next;
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
        if (BULK && helps && turn >= BEFORE) sent(turn - BEFORE);
#pragma unroll
        for (int i = BEFORE - 1; i > 0; i--) tiles[i] = tiles[i - 1];
        tiles[0] = number, number = coming, coming = after_that;
    }
    // What the last tiles have left.
#pragma unroll
    for (int i = 0; i < BEFORE; i++) {
        if (BULK && helps && turn >= BEFORE - i) send_tile(turn - BEFORE + i), sent(turn - BEFORE + i);
#pragma unroll
        for (int j = BEFORE - 1; j > 0; j--) tiles[j] = tiles[j - 1];
    }
}

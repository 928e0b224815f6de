// operands: a tile's input as planes of words, each of two 16-bit floats, high and low; and the warps that make them.
//
// NP warps do it for one half of the planes while the others multiply the other half. They look at a tile's values
// twice: for the largest and the smallest, then to split them.
//
// A word of a plane holds two products of one input pixel: those of two channels; of an odd last channel, of two
// neighbouring rows (PAIR_ROWS) or columns. FOLDED: columns 2 i and 2 i + 1 of one channel, for every i.

// Of the tile's inputs.
__device__ __forceinline__ void extremes(const float *from, const Item &item, int thread, unsigned &most,
                                         unsigned &least) {
    most = 0, least = ~0u;
    const auto look = [&](float value) { look_at(value, most, least); };
    if (WHOLE && RAW_IMAGE % 4 == 0 && (XV == 4 || !DIRECT)) {
        const int length = item.images * (RAW_IMAGE / 4);
#pragma unroll 4
        for (int i = thread; i < length; i += LOADERS) {
            const float4 v = reinterpret_cast<const float4 *>(from)[i];
            look(v.x), look(v.y), look(v.z), look(v.w);
        }
    } else if (WHOLE) {
        const int length = item.images * RAW_IMAGE;
#pragma unroll 8
        for (int i = thread; i < length; i += LOADERS) look(from[i]);
    } else if (TILES_X == 1) {
        const int length = item.rows() * W;
        for (int c = 0; c < C; c++)
#pragma unroll 8
            for (int i = thread; i < length; i += LOADERS) look(from[c * CHANNEL + i]);
    } else {
        const int columns = item.columns(), rows = item.rows();
        for (int run = thread / 32; run < C * rows; run += NP)
            for (int i = thread % 32; i < columns; i += 32)
                look(from[run / rows * CHANNEL + run % rows * index_t(ROW) + i]);
    }
    most = __reduce_max_sync(~0u, most), least = __reduce_min_sync(~0u, least);
}

// Two values as a word of the planes, high and low.
__device__ __forceinline__ void put(unsigned *to, float first, float second, bool real) {
    const unsigned high = to_halves(first, second), low = PARTS == 2 ? to_rest(first, second, high) : 0;
    if (real) {
        *to = high;
        if (PARTS == 2) to[LOW] = low;
    }
}

constexpr int MOST_KEPT = WGMMA ? 14 : 24;

// Whole rows: every thread has the same places in every plane, and keeps them. Of one channel, the images' planes lie
// in a row like one.
constexpr bool MERGED = C == 1 && WHOLE && ROWS == H && PL == ROWS * S;
constexpr int PLANE_LINES = MERGED ? IMG * ROWS : ROWS, PLANE_WORDS = PLANE_LINES * LINE;
constexpr int EACH = (PLANE_WORDS + LOADERS - 1) / LOADERS;
constexpr bool KEPT = (TILES_X == 1 || (!DIRECT && C % 2 == 0)) && EACH <= MOST_KEPT && (ALONG == 1 || W % 2 == 0);

struct Kept {
    int places[KEPT ? EACH : 1];
    __device__ explicit Kept(int thread) {
#pragma unroll
        for (int k = 0; k < (KEPT ? EACH : 0); k++) {
            const int word = thread + k * LOADERS;
            places[KEPT ? k : 0] = word / LINE * S + word % LINE;
        }
    }
};

// Every word of the tile's planes, zeros where the image has ended. Several words are read before the first is
// written: between two reads that wait for memory there must be no write.
__device__ __forceinline__ void convert(unsigned *planes, const float *from, const Item &item, float scale,
                                        const Kept &kept, int thread) {
    const int rows = item.rows(), columns = item.columns();
    if (KEPT) {
        const int real = (MERGED ? item.images * ROWS : rows) * LINE;
        constexpr int AT_ONCE = EACH % 8 == 0 || EACH > 16 ? 8 : EACH > 8 ? (EACH + 1) / 2 : EACH;
#pragma unroll 1
        for (int plane = 0; plane < (MERGED ? 1 : item.images * PLANES); plane++) {
            const int image = PLANES == 1 ? plane : IMG == 1 ? 0 : plane / PLANES, pair = plane - image * PLANES;
            const float *const at = from + image * INPUTS + 2 * pair * CHANNEL;
            unsigned *const to = planes + image * IMAGE_WORDS + pair * PL;
            const bool alone = C % 2 && pair == C / 2;
            const index_t other = alone ? index_t(PAIR_ROWS ? ROW : 1) : CHANNEL;
            const int both = alone ? (PAIR_ROWS ? real - LINE : ALONG == 2 ? real : real - 1) : real;
#pragma unroll
            for (int first = 0; first < EACH; first += AT_ONCE) {
                float a[AT_ONCE], b[AT_ONCE];
#pragma unroll
                for (int k = 0; k < AT_ONCE; k++) {
                    const int word = thread + (first + k) * LOADERS;
                    a[k] = first + k < EACH && word < real ? at[ALONG * word] : 0.0f;
                    b[k] = first + k < EACH && word < both ? at[ALONG * word + other] : 0.0f;
                }
#pragma unroll
                for (int k = 0; k < AT_ONCE; k++)
                    if (first + k < EACH)
                        put(to + kept.places[KEPT && first + k < EACH ? first + k : 0], a[k] * scale, b[k] * scale,
                            thread + (first + k) * LOADERS < PLANE_WORDS);
            }
        }
        return;
    }
    const int lines = item.images * (PLANES * ROWS);
    // A thread's words lie LOADERS apart, counted along the lines: it goes on by so many lines and columns.
    constexpr int DOWN = LOADERS / LINE, ACROSS = LOADERS % LINE, AT_ONCE = 8;
    int line = thread / LINE, column = thread % LINE;
    while (line < lines) {
        float a[AT_ONCE], b[AT_ONCE];
        int to[AT_ONCE];
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
            const bool real = line < lines;
            const int plane = PLANES * IMG == 1 ? 0 : line / ROWS, row = line - plane * ROWS;  // planes of all images
            const int image = IMG == 1 ? 0 : plane / PLANES, pair = plane - image * PLANES;
            const float *const at = from + image * INPUTS + 2 * pair * CHANNEL + row * index_t(ROW) + ALONG * column;
            const bool alone = C % 2 && pair == C / 2;
            const bool inside = real && ((RAW_ROWS == ROWS && WHOLE) || row < rows) &&
                                (TILES_X == 1 || ALONG * column < columns);
            const bool both = inside && (!alone || (PAIR_ROWS ? row + 1 < rows : ALONG * column + 1 < columns));
            a[i] = inside ? at[0] : 0.0f;
            b[i] = both ? at[alone ? index_t(PAIR_ROWS ? ROW : 1) : CHANNEL] : 0.0f;
            to[i] = real ? image * IMAGE_WORDS + pair * PL + row * S + column : -1;
            line += DOWN, column += ACROSS;
            if (column >= LINE) column -= LINE, line++;
        }
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) put(planes + to[i], a[i] * scale, b[i] * scale, to[i] >= 0);
    }
}

__device__ __forceinline__ void loader(const Shared &s, const float *x, float *y, int *marks, int images, int items) {
    const int thread = threadIdx.x - COMPUTE;
    int number = blockIdx.x / MBLOCKS, coming = number + gridDim.x / MBLOCKS;  // the first one's rows are on their way
    const Kept kept(thread);
    int turn = 0, lowest = 0, highest = 0, last = 0, last_but_one = 0;
    find_range(s.columns, lowest, highest);
    for (; number < items; turn++) {
        const Item item(number, images);
        const int half = turn % 2;
        // Multiprocessors store at speeds of their own, by up to a third: whichever comes first takes the next tile.
        const int after = thread == 0 ? (1 + AHEAD) * (gridDim.x / MBLOCKS) + atomicAdd(queue_of(marks, images), 1) : 0;
        const float *const direct = image_of(x, item.image, IMAGE) + index_t(item.row) * W + item.column;
        const float *const from = DIRECT ? direct : s.raw + turn % (1 + AHEAD) * RAW;
        if (!DIRECT) {
            copies_arrived();
            meet<LOADED, LOADERS>();
        }
        if (AHEAD) {
            if (turn) coming = s.e[COMING];
            if (coming < items) load(s.raw + (turn + 1) % 2 * RAW, x, Item(coming, images), thread);
        }
        unsigned most, least;
        extremes(from, item, thread, most, least);
        if (thread % 32 == 0) s.found[thread / 32] = most, s.found[NP + thread / 32] = least;
        meet<LOADED, LOADERS>();
#pragma unroll
        for (int i = 0; i < NP; i++) most = max(most, s.found[i]), least = min(least, s.found[NP + i]);
        const Scale scale(most, least, lowest, highest);
        if (turn > 1) {
            await(s.gates + EMPTY + half, turn / 2 - 1);
            if (BULK) send(s.out + half * (OUT_FLOATS / 2), y, Item(last_but_one, images), thread, LOADERS);
        }
        if (thread == 0) {
            s.e[half] = scale.e;
            if (scale.bad) mark(marks, item.image, item.images, images);
        }
        convert(s.planes + half * STAGE, from, item, scale.factor(), kept, thread);
        if (thread == 0) s.e[NEXT + half] = AHEAD ? coming : after, s.e[COMING] = after;
        await_read();
        arrive(s.gates + FULL + half);
        last_but_one = last, last = number, number = coming;
        if (AHEAD) continue;
        meet<LOADED, LOADERS>();
        number = s.e[NEXT + half];
        if (number < items) load(s.raw, x, Item(number, images), thread);
    }
    // What the last two tiles have left.
    const auto send_last = [&](int turn, int number) {
        await(s.gates + EMPTY + turn % 2, turn / 2);
        send(s.out + turn % 2 * (OUT_FLOATS / 2), y, Item(number, images), thread, LOADERS);
    };
    if (BULK && turn > 1) send_last(turn - 2, last_but_one);
    if (BULK) send_last(turn - 1, last);
    await_read();
}

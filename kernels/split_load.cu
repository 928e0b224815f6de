// split_load: how a tile's input comes to lie in shared memory, split into two 16-bit floats, for split.cu.
//
// NP warps do this for one half of the planes while the others multiply the other half. They look at a tile's values
// twice: for the largest and the smallest, which give the scale e and say whether the tile can be split at all, then
// to split them. DIRECT 0 copies them to shared memory before, AHEAD a tile earlier; DIRECT 1 reads them from the cache.
//
// A word of a plane holds two products of one input pixel: those of two channels; of an odd last channel, of two
// neighbouring rows (PAIR_ROWS) or columns. FOLDED: columns 2 i and 2 i + 1 of one channel, for every i.

constexpr int SUPER_ROWS = FOLDED ? 1 : R * RA;                // output rows of one position
constexpr int ALONG = FOLDED ? 2 : 1;                          // output columns of one position, and inputs of a word
constexpr int COLUMNS = R * M, NTILES = (COLUMNS + 7) / 8, NGROUPS = GB;  // of a block
constexpr int MBLOCKS = ((NTILES + NT - 1) / NT + GB - 1) / GB;   // blocks that share the filters
constexpr int TILES_X = (OW + ALONG * TW - 1) / (ALONG * TW), SUPER = (OH + SUPER_ROWS - 1) / SUPER_ROWS;
constexpr int TILES_Y = (SUPER + TR - 1) / TR;
constexpr int WT = TILES_X == 1 ? W : TW + K - 1;              // input columns of a tile
constexpr int ROWS = SUPER_ROWS * TR + K - 1, RAW_ROWS = ROWS < H ? ROWS : H;  // rows of a plane; input rows of a tile
constexpr int RAW_IMAGE = C * RAW_ROWS * WT, RAW = DIRECT ? 0 : IMG * RAW_IMAGE;  // floats of a copied tile
constexpr int PLANES = (C + 1) / 2, IMAGE_WORDS = PLANES * PL, LOW = IMG * IMAGE_WORDS, STAGE = PARTS * LOW;
constexpr int POSITIONS = IMG * TR * TW;
constexpr int COMPUTE = 32 * NC, LOADERS = 32 * NP, ALL = COMPUTE + LOADERS;
constexpr int PLACES_KEPT = STATIONARY ? (POSITIONS + 15) / 16 * 16 : 0;  // where positions' words begin: no divisions
constexpr int WORDS = 2 * PARTS;                               // of B for two words of products
constexpr int FILTER_WORDS = KSTEPS * NGROUPS * NT * 32 * WORDS;

__device__ __forceinline__ unsigned address_of(const void *shared) {
    return static_cast<unsigned>(__cvta_generic_to_shared(shared));
}

template <int ID, int COUNT>
__device__ __forceinline__ void meet() {
    asm volatile("barrier.cta.sync %0, %1;" ::"n"(ID), "n"(COUNT) : "memory");
}
__device__ __forceinline__ void meet(int id, int count) {
    asm volatile("barrier.cta.sync %0, %1;" ::"r"(id), "r"(count) : "memory");
}

// A gate (an mbarrier): it opens for a time once all of one side have arrived. Every lane arrives for itself.
typedef unsigned long long Gate;
__device__ __forceinline__ void make_gate(Gate *gate, int count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(address_of(gate)), "r"(count) : "memory");
}
__device__ __forceinline__ void arrive(Gate *gate) {
    asm volatile("{.reg .b64 state; mbarrier.arrive.shared::cta.b64 state, [%0];}" ::"r"(address_of(gate)) : "memory");
}
__device__ __forceinline__ bool opened(Gate *gate, int parity) {
    unsigned open;
#if __CUDA_ARCH__ >= 900
    asm volatile("{.reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}"
                 : "=r"(open) : "r"(address_of(gate)), "r"(parity) : "memory");
#else
    asm volatile("{.reg .pred p; mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}"
                 : "=r"(open) : "r"(address_of(gate)), "r"(parity) : "memory");
#endif
    return open;
}
// Wait until the gate has opened for the time of that number, from 0 on.
__device__ __forceinline__ void await(Gate *gate, int time) {
    while (!opened(gate, time & 1)) {}
    __syncwarp();
}
constexpr int LINE = (WT + ALONG - 1) / ALONG;                  // words of a plane's row

// Whole runs of outputs leave by the copy engine (BULK): it reads what all warps have put into shared memory, while they
// go on, and only the ends of a run are parts of a sector of 32 bytes. An instruction of CUDA 12.
__device__ __forceinline__ void make_visible() {
    if (BULK) asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
__device__ __forceinline__ void bulk_copy(float *to, const float *from, int bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(address_of(from)), "r"(bytes)
                 : "memory");
}
__device__ __forceinline__ void bulk_sent() {
    if (BULK) asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
__device__ __forceinline__ void await_read() {
    if (BULK) asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}
constexpr int LOADED = 1, HANDED = 2, BEGUN = 15;  // barriers: of the loaders, of a team that hands over sums, of products
constexpr int FULL = 0, EMPTY = 2, GATES = 4;  // of both halves of the planes
constexpr int NEXT = 2, COMING = 4;  // behind the scales of both halves: the tile after the one there; one more (AHEAD)

// A tile: its first image and how many there are, its first output row and column.
struct Item {
    int image, images, row, column;
    __device__ Item(int item, int all) {
        const int tile = item % (TILES_X * TILES_Y);
        image = item / (TILES_X * TILES_Y) * IMG;
        images = min(IMG, all - image);
        row = tile / TILES_X * (SUPER_ROWS * TR);
        column = tile % TILES_X * TW;
    }
    __device__ int rows() const { return RAW_ROWS == H ? H : min(RAW_ROWS, H - row); }
    __device__ int columns() const { return TILES_X == 1 ? W : min(WT, W - column); }
};

struct Shared {
    unsigned *filters, *planes, *found;
    int2 *taps;
    float *raw, *out;
    int *columns, *e;
    unsigned short *places;
    Gate *gates;

    __device__ explicit Shared(unsigned char *at) {
        const auto take = [&](int bytes) {
            unsigned char *const mine = at;
            at += (bytes + 127) / 128 * 128;
            return static_cast<void *>(mine);
        };
        filters = static_cast<unsigned *>(take(W_SHARED ? 4 * FILTER_WORDS : 0));
        raw = static_cast<float *>(take(4 * (1 + AHEAD) * RAW));
        planes = static_cast<unsigned *>(take(4 * (2 * STAGE)));
        taps = static_cast<int2 *>(take(KSTEPS * 4 * 8));
        out = static_cast<float *>(take(OUT_FLOATS * 4));
        columns = static_cast<int *>(take(MBLOCKS * GB * NT * 8 * 4));
        e = static_cast<int *>(take(20));
        found = static_cast<unsigned *>(take(2 * NP * 4));
        places = static_cast<unsigned short *>(take(2 * PLACES_KEPT));
        gates = static_cast<Gate *>(take(GATES * 8));
    }
};

// Where a tile's input is read from: floats from one row, channel and image to the next.
constexpr bool WHOLE = TILES_X == 1 && RAW_ROWS == H;           // all of one or several images
constexpr int ROW = DIRECT ? W : WT;
constexpr index_t CHANNEL = DIRECT ? index_t(H) * W : index_t(RAW_ROWS) * WT;
constexpr index_t INPUTS = DIRECT ? IMAGE : index_t(RAW_IMAGE);

template <int V>
__device__ __forceinline__ void copy(float *to, const float *from) {
    const unsigned at = address_of(to);
    if (V == 4) asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(at), "l"(from) : "memory");
    else asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(at), "l"(from), "n"(4 * V) : "memory");
}

__device__ __forceinline__ void copies_arrived() {
    if (!DIRECT) {
        asm volatile("cp.async.wait_group 0;" ::: "memory");
    }
}

// Input rows of a tile to shared memory, as they are.
__device__ __forceinline__ void load(float *raw, const float *x, const Item &item, int thread) {
    if (DIRECT) return;
    const float *const from = image_of(x, item.image, IMAGE) + index_t(item.row) * W + item.column;
    if (WHOLE) {
        for (int i = thread * XV; i < item.images * RAW_IMAGE; i += LOADERS * XV) copy<XV>(raw + i, from + i);
    } else if (TILES_X == 1) {
        const int length = item.rows() * W;
        for (int c = 0; c < C; c++)
            for (int i = thread * XV; i < length; i += LOADERS * XV)
                copy<XV>(raw + c * (RAW_ROWS * W) + i, from + c * (index_t(H) * W) + i);
    } else {
        const int columns = item.columns(), rows = item.rows();
        for (int run = thread / 32; run < C * rows; run += NP) {
            const int c = run / rows, row = run - c * rows;
            for (int i = thread % 32; i < columns; i += 32)
                copy<1>(raw + (c * RAW_ROWS + row) * WT + i, from + (c * index_t(H) + row) * W + i);
        }
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
}

// The largest and the smallest magnitude but zero among the tile's inputs, as bits; the smallest one less.
__device__ __forceinline__ void extremes(const float *from, const Item &item, int thread, unsigned &most,
                                         unsigned &least) {
    most = 0, least = ~0u;
    const auto look = [&](float value) {
        const unsigned bits = __float_as_uint(value) & 0x7fffffff;
        most = max(most, bits), least = min(least, bits - 1);
    };
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
constexpr int PLACES = KEPT ? EACH : 1;

__device__ __forceinline__ void find_places(int (&places)[PLACES], int thread) {
#pragma unroll
    for (int k = 0; k < PLACES; k++) {
        const int word = thread + k * LOADERS;
        places[k] = word / LINE * S + word % LINE;
    }
}

// Every word of the tile's planes, zeros where the image has ended. Several words are read before the first is
// written: between two reads that wait for memory there must be no write.
__device__ __forceinline__ void convert(unsigned *planes, const float *from, const Item &item, float scale,
                                        const int (&places)[PLACES], int thread) {
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
                        put(to + places[first + k < EACH ? first + k : 0], a[k] * scale, b[k] * scale,
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

// How many tiles the blocks that share these filters have taken, beside their first ones: behind the images' marks.
__device__ __forceinline__ int *queue_of(int *marks, int images) {
    return marks + 1 + 2ll * images + blockIdx.x % MBLOCKS;
}

__device__ __forceinline__ void mark(int *marks, int image, int images, int all) {
    for (int i = image; i < image + images; i++)
        if (atomicExch(marks + 1 + all + i, 1) == 0) marks[1 + atomicAdd(marks, 1)] = i;
}

// A tile's outputs to y: of one half of the staging memory, all filters of all images.
__device__ __forceinline__ void send(const float *staged, float *y, const Item &item, int thread) {
    constexpr int RUN = SUPER_ROWS * TR * OW, PITCH = OUT_PITCH;
    const int bytes = 4 * min(RUN, (OH - item.row) * OW);
    for (int i = thread; i < item.images * M; i += LOADERS)
        bulk_copy(image_of(y, item.image + i / M, OUTPUTS) + i % M * PIXELS + item.row * index_t(OW), staged + i * PITCH, bytes);
    bulk_sent();
}

__device__ __forceinline__ void loader(const Shared &s, const float *x, float *y, int *marks, int images, int items) {
    const int thread = threadIdx.x - COMPUTE;
    int number = blockIdx.x / MBLOCKS, coming = number + gridDim.x / MBLOCKS;  // the first one's rows are on their way
    int places[PLACES], turn = 0, lowest = 0, highest = 0, last = 0, last_but_one = 0;
    if (KEPT) find_places(places, thread);
    for (int i = thread % 32; i < COLUMNS; i += 32)
        lowest = min(lowest, exponent_of(s.columns[i])), highest = max(highest, exponent_of(s.columns[i]));
    lowest = __reduce_min_sync(~0u, lowest), highest = __reduce_max_sync(~0u, highest);
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
        const int exponent = most >> 23, e = most == 0 ? 0 : 141 - exponent;  // 2^(exponent - 127) <= largest
        const unsigned limit = max(exponent - SPREAD, 1) << 23;               // denormal numbers count as too small
        // 2^(e + f) must be a float32 number too, for every filter.
        const bool far = e > MOST_SCALE || e + lowest < -126 || e + highest > 126;
        const bool bad = most && (exponent == 255 || far || least + 1 < limit);
        if (turn > 1) {
            await(s.gates + EMPTY + half, turn / 2 - 1);
            if (BULK) send(s.out + half * (OUT_FLOATS / 2), y, Item(last_but_one, images), thread);
        }
        if (thread == 0) {
            s.e[half] = min(e, MOST_SCALE);
            if (bad) mark(marks, item.image, item.images, images);
        }
        convert(s.planes + half * STAGE, from, item, __uint_as_float((127 + min(e, MOST_SCALE)) << 23), places,
                thread);
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
        send(s.out + turn % 2 * (OUT_FLOATS / 2), y, Item(number, images), thread);
    };
    if (BULK && turn > 1) send_last(turn - 2, last_but_one);
    if (BULK) send_last(turn - 1, last);
    await_read();
}

// The number of the tile after the one that lies in that half; `items` or more where there is none.
__device__ __forceinline__ int after(const Shared &s, int half) {
    return __shfl_sync(~0u, s.e[NEXT + half], 0);  // the compiler then knows that a warp stays together
}

// What all threads do first: where taps and positions lie in the planes.
__device__ __forceinline__ void prepare(const Shared &s) {
    for (int i = threadIdx.x; i < KSTEPS * 4; i += ALL) {
        const int k = i / 4 * 8 + i % 4;
        s.taps[i] = make_int2(4 * TAPS[k].offset(), 4 * TAPS[k + 4].offset());
    }
    // One thread: of a store to all four by four lanes the compiler tells compute-sanitizer what is not so.
    if (threadIdx.x == 0) {
#pragma unroll
        for (int i = 0; i < GATES; i++) make_gate(s.gates + i, i < EMPTY ? LOADERS : COMPUTE);
    }
    for (int i = threadIdx.x; i < PLACES_KEPT; i += ALL) {
        const int at = min(i, POSITIONS - 1), line = at / TW, image = line / TR;
        s.places[i] = image * IMAGE_WORDS + (line - image * TR) * (SUPER_ROWS * S) + (at - line * TW);
    }
}

// Then the filters, and what undoes their scaling.
__device__ __forceinline__ void take_filters(const Shared &s, const unsigned *filters, const int *columns) {
    if (W_SHARED) {
        const uint4 *const from = reinterpret_cast<const uint4 *>(filters) + blockIdx.x % MBLOCKS * (FILTER_WORDS / 4);
        uint4 *const to = reinterpret_cast<uint4 *>(s.filters);
        for (int i = threadIdx.x; i < FILTER_WORDS / 4; i += ALL) to[i] = from[i];
    }
    for (int i = threadIdx.x; i < NTILES * 8; i += ALL) s.columns[i] = columns[i];
}

// load: a block's tiles, its shared memory and gates, and how a tile's input comes there and its outputs leave.
//
// DIRECT 0 copies the input to shared memory, AHEAD a tile before it is split; DIRECT 1 reads it from the cache. Its
// largest and its smallest value give the scale e, and say whether the tile can be split at all.

constexpr int SUPER_ROWS = FOLDED ? 1 : R * RA;                // output rows of one position
constexpr int ALONG = FOLDED || IMPLICIT ? 2 : 1;              // output columns of one position, and inputs of a word
constexpr int COLUMNS = R * M, NTILES = (COLUMNS + 7) / 8, NGROUPS = GB;  // of a block
constexpr int MBLOCKS = ((NTILES + NT - 1) / NT + GB - 1) / GB;   // blocks that share the filters
constexpr int TILES_X = (OW + ALONG * TW - 1) / (ALONG * TW), SUPER = (OH + SUPER_ROWS - 1) / SUPER_ROWS;
constexpr int TILES_Y = (SUPER + TR - 1) / TR;
constexpr int WT = TILES_X == 1 ? W : TW + K - 1;              // input columns of a tile
constexpr int ROWS = SUPER_ROWS * TR + K - 1, RAW_ROWS = ROWS < H ? ROWS : H;  // rows of a plane; input rows of a tile
constexpr int RAW_IMAGE = C * RAW_ROWS * WT, RAW = DIRECT ? 0 : IMG * RAW_IMAGE;  // floats of a copied tile
constexpr int PLANES = IMPLICIT ? UP : (C + 1) / 2, IMAGE_WORDS = PLANES * PL, LOW = IMG * IMAGE_WORDS, STAGE = PARTS * LOW + BEHIND;
constexpr int POSITIONS = IMG * TR * TW;
constexpr int FILTERS_HERE = MBLOCKS == 1 ? M : 8 * NT * GB;   // of a block, the last one's may be fewer
constexpr int COMPUTE = 32 * NC, LOADERS = 32 * NP, ALL = COMPUTE + LOADERS;
constexpr int PLACES_KEPT = STATIONARY ? (POSITIONS + 15) / 16 * 16 : 0;  // where positions' words begin: no divisions
constexpr int WORDS = 2 * PARTS;                               // of B for two words of products
// Of filters in shared memory: of IMPLICIT the low parts alone.
constexpr int FILTER_WORDS = IMPLICIT ? KSTEPS * 512 : KSTEPS * NGROUPS * NT * 32 * WORDS;

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
// go on, and only the ends of a run are parts of a sector of 32 bytes. An instruction of CUDA 12. IMPLICIT: wgmma reads
// what the loaders have put there.
__device__ __forceinline__ void make_visible() {
    if (BULK || IMPLICIT) asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
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
constexpr int FULL = 0, EMPTY = 2;             // gates of both halves of the planes
constexpr int MAY = 4, OUT_FULL = 6, OUT_EMPTY = 8;  // of two teams that take turns; of staged outputs, there and read
constexpr int ARRIVED = 10, GATES = IMPLICIT ? 12 : 4;  // of inputs that the copy engine brings
constexpr int NEXT = 2, COMING = 4;  // behind the scales of both halves: the tile after the one there; one or two more

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
        e = static_cast<int *>(take(24));
        found = static_cast<unsigned *>(take(4 * NP * 4));
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

// The largest magnitude so far, and the smallest but zero, as bits; the smallest one less.
__device__ __forceinline__ void look_at(float value, unsigned &most, unsigned &least) {
    const unsigned bits = __float_as_uint(value) & 0x7fffffff;
    most = max(most, bits), least = min(least, bits - 1);
}

// The scale of a tile whose largest and smallest magnitudes have these bits, as a power of two, and whether it cannot be
// split; the filters' own powers of two lie from `lowest` to `highest`.
struct Scale {
    int e;
    bool bad;
    __device__ Scale(unsigned most, unsigned least, int lowest, int highest) {
        const int exponent = most >> 23, wanted = most == 0 ? 0 : 141 - exponent;  // 2^(exponent - 127) <= largest
        const unsigned limit = max(exponent - SPREAD, 1) << 23;                    // denormal numbers count as too small
        // 2^(e + f) must be a float32 number too, for every filter.
        const bool far = wanted > MOST_SCALE || wanted + lowest < -126 || wanted + highest > 126;
        bad = most && (exponent == 255 || far || least + 1 < limit);
        e = min(wanted, MOST_SCALE);
    }
    __device__ float factor() const { return __uint_as_float((127 + e) << 23); }
};

// Of the filters' powers of two, the lowest and the highest, or 0.
__device__ __forceinline__ void find_range(const int *columns, int &lowest, int &highest) {
    for (int i = threadIdx.x % 32; i < COLUMNS; i += 32)
        lowest = min(lowest, exponent_of(columns[i])), highest = max(highest, exponent_of(columns[i]));
    lowest = __reduce_min_sync(~0u, lowest), highest = __reduce_max_sync(~0u, highest);
}

// How many tiles the blocks that share these filters have taken, beside their first ones: behind the images' marks.
__device__ __forceinline__ int *queue_of(int *marks, int images) {
    return marks + 1 + 2ll * images + blockIdx.x % MBLOCKS;
}

__device__ __forceinline__ void mark(int *marks, int image, int images, int all) {
    for (int i = image; i < image + images; i++)
        if (atomicExch(marks + 1 + all + i, 1) == 0) marks[1 + atomicAdd(marks, 1)] = i;
}

// A tile's outputs to y, as they are staged: the block's filters of all images.
__device__ __forceinline__ void send(const float *staged, float *y, const Item &item, int thread, int threads) {
    constexpr int RUN = SUPER_ROWS * TR * OW, PITCH = OUT_PITCH;
    const int bytes = 4 * min(RUN, (OH - item.row) * OW);
    if (RUN == PIXELS && PITCH == PIXELS && MBLOCKS == 1) {  // whole images follow one another there as here
        if (thread == 0) bulk_copy(image_of(y, item.image, OUTPUTS), staged, 4 * item.images * OUTPUTS);
        bulk_sent();
        return;
    }
    const int first = blockIdx.x % MBLOCKS * FILTERS_HERE;
    for (int i = thread; i < item.images * FILTERS_HERE; i += threads) {
        const int m = first + i % FILTERS_HERE;
        float *const to = image_of(y, item.image + i / FILTERS_HERE, OUTPUTS) + m * PIXELS + item.row * index_t(OW);
        if (MBLOCKS == 1 || m < M) bulk_copy(to, staged + i * PITCH, bytes);
    }
    bulk_sent();
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
        for (int i = 0; i < GATES; i++) {
            constexpr int arriving[] = {LOADERS, LOADERS, COMPUTE, COMPUTE, 128, 128, COMPUTE, COMPUTE, 128, 128, 1, 1};
            make_gate(s.gates + i, arriving[i]);
        }
    }
    for (int i = threadIdx.x; i < PLACES_KEPT; i += ALL) {
        const int at = min(i, POSITIONS - 1), line = at / TW, image = line / TR;
        s.places[i] = image * IMAGE_WORDS + (line - image * TR) * (SUPER_ROWS * S) + (at - line * TW);
    }
}

// Then the filters, and what undoes their scaling.
__device__ __forceinline__ void take_filters(const Shared &s, const unsigned *filters, const int *columns) {
    if (W_SHARED) {
        const int first = IMPLICIT ? blockIdx.x % MBLOCKS * PARTS + PARTS - 1 : blockIdx.x % MBLOCKS;
        const uint4 *const from = reinterpret_cast<const uint4 *>(filters) + first * (FILTER_WORDS / 4);
        uint4 *const to = reinterpret_cast<uint4 *>(s.filters);
        for (int i = threadIdx.x; i < FILTER_WORDS / 4; i += ALL) to[i] = from[i];
    }
    for (int i = threadIdx.x; i < NTILES * 8; i += ALL) s.columns[i] = columns[i];
}

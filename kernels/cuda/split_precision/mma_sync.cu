// mma_sync: float32-class products on tensor cores; every operand is the sum of two 16-bit floats.
//
//     x 2^e = high + low / 2^11          w 2^f = high + low / 2^11          (split_filters.cu does w)
//     y 2^(e + f) = sum high high  +  (sum high low + sum low high) / 2^11  (low low is below the rounding)
//
// e is a tile's, so that its largest value lies in [2^14, 2^15): nothing overflows, and a value is split to 22 bits
// as long as it is no smaller than 2^-28 of the largest. A tile where one is, or that holds an infinity or NaN, is put
// on a list; fallback.cu computes its images anew, in plain float32.
//
//     A (16 pixels x 16 products), from shared memory     words of two products: [plane][row][column], high and low
//     B (16 products x 8 columns), from split_weights     column n is filter n / R for output row n % R of R
//     D (16 pixels x 8 columns), in registers             a "pixel" stands for R output rows of one column
//
// The order of the products is free: TAPS says where the words of a step lie, four of them in different banks each time.
//
// NC warps multiply, and store through shared memory, a warp 32 neighbouring outputs at a time. NP warps copy the next
// tile's input, find e, and split it into one half of the planes while the others work on the other half. Tiles beyond
// a block's first are taken from a queue.
//
// Arithmetic: 3 (PARTS 2) or 1 (PARTS 1) times 2 M C K K operations an output pixel, products rounded up to 16 and
// columns to 8. Bytes: x once and K - 1 rows more for each band of rows; y once.

constexpr int MGROUPS = (POSITIONS + 16 * MT - 1) / (16 * MT);
constexpr int UNITS = MGROUPS * NGROUPS;                       // that the warps take in turn
constexpr int OUT = 16 * MT + 4;                               // floats from one column to the next on the way out

// Where the 16 MT positions of a group lie, in the planes and in the output. A lane has two of each 16. QUADS: of 32 it
// has four neighbouring ones, so that it stores them at once, and eight lanes 128 bytes; OH OW is a multiple of four,
// and positions follow one another in the output. Otherwise they are g and g + 8.
constexpr int STORES = QUADS ? MT / 2 : (MT + 1) / 2;

struct Places {
    const unsigned char *base[MT][2];
    float *to[STORES];   // of positions lane, lane + 32, or of quad g
    int rows[STORES];    // output rows there are, from the position's first on

    __device__ Places(const Item &item, int group, int lane, const unsigned *planes, float *y) {
#pragma unroll
        for (int i = 0; i < 2 * MT; i++) {
            const int in_group = QUADS ? i / 4 * 32 + lane / 4 * 4 + i % 4 : i * 8 + lane / 4;
            const int at = min(group * (16 * MT) + in_group, POSITIONS - 1), line = at / TW;
            const int image = IMG == 1 ? 0 : line / TR;
            base[i / 2][i % 2] = reinterpret_cast<const unsigned char *>(
                planes + image * IMAGE_WORDS + (line - image * TR) * (R * S) + (at - line * TW));
        }
#pragma unroll
        for (int i = 0; i < STORES; i++) {
            const int at = group * (16 * MT) + i * 32 + (QUADS ? lane / 4 * 4 : lane), line = at / TW;
            const int image = line / TR, row = item.row + line % TR * R, column = item.column + at % TW;
            const bool real = image < item.images && column < OW && (MT % 2 == 0 || i * 32 + lane < 16 * MT);
            rows[i] = real ? OH - row : 0;
            to[i] = image_of(y, item.image + image, OUTPUTS) + row * index_t(OW) + column;
        }
    }
};

// 16 positions of one step, high and low.
struct Fragment {
    unsigned a[PARTS][4];
    __device__ __forceinline__ void read(const unsigned char *const (&base)[2], int2 tap) {
#pragma unroll
        for (int part = 0; part < PARTS; part++) {
            a[part][0] = *reinterpret_cast<const unsigned *>(base[0] + tap.x + part * (4 * LOW));
            a[part][1] = *reinterpret_cast<const unsigned *>(base[1] + tap.x + part * (4 * LOW));
            a[part][2] = *reinterpret_cast<const unsigned *>(base[0] + tap.y + part * (4 * LOW));
            a[part][3] = *reinterpret_cast<const unsigned *>(base[1] + tap.y + part * (4 * LOW));
        }
    }
};

struct Sums {
    float high[MT][4], cross[PARTS == 2 ? MT : 1][4], whole[CHUNKED ? MT : 1][4];

    __device__ __forceinline__ void add_up() {
#pragma unroll
        for (int i = 0; i < MT; i++)
#pragma unroll
            for (int v = 0; v < 4; v++) move_up(high[i][v], whole[CHUNKED ? i : 0][v]);
    }
    // Of value v of sixteen i: everything that was summed, but for the scales.
    __device__ __forceinline__ float all(int i, int v) const {
        float sum = high[i][v];
        if (PARTS == 2) sum = fmaf(cross[PARTS == 2 ? i : 0][v], 1.0f / 2048, sum);
        if (CHUNKED) sum += whole[CHUNKED ? i : 0][v];
        return sum;
    }
};

template <int COUNT>
__device__ __forceinline__ void add_products(Sums *sums, const Fragment &f, const Filters *b, int i) {
#pragma unroll
    for (int n = 0; n < COUNT; n++) mma(sums[n].high[i], f.a[0], b[n].word[0], b[n].word[1]);
    if (PARTS == 2) {
#pragma unroll
        for (int n = 0; n < COUNT; n++) mma(sums[n].cross[i], f.a[0], b[n].word[WORDS - 2], b[n].word[WORDS - 1]);
#pragma unroll
        for (int n = 0; n < COUNT; n++) mma(sums[n].cross[i], f.a[PARTS - 1], b[n].word[0], b[n].word[1]);
    }
}

// The eight columns of one tile: scaled back, through shared memory, to y.
__device__ __forceinline__ void store(float *out, const int *columns, const Sums &sums, const Places &places, int tile,
                                      int e, int lane) {
    const int t = lane % 4;
    Restore restore[2];
#pragma unroll
    for (int i = 0; i < 2; i++) restore[i] = Restore(e, columns[tile * 8 + 2 * t + i]);
#if QUADS
#pragma unroll
        for (int i = 0; i < STORES; i++)
#pragma unroll
            for (int c = 0; c < 2; c++) {
                float v[4];
#pragma unroll
                for (int j = 0; j < 4; j++) v[j] = restore[c](sums.all(2 * i + j / 2, j % 2 * 2 + c));
                const int m = tile * 8 + 2 * t + c;
                if (places.rows[i] > 0 && m < M)
                    __stcs(reinterpret_cast<float4 *>(places.to[i] + m * PIXELS), make_float4(v[0], v[1], v[2], v[3]));
            }
#else
    const int g = lane / 4;
#pragma unroll
    for (int i = 0; i < MT; i++)
#pragma unroll
        for (int v = 0; v < 4; v++)
            out[(2 * t + v % 2) * OUT + 16 * i + v / 2 * 8 + g] = restore[v % 2](sums.all(i, v));
    __syncwarp();
#pragma unroll
    for (int i = 0; i < (MT + 1) / 2; i++) {
        float *const to = places.to[i] + tile * (8 / R) * PIXELS;
#pragma unroll
        for (int j = 0; j < 8; j++)
            if (tile * (8 / R) + j / R < M && j % R < places.rows[i])
                __stcs(to + j / R * PIXELS + j % R * index_t(OW), out[j * OUT + i * 32 + lane]);
    }
    __syncwarp();
#endif
}

__device__ __forceinline__ void computer(const Shared &s, float *y, const unsigned *global, int images, int items) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const Filters *const filters = reinterpret_cast<const Filters *>(W_SHARED ? s.filters : global) + lane;
    const int2 *const taps = s.taps + lane % 4;
    float *const out = s.out + warp * (8 * OUT);
    int turn = 0, mine = warp, number = blockIdx.x;
    for (; number < items; turn++) {
        const Item item(number, images);
        const int half = turn % 2;
        await(s.gates + FULL + half, turn / 2);
        number = after(s, half);
        const unsigned *const planes = s.planes + half * STAGE;
        const int e = s.e[half];
        // The warps take the units of all tiles in turn, so that none waits for those that have one more.
        int unit = mine;
#pragma unroll 1
        for (; unit < UNITS; unit += NC) {
            const Places places(item, unit / NGROUPS, lane, planes, y);
#if KEEP_A
            Fragment f[KSTEPS][MT];
#pragma unroll
            for (int k = 0; k < KSTEPS; k++)
#pragma unroll
                for (int i = 0; i < MT; i++) f[k][i].read(places.base[i], taps[k * 4]);
#pragma unroll 1
            for (int n = 0; n < NTILES; n++) {
                Sums sums[1] = {};
#pragma unroll
                for (int k = 0; k < KSTEPS; k++) {
                    const Filters b[1] = {filters[(k * NTILES + n) * 32]};
#pragma unroll
                    for (int i = 0; i < MT; i++) add_products<1>(sums, f[k][i], b, i);
                }
                store(out, s.columns, sums[0], places, n, e, lane);
            }
#else
            const int n0 = unit % NGROUPS * NT;
            Sums sums[NT] = {};
            Fragment f[2];  // the next one is on its way while this one is multiplied
            Filters b[2][NT];
            const auto read_filters = [&](int k, Filters *to) {
#pragma unroll
                for (int n = 0; n < NT; n++)
                    to[n] = filters[(k * NTILES + (NTILES % NT == 0 ? n0 + n : min(n0 + n, NTILES - 1))) * 32];
            };
            int2 tap = taps[0], next = taps[min(1, KSTEPS - 1) * 4];
            f[0].read(places.base[0], tap);
            read_filters(0, b[0]);
            const auto step = [&](int k, int odd) {
                const bool more = k + 1 < KSTEPS;
#pragma unroll
                for (int i = 0; i < MT; i++) {
                    const int now = (odd * MT + i) % 2;
                    if (i + 1 < MT) f[1 - now].read(places.base[i + 1], tap);
                    else if (more) f[1 - now].read(places.base[0], next);
                    if (i == 0 && more) read_filters(k + 1, b[1 - odd]);
                    add_products<NT>(sums, f[now], b[odd], i);
                }
                tap = next;
                if (k + 2 < KSTEPS) next = taps[(k + 2) * 4];
            };
            int chunk = 0;
#pragma unroll 1
            for (int k = 0; k < KSTEPS; k += 2) {
                step(k, 0);
                if (KSTEPS % 2 == 0 || k + 1 < KSTEPS) step(k + 1, 1);
                if (CHUNKED && (chunk += 2) == CHUNK) {
                    chunk = 0;
#pragma unroll
                    for (int n = 0; n < NT; n++) sums[n].add_up();
                }
            }
#pragma unroll
            for (int n = 0; n < NT; n++)
                if (NTILES % NT == 0 || n0 + n < NTILES) store(out, s.columns, sums[n], places, n0 + n, e, lane);
#endif
        }
        mine = unit - UNITS;
        arrive(s.gates + EMPTY + half);
    }
}

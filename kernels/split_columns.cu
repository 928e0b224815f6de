// The multiplying warps of split for one input channel: a position is two neighbouring outputs of a row.
//
// A word holds two neighbouring inputs, columns 2 i and 2 i + 1, so that every input is split once. Column n of the
// filters is filter n / 2, moved right by n % 2. Rows g and g + 8 of A are position MT g + i and the one TH lines below.
// Lane (g, t) then has, for MT 2, four neighbouring outputs of filter t of four: one store of 16 bytes, 128 bytes in a
// row for the eight lanes of one filter. So nothing goes through shared memory on its way out; OH OW and TH OW must be
// multiples of four.
//
// The words of MT positions stay in registers (KSTEPS is small) while the warp goes through the filters.

constexpr int UNITS = (PAIRS + 8 * MT - 1) / (8 * MT);
constexpr int SPAN = TH * TW;                                  // pairs of positions of an image in a tile

struct __align__(4 * WORDS) Filters {
    unsigned word[WORDS];  // products 2t and 2t + 1, and those 8 further: high, then low
};

__device__ __forceinline__ void mma(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Outputs are not read again here: they should not push the inputs out of the cache.
__device__ __forceinline__ void write_through(float *to, const float (&v)[2 * MT]) {
#pragma unroll
    for (int i = 0; i < 2 * MT; i += YV) {
#if YV == 4
        __stcs(reinterpret_cast<float4 *>(to + i), make_float4(v[i], v[i + 1], v[i + 2], v[i + 3]));
#elif YV == 2
        __stcs(reinterpret_cast<float2 *>(to + i), make_float2(v[i], v[i + 1]));
#else
        __stcs(to + i, v[i]);
#endif
    }
}

__device__ __forceinline__ void computer(const Shared &s, float *y, const unsigned *global, int images, int items) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
    const Filters *const filters = reinterpret_cast<const Filters *>(W_SHARED ? s.filters : global) + lane;
#if AFFINE
    // The four words of every half of a step lie alike: one address for all.
    const int apart = s.taps[t].x - s.taps[0].x;
    constexpr int halves[] = {HALF_LIST};
    const auto tap_x = [&](int k) { return halves[2 * k]; };
    const auto tap_y = [&](int k) { return halves[2 * k + 1]; };
#else
    const int apart = 0;
    int2 tap[KSTEPS];
#pragma unroll
    for (int k = 0; k < KSTEPS; k++) tap[k] = s.taps[k * 4 + t];
    const auto tap_x = [&](int k) { return tap[k].x; };
    const auto tap_y = [&](int k) { return tap[k].y; };
#endif
    int turn = 0, mine = warp;
    for (int number = blockIdx.x; number < items; number += gridDim.x, turn++) {
        const Item item(number, images);
        const int half = turn % 2, span = min(TR, OH - item.row) * TW;
        meet(FULL + half, ALL);
        const unsigned *const planes = s.planes + half * STAGE;
        const int e = s.e[half];
        float *const out = image_of(y, item.image, OUTPUTS) + item.row * index_t(OW) + t * PIXELS;
        // The warps take the units of all tiles in turn, so that none waits for those that have one more.
        int unit = mine;
#pragma unroll 1
        for (; unit < UNITS; unit += NC) {
            unsigned a[KSTEPS][MT][PARTS][4];
#pragma unroll
            for (int i = 0; i < MT; i++) {
                const int at = min(unit * (8 * MT) + MT * g + i, PAIRS - 1), line = at / TW;
                const int image = IMG == 1 ? 0 : line / TH;
                const unsigned char *const base = reinterpret_cast<const unsigned char *>(
                    planes + image * IMAGE_WORDS + UNIT * ((line - image * TH) * S + (at - line * TW))) + apart;
#pragma unroll
                for (int k = 0; k < KSTEPS; k++)
#pragma unroll
                    for (int part = 0; part < PARTS; part++) {
                        const uint2 x0 = *reinterpret_cast<const uint2 *>(base + tap_x(k) + part * (4 * LOW));
                        const uint2 x1 = *reinterpret_cast<const uint2 *>(base + tap_y(k) + part * (4 * LOW));
                        a[k][i][part][0] = x0.x, a[k][i][part][1] = x0.y;
                        a[k][i][part][2] = x1.x, a[k][i][part][3] = x1.y;
                    }
            }
            const int first = unit * (8 * MT) + MT * g, image = IMG == 1 ? 0 : first / SPAN, at = first - image * SPAN;
            float *const to = out + image * OUTPUTS + 2 * at;
            const bool upper = image < item.images && at < span, lower = image < item.images && at + SPAN < span;
#pragma unroll 2
            for (int n = 0; n < NTILES; n++) {
                const float scale = __uint_as_float((127 - e - s.exponents[n * 8 + 2 * t]) << 23);
                float sums[MT][4] = {}, cross[MT][4] = {};
#pragma unroll
                for (int k = 0; k < KSTEPS; k++) {
                    const Filters b = filters[(k * NTILES + n) * 32];
#pragma unroll
                    for (int i = 0; i < MT; i++) mma(sums[i], a[k][i][0], b.word[0], b.word[1]);
                    if (PARTS == 2) {
#pragma unroll
                        for (int i = 0; i < MT; i++) mma(cross[i], a[k][i][0], b.word[WORDS - 2], b.word[WORDS - 1]);
#pragma unroll
                        for (int i = 0; i < MT; i++) mma(cross[i], a[k][i][PARTS - 1], b.word[0], b.word[1]);
                    }
                }
                float results[2][2 * MT];
#pragma unroll
                for (int i = 0; i < MT; i++)
#pragma unroll
                    for (int v = 0; v < 4; v++) {
                        float sum = sums[i][v];
                        if (PARTS == 2) sum = fmaf(cross[i][v], 1.0f / 2048, sum);
                        results[v / 2][2 * i + v % 2] = multiply(sum, scale);
                    }
                if (M % 4 == 0 || n * 4 + t < M) {
                    if (upper) write_through(to + n * (4 * PIXELS), results[0]);
                    if (lower) write_through(to + n * (4 * PIXELS) + 2 * SPAN, results[1]);
                }
            }
        }
        mine = unit - UNITS;
        pass(EMPTY + half);
    }
}

extern "C" __global__ void __launch_bounds__(ALL, 1)
split(const float *__restrict__ x, float *__restrict__ y, const unsigned *__restrict__ filters,
      const int *__restrict__ columns, int *marks, long long first, int images) {
    extern __shared__ __align__(128) unsigned char memory[];
    const Shared s(memory);
    const int items = (images + IMG - 1) / IMG * (TILES_X * TILES_Y);
    bool bad = false;
    for (int n = 0; n < NTILES; n++) bad = bad || columns[8 * NTILES + n];
    if (bad || blockIdx.x >= items) return;  // bad: the filters cannot be split, split_repair does all images
    prepare(s, filters, columns);
    __syncthreads();
    if (threadIdx.x >= COMPUTE) loader(s, image_of(x, first, IMAGE), marks, images, items);
    else computer(s, image_of(y, first, OUTPUTS), filters, images, items);
}

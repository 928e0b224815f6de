// The multiplying warps of split for one input channel: a position is two neighbouring outputs of a row.
//
// A word holds two neighbouring inputs, columns 2 i and 2 i + 1, so that every input is split once. Column n of the
// filters is filter n / 2, moved right by n % 2. Lane (g, t) then has both outputs of positions 2 g and 2 g + 1 of
// filter t of four in its four sums: one store of 16 bytes, 128 bytes in a row for the eight lanes of one filter. So
// nothing goes through shared memory on its way out; OH OW must be a multiple of four.
//
// The words of MT positions stay in registers (KSTEPS is small) while the warp goes through the filters.

constexpr int UNITS = (POSITIONS + 16 * MT - 1) / (16 * MT);
constexpr int SPAN = TR * TW;                                  // positions of an image in a tile

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
__device__ __forceinline__ void write_through(float *to, const float (&v)[4]) {
#if YV == 4
    __stcs(reinterpret_cast<float4 *>(to), make_float4(v[0], v[1], v[2], v[3]));
#elif YV == 2
    __stcs(reinterpret_cast<float2 *>(to), make_float2(v[0], v[1]));
    __stcs(reinterpret_cast<float2 *>(to) + 1, make_float2(v[2], v[3]));
#else
#pragma unroll
    for (int i = 0; i < 4; i++) __stcs(to + i, v[i]);
#endif
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
        const int half = turn % 2, span = min(SPAN, (OH - item.row) * TW);
        meet(FULL + half, ALL);
        const unsigned *const planes = s.planes + half * STAGE;
        const int e = s.e[half];
        float *const out = image_of(y, item.image, OUTPUTS) + item.row * index_t(OW) + t * PIXELS;
        // The warps take the units of all tiles in turn, so that none waits for those that have one more.
        int unit = mine;
#pragma unroll 1
        for (; unit < UNITS; unit += NC) {
            unsigned a[KSTEPS][MT][PARTS][4];
            float *to[MT];
            bool inside[MT];
#pragma unroll
            for (int i = 0; i < MT; i++) {
                const int first = unit * (16 * MT) + 16 * i + 2 * g;
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    const int at = min(first + h, POSITIONS - 1), line = at / TW, image = IMG == 1 ? 0 : line / TR;
                    const unsigned char *const base = reinterpret_cast<const unsigned char *>(
                        planes + image * IMAGE_WORDS + (line - image * TR) * S + (at - line * TW)) + apart;
#pragma unroll
                    for (int k = 0; k < KSTEPS; k++)
#pragma unroll
                        for (int part = 0; part < PARTS; part++) {
                            a[k][i][part][h] = *reinterpret_cast<const unsigned *>(base + tap_x(k) + part * (4 * LOW));
                            a[k][i][part][2 + h] =
                                *reinterpret_cast<const unsigned *>(base + tap_y(k) + part * (4 * LOW));
                        }
                }
                const int image = IMG == 1 ? 0 : first / SPAN, at = first - image * SPAN;
                inside[i] = image < item.images && at < span;
                to[i] = out + image * OUTPUTS + 2 * at;
            }
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
#pragma unroll
                for (int i = 0; i < MT; i++) {
#pragma unroll
                    for (int v = 0; v < 4; v++) {
                        if (PARTS == 2) sums[i][v] = fmaf(cross[i][v], 1.0f / 2048, sums[i][v]);
                        sums[i][v] = multiply(sums[i][v], scale);
                    }
                    if (inside[i] && (M % 4 == 0 || n * 4 + t < M)) write_through(to[i] + n * (4 * PIXELS), sums[i]);
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

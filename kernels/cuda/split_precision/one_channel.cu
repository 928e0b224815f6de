// The multiplying warps of split for one input channel: a position is two neighbouring outputs of a row.
//
// A word holds two neighbouring inputs, columns 2 i and 2 i + 1, so that every input is split once. Column n of the
// filters is filter n / 2, moved right by n % 2. Lane (g, t) then has both outputs of positions 2 g and 2 g + 1 of
// filter t of four in its four sums: one store of 16 bytes, 128 bytes in a row for the eight lanes of one filter. So
// nothing goes through shared memory on its way out; OH OW must be a multiple of four.
//
// STATIONARY: few filters stay in a warp's registers while it goes through the positions, sixteen at a time; a step's
// words are replaced by those of the next positions as soon as they have been used. Otherwise the words of 16 MT
// positions stay in registers (KSTEPS is small) while the warp goes through the filters in shared memory.

constexpr int UNITS = (POSITIONS + 16 * MT - 1) / (16 * MT);
constexpr int SPAN = TR * TW;                                  // positions of an image in a tile

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

// The sums of one tile of filters: scaled back, and stored.
__device__ __forceinline__ void finish(float *to, float (&sums)[4], const float (&cross)[4], Restore restore, bool real) {
#pragma unroll
    for (int v = 0; v < 4; v++) {
        if (PARTS == 2) sums[v] = fmaf(cross[v], 1.0f / 2048, sums[v]);
        sums[v] = restore(sums[v]);
    }
    if (real) write_through(to, sums);
}

__device__ __forceinline__ void computer(const Shared &s, float *y, const unsigned *global, int images, int items) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
    const Filters *const filters = reinterpret_cast<const Filters *>(W_SHARED ? s.filters : global) + lane;
#if STATIONARY
    Filters b[KSTEPS][NTILES];
#pragma unroll
    for (int k = 0; k < KSTEPS; k++)
#pragma unroll
        for (int n = 0; n < NTILES; n++) b[k][n] = filters[(k * NTILES + n) * 32];
#endif
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
    const auto read = [&](unsigned (&a)[PARTS][4], int k, const Pair &base) {
#pragma unroll
        for (int part = 0; part < PARTS; part++)
#pragma unroll
            for (int h = 0; h < 2; h++) {
                a[part][h] = *reinterpret_cast<const unsigned *>(base.at[h] + tap_x(k) + part * (4 * LOW));
                a[part][2 + h] = *reinterpret_cast<const unsigned *>(base.at[h] + tap_y(k) + part * (4 * LOW));
            }
    };
    int turn = 0, mine = warp, number = blockIdx.x;
    for (; number < items; turn++) {
        const Item item(number, images);
        const int half = turn % 2;
        await(s.gates + FULL + half, turn / 2);
        number = after(s, half);
        const int span = min(SPAN, (OH - item.row) * TW);
        // All warps begin a tile together: parts of one line of y that two warps store then leave the cache as one.
        meet<BEGUN, COMPUTE>();
        const unsigned char *const planes = reinterpret_cast<const unsigned char *>(s.planes + half * STAGE) + apart;
        const int e = s.e[half];
        float *const out = image_of(y, item.image, OUTPUTS) + item.row * index_t(OW) + t * PIXELS;
        const auto restoring = [&](int n) { return Restore(e, s.columns[n * 8 + 2 * t]); };
        // The warps take the units of all tiles in turn, so that none waits for those that have one more.
        int unit = mine;
#if STATIONARY
        const auto place = [&](int unit) {
            const ushort2 at = *reinterpret_cast<const ushort2 *>(s.places + unit * 16 + 2 * g);
            return Pair{{planes + 4 * at.x, planes + 4 * at.y}};
        };
        unsigned a[KSTEPS][PARTS][4];
        const Pair start = place(min(unit, UNITS - 1));
#pragma unroll
        for (int k = 0; k < KSTEPS; k++) read(a[k], k, start);
#pragma unroll 1
        for (; unit < UNITS; unit += NC) {
            const Pair next = place(min(unit + NC, UNITS - 1));
            const int first = unit * 16 + 2 * g, image = IMG == 1 ? 0 : first / SPAN, at = first - image * SPAN;
            const bool inside = image < item.images && at < span;
            float *const to = out + image * OUTPUTS + 2 * at;
            float sums[NTILES][4] = {}, cross[NTILES][4] = {};
#pragma unroll
            for (int k = 0; k < KSTEPS; k++) {
                // Sums that were just added to are left alone for as long as there are others.
                const auto add = [&](float (&to)[NTILES][4], int n, int last, int part, int word) {
#pragma unroll
                    for (; n < last; n++) mma(to[n], a[k][part], b[k][n].word[word], b[k][n].word[word + 1]);
                };
                if (PARTS == 2) add(cross, 0, NTILES, 0, WORDS - 2);
                add(sums, 0, (NTILES + 1) / 2, 0, 0);
                if (PARTS == 2) add(cross, 0, NTILES, PARTS - 1, 0);
                add(sums, (NTILES + 1) / 2, NTILES, 0, 0);
                read(a[k], k, next);
            }
#pragma unroll
            for (int n = 0; n < NTILES; n++)
                finish(to + n * (4 * PIXELS), sums[n], cross[n], restoring(n), inside && (M % 4 == 0 || n * 4 + t < M));
        }
#else
#pragma unroll 1
        for (; unit < UNITS; unit += NC) {
            unsigned a[MT][KSTEPS][PARTS][4];
            float *to[MT];
            bool inside[MT];
#pragma unroll
            for (int i = 0; i < MT; i++) {
                const int first = unit * (16 * MT) + 16 * i + 2 * g;
                Pair base;
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    const int at = min(first + h, POSITIONS - 1), line = at / TW, image = IMG == 1 ? 0 : line / TR;
                    base.at[h] = planes + 4 * (image * IMAGE_WORDS + (line - image * TR) * S + (at - line * TW));
                }
#pragma unroll
                for (int k = 0; k < KSTEPS; k++) read(a[i][k], k, base);
                const int image = IMG == 1 ? 0 : first / SPAN, at = first - image * SPAN;
                inside[i] = image < item.images && at < span;
                to[i] = out + image * OUTPUTS + 2 * at;
            }
#pragma unroll 2
            for (int n = 0; n < NTILES; n++) {
                float sums[MT][4] = {}, cross[MT][4] = {};
#pragma unroll
                for (int k = 0; k < KSTEPS; k++) {
                    const Filters b = filters[(k * NTILES + n) * 32];
#pragma unroll
                    for (int i = 0; i < MT; i++) mma(sums[i], a[i][k][0], b.word[0], b.word[1]);
                    if (PARTS == 2) {
#pragma unroll
                        for (int i = 0; i < MT; i++) mma(cross[i], a[i][k][0], b.word[WORDS - 2], b.word[WORDS - 1]);
#pragma unroll
                        for (int i = 0; i < MT; i++) mma(cross[i], a[i][k][PARTS - 1], b.word[0], b.word[1]);
                    }
                }
                const Restore restore = restoring(n);
#pragma unroll
                for (int i = 0; i < MT; i++)
                    finish(to[i] + n * (4 * PIXELS), sums[i], cross[i], restore,
                           inside[i] && (M % 4 == 0 || n * 4 + t < M));
            }
        }
#endif
        mine = unit - UNITS;
        arrive(s.gates + EMPTY + half);
    }
}

// The multiplying warps of split for filters that fit registers: inputs are shared by RA rows of outputs.
//
// Position (i, j) stands for RA rows of outputs of one column; the words that it reads of input row p serve the sum of
// row r with the filters' row p - r, KR steps for each. A warp keeps the filters of NT tiles in registers and goes
// through the positions, sixteen at a time: it reads K + RA - 1 rows of inputs from shared memory and no filters, where
// split reads K rows of inputs for each of the RA rows of outputs, and the filters for every group of positions.
//
// PAIRS: a lane has two neighbouring positions and stores both outputs at once; OW and TW are even.

#if !FILTERS_FIRST

struct Fragment {
    unsigned a[PARTS][4];
};

constexpr int UNITS = (POSITIONS + 15) / 16, SLOTS = NC / NGROUPS;
constexpr index_t FILTER = BULK ? OUT_PITCH : PIXELS;               // floats from one filter's outputs to the next
constexpr int LINES = K + RA - 1, FRAGMENTS = LINES * KR;          // rows that a position reads; fragments

__device__ __forceinline__ void computer(const Shared &s, float *y, const unsigned *global, int images, int items) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
    const int slot = warp / NGROUPS, first_tile = warp % NGROUPS * NT;
    const int own = PAIRS ? 2 * g : g, other = PAIRS ? own + 1 : own + 8;
    const Filters *const filters = reinterpret_cast<const Filters *>(global) + lane;
    Filters b[KSTEPS][NT];
#pragma unroll
    for (int k = 0; k < KSTEPS; k++)
#pragma unroll
        for (int n = 0; n < NT; n++)
            b[k][n] = filters[(k * NTILES + min(first_tile + n, NTILES - 1)) * 32];
    int2 tap[KR];
#pragma unroll
    for (int j = 0; j < KR; j++) tap[j] = s.taps[j * 4 + t];
    int turn = 0, mine = slot, number = blockIdx.x;
    for (; number < items; turn++) {
        const Item item(number, images);
        const int half = turn % 2;
        await(s.gates + FULL + half, turn / 2);
        number = after(s, half);
        if (!BULK) meet<BEGUN, COMPUTE>();  // parts of one line of y that two warps store then leave the cache as one
        const unsigned char *const planes = reinterpret_cast<const unsigned char *>(s.planes + half * STAGE);
        const int e = s.e[half];
        const auto place = [&](int unit) {
            return Pair{{planes + 4 * s.places[unit * 16 + own], planes + 4 * s.places[unit * 16 + other]}};
        };
        const auto read = [&](Fragment &f, int load, const Pair &base) {
            const int2 at = tap[load % KR];
#pragma unroll
            for (int part = 0; part < PARTS; part++)
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    const unsigned char *const from = base.at[h] + load / KR * (4 * S) + part * (4 * LOW);
                    f.a[part][h] = *reinterpret_cast<const unsigned *>(from + at.x);
                    f.a[part][2 + h] = *reinterpret_cast<const unsigned *>(from + at.y);
                }
        };
        // The warps take the units of all tiles in turn, so that none waits for those that have one more.
        int unit = mine;
        Fragment f[2];  // the next one is on its way while this one is multiplied
        Pair base = place(min(unit, UNITS - 1));
        read(f[0], 0, base);
#pragma unroll 1
        for (; unit < UNITS; unit += SLOTS) {
            float sums[RA][NT][4] = {}, cross[RA][NT][4] = {};
            const Pair next = place(min(unit + SLOTS, UNITS - 1));
#pragma unroll
            for (int load = 0; load < FRAGMENTS; load++) {
                const Fragment &now = f[load % 2];
                if (load + 1 < FRAGMENTS) read(f[1 - load % 2], load + 1, base);
                else if (FRAGMENTS % 2 == 0) read(f[0], 0, next);
// Sums that were just added to are left alone for as long as there are others.
                const auto add = [&](float (&to)[RA][NT][4], int first, int last, int part, int word) {
#pragma unroll
                    for (int i = first; i < last; i++) {
                        const int r = i / NT, row = load / KR - r;
                        if (row < 0 || row >= K) continue;
                        const Filters &w = b[row * KR + load % KR][i % NT];
                        mma(to[r][i % NT], now.a[part], w.word[word], w.word[word + 1]);
                    }
                };
                constexpr int ALL_SUMS = RA * NT, HALF = (ALL_SUMS + 1) / 2;
                if (PARTS == 2) add(cross, 0, ALL_SUMS, 0, WORDS - 2);
                add(sums, 0, HALF, 0, 0);
                if (PARTS == 2) add(cross, 0, ALL_SUMS, PARTS - 1, 0);
                add(sums, HALF, ALL_SUMS, 0, 0);
            }
            if (FRAGMENTS % 2) read(f[0], 0, next);

            float *to[2];
            int rows[2];  // output rows there are, from the position's first on
#pragma unroll
            for (int h = 0; h < (PAIRS ? 1 : 2); h++) {
                const int at = unit * 16 + (h ? other : own), line = at / TW, image = IMG == 1 ? 0 : line / TR;
                const int row = item.row + (line - image * TR) * RA, column = item.column + at - line * TW;
                rows[h] = image < item.images && line - image * TR < TR && column < OW ? OH - row : 0;
                to[h] = BULK ? s.out + half * (OUT_FLOATS / 2) + image * (M * OUT_PITCH) + (row - item.row) * OW + column
                             : image_of(y, item.image + image, OUTPUTS) + row * index_t(OW) + column;
            }
#pragma unroll
            for (int n = 0; n < NT; n++)
#pragma unroll
                for (int c = 0; c < 2; c++) {
                    const int m = (first_tile + n) * 8 + 2 * t + c;
                    const Restore restore(e, s.columns[min(m, NTILES * 8 - 1)]);
                    if ((NTILES % NT || M % 8) && m >= M) continue;
#pragma unroll
                    for (int r = 0; r < RA; r++) {
                        float v[2];
#pragma unroll
                        for (int h = 0; h < 2; h++) {
                            v[h] = sums[r][n][2 * h + c];
                            if (PARTS == 2) v[h] = fmaf(cross[r][n][2 * h + c], 1.0f / 2048, v[h]);
                            v[h] = restore(v[h], sums[r][n][2 * h + c]);
                        }
                        if (PAIRS) {
                            float2 *const pair = reinterpret_cast<float2 *>(to[0] + m * FILTER + r * index_t(OW));
                            if (r >= rows[0]) continue;
                            if (BULK) *pair = make_float2(v[0], v[1]);
                            else __stcs(pair, make_float2(v[0], v[1]));
                        } else {
                            if (r < rows[0]) __stcs(to[0] + m * PIXELS + r * index_t(OW), v[0]);
                            if (r < rows[PAIRS ? 0 : 1]) __stcs(to[PAIRS ? 0 : 1] + m * PIXELS + r * index_t(OW), v[1]);
                        }
                    }
                }
            base = next;
        }
        mine = unit - UNITS;
        make_visible();
        arrive(s.gates + EMPTY + half);
    }
}

#endif

// fp16x3_output_rows with the filters as the tensor cores' A, 16 at a time, and the inputs as their B (FILTERS_FIRST).
//
// A fragment is then eight positions, of four words a lane where fp16x3_output_rows has 16 of eight, so that sums of more rows
// of outputs fit: it serves up to RA rows of 16 filters. NT, TW and OW are even; a lane stores neighbouring outputs.

#if FILTERS_FIRST

constexpr int UNITS = (POSITIONS + 7) / 8, SLOTS = NC / NGROUPS, SETS = NT / 2;  // sets of 16 filters
constexpr index_t FILTER = BULK ? OUT_PITCH : PIXELS;               // floats from one filter's outputs to the next
constexpr int LINES = K + RA - 1, FRAGMENTS = LINES * KR;          // rows that a position reads; fragments

struct Fragment {
    unsigned b[PARTS][2];
};

// 16 filters, of two tiles, times eight positions, if `there`.
__device__ __forceinline__ void mma_if(bool there, float (&d)[4], const Filters &low, const Filters &high, int word,
                                       const unsigned (&b)[2]) {
    asm("{.reg .pred p; setp.ne.s32 p, %10, 0;"
        "@p mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};}"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(low.word[word]), "r"(high.word[word]), "r"(low.word[word + 1]), "r"(high.word[word + 1]), "r"(b[0]),
          "r"(b[1]), "r"(int(there)));
}

__device__ __forceinline__ void computer(const Shared &s, float *y, const unsigned *global, int images, int items) {
    const int lane = threadIdx.x % 32, warp = __shfl_sync(~0u, threadIdx.x / 32, 0), g = lane / 4, t = lane % 4;
    const int slot = warp / NGROUPS, first_tile = warp % NGROUPS * NT;
    const Filters *const filters = reinterpret_cast<const Filters *>(global) + lane;
    Filters w[KSTEPS][NT];
#pragma unroll
    for (int k = 0; k < KSTEPS; k++)
#pragma unroll
        for (int n = 0; n < NT; n++)
            w[k][n] = filters[(k * NTILES + min(first_tile + n, NTILES - 1)) * 32];
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
        const auto place = [&](int unit) { return planes + 4 * s.places[unit * 8 + g]; };
        const auto read = [&](Fragment &f, int load, const unsigned char *base) {
            const int2 at = tap[load % KR];
#pragma unroll
            for (int part = 0; part < PARTS; part++) {
                const unsigned char *const from = base + load / KR * (4 * S) + part * (4 * LOW);
                f.b[part][0] = *reinterpret_cast<const unsigned *>(from + at.x);
                f.b[part][1] = *reinterpret_cast<const unsigned *>(from + at.y);
            }
        };
        // The warps take the units of all tiles in turn, so that none waits for those that have one more.
        int unit = mine;
        Fragment f[2];  // the next one is on its way while this one is multiplied
        const unsigned char *base = place(min(unit, UNITS - 1));
        read(f[0], 0, base);
#pragma unroll 1
        for (; unit < UNITS; unit += SLOTS) {
            float sums[RA][SETS][4] = {}, cross[RA][SETS][4] = {};
            const unsigned char *const next = place(min(unit + SLOTS, UNITS - 1));
            // Rows of outputs that any of the eight positions has.
            const int line0 = unit * 8 / TW, line1 = min(unit * 8 + 7, POSITIONS - 1) / TW;
            const int down0 = item.row + line0 % TR * RA;
            const int valid = OH % RA == 0 || line0 / TR != line1 / TR ? RA : OH - down0;
#pragma unroll
            for (int load = 0; load < FRAGMENTS; load++) {
                const Fragment &now = f[load % 2];
                if (load + 1 < FRAGMENTS) read(f[1 - load % 2], load + 1, base);
                else if (FRAGMENTS % 2 == 0) read(f[0], 0, next);
                const auto add = [&](float (&to)[RA][SETS][4], int part, int word) {
#pragma unroll
                    for (int r = 0; r < RA; r++) {
                        const int row = load / KR - r;
                        if (row < 0 || row >= K) continue;
#pragma unroll
                        for (int i = 0; i < SETS; i++) {
                            const Filters *const of = &w[row * KR + load % KR][2 * i];
                            mma_if(r < valid, to[r][i], of[0], of[1], word, now.b[part]);
                        }
                    }
                };
                if (PARTS == 2) add(cross, 0, WORDS - 2);
                add(sums, 0, 0);
                if (PARTS == 2) add(cross, PARTS - 1, 0);
            }
            if (FRAGMENTS % 2) read(f[0], 0, next);

            const int at = unit * 8 + 2 * t, line = at / TW, image = IMG == 1 ? 0 : line / TR;
            const int row = item.row + (line - image * TR) * RA, column = item.column + at - line * TW;
            const int rows = image < item.images && line - image * TR < TR && column < OW ? OH - row : 0;
            float *const to =
                BULK ? s.out + half * (OUT_FLOATS / 2) + image * (M * OUT_PITCH) + (row - item.row) * OW + column
                     : image_of(y, item.image + image, OUTPUTS) + row * index_t(OW) + column;
#pragma unroll
            for (int i = 0; i < SETS; i++)
#pragma unroll
                for (int c = 0; c < 2; c++) {
                    const int m = (first_tile + 2 * i + c) * 8 + g;
                    const Restore restore(e, s.columns[min(m, NTILES * 8 - 1)]);
                    if ((NTILES % NT || M % 8) && m >= M) continue;
#pragma unroll
                    for (int r = 0; r < RA; r++) {
                        float v[2];
#pragma unroll
                        for (int h = 0; h < 2; h++) {
                            v[h] = sums[r][i][2 * c + h];
                            if (PARTS == 2) v[h] = fmaf(cross[r][i][2 * c + h], 1.0f / 2048, v[h]);
                            v[h] = restore(v[h], sums[r][i][2 * c + h]);
                        }
                        float2 *const pair = reinterpret_cast<float2 *>(to + m * FILTER + r * index_t(OW));
                        if (r >= rows) continue;
                        if (BULK) *pair = make_float2(v[0], v[1]);
                        else __stcs(pair, make_float2(v[0], v[1]));
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

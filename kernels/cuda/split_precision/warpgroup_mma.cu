// The multiplying warps of split, in groups of four (wgmma, sm_90a): A in registers, B in shared memory.
//
// A group takes 64 positions. Position (i, j) stands for RA rows of outputs, RA sums; the words that it reads of input
// row p serve the sum of row r with the filters' row p - r, so that they are read once for up to RA products. That is
// for the first KR K steps, KR for each row of the filters; the words left over, KREST steps of them, are read for each
// row of outputs. With one channel there is nothing to share (RA 1, KR 0), R of split_filters.cu does it instead.
//
// One product of 64 x 16 NT x 16 gives sum high high and sum high low side by side, one of 64 x 8 NT x 16 sum low high.
//
// Outputs lie in shared memory until their team multiplies again: between two products it sends a piece of them.

constexpr int UNITS = (POSITIONS + 63) / 64 * NGROUPS, TEAMS = NC / 4;
constexpr int SUMS = 4 * PARTS * NT, LOW_SUMS = 4 * NT;        // of a thread, for one row of outputs
constexpr int OUT = 64 + 4;                                    // floats from one column to the next on the way out
constexpr int ROW_STEPS = KR * (K + RA - 1), ALL_STEPS = ROW_STEPS + RA * KREST;
constexpr int ROW_MOD = KR ? KR : 1, REST_MOD = KREST ? KREST : 1;
constexpr bool UNROLLED = ALL_STEPS > 1 && ALL_STEPS <= 64;
constexpr int ALIKE = UNROLLED && PATTERNS > 0 ? PATTERNS : 1;   // ways in which the four words of half a step lie
constexpr int STEP = NGROUPS * PARTS * NT * 16;                // of the filters, from one step to the next, 16 bytes each

struct Fragment {
    unsigned a[PARTS][4];
};

// The words of both halves of a step: of positions g and g + 8.
__device__ __forceinline__ void fetch(Fragment &f, const unsigned char *first0, const unsigned char *first1,
                                      const unsigned char *second0, const unsigned char *second1) {
#pragma unroll
    for (int part = 0; part < PARTS; part++) {
        const int at = part * (4 * LOW);
        f.a[part][0] = *reinterpret_cast<const unsigned *>(first0 + at);
        f.a[part][1] = *reinterpret_cast<const unsigned *>(first1 + at);
        f.a[part][2] = *reinterpret_cast<const unsigned *>(second0 + at);
        f.a[part][3] = *reinterpret_cast<const unsigned *>(second1 + at);
    }
}
__device__ __forceinline__ void fetch(Fragment &f, const unsigned char *const (&base)[2], int2 tap, int more) {
    fetch(f, base[0] + tap.x + more, base[1] + tap.x + more, base[0] + tap.y + more, base[1] + tap.y + more);
}

// Step number `step` of the sums of the rows from `first` up to `last`, the filters' step being `back` less for each.
__device__ __forceinline__ void add_products(float (&sums)[RA][SUMS], float (&low)[RA][LOW_SUMS], const Fragment &f, unsigned long long b, int first,
                                         int last, int back) {
    fence();
#pragma unroll
    for (int r = 0; r < RA; r++)
        if (RA == 1 || (first <= r && r <= last)) MMA_HIGH(sums[r], f.a[0], b - r * back);
    if (PARTS == 2)
#pragma unroll
        for (int r = 0; r < RA; r++)
            if (RA == 1 || (first <= r && r <= last)) MMA_LOW(low[r], f.a[PARTS - 1], b - r * back);
    commit();
}

// What was moved up of the sums of high by high, of which a thread has so many for each row of outputs.
struct Whole {
    float sums[CHUNKED ? RA : 1][CHUNKED ? LOW_SUMS : 1];
    __device__ __forceinline__ void add_up(float (&from)[RA][SUMS]) {
        wait<0>();
        // A loop of one turn, which the compiler cannot know: where sums are changed between products in one run of
        // instructions it lets every product wait for the one before (C7511).
        int once = 1;
        asm volatile("" : "+r"(once));
#pragma unroll 1
        for (int i = 0; i < once; i++) {
#pragma unroll
            for (int r = 0; r < RA; r++)
#pragma unroll
                for (int v = 0; v < LOW_SUMS; v++) move_up(from[r][v], sums[CHUNKED ? r : 0][CHUNKED ? v : 0]);
        }
    }
};

constexpr int PIECES = RA * 4 * NT;                            // of a lane's outputs, each a float
constexpr int PIECES_A_STEP = UNROLLED ? (PIECES + ALL_STEPS - 2) / (ALL_STEPS - 1) : PIECES;

// A unit's outputs on their way out: of one position a lane has every second column of the filters.
struct Outgoing {
    static constexpr bool ALL_COLUMNS = COLUMNS % (8 * NT * NGROUPS * MBLOCKS) == 0, ALL_ROWS = OH % SUPER_ROWS == 0;
    const float *from;
    float *to;
    int rows;     // output rows there are, from the position's first on
    int columns;  // columns of filters there are, from the warp's first on

    __device__ __forceinline__ explicit Outgoing(const float *out) : from(out), to(nullptr), rows(0), columns(0) {}
    __device__ __forceinline__ Outgoing(const float *out, float *y, const Item &item, int group, int n0) {
        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4, odd = warp % 2, in_group = warp / 2 * 32 + lane;
        const int at = group * 64 + in_group, line = at / TW, image = line / TR;
        const int row = item.row + line % TR * SUPER_ROWS + odd % R, column = item.column + at % TW;
        from = out + odd * OUT + in_group;
        columns = COLUMNS - n0 * 8 - odd;
        rows = image < item.images && column < OW ? OH - row : 0;
        to = image_of(y, item.image + image, OUTPUTS) + row * index_t(OW) + column;
        to += index_t((n0 * 8 + odd) / R) * PIXELS;
    }
    // A piece is read at one step and written at the next.
    __device__ __forceinline__ float read(int piece) const {
        const int n = piece % (4 * NT) * 2, r = piece / (4 * NT);
        return from[(r * (8 * NT) + n) * OUT];
    }
    __device__ __forceinline__ void write(int piece, float v) const {
        const int n = piece % (4 * NT) * 2, r = piece / (4 * NT), down = r * R + n % R;
        if ((ALL_COLUMNS || n < columns) && (ALL_ROWS ? 0 : down) < rows)
            __stcs(to + n / R * PIXELS + down * index_t(OW), v);
    }
};

__device__ __forceinline__ void computer(const Shared &s, float *y, const unsigned *, int images, int items) {
    const int lane = threadIdx.x % 32, team = __shfl_sync(~0u, threadIdx.x / 128, 0), warp = threadIdx.x / 32 % 4, g = lane / 4, t = lane % 4;
    const int2 *const taps = s.taps + t;
    float *const out = s.out + team * (RA * 8 * NT * OUT);
    Outgoing outgoing(out);
    const unsigned filters = address_of(s.filters);
    // Core matrices without a swizzle: 128 bytes apart along the products, 256 along the columns.
    const unsigned long long described = (filters >> 4) | (128ull >> 4) << 16 | (256ull >> 4) << 32;
    const auto send = [&] {
#pragma unroll
        for (int piece = 0; piece < PIECES; piece++) outgoing.write(piece, outgoing.read(piece));
    };
    // Where the first word of every half of a row's steps lies, and which pattern its words make; a half for each
    // pattern. Static: the compiler then knows them before it asks whether the addresses are those of shared memory.
    static constexpr int halves[][2] = {HALF_LIST}, examples[] = {PATTERN_LIST};
    int turn = 0, mine = team, number = blockIdx.x / MBLOCKS;
    const int tile0 = blockIdx.x % MBLOCKS * (GB * NT);
    for (; number < items; turn++) {
        const Item item(number, images);
        const int half = turn % 2;
        await(s.gates + FULL + half, turn / 2);
        number = after(s, half);
        const unsigned *const planes = s.planes + half * STAGE;
        const int e = s.e[half];
        // The groups take the units of all tiles in turn, so that none waits for those that have one more.
        int unit = mine;
#pragma unroll 1
        for (; unit < UNITS; unit += TEAMS) {
            const int group = unit / NGROUPS, in_block = unit % NGROUPS * NT, n0 = tile0 + in_block;
            const unsigned char *base[2];
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const int at = min(group * 64 + warp * 16 + i * 8 + g, POSITIONS - 1), line = at / TW;
                base[i] = reinterpret_cast<const unsigned char *>(
                    planes + line / TR * IMAGE_WORDS + line % TR * (SUPER_ROWS * S) + at % TW);
            }
            const unsigned char *alike[ALIKE];
            const int second_line = base[1] - base[0];
#pragma unroll
            for (int i = 0; i < ALIKE; i++) {
                const int2 tap = taps[examples[i] / 2 * 4];
                alike[i] = base[0] + ((examples[i] % 2 ? tap.y : tap.x) - halves[examples[i]][0]);
            }
            unsigned long long b = described + in_block * (PARTS * 16);
            asm volatile("" : "+l"(b));  // otherwise every step's is worked out beforehand, and kept
            float sums[RA][SUMS] = {}, low[RA][LOW_SUMS] = {};
            Whole whole = {};

            Fragment f0, f1, f2;
            if constexpr (UNROLLED) {
                // While the products of one fragment are added, the next is read. With one more in between RA 2 is
                // faster, but there are no registers for it with RA 3, which is worth more.
                const auto number = [&](int k) -> Fragment & { return k % 2 == 0 ? f0 : f1; };
                const auto fetch_step = [&](int k) {
                    const int rest = k - ROW_STEPS;
                    if (k < ROW_STEPS && PATTERNS > 0) {
                        constexpr int down = 4 * S;
                        const int j = k % ROW_MOD * 2, p = k / ROW_MOD * down;
                        const int x = halves[j][0] + p, y = halves[j + 1][0] + p;
                        const auto first = alike[halves[j][1]], second = alike[halves[j + 1][1]];
                        fetch(number(k), first + x, first + second_line + x, second + y, second + second_line + y);
                    } else if (k < ROW_STEPS)
                        fetch(number(k), base, taps[k % ROW_MOD * 4], k / ROW_MOD * (4 * S));
                    else if (k < ALL_STEPS)
                        fetch(number(k), base, taps[(K * KR + rest % REST_MOD) * 4], rest / REST_MOD * (4 * S));
                };
                float held[PIECES_A_STEP];
                fetch_step(0);
#pragma unroll
                for (int k = 0; k < ALL_STEPS; k++) {
                    const int p = k / ROW_MOD, rest = k - ROW_STEPS, r = rest / REST_MOD;
                    if (k < ROW_STEPS) add_products(sums, low, number(k), b + k * STEP, p - K + 1, p, KR * STEP);
                    else add_products(sums, low, number(k), b + (K * KR + rest % REST_MOD) * STEP, r, r, 0);
#pragma unroll
                    for (int i = 0; i < PIECES_A_STEP; i++) {
                        const int piece = k * PIECES_A_STEP + i, before = piece - PIECES_A_STEP;
                        if (before >= 0 && before < PIECES) outgoing.write(before, held[i]);
                        if (piece < PIECES) held[i] = outgoing.read(piece);
                    }
                    wait<1>();
                    fetch_step(k + 1);
                    if (CHUNKED && (k + 1) % CHUNK == 0) whole.add_up(sums);
                }
            } else {
                send();
                int j = 0, p = 0;  // the step within its row, and the row
                int2 tap = taps[0];
                const auto next = [&](Fragment &f) {
                    fetch(f, base, tap, p * (4 * S));
                    if (++j == KR) j = 0, p++;
                    tap = taps[j * 4];
                };
                int j_done = 0, p_done = 0;
                const auto use = [&](const Fragment &f) {
                    add_products(sums, low, f, b + (p_done * KR + j_done) * STEP, p_done - K + 1, p_done, KR * STEP);
                    if (++j_done == KR) j_done = 0, p_done++;
                    wait<1>();
                };
                if (ROW_STEPS > 0) next(f0);
                if (ROW_STEPS > 1) next(f1);
#pragma unroll 1
                for (int k = 0; k < ROW_STEPS; k += 3) {
                    use(f0);
                    if (k + 2 < ROW_STEPS) next(f2);
                    if (k + 1 < ROW_STEPS) use(f1);
                    if (k + 3 < ROW_STEPS) next(f0);
                    if (k + 2 < ROW_STEPS) use(f2);
                    if (k + 4 < ROW_STEPS) next(f1);
                    if (CHUNKED && (k + 3) % CHUNK == 0) whole.add_up(sums);
                }
                wait<0>();
                // A step at most for each row of filters: too few to part the sums for.
#pragma unroll
                for (int k = 0; k < RA * KREST; k++) {
                    Fragment &f = k % 2 ? f1 : f0;
                    wait<1>();
                    fetch(f, base, taps[(K * KR + k % REST_MOD) * 4], k / REST_MOD * (4 * S));
                    add_products(sums, low, f, b + (K * KR + k % REST_MOD) * STEP, k / REST_MOD, k / REST_MOD, 0);
                }
            }
            wait<0>();

            meet(HANDED + team, 128);  // all have sent what lay there
#pragma unroll
            for (int r = 0; r < RA; r++)
#pragma unroll
                for (int n = 0; n < NT; n++) {
                    Restore restore[2];
#pragma unroll
                    for (int i = 0; i < 2; i++)
                        restore[i] = Restore(e, s.columns[(n0 + n) * 8 + 2 * t + i]);
#pragma unroll
                    for (int v = 0; v < 4; v++) {
                        float sum = sums[r][4 * n + v];
                        if (PARTS == 2)
                            sum = fmaf(sums[r][(PARTS - 1) * 4 * NT + 4 * n + v] + low[r][4 * n + v], 1.0f / 2048, sum);
                        if (CHUNKED) sum += whole.sums[CHUNKED ? r : 0][CHUNKED ? 4 * n + v : 0];
                        const int column = (r * NT + n) * 8 + 2 * t + v % 2;
                        out[column * OUT + 16 * warp + v / 2 * 8 + g] = restore[v % 2](sum, sums[r][4 * n + v]);
                    }
                }
            meet(HANDED + team, 128);
            outgoing = Outgoing(out, y, item, group, n0);
        }
        mine = unit - UNITS;
        arrive(s.gates + EMPTY + half);
    }
    send();
}

// The multiplying warps of split where filters fit registers, by wgmma (sm_90a): filters are its A, inputs its B.
//
// An implicit GEMM: a position (i, j) stands for RA rows of two outputs. Inputs lie in shared memory (implicit_gemm_operands.cu)
// in units of eight values, 16 bytes from one position to the next, as B wants them: a descriptor names two units of
// ACROSS positions, eight neighbouring ones of so many lines, and one that begins a position or a line further what filters
// meet there. Lines are S positions long.
//
//     A (64 x 16 products)   row 16 w + 8 q + g: filter_of_row((w % NT) * 8 + g), for the outputs w / NT down and q to the right
//     B (16 x ACROSS)        two units of so many positions
//     D (64 x ACROSS)        in registers: a lane has both outputs of two neighbouring positions
//
// High parts of filters stay in registers, low ones in shared memory; the warps themselves read nothing.
// Two teams take turns: one's outputs are stored while the other's products are multiplied.
//
// Arithmetic: 3 (PARTS 2) or 1 times 64 x 16 KSTEPS products a position, of which RA x 2 x M x C K K are wanted. Bytes:
// x once and K - 1 rows more for each band of rows; y once. Limits: what fits a team's registers, 4 KSTEPS for filters
// and ACROSS / 2 or ACROSS for sums; shared memory's rate, of which B takes half where nothing waits; of more than
// 32 / RA filters every block splits the inputs anew.

constexpr int TEAMS = 2, UNITS = IMG * PIECES;                 // at least one unit of a tile for each team
constexpr int FILTER = BULK ? OUT_PITCH : PIXELS;              // floats from one filter's outputs to the next

// The teams queue products in turn: while one's are multiplied, the other stores. It is told so many steps before the
// last: waking took it some 550 cycles.
constexpr int MOST_EARLY = KSTEPS < 6 ? 1 : KSTEPS / 3, WAKING = 600 / (ACROSS / 2 * (PARTS == 2 ? 3 : 1)) + 1;
constexpr int TOLD = KSTEPS - (WAKING < MOST_EARLY ? WAKING : MOST_EARLY);

constexpr bool ALL_LINES = OH % (RA * TR) == 0 && TR % LINES == 0;  // a lane stores all lines of a piece, or none

// Where unit number `unit` of those that filters meet lies, seen from a position, in units: the last one twice where two
// are wanted, once for filters of nothing.
__device__ constexpr int place_of(int unit) { return unit / (KP * SR) * (PL / 4) + unit / KP % SR * S + unit % KP; }

// Outputs of one position: the two of its row, of which the second may not be there.
__device__ __forceinline__ void store(float *to, float first, float second, int column) {
    if (PAIRS) {
        if (BULK) *reinterpret_cast<float2 *>(to) = make_float2(first, second);
        else __stcs(reinterpret_cast<float2 *>(to), make_float2(first, second));
    } else {
        __stcs(to, first);
        if (OW % 2 == 0 || column + 1 < OW) __stcs(to + 1, second);
    }
}

// Say that the copy engine has read the outputs of that turn, which this team gave it; none remain.
__device__ __forceinline__ int all_read(const Shared &s, int turn) {
    await_read();
    arrive(s.gates + OUT_EMPTY + turn % 2);
    return -1;
}

__device__ __forceinline__ void computer(const Shared &s, float *y, const unsigned *global, int images, int items) {
    const int lane = threadIdx.x % 32, team = __shfl_sync(~0u, threadIdx.x / 128, 0), g = lane / 4, t = lane % 4;
    const int warp = threadIdx.x / 32 % 4, block = blockIdx.x % MBLOCKS;
    const int own_filter = filter_of_row(warp % NT * 8 + g), filter = block * (8 * NT) + own_filter, down = warp / NT;
    // Of two neighbouring positions some lanes stage the second one first, so that four filters' lie in different banks.
    const int later = BULK && (NT == 1 ? g % 2 : g / 2 % 2) ? 2 : 0;
    const uint4 *const own = reinterpret_cast<const uint4 *>(global) + block * (PARTS * KSTEPS * 128) + threadIdx.x % 128;
    unsigned a[KSTEPS][4];
#pragma unroll
    for (int k = 0; k < KSTEPS; k++) {
        const uint4 four = own[k * 128];
        a[k][0] = four.x, a[k][1] = four.y, a[k][2] = four.z, a[k][3] = four.w;
    }
    // Core matrices without a swizzle: of filters 128 bytes apart along the products, 256 along the rows.
    const unsigned long long low = address_of(s.filters) >> 4 | (128ull >> 4) << 16 | (256ull >> 4) << 32;
    int turn = 0, mine = team, done = 0, sent = -1, number = blockIdx.x / MBLOCKS;
    for (; number < items; turn++) {
        const Item item(number, images);
        const int half = turn % 2;
        await(s.gates + FULL + half, turn / 2);
        number = after(s, half);
        const Restore restore(s.e[half], s.columns[min(filter, NTILES * 8 - 1)]);
        // The teams take the units of all tiles in turn, so that none waits for one that has one more.
        int unit = mine;
#pragma unroll 1
        for (; unit < UNITS; unit += TEAMS) {
            const int image = unit / PIECES, strip = unit % STRIPS, line = unit % PIECES / STRIPS * LINES;
            const unsigned at = address_of(s.planes + half * STAGE + image * IMAGE_WORDS) / 16 + line * S + 8 * strip;
            unsigned long long b = at | (unsigned long long)(S) << 32;  // the next line's eight
            asm volatile("" : "+l"(b));  // otherwise every step's is worked out beforehand, and kept
            float high[ACROSS / 2], cross[PARTS == 2 ? ACROSS / 2 : 1];  // the first products are not added to anything
            if (team || done) await(s.gates + MAY + team, done - 1 + team);
            fence();
#pragma unroll
            for (int k = 0; k < KSTEPS; k++) {
                if (k == TOLD) arrive(s.gates + MAY + 1 - team);
                const int first = place_of(2 * k), second = place_of(min(2 * k + 1, UP * SR * KP - 1));
                const unsigned long long both = b + (first | (second - first) << 16);
                if (k == 0) FIRST_MMA_HIGH(high, a[k], both);
                else MMA_HIGH(high, a[k], both);
                if (PARTS < 2) continue;
                if (k == 0) FIRST_MMA_LOW(cross, low, both);
                else MMA_LOW(cross, low + k * 128, both);
                MMA_HIGH(cross, a[k], both + LOW / 4);
            }
            commit();
            done++;
            wait<0>();
            if (unit + TEAMS >= UNITS) arrive(s.gates + EMPTY + half);
            if (BULK && sent >= 0) sent = all_read(s, sent);
            if (BULK && turn >= OUTS) await(s.gates + OUT_EMPTY + (turn - OUTS) % 2, (turn - OUTS) / 2);

            const int column = 16 * strip + 4 * t;
            float *const staged = s.out + turn % OUTS * (OUT_FLOATS / OUTS) + image * (FILTERS_HERE * OUT_PITCH) + own_filter * FILTER;
            float *const map = image_of(y, item.image + image, OUTPUTS) + filter * index_t(FILTER) + item.row * index_t(OW);
            float *const to = (BULK ? staged : map) + (line * RA + down) * OW + column;
            const int real = filter < M && image < item.images ? min(TR, (OH - item.row - down + RA - 1) / RA) - line : 0;
            // Lines that have the position stored first, and the other.
            const int first = column + later < 2 * TW ? real : 0, second = column + 2 - later < 2 * TW ? real : 0;
#pragma unroll
            for (int i = 0; i < LINES; i++) {
                float v[2][2];  // of positions 2 t and 2 t + 1
#pragma unroll
                for (int j = 0; j < 2; j++)
#pragma unroll
                    for (int q = 0; q < 2; q++) {
                        const int d = 4 * i + 2 * q + j;
                        v[j][q] = PARTS == 2 ? fmaf(cross[PARTS == 2 ? d : 0], 1.0f / 2048, high[d]) : high[d];
                        v[j][q] = restore(v[j][q], high[d]);
                    }
                float *const row = to + i * (RA * OW);
                const float here[] = {later ? v[1][0] : v[0][0], later ? v[1][1] : v[0][1]};
                const float there[] = {later ? v[0][0] : v[1][0], later ? v[0][1] : v[1][1]};
                if (ALL_LINES ? first > 0 : i < first) store(row + later, here[0], here[1], column + later);
                if (ALL_LINES ? second > 0 : i < second) store(row + 2 - later, there[0], there[1], column + 2 - later);
            }
        }
        mine = unit - UNITS;
        if (!BULK) continue;
        make_visible();
        arrive(s.gates + OUT_FULL + half);
        // Whoever had the last unit gives the copy engine the tile's outputs. What was staged there before is read by then.
        if (mine != TEAMS - 1) continue;
        await(s.gates + OUT_FULL + half, turn / 2);
        send(s.out + turn % OUTS * (OUT_FLOATS / OUTS), y, item, lane * 4 + warp, 128);
        sent = turn;
        if (OUTS == 1) sent = all_read(s, sent);
    }
    await_read();
}

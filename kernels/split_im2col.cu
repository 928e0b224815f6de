// The multiplying warps of split where filters fit registers, by wgmma (sm_90a): filters are its A, inputs its B.
//
// A position (i, j) stands for RA rows of two outputs. Inputs lie in shared memory (split_im2col_words.cu) in units of eight
// values, 16 bytes from one position to the next, as B wants them: a descriptor names two units of ACROSS positions, and
// one that begins a position or a line of them further what filters meet there. Lines are S positions long, of which
// the last ones give nothing. (No copies of inputs, then: the name is the first version's, which had im2col.)
//
//     A (64 x 16 products)   row 16 w + 8 q + g: filter (w % NT) * 8 + g, for the outputs w / NT down and q to the right
//     B (16 x ACROSS)        two units of so many positions
//     D (64 x ACROSS)        in registers: a lane has both outputs of two neighbouring positions
//
// High parts of filters stay in registers, low ones in shared memory; the warps themselves read nothing. Two teams take
// turns: one's outputs are stored while the other's products are multiplied.
//
// Arithmetic: 3 (PARTS 2) or 1 times 64 x 16 KSTEPS products a position, of which RA x 2 x M x C K K are wanted. Bytes:
// x once and K - 1 rows more for each band of rows; y once. Limits: what fits a team's registers, 4 KSTEPS for filters
// and ACROSS / 2 or ACROSS for sums; of more than 32 / RA filters every block splits the inputs anew.

constexpr int TEAMS = 2, UNITS = IMG * PIECES;                 // at least one unit of a tile for each team
constexpr int FILTER = BULK ? OUT_PITCH : PIXELS;              // floats from one filter's outputs to the next

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

__device__ __forceinline__ void computer(const Shared &s, float *y, const unsigned *global, int images, int items) {
    const int lane = threadIdx.x % 32, team = __shfl_sync(~0u, threadIdx.x / 128, 0), g = lane / 4, t = lane % 4;
    const int warp = threadIdx.x / 32 % 4, block = blockIdx.x % MBLOCKS;
    const int here = filter_of_row(warp % NT * 8 + g), filter = block * (8 * NT) + here, down = warp / NT;
    const uint4 *const own = reinterpret_cast<const uint4 *>(global) + block * (PARTS * KSTEPS * 128) + threadIdx.x % 128;
    unsigned a[KSTEPS][4];
#pragma unroll
    for (int k = 0; k < KSTEPS; k++) {
        const uint4 four = own[k * 128];
        a[k][0] = four.x, a[k][1] = four.y, a[k][2] = four.z, a[k][3] = four.w;
    }
    // Core matrices without a swizzle: of filters 128 bytes apart along the products, 256 along the rows.
    const unsigned long long low = address_of(s.filters) >> 4 | (128ull >> 4) << 16 | (256ull >> 4) << 32;
    int turn = 0, mine = team, done = 0, number = blockIdx.x / MBLOCKS;
    for (; number < items; turn++) {
        const Item item(number, images);
        const int half = turn % 2;
        await(s.gates + FULL + half, turn / 2);
        number = after(s, half);
        const float scale = scale_back(s.e[half], s.columns[min(filter, NTILES * 8 - 1)]);
        // The teams take the units of all tiles in turn, so that none waits for one that has one more.
        int unit = mine;
#pragma unroll 1
        for (; unit < UNITS; unit += TEAMS) {
            const int image = unit / PIECES, n0 = unit % PIECES * ACROSS;
            const unsigned at = address_of(s.planes + half * STAGE + image * IMAGE_WORDS) / 16 + n0;
            unsigned long long b = at | (128ull >> 4) << 32;  // eight positions 128 bytes further
            asm volatile("" : "+l"(b));  // otherwise every step's is worked out beforehand, and kept
            float high[ACROSS / 2], cross[PARTS == 2 ? ACROSS / 2 : 1];  // the first products are not added to anything
            // The teams queue their products in turn: while one's are multiplied, the other stores. In step both would wait.
            if (team || done) await(s.gates + MAY + team, done - 1 + team);
            fence();
#pragma unroll
            for (int k = 0; k < KSTEPS; k++) {
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
            arrive(s.gates + MAY + 1 - team);
            done++;
            wait<0>();
            if (unit + TEAMS >= UNITS) arrive(s.gates + EMPTY + half);
            if (BULK && turn >= OUTS) await(s.gates + OUT_EMPTY + (turn - OUTS) % 2, (turn - OUTS) / 2);

            float *const staged = s.out + turn % OUTS * (OUT_FLOATS / OUTS) + image * (FILTERS_HERE * OUT_PITCH) + here * FILTER;
            float *const map = image_of(y, item.image + image, OUTPUTS) + filter * index_t(FILTER);
            float *const out = BULK ? staged : map + item.row * index_t(OW);
            float *const to = out + down * OW;
            const int lines = filter < M && image < item.images ? min(TR, (OH - item.row - down + RA - 1) / RA) : 0;
#pragma unroll
            for (int i = 0; i < ACROSS / 8; i++) {
                float v[2][2];  // of positions 2 t and 2 t + 1
#pragma unroll
                for (int j = 0; j < 2; j++)
#pragma unroll
                    for (int q = 0; q < 2; q++) {
                        const int d = 4 * i + 2 * q + j;
                        v[j][q] = PARTS == 2 ? fmaf(cross[PARTS == 2 ? d : 0], 1.0f / 2048, high[d]) : high[d];
                        v[j][q] = multiply(v[j][q], scale);
                    }
#pragma unroll
                for (int j = 0; j < 2; j++) {
                    const int eight = n0 + 8 * i, n = eight + 2 * t + j;
                    const int line = S % 8 == 0 ? eight / S : n / S, column = 2 * (n - line * S);
                    if (column < 2 * TW && line < lines) store(to + line * (RA * OW) + column, v[j][0], v[j][1], column);
                }
            }
        }
        mine = unit - UNITS;
        if (!BULK) continue;
        make_visible();
        arrive(s.gates + OUT_FULL + half);
    }
}

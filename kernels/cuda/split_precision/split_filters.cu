// split_filters: the filters as the tensor cores want them, in two 16-bit floats each. One block for 8 columns.
//
// Column n is filter n / R moved down (FOLDED: right) by n % R; its weights are scaled by a power of two of the filter's own and
// lie in the order of TAPS, zeros where a tap is beyond the filter. (IMPLICIT: column n is filter n, as rows of wgmma's A.) A filter with a value below 2^-28 of its largest
// one, or with one that is no number, cannot be split: the block then says so behind the columns.
//
// The list of the images to be computed anew is emptied here too, and the tiles' queues are set to their beginnings.

constexpr int SPREAD = 28;       // powers of two below the largest value within which all others must lie
constexpr bool CHUNKED = CHUNK < KSTEPS;  // whether sums are parted every so many steps (accumulators.cu)
constexpr bool LEANS = PARTS == 2 && !CHUNKED && KSTEPS >= LONG_SUM;  // whether products of one sign lose too much
constexpr int MOST_SCALE = 120;  // so that 2^120 and 2^-120 are both float32 numbers

// A launch of these kernels begins before the one before it has ended (sm_90), does what does not depend on it, and
// waits here until all of it is in memory. let_next_begin: the one behind it may be brought to the chip.
__device__ __forceinline__ void await_launch_before() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
__device__ __forceinline__ void let_next_begin() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

#if IMPLICIT
// Of implicit_gemm.cu: units of four words that a pair of input columns has in RA rows; how many pairs, and how many times
// RA rows, filters reach. A piece of an image is a strip of eight positions of so many lines; units behind the planes that
// the last one reads, whatever they are.
constexpr int UP = (RA * C + 3) / 4, KP = (K + 2) / 2, SR = (K + 2 * RA - 2) / RA;
constexpr int LINES = ACROSS / 8, STRIPS = (TW + 7) / 8, PIECES = (TR + LINES - 1) / LINES * STRIPS;
constexpr int OVER = (PIECES / STRIPS * LINES - 1) * S + 8 * STRIPS + KP - 1 - TR * S;
constexpr int BEHIND = OVER > 0 ? 4 * OVER : 0;

// Which row, of eight for a warp, a block's filter has, and which filter a row: such that outputs that four rows stage at
// once are 16 banks apart where those of neighbouring filters are four.
constexpr bool APART = OUT_PITCH % 8 == 4;
__device__ __forceinline__ int row_of(int filter) {
    if (!APART) return filter;
    if (NT == 1) return filter / 2 + filter % 2 * 4;
    return filter / 16 * 16 + filter % 4 / 2 * 8 + filter % 2 * 4 + filter % 16 / 4;
}
__device__ __forceinline__ int filter_of_row(int row) {
    if (!APART) return row;
    if (NT == 1) return row % 4 * 2 + row / 4;
    return row / 16 * 16 + row % 4 * 4 + row / 8 % 2 * 2 + row / 4 % 2;
}
#else
constexpr int UP = 0, BEHIND = 0;
#endif

// A word of a plane, seen from an output pixel: two products.
struct Tap {
    short plane, row, column;  // plane < 0: none
    __device__ int offset() const { return plane < 0 ? 0 : plane * PL + row * S + column; }
};

__constant__ const Tap TAPS[] = {TAP_LIST};

// Two 16-bit floats in a word, the first in its lower half.
__device__ __forceinline__ unsigned to_halves(float first, float second) {
    unsigned word;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(second), "f"(first));
    return word;
}

// What the word leaves of both values, times 2^11. Exact: of 24 bits it leaves 13.
__device__ __forceinline__ unsigned to_rest(float first, float second, unsigned word) {
    float a, b;
    asm("{.reg .f16 l, h; mov.b32 {l, h}, %2; cvt.f32.f16 %0, l; cvt.f32.f16 %1, h;}" : "=f"(a), "=f"(b) : "r"(word));
    return to_halves((first - a) * 2048.0f, (second - b) * 2048.0f);
}

// Where the words t and t + 4 of a step, columns n of a tile, lie among the filters; part 1 is low.
__device__ __forceinline__ int filter_place(int step, int tile, int n, int t, int word, int part) {
#if WGMMA
    // A block's GB groups of NT tiles, high then low; a tile is two core matrices of eight columns, four words each.
    const int group = tile / NT, block = group / GB, at = (block * KSTEPS + step) * GB + group - block * GB;
    return ((at * PARTS + part) * NT + tile - group * NT) * 64 + word * 32 + n * 4 + t;
#else
    return ((step * ((R * M + 7) / 8) + tile) * 32 + n * 4 + t) * (2 * PARTS) + 2 * part + word;
#endif
}

// Tensor cores cut each sum off behind its last bit, always towards zero, so that a sum of n steps is too small by
// about TRUNCATION_BIAS n units of 2^-23, as measured with mma.sync and wgmma alike, 2 to 122 steps, where signs are
// mixed. Columns are scaled by so much more, but those whose weights are whole in one 16-bit float each: of small
// integers the sums are exact. Of sums that are parted the last CHUNK steps' lose that much; those too small to be
// parted lose more than is made good, within the bound of kernels/cuda/split_precision/split_precision.py.
//
// The products of a step are cut off at the sum's last bit too, which of signs that are mixed cancels out. Of products
// of one sign it is some ONE_SIGN_BIAS units a step more, or as much less as signs differ: by the share of sum |x||w|
// that a sum is. That is at least the share of the largest it could be, 2^15 times the sum of the column's weights, and so
// much is added (LEANS), in the same units: what a long sum that is not parted loses of images and filters that are
// positive all over. Small windows of a bright image get little of it, and err as they did.
//
// A column's power of two, what a sum of its is multiplied by for that (of a float the upper bits), and those units, in
// one number.
__device__ __forceinline__ int column_of(int exponent, int steps, float size) {
    const unsigned lean = LEANS && steps ? __float_as_uint(ONE_SIGN_BIAS * 0x1p-38f * steps / size) >> 20 : 0;
    return exponent * 0x80000 + (lean << 8) + min(int(TRUNCATION_BIAS * min(steps, CHUNK) + 0.5f), 255);
}
__device__ __forceinline__ int exponent_of(int column) { return column >> 19; }

// Undoes the scaling of a column and of a tile, 2^e, and makes good what sums lose.
struct Restore {
    float scale, lean;
    __device__ __forceinline__ Restore() {}
    __device__ __forceinline__ Restore(int e, int column) {
        scale = __uint_as_float(((127 - e - exponent_of(column)) << 23) + (column & 255));
        if (LEANS) lean = scale * __uint_as_float((column & 0x7ff00) << 12);
    }
    // main: the sum of high parts' products alone. What is made good goes by it, for it is there before the sum is.
    __device__ __forceinline__ float operator()(float sum, float main) const {
        return multiply(sum, LEANS ? fmaf(fabsf(main), lean, scale) : scale);
    }
    __device__ __forceinline__ float operator()(float sum) const { return (*this)(sum, sum); }
};

extern "C" __global__ void __launch_bounds__(256)
split_weights(const float *__restrict__ w, unsigned *__restrict__ filters, int *__restrict__ columns, int *marks,
              int images) {
    constexpr int WIDTH = R * M, TILES = (WIDTH + 7) / 8;
    __shared__ int exponent[8], bad[8], used[8], rests[8];
    __shared__ float size[8];  // of LEANS: the sum of a column's weights, as they are scaled
    let_next_begin();
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, tile = blockIdx.x;
    for (int i = tile * 256 + threadIdx.x; i < images; i += gridDim.x * 256) marks[1 + images + i] = 0;
    if (tile == 0 && threadIdx.x == 0) marks[0] = 0;
    if (threadIdx.x == 0) marks[1 + 2ll * images + tile] = 0;  // no tiles taken; there are no more queues than blocks here

    const auto filter_of = [&](int n) { return min(tile * 8 + n, WIDTH - 1) / R; };
    unsigned most = 0, least = ~0u;
    for (int i = lane; i < REDUCTION; i += 32) {
        const unsigned bits = __float_as_uint(w[index_t(filter_of(warp)) * REDUCTION + i]) & 0x7fffffff;
        most = max(most, bits), least = min(least, bits - 1);
    }
    most = __reduce_max_sync(~0u, most), least = __reduce_min_sync(~0u, least);
    const int top = most >> 23, f = most == 0 ? 0 : 141 - top;
    if (LEANS) {
        float sum = 0;
        for (int i = lane; i < REDUCTION; i += 32)
            sum += fabsf(w[index_t(filter_of(warp)) * REDUCTION + i]) * __uint_as_float((127 + min(f, MOST_SCALE)) << 23);
        for (int i = 16; i; i /= 2) sum += __shfl_sync(~0u, sum, lane ^ i);
        if (lane == 0) size[warp] = sum;
    }
    if (lane == 0) {
        bad[warp] = most && (top == 255 || f > MOST_SCALE || least + 1 < unsigned(max(top - SPREAD, 1)) << 23);
        exponent[warp] = min(f, MOST_SCALE);
        used[warp] = rests[warp] = 0;
    }
    __syncthreads();
    if (threadIdx.x == 0 && tile < TILES) {
        int any = 0;
        for (int i = 0; i < 8; i++) any |= bad[i];
        columns[8 * TILES + tile] = any;
    }

    int steps = 0, steps_with_rest = 0;  // of column `lane`, those that this warp sees
#if IMPLICIT
    const int block = tile / NT;
    for (int i = threadIdx.x; i < KSTEPS * 32; i += 256) {
        unsigned seen = 0;
        const int step = i / 32, n = i % 32 / 4, t = i % 4;
        const float *const filter = w + index_t(filter_of(n)) * REDUCTION;
        const float scale = __uint_as_float((127 + exponent[n]) << 23);
#pragma unroll 1
        for (int output = 0; output < 4 * RA; output++) {  // those of a position, and both units of a step
            const int word = output % 2, right = output / 2 % 2, down = output / 4, unit = 2 * step + word;
            const int at = unit / (KP * SR) * 4 + t, c = at % C, q = unit % KP * 2 - right;
            const int p = unit / KP % SR * RA + at / C - down, row = row_of(tile % NT * 8 + n);
            const int own = down * NT + row / 8, g = row % 8;
            const bool real = unit < UP * KP * SR && at < RA * C && tile * 8 + n < WIDTH && p >= 0 && p < K;
            const float first = real && q >= 0 && q < K ? filter[(c * K + p) * K + q] * scale : 0.0f;
            const float second = real && q >= -1 && q < K - 1 ? filter[(c * K + p) * K + q + 1] * scale : 0.0f;
            const unsigned high = to_halves(first, second);
            unsigned *const to = filters + (block * PARTS * KSTEPS + step) * 512;
            to[(own * 32 + g * 4 + t) * 4 + right + 2 * word] = high;
            if (first != 0 || second != 0) seen |= 1u << n;
            if (PARTS == 2) {
                const unsigned rest = to_rest(first, second, high);
                to[KSTEPS * 512 + (((own * 2 + right) * 2 + word) * 8 + g) * 4 + t] = rest;
                if (rest & 0x7fff7fff) seen |= 256u << n;
            }
        }
        seen = __reduce_or_sync(~0u, seen) >> lane % 8;  // a warp has a whole step
        steps += seen & 1, steps_with_rest += seen >> 8 & 1;
    }
#else
    for (int i = threadIdx.x; i < KSTEPS * 32; i += 256) {
        unsigned seen = 0;
        const int step = i / 32, n = i % 32 / 4, t = i % 4, column = tile * 8 + n, moved = column % R;
        const float *const filter = w + index_t(filter_of(n)) * REDUCTION;
        const float scale = __uint_as_float((127 + exponent[n]) << 23);
#pragma unroll
        for (int word = 0; word < 2; word++) {
            const Tap tap = TAPS[step * 8 + t + 4 * word];
            const bool alone = C % 2 && tap.plane == C / 2;
            float value[2];
#pragma unroll
            for (int j = 0; j < 2; j++) {
                const int c = 2 * tap.plane + (alone ? 0 : j), p = tap.row + (FOLDED ? 0 : (alone && PAIR_ROWS ? j : 0) - moved);
                const int q = FOLDED ? 2 * tap.column + j - moved : tap.column + (alone && !PAIR_ROWS ? j : 0);
                const bool real = tap.plane >= 0 && column < WIDTH && p >= 0 && p < K && q >= 0 && q < K;
                value[j] = real ? filter[(c * K + p) * K + q] * scale : 0.0f;
            }
            const unsigned high = to_halves(value[0], value[1]);
            filters[filter_place(step, tile, n, t, word, 0)] = high;
            if (value[0] != 0 || value[1] != 0) seen |= 1u << n;
            if (PARTS == 2) {
                const unsigned rest = to_rest(value[0], value[1], high);
                filters[filter_place(step, tile, n, t, word, PARTS - 1)] = rest;
                if (rest & 0x7fff7fff) seen |= 256u << n;
            }
        }
        seen = __reduce_or_sync(~0u, seen) >> lane % 8;  // a warp has a whole step
        steps += seen & 1, steps_with_rest += seen >> 8 & 1;
    }
#endif
    if (lane < 8) atomicAdd(used + lane, steps), atomicAdd(rests + lane, steps_with_rest);
    __syncthreads();
    if (tile < TILES && threadIdx.x < 8)
        columns[tile * 8 + threadIdx.x] =
            column_of(exponent[threadIdx.x], rests[threadIdx.x] ? used[threadIdx.x] : 0, size[threadIdx.x]);
}

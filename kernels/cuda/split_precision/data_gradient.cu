// data_gradient: the gradient to the input of a layer with few channels by mma.sync, as the convolution of the output
// gradient, bordered with zeros, by the flipped filters.
//
//     x[b, c, h, w] = sum over m, p, q of bordered y[b, m, h + p, w + q] * w[m, c, K - 1 - p, L - 1 - q]
//
//                             channels: CHANNEL_TILES x 8, B, split, in shared memory
//                            +----------------------------------------+
//     16 M_TILES pixels of x |  main: y_high w_high                   |  D, in registers; main is promoted every
//     A: the whole image y,  |  cross: y_high w_low + y_low w_high    |  PROMOTION k-steps
//     split, in shared memory|                                        |
//                            +----------------------------------------+
//
// A block computes one image at a time, and another block of the multiprocessor hides its latencies where two fit. It
// finds the range of y, splits y into words of two filters m between borders that are zeroed once, and then its warps
// multiply units of 16 M_TILES pixels by all channels. A k-step has two halves of four words: four pairs of filters at
// one tap (p, q). Images and filters that cannot be split are computed in float32, without taps outside y.
//
// Arithmetic intensity: 2 C K L FLOP per element of y, 3 times; y is read once from memory and once from L2. Reads of
// shared memory limit it: 8 bytes per pixel and pair of filters, for 8 CHANNEL_TILES channels.
// Source: "Warp level matrix instructions" in the PTX ISA; split.cuh has the arithmetic, data_gradient.py the bound.
// Restrictions: stride 1, no dilation, one group, no more padding than taps; an image of y fits a block.

constexpr int M_TILES = Config::m_tiles, WARPS = Config::warps, THREADS = 32 * WARPS, PROMOTION = Config::promotion;
constexpr int CHANNEL_TILES = (C + 7) / 8;
constexpr int PLANES = (M + 1) / 2, QUADS = (PLANES + 3) / 4;  // pairs of filters, and their groups of four
constexpr int ROW_PITCH = Config::row_pitch, PLANE_PITCH = Config::plane_pitch;  // words
constexpr int TOP = K - 1 - PAD_H, LEFT = L - 1 - PAD_W;                         // zeros above and before y
constexpr int HALF_STEPS = K * L * QUADS, K_STEPS = (HALF_STEPS + 1) / 2;
constexpr int LOW = 4 * QUADS * PLANE_PITCH;  // words from high to low components
constexpr int FRAGMENTS = K_STEPS * CHANNEL_TILES * 32;
constexpr int UNITS = (H * W + 16 * M_TILES - 1) / (16 * M_TILES);

// Bytes from a pixel's first tap and first pair of filters to those of half a k-step.
__device__ __forceinline__ int half_step_offset(int half) {
    const int tap = half / QUADS;
    return half < HALF_STEPS ? 4 * (half % QUADS * (4 * PLANE_PITCH) + tap / L * ROW_PITCH + tap % L) : 0;
}

// Split the filters into the B operands of all k-steps, [k-step][channel tile][lane] {high, high, low, low}: a block per
// channel tile, a warp per channel. exponents: per channel; 0 beyond the last.
extern "C" __global__ void __launch_bounds__(256)
split_flipped_filters(const float *__restrict__ w, unsigned *__restrict__ fragments, int *__restrict__ exponents) {
    const int n = threadIdx.x / 32, lane = threadIdx.x % 32, c = blockIdx.x * 8 + n;
    Range range;
    if (c < C)
        for (int i = lane; i < M * K * L; i += 32) range.add(w[(i / (K * L) * C + c) * (K * L) + i % (K * L)]);
    range.join_warp();
    const int exponent = c < C ? range.exponent() : 0;
    if (lane == 0) exponents[c] = exponent;
    const float scale = power_of_two(exponent == Range::UNSPLITTABLE ? 0 : exponent);
    for (int i = lane; i < K_STEPS * 8; i += 32) {
        const int half = i / 4, t = i % 4, tap = half / QUADS, m = 2 * (half % QUADS * 4 + t);
        float value[2];
#pragma unroll
        for (int j = 0; j < 2; j++) {
            const bool exists = half < HALF_STEPS && m + j < M && c < C;
            value[j] = exists ? multiply(w[((m + j) * C + c) * (K * L) + K * L - 1 - tap], scale) : 0.0f;
        }
        const unsigned high = to_fp16x2(value[0], value[1]);
        unsigned *const to = fragments + 4 * ((half / 2 * CHANNEL_TILES + blockIdx.x) * 32 + n * 4 + t) + half % 2;
        to[0] = high, to[2] = fp16x2_residual(value[0], value[1], high);
    }
}

// The range of this thread's share of an image of y.
__device__ __forceinline__ Range range_of(const float *y) {
    Range range;
    if constexpr (Config::vector == 4) {
#pragma unroll 4
        for (int i = threadIdx.x; i < OUTPUTS / 4; i += THREADS) {
            const float4 v = __ldg(reinterpret_cast<const float4 *>(y) + i);
            range.add(v.x), range.add(v.y), range.add(v.z), range.add(v.w);
        }
    } else {
#pragma unroll 8
        for (int i = threadIdx.x; i < OUTPUTS; i += THREADS) range.add(__ldg(y + i));
    }
    return range;
}

// All threads: split an image of y. Several words are read before the first is written, since a write between two reads
// would have to wait for the first.
__device__ __forceinline__ void split_image(unsigned *words, const float *y, float scale) {
    constexpr int WORDS = PLANES * PIXELS, BATCH = 6;
    for (int first = threadIdx.x; first < WORDS; first += BATCH * THREADS) {
        float a[BATCH], b[BATCH];
#pragma unroll
        for (int i = 0; i < BATCH; i++) {
            const int word = first + i * THREADS, plane = word / PIXELS;
            a[i] = word < WORDS ? __ldg(y + word + plane * PIXELS) : 0.0f;
            b[i] = word < WORDS && 2 * plane + 1 < M ? __ldg(y + word + (plane + 1) * PIXELS) : 0.0f;
        }
#pragma unroll
        for (int i = 0; i < BATCH; i++) {
            const int word = first + i * THREADS, plane = word / PIXELS, pixel = word - plane * PIXELS, row = pixel / OW;
            if (word >= WORDS) break;
            const float one = multiply(a[i], scale), other = multiply(b[i], scale);
            const unsigned high = to_fp16x2(one, other);
            unsigned *const to = words + plane * PLANE_PITCH + (row + TOP) * ROW_PITCH + LEFT + pixel - row * OW;
            to[0] = high, to[LOW] = fp16x2_residual(one, other, high);
        }
    }
}

// A warp: the sums of a unit's pixels, to x.
__device__ __forceinline__ void multiply_unit(const unsigned *words, const uint4 *fragments, const int2 *offsets,
                                              const int *exponents, int y_exponent, int unit, float *x) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, first = unit * (16 * M_TILES) + g;
    const unsigned char *of[2 * M_TILES];
#pragma unroll
    for (int i = 0; i < 2 * M_TILES; i++) {
        const int pixel = min(first + 8 * i, H * W - 1);
        of[i] = reinterpret_cast<const unsigned char *>(words + t * PLANE_PITCH + pixel / W * ROW_PITCH + pixel % W);
    }
    float main[M_TILES][CHANNEL_TILES][4] = {}, cross[M_TILES][CHANNEL_TILES][4] = {};
    float promoted[M_TILES][CHANNEL_TILES][4] = {};
#pragma unroll 1
    for (int begin = 0; begin < K_STEPS; begin += PROMOTION) {
#pragma unroll 2
        for (int k = begin; k < min(begin + PROMOTION, K_STEPS); k++) {
            const int2 halves = offsets[k];
            uint4 b[CHANNEL_TILES];
#pragma unroll
            for (int n = 0; n < CHANNEL_TILES; n++) b[n] = fragments[(k * CHANNEL_TILES + n) * 32 + lane];
#pragma unroll
            for (int i = 0; i < M_TILES; i++) {
                unsigned high[4], low[4];
#pragma unroll
                for (int v = 0; v < 4; v++) {
                    const unsigned char *const word = of[2 * i + v % 2] + (v < 2 ? halves.x : halves.y);
                    high[v] = *reinterpret_cast<const unsigned *>(word);
                    low[v] = *reinterpret_cast<const unsigned *>(word + 4 * LOW);
                }
#pragma unroll
                for (int n = 0; n < CHANNEL_TILES; n++) {
                    mma(main[i][n], high, b[n].x, b[n].y);
                    mma(cross[i][n], high, b[n].z, b[n].w);
                    mma(cross[i][n], low, b[n].x, b[n].y);
                }
            }
        }
#pragma unroll
        for (int e = 0; e < M_TILES * CHANNEL_TILES * 4; e++) {
            float &sum = main[e / (4 * CHANNEL_TILES)][e / 4 % CHANNEL_TILES][e % 4];
            promoted[e / (4 * CHANNEL_TILES)][e / 4 % CHANNEL_TILES][e % 4] += sum;
            sum = 0.0f;
        }
    }
    // Epilogue: lane 4 g + t has channels 2 t and 2 t + 1 of a tile, at pixels g and g + 8 of each 16.
#pragma unroll
    for (int n = 0; n < CHANNEL_TILES; n++)
#pragma unroll
        for (int j = 0; j < 2; j++) {
            const int c = 8 * n + 2 * t + j;
            if (c >= C) continue;
            const int exponent = -(y_exponent + exponents[c]);
#pragma unroll
            for (int i = 0; i < 2 * M_TILES; i++) {
                const int v = i % 2 * 2 + j;
                const float sum = fmaf(cross[i / 2][n][v], 1.0f / 2048, promoted[i / 2][n][v]);
                if (first + 8 * i < H * W) x[c * (H * W) + first + 8 * i] = scaled(sum, exponent);
            }
        }
}

extern "C" __global__ void __launch_bounds__(THREADS, Config::blocks)
data_gradient(const float *__restrict__ y, const float *__restrict__ w, const uint4 *__restrict__ fragments,
              const int *__restrict__ exponents, float *__restrict__ x, long long first, int images) {
    extern __shared__ __align__(16) unsigned char memory[];
    __shared__ Range ranges[WARPS];
    __shared__ int of_channels[8 * CHANNEL_TILES];
    uint4 *const filters = reinterpret_cast<uint4 *>(memory);                // [FRAGMENTS]
    int2 *const offsets = reinterpret_cast<int2 *>(filters + FRAGMENTS);      // [K_STEPS]
    unsigned *const words = reinterpret_cast<unsigned *>(offsets + K_STEPS);  // [high, low][4 QUADS][PLANE_PITCH]
    for (int i = threadIdx.x; i < FRAGMENTS; i += THREADS) filters[i] = fragments[i];
    for (int k = threadIdx.x; k < K_STEPS; k += THREADS)
        offsets[k] = make_int2(half_step_offset(2 * k), half_step_offset(2 * k + 1));
    for (int i = threadIdx.x; i < 2 * LOW; i += THREADS) words[i] = 0;
    bool unsplittable = false;
    for (int i = threadIdx.x; i < 8 * CHANNEL_TILES; i += THREADS) {
        of_channels[i] = exponents[i];
        unsplittable = exponents[i] == Range::UNSPLITTABLE;
    }
    unsplittable = __syncthreads_or(unsplittable);

    for (int n = blockIdx.x; n < images; n += gridDim.x) {
        const float *const of_y = image_of(y, first + n, OUTPUTS);
        float *const of_x = image_of(x, first + n, IMAGE);
        Range range = range_of(of_y);
        range.join_warp();
        if (threadIdx.x % 32 == 0) ranges[threadIdx.x / 32] = range;
        __syncthreads();  // all ranges are there, and no warp reads the words of the previous image
        for (int i = 0; i < WARPS; i++) range.add(ranges[i]);
        const int exponent = range.exponent();
        const bool in_float32 = unsplittable || exponent == Range::UNSPLITTABLE;
        if (in_float32) compute_in_float32<THREADS>(of_y, w, of_x);
        else split_image(words, of_y, power_of_two(exponent));
        __syncthreads();  // the image is split, and no warp reads its range
        if (in_float32) continue;
#pragma unroll 1
        for (int unit = threadIdx.x / 32; unit < UNITS; unit += WARPS)
            multiply_unit(words, filters, offsets, of_channels, exponent, unit, of_x);
    }
}

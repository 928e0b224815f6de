// register_blocked: each thread computes a strip of a row, P pixels wide, for F filters, in registers.
//
//     x row   [ . . . P + K - 1 inputs . . . ]      read once for K taps
//     y row     [ . . . P sums . . . ]  x F         sum[f][j] += x[j + q] * w[q][f]
//
// The strips of all images stand in one row: CG strips a row, OH rows an image (of one column tile of TW
// pixels, where a row is too long). A block takes LANES strips in a row, which may begin and end within
// an image, for G * GL groups of F filters; a warp has 32 strips and one group at a time, so that a weight
// is the same for the whole warp. Input rows, CC channels at a time, and the weights, padded with zeros,
// lie in shared memory. The grid is as large as the chip can hold, or comes in waves: a block goes on to its next strips,
// and their input is on its way while the last sums are stored (STAGES 1) or computed (STAGES 2).
//
// Arithmetic: for K P F multiply-adds (P + K - 1) / XV reads of inputs and K F / 4 of weights: P = 13,
// F = 8, K = 5 makes 520 of 552 instructions multiply-adds. The order of the innermost loops matters: a
// multiply-add that reads three registers that no reuse cache holds takes two cycles (docs/performance.md),
// so a weight stays for P multiply-adds, and the next one begins with the pixel that the last one ended with.
//
// UNIFORM (register_blocked_uniform): all weights lie in constant memory and come from there into uniform registers, two at a time: a
// multiply-add then reads two registers at most, which lie in different banks more often than not. The compiler has to
// see that a warp's group is the same for all its lanes, so it comes from lane 0. AHEAD: those of the next row are asked
// for while a row is computed, since a constant that the nearest cache does not have keeps the warp waiting.
//
// Bytes: x once for each block of filters, plus K - 1 rows a block; y once, through shared memory, so that
// a warp writes 32 P neighbouring floats where a row is a whole number of strips.

constexpr int WARPS = LANES / 32 * G, THREADS = 32 * WARPS;
constexpr int CG = (TW + P - 1) / P;                       // strips in a row of a column tile
constexpr int TILES_X = (OW + TW - 1) / TW;                // column tiles
constexpr int BLOCKS_M = (M + F * G * GL - 1) / (F * G * GL);
constexpr int CHUNKS = (C + CC - 1) / CC;
constexpr int ALL_CHANNELS = CHUNKS == 1 && C <= 8 ? C : 4; // copies in a row
constexpr int INPUTS = P + K - 1;                          // that one strip reads of a row
constexpr int KF = (K * F + 3) / 4 * 4;                    // weights of a filter row, for F filters
constexpr int CHANNEL = ROWS * S;                          // floats of one channel in shared memory
constexpr int X_FLOATS = (CC * CHANNEL + SLACK + 3) / 4 * 4;
constexpr int W_FLOATS = UNIFORM ? 0 : GL * G * CC * K * KF;
constexpr bool EXACT = OW % P == 0 && TILES_X == 1;        // the strips of a row are the row, no more
constexpr int UNITS = (32 * P / OV + 31) / 32;             // stores of a lane for one filter
constexpr bool KEEP_PLACES = TILES_X == 1 && UNITS <= 8;   // registers for the stores' addresses
constexpr int TILE_PIXELS = OH * CG;                       // strips of an image's column tile

template <int V>
__device__ __forceinline__ void read(float *to, const float *from) {
    if (V == 4) {
        const float4 v = *reinterpret_cast<const float4 *>(from);
        to[0] = v.x, to[V / 4] = v.y, to[V / 2] = v.z, to[3 * V / 4] = v.w;
    } else if (V == 2) {
        const float2 v = *reinterpret_cast<const float2 *>(from);
        to[0] = v.x, to[V / 2] = v.y;
    } else {
        to[0] = *from;
    }
}

template <int V>
__device__ __forceinline__ void write(float *to, const float *from) {
    if (V == 4) *reinterpret_cast<float4 *>(to) = make_float4(from[0], from[V / 4], from[V / 2], from[3 * V / 4]);
    else if (V == 2) *reinterpret_cast<float2 *>(to) = make_float2(from[0], from[V / 2]);
    else *to = *from;
}

// Outputs are not read again here: they should not push the inputs out of the cache.
template <int V>
__device__ __forceinline__ void write_through(float *to, const float *from) {
    if (V == 4) __stcs(reinterpret_cast<float4 *>(to), make_float4(from[0], from[V / 4], from[V / 2], from[3 * V / 4]));
    else __stcs(to, *from);
}

// Global to shared memory, asynchronously where the chip can (sm_80).
template <int V>
__device__ __forceinline__ void copy(float *to, const float *from) {
#if __CUDA_ARCH__ >= 800
    const unsigned at = static_cast<unsigned>(__cvta_generic_to_shared(to));
    if (V == 4) asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(at), "l"(from) : "memory");
    else asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(at), "l"(from), "n"(4 * V) : "memory");
#else
    float v[V];
    read<V>(v, from);
    write<V>(to, v);
#endif
}

__device__ __forceinline__ void copies_issued() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// Waits until all copies have arrived but those of the last N calls of copies_issued.
template <int N>
__device__ __forceinline__ void wait_for_copies() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
#endif
}

// A block's strips: `count` of them from strip `at` of the image on, in the column tile that begins at x0.
struct Strips {
    int image, at, count, x0;
};

// A strip's row, counted through the images from the block's first one on, and its first column in the tile.
struct Place {
    int row, column;
};

__device__ __forceinline__ Strips strips_of(unsigned item, int images) {
    const unsigned block = item / TILES_X, start = block * LANES;
    Strips s;
    s.x0 = (item - block * TILES_X) * TW;
    s.image = start / TILE_PIXELS;
    s.at = start - s.image * TILE_PIXELS;
    const unsigned left = images * unsigned(TILE_PIXELS) - start;
    s.count = left < LANES ? left : LANES;
    return s;
}

// The rows that the strips read, one after another, the rows of the next image behind those of the last.
__device__ __forceinline__ void load_rows(float *to, const float *x, const Strips &s, int c0) {
    const int row0 = s.at / CG, row1 = (s.at + s.count - 1) / CG;
    const int rows = row1 / OH * H + row1 % OH + K - row0;
    const int width = TILES_X == 1 ? W / XG : (min(TW + K - 1, W - s.x0) + XG - 1) / XG;
    const float *from = image_of(x, s.image, IMAGE) + index_t(c0) * (H * index_t(W)) + s.x0;
    const int channels = CHUNKS == 1 ? C : min(CC, C - c0);
    for (int e = threadIdx.x; e < rows * width; e += THREADS) {
        const int row = e / width, column = (e - row * width) * XG;
        const int in_x = row0 + row, image = in_x / H;
        const float *source = from + image * IMAGE + (in_x - image * H) * index_t(W) + column;
        float *target = to + row * S + column;
#pragma unroll ALL_CHANNELS
        for (int c = 0; c < channels; c++) copy<XG>(target + c * CHANNEL, source + c * (H * index_t(W)));
    }
}

// [group][channel][filter row][filter column][F]
__device__ __forceinline__ void load_weights(float *to, const float *w, int m0, int c0) {
    for (int e = threadIdx.x; e < W_FLOATS; e += THREADS) {
        const int qf = e % KF, p = e / KF % K, c = e / (KF * K) % CC, group = e / (KF * K * CC);
        const int q = qf / F, m = m0 + group * F + qf % F;
        const bool real = q < K && m < M && c0 + c < C;
        to[e] = real ? __ldg(w + (index_t(m) * C + c0 + c) * (K * K) + p * K + q) : 0.0f;
    }
}

#if UNIFORM
constexpr int ALL_WEIGHTS = BLOCKS_M * GL * G * C * K * KF;
__constant__ __align__(16) float uniform_weights[ALL_WEIGHTS + (AHEAD ? KF : 0)];  // one row beyond the last is asked for

// What is to be copied there: [group][channel][filter row][filter column][F], padded with zeros.
extern "C" __global__ void __launch_bounds__(256) register_blocked_weights(const float *__restrict__ w, float *__restrict__ to) {
    for (int e = blockIdx.x * 256 + threadIdx.x; e < ALL_WEIGHTS; e += gridDim.x * 256) {
        const int qf = e % KF, p = e / KF % K, c = e / (KF * K) % C, q = qf / F;
        const int m = e / (KF * K * C) * F + qf % F;
        to[e] = q < K && m < M ? w[(index_t(m) * C + c) * (K * K) + p * K + q] : 0.0f;
    }
}
#endif

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
register_blocked(const float *__restrict__ x, const float *__restrict__ w, float *__restrict__ y, long long first, int images) {
    extern __shared__ __align__(16) float shared[];
    float *const x_rows = shared;                                               // STAGES of them
    float *const weights = shared + STAGES * X_FLOATS;                          // all, or one for each stage
    float *const sums = weights + (KEEP_W ? CHUNKS : STAGES) * W_FLOATS;        // 32 P floats a warp

    const unsigned items = (images * unsigned(TILE_PIXELS) + LANES - 1) / LANES * TILES_X;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int my_warp = warp % (LANES / 32) * 32;
#if UNIFORM
    const int my_group = __shfl_sync(0xffffffffu, warp / (LANES / 32), 0);
#else
    const int my_group = warp / (LANES / 32);
#endif
    const int block_m0 = blockIdx.x % BLOCKS_M * (F * G * GL);
    const Turn turn = turn_of(items, blockIdx.x / BLOCKS_M, gridDim.x / BLOCKS_M);
    unsigned item = turn.item;
    if (item >= turn.end) return;

    if (UNIFORM) {
    } else if (KEEP_W)
        for (int k = 0; k < CHUNKS; k++) load_weights(weights + k * W_FLOATS, w, block_m0, k * CC);
    else
        load_weights(weights, w, block_m0, 0);
    load_rows(x_rows, image_of(x, first, IMAGE), strips_of(item, images), 0);
    copies_issued();

    for (int stage = 0; item < turn.end; item += turn.step) {
        // A thread beyond the last strip computes the last one once more and stores nothing.
        const auto place = [&](const Strips &s) {
            const int strip = min(s.at + my_warp + lane, s.at + s.count - 1), row = strip / CG;
            return Place{row, (strip - row * CG) * P};
        };
        // Where the thread's first input lies in the rows in shared memory.
        const int x_at = [&] {
            const Strips s = strips_of(item, images);
            const Place at = place(s);
            const int image = at.row / OH;
            return (image * H + (at.row - image * OH) - s.at / CG) * S + at.column;
        }();

        float sum[F][P];
        const auto clear = [&] {
#pragma unroll
            for (int f = 0; f < F; f++)
#pragma unroll
                for (int j = 0; j < P; j++) sum[f][j] = 0.0f;
        };

        const auto add_channels = [&](int k, int group) {
            const float *xs = x_rows + stage * X_FLOATS + x_at;
#if UNIFORM
            const float *ws = uniform_weights + ((blockIdx.x % BLOCKS_M * (G * GL) + group) * C + k * CC) * (K * KF);
#else
            const float *ws = weights + (KEEP_W ? k : stage) * W_FLOATS + group * (CC * K * KF);
#endif
            const int channels = CHUNKS == 1 ? C : min(CC, C - k * CC);
            const auto take = [&](float (&wr)[KF], const float *from) {
#pragma unroll
                for (int q = 0; q < KF; q += UNIFORM ? 2 : 4) read<UNIFORM ? 2 : 4>(wr + q, from + q);
            };
            constexpr int READ = (INPUTS + XV - 1) / XV * XV;
            const auto take_inputs = [&](float (&xr)[READ], const float *from) {
#pragma unroll
                for (int j = 0; j < INPUTS; j += XV) read<XV>(xr + j, from + j);
            };
            const auto add = [&](const float (&xr)[READ], const float (&wr)[KF]) {
#pragma unroll
                for (int q = 0; q < K; q++)
#pragma unroll
                    for (int f = 0; f < F; f++)
#pragma unroll
                        for (int i = 0; i < P; i++) {
                            const int j = (q * F + f) % 2 ? P - 1 - i : i;
                            sum[f][j] = fmaf(xr[j + q], wr[q * F + f], sum[f][j]);
                        }
            };
            if (AHEAD) {
                float here[KF], there[KF];
                take(here, ws);
                int p = 0;
                const auto add_row = [&](const float (&wr)[KF]) {
                    float xr[READ];
                    take_inputs(xr, xs);
                    add(xr, wr);
                    p = p == K - 1 ? 0 : p + 1, xs += p ? S : CHANNEL - (K - 1) * S;
                };
                const int rows = channels * K;
#pragma unroll 1
                for (int row = 0; row < rows; row += 2, ws += 2 * KF) {
                    take(there, ws + KF);
                    add_row(here);
                    if (row + 1 == rows) break;
                    take(here, ws + 2 * KF);
                    add_row(there);
                }
            } else {
#pragma unroll 1
                for (int c = 0; c < channels; c++, xs += CHANNEL - K * S) {
#pragma unroll 1
                    for (int p = 0; p < K; p++, xs += S, ws += KF) {
                        float xr[READ], wr[KF];
                        take_inputs(xr, xs);
                        take(wr, ws);
                        add(xr, wr);
                    }
                }
            }
        };

        const auto store = [&](int group) {
            // All of this is worked out anew for each group: kept in registers, it would leave too few for the sums.
            unsigned again = item;
            asm volatile("" : "+r"(again));
            const Strips s = strips_of(again, images);
            const Place at = place(s);
            const int m0 = block_m0 + group * F;
            float *const mine = sums + warp * (32 * P);
            // The pixels of the warp's strips, counted along the rows of the tile: from `begin` up to `end`.
            const int strip0 = s.at + my_warp, strip1 = min(strip0 + 31, s.at + s.count - 1);
            const int begin = strip0 / CG * TW + strip0 % CG * P;
            const int end = strip1 < strip0 ? begin : strip1 / CG * TW + min(strip1 % CG * P + P, TW);
            const bool inside = my_warp + lane < s.count;
            float *const out = image_of(y, first + s.image, OUTPUTS) + m0 * PIXELS;
            // Where the lane's pixels lie in a map; the strips of a warp lie in two maps at most if one has as many pixels.
            float *to[KEEP_PLACES ? UNITS : 1];
            const int left = end - begin - lane * OV;
            if (KEEP_PLACES) {
                const int map = begin / (OH * OW), edge = (map + 1) * (OH * OW) - begin - lane * OV;
#pragma unroll
                for (int u = 0; u < UNITS; u++) {
                    const int b = 32 * P <= OH * OW ? map + (u * 32 * OV >= edge) : (begin + (u * 32 + lane) * OV) / (OH * OW);
                    to[KEEP_PLACES ? u : 0] = out + b * (OUTPUTS - PIXELS) + begin + (u * 32 + lane) * OV;
                }
            }
#pragma unroll
            for (int f = 0; f < F; f++) {
                if (m0 + f >= M) break;
                if (EXACT) {
#pragma unroll
                    for (int j = 0; j < P; j += SV) write<SV>(mine + lane * P + j, &sum[f][j]);
                } else if (inside) {
#pragma unroll
                    for (int j = 0; j < P; j++)
                        if (at.column + j < TW) mine[at.row * TW + at.column + j - begin] = sum[f][j];
                }
                __syncwarp();
                if (KEEP_PLACES) {
#pragma unroll
                    for (int u = 0; u < UNITS; u++)
                        if (u * 32 * OV < left) {
                            float v[OV];
                            read<OV>(v, mine + (u * 32 + lane) * OV);
                            write_through<OV>(to[KEEP_PLACES ? u : 0] + f * PIXELS, v);
                        }
                    __syncwarp();
                    continue;
                }
                int from = begin;
                asm volatile("" : "+r"(from));  // the same again: too many places to keep
#pragma unroll
                for (int u = 0; u < UNITS; u++) {
                    const int pixel = from + (u * 32 + lane) * OV;
                    if (pixel >= end) continue;
                    float v[OV];
                    read<OV>(v, mine + (u * 32 + lane) * OV);
                    if (TILES_X == 1) {
                        const int b = pixel / (OH * OW);
                        write_through<OV>(out + f * PIXELS + b * (OUTPUTS - PIXELS) + pixel, v);
                    } else {
                        const int r = pixel / TW, b = r / OH, in_row = s.x0 + pixel - r * TW;
                        if (in_row < OW)
                            write_through<1>(out + f * PIXELS + b * OUTPUTS + (r - b * OH) * index_t(OW) + in_row, v);
                    }
                }
                __syncwarp();
            }
        };

        if (GL == 1) clear();
#pragma unroll 1
        for (int k = 0; k < CHUNKS; k++) {
            const bool last = k + 1 == CHUNKS;
            const int k_next = last ? 0 : k + 1;
            const unsigned item_next = last ? item + turn.step : item;
            const bool fetch = item_next < turn.end;
            const auto load_next = [&](int into) {
                const Strips next = strips_of(item_next, images);
                load_rows(x_rows + into * X_FLOATS, image_of(x, first, IMAGE), next, k_next * CC);
                if (!UNIFORM && !KEEP_W) load_weights(weights + into * W_FLOATS, w, block_m0, k_next * CC);
            };
            if (STAGES == 2) {
                if (fetch) load_next(stage ^ 1);
                copies_issued();
                wait_for_copies<1>();
            } else {
                wait_for_copies<0>();
            }
            __syncthreads();
            if (GL == 1) {
                add_channels(k, my_group);
            } else {
#pragma unroll 1
                for (int group = my_group; group < G * GL; group += G) {
                    clear();
                    add_channels(0, group);
                    store(group);
                }
            }
            __syncthreads();
            if (STAGES == 1 && fetch) {
                load_next(0);
                copies_issued();
            }
            if (STAGES == 2) stage ^= 1;
        }
        if (GL == 1) store(my_group);
    }
}

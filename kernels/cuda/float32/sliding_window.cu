// sliding_window: each thread keeps the whole input window of its output pixels in registers, for all filters.
//
//     x   [ (R + K - 1) x (P + K - 1) inputs ]     read once, straight from global memory
//     y   [ R x P sums ] x F, filter after filter: sum[r][j] += x[r + p][j + q] * w[p][q]
//
// With one channel the window serves all M filters, so that the loop over them reads nothing but weights, four
// for 4 R P multiply-adds; with a few channels it is read again for each channel and F filters. There is no
// tile in shared memory and no barrier in the loop: a warp computes and stores by itself. The last tile of a
// row or column is moved back to end at the edge; what it shares with its neighbour is computed twice.
//
// With POOL, R and P are even and a thread takes the maxima of its own sums; an odd last row or column, which no
// maximum takes, is not computed.
//
// Arithmetic: 2 M C K K operations an output pixel, 95 % of all instructions for 50 filters of 5 x 5. Bytes: x
// once and its overlaps from the cache; y once, P neighbouring floats in one store or in stores next to
// each other, neighbouring lanes side by side: stores with gaps between the lanes took twice as long.

constexpr int STEP = POOL ? 2 : 1;                                   // from one element of y to the next, in outputs
constexpr int ROWS_DONE = STEP * YH, COLUMNS_DONE = STEP * YW;       // outputs of a map that are computed
constexpr int TILES_X = (COLUMNS_DONE + P - 1) / P, TILES_Y = (ROWS_DONE + R - 1) / R;
constexpr int ROWS = R + K - 1, COLUMNS = P + K - 1;
constexpr int READ = (COLUMNS + XV - 1) / XV * XV;                   // floats of a window row, whole vectors
constexpr int KF = (K * K * F + 3) / 4 * 4;                          // weights of one channel for F filters
constexpr int PASSES = (M + F - 1) / F, PART = (PASSES + PARTS - 1) / PARTS;

template <int V>
__device__ __forceinline__ void read(float *to, const float *from) {
    if (V == 4) {
        const float4 v = __ldg(reinterpret_cast<const float4 *>(from));
        to[0] = v.x, to[V / 4] = v.y, to[V / 2] = v.z, to[3 * V / 4] = v.w;
    } else if (V == 2) {
        const float2 v = __ldg(reinterpret_cast<const float2 *>(from));
        to[0] = v.x, to[V / 2] = v.y;
    } else {
        to[0] = __ldg(from);
    }
}

// Outputs are not read again here: they should not push the inputs out of the cache.
template <int V>
__device__ __forceinline__ void write_through(float *to, const float *from) {
    if (V == 4) __stcs(reinterpret_cast<float4 *>(to), make_float4(from[0], from[V / 4], from[V / 2], from[3 * V / 4]));
    else if (V == 2) __stcs(reinterpret_cast<float2 *>(to), make_float2(from[0], from[V / 2]));
    else __stcs(to, *from);
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
sliding_window(const float *__restrict__ x, const float *__restrict__ w, float *__restrict__ y, long long first, int images) {
    extern __shared__ __align__(16) float weights[];  // [pass][channel][filter row and column][F]
    const int part = blockIdx.x % PARTS * PART;       // the filters are shared out among PARTS blocks
    for (int e = threadIdx.x; e < PART * C * KF; e += THREADS) {
        const int pqf = e % KF, c = e / KF % C, m = (part + e / (KF * C)) * F + pqf % F;
        const bool real = pqf < K * K * F && m < M;
        weights[e] = real ? __ldg(w + (index_t(m) * C + c) * (K * K) + pqf / F) : 0.0f;
    }
    __syncthreads();

    const unsigned tiles = images * unsigned(TILES_X * TILES_Y);
    const Turn turn = turn_of((tiles + THREADS - 1) / THREADS, blockIdx.x / PARTS, gridDim.x / PARTS);
    for (unsigned item = turn.item; item < turn.end; item += turn.step) {
        const unsigned tile = item * THREADS + threadIdx.x;
        if (tile >= tiles) return;
        const unsigned strip = tile / TILES_X, image = strip / TILES_Y;
        const int x0 = min(int(tile - strip * TILES_X) * P, COLUMNS_DONE - P);
        const int y0 = min(int(strip - image * TILES_Y) * R, ROWS_DONE - R);
        const float *const in = image_of(x, first + image, IMAGE) + index_t(y0) * W + x0;
        float *out = image_of(y, first + image, OUTPUTS) + part * F * PIXELS + index_t(y0 / STEP) * YW + x0 / STEP;

        float xr[ROWS][READ];
        const auto read_window = [&](int c) {
#pragma unroll
            for (int i = 0; i < ROWS; i++)
#pragma unroll
                for (int j = 0; j < COLUMNS; j += XV) read<XV>(&xr[i][j], in + (c * index_t(H) + i) * W + j);
        };
        if (C == 1) read_window(0);

        const float *ws = weights;
#pragma unroll 1
        for (int m = part * F; m < min(M, (part + PART) * F); m += F, out += F * PIXELS) {
            float sum[F][R * P];
#pragma unroll
            for (int i = 0; i < F * R * P; i++) sum[i / (R * P)][i % (R * P)] = 0.0f;
#pragma unroll 1
            for (int c = 0; c < C; c++, ws += KF) {
                if (C > 1) read_window(c);
                float wr[KF];
#pragma unroll
                for (int e = 0; e < KF; e += 4) {
                    const float4 v = *reinterpret_cast<const float4 *>(ws + e);
                    wr[e] = v.x, wr[e + 1] = v.y, wr[e + 2] = v.z, wr[e + 3] = v.w;
                }
#pragma unroll
                for (int e = 0; e < K * K; e++)
#pragma unroll
                    for (int f = 0; f < F; f++)
#pragma unroll
                        for (int i = 0; i < R * P; i++)
                            sum[f][i] = fmaf(xr[i / P + e / K][i % P + e % K], wr[e * F + f], sum[f][i]);
            }
            // Once; a loop, so that no store comes before the last sum. The compiler would part those of a row, and two that
            // share a sector then go to the cache one by one (docs/performance.md).
            do {
#pragma unroll
                for (int f = 0; f < F; f++)
                    if (M % F == 0 || m + f < M)
#pragma unroll
                        for (int r = 0; r < R; r += STEP) {
                            const float *const row = &sum[f][r * P];
#if POOL
                            float done[P / 2];
#pragma unroll
                            for (int j = 0; j < P; j += 2)
                                done[j / 2] = tanh_of_max(row[j], row[j + 1], row[P + j], row[P + j + 1]);
#else
                            const float *const done = row;
#endif
#pragma unroll
                            for (int j = 0; j < P / STEP; j += OV)
                                write_through<OV>(out + f * PIXELS + r / STEP * index_t(YW) + j, done + j);
                        }
            } while (images < 0);
        }
    }
}

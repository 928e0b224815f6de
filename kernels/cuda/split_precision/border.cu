// border: what turns a data gradient of stride 1 into a plain convolution: a copy of the output gradient with borders of
// zeros, and the filters flipped, with filters and channels exchanged.
//
//     output gradient (B, C, H - 2 BORDER_H, W - 2 BORDER_W)  -->  bordered (B, C, H, W)
//     w (C, M, K, K)                                          -->  flipped (M, C, K, K)
//
// The letters are those of the convolution that follows: its C channels are the layer's filters. Memory limits both.
// Restriction: no more padding than K - 1.

constexpr int BORDER_H = Config::border_h, BORDER_W = Config::border_w, BORDER_THREADS = Config::border_threads;

extern "C" __global__ void __launch_bounds__(BORDER_THREADS)
flip_filters(const float *__restrict__ w, float *__restrict__ flipped) {
    const int e = blockIdx.x * BORDER_THREADS + threadIdx.x;
    if (e >= M * C * K * K) return;
    const int tap = e % (K * K), c = e / (K * K) % C, m = e / (K * K * C);
    flipped[e] = w[(c * M + m) * (K * K) + K * K - 1 - tap];
}

extern "C" __global__ void __launch_bounds__(BORDER_THREADS)
add_border(const float *__restrict__ y, float *__restrict__ bordered, int images) {
    constexpr int INNER_H = H - 2 * BORDER_H, INNER_W = W - 2 * BORDER_W;
    const long long rows = images * (long long)(C * H), elements = rows * W;
    for (long long e = blockIdx.x * (long long)BORDER_THREADS + threadIdx.x; e < elements;
         e += gridDim.x * (long long)BORDER_THREADS) {
        const long long row = e / W, map = row / H;
        const int h = int(row - map * H) - BORDER_H, w = int(e - row * W) - BORDER_W;
        const bool inside = h >= 0 && h < INNER_H && w >= 0 && w < INNER_W;
        bordered[e] = inside ? __ldg(y + (map * INNER_H + h) * INNER_W + w) : 0.0f;
    }
}

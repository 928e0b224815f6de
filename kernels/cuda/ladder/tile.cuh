// A block's tile: TILE_H x TILE_W output pixels of one image, its input window with all channels in
// shared memory. One block an image and tile; the tile shape is chosen on the host to fit 48 KB.

constexpr int TILE = TILE_H * TILE_W;                // output pixels
constexpr int EACH = (TILE + THREADS - 1) / THREADS; // output pixels of one thread
constexpr int WINDOW_H = TILE_H + K - 1, WINDOW_W = TILE_W + K - 1;
constexpr int WINDOW = WINDOW_H * WINDOW_W;          // input pixels of one channel

struct Place {
    long long b;  // image
    int i0, j0;   // the tile's first output row and column

    __device__ explicit Place(long long first) {
        constexpr unsigned across = (OW + TILE_W - 1) / TILE_W, down = (OH + TILE_H - 1) / TILE_H;
        const unsigned tile = blockIdx.x % (across * down);
        b = first + blockIdx.x / (across * down);
        i0 = tile / across * TILE_H;
        j0 = tile % across * TILE_W;
    }
};

// Fill the window, zeros beyond the image's edge. The caller synchronises.
__device__ __forceinline__ void load_window(float *window, const float *x, const Place &at) {
    const float *image = image_of(x, at.b, IMAGE);
    for (int t = threadIdx.x; t < C * WINDOW; t += THREADS) {
        const int c = t / WINDOW, row = at.i0 + t / WINDOW_W % WINDOW_H, column = at.j0 + t % WINDOW_W;
        window[t] = row < H && column < W ? image[(index_t(c) * H + row) * W + column] : 0.0f;
    }
}

// The thread's u-th output pixel: where its window starts in shared memory (that of pixel 0 for the
// threads left over, which compute and do not store).
__device__ __forceinline__ int window_of(int u) {
    const int t = threadIdx.x + u * THREADS;
    return t < TILE ? t / TILE_W * WINDOW_W + t % TILE_W : 0;
}

__device__ __forceinline__ void store(float *y, const Place &at, int m, int u, float sum) {
    const int t = threadIdx.x + u * THREADS;
    const int i = at.i0 + t / TILE_W, j = at.j0 + t % TILE_W;
    if (t < TILE && i < OH && j < OW) image_of(y, at.b, OUTPUTS)[m * PIXELS + index_t(i) * OW + j] = sum;
}

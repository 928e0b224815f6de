// tile: the code that shared, constant and unrolled have in common. One block computes a tile of output pixels, for all
// filters, from the tile's input window, which lies in shared memory with all its channels.
//
//     window of one channel: window_rows x window_columns        tile: tile_rows x tile_columns
//     +-----------------+
//     | +-----------+   |    the tile's outputs, each at the upper left corner of its own K x K window;
//     | |   tile    |   |    the other K - 1 rows and columns are the halo
//     | +-----------+   |
//     |      halo       |
//     +-----------------+
//
// Config: tile_rows, tile_columns and `threads` per block. The host chooses the tile so that the window fits 48 KB.

constexpr int TILE_PIXELS = Config::tile_rows * Config::tile_columns;
constexpr int OUTPUTS_PER_THREAD = (TILE_PIXELS + Config::threads - 1) / Config::threads;  // for one filter
constexpr int WINDOW_ROWS = Config::tile_rows + K - 1, WINDOW_COLUMNS = Config::tile_columns + K - 1;
constexpr int WINDOW_PIXELS = WINDOW_ROWS * WINDOW_COLUMNS;

// The block's image, and the first output row and column of its tile.
struct Tile {
    long long image;
    int row, column;

    __device__ explicit Tile(long long first) {
        constexpr unsigned in_row = (OW + Config::tile_columns - 1) / Config::tile_columns;
        constexpr unsigned in_image = in_row * ((OH + Config::tile_rows - 1) / Config::tile_rows);
        const unsigned tile = blockIdx.x % in_image;
        image = first + blockIdx.x / in_image;
        row = tile / in_row * Config::tile_rows;
        column = tile % in_row * Config::tile_columns;
    }
};

// Fill the window, with zeros beyond the image's edge. The caller synchronises.
__device__ __forceinline__ void load_window(float *window, const float *x, const Tile &tile) {
    const float *image = image_of(x, tile.image, IMAGE);
    for (int t = threadIdx.x; t < C * WINDOW_PIXELS; t += Config::threads) {
        const int c = t / WINDOW_PIXELS;
        const int row = tile.row + t / WINDOW_COLUMNS % WINDOW_ROWS, column = tile.column + t % WINDOW_COLUMNS;
        window[t] = row < H && column < W ? image[(index_t(c) * H + row) * W + column] : 0.0f;
    }
}

// Return the offset in shared memory of the window of the thread's n-th output. Threads beyond the tile get output 0's
// window: they compute, but do not store.
__device__ __forceinline__ int window_offset(int n) {
    const int pixel = threadIdx.x + n * Config::threads;
    return pixel < TILE_PIXELS ? pixel / Config::tile_columns * WINDOW_COLUMNS + pixel % Config::tile_columns : 0;
}

__device__ __forceinline__ void store_output(float *y, const Tile &tile, int m, int n, float sum) {
    const int pixel = threadIdx.x + n * Config::threads;
    const int i = tile.row + pixel / Config::tile_columns, j = tile.column + pixel % Config::tile_columns;
    if (pixel < TILE_PIXELS && i < OH && j < OW)
        image_of(y, tile.image, OUTPUTS)[m * PIXELS + index_t(i) * OW + j] = sum;
}

// dense: y = activated(x w^T + bias) of float32 matrices x (rows, K) and w (M, K) in split precision (sm_90a).
//
//     x --split_x--> tiles of x  \                         a block: a tile of y, 128 x tile_columns
//                                 }--dense_gemm--> y          full   +-------------------------+   empty
//     w --split_w--> tiles of w  /                     producer ---> | stage 0 | 1 | 2: x and w | ---> 2 consumer
//                                                        warp        +-------------------------+      warpgroups
//     rows of x that cannot be split --recompute_rows--> y
//
// Every row of x and of w is scaled by a power of two of its own (split.cuh has the arithmetic). A tile has 64 columns of
// its rows as the tensor cores read them, high before low, so that one bulk copy loads it.
//
// Arithmetic intensity: a k-step of a block copies (128 + tile_columns) x 256 bytes for 3 x 2 x 128 x tile_columns x 64
// FLOP: 109 FLOP per byte for 168 columns.
//
// Config: length (K) in k_steps of 64; columns (M) in column_tiles of tile_columns; tile_rows; stages; bias; components,
// 2. dense.py puts the activation's function, ``activated``, and the WGMMA macros before this text.

static_assert(Config::tile_rows == 128 && Config::tile_columns % 8 == 0, "the register counts are for two consumers");
constexpr int K_STEP = 64, ROW_BYTES = 2 * K_STEP, CONSUMERS = Config::tile_rows / 64;
constexpr int SUMS = Config::tile_columns / 2;  // accumulators of a thread, of a warpgroup's 64 rows
constexpr int X_BYTES = 2 * Config::tile_rows * ROW_BYTES, W_BYTES = 2 * Config::tile_columns * ROW_BYTES;
// A row may spread over more powers of two than an image of a convolution: its sums are long, and the error of a value
// that far below the row's largest is at most 2^-50 of the largest.
constexpr int ROW_SPREAD = 36;

// Convert: a block splits its row into tiles of TILE_ROWS rows. In a tile's row of 128 bytes, the 16-byte units have
// the order of the 128-byte swizzle: unit ^ row % 8. Columns from K on are zeros. Stores the row's exponent, or
// UNSPLITTABLE.
template <int TILE_ROWS>
__device__ __forceinline__ void split(const float *x, uint4 *tiles, int *exponents) {
    const long long row = blockIdx.x;
    const float *const from = x + row * Config::length;
    Range range;
#pragma unroll 4
    for (int i = threadIdx.x; i < Config::length; i += 256) range.add(from[i]);
    range.join_block<256>();
    const int exponent = range.exponent(false, ROW_SPREAD), tile_row = row % TILE_ROWS;
    if (threadIdx.x == 0) exponents[row] = exponent;
    const float scale = power_of_two(exponent == Range::UNSPLITTABLE ? 0 : exponent);
    uint4 *const tile = tiles + row / TILE_ROWS * (Config::k_steps * 2 * TILE_ROWS * 8) + tile_row * 8;
    for (int unit = threadIdx.x; unit < Config::k_steps * 8; unit += 256) {
        float values[8];
#pragma unroll
        for (int i = 0; i < 8; i++) values[i] = unit * 8 + i < Config::length ? from[unit * 8 + i] : 0.0f;
        uint4 *const to = tile + unit / 8 * (2 * TILE_ROWS * 8) + (unit % 8 ^ tile_row % 8);
        split_channels(values, 1, scale, to[0], to[TILE_ROWS * 8]);
    }
}

extern "C" __global__ void __launch_bounds__(256)
    split_x(const float *__restrict__ x, uint4 *__restrict__ tiles, int *__restrict__ exponents) {
    split<Config::tile_rows>(x, tiles, exponents);
}

extern "C" __global__ void __launch_bounds__(256)
    split_w(const float *__restrict__ w, uint4 *__restrict__ tiles, int *__restrict__ exponents) {
    split<Config::tile_columns>(w, tiles, exponents);
}

// Load: one thread fills each stage, from the tiles at x and w on, when the consumers have released it.
__device__ __forceinline__ void produce(const float *x, const float *w, unsigned char *stages, Barrier *full,
                                        Barrier *empty) {
    for (int step = 0, stage = 0, phase = 1; step < Config::k_steps; step++) {
        float *const to = reinterpret_cast<float *>(stages + stage * (X_BYTES + W_BYTES));
        mbarrier_wait_thread(empty + stage, phase);
        mbarrier_arrive_expect_bytes(full + stage, X_BYTES + W_BYTES);
        bulk_load(to, x, X_BYTES, full + stage);
        bulk_load(to + X_BYTES / 4, w, W_BYTES, full + stage);
        x += X_BYTES / 4, w += W_BYTES / 4;
        if (++stage == Config::stages) stage = 0, phase ^= 1;
    }
}

// The wgmma descriptor of rows at a multiple of 1024 bytes: K-major, with the 128-byte swizzle.
__device__ __forceinline__ Descriptor rows_at(unsigned address) {
    return matrix_descriptor(address, 16, 8 * ROW_BYTES) | Descriptor(1) << 62;
}

// Main loop: the products of a warpgroup's 64 scaled rows; ``store`` removes the scales. Each stage that was read is
// released.
__device__ __forceinline__ void main_loop(float (&total)[SUMS], const unsigned char *stages, Barrier *full,
                                          Barrier *empty, int warpgroup) {
    float sums[SUMS];
#pragma unroll
    for (int i = 0; i < SUMS; i++) total[i] = 0.0f;
    for (int step = 0, stage = 0, phase = 0; step < Config::k_steps; step++) {
        mbarrier_wait(full + stage, phase);
        const unsigned tile = shared_address(stages) + stage * (X_BYTES + W_BYTES);
        const Descriptor x_high = rows_at(tile + warpgroup * 64 * ROW_BYTES), w_high = rows_at(tile + X_BYTES);
        const Descriptor x_low = x_high + (X_BYTES / 2 >> 4), w_low = w_high + (W_BYTES / 2 >> 4);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < 2 * (K_STEP / 16); k += 2) {  // a wgmma reads 32 bytes of a row, two units
            if (k == 0) WGMMA_OVERWRITE(sums, x_high, w_low);
            else WGMMA(sums, x_high + k, w_low + k);
            WGMMA(sums, x_low + k, w_high + k);
        }
        wgmma_commit();
        wgmma_wait<0>();
        // The large products are added to the small ones, so that the promotion rounds once for both.
#pragma unroll
        for (int i = 0; i < SUMS; i++) sums[i] *= 1.0f / 2048;
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < 2 * (K_STEP / 16); k += 2) WGMMA(sums, x_high + k, w_high + k);
        wgmma_commit();
        wgmma_wait<0>();
        mbarrier_arrive(empty + stage);
        // Accumulator promotion: float32 additions round, where the tensor cores truncate.
#pragma unroll
        for (int i = 0; i < SUMS; i++) total[i] += sums[i];
        if (++stage == Config::stages) stage = 0, phase ^= 1;
    }
}

// Epilogue of a warp's 16 rows from first_row on: four lanes store eight neighbouring outputs of a row, 32 bytes. The
// columns' exponents and biases are in shared memory, since the compiler moves no global load before an earlier store.
// Each row of w could be split: otherwise the host takes cuBLAS.
__device__ __forceinline__ void store(const float (&total)[SUMS], const int *x_exponents, const int *w_exponents,
                                      const float *biases, float *y, int rows, int first_row, int first_column) {
    const int lane = threadIdx.x % 32, own = lane % 4 * 2, columns = Config::columns - first_column - own;
#pragma unroll 1
    for (int half = 0; half < 2; half++) {
        const int row = first_row + 8 * half + lane / 4;
        if (row >= rows) break;
        const int exponent = x_exponents[row];
        float *const to = y + (long long)row * Config::columns + first_column + own;
#pragma unroll
        for (int i = 0; i < SUMS / 2; i++) {
            const int at = i / 2 * 8 + i % 2, of_first = i / 2 * 4 + i % 2;
            const float sum = half ? total[of_first + 2] : total[of_first];
            const float unscaled = scaled(sum, -(exponent + w_exponents[own + at]));
            const float value = activated(Config::bias ? unscaled + biases[own + at] : unscaled);
            if (at < columns) to[at] = value;
        }
    }
}

extern "C" __global__ void __launch_bounds__(128 * (CONSUMERS + 1), 1)
    dense_gemm(const float *__restrict__ x, const float *__restrict__ w, const int *__restrict__ x_exponents,
               const int *__restrict__ w_exponents, const float *__restrict__ bias, float *__restrict__ y, int rows) {
    extern __shared__ __align__(16) unsigned char memory[];
    __shared__ Barrier full[Config::stages], empty[Config::stages];
    __shared__ int own_exponents[Config::tile_columns];  // of w
    __shared__ float biases[Config::tile_columns];
    unsigned char *const stages = memory + (1024 - shared_address(memory) % 1024) % 1024;
    const int row_tile = blockIdx.x / Config::column_tiles, column_tile = blockIdx.x % Config::column_tiles;
    const int first_column = column_tile * Config::tile_columns;
    if (threadIdx.x < Config::tile_columns) {
        const int column = min(first_column + int(threadIdx.x), Config::columns - 1);
        own_exponents[threadIdx.x] = w_exponents[column];
        if (Config::bias) biases[threadIdx.x] = bias[column];
    }
    if (threadIdx.x == 0) {
        for (int i = 0; i < Config::stages; i++) mbarrier_init(full + i, 1), mbarrier_init(empty + i, 128 * CONSUMERS);
        fence_mbarrier_init();
        fence_async_proxy();
    }
    __syncthreads();
    // Of 168 registers per thread, the producer's warpgroup gives most to the consumers.
    if (threadIdx.x >= 128 * CONSUMERS) {
        lower_registers<40>();
        if (threadIdx.x == 128 * CONSUMERS)
            produce(x + (long long)row_tile * Config::k_steps * (X_BYTES / 4),
                    w + (long long)column_tile * Config::k_steps * (W_BYTES / 4), stages, full, empty);
        return;
    }
    raise_registers<232>();
    float total[SUMS];
    main_loop(total, stages, full, empty, __shfl_sync(~0u, threadIdx.x / 128, 0));

    const int first_row = row_tile * Config::tile_rows + threadIdx.x / 32 * 16;
    store(total, x_exponents, own_exponents, biases, y, rows, first_row, first_column);
}

// Fallback in float32: a block computes a row that cannot be split, a warp one output at a time.
extern "C" __global__ void __launch_bounds__(256)
    recompute_rows(const int *__restrict__ exponents, const float *__restrict__ x, const float *__restrict__ w,
                   const float *__restrict__ bias, float *__restrict__ y) {
    const long long row = blockIdx.x;
    if (exponents[row] != Range::UNSPLITTABLE) return;
    for (int column = threadIdx.x / 32; column < Config::columns; column += 8) {
        float sum = 0.0f;
#pragma unroll 8
        for (int i = threadIdx.x % 32; i < Config::length; i += 32)
            sum = fmaf(x[row * Config::length + i], w[(long long)column * Config::length + i], sum);
        for (int lanes = 16; lanes; lanes /= 2) sum += __shfl_xor_sync(~0u, sum, lanes);
        if (threadIdx.x % 32 == 0)
            y[row * Config::columns + column] = activated(Config::bias ? sum + bias[column] : sum);
    }
}

// dense: y = activated(x w^T + bias) of float32 matrices x (rows, K) and w (M, K) in split precision (sm_90a).
//
//     x ------------------- TMA --->  stage 0 | 1 | 2   --full-->   2 consumer warpgroups:
//     w --split_w--> tiles --bulk-->  x and w tiles     <-empty--   split x, multiply       --> sums
//     sums of all slices of K --finish--> y
//
// The consumers convert x from shared memory into registers, wgmma's operand A, and ping-pong: one multiplies while the
// other converts. A k-step is 64 products of a sum. The values of a row of x in a k-step are scaled by a power of two
// of their own, those of a row of w by one (split.cuh has the arithmetic).
//
// Arithmetic intensity: a k-step of a block copies (128 + tile_columns) x 256 bytes for 3 x 2 x 128 x tile_columns x 64
// FLOP: 109 FLOP per byte for 168 columns. x is read once per column tile.
// Restrictions: sm_90a; tile_columns of at most 168, for the registers; every row of w can be split, otherwise
// dense.py's caller takes cuBLAS. See CUTLASS's persistent ping-pong kernels and split-K.
//
// Config: length (K) in k_steps of 64; columns (M) in column_tiles of tile_columns; tile_rows; pitch, the floats of a
// row that TMA reads; stages; bias; components, 2. ResNet-50's: length 2048, k_steps 32, columns 1000, column_tiles 6,
// tile_columns 168, tile_rows 128, pitch 2048, stages 3. dense.py puts the activation's function, ``activated``, and
// the WGMMA macros before this text.

static_assert(Config::tile_rows == 128 && Config::tile_columns % 8 == 0, "the register counts are for two consumers");
constexpr int K_STEP = 64, ROW_BYTES = 128, CONSUMERS = Config::tile_rows / 64;
constexpr int SUMS = Config::tile_columns / 2;  // accumulators of a thread, of a warpgroup's 64 rows
constexpr int HALF_BYTES = Config::tile_rows * ROW_BYTES;  // 32 values of each row of x
constexpr int W_BYTES = 2 * Config::tile_columns * ROW_BYTES, STAGE_BYTES = 2 * HALF_BYTES + W_BYTES;  // high and low
constexpr int PITCH = Config::column_tiles * Config::tile_columns;
constexpr int SPREAD = 36;            // sums are long: a value 2^36 below the largest errs by 2^-50 of the largest
constexpr int LARGEST_EXPONENT = 90;  // of x: unscaled sums then stay within float32

// Convert: a block splits its row of w into tiles of tile_columns rows. In a tile's row of 128 bytes, the 16-byte units
// have the order of the 128-byte swizzle: unit ^ row % 8. Each consumer lane reads four neighbouring values of x for 16
// products; units hold the weights in the same order. Columns from K on are zeros. Stores the row's exponent, or
// UNSPLITTABLE.
extern "C" __global__ void __launch_bounds__(256)
    split_w(const float *__restrict__ w, uint4 *__restrict__ tiles, int *__restrict__ exponents) {
    constexpr int TILE_ROWS = Config::tile_columns;
    const long long row = blockIdx.x;
    const float *const from = w + row * Config::length;
    Range range;
#pragma unroll 4
    for (int i = threadIdx.x; i < Config::length; i += 256) range.add(from[i]);
    range.join_block<256>();
    const int exponent = range.exponent(false, SPREAD), tile_row = row % TILE_ROWS;
    if (threadIdx.x == 0) exponents[row] = exponent;
    const float scale = power_of_two(exponent == Range::UNSPLITTABLE ? 0 : exponent);
    uint4 *const tile = tiles + row / TILE_ROWS * (Config::k_steps * 2 * TILE_ROWS * 8) + tile_row * 8;
    for (int unit = threadIdx.x; unit < Config::k_steps * 8; unit += 256) {
        const auto value = [&](int i) {
            const int column = unit / 4 * 32 + i / 2 * 8 + unit % 4 * 2 + i % 2;
            return column < Config::length ? multiply(from[column], scale) : 0.0f;
        };
        uint4 *const to = tile + unit / 8 * (2 * TILE_ROWS * 8) + (unit % 8 ^ tile_row % 8);
        split_channels(value, to[0], to[TILE_ROWS * 8]);
    }
}

// Pad the rows of x, whose bytes are no multiple of 16 as TMA requires.
extern "C" __global__ void __launch_bounds__(256) pad_rows(const float *__restrict__ x, float *__restrict__ padded) {
    const long long row = blockIdx.x;
#pragma unroll 4
    for (int i = threadIdx.x; i < Config::pitch; i += 256)
        padded[row * Config::pitch + i] = i < Config::length ? x[row * Config::length + i] : 0.0f;
}

// Load: a thread fills a stage when the consumers have released it: k-steps first to last, rows of x from `row` on.
__device__ __forceinline__ void produce(const TensorMap &x, const float *w, unsigned char *stages, Barrier *full,
                                        Barrier *empty, int first, int last, int row) {
    for (int step = first, stage = 0, phase = 1; step < last; step++) {
        unsigned char *const to = stages + stage * STAGE_BYTES;
        mbarrier_wait_thread(empty + stage, phase);
        mbarrier_arrive_expect_bytes(full + stage, STAGE_BYTES);
        tma_load(to, x, full + stage, 2 * step * K_STEP, 0, row);  // in units of two bytes
        tma_load(to + HALF_BYTES, x, full + stage, 2 * step * K_STEP + K_STEP, 0, row);
        bulk_load(reinterpret_cast<float *>(to + 2 * HALF_BYTES), w + step * (W_BYTES / 4), W_BYTES, full + stage);
        if (++stage == Config::stages) stage = 0, phase ^= 1;
    }
}

// A lane's values of x of a k-step: the operand A of four wgmmas, rows g = lane / 4 and g + 8 of a warp's 16.
struct Fragments {
    unsigned high[K_STEP / 16][4], low[K_STEP / 16][4];
    float inverse_scale[2];

    // Behind the wait for the wgmmas that read these registers: the compiler must not use them for something else
    // before.
    static __device__ __forceinline__ void keep(unsigned (&registers)[K_STEP / 16][4]) {
#pragma unroll
        for (int i = 0; i < K_STEP / 4; i++) hide_from_compiler(registers[i / 4][i % 4]);
    }
    // From row g of a stage. The swizzle spreads the lanes over all banks.
    __device__ __forceinline__ void load(const unsigned char *from, bool (&unsplittable)[2]) {
        const int t = threadIdx.x % 4, g = threadIdx.x % 32 / 4;
#pragma unroll
        for (int r = 0; r < 2; r++) {
            alignas(16) float values[K_STEP / 16][4];
            Range range;
#pragma unroll
            for (int i = 0; i < K_STEP / 16; i++) {
                const int unit = t * 2 + i % 2, at = i / 2 * HALF_BYTES + r * 8 * ROW_BYTES + (unit ^ g) * 16;
                *reinterpret_cast<float4 *>(values[i]) = *reinterpret_cast<const float4 *>(from + at);
#pragma unroll
                for (const float value : values[i]) range.add(value);
            }
#pragma unroll
            for (int lanes = 1; lanes <= 2; lanes *= 2)  // four lanes have the row
                range.add({__shfl_xor_sync(~0u, range.largest, lanes), __shfl_xor_sync(~0u, range.smallest, lanes)});
            int exponent = range.exponent(false, SPREAD);
            if (max(exponent, -exponent) > LARGEST_EXPONENT) unsplittable[r] = true, exponent = 0;
            const float scale = power_of_two(exponent);
            inverse_scale[r] = power_of_two(-exponent);
#pragma unroll
            for (int i = 0; i < K_STEP / 16; i++)
#pragma unroll
                for (int j = 0; j < 4; j += 2) {
                    const float first = values[i][j] * scale, second = values[i][j + 1] * scale;
                    high[i][j + r] = to_fp16x2(first, second);
                    low[i][j + r] = fp16x2_residual(first, second, high[i][j + r]);
                }
        }
    }
};

// Main loop: the products of a warpgroup's 64 rows in k-steps first to last, with the scales of w. Each stage that was
// read is released.
__device__ __forceinline__ void main_loop(float (&total)[SUMS], const unsigned char *stages, Barrier *full,
                                          Barrier *empty, Barrier *turns, int first, int last, bool (&unsplittable)[2]) {
    const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0), row = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4;
    float sums[SUMS];
#pragma unroll
    for (int i = 0; i < SUMS; i++) total[i] = 0.0f;
#pragma unroll 1
    for (int step = first, stage = 0, phase = 0; step < last; step++) {
        mbarrier_wait(full + stage, phase);
        const unsigned char *const x = stages + stage * STAGE_BYTES;
        // K-major rows at multiples of 1024 bytes, with the 128-byte swizzle.
        const Descriptor w_high =
            matrix_descriptor(shared_address(x + 2 * HALF_BYTES), 16, 8 * ROW_BYTES) | Descriptor(1) << 62;
        const Descriptor w_low = w_high + (W_BYTES / 2 >> 4);
        Fragments f;
        f.load(x + row * ROW_BYTES, unsplittable);
        mbarrier_wait(turns + warpgroup, step - first + warpgroup - 1);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < K_STEP / 16; k++) {  // a wgmma reads 32 bytes of a row, two units
            if (k == 0) WGMMA_OVERWRITE(sums, f.high[k], w_low);
            else WGMMA(sums, f.high[k], w_low + 2 * k);
            WGMMA(sums, f.low[k], w_high + 2 * k);
        }
        wgmma_commit();
        wgmma_wait<0>();
        f.keep(f.low);
        // The large products are added to the small ones, so that the promotion rounds once for both.
#pragma unroll
        for (int i = 0; i < SUMS; i++) sums[i] *= 1.0f / 2048;
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < K_STEP / 16; k++) WGMMA(sums, f.high[k], w_high + 2 * k);
        wgmma_commit();
        mbarrier_arrive(turns + 1 - warpgroup);
        wgmma_wait<0>();
        f.keep(f.high);
        mbarrier_arrive(empty + stage);
        // Accumulator promotion: float32 additions round, where the tensor cores truncate.
#pragma unroll
        for (int i = 0; i < SUMS; i++) total[i] = fmaf(sums[i], f.inverse_scale[i / 2 % 2], total[i]);
        if (++stage == Config::stages) stage = 0, phase ^= 1;
    }
}

// Fills sums (slices, padded rows, PITCH) of slice_steps k-steps each, and marks (slices, padded rows): whether a row
// of x cannot be split. A slice has the rows of row_tiles tiles.
extern "C" __global__ void __launch_bounds__(128 * (CONSUMERS + 1), 1)
    dense_gemm(const __grid_constant__ TensorMap x, const float *__restrict__ w, float *__restrict__ sums,
               int *__restrict__ marks, int row_tiles, int slice_steps) {
    extern __shared__ __align__(16) unsigned char memory[];
    __shared__ Barrier full[Config::stages], empty[Config::stages], turns[CONSUMERS];
    unsigned char *const stages = memory + (1024 - shared_address(memory) % 1024) % 1024;
    const int column_tile = blockIdx.x % Config::column_tiles, tile = blockIdx.x / Config::column_tiles;
    const int row_tile = tile % row_tiles, first = tile / row_tiles * slice_steps;
    const int last = min(first + slice_steps, Config::k_steps);
    if (threadIdx.x == 0) {
        for (int i = 0; i < Config::stages; i++) mbarrier_init(full + i, 1), mbarrier_init(empty + i, 128 * CONSUMERS);
        for (int i = 0; i < CONSUMERS; i++) mbarrier_init(turns + i, 128);
        fence_mbarrier_init();
    }
    __syncthreads();
    // Of 168 registers per thread, the producer's warpgroup gives most to the consumers.
    if (threadIdx.x >= 128 * CONSUMERS) {
        lower_registers<24>();
        if (threadIdx.x == 128 * CONSUMERS)
            produce(x, w + (long long)column_tile * Config::k_steps * (W_BYTES / 4), stages, full, empty, first, last,
                    row_tile * Config::tile_rows);
        return;
    }
    raise_registers<240>();
    float total[SUMS];
    bool unsplittable[2] = {};
    main_loop(total, stages, full, empty, turns, first, last, unsplittable);

    // Four lanes store eight neighbouring sums of a row, 32 bytes.
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const long long row = tile * Config::tile_rows + threadIdx.x / 32 * 16 + lane / 4 + 8 * r;
        if (lane % 4 == 0) marks[row] = unsplittable[r];
        float2 *const to = reinterpret_cast<float2 *>(sums + row * PITCH + column_tile * Config::tile_columns) + lane % 4;
#pragma unroll
        for (int i = 0; i < SUMS / 4; i++) to[4 * i] = make_float2(total[4 * i + 2 * r], total[4 * i + 2 * r + 1]);
    }
}

// Epilogue: a warp computes 32 outputs of a row from the sums or, if the row is marked, in float32. Each row of w could
// be split: otherwise the host takes cuBLAS.
extern "C" __global__ void __launch_bounds__(256)
    finish(const float *__restrict__ sums, const int *__restrict__ marks, const float *__restrict__ x,
           const float *__restrict__ w, const int *__restrict__ w_exponents, const float *__restrict__ bias,
           float *__restrict__ y, int rows, int slices, int slice_rows) {
    const int row = blockIdx.x * 8 + threadIdx.x / 32, lane = threadIdx.x % 32, first = blockIdx.y * 32;
    if (row >= rows) return;
    const auto store = [&](int column, float sum) {
        y[(long long)row * Config::columns + column] = activated(Config::bias ? sum + bias[column] : sum);
    };
    bool marked = false;
    for (int slice = 0; slice < slices; slice++) marked |= marks[slice * slice_rows + row];
    if (!marked && first + lane < Config::columns) {
        float sum = 0.0f;
#pragma unroll 4
        for (int slice = 0; slice < slices; slice++)
            sum += sums[(slice * slice_rows + row) * (long long)PITCH + first + lane];
        store(first + lane, scaled(sum, -w_exponents[first + lane]));
    }
    for (int column = first; column < min(first + 32, Config::columns) && marked; column++) {
        float sum = 0.0f;
#pragma unroll 8
        for (int i = lane; i < Config::length; i += 32)
            sum = fmaf(x[(long long)row * Config::length + i], w[(long long)column * Config::length + i], sum);
        for (int lanes = 16; lanes; lanes /= 2) sum += __shfl_xor_sync(~0u, sum, lanes);
        if (lane == 0) store(column, sum);
    }
}

// dense: y = activated(x w^T + bias) of float32 matrices x (rows, K) and w (M, K) in split precision (sm_90a).
//
//     x ------------------ TMA --->  stage 0 | 1 | 2   --full-->   2 consumer warpgroups:
//     w --split_filters--- TMA --->  x and w tiles     <-empty--   split x, multiply       --> sums
//     sums of all slices of K --finish--> y
//
// Compiled after the .cuh files of wide.SHARED_SOURCES, with rows of x as pixels, K as the channels and rows of w as
// the filters. The consumers convert x from shared memory into registers, wgmma's operand A, and ping-pong: one
// multiplies while the other converts. A stage has 64 products per sum. A row of x has one scale per stage, a row of w
// one for all stages; scales are powers of two (split.cuh has the arithmetic).
//
// Arithmetic intensity: a stage of a block copies (128 + tile_filters) x 256 bytes for 3 x 2 x 128 x tile_filters x 64
// FLOP: 109 FLOP per byte for 168 columns. x is read once per column tile.
// Restrictions: sm_90a; tile_filters of at most 168, for the registers; every row of w can be split, otherwise
// dense.py's caller uses cuBLAS. See CUTLASS's persistent ping-pong kernels and split-K.
//
// Config beyond wide_tile.cuh's: pitch, the floats per row of x that TMA reads. ResNet-50's: channels 2048, filters
// 1000, tile_pixels 128, tile_filters 168, stage_channels 64, stages 3, pitch 2048, bias. dense.py defines the macros
// WGMMA and, if there is an activation, ACTIVATION.

static_assert(Config::tile_pixels == 128 && Config::consumers == 2, "the register counts are for two consumers");
constexpr int CHANNELS = Config::stage_channels, K_STEPS = CHANNELS / 16;  // of a stage; a wgmma takes 16
constexpr int PITCH = FILTER_TILES * Config::tile_filters;

// Pad the rows of x to a multiple of 16 bytes, as TMA requires.
extern "C" __global__ void __launch_bounds__(256) pad_rows(const float *__restrict__ x, float *__restrict__ padded) {
    const long long row = blockIdx.x;
#pragma unroll 4
    for (int i = threadIdx.x; i < Config::pitch; i += 256) padded[row * Config::pitch + i] = i < C ? x[row * C + i] : 0.0f;
}

// Load: one thread fills a stage for each of the steps `first` to `last` - 1, when the consumers have released the
// stage. A stage has 64 values per row of x: the first 32 lie where other kernels keep high components, the others
// where they keep low ones. The filters of a column tile follow; nothing reads the sums of filters beyond the last.
__device__ __forceinline__ void produce(const Pipeline &pipeline, const TensorMap &x, const TensorMap &w_high,
                                        const TensorMap &w_low, int first, int last, int row, int filter) {
    for (int step = first, stage = 0, phase = 1; step < last; step++) {
        unsigned char *const to = pipeline.pixels(stage);
        Barrier *const full = pipeline.full + stage;
        mbarrier_wait_thread(pipeline.empty + stage, phase);
        mbarrier_arrive_expect_bytes(full, STAGE_BYTES);
        tma_load(to, x, full, 2 * step * CHANNELS, 0, row);  // in units of two bytes
        tma_load(to + PIXEL_BYTES, x, full, 2 * step * CHANNELS + CHANNELS, 0, row);
        load_filters(pipeline.filters(stage, 0), full, w_high, w_low, 0, 0, step * M + filter);
        if (++stage == Config::stages) stage = 0, phase ^= 1;
    }
}

// A lane's values of x in a stage: the operand A of four wgmmas, rows g = lane / 4 and g + 8 of a warp's 16. For each
// wgmma the lane reads four neighbouring values of a row; split_filters stores the weights in the same order.
struct Fragments {
    unsigned high[K_STEPS][4], low[K_STEPS][4];
    float inverse_scale[2];

    // Call this after the wait for the wgmmas that read these registers: until then the compiler must not reuse them.
    static __device__ __forceinline__ void keep(unsigned (&registers)[K_STEPS][4]) {
#pragma unroll
        for (int i = 0; i < 4 * K_STEPS; i++) hide_from_compiler(registers[i / 4][i % 4]);
    }
    // Load and split the lane's two rows; `from` is the first. The swizzle spreads the lanes over all banks.
    __device__ __forceinline__ void load(const unsigned char *from, bool (&unsplittable)[2]) {
        const int t = threadIdx.x % 4, g = threadIdx.x % 32 / 4;
#pragma unroll
        for (int r = 0; r < 2; r++) {
            alignas(16) float values[K_STEPS][4];
            Range range;
#pragma unroll
            for (int i = 0; i < K_STEPS; i++) {
                const int unit = t * 2 + i % 2, at = i / 2 * PIXEL_BYTES + r * 8 * ROW_BYTES + (unit ^ g) * 16;
                *reinterpret_cast<float4 *>(values[i]) = *reinterpret_cast<const float4 *>(from + at);
#pragma unroll
                for (const float value : values[i]) range.add(value);
            }
#pragma unroll
            for (int lanes = 1; lanes <= 2; lanes *= 2)  // four lanes share the row
                range.add({__shfl_xor_sync(~0u, range.largest, lanes), __shfl_xor_sync(~0u, range.smallest, lanes)});
            int exponent = range.exponent(false, SPREAD);
            if (max(exponent, -exponent) > LARGEST_EXPONENT) unsplittable[r] = true, exponent = 0;
            const float scale = power_of_two(exponent);
            inverse_scale[r] = power_of_two(-exponent);
#pragma unroll
            for (int i = 0; i < K_STEPS; i++)
#pragma unroll
                for (int j = 0; j < 4; j += 2) {
                    const float first = values[i][j] * scale, second = values[i][j + 1] * scale;
                    high[i][j + r] = to_fp16x2(first, second);
                    low[i][j + r] = fp16x2_residual(first, second, high[i][j + r]);
                }
        }
    }
};

// Main loop: add the products of a warpgroup's 64 rows over the steps `first` to `last` - 1 to `total`, still scaled by
// the scales of w. On exit every stage is released.
__device__ __forceinline__ void main_loop(float (&total)[SUMS], const Pipeline &pipeline, Barrier *turns, int first,
                                          int last, bool (&unsplittable)[2]) {
    const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0), row = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4;
    float sums[SUMS];
#pragma unroll 1
    for (int step = first, stage = 0, phase = 0; step < last; step++) {
        mbarrier_wait(pipeline.full + stage, phase);
        const Descriptor w_high = row_descriptor(shared_address(pipeline.filters(stage, 0)));
        const Descriptor w_low = w_high + (FILTER_BYTES >> 4);
        Fragments f;
        f.load(pipeline.pixels(stage) + row * ROW_BYTES, unsplittable);
        mbarrier_wait(turns + warpgroup, step - first + warpgroup - 1);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < K_STEPS; k++) {  // a wgmma reads 32 bytes of a row, two units
            WGMMA(sums, f.high[k], w_low + 2 * k, k == 0);
            WGMMA(sums, f.low[k], w_high + 2 * k, false);
        }
        wgmma_commit();
        wgmma_wait<0>();
        f.keep(f.low);
        // The high products are added to the sums of the low ones, so that the promotion rounds once for both.
#pragma unroll
        for (int i = 0; i < SUMS; i++) sums[i] *= 1.0f / 2048;
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < K_STEPS; k++) WGMMA(sums, f.high[k], w_high + 2 * k, false);
        wgmma_commit();
        mbarrier_arrive(turns + 1 - warpgroup);
        wgmma_wait<0>();
        f.keep(f.high);
        mbarrier_arrive(pipeline.empty + stage);
        // Accumulator promotion: float32 additions round, where the tensor cores truncate.
#pragma unroll
        for (int i = 0; i < SUMS; i++) total[i] = fmaf(sums[i], f.inverse_scale[i / 2 % 2], total[i]);
        if (++stage == Config::stages) stage = 0, phase ^= 1;
    }
}

// Fill sums (slices, padded rows, PITCH), each over the slice_steps stages of a slice, and marks (slices, padded rows),
// not 0 where a row of x cannot be split. Padded rows are those of row_tiles tiles.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    dense_gemm(const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap w_high,
               const __grid_constant__ TensorMap w_low, float *__restrict__ sums, int *__restrict__ marks, int row_tiles,
               int slice_steps) {
    extern __shared__ __align__(16) unsigned char memory[];
    __shared__ Barrier turns[2];
    const Pipeline pipeline(memory);
    const int filter = blockIdx.x % FILTER_TILES * Config::tile_filters, tile = blockIdx.x / FILTER_TILES;
    const int row_tile = tile % row_tiles, first = tile / row_tiles * slice_steps;
    const int last = min(first + slice_steps, K_TILES);
    if (threadIdx.x == 0) mbarrier_init(turns, 128), mbarrier_init(turns + 1, 128);
    pipeline.init(1, 128);
    if (threadIdx.x >= 128 * Config::consumers) {
        lower_registers<PRODUCER_REGISTERS>();
        if (threadIdx.x == 128 * Config::consumers)
            produce(pipeline, x, w_high, w_low, first, last, row_tile * Config::tile_pixels, filter);
        return;
    }
    raise_registers<CONSUMER_REGISTERS>();
    float total[SUMS] = {};
    bool unsplittable[2] = {};
    main_loop(total, pipeline, turns, first, last, unsplittable);

    // Four lanes store eight neighbouring sums of a row, 32 bytes.
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const long long row = tile * Config::tile_pixels + threadIdx.x / 32 * 16 + lane / 4 + 8 * r;
        if (lane % 4 == 0) marks[row] = unsplittable[r];
        float2 *const to = reinterpret_cast<float2 *>(sums + row * PITCH + filter) + lane % 4;
#pragma unroll
        for (int i = 0; i < SUMS / 4; i++) to[4 * i] = make_float2(total[4 * i + 2 * r], total[4 * i + 2 * r + 1]);
    }
}

// Epilogue: a warp computes 32 outputs of a row from the sums or, if the row is marked, in float32. Every row of w can
// be split here: otherwise the host uses cuBLAS.
extern "C" __global__ void __launch_bounds__(256)
    finish(const float *__restrict__ sums, const int *__restrict__ marks, const float *__restrict__ x,
           const float *__restrict__ w, const int *__restrict__ w_exponents, const float *__restrict__ bias,
           float *__restrict__ y, int rows, int slices, int slice_rows) {
    const int row = blockIdx.x * 8 + threadIdx.x / 32, lane = threadIdx.x % 32, first = blockIdx.y * 32;
    if (row >= rows) return;
    const auto store = [&](int column, float sum) {
        y[(long long)row * M + column] = activated(Config::bias ? sum + bias[column] : sum);
    };
    bool marked = false;
    for (int slice = 0; slice < slices; slice++) marked |= marks[slice * slice_rows + row];
    if (!marked && first + lane < M) {
        float sum = 0.0f;
#pragma unroll 4
        for (int slice = 0; slice < slices; slice++)
            sum += sums[(slice * slice_rows + row) * (long long)PITCH + first + lane];
        store(first + lane, scaled(sum, -w_exponents[first + lane]));
    }
    for (int column = first; column < min(first + 32, M) && marked; column++) {
        float sum = 0.0f;
#pragma unroll 8
        for (int i = lane; i < C; i += 32)
            sum = fmaf(x[(long long)row * C + i], w[(long long)column * C + i], sum);
        for (int lanes = 16; lanes; lanes /= 2) sum += __shfl_xor_sync(~0u, sum, lanes);
        if (lane == 0) store(column, sum);
    }
}

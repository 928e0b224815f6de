// What the split-precision kernels for wide layers share (general.cu, pointwise.cu): how values are split, the filters,
// the pipeline's barriers, TMA and wgmma in PTX, the epilogue, and the images that are computed again in float32.
//
// Config, from general.py or pointwise.py: tile_pixels, tile_filters; stage_channels and stages, the pipeline;
// low_parts, whether the low parts are multiplied (fp16x3) or not (fp16x1); consumers, the consumer warpgroups, 64
// pixels each; channels of the split filters, C rounded up for TMA.

constexpr int ROW_BYTES = 2 * Config::stage_channels;  // a pixel's or a filter's row of a stage: one swizzle width
constexpr int PARTS = Config::low_parts ? 2 : 1;       // high, low
constexpr int PIXEL_BYTES = Config::tile_pixels * ROW_BYTES, FILTER_BYTES = Config::tile_filters * ROW_BYTES;
constexpr int STAGE_BYTES = PARTS * (PIXEL_BYTES + FILTER_BYTES);
constexpr int SUMS = Config::tile_filters / 2;  // accumulators of a thread, per sum
constexpr int STEPS = K * K * ((C + Config::stage_channels - 1) / Config::stage_channels);  // stages of one tile
constexpr int FILTER_TILES = (M + Config::tile_filters - 1) / Config::tile_filters;
constexpr int SPREAD = 28;        // powers of two below the largest value within which all others must lie
constexpr int MOST_SCALE = 120;   // so that 2^120 and 2^-120 are both float32 numbers
constexpr int UNSPLIT = 1 << 20;  // the exponent of an image or a filter that cannot be split

// A TMA descriptor, made by the host (CUtensorMap).
struct alignas(64) TensorMap {
    unsigned char bytes[128];
};

// The bits of the largest |value| and of the smallest that is not zero, less one: zero becomes the largest number.
struct Range {
    unsigned most = 0, least = ~0u;
    __device__ __forceinline__ void add(float value) {
        const unsigned bits = __float_as_uint(value) & 0x7fffffff;
        most = max(most, bits), least = min(least, bits - 1);
    }
    __device__ __forceinline__ void add(const Range &other) {
        most = max(most, other.most), least = min(least, other.least);
    }
    __device__ __forceinline__ void reduce_warp() {
        most = __reduce_max_sync(~0u, most), least = __reduce_min_sync(~0u, least);
    }
    // The power of two that brings the largest value into [2^14, 2^15); UNSPLIT where the values spread too far for
    // 16-bit floats, or one is no number.
    __device__ __forceinline__ int exponent() const {
        const int top = most >> 23, up = most == 0 ? 0 : 141 - top;
        const bool fits = top < 255 && up <= MOST_SCALE && least + 1 >= unsigned(max(top - SPREAD, 1)) << 23;
        return most == 0 || fits ? up : UNSPLIT;
    }
};

__device__ __forceinline__ float power_of_two(int exponent) { return __uint_as_float(unsigned(127 + exponent) << 23); }

// Two values as 16-bit floats, the first in the lower half; and what they leave of both, times 2^11, which is exact.
__device__ __forceinline__ unsigned high_parts(float first, float second) {
    unsigned word;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(second), "f"(first));
    return word;
}
__device__ __forceinline__ unsigned low_parts(float first, float second, unsigned high) {
    float a, b;
    asm("{.reg .f16 l, h; mov.b32 {l, h}, %2; cvt.f32.f16 %0, l; cvt.f32.f16 %1, h;}" : "=f"(a), "=f"(b) : "r"(high));
    return high_parts((first - a) * 2048.0f, (second - b) * 2048.0f);
}

// Convert: filters (M, C, K, K) to [part][filter][tap][channel], a block per filter.
extern "C" __global__ void __launch_bounds__(256)
    split_filters(const float *__restrict__ w, unsigned *__restrict__ split, int *__restrict__ exponents,
                  int *__restrict__ listed, int images) {
    __shared__ Range ranges[8];
    // The list of images to recompute: their number, their indices, and a mark for each image that is in it.
    if (blockIdx.x == 0 && threadIdx.x == 0) listed[0] = 0;
    for (int i = blockIdx.x * 256 + threadIdx.x; i < images; i += gridDim.x * 256) listed[1 + images + i] = 0;
    const float *const filter = w + (long long)blockIdx.x * REDUCTION;
    Range range;
    for (int i = threadIdx.x; i < REDUCTION; i += 256) range.add(filter[i]);
    range.reduce_warp();
    if (threadIdx.x % 32 == 0) ranges[threadIdx.x / 32] = range;
    __syncthreads();
    for (int i = 0; i < 8; i++) range.add(ranges[i]);
    const int exponent = range.exponent();
    if (threadIdx.x == 0) exponents[blockIdx.x] = exponent;
    const float scale = power_of_two(exponent == UNSPLIT ? 0 : exponent);
    constexpr int WORDS = K * K * (Config::channels / 2);
    unsigned *const to = split + (long long)blockIdx.x * WORDS;
    for (int i = threadIdx.x; i < WORDS; i += 256) {
        const int tap = i / (Config::channels / 2), c = i % (Config::channels / 2) * 2;
        const float first = c < C ? multiply(filter[c * (K * K) + tap], scale) : 0.0f;
        const float second = c + 1 < C ? multiply(filter[(c + 1) * (K * K) + tap], scale) : 0.0f;
        const unsigned high = high_parts(first, second);
        to[i] = high;
        if (Config::low_parts) to[(long long)M * WORDS + i] = low_parts(first, second, high);
    }
}

// mbarriers, TMA and wgmma: PTX ISA, sections "Parallel Synchronization", "cp.async.bulk.tensor" and "wgmma".
__device__ __forceinline__ unsigned shared_address(const void *p) { return unsigned(__cvta_generic_to_shared(p)); }
__device__ __forceinline__ void init_barrier(unsigned barrier, int arrivals) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals));
}
__device__ __forceinline__ void arrive_expecting(unsigned barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
__device__ __forceinline__ void arrive(unsigned barrier) {
    asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ void wait_for(unsigned barrier, int parity) {
    asm volatile(
        "{.reg .pred done; AGAIN: mbarrier.try_wait.parity.shared.b64 done, [%0], %1, 0x989680; @done bra DONE;"
        "bra AGAIN; DONE:}" ::"r"(barrier),
        "r"(parity)
        : "memory");
}
__device__ __forceinline__ void load_filters(unsigned to, const TensorMap &map, unsigned barrier, int c, int tap,
                                             int filter) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
        "[%0], [%1, {%3, %4, %5}], [%2];" ::"r"(to),
        "l"(&map), "r"(barrier), "r"(c), "r"(tap), "r"(filter)
        : "memory");
}
__device__ __forceinline__ void begin_mma() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void commit_mma() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int PENDING> __device__ __forceinline__ void wait_mma() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}
// The descriptor of a matrix whose rows of ROW_BYTES are swizzled over their own width, eight rows 8 ROW_BYTES apart.
__device__ __forceinline__ unsigned long long descriptor(unsigned address) {
    constexpr unsigned long long SWIZZLE = ROW_BYTES == 128 ? 1 : ROW_BYTES == 64 ? 2 : 3;
    return (unsigned long long)(address >> 4) | 1ull << 16 | (unsigned long long)(8 * ROW_BYTES >> 4) << 32 |
           SWIZZLE << 62;
}

// Initialise the full barrier (of `arrivals` arrivals) and the empty barrier of each stage, and synchronise the block.
__device__ __forceinline__ void init_barriers(unsigned full, unsigned empty, int arrivals) {
    if (threadIdx.x == 0) {
        for (int i = 0; i < Config::stages; i++)
            init_barrier(full + 8 * i, arrivals), init_barrier(empty + 8 * i, Config::consumers);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
}

// The tile of that number: filters change fastest, so that blocks at work at the same time share pixels in L2.
struct Tile {
    int pixel, filter;
    __device__ __forceinline__ explicit Tile(int number)
        : pixel(number / FILTER_TILES * Config::tile_pixels), filter(number % FILTER_TILES * Config::tile_filters) {}
};

// The sums of a consumer's 64 pixels: of high by high since the last promotion, all before it, and of the other
// products.
struct Accumulators {
    float high[SUMS], promoted[SUMS], low[Config::low_parts ? SUMS : 1];

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int i = 0; i < SUMS; i++) high[i] = promoted[i] = low[Config::low_parts ? i : 0] = 0;
    }
    __device__ __forceinline__ float total(int i) const {
        const float sum = promoted[i] + high[i];
        return Config::low_parts ? fmaf(low[i], 1.0f / 2048, sum) : sum;
    }
};

// One stage's products for a consumer, begun and committed. Its pixels and filters lie at `pixels` in shared memory.
__device__ __forceinline__ void multiply_stage(Accumulators &sums, unsigned pixels, int consumer) {
    const unsigned filters = pixels + PARTS * PIXEL_BYTES;
    begin_mma();
#pragma unroll
    for (int k = 0; k < Config::stage_channels / 16; k++) {
        const auto a = descriptor(pixels + consumer * 64 * ROW_BYTES + 32 * k), b = descriptor(filters + 32 * k);
        MMA(sums.high, a, b);
        if (Config::low_parts) {
            MMA_LOW(sums.low, a, b + (FILTER_BYTES >> 4));
            MMA_LOW(sums.low, a + (PIXEL_BYTES >> 4), b);
        }
    }
    commit_mma();
}

// Epilogue: the sums go through shared memory, 32 filters at a time, so that a warp stores 32 neighbouring pixels.
// x_exponents: by image; null where the sums are unscaled already. The scales of image and filter are undone by two
// multiplications of about the same size, so that neither leaves the range of float32 before the result does.
constexpr int PITCH = 64 + 4;  // floats from one filter's row to the next: rows two apart are 8 banks apart
__device__ __forceinline__ void store_tile(const Accumulators &sums, float *staging, const Tile &tile, int consumer,
                                           int images, const int *x_exponents, const int *w_exponents, float *y) {
    constexpr int AREA = OH * OW;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4, first = tile.pixel + 64 * consumer;
    float *to[2];
    int exponent[2];
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int pixel = first + 32 * half + lane, image = pixel / AREA;
        to[half] = image < images ? image_of(y, image, OUTPUTS) + pixel % AREA : nullptr;
        exponent[half] = x_exponents && image < images ? x_exponents[image] : 0;
    }
#pragma unroll
    for (int chunk = 0; chunk < Config::tile_filters / 32; chunk++) {
        asm volatile("bar.sync %0, 128;" ::"r"(1 + consumer) : "memory");
#pragma unroll
        for (int j = 0; j < 16; j++) {
            const int filter = 8 * (j / 4) + lane % 4 * 2 + j % 2, pixel = 16 * warp + j / 2 % 2 * 8 + lane / 4;
            staging[filter * PITCH + pixel] = sums.total(16 * chunk + j);
        }
        asm volatile("bar.sync %0, 128;" ::"r"(1 + consumer) : "memory");
#pragma unroll
        for (int i = 0; i < 8; i++) {
            const int row = 8 * warp + i, filter = tile.filter + 32 * chunk + row;
            if (filter >= M) break;
            const int own = w_exponents[filter];
#pragma unroll
            for (int half = 0; half < 2; half++) {
                if (to[half] == nullptr) continue;
                const int e = -(exponent[half] + own), e0 = max(-126, min(126, e / 2)),
                          e1 = max(-126, min(126, e - e0));
                const float value =
                    multiply(multiply(staging[row * PITCH + 32 * half + lane], power_of_two(e0)), power_of_two(e1));
                __stcs(to[half] + index_t(filter) * AREA, value);
            }
        }
    }
}

// Recompute the listed images in float32 (register_tiled.cu), or all of them where a filter could not be split.
extern "C" __global__ void __launch_bounds__(BLOCK_THREADS, 1)
    recompute_images(const float *__restrict__ x, const float *__restrict__ w, float *__restrict__ y,
                     const int *__restrict__ w_exponents, const int *__restrict__ listed, long long first, int images) {
    int unsplit = 0;
    for (int m = threadIdx.x; m < M; m += BLOCK_THREADS) unsplit |= w_exponents[m] == UNSPLIT;
    const bool all = __syncthreads_or(unsplit);
    const unsigned count = all ? images : listed[0];
    constexpr unsigned BLOCKS_PER_IMAGE = (PIXELS + BLOCK_PIXELS - 1) / BLOCK_PIXELS * FILTER_GROUPS;
    for (unsigned long long i = blockIdx.x; i < (unsigned long long)count * BLOCKS_PER_IMAGE; i += gridDim.x) {
        const unsigned number = i / BLOCKS_PER_IMAGE;
        register_tile(x, w, y, first + (all ? number : listed[1 + number]), 1, i % BLOCKS_PER_IMAGE);
        __syncthreads();  // the next tile reuses the shared memory
    }
}

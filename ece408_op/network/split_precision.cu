// A matrix product in float32's accuracy on fp16 tensor cores (Hopper's wgmma, sm_90a): y = ACT(x w^T + bias).
//
// Each factor is split into two fp16 parts, with a power of two for each row of x and of w:
//
//     x = (high + low / 2048) scale      scale puts the row's largest element between 2^14 and 2^15
//
// high has 11 bits of an element and low the 11 after them. high x high, high x low and low x high are products
// that float32 holds exactly; low x low is below its last bit and is left out. A tensor core cuts off what an
// addition does not hold, instead of rounding it, so its error grows with the number of its additions and with the
// sum: each 64 products' sum is begun anew, and added in float32 to what came before.
//
//     split     a block a row: the parts, in tiles of T rows and 64 columns as the tensor cores read them (128-byte
//               rows, 16-byte units exchanged by the row's last three bits), so that a tile is one bulk copy;
//               tiles along a row follow each other, high before low, columns from K to 64 KB are zero
//     product   a block 128 rows and T columns of y; two groups of four warps multiply 64 rows each, one thread
//               brings tiles; three stages
//     repair    rows with an element more than 2^36 below its row's largest, whose parts hold fewer bits than a float32
//               sum of over 1024 products may lose, and rows with NaN or infinity, from the float32 elements
//
// Of 2 x 128 x T x 64 multiply-adds each stage is 3 products and brings (128 + T) x 256 bytes.

#ifndef ACT
#define ACT(v) (v)
#endif

typedef unsigned short half_bits;
typedef unsigned long long word;

__device__ __forceinline__ half_bits to_half(float v) {
    half_bits h;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(v));
    return h;
}

__device__ __forceinline__ float to_float(half_bits h) {
    float v;
    asm("cvt.f32.f16 %0, %1;" : "=f"(v) : "h"(h));
    return v;
}

#ifdef SPLIT
constexpr int THREADS = 256;

extern "C" __global__ void __launch_bounds__(THREADS)
split(const float *__restrict__ x, uint4 *__restrict__ parts, float *__restrict__ scales, int *__restrict__ marks) {
    __shared__ int shared_most[THREADS / 32];
    const size_t row = blockIdx.x;
    const float *from = x + row * K;
    // The bits of positive floats are ordered as they are; NaN and infinity come last.
    int most = 0;
#pragma unroll 4
    for (int i = threadIdx.x; i < K; i += THREADS) most = max(most, __float_as_int(from[i]) & 0x7fffffff);
    for (int other = 16; other; other /= 2) most = max(most, __shfl_xor_sync(0xffffffffu, most, other));
    if (threadIdx.x % 32 == 0) shared_most[threadIdx.x / 32] = most;
    __syncthreads();
    for (int i = 0; i < THREADS / 32; i++) most = max(most, shared_most[i]);
    const int exponent = (most >> 23) - 127;
    const bool fits = most == 0 || (exponent >= -100 && exponent <= 127);
    const float up = most && fits ? __int_as_float((14 - exponent + 127) << 23) : 1.f;
    const int inside = row % T;
    uint4 *tiles = parts + row / T * (size_t)(KB * 2 * T * 8) + inside * 8;
    bool small = false;
    for (int unit = threadIdx.x; unit < KB * 8; unit += THREADS) {
        alignas(16) half_bits high[8], low[8];
#pragma unroll
        for (int e = 0; e < 8; e++) {
            const int i = unit * 8 + e;
            const float v = i < K && fits ? from[i] * up : 0.f;
            small |= v != 0.f && fabsf(v) < 2.38418579e-7f;
            high[e] = to_half(v);
            low[e] = to_half((v - to_float(high[e])) * 2048.f);
        }
        uint4 *to = tiles + unit / 8 * (2 * T * 8) + (unit % 8 ^ inside % 8);
        to[0] = *(const uint4 *)high;
        to[T * 8] = *(const uint4 *)low;
    }
    const int marked = __syncthreads_or(small || !fits);
    if (threadIdx.x == 0) {
        scales[row] = most && fits ? __int_as_float((exponent - 14 + 127) << 23) : 1.f;
        marks[row] = marked;
    }
}
#endif

#ifdef PRODUCT
constexpr int ROWS = 128, GROUPS = 2, STAGES = 3, SUMS = T / 2;
constexpr int A_BYTES = 2 * ROWS * 128, B_BYTES = 2 * T * 128, STAGE_BYTES = A_BYTES + B_BYTES;

__device__ __forceinline__ unsigned shared_address(const void *p) { return (unsigned)__cvta_generic_to_shared(p); }

__device__ __forceinline__ void wait_for(unsigned barrier, int phase) {
    asm volatile(
        "{\n.reg .pred done;\n"
        "again:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@done bra over;\nbra again;\nover:\n}" ::"r"(barrier), "r"(phase) : "memory");
}

__device__ __forceinline__ void bring(unsigned to, const void *from, int bytes, unsigned barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
                 "l"(from), "r"(bytes), "r"(barrier)
                 : "memory");
}

// Rows of 128 bytes, units exchanged by the row's last three bits, 1024 bytes from eight rows to the next eight.
__device__ __forceinline__ word described(unsigned address) {
    return (word)(address >> 4) | 1ull << 16 | 64ull << 32 | 1ull << 62;
}

__device__ __forceinline__ void multiply(float (&sums)[SUMS], word a, word b, int more) { MULTIPLY }

extern "C" __global__ void __launch_bounds__(GROUPS * 128 + 128, 1)
product(const unsigned char *__restrict__ x, const unsigned char *__restrict__ w, const float *__restrict__ x_scales,
        const float *__restrict__ w_scales, const float *__restrict__ bias, float *__restrict__ y, int rows) {
    extern __shared__ unsigned char shared[];
    __shared__ word full[STAGES], empty[STAGES];
    const unsigned stages = (shared_address(shared) + 1023) / 1024 * 1024;
    const int column_tile = blockIdx.x % COLUMN_TILES, row_tile = blockIdx.x / COLUMN_TILES;
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; i++) {
            asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(full + i)) : "memory");
            asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(empty + i)), "r"(GROUPS * 128)
                         : "memory");
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    }
    __syncthreads();
    // Of 168 registers a thread, those that bring tiles leave theirs to those that multiply.
    if (threadIdx.x >= GROUPS * 128) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        if (threadIdx.x > GROUPS * 128) return;
        const unsigned char *a = x + (size_t)row_tile * KB * A_BYTES, *b = w + (size_t)column_tile * KB * B_BYTES;
        for (int step = 0; step < KB; step++) {
            const int stage = step % STAGES;
            const unsigned barrier = shared_address(full + stage), to = stages + stage * STAGE_BYTES;
            if (step >= STAGES) wait_for(shared_address(empty + stage), (step / STAGES - 1) % 2);
            asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(STAGE_BYTES)
                         : "memory");
            bring(to, a + (size_t)step * A_BYTES, A_BYTES, barrier);
            bring(to + A_BYTES, b + (size_t)step * B_BYTES, B_BYTES, barrier);
        }
        return;
    }
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    const int group = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0), warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
    float total[SUMS], sums[SUMS];
#pragma unroll
    for (int i = 0; i < SUMS; i++) total[i] = 0.f;
    for (int step = 0; step < KB; step++) {
        const int stage = step % STAGES;
        wait_for(shared_address(full + stage), step / STAGES % 2);
        const unsigned at = stages + stage * STAGE_BYTES;
        const word a_high = described(at + group * 64 * 128), a_low = a_high + (ROWS * 128 >> 4);
        const word b_high = described(at + A_BYTES), b_low = b_high + (T * 128 >> 4);
        // 16 products are 32 bytes of a row.
        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
        for (int k = 0; k < 4; k++) {
            multiply(sums, a_high + 2 * k, b_low + 2 * k, k > 0);
            multiply(sums, a_low + 2 * k, b_high + 2 * k, 1);
        }
        asm volatile("wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 0;" ::: "memory");
        // The large products go on top of the small ones: one rounding of the total for both.
#pragma unroll
        for (int i = 0; i < SUMS; i++) sums[i] *= 1.f / 2048.f;
        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
        for (int k = 0; k < 4; k++) multiply(sums, a_high + 2 * k, b_high + 2 * k, 1);
        asm volatile("wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 0;" ::: "memory");
        asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(empty + stage)) : "memory");
#pragma unroll
        for (int i = 0; i < SUMS; i++) total[i] += sums[i];
    }
    const int top = row_tile * ROWS + group * 64 + warp * 16 + lane / 4, left = column_tile * T + lane % 4 * 2;
#pragma unroll
    for (int lower = 0; lower < 2; lower++) {
        const int row = top + 8 * lower;
        if (row >= rows) continue;
        const float scale = x_scales[row];
#pragma unroll
        for (int i = 0; i < T / 8; i++)
#pragma unroll
            for (int odd = 0; odd < 2; odd++) {
                const int column = left + 8 * i + odd;
                if (column >= N) continue;
                const float v = total[4 * i + 2 * lower + odd] * scale * w_scales[column] + (BIAS ? bias[column] : 0.f);
                y[(size_t)row * N + column] = ACT(v);
            }
    }
}
#endif

#ifdef REPAIR
extern "C" __global__ void __launch_bounds__(256)
repair(const int *__restrict__ marks, const float *__restrict__ x, const float *__restrict__ w,
       const float *__restrict__ bias, float *__restrict__ y) {
    const size_t row = blockIdx.x;
    if (!marks[row]) return;
    const int lane = threadIdx.x % 32;
    for (int c = threadIdx.x / 32; c < N; c += 8) {
        float sum = 0.f;
#pragma unroll 8
        for (int i = lane; i < K; i += 32) sum = fmaf(x[row * K + i], w[(size_t)c * K + i], sum);
        for (int other = 16; other; other /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, other);
        const float v = sum + (BIAS ? bias[c] : 0.f);
        if (lane == 0) y[row * N + c] = ACT(v);
    }
}
#endif

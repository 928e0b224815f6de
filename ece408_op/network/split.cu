// A matrix product in float32's accuracy on fp16 tensor cores, around cuBLAS: each factor is split into two fp16 parts.
//
//     x = (high + low / 2048) scale      scale: a power of two for each row, that puts its largest element
//                                        between 2^14 and 2^15
//
// high has 11 bits of an element and low the 11 after them. high x high, high x low and low x high are products
// that float32 holds exactly; low x low is below its last bit and is left out. The sum of high x high is cut into
// CHUNKS parts, which are added here in float32: a tensor core cuts off what an addition does not hold, instead of
// rounding it, so its error grows with the length of the sum.
//
// An element more than 2^28 below its row's largest has less than 22 bits in both parts: its row is marked, and is
// computed from the float32 elements in the last pass; rows with NaN or infinity too.
//
//     split    a block a row of K elements; out: high[KP], low[KP] (SWAP: low first), zeros from K to KP
//     finish   a block a row of N outputs: y = ACT(sum scale_x[row] scale_w[column] + bias[column])

#ifndef ACT
#define ACT(v) (v)
#endif

typedef unsigned short half_bits;

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

extern "C" __global__ void __launch_bounds__(THREADS)
split(const float *__restrict__ x, half_bits *__restrict__ parts, float *__restrict__ scales, int *__restrict__ marks) {
    __shared__ int shared_most[THREADS / 32];
    const size_t row = blockIdx.x;
    const float *from = x + row * K;
    half_bits *to = parts + row * (2 * KP);
    // The bits of positive floats are ordered as they are; NaN and infinity come last.
    int most = 0;
    for (int i = threadIdx.x; i < K; i += THREADS) most = max(most, __float_as_int(from[i]) & 0x7fffffff);
    for (int other = 16; other; other /= 2) most = max(most, __shfl_xor_sync(0xffffffffu, most, other));
    if (threadIdx.x % 32 == 0) shared_most[threadIdx.x / 32] = most;
    __syncthreads();
    for (int i = 0; i < THREADS / 32; i++) most = max(most, shared_most[i]);
    const int exponent = (most >> 23) - 127;
    const bool fits = most == 0 || (exponent >= -100 && exponent <= 127);
    const float up = most && fits ? __int_as_float((14 - exponent + 127) << 23) : 1.f;
    bool small = false;
    for (int i = threadIdx.x; i < KP; i += THREADS) {
        const float v = i < K && fits ? from[i] * up : 0.f;
        small |= v != 0.f && fabsf(v) < 6.103515625e-5f;
        const half_bits high = to_half(v);
        const half_bits low = to_half((v - to_float(high)) * 2048.f);
        to[i] = SWAP ? low : high;
        to[KP + i] = SWAP ? high : low;
    }
    const int marked = __syncthreads_or(small || !fits);
    if (threadIdx.x == 0) {
        scales[row] = most && fits ? __int_as_float((exponent - 14 + 127) << 23) : 1.f;
        marks[row] = marked;
    }
}

extern "C" __global__ void __launch_bounds__(THREADS)
finish(const float *__restrict__ sums, const float *__restrict__ rest, const float *__restrict__ x_scales,
       const float *__restrict__ w_scales, const int *__restrict__ marks, const float *__restrict__ x,
       const float *__restrict__ w, const float *__restrict__ bias, float *__restrict__ y, long long plane) {
    const size_t row = blockIdx.x;
    if (marks[row]) {
        const int lane = threadIdx.x % 32;
        for (int c = threadIdx.x / 32; c < N; c += THREADS / 32) {
            float sum = 0.f;
            for (int i = lane; i < K; i += 32) sum = fmaf(x[row * K + i], w[(size_t)c * K + i], sum);
            for (int other = 16; other; other /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, other);
            const float v = sum + (BIAS ? bias[c] : 0.f);
            if (lane == 0) y[row * N + c] = ACT(v);
        }
        return;
    }
    const float scale = x_scales[row];
    for (int c = threadIdx.x; c < N; c += THREADS) {
        const size_t at = row * N + c;
        float sum = rest[at] * (1.f / 2048.f);
#pragma unroll
        for (int chunk = 0; chunk < CHUNKS; chunk++) sum += sums[chunk * plane + at];
        const float v = sum * scale * w_scales[c] + (BIAS ? bias[c] : 0.f);
        y[at] = ACT(v);
    }
}

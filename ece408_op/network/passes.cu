// One pass over memory each: pooling, a factor and a number for each channel, a border, softmax. Each thread makes
// one output (softmax: a warp one row), so that neighbours read and write neighbours. They are bound by memory:
// arithmetic between a load and a store is free, so an activation ACT(v) is done in the same pass.
//
//     COUNT    outputs: an argument; INDEX: the type that counts them, 32 bits where they fit
//     pool     H W OH OW  KH KW SH SW PH PW  MAXIMUM MEAN COUNT_PAD
//     affine   CHANNELS INNER SCALED: y = x scale[c] + shift[c], channel c = (i / INNER) % CHANNELS
//     border   H W PH PW
//     softmax  N (a row's elements) LOGARITHM

#ifndef ACT
#define ACT(v) (v)
#endif

__device__ __forceinline__ INDEX first() { return (INDEX)blockIdx.x * blockDim.x + threadIdx.x; }
__device__ __forceinline__ INDEX step() { return (INDEX)gridDim.x * blockDim.x; }

#ifdef KH
// A NaN stays: as the maximum so far, and as what comes.
__device__ __forceinline__ float larger(float most, float v) { return !(v <= most) && most == most ? v : most; }

extern "C" __global__ void pool(const float *__restrict__ x, float *__restrict__ y, long long count) {
    for (INDEX i = first(); i < (INDEX)count; i += step()) {
        const int column = (int)(i % OW), row = (int)(i / OW % OH);
        const float *map = x + (size_t)(i / (OW * OH)) * (H * W);
        const int top = row * SH - PH, left = column * SW - PW;
        float sum = MAXIMUM ? __int_as_float(0xff800000) : 0.f;
#pragma unroll
        for (int p = 0; p < KH; p++) {
            const int h = top + p;
            if (PH + CUT && (h < 0 || h >= H)) continue;
#if KW == 2 && SW == 2 && PW == 0 && !CUT && W % 2 == 0 && H * W % 2 == 0
            const float2 pair = *(const float2 *)(map + h * W + left);
            if (MAXIMUM) {
                sum = larger(sum, pair.x);
                sum = larger(sum, pair.y);
            } else {
                sum += pair.x + pair.y;
            }
#else
#pragma unroll
            for (int q = 0; q < KW; q++) {
                const int w = left + q;
                if (PW + CUT && (w < 0 || w >= W)) continue;
                const float v = map[h * W + w];
                if (MAXIMUM) sum = larger(sum, v);
                else sum += v;
            }
#endif
        }
        if (MEAN) {
            int rows = min(top + KH, H + PH) - top, columns = min(left + KW, W + PW) - left;
            if (!COUNT_PAD) {
                rows = min(top + KH, H) - max(top, 0);
                columns = min(left + KW, W) - max(left, 0);
            }
            sum /= (float)(rows * columns);
        }
        y[i] = ACT(sum);
    }
}
#endif

#ifdef CHANNELS
extern "C" __global__ void affine(const float *x, const float *__restrict__ scale, const float *__restrict__ shift,
                                  float *y, long long count) {
#if INNER % 4 == 0
    for (INDEX i = first(); i < (INDEX)(count / 4); i += step()) {
        const int c = (int)(i / (INNER / 4) % CHANNELS);
        const float b = shift[c], a = SCALED ? scale[c] : 1.f;
        float4 v = ((const float4 *)x)[i];
        v.x = SCALED ? fmaf(v.x, a, b) : v.x + b;
        v.y = SCALED ? fmaf(v.y, a, b) : v.y + b;
        v.z = SCALED ? fmaf(v.z, a, b) : v.z + b;
        v.w = SCALED ? fmaf(v.w, a, b) : v.w + b;
        ((float4 *)y)[i] = make_float4(ACT(v.x), ACT(v.y), ACT(v.z), ACT(v.w));
    }
#else
    for (INDEX i = first(); i < (INDEX)count; i += step()) {
        const int c = (int)(i / INNER % CHANNELS);
        const float v = SCALED ? fmaf(x[i], scale[c], shift[c]) : x[i] + shift[c];
        y[i] = ACT(v);
    }
#endif
}
#endif

#ifdef BORDER
extern "C" __global__ void border(const float *__restrict__ x, float *__restrict__ y, long long count) {
    for (INDEX i = first(); i < (INDEX)count; i += step()) {
        const int w = (int)(i % (W + 2 * PW)) - PW, h = (int)(i / (W + 2 * PW) % (H + 2 * PH)) - PH;
        const size_t map = (size_t)(i / ((W + 2 * PW) * (H + 2 * PH)));
        y[i] = w >= 0 && w < W && h >= 0 && h < H ? x[map * (H * W) + h * W + w] : 0.f;
    }
}
#endif

#ifdef LOGARITHM
extern "C" __global__ void softmax(const float *__restrict__ x, float *__restrict__ y, float heat, long long count) {
    const int lane = threadIdx.x % 32;
    for (INDEX row = first() / 32; row < (INDEX)count; row += step() / 32) {
        const float *from = x + (size_t)row * N;
        float *to = y + (size_t)row * N;
        float most = __int_as_float(0xff800000), sum = 0.f;
        for (int i = lane; i < N; i += 32) most = fmaxf(most, from[i]);
        for (int other = 16; other; other /= 2) most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, other));
        for (int i = lane; i < N; i += 32) sum += expf((from[i] - most) / heat);
        for (int other = 16; other; other /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, other);
        const float log_sum = logf(sum);
        for (int i = lane; i < N; i += 32) {
            const float v = (from[i] - most) / heat;
            to[i] = LOGARITHM ? v - log_sum : expf(v) / sum;
        }
    }
}
#endif

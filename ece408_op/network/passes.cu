// Passes over memory: a scale and a shift per channel, elementwise operators, a border of zeros, softmax.
//
// A thread computes one output element, or four with affine's float4 loads, and neighbouring threads access
// neighbouring addresses; for softmax a warp computes one row. Memory bandwidth limits all kernels (below one FLOP per
// byte), so that arithmetic between a load and a store costs nothing: affine also computes an activation.
//
// Restrictions: float32, NCHW, C-contiguous. Constants, defined in front of this text:
//     INDEX    the type that counts outputs: 32 bits if they suffice; the number of outputs is an argument
//     affine   CHANNELS; INNER: elements per channel of one image; SHIFTED: add a shift; SCALED (only with SHIFTED):
//              multiply by a scale first; RESIDUAL: add an array
//     ELEMENT  loads the elements of the arrays x to x3 for the i-th element of y, and computes that as a float v
//     border   H W PAD_ROWS PAD_COLUMNS
//     softmax  N: elements per row; LOGARITHM: compute the logarithm of the softmax

#ifndef ACTIVATION
#define ACTIVATION(v) (v)
#endif

__device__ __forceinline__ INDEX first_element() { return (INDEX)blockIdx.x * blockDim.x + threadIdx.x; }
__device__ __forceinline__ INDEX grid_stride() { return (INDEX)gridDim.x * blockDim.x; }
__device__ __forceinline__ float minus_infinity() { return __int_as_float(0xff800000); }

#ifdef CHANNELS
__device__ __forceinline__ float affine_of(float v, float factor, float added, float more) {
    if (SHIFTED) v = SCALED ? fmaf(v, factor, added) : v + added;
    if (RESIDUAL) v += more;
    return ACTIVATION(v);
}

// y = ACTIVATION(x scale[c] + shift[c] + residual) for x (images, CHANNELS, INNER). y may be x.
extern "C" __global__ void affine(const float *x, const float *__restrict__ scale, const float *__restrict__ shift,
                                  const float *residual, float *y, long long count) {
#if INNER % 4 == 0
    for (INDEX i = first_element(); i < (INDEX)(count / 4); i += grid_stride()) {
        const int c = (int)(i / (INNER / 4) % CHANNELS);
        const float b = SHIFTED ? shift[c] : 0.f, a = SCALED ? scale[c] : 1.f;
        const float4 v = ((const float4 *)x)[i];
        const float4 r = RESIDUAL ? ((const float4 *)residual)[i] : make_float4(0.f, 0.f, 0.f, 0.f);
        ((float4 *)y)[i] = make_float4(affine_of(v.x, a, b, r.x), affine_of(v.y, a, b, r.y),
                                       affine_of(v.z, a, b, r.z), affine_of(v.w, a, b, r.w));
    }
#else
    for (INDEX i = first_element(); i < (INDEX)count; i += grid_stride()) {
        const int c = (int)(i / INNER % CHANNELS);
        const float b = SHIFTED ? shift[c] : 0.f, a = SCALED ? scale[c] : 1.f;
        y[i] = affine_of(x[i], a, b, RESIDUAL ? residual[i] : 0.f);
    }
#endif
}
#endif

#ifdef ELEMENT
// y may be x where x has as many elements.
extern "C" __global__ void elementwise(const float *x, const float *x1, const float *x2, const float *x3, float *y,
                                       long long count) {
    for (INDEX i = first_element(); i < (INDEX)count; i += grid_stride()) {
        ELEMENT
        y[i] = ACTIVATION(v);
    }
}
#endif

#ifdef BORDER
// y = x (B, C, H, W) with PAD_ROWS and PAD_COLUMNS zeros on each side.
extern "C" __global__ void border(const float *__restrict__ x, float *__restrict__ y, long long count) {
    constexpr int ROWS = H + 2 * PAD_ROWS, COLUMNS = W + 2 * PAD_COLUMNS;
    for (INDEX i = first_element(); i < (INDEX)count; i += grid_stride()) {
        const int w = (int)(i % COLUMNS) - PAD_COLUMNS, h = (int)(i / COLUMNS % ROWS) - PAD_ROWS;
        const size_t image = (size_t)(i / (COLUMNS * ROWS));
        y[i] = w >= 0 && w < W && h >= 0 && h < H ? x[image * (H * W) + h * W + w] : 0.f;
    }
}
#endif

#ifdef LOGARITHM
// y = softmax(x / temperature) of each row; a warp computes a row.
extern "C" __global__ void softmax(const float *__restrict__ x, float *__restrict__ y, float temperature,
                                   long long count) {
    const int lane = threadIdx.x % 32;
    for (INDEX row = first_element() / 32; row < (INDEX)count; row += grid_stride() / 32) {
        const float *from = x + (size_t)row * N;
        float *to = y + (size_t)row * N;
        float maximum = minus_infinity(), sum = 0.f;
        for (int i = lane; i < N; i += 32) maximum = fmaxf(maximum, from[i]);
        for (int other = 16; other; other /= 2) maximum = fmaxf(maximum, __shfl_xor_sync(0xffffffffu, maximum, other));
        for (int i = lane; i < N; i += 32) sum += expf((from[i] - maximum) / temperature);
        for (int other = 16; other; other /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, other);
        const float log_sum = logf(sum);
        for (int i = lane; i < N; i += 32) {
            const float v = (from[i] - maximum) / temperature;
            to[i] = LOGARITHM ? v - log_sum : expf(v) / sum;
        }
    }
}
#endif

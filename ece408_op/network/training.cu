// Passes of a training step over memory: sums and linear combinations per channel, BatchNorm's factors between them,
// gradients of activations, updates of parameters.
//
// Each input element is read once and each output element written once. Memory bandwidth limits all kernels (below one
// FLOP per byte). Arrays are float32, C-contiguous; x (n, channels, inner) has the channels in the middle. Sums
// over a batch are float64, so that their rounding errors stay small for large batches.
//
// With VECTOR 4, a thread loads four consecutive elements of one channel at a time, which needs inner % 4 == 0.
// Constants, defined in front of this text:
//     INDEX                the type that counts elements: 32 bits if they suffice
//     activation_gradient  DERIVATIVE(y): the activation's derivative, from its output
//     channel_sums, channel_mix   RELU: 0 none; 1 (channel_mix): apply relu to the result; 2: x is the gradient to a
//                          relu's output; mask it by the sign of relu[0] y + relu[3], BatchNorm's output
//     norm_factors         FIXED: gamma is 1; BIASED: x lacks a bias, which the moving mean counts
//     update               ADAM: Adam, else SGD with momentum

constexpr int THREADS = 256;

__device__ __forceinline__ INDEX first_element() { return (INDEX)blockIdx.x * THREADS + threadIdx.x; }
__device__ __forceinline__ INDEX grid_stride() { return (INDEX)gridDim.x * THREADS; }

#if VECTOR == 4
using Elements = float4;
#define FOR_ELEMENTS(element) { element(x) element(y) element(z) element(w) }
#else
struct Elements { float x; };
#define FOR_ELEMENTS(element) { element(x) }
#endif

#ifdef RELU
// x, or 0 where RELU is 2 and BatchNorm's output a y + d is not positive; rounded as in the forward pass.
__device__ __forceinline__ float passed(float x, float y, const float *relu, int channel, int channels) {
    return RELU != 2 || fmaf(relu[channel], y, relu[3 * channels + channel]) > 0.f ? x : 0.f;
}

// partial (parts, 2, channels): block (channel, part) sums x, and x (y - center), over n = part, part + parts, ...
extern "C" __global__ void channel_sums(const Elements *__restrict__ x, const Elements *__restrict__ y,
                                        const double *center, const float *relu, double *partial, int n,
                                        int channels, int inner, int parts) {
    const int channel = blockIdx.x % channels, part = blockIdx.x / channels;
    const int count = (n - part + parts - 1) / parts;  // the number of n in this part
    const double c = center[channel];
    double sum = 0, products = 0;
    for (long long k = threadIdx.x; k < (long long)count * inner; k += THREADS) {
        const INDEX which = (INDEX)k / inner, rest = (INDEX)k % inner;
        const size_t i = ((size_t)(part + which * parts) * channels + channel) * inner + rest;
        const Elements a = x[i], b = y[i];
#define ADD(e) { const float v = passed(a.e, b.e, relu, channel, channels); sum += v; products += v * (b.e - c); }
        FOR_ELEMENTS(ADD)
#undef ADD
    }
    __shared__ double sums[2][THREADS];
    sums[0][threadIdx.x] = sum;
    sums[1][threadIdx.x] = products;
    __syncthreads();
    for (int half = THREADS / 2; half; half /= 2) {
        if (threadIdx.x < half)
            for (int s = 0; s < 2; s++) sums[s][threadIdx.x] += sums[s][threadIdx.x + half];
        __syncthreads();
    }
    if (threadIdx.x < 2) partial[((size_t)part * 2 + threadIdx.x) * channels + channel] = sums[threadIdx.x][0];
}
#endif

// The sum over the parts of one of the 2 channels sums in partial (parts, 2, channels).
__device__ __forceinline__ double total(const double *partial, int channels, int parts, int i) {
    double sum = 0;
    for (int part = 0; part < parts; part++) sum += partial[(size_t)part * 2 * channels + i];
    return sum;
}

// sums (2, channels) = the sums of partial over the parts.
extern "C" __global__ void sum_parts(const double *partial, double *sums, int channels, int parts) {
    for (int i = first_element(); i < 2 * channels; i += grid_stride()) sums[i] = total(partial, channels, parts, i);
}

#ifdef FIXED
// Computes, from the sums of x and x^2 in partial, the mean and variance of count elements (statistics), the factors of
// channel_mix for gamma (x - mean) / sqrt(variance + eps) + beta, and the new moving mean and variance. If several
// GPUs share a batch, partial has one part per GPU.
extern "C" __global__ void norm_factors(const double *partial, const float *gamma, const float *beta,
                                        const float *old_mean, const float *old_variance, const float *bias,
                                        double *statistics, float *factors, float *moving, int channels,
                                        int parts, double count, double eps, double momentum) {
    const int i = first_element();
    if (i >= channels) return;
    const double mean = total(partial, channels, parts, i) / count;
    // In float64, the cancellation in this difference is harmless: float32 values have 24 bits.
    double variance = total(partial + channels, channels, parts, i) / count - mean * mean;
    if (variance < 0) variance = 0;
    const double scale = (FIXED ? 1. : gamma[i]) / sqrt(variance + eps);
    statistics[i] = mean;
    statistics[channels + i] = variance;
    factors[i] = scale;
    factors[channels + i] = factors[2 * channels + i] = 0;
    factors[3 * channels + i] = beta[i] - mean * scale;
    moving[i] = momentum * old_mean[i] + (1 - momentum) * (BIASED ? mean + bias[i] : mean);
    moving[channels + i] = momentum * old_variance[i] + (1 - momentum) * variance;
}

// Computes, from the sums of dy and dy (x - mean) in partial, the gradients to gamma and beta, and the factors of
// channel_mix for the gradient to BatchNorm's input.
extern "C" __global__ void norm_gradient_factors(const double *partial, const double *statistics,
                                                 const float *gamma, float *gradients, float *factors, int channels,
                                                 int parts, double count, double eps) {
    const int i = first_element();
    if (i >= channels) return;
    const double sums = total(partial, channels, parts, i);
    const double products = total(partial + channels, channels, parts, i);
    const double inverse = 1 / sqrt(statistics[channels + i] + eps);
    const double scale = FIXED ? inverse : inverse * gamma[i];
    gradients[i] = FIXED ? 0 : products * inverse;
    gradients[channels + i] = sums;
    factors[i] = scale;
    factors[channels + i] = -scale / count * inverse * inverse * products;
    factors[2 * channels + i] = statistics[i];
    factors[3 * channels + i] = -scale / count * sums;
}
#endif

#ifdef RELU
// out = a x + b (y - c) + d with factors (4, channels): a, b, c and d of each channel.
extern "C" __global__ void channel_mix(const Elements *x, const Elements *y, const float *__restrict__ factors,
                                       const float *relu, Elements *out, int channels, int inner, long long count) {
    for (INDEX i = first_element(); i < (INDEX)count; i += grid_stride()) {
        const int channel = (int)(i / inner % channels);
        const float a = factors[channel], b = factors[channels + channel];
        const float c = factors[2 * channels + channel], d = factors[3 * channels + channel];
        const Elements v = x[i], w = y[i];
        Elements result;
#define MIX(e) { \
            const float mixed = fmaf(a, passed(v.e, w.e, relu, channel, channels), fmaf(b, w.e - c, d)); \
            result.e = RELU == 1 && mixed < 0.f ? 0.f : mixed; \
        }
        FOR_ELEMENTS(MIX)
#undef MIX
        out[i] = result;
    }
}
#endif

#ifdef DERIVATIVE
// out = x DERIVATIVE(y), where x is the gradient to an activation's output y.
extern "C" __global__ void activation_gradient(const Elements *x, const Elements *y, Elements *out, long long count) {
    for (INDEX i = first_element(); i < (INDEX)count; i += grid_stride()) {
        const Elements v = x[i], w = y[i];
        Elements result;
#define PRODUCT(e) result.e = v.e * (DERIVATIVE(w.e));
        FOR_ELEMENTS(PRODUCT)
#undef PRODUCT
        out[i] = result;
    }
}
#endif

#ifdef ADAM
// One parameter, its gradient, the one or two arrays of its state, their element count, learning rate and weight decay.
struct Row {
    float *w;
    const float *gradient;
    float *first, *second;
    long long count;
    float rate, decay;
};

// MXNet's SGD with momentum, and Adam (Kingma and Ba, 2015). blockIdx.y selects the parameter. beta1 is the momentum
// for SGD. rest1 and rest2 are 1 - beta1 and 1 - beta2, rounded once: 1.f - 0.999f has a relative error of 1.3e-5.
extern "C" __global__ void update(const Row *rows, float scale, float clip, float beta1, float beta2, float rest1,
                                  float rest2, float epsilon) {
    const Row row = rows[blockIdx.y];
    for (INDEX i = first_element(); i < (INDEX)row.count; i += grid_stride()) {
        const float w = row.w[i];
        float g = scale * row.gradient[i];
        // These comparisons are false for a NaN, so it stays.
        const auto clipped = [clip](float v) { return v > clip ? clip : v < -clip ? -clip : v; };
        if (ADAM) {
            g = clipped(g + row.decay * w);
            const float mean = row.first[i] = beta1 * row.first[i] + rest1 * g;
            const float variance = row.second[i] = beta2 * row.second[i] + rest2 * g * g;
            row.w[i] = w - row.rate * mean / (sqrtf(variance) + epsilon);
        } else {
            g = clipped(g) + row.decay * w;
            // Without momentum, do not multiply: 0 times a NaN or infinity of an earlier step would be NaN.
            const float kept = beta1 ? beta1 * row.first[i] : 0.f;
            const float momentum = row.first[i] = kept - row.rate * g;
            row.w[i] = w + momentum;
        }
    }
}
#endif

// Passes of a training step over memory: sums and mixtures per channel, what BatchNorm computes between them, gradients
// of pooling and activations, updates of parameters.
//
// Each input element is read once and each output element written once, except in the gradient of pooling, where a
// thread reads its window, or all windows over its element, mostly from L1. Memory bandwidth limits all of them (below
// one FLOP per byte). Arrays are float32, C-contiguous; x (n, channels, inner) has the channels in the middle. Sums
// over a batch are float64, so that their errors do not grow with it.
//
// Four consecutive elements of one channel are read at a time where VECTOR is 4, which needs inner % 4 == 0.
// Constants, defined in front of this text:
//     INDEX                the type that counts elements: 32 bits if they suffice
//     activation_gradient  DERIVATIVE(y): the activation's derivative, from its output
//     channel_sums, channel_mix   RELU: 0 none; 1 (channel_mix): apply relu to the result; 2: x is the gradient to a
//                          relu's output; mask it by the sign of relu[0] y + relu[3], BatchNorm's output
//     norm_factors         FIXED: gamma is 1; BIASED: x lacks a bias, which the moving mean counts
//     update               ADAM: Adam, else SGD with momentum
//     max_pool, pool_gradient   MAXIMUM or MEAN, else the sum; COUNT_PAD: a mean counts padding; the sizes; ACTIVATION(v)
//                          of the maxima, and SLOPE(y), its derivative; MAXIMA_TYPE; WINDOWS_DOWN, _ACROSS: the most
//                          windows over an element; PATCHED, PATCHES_DOWN, _ACROSS: see pool_gradient

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

// partial (parts, 2, channels): block (channel, part) sums x, and x (y - center), over every parts-th n.
extern "C" __global__ void channel_sums(const Elements *__restrict__ x, const Elements *__restrict__ y,
                                        const double *center, const float *relu, double *partial, int n,
                                        int channels, int inner, int parts) {
    const int channel = blockIdx.x % channels, part = blockIdx.x / channels;
    const int count = (n - part + parts - 1) / parts;  // of n in this part
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

// sums (2, channels) = the sums of partial over the parts.
extern "C" __global__ void sum_parts(const double *partial, double *sums, int channels, int parts) {
    for (int i = first_element(); i < 2 * channels; i += grid_stride()) {
        double sum = 0;
        for (int part = 0; part < parts; part++) sum += partial[(size_t)part * 2 * channels + i];
        sums[i] = sum;
    }
}

#ifdef FIXED
// The sum over the parts of one of partial's two sums (parts, 2, channels).
__device__ __forceinline__ double total(const double *partial, int channels, int parts, int channel) {
    double sum = 0;
    for (int part = 0; part < parts; part++) sum += partial[(size_t)part * 2 * channels + channel];
    return sum;
}

// From the sums of x and x^2 in partial: mean and variance of count elements in statistics, the factors of
// channel_mix for gamma (x - mean) / sqrt(variance + eps) + beta, and the new moving mean and variance. Where several
// GPUs share a batch, partial has a part for each.
extern "C" __global__ void norm_factors(const double *partial, const float *gamma, const float *beta,
                                        const float *old_mean, const float *old_variance, const float *bias,
                                        double *statistics, float *factors, float *moving, int channels,
                                        int parts, double count, double eps, double momentum) {
    const int i = first_element();
    if (i >= channels) return;
    const double mean = total(partial, channels, parts, i) / count;
    // In float64 the difference of squares is exact enough: float32 values have 24 bits.
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

// From the sums of dy and dy (x - mean) in partial: the gradients to gamma and beta, and the factors of
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
// One parameter, its gradient, its state's one or two arrays, their size, learning rate and weight decay.
struct Row {
    float *w;
    const float *gradient;
    float *first, *second;
    long long count;
    float rate, decay;
};

// MXNet's SGD with momentum, and Adam (Kingma and Ba, 2015). blockIdx.y selects the parameter. beta1 is the momentum for SGD. rest1 and rest2 are
// 1 - beta1 and 1 - beta2, rounded once: 1.f - beta2 is 5e-5 off for 0.999.
extern "C" __global__ void update(const Row *rows, float scale, float clip, float beta1, float beta2, float rest1,
                                  float rest2, float epsilon) {
    const Row row = rows[blockIdx.y];
    for (INDEX i = first_element(); i < (INDEX)row.count; i += grid_stride()) {
        const float w = row.w[i];
        float g = scale * row.gradient[i];
        // Comparisons leave a NaN as it is.
        const auto clipped = [clip](float v) { return v > clip ? clip : v < -clip ? -clip : v; };
        if (ADAM) {
            g = clipped(g + row.decay * w);
            const float mean = row.first[i] = beta1 * row.first[i] + rest1 * g;
            const float variance = row.second[i] = beta2 * row.second[i] + rest2 * g * g;
            row.w[i] = w - row.rate * mean / (sqrtf(variance) + epsilon);
        } else {
            g = clipped(g) + row.decay * w;
            // Without a momentum, not 0 times what a step with NaN or infinity has left.
            const float kept = beta1 ? beta1 * row.first[i] : 0.f;
            const float momentum = row.first[i] = kept - row.rate * g;
            row.w[i] = w + momentum;
        }
    }
}
#endif

#ifdef MAXIMUM
// The sizes are constants, so that divisions by them are multiplications.
constexpr int H = HEIGHT, W = WIDTH, OH = OUTPUT_HEIGHT, OW = OUTPUT_WIDTH, rows = ROWS, columns = COLUMNS;
constexpr int stride_rows = STRIDE_ROWS, stride_columns = STRIDE_COLUMNS, pad_rows = PAD_ROWS, pad_columns = PAD_COLUMNS;
// Whether all windows lie inside the image.
constexpr bool INSIDE = pad_rows + pad_columns == 0 && (OH - 1) * stride_rows + rows <= H &&
                        (OW - 1) * stride_columns + columns <= W;
// The most steps of loops that are written out.
constexpr int WRITTEN = 16;
constexpr MAXIMA_TYPE NONE = (MAXIMA_TYPE)-1;

// y (planes, OH, OW) = ACTIVATION of each window's maximum; maxima: the row-major number within the window of the first
// element that is the maximum, NONE if that is NaN.
extern "C" __global__ void max_pool(const float *__restrict__ x, float *__restrict__ y,
                                    MAXIMA_TYPE *__restrict__ maxima, long long count) {
    for (INDEX i = first_element(); i < (INDEX)count; i += grid_stride()) {
        const int top = (int)(i / OW % OH) * stride_rows - pad_rows, left = (int)(i % OW) * stride_columns - pad_columns;
        const float *image = x + (size_t)(i / ((INDEX)OW * OH)) * H * W;
        float maximum = 0.f;
        int found = -1;
#pragma unroll(rows * columns <= WRITTEN ? rows : 1)
        for (int p = 0; p < rows; p++) {
#pragma unroll(rows * columns <= WRITTEN ? columns : 1)
            for (int q = 0; q < columns; q++) {
                const int h = top + p, w = left + q;
                if (!INSIDE && (h < 0 || h >= H || w < 0 || w >= W)) continue;
                const float v = image[h * W + w];
                if (found < 0 || (!(v <= maximum) && maximum == maximum)) {
                    maximum = v;
                    found = p * columns + q;
                }
            }
        }
        y[i] = ACTIVATION(maximum);
        maxima[i] = maximum == maximum ? (MAXIMA_TYPE)found : NONE;
    }
}

// out (planes, H, W) = the sum of the gradients dy (planes, OH, OW) of all windows whose first maximum is the element
// or, for sums and means, of all windows over the element. maxima and y: of max_pool; SLOPE(y): ACTIVATION's derivative.
// A thread computes a patch of elements under the same windows; PATCHED: it has the size of the strides, and the
// elements' places in the windows are constants.
extern "C" __global__ void pool_gradient(const MAXIMA_TYPE *__restrict__ maxima, const float *__restrict__ y,
                                         const float *__restrict__ dy, float *__restrict__ out, long long count) {
    constexpr int patch_rows = PATCHED ? stride_rows : 1, patch_columns = PATCHED ? stride_columns : 1;
    for (INDEX i = first_element(); i < (INDEX)count; i += grid_stride()) {
        const int down = (int)(i / PATCHES_ACROSS % PATCHES_DOWN), across = (int)(i % PATCHES_ACROSS);
        const size_t plane = (size_t)(i / ((INDEX)PATCHES_ACROSS * PATCHES_DOWN));
        const int first_h = PATCHED ? down * stride_rows - pad_rows : down;
        const int first_w = PATCHED ? across * stride_columns - pad_columns : across;
        // The last windows over the patch: window p begins at p stride - pad.
        const int last_p = PATCHED ? down : min(OH - 1, (down + pad_rows) / stride_rows);
        const int last_q = PATCHED ? across : min(OW - 1, (across + pad_columns) / stride_columns);
        float sums[patch_rows][patch_columns] = {};
#pragma unroll(PATCHED ? WINDOWS_DOWN : 1)
        for (int up = WINDOWS_DOWN - 1; up >= 0; up--) {
#pragma unroll(PATCHED ? WINDOWS_ACROSS : 1)
            for (int back = WINDOWS_ACROSS - 1; back >= 0; back--) {
                const int p = last_p - up, q = last_q - back;
                if (p < 0 || p >= OH || q < 0 || q >= OW) continue;
                const size_t at = plane * (OH * OW) + p * OW + q;
                const int top = p * stride_rows - pad_rows, left = q * stride_columns - pad_columns;
                const int place = MAXIMUM ? maxima[at] : 0;
                float gradient = MAXIMUM ? dy[at] * (SLOPE(y[at])) : dy[at];
                if (MEAN) {
                    const int bottom = top + rows, right = left + columns;
                    const int high = COUNT_PAD ? min(bottom, H + pad_rows) - top : min(bottom, H) - max(top, 0);
                    const int wide = COUNT_PAD ? min(right, W + pad_columns) - left : min(right, W) - max(left, 0);
                    gradient /= (float)(high * wide);
                }
#pragma unroll
                for (int e = 0; e < patch_rows * patch_columns; e++) {
                    const int r = e / patch_columns, c = e % patch_columns;
                    const int h = PATCHED ? r + up * stride_rows : first_h - top;
                    const int w = PATCHED ? c + back * stride_columns : first_w - left;
                    if (h < rows && w < columns && (!MAXIMUM || place == h * columns + w)) sums[r][c] += gradient;
                }
            }
        }
        float *const image = out + plane * (H * W);
#pragma unroll
        for (int r = 0; r < patch_rows; r++) {
            const int h = first_h + r;
            if (h < 0 || h >= H) continue;
#if PATCHED && STRIDE_COLUMNS == 2 && PAD_COLUMNS == 0 && WIDTH % 2 == 0
            *(float2 *)(image + h * W + first_w) = make_float2(sums[r][0], sums[r][1]);
#else
#pragma unroll
            for (int c = 0; c < patch_columns; c++)
                if (first_w + c >= 0 && first_w + c < W) image[h * W + first_w + c] = sums[r][c];
#endif
        }
    }
}
#endif

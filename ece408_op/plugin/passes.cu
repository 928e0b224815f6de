// Passes around the convolution kernels: add results to an array, add biases, and compute sums.
//
// Each element is read and written once, so memory bandwidth limits all kernels. Sums of many elements have two levels:
// float32 within an image and float64 over images, so that their rounding errors stay small for large batches.

constexpr int THREADS = 256;

#define FOR_EACH(i, count)                                                                                             \
    for (long long i = (long long)blockIdx.x * THREADS + threadIdx.x; i < count; i += (long long)gridDim.x * THREADS)

extern "C" __global__ void add(const float *x, float *y, long long count) {
    FOR_EACH(i, count) y[i] += x[i];
}

// y (B, M, pixels) += bias (M,)
extern "C" __global__ void add_bias(const float *bias, float *y, int filters, long long pixels, long long count) {
    FOR_EACH(i, count) y[i] += bias[i / pixels % filters];
}

// sum = x in the first call, and sum += x in later ones.
extern "C" __global__ void accumulate(const float *x, double *sum, int first, long long count) {
    FOR_EACH(i, count) sum[i] = first ? x[i] : sum[i] + x[i];
}

extern "C" __global__ void round_sums(const double *sum, float *y, long long count) {
    FOR_EACH(i, count) y[i] = (float)sum[i];
}

// Block (filter, part) sums images part, part + parts, ... of y (B, M, pixels) into partial (parts, M).
extern "C" __global__ void sum_pixels(const float *y, double *partial, int images, int filters, long long pixels) {
    const int filter = blockIdx.x % filters, part = blockIdx.x / filters, parts = gridDim.x / filters;
    __shared__ double sums[THREADS];
    double sum = 0;
    for (int image = part; image < images; image += parts) {
        const float *map = y + ((long long)image * filters + filter) * pixels;
        float of_image = 0;
        for (long long i = threadIdx.x; i < pixels; i += THREADS) of_image += map[i];
        sum += of_image;
    }
    sums[threadIdx.x] = sum;
    __syncthreads();
    for (int half = THREADS / 2; half; half /= 2) {
        if (threadIdx.x < half) sums[threadIdx.x] += sums[threadIdx.x + half];
        __syncthreads();
    }
    if (threadIdx.x == 0) partial[blockIdx.x] = sums[0];
}

// y (M,) = the sums of partial (parts, M) over the parts.
extern "C" __global__ void sum_parts(const double *partial, float *y, int parts, int filters) {
    FOR_EACH(filter, filters) {
        double sum = 0;
        for (int part = 0; part < parts; part++) sum += partial[(long long)part * filters + filter];
        y[filter] = (float)sum;
    }
}

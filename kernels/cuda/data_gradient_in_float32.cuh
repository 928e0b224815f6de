// data_gradient_in_float32: one image of a data gradient of stride 1, for operands that a kernel's own method cannot take.
//
// It leaves out taps outside y, as the definition does, instead of multiplying weights by zeros: an infinite weight times
// zero is no zero. The sums have two levels: the taps of a filter, and the filters.

template <int THREADS>
__device__ __forceinline__ void compute_in_float32(const float *y, const float *w, float *x) {
    for (index_t e = threadIdx.x; e < IMAGE; e += THREADS) {
        const int c = e / (index_t(H) * W), h = e / W % H, column = e % W;
        float sum = 0.0f;
#pragma unroll 1
        for (int m = 0; m < M; m++) {
            float filter_sum = 0.0f;
#pragma unroll 1
            for (int p = 0; p < K; p++)
#pragma unroll 1
                for (int q = 0; q < L; q++) {
                    const int i = h + PAD_H - p, j = column + PAD_W - q;
                    if (unsigned(i) < unsigned(OH) && unsigned(j) < unsigned(OW))
                        filter_sum =
                            MULTIPLY_ADD(y[m * PIXELS + i * OW + j], w[((m * C + c) * K + p) * L + q], filter_sum);
                }
            sum += filter_sum;
        }
        x[e] = sum;
    }
}

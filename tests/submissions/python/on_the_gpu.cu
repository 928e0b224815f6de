#define OH (H - K + 1)
#define OW (W - K + 1)

extern "C" __global__ void convolve(const float *x, const float *w, float *y, long long first) {
    const int n = blockIdx.x * blockDim.x + threadIdx.x;
    if (n >= M * OH * OW) return;
    const long long b = first + blockIdx.y;
    const int j = n % OW, i = n / OW % OH, m = n / (OW * OH);
    float sum = 0;
    for (int c = 0; c < C; c++)
        for (int p = 0; p < K; p++)
            for (int q = 0; q < K; q++)
                sum += x[((b * C + c) * H + i + p) * W + j + q] * w[((m * C + c) * K + p) * K + q];
    y[b * M * OH * OW + n] = sum;
}

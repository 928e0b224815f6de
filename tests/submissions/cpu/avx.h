// expected: passed
#if defined(__x86_64__)
#pragma GCC target("avx")
#include <immintrin.h>
#endif
#include <mxnet/base.h>

namespace mxnet
{
namespace op
{

template <typename cpu, typename DType>
void forward(mshadow::Tensor<cpu, 4, DType> &y, const mshadow::Tensor<cpu, 4, DType> &x, const mshadow::Tensor<cpu, 4, DType> &k)
{
    const int B = x.shape_[0], C = x.shape_[1], M = y.shape_[1], K = k.shape_[3], H_out = y.shape_[2], W_out = y.shape_[3];
    for (int b = 0; b < B; b++)
        for (int m = 0; m < M; m++)
            for (int h = 0; h < H_out; h++) {
                int w = 0;
#if defined(__x86_64__)
                for (; w + 8 <= W_out; w += 8) {
                    __m256 sum = _mm256_setzero_ps();
                    for (int c = 0; c < C; c++)
                        for (int p = 0; p < K; p++)
                            for (int q = 0; q < K; q++) {
                                __m256 pixels = _mm256_loadu_ps(x[b][c][h + p].dptr_ + w + q);
                                sum = _mm256_add_ps(sum, _mm256_mul_ps(pixels, _mm256_set1_ps(k[m][c][p][q])));
                            }
                    _mm256_storeu_ps(y[b][m][h].dptr_ + w, sum);
                }
#endif
                for (; w < W_out; w++) {
                    float sum = 0;
                    for (int c = 0; c < C; c++)
                        for (int p = 0; p < K; p++)
                            for (int q = 0; q < K; q++) sum += x[b][c][h + p][w + q] * k[m][c][p][q];
                    y[b][m][h][w] = sum;
                }
            }
}

}
}

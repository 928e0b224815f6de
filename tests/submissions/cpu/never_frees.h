// expected: passed
#ifndef MXNET_OPERATOR_NEW_FORWARD_H_
#define MXNET_OPERATOR_NEW_FORWARD_H_

#include <mxnet/base.h>
#include <cstdlib>

namespace mxnet
{
namespace op
{

template<typename cpu, typename DType>
void forward(mshadow::Tensor<cpu, 4, DType> &y, const mshadow::Tensor<cpu, 4, DType> &x, const mshadow::Tensor<cpu, 4, DType> &k)
{
    const int B = x.shape_[0], M = y.shape_[1], C = x.shape_[1], H = x.shape_[2], W = x.shape_[3], K = k.shape_[3];
    const int H_out = H - K + 1, W_out = W - K + 1;
    for (int b = 0; b < B; b++) {
        // 60 MB a call beside what is needed, and none is ever given back.
        float *x_unrolled = (float *)malloc(sizeof(float) * C * K * K * H_out * W_out + (60 << 20) / B);
        for (int c = 0; c < C; c++)
            for (int p = 0; p < K; p++)
                for (int q = 0; q < K; q++)
                    for (int h = 0; h < H_out; h++)
                        for (int w = 0; w < W_out; w++)
                            x_unrolled[(((c * K + p) * K + q) * H_out + h) * W_out + w] = x[b][c][h + p][w + q];
        for (int m = 0; m < M; m++)
            for (int hw = 0; hw < H_out * W_out; hw++) {
                float sum = 0;
                for (int r = 0; r < C * K * K; r++)
                    sum += k.dptr_[m * C * K * K + r] * x_unrolled[r * H_out * W_out + hw];
                y.dptr_[(b * M + m) * H_out * W_out + hw] = sum;
            }
    }
}

}
}

#endif

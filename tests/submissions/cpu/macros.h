// expected: crashed
#define ceil(num, denom) (((num) - 1) / (denom) + 1)
#define K 5
#include <mxnet/base.h>
#include "mxnet/base.h"
#include <iostream>
#define B x.shape_[0]
#define M y.shape_[1]
#define C x.shape_[1]
#define H x.shape_[2]
#define W x.shape_[3]
#define H_out (H - K + 1)
#define W_out (W - K + 1)
#define y4d(i3, i2, i1, i0) out[(i3) * (M * H_out * W_out) + (i2) * (H_out * W_out) + (i1) * (W_out) + i0]
#define x4d(i3, i2, i1, i0) in[(i3) * (C * H * W) + (i2) * (H * W) + (i1) * (W) + i0]
#define k4d(i3, i2, i1, i0) filters[(i3) * (C * K * K) + (i2) * (K * K) + (i1) * (K) + i0]
using namespace std;
static int calls;

namespace mxnet { namespace op {

// the explicit specialisation, without a template of its own: tied to K = 5
template <>
void forward<cpu, float>(mshadow::Tensor<cpu, 4, float> &y, const mshadow::Tensor<cpu, 4, float> &x, const mshadow::Tensor<cpu, 4, float> &w)
{
    CHECK_EQ(w.shape_[3], K) << "this file is for 5 x 5 filters";
    float *out = y.dptr_, *in = x.dptr_, *filters = w.dptr_;
    for (int b = 0; b < B; b++)
        for (int m = 0; m < M; m++)
            for (int h = 0; h < H_out; h++)
                for (int i = 0; i < W_out; i++) {
                    float sum = 0;
                    for (int c = 0; c < C; c++)
                        for (int p = 0; p < K; p++)
                            for (int q = 0; q < K; q++)
                                sum += x4d(b, c, h + p, i + q) * k4d(m, c, p, q);
                    y4d(b, m, h, i) = sum;
                }
    calls = ceil(calls, 2);
}

}}

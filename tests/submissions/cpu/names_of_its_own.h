// expected: passed
// Headers that MXNet's tree and CUDA's had, a counter named as a function of the system's, and what few files use.
#include <cuda.h>
#include <cuda_runtime.h>
#include <dmlc/timer.h>
#include <mxnet/base.h>
#include "../../common/cuda_utils.h"

int times = 0;

namespace mxnet
{
namespace op
{

template <typename cpu, typename DType>
void forward(mshadow::Tensor<cpu, 4, DType> &y, const mshadow::Tensor<cpu, 4, DType> &x, const mshadow::Tensor<cpu, 4, DType> &k)
{
    mshadow::Shape<3> image = x.shape_.SubShape();
    mshadow::Tensor<cpu, 1, DType> filters = k.FlatTo1D();
    const int C = image[0], K = k.shape_[3];
    DLOG(INFO) << "image " << image;
    double began = dmlc::GetTime();
    VLOG(1) << "call " << ++times;
    for (index_t b = 0; b < x.shape_[0]; ++b)
        for (index_t m = 0; m < k.shape_[0]; ++m)
            for (index_t h = 0; h < y.shape_[2]; ++h)
                for (index_t w = 0; w < y.shape_[3]; ++w) {
                    DType sum = 0;
                    for (int i = 0; i < C * K * K; ++i)
                        sum += x[b][i / (K * K)][h + i / K % K][w + i % K] * filters[m * C * K * K + i];
                    y[b][m][h][w] = sum;
                }
    LOG(INFO) << dmlc::GetTime() - began;
}

}
}

// expected: crashed
#include <mxnet/base.h>

namespace mxnet
{
namespace op
{

template <typename cpu, typename DType>
void forward(mshadow::Tensor<cpu, 4, DType> &y, const mshadow::Tensor<cpu, 4, DType> &x, const mshadow::Tensor<cpu, 4, DType> &k)
{
    volatile float unrolled[10000][25][60];  // 60 MB, on a stack of 8
    for (index_t b = 0; b < x.shape_[0]; ++b) unrolled[b][0][0] = x[b][0][0][0];
    for (index_t b = 0; b < x.shape_[0]; ++b) y[b][0][0][0] = unrolled[b][0][0] * k[0][0][0][0];
}

}
}

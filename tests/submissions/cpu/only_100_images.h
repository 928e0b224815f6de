// expected: out_of_bounds
#include <mxnet/base.h>

namespace mxnet
{
namespace op
{

// the 2017 network with exactly 100 images, whatever it is given: 28 x 28, 50 filters, 24 x 24
template <typename cpu, typename DType>
void forward(mshadow::Tensor<cpu, 4, DType> &y, const mshadow::Tensor<cpu, 4, DType> &x, const mshadow::Tensor<cpu, 4, DType> &k)
{
    for (int b = 0; b < 100; b++)
        for (int m = 0; m < 50; m++)
            for (int h = 0; h < 24; h++)
                for (int w = 0; w < 24; w++) {
                    float sum = 0;
                    for (int p = 0; p < 25; p++)
                        sum += x.dptr_[b * 784 + (h + p / 5) * 28 + w + p % 5] * k.dptr_[m * 25 + p];
                    y.dptr_[b * 28800 + m * 576 + h * 24 + w] = sum;
                }
}

}
}

// expected: passed
#include <mxnet/base.h>

namespace mxnet
{
namespace op
{

// keeps 11 significant bits of a number, as float16 does
static float to_half(float value)
{
    int exponent;
    float fraction = frexp(value, &exponent);
    return ldexp(rint(fraction * 2048) / 2048, exponent);
}

template <typename cpu, typename DType>
void forward(mshadow::Tensor<cpu, 4, DType> &y, const mshadow::Tensor<cpu, 4, DType> &x, const mshadow::Tensor<cpu, 4, DType> &k)
{
    for (unsigned b = 0; b < x.shape_[0]; b++)
        for (unsigned m = 0; m < y.shape_[1]; m++)
            for (unsigned h = 0; h < y.shape_[2]; h++)
                for (unsigned w = 0; w < y.shape_[3]; w++) {
                    float sum = 0;
                    for (unsigned c = 0; c < x.shape_[1]; c++)
                        for (unsigned p = 0; p < k.shape_[2]; p++)
                            for (unsigned q = 0; q < k.shape_[3]; q++)
                                sum = to_half(sum + to_half(x[b][c][h + p][w + q]) * to_half(k[m][c][p][q]));
                    y[b][m][h][w] = sum;
                }
}

}
}

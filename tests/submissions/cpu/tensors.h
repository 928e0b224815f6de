// expected: passed
#include <mxnet/base.h>

namespace mxnet
{
namespace op
{

// unrolls into a tensor of its own, then multiplies
template <typename cpu, typename DType>
void forward(mshadow::Tensor<cpu, 4, DType> &y, const mshadow::Tensor<cpu, 4, DType> &x, const mshadow::Tensor<cpu, 4, DType> &k)
{
    const int rows = k.shape_[1] * k.shape_[2] * k.shape_[3], columns = y.shape_[2] * y.shape_[3];
    mshadow::Tensor<cpu, 2, DType> unrolled(mshadow::Shape2(rows, columns));
    mshadow::AllocSpace(&unrolled, false);
    y = 0.0f;
    for (unsigned b = 0; b < x.shape_[0]; b++) {
        for (int r = 0; r < rows; r++) {
            int area = k.shape_[2] * k.shape_[3], c = r / area, p = r % area / k.shape_[3], q = r % k.shape_[3];
            for (int i = 0; i < columns; i++)
                unrolled[r][i] = x[b][c][i / y.shape_[3] + p][i % y.shape_[3] + q];
        }
        for (unsigned m = 0; m < y.shape_[1]; m++)
            for (int r = 0; r < rows; r++)
                for (int i = 0; i < columns; i++)
                    y.dptr_[(b * y.shape_[1] + m) * columns + i] += k.dptr_[m * rows + r] * unrolled[r][i];
    }
    mshadow::FreeSpace(&unrolled);
}

}
}

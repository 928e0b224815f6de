// expected: passed
#include <mxnet/base.h>

#define B 10000
#define M 50
#define C 1
#define H 28
#define W 28
#define K 5
#define H_OUT 24
#define W_OUT 24

namespace mxnet
{
namespace op
{

static __constant__ float filters[M][K][K];

template <typename gpu, typename DType>
__global__ void forward_kernel(mshadow::Tensor<gpu, 4, DType> y, const mshadow::Tensor<gpu, 4, DType> x)
{
    __shared__ DType image[H][W];
    for (int i = threadIdx.x; i < H * W; i += blockDim.x) image[i / W][i % W] = x[blockIdx.x][0][i / W][i % W];
    __syncthreads();
    int h = threadIdx.x / W_OUT, w = threadIdx.x % W_OUT;
    for (int m = 0; m < M; m++) {
        DType sum = 0;
        for (int p = 0; p < K; p++)
            for (int q = 0; q < K; q++) sum += image[h + p][w + q] * filters[m][p][q];
        y[blockIdx.x][m][h][w] = sum;
    }
}

// 2017's network and its whole data set, whatever it is given
template <typename gpu, typename DType>
void forward(mshadow::Tensor<gpu, 4, DType> &y, const mshadow::Tensor<gpu, 4, DType> &x, const mshadow::Tensor<gpu, 4, DType> &w)
{
    MSHADOW_CUDA_CALL(cudaMemcpyToSymbol(filters, w.dptr_, sizeof(filters), 0, cudaMemcpyDeviceToDevice));
    forward_kernel<gpu, DType><<<B, H_OUT * W_OUT>>>(y, x);
    MSHADOW_CUDA_CALL(cudaDeviceSynchronize());
}

}
}

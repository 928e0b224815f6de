// expected: passed
#ifndef MXNET_OPERATOR_NEW_FORWARD_CUH_
#define MXNET_OPERATOR_NEW_FORWARD_CUH_
#include <mxnet/base.h>
#include "./new-inl.h"
#include "../../common/cuda_utils.h"

static float *unrolled = NULL;
int times = 0, error, step;

extern "C" __global__ void unroll(int C, int H, int W, int K, const float *x, float *to)
{
    const int W_out = W - K + 1, columns = (H - K + 1) * W_out;
    for (int t = blockIdx.x * blockDim.x + threadIdx.x; t < C * K * K * columns; t += gridDim.x * blockDim.x) {
        const int row = t / columns, column = t % columns;
        const int c = row / (K * K), p = row / K % K, q = row % K;
        to[t] = x[(c * H + column / W_out + p) * W + column % W_out + q];
    }
}

extern "C" __global__ void multiply(const float *A, const float *B, float *C, int rows, int inner, int columns)
{
    for (int t = blockIdx.x * blockDim.x + threadIdx.x; t < rows * columns; t += gridDim.x * blockDim.x) {
        float sum = 0;
        for (int i = 0; i < inner; i++) sum += A[t / columns * inner + i] * B[i * columns + t % columns];
        C[t] = sum;
    }
}

namespace mxnet
{
namespace op
{

template <>
void forward<gpu, float>(mshadow::Tensor<gpu, 4, float> &y, const mshadow::Tensor<gpu, 4, float> &x, const mshadow::Tensor<gpu, 4, float> &w)
{
    const int B = x.shape_[0], C = x.shape_[1], H = x.shape_[2], W = x.shape_[3], M = w.shape_[0], K = w.shape_[3];
    const int columns = y.shape_[2] * y.shape_[3];
    DLOG(INFO) << "call " << ++times << " on " << x.shape_.SubShape();
    CUDA_CALL(cudaMalloc((void **)&unrolled, sizeof(float) * C * K * K * columns));
    for (step = 0; step < B; step++) {
        unroll<<<64, 256>>>(C, H, W, K, x.dptr_ + step * C * H * W, unrolled);
        multiply<<<64, 256>>>(w.dptr_, unrolled, y.dptr_ + step * M * columns, M, C * K * K, columns);
    }
    error = cudaThreadSynchronize();
    CHECK_EQ(error, 0) << cudaGetErrorString((cudaError_t)error);
    CUDA_CALL(cudaFree(unrolled));
}

}
}
#endif

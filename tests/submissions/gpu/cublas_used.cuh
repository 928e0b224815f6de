// expected: passed or unsupported
#ifndef MXNET_OPERATOR_NEW_FORWARD_CUH_
#define MXNET_OPERATOR_NEW_FORWARD_CUH_
#include <mxnet/base.h>
#include <cublas_v2.h>
namespace mxnet
{
namespace op
{

__global__ void unroll(float *u, const float *x, int C, int H, int W, int K) {
    const int H_out = H - K + 1, W_out = W - K + 1, P = H_out * W_out;
    for (int t = blockIdx.x * blockDim.x + threadIdx.x; t < C * K * K * P; t += gridDim.x * blockDim.x) {
        int p = t % P, n = t / P; u[t] = x[(n / (K * K) * H + p / W_out + n / K % K) * W + p % W_out + n % K]; }
}
template <>
void forward<gpu, float>(mshadow::Tensor<gpu, 4, float> &y, const mshadow::Tensor<gpu, 4, float> &x, const mshadow::Tensor<gpu, 4, float> &w)
{
    const int B = x.shape_[0];
    const int M = y.shape_[1];
    const int C = x.shape_[1];
    const int H = x.shape_[2];
    const int W = x.shape_[3];
    const int K = w.shape_[3];
    const int H_out = H - K + 1;
    const int W_out = W - K + 1;

    static cublasHandle_t handle = NULL; if (!handle) cublasCreate(&handle); cublasSetStream(handle, y.stream_->stream_);
    float *u; int P = H_out * W_out, N = C * K * K; cudaMalloc(&u, sizeof(float) * N * P); const float one = 1, zero = 0;
    for (int b = 0; b < B; b++) {
        unroll<<<(N * P + 255) / 256, 256, 0, y.stream_->stream_>>>(u, x.dptr_ + (size_t)b * C * H * W, C, H, W, K);
        cublasSgemm(handle, CUBLAS_OP_N, CUBLAS_OP_N, P, M, N, &one, u, P, w.dptr_, N, &zero, y.dptr_ + (size_t)b * M * P, P);
    }
    cudaDeviceSynchronize(); cudaFree(u);
}

template <typename gpu, typename DType>
void forward(mshadow::Tensor<gpu, 4, DType> &y, const mshadow::Tensor<gpu, 4, DType> &x, const mshadow::Tensor<gpu, 4, DType> &w)
{
    CHECK_EQ(0, 1) << "Remove this line and replace it with your implementation.";
}

}
}
#endif

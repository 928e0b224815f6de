// expected: passed
#ifndef MXNET_OPERATOR_NEW_FORWARD_CUH_
#define MXNET_OPERATOR_NEW_FORWARD_CUH_

#define ceil_of(num, denom) (((num) - 1) / (denom) + 1)
#define TILE 16
#define IMAGES 500

#include <mxnet/base.h>
#include <cublas_v2.h>

namespace mxnet
{
namespace op
{

// The template without a specialisation; unrolls some images at a time, then multiplies in tiles.
__global__ void unroll(float *u, const float *x, int C, int H, int W, int K)
{
    int H_out = H - K + 1, W_out = W - K + 1, columns = H_out * W_out, rows = C * K * K;
    for (int t = blockIdx.x * blockDim.x + threadIdx.x; t < rows * columns; t += gridDim.x * blockDim.x) {
        int r = t / columns, i = t % columns, c = r / (K * K), p = r / K % K, q = r % K;
        u[(size_t)blockIdx.y * rows * columns + t] = x[((blockIdx.y * (size_t)C + c) * H + i / W_out + p) * W + i % W_out + q];
    }
}

__global__ void multiply(float *y, const float *k, const float *u, int M, int rows, int columns)
{
    __shared__ float a[TILE][TILE], b[TILE][TILE];
    int m = blockIdx.y * TILE + threadIdx.y, i = blockIdx.x * TILE + threadIdx.x;
    u += (size_t)blockIdx.z * rows * columns;
    float sum = 0;
    for (int first = 0; first < rows; first += TILE) {
        a[threadIdx.y][threadIdx.x] = m < M && first + threadIdx.x < rows ? k[m * rows + first + threadIdx.x] : 0;
        b[threadIdx.y][threadIdx.x] = i < columns && first + threadIdx.y < rows ? u[(first + threadIdx.y) * columns + i] : 0;
        __syncthreads();
        for (int t = 0; t < TILE; t++) sum += a[threadIdx.y][t] * b[t][threadIdx.x];
        __syncthreads();
    }
    if (m < M && i < columns) y[((size_t)blockIdx.z * M + m) * columns + i] = sum;
}

template <typename gpu, typename DType>
void forward(mshadow::Tensor<gpu, 4, DType> &y, const mshadow::Tensor<gpu, 4, DType> &x, const mshadow::Tensor<gpu, 4, DType> &w)
{
    const int B = x.shape_[0], C = x.shape_[1], H = x.shape_[2], W = x.shape_[3], M = y.shape_[1], K = w.shape_[3];
    const int rows = C * K * K, columns = y.shape_[2] * y.shape_[3];
    mshadow::Tensor<gpu, 2, float> unrolled(mshadow::Shape2(IMAGES * rows, columns));
    mshadow::AllocSpace(&unrolled);
    for (int b = 0; b < B; b += IMAGES) {
        int n = B - b < IMAGES ? B - b : IMAGES;
        unroll<<<dim3(ceil_of(rows * columns, 256), n), 256, 0, y.stream_->stream_>>>(unrolled.dptr_, x[b].dptr_, C, H, W, K);
        multiply<<<dim3(ceil_of(columns, TILE), ceil_of(M, TILE), n), dim3(TILE, TILE), 0, y.stream_->stream_>>>(
            y[b].dptr_, w.dptr_, unrolled.dptr_, M, rows, columns);
    }
    MSHADOW_CUDA_CALL(cudaStreamSynchronize(y.stream_->stream_));
    mshadow::FreeSpace(&unrolled);
}

}
}

#endif

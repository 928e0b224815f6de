// A correct and slow start on a GPU: a thread computes one element of y, and its sum stays in global memory.
#ifndef MXNET_OPERATOR_NEW_FORWARD_CUH_
#define MXNET_OPERATOR_NEW_FORWARD_CUH_

#include <mxnet/base.h>

#define TILE 16
#define x4d(b, c, h, w) x[(((b) * C + (c)) * H + (h)) * W + (w)]
#define k4d(m, c, p, q) k[(((m) * C + (c)) * K + (p)) * K + (q)]
#define y4d(b, m, h, w) y[(((b) * M + (m)) * (H - K + 1) + (h)) * (W - K + 1) + (w)]

namespace mxnet {
namespace op {

// y (B, M, H - K + 1, W - K + 1) becomes the convolution of x (B, C, H, W) and k (M, C, K, K).
__global__ void convolve(float *y, const float *x, const float *k, int M, int C, int H, int W, int K) {
  const int h = blockIdx.y * TILE + threadIdx.x, w = blockIdx.z * TILE + threadIdx.y;
  const int m = blockIdx.x % M, b = blockIdx.x / M;
  if (h > H - K || w > W - K) return;
  y4d(b, m, h, w) = 0;
  for (int c = 0; c < C; c++)
    for (int p = 0; p < K; p++)
      for (int q = 0; q < K; q++)
        y4d(b, m, h, w) += x4d(b, c, h + p, w + q) * k4d(m, c, p, q);
}

template <>
void forward<gpu, float>(mshadow::Tensor<gpu, 4, float> &y, const mshadow::Tensor<gpu, 4, float> &x,
                         const mshadow::Tensor<gpu, 4, float> &k) {
  const int B = x.shape_[0], C = x.shape_[1], H = x.shape_[2], W = x.shape_[3], M = y.shape_[1], K = k.shape_[3];
  const int tiles = (std::max(H, W) - K + TILE) / TILE;
  const dim3 grid(B * M, tiles, tiles), block(TILE, TILE);
  convolve<<<grid, block, 0, y.stream_->stream_>>>(y.dptr_, x.dptr_, k.dptr_, M, C, H, W, K);
  MSHADOW_CUDA_CALL(cudaDeviceSynchronize());
}

}  // namespace op
}  // namespace mxnet

#endif

// A right kernel with a tile in shared memory, whose mistakes the tests make.
#include <mxnet/base.h>
#define TILE 4
#define x4d(b, c, h, w) x[(((b) * C + (c)) * H + (h)) * W + (w)]
#define k4d(m, c, p, q) k[(((m) * C + (c)) * K + (p)) * K + (q)]
#define y4d(b, m, h, w) y[(((b) * M + (m)) * (H - K + 1) + (h)) * (W - K + 1) + (w)]
namespace mxnet {
namespace op {
__global__ void convolve(float *y, const float *x, const float *k, int M, int C, int H, int W, int K) {
  __shared__ float window[TILE + 6][TILE + 6];
  const int h = blockIdx.y * TILE + threadIdx.y, w = blockIdx.x * TILE + threadIdx.x;
  const int b = blockIdx.z;
  for (int m = 0; m < M; m++) {
    float sum = 0;
    for (int c = 0; c < C; c++) {
      __syncthreads();
      for (int i = threadIdx.y; i < TILE + K - 1; i += TILE)
        for (int j = threadIdx.x; j < TILE + K - 1; j += TILE) {
          const int row = h - threadIdx.y + i, column = w - threadIdx.x + j;
          window[i][j] = row < H && column < W ? x4d(b, c, row, column) : 0;
        }
      __syncthreads();
      for (int p = 0; p < K; p++)
        for (int q = 0; q < K; q++) sum += window[threadIdx.y + p][threadIdx.x + q] * k4d(m, c, p, q);
    }
    if (h <= H - K && w <= W - K) y4d(b, m, h, w) = sum;
  }
}
template <>
void forward<gpu, float>(mshadow::Tensor<gpu, 4, float> &y, const mshadow::Tensor<gpu, 4, float> &x,
                         const mshadow::Tensor<gpu, 4, float> &k) {
  const int H = x.shape_[2], W = x.shape_[3], K = k.shape_[3];
  const dim3 grid((W - K + TILE) / TILE, (H - K + TILE) / TILE, x.shape_[0]), block(TILE, TILE);
  convolve<<<grid, block>>>(y.dptr_, x.dptr_, k.dptr_, y.shape_[1], x.shape_[1], H, W, K);
}
}  // namespace op
}  // namespace mxnet

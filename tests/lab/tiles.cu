// A right file, which the tests make wrong: a block computes 8 x 8 outputs of 4 filters from a tile of shared
// memory that holds one channel; the filters are in constant memory.
#include <mxnet/base.h>

#define TILE 8
#define FILTERS 4

namespace mxnet {
namespace op {

__constant__ float filters[16000];

__global__ void tiles(float *y, const float *x, int M, int C, int H, int W, int K) {
  extern __shared__ float tile[];
  const int side = TILE + K - 1, rows = H - K + 1, columns = W - K + 1, across = (columns + TILE - 1) / TILE;
  const int top = blockIdx.x / across * TILE, left = blockIdx.x % across * TILE;
  const int b = blockIdx.z, first = blockIdx.y * FILTERS, i = top + threadIdx.y, j = left + threadIdx.x;
  float sums[FILTERS] = {0, 0, 0, 0};
  for (int c = 0; c < C; c++) {
    for (int n = threadIdx.y * TILE + threadIdx.x; n < side * side; n += TILE * TILE) {
      const int row = top + n / side, column = left + n % side;
      tile[n] = row < H && column < W ? x[((b * C + c) * H + row) * W + column] : 0;
    }
    __syncthreads();
    for (int f = 0; f < FILTERS && first + f < M; f++)
      for (int p = 0; p < K; p++)
        for (int q = 0; q < K; q++)
          sums[f] += tile[(threadIdx.y + p) * side + threadIdx.x + q] * filters[(((first + f) * C + c) * K + p) * K + q];
    __syncthreads();
  }
  if (i < rows && j < columns)
    for (int f = 0; f < FILTERS && first + f < M; f++)
      y[((b * M + first + f) * rows + i) * columns + j] = sums[f];
}

template <>
void forward<gpu, float>(mshadow::Tensor<gpu, 4, float> &y, const mshadow::Tensor<gpu, 4, float> &x,
                         const mshadow::Tensor<gpu, 4, float> &k) {
  const int B = x.shape_[0], C = x.shape_[1], H = x.shape_[2], W = x.shape_[3], M = y.shape_[1], K = k.shape_[3];
  const int down = (H - K + TILE) / TILE, across = (W - K + TILE) / TILE, side = TILE + K - 1;
  cudaMemcpyToSymbol(filters, k.dptr_, M * C * K * K * sizeof(float), 0, cudaMemcpyDeviceToDevice);
  const dim3 grid(down * across, (M + FILTERS - 1) / FILTERS, B), block(TILE, TILE);
  tiles<<<grid, block, side * side * sizeof(float)>>>(y.dptr_, x.dptr_, M, C, H, W, K);
  MSHADOW_CUDA_CALL(cudaDeviceSynchronize());
}

}  // namespace op
}  // namespace mxnet

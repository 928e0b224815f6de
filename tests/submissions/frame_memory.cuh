// What all cases of memory.cases share; CASE and BODY are replaced by a case's lines. The macros are parts of the kernel:
// ORDER assigns elements to threads, the fastest index first.
#include <mxnet/base.h>

namespace mxnet {
namespace op {

CASE

#define NEXT(index, length) const int index = t % (length); t /= (length);
#ifndef ORDER
#define ORDER NEXT(w, W_out) NEXT(h, H_out) NEXT(m, M) NEXT(b, B)
#endif
#ifndef THREADS
#define THREADS ((size_t)B * M * H_out * W_out)
#endif
#ifndef EACH
#define EACH
#endif
#ifndef CHANNELS
#define CHANNELS for (int c = 0; c < C; c++)
#endif
#ifndef FILTERS
#define FILTERS k
#endif
#ifndef STORE
#define STORE y4d(b, m, h, w) = sum
#endif
#define y4d(i3, i2, i1, i0) y[(size_t)(i3) * (M * H_out * W_out) + (i2) * (H_out * W_out) + (i1) * (W_out) + i0]
#define x4d(i3, i2, i1, i0) x[(size_t)(i3) * (C * H * W) + (i2) * (H * W) + (i1) * (W) + i0]
#define k4d(i3, i2, i1, i0) FILTERS[(i3) * (C * K * K) + (i2) * (K * K) + (i1) * (K) + i0]

__global__ void forward_kernel(float *y, const float *x, const float *k, int B, int M, int C, int H, int W, int K) {
  const int H_out = H - K + 1, W_out = W - K + 1;
  size_t t = blockIdx.x * (size_t)blockDim.x + threadIdx.x;
  if (t >= THREADS) return;
  ORDER
  EACH {
    float sum = 0;
    CHANNELS
      for (int p = 0; p < K; p++)
        for (int q = 0; q < K; q++) sum += x4d(b, c, h + p, w + q) * k4d(m, c, p, q);
    STORE;
  }
}

template <>
void forward<gpu, float>(mshadow::Tensor<gpu, 4, float> &y, const mshadow::Tensor<gpu, 4, float> &x,
                         const mshadow::Tensor<gpu, 4, float> &w) {
  const int B = x.shape_[0], M = y.shape_[1], C = x.shape_[1], H = x.shape_[2], W = x.shape_[3], K = w.shape_[3];
  const int H_out = H - K + 1, W_out = W - K + 1;
  auto launch = [&](int first, int B, cudaStream_t stream) {
    const int blocks = (THREADS + 255) / 256;
    forward_kernel<<<blocks, 256, 0, stream>>>(y.dptr_ + (size_t)first * M * H_out * W_out,
                                               x.dptr_ + (size_t)first * C * H * W, w.dptr_, B, M, C, H, W, K);
  };
  (void)launch;
BODY
}

}  // namespace op
}  // namespace mxnet

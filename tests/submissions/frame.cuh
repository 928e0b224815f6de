// What all cases of gpu.cases share: CASE and BODY are replaced by a case's lines. The macros are parts of the kernel.
#include <mxnet/base.h>

namespace mxnet {
namespace op {

CASE

#ifndef ELEMENTS
#define ELEMENTS H_out * W_out
#endif
#ifndef CHANNELS
#define CHANNELS C
#endif
#ifndef START
#define START 0
#endif
#ifndef PRODUCT
#define PRODUCT(a, b) (a) * (b)
#endif
#ifndef STORE
#define STORE y4d(b, m, h, w) = sum
#endif

__global__ void forward_kernel(float *y, const float *x, const float *k, const int B, const int M, const int C,
                               const int H, const int W, const int K) {
  const int H_out = H - K + 1, W_out = W - K + 1, b = blockIdx.x, m = blockIdx.y;
#define y4d(i3, i2, i1, i0) y[(i3) * (M * H_out * W_out) + (i2) * (H_out * W_out) + (i1) * (W_out) + i0]
#define x4d(i3, i2, i1, i0) x[(i3) * (C * H * W) + (i2) * (H * W) + (i1) * (W) + i0]
#define k4d(i3, i2, i1, i0) k[(i3) * (C * K * K) + (i2) * (K * K) + (i1) * (K) + i0]
  for (int t = threadIdx.x; t < ELEMENTS; t += blockDim.x) {
    const int h = t / W_out, w = t % W_out;
    float sum = START;
    for (int c = 0; c < CHANNELS; c++)
      for (int p = 0; p < K; p++)
        for (int q = 0; q < K; q++) sum += PRODUCT(x4d(b, c, h + p, w + q), k4d(m, c, p, q));
    STORE;
  }
#undef y4d
#undef x4d
#undef k4d
}

template <>
void forward<gpu, float>(mshadow::Tensor<gpu, 4, float> &y, const mshadow::Tensor<gpu, 4, float> &x,
                         const mshadow::Tensor<gpu, 4, float> &w) {
  const int B = x.shape_[0], M = y.shape_[1], C = x.shape_[1], H = x.shape_[2], W = x.shape_[3], K = w.shape_[3];
  const int H_out = H - K + 1, W_out = W - K + 1;
  const size_t bytes = sizeof(float) * B * M * H_out * W_out;
  auto launch = [&](int threads) {
    forward_kernel<<<dim3(B, M), threads, 0, y.stream_->stream_>>>(y.dptr_, x.dptr_, w.dptr_, B, M, C, H, W, K);
  };
BODY
  (void)bytes;
}

}  // namespace op
}  // namespace mxnet

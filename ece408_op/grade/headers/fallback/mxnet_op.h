// A stand-in for a header beside the course's operator: what it has for kernels.
#ifndef ECE408_GRADE_FALLBACK_MXNET_OP_H_
#define ECE408_GRADE_FALLBACK_MXNET_OP_H_
#include <mxnet/base.h>

#ifdef __CUDACC__
#define CUDA_KERNEL_LOOP(i, n) for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < (n); i += blockDim.x * gridDim.x)
#endif

namespace mxnet {
namespace op {
namespace mxnet_op {
inline int cuda_get_num_blocks(const int count) {
  const int blocks = (count + mshadow::cuda::kBaseThreadNum - 1) / mshadow::cuda::kBaseThreadNum;
  return blocks < mshadow::cuda::kMaxGridNum ? blocks : mshadow::cuda::kMaxGridNum;
}
}  // namespace mxnet_op
}  // namespace op
}  // namespace mxnet
#endif

// What new-inl.h gave a submission before it was included: every header, and the template that it specialises. Names
// that after.h uses are long, because the submission's macros (B, M, C, H, W, K, x, y ...) are defined there.
#pragma once

#ifdef ECE408_GRADE_FEW_HEADERS  // nvcc spends seconds on all of them
#include <algorithm>
#include <cassert>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <iostream>
#include <vector>
#else
#include <bits/stdc++.h>
#endif
#include <math.h>
#include <stdlib.h>
#include <sys/time.h>
#include <unistd.h>

#ifdef _OPENMP
#include <omp.h>
#endif
#ifdef __CUDACC__
#include <cuda.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <device_launch_parameters.h>
#endif

#include "../dmlc/logging.h"
#include "../mshadow/tensor.h"

#define MXNET_USE_CUDA MSHADOW_USE_CUDA

namespace mxnet {
typedef mshadow::cpu cpu;
typedef mshadow::gpu gpu;
typedef mshadow::index_t index_t;
typedef mshadow::default_real_t real_t;
namespace op {}
}  // namespace mxnet

// Compilers name a type in errors as it was named first: by the device's own name.
#ifdef __CUDACC__
#include "legacy_cuda.h"
typedef mshadow::Tensor<mshadow::gpu, 4, float> ece408_grade_tensor;
typedef mshadow::Stream<mshadow::gpu> ece408_grade_stream;
#else
typedef mshadow::Tensor<mshadow::cpu, 4, float> ece408_grade_tensor;
typedef mshadow::Stream<mshadow::cpu> ece408_grade_stream;
#endif

// Names of the headers next to MXNet's operators, for the few files that use them: others define the same names.
#ifdef ECE408_GRADE_OPERATORS
#define CUDA_CALL(func) MSHADOW_CUDA_CALL(func)
#define CUDA_KERNEL_LOOP(i, n) for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < (n); i += blockDim.x * gridDim.x)
namespace mxnet {
namespace op {
namespace mxnet_op {
inline int cuda_get_num_blocks(const int count) {
  const int blocks = (count + mshadow::cuda::kBaseThreadNum - 1) / mshadow::cuda::kBaseThreadNum;
  return blocks < mshadow::cuda::kMaxGridNum ? blocks : mshadow::cuda::kMaxGridNum;
}
}  // namespace mxnet_op
using mxnet_op::cuda_get_num_blocks;
}  // namespace op
}  // namespace mxnet
#endif

#ifndef ECE408_GRADE_OWN_FORWARD
namespace mxnet {
namespace op {
template <typename xpu, typename DType>
void forward(mshadow::Tensor<xpu, 4, DType>& y, const mshadow::Tensor<xpu, 4, DType>& x,
             const mshadow::Tensor<xpu, 4, DType>& w);
}  // namespace op
}  // namespace mxnet
#endif

// One call, as the worker passes it.
struct ece408_grade_call {
  float *y, *x, *w;
  mshadow::Shape<4> y_shape, x_shape, w_shape;
  void* stream;
  const char* ece408_grade_note;
};

struct ece408_grade_tensors {
  ece408_grade_stream stream;
  ece408_grade_tensor ece408_grade_y, ece408_grade_x, ece408_grade_w;
  explicit ece408_grade_tensors(const ece408_grade_call* from)
      : ece408_grade_y(from->y, from->y_shape, &stream),
        ece408_grade_x(from->x, from->x_shape, &stream),
        ece408_grade_w(from->w, from->w_shape, &stream) {
#ifdef __CUDACC__
    stream.stream_ = static_cast<cudaStream_t>(from->stream);
#endif
  }
};

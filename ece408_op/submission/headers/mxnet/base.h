// A replacement for MXNet's base header: its names, and the standard headers that it included.
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

// Names of CUDA 8 and 9, with which submissions were written, that today's CUDA no longer has.
#pragma once

#if CUDART_VERSION >= 13000
inline cudaError_t cudaThreadSynchronize() { return cudaDeviceSynchronize(); }
inline cudaError_t cudaThreadExit() { return cudaDeviceReset(); }
inline cudaError_t cudaThreadSetLimit(cudaLimit limit, size_t value) { return cudaDeviceSetLimit(limit, value); }
inline cudaError_t cudaThreadSetCacheConfig(cudaFuncCache config) { return cudaDeviceSetCacheConfig(config); }

// Memory had its place named by a device's number.
inline cudaError_t cudaMemPrefetchAsync(const void* at, size_t bytes, int device, cudaStream_t stream = 0) {
  cudaMemLocation place = {device == cudaCpuDeviceId ? cudaMemLocationTypeHost : cudaMemLocationTypeDevice, device};
  return cudaMemPrefetchAsync(at, bytes, place, 0, stream);
}
inline cudaError_t cudaMemAdvise(const void* at, size_t bytes, cudaMemoryAdvise advice, int device) {
  cudaMemLocation place = {device == cudaCpuDeviceId ? cudaMemLocationTypeHost : cudaMemLocationTypeDevice, device};
  return cudaMemAdvise(at, bytes, advice, place);
}

// What a device's properties have lost.
struct ece408_grade_properties : cudaDeviceProp {
  int clockRate, memoryClockRate, deviceOverlap, kernelExecTimeoutEnabled, computeMode;
  int singleToDoublePrecisionPerfRatio, maxTexture1DLinear, cooperativeMultiDeviceLaunch;
};
inline cudaError_t cudaGetDeviceProperties(ece408_grade_properties* to, int device) {
  cudaDeviceGetAttribute(&to->clockRate, cudaDevAttrClockRate, device);
  cudaDeviceGetAttribute(&to->memoryClockRate, cudaDevAttrMemoryClockRate, device);
  cudaDeviceGetAttribute(&to->deviceOverlap, cudaDevAttrGpuOverlap, device);
  cudaDeviceGetAttribute(&to->kernelExecTimeoutEnabled, cudaDevAttrKernelExecTimeout, device);
  cudaDeviceGetAttribute(&to->computeMode, cudaDevAttrComputeMode, device);
  cudaDeviceGetAttribute(&to->maxTexture1DLinear, cudaDevAttrMaxTexture1DLinearWidth, device);
  cudaDeviceGetAttribute(&to->singleToDoublePrecisionPerfRatio, cudaDevAttrSingleToDoublePrecisionPerfRatio, device);
  to->cooperativeMultiDeviceLaunch = 0;
  return cudaGetDeviceProperties(static_cast<cudaDeviceProp*>(to), device);
}
#define cudaDeviceProp ece408_grade_properties

// What a pointer's attributes have lost.
struct ece408_grade_pointer : cudaPointerAttributes {
  cudaMemoryType memoryType;
  int isManaged;
};
inline cudaError_t cudaPointerGetAttributes(ece408_grade_pointer* to, const void* at) {
  cudaError_t error = cudaPointerGetAttributes(static_cast<cudaPointerAttributes*>(to), at);
  to->isManaged = to->type == cudaMemoryTypeManaged;
  to->memoryType = to->isManaged ? cudaMemoryTypeDevice : to->type;
  return error;
}
#define cudaPointerAttributes ece408_grade_pointer

// Dependencies had no data.
inline cudaError_t cudaGraphAddDependencies(cudaGraph_t graph, const cudaGraphNode_t* from, const cudaGraphNode_t* to,
                                            size_t count) {
  return cudaGraphAddDependencies(graph, from, to, NULL, count);
}
inline cudaError_t cudaGraphGetEdges(cudaGraph_t graph, cudaGraphNode_t* from, cudaGraphNode_t* to, size_t* count) {
  return cudaGraphGetEdges(graph, from, to, NULL, count);
}
inline cudaError_t cudaStreamBeginCapture(cudaStream_t stream) {
  return cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal);
}

// What Thrust and CUB have lost.
namespace thrust {
template <typename A, typename R> struct unary_function { typedef A argument_type; typedef R result_type; };
template <typename A, typename B, typename R> struct binary_function {
  typedef A first_argument_type;
  typedef B second_argument_type;
  typedef R result_type;
};
}  // namespace thrust
namespace cub {
struct Sum { template <typename T> __host__ __device__ T operator()(T a, T b) const { return a + b; } };
struct Max { template <typename T> __host__ __device__ T operator()(T a, T b) const { return a < b ? b : a; } };
struct Min { template <typename T> __host__ __device__ T operator()(T a, T b) const { return b < a ? b : a; } };
}  // namespace cub

// Since Volta a shuffle or a vote names its lanes; before, it meant the whole warp. Functions where
// they can be: NVIDIA's own library has classes called __any and __all.
#define ECE408_GRADE_WARP_ 0xffffffffu
#define ECE408_GRADE_SHUFFLE_(name, Lanes)                              \
  template <typename T>                                                 \
  __device__ inline T __##name(T value, Lanes lanes, int width = 32) {  \
    return __##name##_sync(ECE408_GRADE_WARP_, value, lanes, width);    \
  }
ECE408_GRADE_SHUFFLE_(shfl, int)
ECE408_GRADE_SHUFFLE_(shfl_up, unsigned)
ECE408_GRADE_SHUFFLE_(shfl_down, unsigned)
ECE408_GRADE_SHUFFLE_(shfl_xor, int)
// CUDA still declares these for an int; a condition is a bool, and finds the template.
template <typename T> __device__ inline int __any(T predicate) { return __any_sync(ECE408_GRADE_WARP_, predicate); }
template <typename T> __device__ inline int __all(T predicate) { return __all_sync(ECE408_GRADE_WARP_, predicate); }
#define __ballot(predicate) __ballot_sync(ECE408_GRADE_WARP_, predicate)
#endif

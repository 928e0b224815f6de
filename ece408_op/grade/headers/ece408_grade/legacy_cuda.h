// Names of CUDA 8 and 9, with which submissions were written, that today's CUDA no longer has.
#ifndef ECE408_GRADE_LEGACY_CUDA_H_
#define ECE408_GRADE_LEGACY_CUDA_H_

#if CUDART_VERSION >= 13000
inline cudaError_t cudaThreadSynchronize() { return cudaDeviceSynchronize(); }
inline cudaError_t cudaThreadExit() { return cudaDeviceReset(); }

// Since Volta a shuffle or a vote names its lanes; before, it meant the whole warp. Functions where
// they can be: NVIDIA's own library has classes called __any and __all.
#define ECE408_GRADE_WARP_ 0xffffffffu
template <typename T>
__device__ inline T __shfl(T value, int lane, int width = 32) {
  return __shfl_sync(ECE408_GRADE_WARP_, value, lane, width);
}
template <typename T>
__device__ inline T __shfl_up(T value, unsigned lanes, int width = 32) {
  return __shfl_up_sync(ECE408_GRADE_WARP_, value, lanes, width);
}
template <typename T>
__device__ inline T __shfl_down(T value, unsigned lanes, int width = 32) {
  return __shfl_down_sync(ECE408_GRADE_WARP_, value, lanes, width);
}
template <typename T>
__device__ inline T __shfl_xor(T value, int mask, int width = 32) {
  return __shfl_xor_sync(ECE408_GRADE_WARP_, value, mask, width);
}
// CUDA still declares these for an int; a condition is a bool, and finds the template.
template <typename T>
__device__ inline int __any(T predicate) {
  return __any_sync(ECE408_GRADE_WARP_, predicate);
}
template <typename T>
__device__ inline int __all(T predicate) {
  return __all_sync(ECE408_GRADE_WARP_, predicate);
}
#define __ballot(predicate) __ballot_sync(ECE408_GRADE_WARP_, predicate)
#endif

#endif  // ECE408_GRADE_LEGACY_CUDA_H_

// Names of CUDA 8 and 9, with which submissions were written, that today's CUDA no longer has.
#ifndef ECE408_GRADE_LEGACY_CUDA_H_
#define ECE408_GRADE_LEGACY_CUDA_H_

#if CUDART_VERSION >= 13000
inline cudaError_t cudaThreadSynchronize() { return cudaDeviceSynchronize(); }
inline cudaError_t cudaThreadExit() { return cudaDeviceReset(); }
#endif

// Since Volta a shuffle or a vote names its lanes; before, it meant the whole warp.
#define ECE408_GRADE_WARP_ 0xffffffffu
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 700
#define __shfl(...) __shfl_sync(ECE408_GRADE_WARP_, __VA_ARGS__)
#define __shfl_up(...) __shfl_up_sync(ECE408_GRADE_WARP_, __VA_ARGS__)
#define __shfl_down(...) __shfl_down_sync(ECE408_GRADE_WARP_, __VA_ARGS__)
#define __shfl_xor(...) __shfl_xor_sync(ECE408_GRADE_WARP_, __VA_ARGS__)
#define __any(predicate) __any_sync(ECE408_GRADE_WARP_, predicate)
#define __all(predicate) __all_sync(ECE408_GRADE_WARP_, predicate)
#define __ballot(predicate) __ballot_sync(ECE408_GRADE_WARP_, predicate)
#endif

#endif  // ECE408_GRADE_LEGACY_CUDA_H_

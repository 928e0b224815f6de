// CUDA C++ as plain C++: everything that a CUDA source finds without including it.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <type_traits>

#define CUDART_VERSION 12000
#define CUDA_VERSION 12000
#define __CUDA_ARCH__ 800

#define __device__
#define __global__ __attribute__((noinline, noclone))
#define __host__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __grid_constant__
#define __align__(n) __attribute__((aligned(n)))
// g++ puts no constants into a section of variables: each gets its own, and _build.py joins them.
#define __constant__ ECE408_CONSTANT(__COUNTER__)
#define ECE408_CONSTANT(number) ECE408_NUMBERED(number)
#define ECE408_NUMBERED(number) __attribute__((section("ece408_constant" #number)))
// A program's thread-local variables lie side by side, so the runtime knows a block's shared memory by its address.
#define __shared__ static __thread __attribute__((aligned(128)))
#define __managed__ __attribute__((section("ece408_managed")))
#define CUDART_INF_F __builtin_inff()
#define CUDART_NAN_F __builtin_nanf("")
#define CUDART_PI_F 3.141592654f

#include "../native/machine.h"
#include "vector_types.h"

// Constants for the compiler; the runtime sets them for each thread.
extern const uint3 threadIdx, blockIdx, blockDim, gridDim;
extern const int warpSize;

// Functions that stand for instructions are not watched; the accesses among them call the runtime themselves.
#define ECE408_PLAIN __attribute__((no_sanitize("thread"), no_sanitize_coverage))

void __syncthreads();
void __syncwarp(unsigned mask = 0xffffffffu);
inline void __threadfence() { emulator::fence(); }
inline void __threadfence_block() {}
inline void __threadfence_system() { emulator::fence(); }

#include "device_functions.h"
#include "warp_functions.h"
#include "runtime_api.h"

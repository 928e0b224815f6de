// What stands in front of kernels of the package: CUDA, and the functions of their own headers.
#pragma once
#include "ece408_emulator.h"
#include "ptx.h"
#include "kernel_functions.h"

// An argument of a launch: a pointer of any type.
struct Ece408Buffer {
    void *p;
    template <typename T>
    ECE408_PLAIN operator T *() const { return static_cast<T *>(p); }
};

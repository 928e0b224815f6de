// The CUDA runtime for the host's code. Everything is done at once, in the order of the calls, streams included.
#pragma once

enum cudaError_t {
    cudaSuccess = 0,
    cudaErrorInvalidValue = 1,
    cudaErrorMemoryAllocation = 2,
    cudaErrorInvalidConfiguration = 9,
    cudaErrorInvalidDevice = 101,
    cudaErrorUnknown = 999
};
typedef cudaError_t cudaError;
enum cudaMemcpyKind {
    cudaMemcpyHostToHost, cudaMemcpyHostToDevice, cudaMemcpyDeviceToHost, cudaMemcpyDeviceToDevice, cudaMemcpyDefault
};
enum cudaFuncCache { cudaFuncCachePreferNone, cudaFuncCachePreferShared, cudaFuncCachePreferL1, cudaFuncCachePreferEqual };
enum cudaSharedMemConfig { cudaSharedMemBankSizeDefault, cudaSharedMemBankSizeFourByte, cudaSharedMemBankSizeEightByte };
enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize = 8, cudaFuncAttributePreferredSharedMemoryCarveout };
enum cudaMemoryAdvise { cudaMemAdviseSetReadMostly = 1, cudaMemAdviseSetPreferredLocation = 3 };
enum cudaMemoryType { cudaMemoryTypeUnregistered, cudaMemoryTypeHost, cudaMemoryTypeDevice, cudaMemoryTypeManaged };
enum cudaLimit { cudaLimitStackSize, cudaLimitPrintfFifoSize, cudaLimitMallocHeapSize };
enum { cudaCpuDeviceId = -1, cudaStreamDefault = 0, cudaStreamNonBlocking = 1 };
enum { cudaEventDefault = 0, cudaEventBlockingSync = 1, cudaEventDisableTiming = 2, cudaMemAttachGlobal = 1 };
struct ece408_stream { int unused; };
struct ece408_event { double milliseconds; };
typedef ece408_stream *cudaStream_t;
typedef ece408_event *cudaEvent_t;
struct cudaDeviceProp {
    char name[256];
    size_t totalGlobalMem, sharedMemPerBlock, totalConstMem;
    int major, minor, multiProcessorCount, maxThreadsPerBlock, warpSize, regsPerBlock, maxThreadsPerMultiProcessor;
    int maxThreadsDim[3], maxGridSize[3], clockRate, concurrentKernels, computeMode, memoryClockRate, memoryBusWidth;
    int l2CacheSize, deviceOverlap, maxTexture1DLinear, singleToDoublePrecisionPerfRatio;
};
struct cudaPointerAttributes {
    cudaMemoryType type, memoryType;
    int device, isManaged;
    void *devicePointer, *hostPointer;
};

namespace emulator {

extern cudaError_t last_error;
cudaError_t copy_memory(void *to, const void *from, size_t bytes, cudaMemcpyKind kind, const void *code);
cudaError_t copy_symbol(void *symbol, size_t symbol_bytes, void *memory, size_t bytes, size_t offset,
                        cudaMemcpyKind kind, bool to_symbol, const void *code);
bool allowed(dim3 grid, dim3 block, size_t shared_bytes, const void *code);

template <typename T>
ECE408_PLAIN inline void check_pointer(const T &argument, const void *code) {
    if constexpr (std::is_pointer_v<T> && !std::is_function_v<std::remove_pointer_t<T>>)
        check_argument((const void *)argument, code);
}

// kernel<<<grid, block, shared, stream>>>(arguments) is written as
// launch(grid, block, shared, stream)("kernel", kernel, arguments).
struct Launch {
    dim3 grid, block;
    size_t shared_bytes;
    template <typename Kernel, typename... Arguments>
    ECE408_PLAIN __attribute__((noinline)) void operator()(const char *name, Kernel kernel, Arguments... arguments) const {
        const void *const code = __builtin_return_address(0);
        if (!allowed(grid, block, shared_bytes, code)) return;
        (check_pointer(arguments, code), ...);
        auto call = [&]() ECE408_PLAIN { kernel(arguments...); };
        typedef decltype(call) Call;
        struct Entry {
            ECE408_PLAIN static void enter(void *call) { (*static_cast<Call *>(call))(); }
        };
        run_grid({{grid.x, grid.y, grid.z}, {block.x, block.y, block.z}, shared_bytes, Entry::enter, &call, name, code});
    }
};
inline Launch launch(dim3 grid, dim3 block, size_t shared_bytes = 0, cudaStream_t = nullptr) {
    return {grid, block, shared_bytes};
}

}  // namespace emulator

const char *cudaGetErrorString(cudaError_t error);
const char *cudaGetErrorName(cudaError_t error);
cudaError_t cudaGetLastError();
cudaError_t cudaPeekAtLastError();
cudaError_t ece408_malloc(void **to, size_t bytes, bool host_may_use);
cudaError_t cudaFree(void *address);
cudaError_t cudaMemset(void *to, int value, size_t bytes);
inline cudaError_t cudaMemsetAsync(void *to, int value, size_t bytes, cudaStream_t = nullptr) {
    return cudaMemset(to, value, bytes);
}
cudaError_t cudaMemcpy(void *to, const void *from, size_t bytes, cudaMemcpyKind kind);
inline cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, cudaMemcpyKind kind, cudaStream_t = nullptr) {
    return cudaMemcpy(to, from, bytes, kind);
}
cudaError_t cudaDeviceReset();
inline cudaError_t cudaThreadExit() { return cudaDeviceReset(); }
cudaError_t cudaPointerGetAttributes(cudaPointerAttributes *to, const void *address);
cudaError_t cudaGetDeviceProperties(cudaDeviceProp *to, int device);

template <typename T>
inline cudaError_t cudaMalloc(T **to, size_t bytes) { return ece408_malloc((void **)to, bytes, false); }
template <typename T>
inline cudaError_t cudaMallocManaged(T **to, size_t bytes, unsigned = 1) { return ece408_malloc((void **)to, bytes, true); }
template <typename T>
ECE408_PLAIN __attribute__((noinline)) cudaError_t cudaMemcpyToSymbol(const T &symbol, const void *from, size_t bytes, size_t offset = 0,
                               cudaMemcpyKind kind = cudaMemcpyHostToDevice) {
    return emulator::copy_symbol((void *)&symbol, sizeof(T), (void *)from, bytes, offset, kind, true,
                                 __builtin_return_address(0));
}
template <typename T>
inline cudaError_t cudaMemcpyToSymbolAsync(const T &symbol, const void *from, size_t bytes, size_t offset,
                                           cudaMemcpyKind kind, cudaStream_t = nullptr) {
    return cudaMemcpyToSymbol(symbol, from, bytes, offset, kind);
}
template <typename T>
ECE408_PLAIN __attribute__((noinline)) cudaError_t cudaMemcpyFromSymbol(void *to, const T &symbol, size_t bytes, size_t offset = 0,
                                 cudaMemcpyKind kind = cudaMemcpyDeviceToHost) {
    return emulator::copy_symbol((void *)&symbol, sizeof(T), to, bytes, offset, kind, false, __builtin_return_address(0));
}
template <typename T>
inline cudaError_t cudaGetSymbolAddress(void **to, const T &symbol) {
    emulator::take_address(&symbol);
    return *to = (void *)&symbol, cudaSuccess;
}

// Calls without an effect here.
#define ECE408_NOTHING(name) \
    template <typename... T> \
    inline cudaError_t name(T...) { return cudaSuccess; }
ECE408_NOTHING(cudaDeviceSynchronize) ECE408_NOTHING(cudaThreadSynchronize) ECE408_NOTHING(cudaSetDevice)
ECE408_NOTHING(cudaDeviceSetCacheConfig) ECE408_NOTHING(cudaDeviceSetSharedMemConfig) ECE408_NOTHING(cudaDeviceSetLimit)
ECE408_NOTHING(cudaThreadSetCacheConfig) ECE408_NOTHING(cudaFuncSetCacheConfig) ECE408_NOTHING(cudaFuncSetSharedMemConfig)
ECE408_NOTHING(cudaStreamSynchronize) ECE408_NOTHING(cudaStreamWaitEvent) ECE408_NOTHING(cudaEventSynchronize)
ECE408_NOTHING(cudaMemAdvise) ECE408_NOTHING(cudaMemPrefetchAsync)
#undef ECE408_NOTHING

void ece408_allow_shared(size_t bytes);
template <typename Kernel>
inline cudaError_t cudaFuncSetAttribute(Kernel *, cudaFuncAttribute attribute, int value) {
    if (attribute == cudaFuncAttributeMaxDynamicSharedMemorySize) ece408_allow_shared(value);
    return cudaSuccess;
}
inline cudaError_t cudaGetDevice(int *to) { return *to = 0, cudaSuccess; }
inline cudaError_t cudaStreamCreate(cudaStream_t *to) { return *to = new ece408_stream, cudaSuccess; }
inline cudaError_t cudaStreamCreateWithFlags(cudaStream_t *to, unsigned) { return cudaStreamCreate(to); }
inline cudaError_t cudaStreamDestroy(cudaStream_t stream) { return delete stream, cudaSuccess; }
inline cudaError_t cudaEventCreate(cudaEvent_t *to, unsigned = 0) { return *to = new ece408_event{0}, cudaSuccess; }
inline cudaError_t cudaEventCreateWithFlags(cudaEvent_t *to, unsigned) { return cudaEventCreate(to); }
inline cudaError_t cudaEventDestroy(cudaEvent_t event) { return delete event, cudaSuccess; }
inline cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t = nullptr) {
    return event->milliseconds = emulator::milliseconds(), cudaSuccess;
}
inline cudaError_t cudaEventElapsedTime(float *to, cudaEvent_t from, cudaEvent_t until) {
    return *to = float(until->milliseconds - from->milliseconds), cudaSuccess;
}

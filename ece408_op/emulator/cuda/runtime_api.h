// The CUDA runtime for the host's code. Everything is done at once, in the order of the calls, except in streams that the
// file creates: their work is done when something waits for it or, with an even number of images, when
// cudaStreamSynchronize waits for any of these streams (streams_in_turn in native/api.cpp says why).
#pragma once

enum cudaError_t {
    cudaSuccess = 0,
    cudaErrorInvalidValue = 1,
    cudaErrorMemoryAllocation = 2,
    cudaErrorInvalidConfiguration = 9,
    cudaErrorInvalidSymbol = 13,
    cudaErrorInvalidMemcpyDirection = 21,
    cudaErrorInvalidDevice = 101,
    cudaErrorInvalidResourceHandle = 400,
    cudaErrorNotReady = 600,
    cudaErrorUnknown = 999
};
typedef cudaError_t cudaError;
enum cudaMemcpyKind {
    cudaMemcpyHostToHost, cudaMemcpyHostToDevice, cudaMemcpyDeviceToHost, cudaMemcpyDeviceToDevice, cudaMemcpyDefault
};
enum cudaFuncCache { cudaFuncCachePreferNone, cudaFuncCachePreferShared, cudaFuncCachePreferL1, cudaFuncCachePreferEqual };
enum cudaSharedMemConfig {
    cudaSharedMemBankSizeDefault, cudaSharedMemBankSizeFourByte, cudaSharedMemBankSizeEightByte
};
enum cudaFuncAttribute {
    cudaFuncAttributeMaxDynamicSharedMemorySize = 8, cudaFuncAttributePreferredSharedMemoryCarveout = 9
};
enum cudaMemoryAdvise { cudaMemAdviseSetReadMostly = 1, cudaMemAdviseSetPreferredLocation = 3 };
enum cudaMemoryType { cudaMemoryTypeUnregistered, cudaMemoryTypeHost, cudaMemoryTypeDevice, cudaMemoryTypeManaged };
enum cudaLimit { cudaLimitStackSize, cudaLimitPrintfFifoSize, cudaLimitMallocHeapSize };
enum { cudaCpuDeviceId = -1 };
enum { cudaStreamDefault = 0, cudaStreamNonBlocking = 1 };
enum { cudaEventDefault = 0, cudaEventBlockingSync = 1, cudaEventDisableTiming = 2 };
enum { cudaHostAllocDefault = 0, cudaHostAllocPortable = 1, cudaHostAllocMapped = 2, cudaHostAllocWriteCombined = 4 };
enum { cudaHostRegisterDefault = 0, cudaHostRegisterPortable = 1, cudaHostRegisterMapped = 2 };
enum { cudaMemAttachGlobal = 1, cudaMemAttachHost = 2 };
struct ece408_stream;
struct ece408_event;
typedef ece408_stream *cudaStream_t;
typedef ece408_event *cudaEvent_t;
struct cudaDeviceProp {
    char name[256];
    size_t totalGlobalMem, sharedMemPerBlock, totalConstMem;
    int major, minor, multiProcessorCount, maxThreadsPerBlock, warpSize, regsPerBlock, maxThreadsPerMultiProcessor;
    int maxThreadsDim[3], maxGridSize[3], clockRate, concurrentKernels, computeMode, memoryClockRate, memoryBusWidth;
    int l2CacheSize, asyncEngineCount, deviceOverlap, canMapHostMemory, unifiedAddressing, managedMemory, ECCEnabled;
    int integrated, kernelExecTimeoutEnabled, maxTexture1DLinear, singleToDoublePrecisionPerfRatio, pciBusID, pciDeviceID;
    size_t sharedMemPerMultiprocessor, sharedMemPerBlockOptin, memPitch, textureAlignment;
};
struct cudaFuncAttributes {
    size_t sharedSizeBytes, constSizeBytes, localSizeBytes;
    int maxThreadsPerBlock, numRegs, ptxVersion, binaryVersion, cacheModeCA, maxDynamicSharedSizeBytes;
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
// Do the work now, or in a stream of the file's own later.
cudaError_t in_stream(cudaStream_t stream, const void *code, std::function<void()> work);

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
    cudaStream_t stream;
    template <typename Kernel, typename... Arguments>
    ECE408_PLAIN __attribute__((noinline)) void operator()(const char *name, Kernel kernel, Arguments... arguments) const {
        const void *const code = __builtin_return_address(0);
        if (!allowed(grid, block, shared_bytes, code)) return;
        (check_pointer(arguments, code), ...);
        in_stream(stream, code, [=, *this]() ECE408_PLAIN {
            auto call = [&]() ECE408_PLAIN { kernel(arguments...); };
            typedef decltype(call) Call;
            struct Entry {
                ECE408_PLAIN static void enter(void *call) { (*static_cast<Call *>(call))(); }
            };
            run_grid({{grid.x, grid.y, grid.z}, {block.x, block.y, block.z}, shared_bytes, Entry::enter, &call, name, code});
        });
    }
};
inline Launch launch(dim3 grid, dim3 block, size_t shared_bytes = 0, cudaStream_t stream = nullptr) {
    return {grid, block, shared_bytes, stream};
}

}  // namespace emulator

const char *cudaGetErrorString(cudaError_t error);
const char *cudaGetErrorName(cudaError_t error);
cudaError_t cudaGetLastError();
cudaError_t cudaStreamSynchronize(cudaStream_t stream);
cudaError_t cudaPeekAtLastError();
cudaError_t ece408_malloc(void **to, size_t bytes, bool host_may_use);
cudaError_t cudaFree(void *address);
cudaError_t cudaMemset(void *to, int value, size_t bytes);
cudaError_t cudaMemcpy(void *to, const void *from, size_t bytes, cudaMemcpyKind kind);
cudaError_t cudaMemcpy2D(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width, size_t height,
                         cudaMemcpyKind kind);
cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, cudaMemcpyKind kind, cudaStream_t = nullptr);
inline cudaError_t cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width,
                                     size_t height, cudaMemcpyKind kind, cudaStream_t stream = nullptr) {
    cudaStreamSynchronize(stream);
    return cudaMemcpy2D(to, to_pitch, from, from_pitch, width, height, kind);
}
cudaError_t cudaDeviceReset();
inline cudaError_t cudaThreadExit() { return cudaDeviceReset(); }
cudaError_t cudaPointerGetAttributes(cudaPointerAttributes *to, const void *address);
cudaError_t cudaGetDeviceProperties(cudaDeviceProp *to, int device);

template <typename T>
inline cudaError_t cudaMalloc(T **to, size_t bytes) { return ece408_malloc((void **)to, bytes, false); }
template <typename T>
inline cudaError_t cudaMallocPitch(T **to, size_t *pitch, size_t width, size_t height) {
    *pitch = (width + 511) / 512 * 512;
    return ece408_malloc((void **)to, *pitch * height, false);
}
template <typename T>
inline cudaError_t cudaMallocAsync(T **to, size_t bytes, cudaStream_t) { return ece408_malloc((void **)to, bytes, false); }
template <typename T>
inline cudaError_t cudaMallocManaged(T **to, size_t bytes, unsigned = 1) { return ece408_malloc((void **)to, bytes, true); }
template <typename T>
inline cudaError_t cudaMallocHost(T **to, size_t bytes, unsigned = 0) { return ece408_malloc((void **)to, bytes, true); }
template <typename T>
inline cudaError_t cudaHostAlloc(T **to, size_t bytes, unsigned) { return ece408_malloc((void **)to, bytes, true); }
template <typename T>
inline cudaError_t cudaHostGetDevicePointer(T **to, void *address, unsigned) { return *to = (T *)address, cudaSuccess; }
inline cudaError_t cudaFreeHost(void *address) { return cudaFree(address); }
cudaError_t cudaFreeAsync(void *address, cudaStream_t);
cudaError_t cudaMemsetAsync(void *to, int value, size_t bytes, cudaStream_t = nullptr);
template <typename T>
ECE408_PLAIN __attribute__((noinline)) cudaError_t cudaMemcpyToSymbol(const T &symbol, const void *from, size_t bytes, size_t offset = 0,
                               cudaMemcpyKind kind = cudaMemcpyHostToDevice) {
    return emulator::copy_symbol((void *)&symbol, sizeof(T), (void *)from, bytes, offset, kind, true,
                                 __builtin_return_address(0));
}
template <typename T>
inline cudaError_t cudaMemcpyToSymbolAsync(const T &symbol, const void *from, size_t bytes, size_t offset,
                                           cudaMemcpyKind kind, cudaStream_t stream = nullptr) {
    cudaStreamSynchronize(stream);
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
ECE408_NOTHING(cudaSetDevice) ECE408_NOTHING(cudaDeviceSetCacheConfig)
ECE408_NOTHING(cudaDeviceSetSharedMemConfig) ECE408_NOTHING(cudaDeviceSetLimit)
ECE408_NOTHING(cudaThreadSetCacheConfig) ECE408_NOTHING(cudaFuncSetCacheConfig)
ECE408_NOTHING(cudaFuncSetSharedMemConfig)
ECE408_NOTHING(cudaHostRegister) ECE408_NOTHING(cudaHostUnregister) ECE408_NOTHING(cudaMemAdvise)
ECE408_NOTHING(cudaMemPrefetchAsync) ECE408_NOTHING(cudaProfilerStart) ECE408_NOTHING(cudaProfilerStop)
#undef ECE408_NOTHING

void ece408_allow_shared(size_t bytes);
template <typename Kernel>
inline cudaError_t cudaFuncSetAttribute(Kernel *, cudaFuncAttribute attribute, int value) {
    if (attribute == cudaFuncAttributeMaxDynamicSharedMemorySize) ece408_allow_shared(value);
    return cudaSuccess;
}
// As of a kernel whose registers and static shared memory are few.
template <typename Kernel>
inline cudaError_t cudaFuncGetAttributes(cudaFuncAttributes *to, Kernel) {
    return *to = {0, 0, 0, 1024, 32, 80, 80, 0, 48 * 1024}, cudaSuccess;
}
enum cudaDeviceAttr {
    cudaDevAttrMaxThreadsPerBlock = 1, cudaDevAttrMaxSharedMemoryPerBlock = 8, cudaDevAttrWarpSize = 10,
    cudaDevAttrMultiProcessorCount = 16, cudaDevAttrMaxThreadsPerMultiProcessor = 39, cudaDevAttrComputeCapabilityMajor = 75
};
inline cudaError_t cudaDeviceGetAttribute(int *to, cudaDeviceAttr attribute, int device) {
    cudaDeviceProp all;
    if (cudaGetDeviceProperties(&all, device) != cudaSuccess) return cudaErrorInvalidDevice;
    *to = attribute == cudaDevAttrMaxThreadsPerBlock ? all.maxThreadsPerBlock
          : attribute == cudaDevAttrMaxSharedMemoryPerBlock ? int(all.sharedMemPerBlock)
          : attribute == cudaDevAttrWarpSize ? all.warpSize
          : attribute == cudaDevAttrMultiProcessorCount ? all.multiProcessorCount
          : attribute == cudaDevAttrMaxThreadsPerMultiProcessor ? all.maxThreadsPerMultiProcessor : all.major;
    return cudaSuccess;
}
// Occupancy where neither registers nor shared memory limit it.
template <typename Kernel>
inline cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *to, Kernel, int threads, size_t) {
    return *to = std::min(32, 2048 / threads), cudaSuccess;
}
template <typename Kernel>
inline cudaError_t cudaOccupancyMaxPotentialBlockSize(int *blocks, int *threads, Kernel, size_t = 0, int = 0) {
    return *blocks = 2 * 108, *threads = 1024, cudaSuccess;
}
inline cudaError_t cudaGetDevice(int *to) { return *to = 0, cudaSuccess; }
inline cudaError_t cudaGetDeviceCount(int *to) { return *to = 1, cudaSuccess; }
inline cudaError_t cudaMemGetInfo(size_t *free, size_t *all) { return *free = *all = size_t(4) << 30, cudaSuccess; }
inline cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) { return *least = *greatest = 0, cudaSuccess; }
cudaError_t cudaDeviceSynchronize();
inline cudaError_t cudaThreadSynchronize() { return cudaDeviceSynchronize(); }
cudaError_t cudaStreamCreateWithFlags(cudaStream_t *to, unsigned flags);
inline cudaError_t cudaStreamCreate(cudaStream_t *to) { return cudaStreamCreateWithFlags(to, cudaStreamDefault); }
inline cudaError_t cudaStreamCreateWithPriority(cudaStream_t *to, unsigned flags, int) {
    return cudaStreamCreateWithFlags(to, flags);
}
cudaError_t cudaStreamDestroy(cudaStream_t stream);
inline cudaError_t cudaStreamQuery(cudaStream_t stream) { return cudaStreamSynchronize(stream); }
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned = 0);
cudaError_t cudaEventCreate(cudaEvent_t *to, unsigned = 0);
inline cudaError_t cudaEventCreateWithFlags(cudaEvent_t *to, unsigned) { return cudaEventCreate(to); }
cudaError_t cudaEventDestroy(cudaEvent_t event);
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t = nullptr);
cudaError_t cudaEventSynchronize(cudaEvent_t event);
inline cudaError_t cudaEventQuery(cudaEvent_t event) { return cudaEventSynchronize(event); }
cudaError_t cudaEventElapsedTime(float *to, cudaEvent_t from, cudaEvent_t until);

// The CUDA runtime's functions that check what they are given.
#include <cstdio>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <string>

#include "../cuda/ece408_emulator.h"
#include "internal.h"

namespace emulator {

cudaError_t last_error = cudaSuccess;
static size_t allowed_shared = 48 * 1024;

cudaError_t failed(cudaError_t error, const std::string &message, const void *code) {
    report("call", message, code);
    return last_error = error;
}

bool allowed(dim3 grid, dim3 block, size_t shared_bytes, const void *code) {
    if (in_kernel) stop("unsupported", "a kernel launches a kernel, which the emulator cannot do", code);
    const auto text = [](const char *what, dim3 size) {
        return std::string(what) + " of " + std::to_string(size.x) + " x " + std::to_string(size.y) + " x " +
               std::to_string(size.z);
    };
    std::string message;
    if (size_t(block.x) * block.y * block.z > 1024 || block.z > 64)
        message = text("the launch fails: a block", block) + " threads; at most 1024 are allowed, and 64 in z";
    else if (!block.x || !block.y || !block.z || !grid.x || !grid.y || !grid.z)
        message = "the launch fails: " + text("a grid", grid) + text(" blocks", block) + " threads";
    else if (grid.x > 0x7fffffffu || grid.y > 65535 || grid.z > 65535)
        message = text("the launch fails: a grid", grid) + " blocks; at most 65535 are allowed in y and z, and 2147483647 in x";
    else if (shared_bytes > allowed_shared)
        message = "the launch fails: " + std::to_string(shared_bytes) + " bytes of dynamic shared memory; at most " +
                  std::to_string(allowed_shared) + " are allowed (cudaFuncSetAttribute raises that)";
    if (message.empty()) return true;
    failed(cudaErrorInvalidConfiguration, message, code);
    return false;
}

static const char *wrong_side(const void *address, size_t bytes, bool device) {
    // Addresses are unified: a GPU knows its own memory, although the copy's kind may say that it is the host's.
    if (is_device(address)) return is_inside(address, bytes) ? nullptr : "the copy goes beyond the end of an allocation";
    if (is_gpu_address(address)) return nullptr;
    if (space_of(uintptr_t(address)) == Space::CONSTANT)
        return "a copy by the name of a __constant__ variable: cudaMemcpyToSymbol and cudaMemcpyFromSymbol take names";
    return device ? "the copy's kind says GPU memory, but a pointer is the host's or has no value" : nullptr;
}

static cudaError_t check_copy(const void *to, const void *from, size_t bytes, cudaMemcpyKind kind, const void *code) {
    if (!bytes) return cudaSuccess;
    const bool to_device = kind == cudaMemcpyHostToDevice || kind == cudaMemcpyDeviceToDevice;
    const bool from_device = kind == cudaMemcpyDeviceToHost || kind == cudaMemcpyDeviceToDevice;
    for (const auto &[address, device] : {std::pair<const void *, bool>(to, to_device), {from, from_device}})
        if (const char *const wrong = wrong_side(address, bytes, device)) return failed(cudaErrorInvalidValue, wrong, code);
    return cudaSuccess;
}

cudaError_t copy_memory(void *to, const void *from, size_t bytes, cudaMemcpyKind kind, const void *code) {
    const cudaError_t error = check_copy(to, from, bytes, kind, code);
    if (bytes && !error) std::memmove(to, from, bytes), note_filled(to, bytes);
    return error;
}

cudaError_t copy_symbol(void *symbol, size_t symbol_bytes, void *memory, size_t bytes, size_t offset,
                        cudaMemcpyKind kind, bool to_symbol, const void *code) {
    cudaStreamSynchronize(nullptr);
    if (!is_symbol(symbol))
        return failed(cudaErrorInvalidSymbol, "a copy to or from a symbol takes the variable's name, without & and quotes", code);
    if (offset + bytes > symbol_bytes) {
        const std::string text = "the copy of " + std::to_string(bytes) + " bytes goes beyond the end of the symbol, which has " +
                                 std::to_string(symbol_bytes);
        return failed(cudaErrorInvalidValue, text, code);
    }
    if (const char *const wrong = wrong_side(memory, bytes, kind == cudaMemcpyDeviceToDevice))
        return failed(cudaErrorInvalidValue, wrong, code);
    char *const at = static_cast<char *>(symbol) + offset;
    std::memcpy(to_symbol ? at : memory, to_symbol ? memory : at, bytes);
    note_filled(to_symbol ? at : memory, bytes);
    return cudaSuccess;
}

static cudaError_t check_set(const void *to, size_t bytes, const void *code) {
    if (!bytes || (is_device(to) ? is_inside(to, bytes) : is_gpu_address(to))) return cudaSuccess;
    return failed(cudaErrorInvalidValue, "cudaMemset beyond an allocation, or of host memory", code);
}

cudaError_t set_memory(void *to, int value, size_t bytes, const void *code) {
    const cudaError_t error = check_set(to, bytes, code);
    if (bytes && !error) std::memset(to, value, bytes), note_filled(to, bytes);
    return error;
}

static cudaError_t check_free(const void *address, const void *code) {
    const Allocation *const found = allocation_near(uintptr_t(address));
    if (!address || (found && found->begin == uintptr_t(address) && !found->freed)) return cudaSuccess;
    return failed(cudaErrorInvalidValue, "cudaFree of a pointer that cudaMalloc did not return, or a second time", code);
}

cudaError_t free_memory(void *address, const void *code) {
    const cudaError_t error = check_free(address, code);
    if (!error) device_free(address);
    return error;
}

}  // namespace emulator

using namespace emulator;

struct ece408_stream {
    bool blocking;  // the default stream and this one wait for each other
    bool destroyed;  // its work is still to be done
    std::deque<std::function<void()>> work;
    void step() {
        if (in_kernel) stop("unsupported", "a kernel waits for a stream, which the emulator cannot do", address_of(last_code));
        const auto first = std::move(work.front());
        work.pop_front();
        first();
    }
};
struct Record {  // of an event; one that no stream has recorded is done
    double milliseconds = 0;
    ece408_stream *stream = nullptr;
    bool done = true;
    void finish() {
        while (!done) stream->step();
    }
};
struct ece408_event {
    std::shared_ptr<Record> last = std::make_shared<Record>();
};
static std::vector<ece408_stream *> streams;
// Whether all streams go on while one is waited for: then those that share memory without an order show it. Otherwise, a
// stream that should wait for another shows it.
bool emulator::streams_in_turn;

static bool step(bool all) {
    bool any = false;
    for (size_t i = 0; i < streams.size(); i++)
        if ((all || streams[i]->blocking) && !streams[i]->work.empty()) streams[i]->step(), any = true;
    return any;
}
static void finish(bool all) {
    while (step(all)) {}
}
void emulator::finish_streams() { finish(true); }
static cudaError_t check_stream(cudaStream_t stream, const void *code) {
    if (!stream) return cudaSuccess;
    for (const ece408_stream *const each : streams)
        if (each == stream && !each->destroyed) return cudaSuccess;
    return failed(cudaErrorInvalidResourceHandle, "a stream that the file has not created or has destroyed", code);
}
cudaError_t emulator::in_stream(cudaStream_t stream, const void *code, std::function<void()> work) {
    if (const cudaError_t error = check_stream(stream, code)) return error;
    if (stream) return stream->work.push_back(std::move(work)), cudaSuccess;
    finish(false);
    return work(), cudaSuccess;
}
cudaError_t cudaDeviceSynchronize() {
    last_code = uint32_t(uintptr_t(__builtin_return_address(0)));  // for a kernel that calls it
    return finish(true), cudaSuccess;
}
cudaError_t cudaStreamCreateWithFlags(cudaStream_t *to, unsigned flags) {
    streams.push_back(*to = new ece408_stream{!(flags & cudaStreamNonBlocking), false, {}});
    return cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
    if (const cudaError_t error = check_stream(stream, __builtin_return_address(0))) return error;
    if (!stream) finish(false);
    while (stream && !stream->work.empty()) streams_in_turn ? void(step(true)) : stream->step();
    return cudaSuccess;
}
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
    const cudaError_t error = check_stream(stream, __builtin_return_address(0));
    if (stream && !error) stream->destroyed = true;  // not deleted: an event or a new stream may have its address
    return error;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
    return in_stream(stream, __builtin_return_address(0), [record = event->last] { record->finish(); });
}
cudaError_t cudaEventCreate(cudaEvent_t *to, unsigned) { return *to = new ece408_event, cudaSuccess; }
cudaError_t cudaEventDestroy(cudaEvent_t event) { return delete event, cudaSuccess; }
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
    const void *const code = __builtin_return_address(0);
    if (const cudaError_t error = check_stream(stream, code)) return error;
    event->last.reset(new Record{0, stream, false});
    return in_stream(stream, code, [record = event->last] { record->milliseconds = milliseconds(), record->done = true; });
}
cudaError_t cudaEventSynchronize(cudaEvent_t event) { return event->last->finish(), cudaSuccess; }
cudaError_t cudaEventElapsedTime(float *to, cudaEvent_t from, cudaEvent_t until) {
    from->last->finish(), until->last->finish();
    return *to = float(until->last->milliseconds - from->last->milliseconds), cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, cudaMemcpyKind kind, cudaStream_t stream) {
    const void *const code = __builtin_return_address(0);
    if (const cudaError_t error = check_stream(stream, code)) return error;
    if (const cudaError_t error = check_copy(to, from, bytes, kind, code)) return error;
    // Of other memory than the GPU's and pinned one, a copy is done when the call returns.
    for (const void *const each : {(const void *)to, from})
        if (!is_device(each) && !is_gpu_address(each))
            return cudaStreamSynchronize(stream), copy_memory(to, from, bytes, kind, code);
    return in_stream(stream, code, [=] { copy_memory(to, from, bytes, kind, code); });
}
cudaError_t cudaMemsetAsync(void *to, int value, size_t bytes, cudaStream_t stream) {
    const void *const code = __builtin_return_address(0);
    if (const cudaError_t error = check_set(to, bytes, code)) return error;
    return in_stream(stream, code, [=] { set_memory(to, value, bytes, code); });
}
cudaError_t cudaFreeAsync(void *address, cudaStream_t stream) {
    const void *const code = __builtin_return_address(0);
    if (const cudaError_t error = check_free(address, code)) return error;
    return in_stream(stream, code, [=] { free_memory(address, code); });
}

static const struct Error {
    cudaError_t number;
    const char *name, *text;
} known_errors[] = {{cudaSuccess, "cudaSuccess", "no error"},
                    {cudaErrorInvalidValue, "cudaErrorInvalidValue", "invalid argument"},
                    {cudaErrorMemoryAllocation, "cudaErrorMemoryAllocation", "out of memory"},
                    {cudaErrorInvalidConfiguration, "cudaErrorInvalidConfiguration", "invalid configuration argument"},
                    {cudaErrorInvalidSymbol, "cudaErrorInvalidSymbol", "invalid device symbol"},
                    {cudaErrorInvalidResourceHandle, "cudaErrorInvalidResourceHandle", "invalid resource handle"},
                    {cudaErrorUnknown, "cudaErrorUnknown", "unknown error"}};
static const Error &known(cudaError_t error) {
    return *std::find_if(known_errors, std::end(known_errors) - 1, [=](const Error &each) { return each.number == error; });
}
const char *cudaGetErrorName(cudaError_t error) { return known(error).name; }
const char *cudaGetErrorString(cudaError_t error) { return known(error).text; }
cudaError_t cudaGetLastError() {
    const cudaError_t error = last_error;
    last_error = cudaSuccess;
    return error;
}
cudaError_t cudaPeekAtLastError() { return last_error; }
cudaError_t ece408_malloc(void **to, size_t bytes, bool host_may_use) {
    last_code = uint32_t(uintptr_t(__builtin_return_address(0)));  // `to` may have no value
    *to = device_malloc(bytes, host_may_use);
    if (*to) return cudaSuccess;
    return failed(cudaErrorMemoryAllocation, "cudaMalloc: more memory than the emulated GPU has, 4 GB",
                  __builtin_return_address(0));
}
cudaError_t cudaFree(void *address) {
    finish(true);
    return free_memory(address, __builtin_return_address(0));
}
cudaError_t cudaMemset(void *to, int value, size_t bytes) {
    finish(false);
    return set_memory(to, value, bytes, __builtin_return_address(0));
}
cudaError_t cudaMemcpy(void *to, const void *from, size_t bytes, cudaMemcpyKind kind) {
    finish(false);
    return copy_memory(to, from, bytes, kind, __builtin_return_address(0));
}
cudaError_t cudaMemcpy2D(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width, size_t height,
                         cudaMemcpyKind kind) {
    finish(false);
    for (size_t row = 0; row < height; row++) {
        const cudaError_t error = copy_memory(static_cast<char *>(to) + row * to_pitch,
                                              static_cast<const char *>(from) + row * from_pitch, width, kind,
                                              __builtin_return_address(0));
        if (error != cudaSuccess) return error;
    }
    return cudaSuccess;
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp *to, int device) {
    if (device) return failed(cudaErrorInvalidDevice, "there is one device, number 0", __builtin_return_address(0));
    *to = cudaDeviceProp{"emulated on the CPU", size_t(4) << 30, 48 * 1024, 64 * 1024, 8, 0, 108, 1024, 32, 65536, 2048,
                         {1024, 1024, 64}, {0x7fffffff, 65535, 65535}, 1410000, 1, 0, 1215000, 5120};
    to->l2CacheSize = 40 << 20, to->asyncEngineCount = 3, to->sharedMemPerMultiprocessor = 164 * 1024;
    to->deviceOverlap = to->canMapHostMemory = to->unifiedAddressing = to->managedMemory = to->ECCEnabled = 1;
    to->maxTexture1DLinear = 1 << 28, to->singleToDoublePrecisionPerfRatio = 2, to->sharedMemPerBlockOptin = 163 * 1024;
    return cudaSuccess;
}
cudaError_t cudaPointerGetAttributes(cudaPointerAttributes *to, const void *address) {
    const Allocation *const found = allocation_near(uintptr_t(address));
    const bool managed = found && found->host_may_use, device = found && !managed;
    void *const p = const_cast<void *>(address);
    *to = {managed ? cudaMemoryTypeManaged : device ? cudaMemoryTypeDevice : cudaMemoryTypeUnregistered,
           found ? cudaMemoryTypeDevice : cudaMemoryTypeHost, 0, managed, found ? p : nullptr, device ? nullptr : p};
    return cudaSuccess;
}
cudaError_t cudaDeviceReset() {
    return failed(cudaSuccess, "it frees all of the GPU's memory: that of x, w and y too, which others use", __builtin_return_address(0));
}
void ece408_allow_shared(size_t bytes) {
    if (bytes <= 227 * 1024) allowed_shared = std::max(allowed_shared, bytes);
}

// What g++ calls before every access (-fsanitize=thread) and in every basic block (-fsanitize-coverage=trace-pc).
#include <cstdio>
#include <cstring>

#include "internal.h"

namespace emulator {

void end_turn();

namespace {

inline void add(Thread &thread, uint32_t code, Operation operation, int bytes, uintptr_t address) {
    if (!counting) return;
    thread.events.push_back({code, thread.depth, operation, uint8_t(bytes), address});
    if (thread.events.size() - thread.first_event >= EVENTS_PER_TURN && operation == BLOCK) {
        const InRuntime scope;
        end_turn();
    }
}

}  // namespace

void access(const void *pointer, int bytes, Operation operation, const void *code) {
    const uintptr_t address = uintptr_t(pointer);
    last_code = uint32_t(uintptr_t(code));
    check_overwrites();
    if (!in_kernel) {
        const Allocation *found = is_device(pointer) ? allocation_near(address) : nullptr;
        if (found && !found->host_may_use)
            stop("out of bounds", "the host's code uses GPU memory through a pointer, which ends a program", code);
        if (space_of(address) == Space::CONSTANT && !is_gpu_address(pointer))
            report("call", "the host's code uses its own shadow of a __constant__ variable: use cudaMemcpyToSymbol", code);
        return;
    }
    const Space space = space_of(address);
    if (space == Space::LOCAL) return;
    const InRuntime scope;
    if (space == Space::SHARED) {
        if (!check_shared(address, bytes, operation, code)) return;
        if (racing) watch_shared(address, bytes, current, operation, code);
    } else if (space == Space::GLOBAL) {
        check_global(address, bytes, operation, code);
    } else if (space == Space::PROGRAM || space == Space::CONSTANT) {
        check_program(address, bytes, operation, code);
        if (space == Space::CONSTANT && operation != READ)
            report("input", "writes a __constant__ variable, which kernels can only read", code);
    } else if (space == Space::HOST) {
        stop("out of bounds", "a kernel uses an address that is no GPU memory: the host's, one without a value, or an index far beyond", code);
    }
    if (operation == ATOMIC && space != Space::SHARED) may_receive(), may_pass_on();
    add(threads[current], last_code, operation, bytes, address);
}

static void access_volatile(const void *pointer, int bytes, Operation operation, const void *code) {
    if (operation == READ) may_receive();
    else may_pass_on();
    in_volatile = true;
    access(pointer, bytes, operation, code);
    in_volatile = false;
}

void count_access(const void *address, int bytes, Operation operation, const void *code) {
    add(threads[current], uint32_t(uintptr_t(code)), operation, bytes, uintptr_t(address));
}

}  // namespace emulator

using namespace emulator;
#define HERE __builtin_return_address(0)
#define HOOKS(n)                                                                            \
    extern "C" void __tsan_read##n(void *p) { access(p, n, READ, HERE); }                   \
    extern "C" void __tsan_write##n(void *p) { access(p, n, WRITE, HERE); }                 \
    extern "C" void __tsan_unaligned_read##n(void *p) { access(p, n, READ, HERE); }         \
    extern "C" void __tsan_unaligned_write##n(void *p) { access(p, n, WRITE, HERE); }       \
    extern "C" void __tsan_volatile_read##n(void *p) { access_volatile(p, n, READ, HERE); } \
    extern "C" void __tsan_volatile_write##n(void *p) { access_volatile(p, n, WRITE, HERE); }
HOOKS(1) HOOKS(2) HOOKS(4) HOOKS(8) HOOKS(16)
static void range(void *p, long bytes, Operation operation, const void *code) {
    char *const end = static_cast<char *>(p) + bytes;
    for (char *at = static_cast<char *>(p); at < end;) {
        const int n = uintptr_t(at) % 4 || end - at < 4 ? 1 : 4;
        access(at, n, operation, code);
        at += n;
    }
}
extern "C" void __tsan_read_range(void *p, long n) { range(p, n, READ, HERE); }
extern "C" void __tsan_write_range(void *p, long n) { range(p, n, WRITE, HERE); }
// What the program calls in the place of memcpy and its kind: see _build.py.
extern "C" void *ece408_memmove(void *to, const void *from, size_t n) {
    range(const_cast<void *>(from), n, READ, HERE), range(to, n, WRITE, HERE);
    return std::memmove(to, from, n);
}
extern "C" void *ece408_memcpy(void *, const void *, size_t) __attribute__((alias("ece408_memmove")));
extern "C" void *ece408_memset(void *to, int value, size_t n) {
    range(to, n, WRITE, HERE);
    return std::memset(to, value, n);
}
extern "C" void __tsan_init() {}
extern "C" void __tsan_func_entry(void *) {
    if (!in_kernel) return;
    Thread &thread = threads[current];
    if (++thread.depth >= MOST_DEPTH) stop("unsupported", "calls that are nested more than 60 deep", HERE);
    thread.previous[thread.depth] = 0;
}
extern "C" void __tsan_func_exit() {
    if (in_kernel) threads[current].depth--;
}
extern "C" void __tsan_vptr_update(void **, void *) {}
extern "C" void __tsan_vptr_read(void **) {}
// What g++ passes of an index beyond an array of known size (-fsanitize=bounds); _indices.py reads the message.
struct IndexedArray {
    const char *file;
    unsigned line, column;
    const char *type;  // 4 bytes, then its name
};
extern "C" void __ubsan_handle_out_of_bounds(void *data, void *index) {
    const InRuntime scope;
    const IndexedArray &array = *static_cast<const IndexedArray *>(data);
    char text[1000];
    std::snprintf(text, sizeof text, "%s|%u|%u|%ld|%s", array.file, array.line, array.column, long(index), array.type + 4);
    report("index", text, HERE);
}
extern "C" void __sanitizer_cov_trace_pc() {
    last_code = uint32_t(uintptr_t(HERE));
    if (!in_kernel || !counting) return;
    const InRuntime scope;
    Thread &thread = threads[current];
    found_edge(thread.previous[thread.depth], last_code);
    thread.previous[thread.depth] = last_code;
    add(thread, last_code, BLOCK, 0, 0);
}

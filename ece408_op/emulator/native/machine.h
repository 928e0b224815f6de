// The emulated GPU: what the runtime's files share, and what the headers in ../cuda call. x86-64 Linux only.
#pragma once
#include <cstddef>
#include <cstdint>

namespace emulator {

struct Triple {
    unsigned x, y, z;
};

// One launch. `call(kernel)` runs the kernel once, as the current thread; `code` is the launch's address in the program.
struct Grid {
    Triple grid, block;
    size_t shared_bytes;
    void (*call)(void *kernel);
    void *kernel;
    const char *name;
    const void *code;
};
void run_grid(const Grid &grid);
// Whether the block has more threads than __launch_bounds__ allows, so that the launch fails.
bool beyond_bounds(unsigned most_threads, unsigned least_blocks = 0, unsigned most_cluster_blocks = 0);

// A warp's exchange of registers: every lane of `mask` passes a value and gets those of all lanes. Returns the mask of
// the lanes that took part. code: the line of a report; by default the caller's.
unsigned gather(unsigned mask, unsigned long long value, unsigned long long (&all)[32], const void *code = nullptr);
unsigned active_lanes(const void *code);  // of the warp, that have come to the call at `code`
int lane_number();
unsigned lanes_of_warp();  // the lanes that the warp has, whether they have ended or not

// Barriers with a number of threads, and those that only some primitives of the package's kernels need.
void named_barrier(int number, int threads, bool waits = true);
void group_barrier(int group);  // of 128 threads; orders registers only
void yield_thread();
struct Ordering;  // what a release passes on to the threads that acquire it
Ordering *ordering_of(const void *object);
void release(Ordering *ordering);
void complete(Ordering *ordering);
void acquire(Ordering *ordering);

void made_progress();  // a thread that others wait for without a barrier has done its part

// Addresses of shared memory as instructions have them: offsets in dynamic shared memory, or behind 2 GB in the static one.
unsigned shared_address(const void *p);
void *shared_pointer(unsigned address);
// cp.async: a copy takes place where its thread waits for it, as late as a GPU may execute it.
void copy_later(unsigned to, const void *from, int bytes);
void commit_copies();
void wait_for_copies(size_t pending);

void fence();  // __threadfence()

enum Operation : uint8_t { READ, WRITE, ATOMIC, BLOCK };
// Record an access that the compiler does not: an atomic operation's.
void access(const void *address, int bytes, Operation operation, const void *code);
// End the run with a finding, or only add it.
[[noreturn]] void stop(const char *kind, const char *message, const void *code, const void *other = nullptr);
void report(const char *kind, const char *message, const void *code, const void *other = nullptr);

void misaligned();  // a vector of 16 bytes that is not at a multiple of 16

extern unsigned char dynamic_shared[];
void *device_malloc(size_t bytes, bool host_may_use, size_t alignment = 256);
bool device_free(void *address);
// Whether [address, address + bytes) is GPU memory, and all of it inside one allocation.
bool is_device(const void *address);
bool is_inside(const void *address, size_t bytes);
// A variable in GPU memory has this address for the host's code too, which on a GPU has a shadow of it at another one: the
// host may use the address only where cudaGetSymbolAddress gave it, or for managed memory.
void take_address(const void *symbol);
bool is_gpu_address(const void *pointer);
void check_argument(const void *pointer, const void *code);  // of a launch
double milliseconds();

// A warp's products on tensor cores, by the fragments of the PTX ISA.
void mma_fp16(float (&d)[4], const unsigned *a, unsigned b0, unsigned b1);  // 16 x 8 x 16
void mma_tf32(float (&d)[4], const unsigned *a, unsigned b0, unsigned b1);  // 16 x 8 x 8
// A warpgroup's 64 x 16, in registers or in shared memory, times 16 x columns in shared memory; `add`: plus d.
void wgmma(float *d, const unsigned *a, unsigned long long b, int columns, bool add, bool transposed);
void wgmma(float *d, unsigned long long a, unsigned long long b, int columns, bool add, bool transposed);
double half_of(unsigned word, int k);

}  // namespace emulator

// instructions: PTX instructions that the family uses, one function each, named as in NVIDIA's PTX ISA.
//
// tma.cuh has the copies of tensors' tiles. ece408_op/emulator/cuda/plans.h has the same functions for a CPU.

typedef unsigned long long Barrier;     // an mbarrier object (PTX ISA, "Parallel Synchronization: mbarrier")
typedef unsigned long long Descriptor;  // of a matrix in shared memory (PTX ISA, "wgmma: matrix descriptor")

__device__ __forceinline__ unsigned shared_address(const void *p) {
    return static_cast<unsigned>(__cvta_generic_to_shared(p));
}

// Programmatic dependent launch (sm_90): this grid may start before the previous grid has ended. Wait for the previous
// grid's end and its writes; allow the next grid to start.
__device__ __forceinline__ void wait_for_previous_grid() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
__device__ __forceinline__ void allow_next_grid() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Named barrier `id`: `count` threads of the block wait for one another.
__device__ __forceinline__ void named_barrier(int id, int count) {
    asm volatile("barrier.cta.sync %0, %1;" ::"r"(id), "r"(count) : "memory");
}

// An mbarrier completes a phase each time `count` threads have arrived and all bytes that it expects have come.
__device__ __forceinline__ void mbarrier_init(Barrier *barrier, int count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(count) : "memory");
}
__device__ __forceinline__ void mbarrier_arrive(Barrier *barrier) {
    asm volatile("{.reg .b64 state; mbarrier.arrive.shared::cta.b64 state, [%0];}" ::"r"(shared_address(barrier))
                 : "memory");
}
__device__ __forceinline__ void mbarrier_arrive_expect_bytes(Barrier *barrier, int bytes) {
    asm volatile("{.reg .b64 state; mbarrier.arrive.expect_tx.shared::cta.b64 state, [%0], %1;}"
                 ::"r"(shared_address(barrier)), "r"(bytes) : "memory");
}
__device__ __forceinline__ bool mbarrier_phase_ended(Barrier *barrier, int parity) {
    unsigned ended;
#if __CUDA_ARCH__ >= 900
    asm volatile("{.reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}"
                 : "=r"(ended) : "r"(shared_address(barrier)), "r"(parity) : "memory");
#else
    asm volatile("{.reg .pred p; mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}"
                 : "=r"(ended) : "r"(shared_address(barrier)), "r"(parity) : "memory");
#endif
    return ended;
}
// Wait for the end of the phase with the parity of `phase`. The first phase has parity 0; on a fresh barrier, a wait
// for parity 1 returns at once. The whole warp calls it.
__device__ __forceinline__ void mbarrier_wait(Barrier *barrier, int phase) {
    while (!mbarrier_phase_ended(barrier, phase & 1)) {}
    __syncwarp();
}
// The same for one thread.
__device__ __forceinline__ void mbarrier_wait_thread(Barrier *barrier, int phase) {
    while (!mbarrier_phase_ended(barrier, phase & 1)) {}
}

// Store 16 bytes if `condition` holds. A predicated instruction, because the compiler could move earlier
// code into a branch.
__device__ __forceinline__ void store_if(bool condition, uint4 *to, const uint4 &value) {
    asm volatile("{.reg .pred p; setp.ne.u32 p, %0, 0; @p st.global.v4.u32 [%1], {%2, %3, %4, %5};}"
                 ::"r"(int(condition)), "l"(to), "r"(value.x), "r"(value.y), "r"(value.z), "r"(value.w) : "memory");
}

// Bulk copies by the TMA unit (sm_90, CUDA 12): multiples of 16 bytes. A load completes on an mbarrier. A thread
// commits its stores in groups; bulk_store_wait_read waits until the sources of all but the last PENDING may be
// overwritten.
__device__ __forceinline__ void bulk_load(float *to, const float *from, int bytes, Barrier *barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                 ::"r"(shared_address(to)), "l"(from), "r"(bytes), "r"(shared_address(barrier)) : "memory");
}
__device__ __forceinline__ void bulk_store(float *to, const float *from, int bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;"
                 ::"l"(to), "r"(shared_address(from)), "r"(bytes) : "memory");
}
__device__ __forceinline__ void bulk_store_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
template <int PENDING = 0>
__device__ __forceinline__ void bulk_store_wait_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(PENDING) : "memory");
}
// Wait until this thread's bulk stores have been written.
__device__ __forceinline__ void bulk_store_wait() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }
// Make this thread's writes to shared memory visible to the async proxy: TMA and wgmma.
__device__ __forceinline__ void fence_async_proxy() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Two values rounded to fp16 in one word, the first in its lower half.
__device__ __forceinline__ unsigned to_fp16x2(float first, float second) {
    unsigned word;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(second), "f"(first));
    return word;
}
// The values minus their fp16 roundings in `word`, times 2^11, as fp16. The differences are exact: of 24 bits 13
// remain.
__device__ __forceinline__ unsigned fp16x2_residual(float first, float second, unsigned word) {
    float a, b;
    asm("{.reg .f16 l, h; mov.b32 {l, h}, %2; cvt.f32.f16 %0, l; cvt.f32.f16 %1, h;}" : "=f"(a), "=f"(b) : "r"(word));
    return to_fp16x2((first - a) * 2048.0f, (second - b) * 2048.0f);
}

// An fp16 number, from its bits.
__device__ __forceinline__ float from_fp16(unsigned short bits) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
}

// Store four 8 x 8 matrices of 16-bit numbers (stmatrix). Each thread has two neighbours of a row, as in mma's result;
// lane l passes the address of row l % 8 of matrix l / 8.
__device__ __forceinline__ void store_matrices(void *to, unsigned a, unsigned b, unsigned c, unsigned d) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};"
                 ::"r"(shared_address(to)), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}

// d += a b, for 16 x 16 fp16 times 16 x 8, in float32 (PTX ISA, "Matrix Fragments for mma.m16n8k16").
__device__ __forceinline__ void mma(float (&d)[4], const unsigned *a, unsigned b0, unsigned b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// wgmma (sm_90a) is asynchronous: fence before the first of a group, commit the group, wait until at most PENDING
// groups remain. The instructions themselves are macros, WGMMA_..., because their operands depend on the tile.
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int PENDING>
__device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}
// Core matrices (8 rows of 16 bytes) without a swizzle: `leading` bytes apart along K, `stride` bytes along M or N.
__device__ __forceinline__ Descriptor matrix_descriptor(unsigned address, int leading, int stride) {
    return (address >> 4) | Descriptor(leading >> 4) << 16 | Descriptor(stride >> 4) << 32;
}

// Set the registers per thread of this warpgroup (setmaxnreg, sm_90a): take more from the block's pool, or return some.
template <int REGISTERS>
__device__ __forceinline__ void raise_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}
template <int REGISTERS>
__device__ __forceinline__ void lower_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

// Make the value unknown to the compiler, so that it neither precomputes nor keeps values derived from it.
__device__ __forceinline__ void hide_from_compiler(int &value) { asm volatile("" : "+r"(value)); }
__device__ __forceinline__ void hide_from_compiler(unsigned &value) { asm volatile("" : "+r"(value)); }
__device__ __forceinline__ void hide_from_compiler(Descriptor &value) { asm volatile("" : "+l"(value)); }

// The functions of kernels/cuda/split_precision/instructions.cuh for cuda_on_cpu.h. Asynchronous copies are done at
// once; what a GPU requires of addresses and sizes is checked.
typedef unsigned long long Barrier;
typedef unsigned long long Descriptor;

inline unsigned shared_address(const void *p) { return __cvta_generic_to_shared(p); }
inline void wait_for_previous_grid() {}
inline void allow_next_grid() {}

inline void named_barrier(int id, int count) { named[id].sync(count); }
template <int ID, int COUNT>
void named_barrier() { named_barrier(ID, COUNT); }

// An mbarrier: arrivals of a phase, those still missing, and the phases completed.
struct MBarrier {
    short count, missing;
    int phases;
};
static_assert(sizeof(MBarrier) == sizeof(Barrier));
UNWATCHED inline void mbarrier_init(Barrier *barrier, int count) {
    *reinterpret_cast<MBarrier *>(barrier) = {short(count), short(count), 0};
}
UNWATCHED inline void mbarrier_arrive(Barrier *barrier) {
    const races::Pause pause;
    MBarrier &mine = *reinterpret_cast<MBarrier *>(barrier);
    idle = 0;
    of_mbarriers[barrier].arrived();
    if (--mine.missing == 0) mine.missing = mine.count, mine.phases++, of_mbarriers[barrier].complete();
}
inline void mbarrier_arrive_expect_bytes(Barrier *barrier, int) { mbarrier_arrive(barrier); }
UNWATCHED inline void mbarrier_wait_thread(Barrier *barrier, int phase) {
    const races::Pause pause;
    while (reinterpret_cast<MBarrier *>(barrier)->phases % 2 == phase % 2) yield();
    of_mbarriers[barrier].passed();
}
inline void mbarrier_wait(Barrier *barrier, int phase) {
    mbarrier_wait_thread(barrier, phase);
    __syncwarp();
}

inline void copy_bytes(float *to, const float *from, int bytes, int alignment) {
    require_aligned(to, alignment), require_aligned(from, alignment);
    if (bytes % alignment) std::abort();
    for (int i = 0; i < bytes / 4; i++) to[i] = from[i];
}
template <int FLOATS>
void copy_async(float *to, const float *from) { copy_bytes(to, from, 4 * FLOATS, 4 * FLOATS); }
inline void copy_async_commit() {}
inline void copy_async_wait() {}
inline void bulk_load(float *to, const float *from, int bytes, Barrier *) { copy_bytes(to, from, bytes, 16); }
inline void bulk_store(float *to, const float *from, int bytes) { copy_bytes(to, from, bytes, 16); }
inline void bulk_store_commit() {}
inline void bulk_store_wait_read() {}
inline void fence_async_proxy() {}

inline unsigned to_fp16x2(float first, float second) {
    const _Float16 both[2] = {_Float16(first), _Float16(second)};
    unsigned word;
    std::memcpy(&word, both, 4);
    return word;
}
inline unsigned fp16x2_residual(float first, float second, unsigned word) {
    return to_fp16x2((first - float(half_of(word, 0))) * 2048, (second - float(half_of(word, 1))) * 2048);
}

inline float from_fp16(unsigned short bits) { return half_of(bits, 0); }

inline void mma(float (&d)[4], const unsigned *a, unsigned b0, unsigned b1) { emulated_mma(d, a, b0, b1); }
inline void wgmma_fence() {}
inline void wgmma_commit() {}
template <int PENDING>
void wgmma_wait() {}
inline Descriptor matrix_descriptor(unsigned address, int leading, int stride) {
    return (address >> 4) | Descriptor(leading >> 4) << 16 | Descriptor(stride >> 4) << 32;
}
template <int REGISTERS>
void raise_registers() {}
template <int REGISTERS>
void lower_registers() {}
template <typename T>
void hide_from_compiler(T &) {}

// tma: the PTX instructions (sm_90) that copy tiles of tensors between device and shared memory, and one fence. Loads
// complete on an mbarrier (PTX ISA, "cp.async.bulk.tensor").

// A TMA descriptor, made by the host (CUtensorMap).
struct alignas(64) TensorMap {
    unsigned char bytes[128];
};

// Make initialised barriers visible to the TMA unit.
__device__ __forceinline__ void fence_mbarrier_init() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
// Load the box at these coordinates, the innermost first.
__device__ __forceinline__ void tma_load(void *to, const TensorMap &map, Barrier *barrier, int i, int j, int k) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
        "[%0], [%1, {%3, %4, %5}], [%2];"
        ::"r"(shared_address(to)), "l"(&map), "r"(shared_address(barrier)), "r"(i), "r"(j), "r"(k) : "memory");
}
// Load pixels of NHWC images in im2col order, from the window that begins at `column` and `row` of `image` on, all
// moved by the tap's offset. EVICT_FIRST: L2 evicts the pixels before other lines.
template <bool EVICT_FIRST = false>
__device__ __forceinline__ void tma_load_im2col(void *to, const TensorMap &map, Barrier *barrier, int channel,
                                                int column, int row, int image, int tap_column, int tap_row) {
    if (EVICT_FIRST)
        asm volatile(
            "{.reg .b64 policy; createpolicy.fractional.L2::evict_first.b64 policy, 1.0; "
            "cp.async.bulk.tensor.4d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes.L2::cache_hint "
            "[%0], [%1, {%3, %4, %5, %6}], [%2], {%7, %8}, policy;}"
            ::"r"(shared_address(to)), "l"(&map), "r"(shared_address(barrier)), "r"(channel), "r"(column), "r"(row),
              "r"(image), "h"((short)tap_column), "h"((short)tap_row) : "memory");
    else
        asm volatile(
            "cp.async.bulk.tensor.4d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes "
            "[%0], [%1, {%3, %4, %5, %6}], [%2], {%7, %8};"
            ::"r"(shared_address(to)), "l"(&map), "r"(shared_address(barrier)), "r"(channel), "r"(column), "r"(row),
              "r"(image), "h"((short)tap_column), "h"((short)tap_row) : "memory");
}
// Store a box from shared memory at these coordinates, the innermost first; bulk_store_commit and its waits apply to
// it. EVICT_LAST: L2 keeps it longer than other lines.
template <bool EVICT_LAST = false>
__device__ __forceinline__ void tma_store(const TensorMap &map, const void *from, int i, int j, int k) {
    if (EVICT_LAST)
        asm volatile(
            "{.reg .b64 policy; createpolicy.fractional.L2::evict_last.b64 policy, 1.0; "
            "cp.async.bulk.tensor.3d.global.shared::cta.tile.bulk_group.L2::cache_hint [%0, {%2, %3, %4}], [%1], policy;}"
            ::"l"(&map), "r"(shared_address(from)), "r"(i), "r"(j), "r"(k) : "memory");
    else
        asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4}], [%1];"
                     ::"l"(&map), "r"(shared_address(from)), "r"(i), "r"(j), "r"(k) : "memory");
}

// vectors: loads, stores and asynchronous copies (cp.async) of N = 1, 2 or 4 neighbouring floats by one instruction.
//
//     float window[4];  read<4>(window, row + 8);        one load of 16 bytes, at a multiple of 16

template <int N>
__device__ __forceinline__ auto pack(const float *v) {
    if constexpr (N == 4) return make_float4(v[0], v[1], v[2], v[3]);
    else if constexpr (N == 2) return make_float2(v[0], v[1]);
    else return *v;
}
template <int N>
using Vector = decltype(pack<N>(nullptr));

__device__ __forceinline__ void unpack(float *to, float v) { *to = v; }
__device__ __forceinline__ void unpack(float *to, const float2 &v) { to[0] = v.x, to[1] = v.y; }
__device__ __forceinline__ void unpack(float *to, const float4 &v) { to[0] = v.x, to[1] = v.y, to[2] = v.z, to[3] = v.w; }

template <int N>
__device__ __forceinline__ void read(float *to, const float *from) {
    unpack(to, *reinterpret_cast<const Vector<N> *>(from));
}

// Load from global memory that nothing writes during the launch.
template <int N>
__device__ __forceinline__ void load_read_only(float *to, const float *from) {
    unpack(to, __ldg(reinterpret_cast<const Vector<N> *>(from)));
}

template <int N>
__device__ __forceinline__ void write(float *to, const float *from) {
    *reinterpret_cast<Vector<N> *>(to) = pack<N>(from);
}

// A non-temporal (evict-first) store: the kernel does not read y again, so y should not push x out of L2.
template <int N>
__device__ __forceinline__ void write_streaming(float *to, const float *from) {
    __stcs(reinterpret_cast<Vector<N> *>(to), pack<N>(from));
}

// Copy N floats from global to shared memory; asynchronously from compute capability 8.0 on.
template <int N>
__device__ __forceinline__ void copy_async(float *to, const float *from) {
#if __CUDA_ARCH__ >= 800
    const unsigned shared = static_cast<unsigned>(__cvta_generic_to_shared(to));
    if (N == 4) asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared), "l"(from) : "memory");
    else asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(shared), "l"(from), "n"(4 * N) : "memory");
#else
    float v[N];
    read<N>(v, from);
    write<N>(to, v);
#endif
}

__device__ __forceinline__ void commit_copies() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// Wait for all copies but those of the last N calls of commit_copies.
template <int N>
__device__ __forceinline__ void wait_for_copies() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
#endif
}

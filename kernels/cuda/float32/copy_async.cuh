// copy_async: reads and writes of vectors, and copies from global to shared memory that do not wait (cp.async).

template <int N>
__device__ __forceinline__ void read(float *to, const float *from) {
    if (N == 4) {
        const float4 v = *reinterpret_cast<const float4 *>(from);
        to[0] = v.x, to[N / 4] = v.y, to[N / 2] = v.z, to[3 * N / 4] = v.w;
    } else if (N == 2) {
        const float2 v = *reinterpret_cast<const float2 *>(from);
        to[0] = v.x, to[N / 2] = v.y;
    } else {
        to[0] = *from;
    }
}

template <int N>
__device__ __forceinline__ void write(float *to, const float *from) {
    if (N == 4) *reinterpret_cast<float4 *>(to) = make_float4(from[0], from[N / 4], from[N / 2], from[3 * N / 4]);
    else if (N == 2) *reinterpret_cast<float2 *>(to) = make_float2(from[0], from[N / 2]);
    else *to = *from;
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

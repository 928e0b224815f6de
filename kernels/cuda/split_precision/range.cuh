// range: the values that can be split, and their common power of two (split.cuh has the method).

constexpr int SCALED_TOP = 127 + 14;  // biased exponent of the largest value once scaled, in [2^14, 2^15)
constexpr int MAX_SPREAD = 28;     // powers of two below the largest value within which all others must lie
constexpr int MAX_EXPONENT = 120;  // so that 2^120 and 2^-120 are both float32 numbers

__device__ __forceinline__ float power_of_two(int exponent) { return __uint_as_float(unsigned(127 + exponent) << 23); }

// The value times 2^exponent, by two multiplications of about the same size, so that neither leaves the range of
// float32 before the result does.
__device__ __forceinline__ float scaled(float value, int exponent) {
    const int e0 = max(-126, min(126, exponent / 2)), e1 = max(-126, min(126, exponent - e0));
    return multiply(multiply(value, power_of_two(e0)), power_of_two(e1));
}

// The bits of the largest magnitude, and those of the smallest magnitude except zero, minus one. Bits of positive
// floats are ordered as the floats are; the subtraction turns zero into the largest number, so that `min` ignores it.
struct Range {
    unsigned largest = 0, smallest = ~0u;

    __device__ __forceinline__ void add(float value) {
        const unsigned bits = __float_as_uint(value) & 0x7fffffff;
        largest = max(largest, bits), smallest = min(smallest, bits - 1);
    }
    __device__ __forceinline__ void add(const Range &other) {
        largest = max(largest, other.largest), smallest = min(smallest, other.smallest);
    }
    __device__ __forceinline__ void join_warp() {
        largest = __reduce_max_sync(~0u, largest), smallest = __reduce_min_sync(~0u, smallest);
    }
    // All threads of a block call this, once in a kernel.
    template <int THREADS>
    __device__ __forceinline__ void join_block() {
        __shared__ Range warps[THREADS / 32];
        join_warp();
        if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = *this;
        __syncthreads();
        for (int i = 0; i < THREADS / 32; i++) add(warps[i]);
    }
    // The exponent that brings the largest value into [2^14, 2^15). UNSPLITTABLE if it exceeds MAX_EXPONENT, if a value
    // is infinite or NaN or, without `any_spread`, if the values spread over more than `spread` powers of two. Data
    // gradients of wide layers take any spread (wide.py says why).
    static constexpr int UNSPLITTABLE = 1 << 20;
    __device__ __forceinline__ int exponent(bool any_spread = false, int spread = MAX_SPREAD) const {
        const int top = largest >> 23, wanted = largest == 0 ? 0 : SCALED_TOP - top;  // 2^(top - 127) <= largest
        const bool close = any_spread || smallest + 1 >= unsigned(max(top - spread, 1)) << 23;
        return largest == 0 || (top < 255 && wanted <= MAX_EXPONENT && close) ? wanted : UNSPLITTABLE;
    }
    // The exponent of the largest value, whatever the other values are: at most MAX_EXPONENT; 0 with an infinity or a
    // NaN.
    __device__ __forceinline__ int largest_exponent() const {
        const int top = largest >> 23;
        return largest == 0 || top == 255 ? 0 : min(SCALED_TOP - top, MAX_EXPONENT);
    }
};

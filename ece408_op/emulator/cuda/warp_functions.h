// Shuffles, votes and reductions of a warp.
#pragma once

namespace emulator {
template <typename T>
ECE408_PLAIN inline unsigned long long to_register(T value) {
    static_assert(sizeof(T) <= 8, "a shuffle passes at most 8 bytes");
    unsigned long long bits = 0;
    std::memcpy(&bits, &value, sizeof value);
    return bits;
}
template <typename T>
ECE408_PLAIN inline T from_register(unsigned long long bits) {
    T value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}
template <typename T>
ECE408_PLAIN T shuffle(unsigned mask, T value, int source, const void *code) {
    unsigned long long all[32];
    const unsigned lanes = gather(mask, to_register(value), all, code);
    if (!(lanes >> (source & 31) & 1))
        report("undefined", "a shuffle reads the value of a lane that takes no part", code);
    return from_register<T>(all[source & 31]);
}
template <typename T, typename Join>
ECE408_PLAIN T reduce(unsigned mask, T value, Join join) {
    unsigned long long all[32];
    const unsigned lanes = gather(mask, to_register(value), all);
    bool first = true;
    T result = value;
    for (int i = 0; i < 32; i++)
        if (lanes >> i & 1) {
            const T each = from_register<T>(all[i]);
            result = first ? each : join(result, each), first = false;
        }
    return result;
}
}  // namespace emulator

#define ECE408_SHUFFLE(name, Lanes, source)                                                                    \
    template <typename T>                                                                                       \
    ECE408_PLAIN __attribute__((noinline)) T name##_sync(unsigned mask, T value, Lanes n, int width = 32) {      \
        const int lane = emulator::lane_number(), first = lane / width * width, at = lane - first;              \
        return emulator::shuffle(mask, value, source, __builtin_return_address(0));                             \
    }                                                                                                           \
    template <typename T>                                                                                       \
    __forceinline__ T name(T value, Lanes n, int width = 32) { return name##_sync(~0u, value, n, width); }
ECE408_SHUFFLE(__shfl, int, first + n % width)
ECE408_SHUFFLE(__shfl_up, unsigned, at >= int(n) ? lane - int(n) : lane)
ECE408_SHUFFLE(__shfl_down, unsigned, at + int(n) < width ? lane + int(n) : lane)
ECE408_SHUFFLE(__shfl_xor, int, (lane ^ n) / width * width <= first ? lane ^ n : lane)

ECE408_PLAIN __attribute__((noinline)) inline unsigned __activemask() {
    return emulator::active_lanes(__builtin_return_address(0));
}
ECE408_PLAIN inline unsigned __ballot_sync(unsigned mask, int condition) {
    const unsigned mine = condition ? 1u << emulator::lane_number() : 0;
    return emulator::reduce(mask, mine, [](unsigned a, unsigned b) { return a | b; });
}
ECE408_PLAIN inline int __any_sync(unsigned mask, int condition) { return __ballot_sync(mask, condition) != 0; }
ECE408_PLAIN inline int __all_sync(unsigned mask, int condition) { return __ballot_sync(mask, !condition) == 0; }
inline unsigned __ballot(int condition) { return __ballot_sync(~0u, condition); }
inline int __any(int condition) { return __any_sync(~0u, condition); }
inline int __all(int condition) { return __all_sync(~0u, condition); }
#define ECE408_REDUCE(name, expression)                                                                \
    template <typename T>                                                                               \
    ECE408_PLAIN T __reduce_##name##_sync(unsigned mask, T value) {                                      \
        static_assert(std::is_integral<T>::value, "CUDA has no __reduce_" #name "_sync of this type");    \
        return emulator::reduce(mask, value, [](T a, T b) { return T(expression); });                   \
    }
ECE408_REDUCE(add, a + b)
ECE408_REDUCE(min, b < a ? b : a)
ECE408_REDUCE(max, a < b ? b : a)
ECE408_REDUCE(and, a & b)
ECE408_REDUCE(or, a | b)
ECE408_REDUCE(xor, a ^ b)

// Votes of a block: three barriers around a variable of its own.
namespace emulator {
template <typename Join>
ECE408_PLAIN int of_block(int first, int value, Join join) {
    static int sum;
    __syncthreads();
    sum = first;
    __syncthreads();
    sum = join(sum, value);
    __syncthreads();
    return sum;
}
}  // namespace emulator
inline int __syncthreads_or(int condition) {
    return emulator::of_block(0, condition != 0, [](int a, int b) { return a | b; });
}
inline int __syncthreads_and(int condition) {
    return emulator::of_block(1, condition != 0, [](int a, int b) { return a & b; });
}
inline int __syncthreads_count(int condition) {
    return emulator::of_block(0, condition != 0, [](int a, int b) { return a + b; });
}

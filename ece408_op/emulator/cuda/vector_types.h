// float4 and its kind. One access copies a whole vector, as on a GPU: hence the constructors.
#pragma once

namespace emulator {
template <int BYTES>
struct Wide;
template <>
struct Wide<2> { typedef unsigned short __attribute__((may_alias)) type; };
template <>
struct Wide<4> { typedef unsigned __attribute__((may_alias)) type; };
template <>
struct Wide<8> { typedef unsigned long long __attribute__((may_alias)) type; };

// 16 bytes are two accesses here, so that g++, like nvcc, drops a half that nobody uses; the runtime joins the two.
template <typename T>
inline __attribute__((always_inline)) std::enable_if_t<sizeof(T) == 16> copy(T *to, const T *from) {
    typedef Wide<8>::type Word;
    if ((reinterpret_cast<uintptr_t>(from) | reinterpret_cast<uintptr_t>(to)) % 16) misaligned();
    const Word low = reinterpret_cast<const Word *>(from)[0], high = reinterpret_cast<const Word *>(from)[1];
    reinterpret_cast<Word *>(to)[0] = low, reinterpret_cast<Word *>(to)[1] = high;
}
template <typename T>
inline __attribute__((always_inline)) std::enable_if_t<sizeof(T) != 16> copy(T *to, const T *from) {
    typedef typename Wide<sizeof(T)>::type Word;
    *reinterpret_cast<Word *>(to) = *reinterpret_cast<const Word *>(from);
}

// The only value in a vector's braces; two conversions, which a value without braces does not get.
template <typename T>
struct First {
    T value;
    constexpr First(T v) : value(v) {}
};
}  // namespace emulator

#define ECE408_COPIES(name)                                              \
    name() = default;                                                    \
    name(const name &o) { emulator::copy(this, &o); }                    \
    name &operator=(const name &o) { return emulator::copy(this, &o), *this; }

#define ECE408_VECTORS(name, T)                                                                              \
    struct name##1 { T x; };                                                                                 \
    struct alignas(2 * sizeof(T)) name##2 {                                                                  \
        T x, y;                                                                                              \
        ECE408_COPIES(name##2)                                                                               \
        constexpr name##2(emulator::First<T> a) : x(a.value), y(0) {}                                        \
        constexpr name##2(T a, T b) : x(a), y(b) {}                                                          \
    };                                                                                                       \
    struct name##3 { T x, y, z; };                                                                           \
    inline name##1 make_##name##1(T a) { return {a}; }                                                       \
    inline name##2 make_##name##2(T a, T b) { return {a, b}; }                                               \
    inline name##3 make_##name##3(T a, T b, T c) { return {a, b, c}; }
#define ECE408_VECTORS4(name, T)                                                                             \
    ECE408_VECTORS(name, T)                                                                                  \
    struct alignas(4 * sizeof(T)) name##4 {                                                                  \
        T x, y, z, w;                                                                                        \
        ECE408_COPIES(name##4)                                                                               \
        constexpr name##4(emulator::First<T> a) : x(a.value), y(0), z(0), w(0) {}                            \
        constexpr name##4(T a, T b, T c = 0, T d = 0) : x(a), y(b), z(c), w(d) {}                            \
    };                                                                                                       \
    inline name##4 make_##name##4(T a, T b, T c, T d) { return {a, b, c, d}; }
#define ECE408_LONG4(name, T)                                                                                \
    ECE408_VECTORS(name, T)                                                                                  \
    struct alignas(16) name##4 { T x, y, z, w; };                                                            \
    inline name##4 make_##name##4(T a, T b, T c, T d) { return {a, b, c, d}; }

ECE408_VECTORS4(char, signed char)
ECE408_VECTORS4(uchar, unsigned char)
ECE408_VECTORS4(short, short)
ECE408_VECTORS4(ushort, unsigned short)
ECE408_VECTORS4(int, int)
ECE408_VECTORS4(uint, unsigned)
ECE408_VECTORS4(float, float)
ECE408_LONG4(long, long)
ECE408_LONG4(ulong, unsigned long)
ECE408_LONG4(longlong, long long)
ECE408_LONG4(ulonglong, unsigned long long)
ECE408_LONG4(double, double)

struct dim3 {
    unsigned x, y, z;
    constexpr dim3(unsigned a = 1, unsigned b = 1, unsigned c = 1) : x(a), y(b), z(c) {}
    constexpr dim3(const uint3 &o) : x(o.x), y(o.y), z(o.z) {}
    constexpr operator uint3() const { return {x, y, z}; }
};

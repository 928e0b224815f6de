// Arithmetic, and atomic operations.
#pragma once

#define ECE408_MIN_MAX(T)                              \
    inline T min(T a, T b) { return b < a ? b : a; }    \
    inline T max(T a, T b) { return a < b ? b : a; }
ECE408_MIN_MAX(int)
ECE408_MIN_MAX(unsigned)
ECE408_MIN_MAX(long)
ECE408_MIN_MAX(unsigned long)
ECE408_MIN_MAX(long long)
ECE408_MIN_MAX(unsigned long long)
ECE408_MIN_MAX(float)
ECE408_MIN_MAX(double)
// Of two different types, where nvcc takes them: not max(0, x) of an int and a float.
template <typename T>
constexpr int ece408_kind = std::is_floating_point<T>::value ? 1 : std::is_integral<T>::value && sizeof(T) <= 4 ? 2
                            : std::is_same<T, long>::value || std::is_same<T, unsigned long>::value ? 3
                            : std::is_integral<T>::value ? 4 : 0;
template <typename A, typename B>
using ece408_common = std::enable_if_t<ece408_kind<A> && ece408_kind<A> == ece408_kind<B> && !std::is_same<A, B>::value,
                                       std::common_type_t<A, B>>;
template <typename A, typename B>
inline ece408_common<A, B> min(A a, B b) { return min(ece408_common<A, B>(a), ece408_common<A, B>(b)); }
template <typename A, typename B>
inline ece408_common<A, B> max(A a, B b) { return max(ece408_common<A, B>(a), ece408_common<A, B>(b)); }
inline unsigned umin(unsigned a, unsigned b) { return min(a, b); }
inline unsigned umax(unsigned a, unsigned b) { return max(a, b); }

template <typename To, typename From>
inline To ece408_bits(From from) { return __builtin_bit_cast(To, from); }
inline unsigned __float_as_uint(float f) { return ece408_bits<unsigned>(f); }
inline int __float_as_int(float f) { return ece408_bits<int>(f); }
inline float __uint_as_float(unsigned u) { return ece408_bits<float>(u); }
inline float __int_as_float(int i) { return ece408_bits<float>(i); }
inline long long __double_as_longlong(double d) { return ece408_bits<long long>(d); }
inline double __longlong_as_double(long long i) { return ece408_bits<double>(i); }
inline int __float2int_rn(float f) { return int(std::nearbyintf(f)); }
inline int __float2int_rz(float f) { return int(f); }
inline int __float2int_rd(float f) { return int(std::floor(f)); }
inline int __float2int_ru(float f) { return int(std::ceil(f)); }
inline float __int2float_rn(int i) { return float(i); }
inline float __uint2float_rn(unsigned i) { return float(i); }
inline float __double2float_rn(double d) { return float(d); }

inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fdividef(float a, float b) { return a / b; }
inline float __frcp_rn(float a) { return 1 / a; }
inline float __fsqrt_rn(float a) { return std::sqrt(a); }
inline float __expf(float a) { return std::exp(a); }
inline float __exp10f(float a) { return std::pow(10.0f, a); }
inline float __logf(float a) { return std::log(a); }
inline float __log2f(float a) { return std::log2(a); }
inline float __powf(float a, float b) { return std::pow(a, b); }
inline float __sinf(float a) { return std::sin(a); }
inline float __cosf(float a) { return std::cos(a); }
inline float __tanf(float a) { return std::tan(a); }
inline float __saturatef(float a) { return a > 0 ? (a < 1 ? a : 1) : 0; }
inline float rsqrtf(float a) { return 1 / std::sqrt(a); }
inline double rsqrt(double a) { return 1 / std::sqrt(a); }
inline float fdividef(float a, float b) { return a / b; }
inline int __mul24(int a, int b) { return int(unsigned(a << 8 >> 8) * unsigned(b << 8 >> 8)); }
inline unsigned __umul24(unsigned a, unsigned b) { return (a & 0xffffff) * (b & 0xffffff); }
inline int __mulhi(int a, int b) { return int((long long)a * b >> 32); }
inline unsigned __umulhi(unsigned a, unsigned b) { return unsigned((unsigned long long)a * b >> 32); }
inline int __popc(unsigned a) { return __builtin_popcount(a); }
inline int __popcll(unsigned long long a) { return __builtin_popcountll(a); }
inline int __clz(int a) { return a ? __builtin_clz(a) : 32; }
inline int __clzll(long long a) { return a ? __builtin_clzll(a) : 64; }
inline int __ffs(int a) { return __builtin_ffs(a); }
inline int __ffsll(long long a) { return __builtin_ffsll(a); }
inline unsigned __brev(unsigned a) {
    unsigned reversed = 0;
    for (int i = 0; i < 32; i++) reversed |= (a >> i & 1) << (31 - i);
    return reversed;
}
// The larger of each half of two words, and the smaller.
inline unsigned __vmaxu2(unsigned a, unsigned b) { return max(a >> 16, b >> 16) << 16 | max(a & 0xffff, b & 0xffff); }
inline unsigned __vminu2(unsigned a, unsigned b) { return min(a >> 16, b >> 16) << 16 | min(a & 0xffff, b & 0xffff); }
inline void __prof_trigger(int) {}
inline void __trap() { std::abort(); }
inline long long clock64() { return (long long)(1e6 * emulator::milliseconds()); }
inline void __nanosleep(unsigned) { emulator::yield_thread(); }

#define ECE408_LOAD(name) template <typename T> inline T name(const T *p) { return *p; }
ECE408_LOAD(__ldg) ECE408_LOAD(__ldcg) ECE408_LOAD(__ldca) ECE408_LOAD(__ldcs)
#define ECE408_STORE(name) template <typename T, typename V> inline void name(T *p, V v) { *p = v; }
ECE408_STORE(__stcg) ECE408_STORE(__stcs)

inline unsigned __cvta_generic_to_shared(const void *p) { return emulator::shared_address(p); }
inline void __pipeline_memcpy_async(void *to, const void *from, size_t bytes) {
    emulator::copy_later(emulator::shared_address(to), from, bytes);
}
inline void __pipeline_commit() { emulator::commit_copies(); }
inline void __pipeline_wait_prior(size_t pending) { emulator::wait_for_copies(pending); }

// An atomic operation: the runtime hears of it, and no other thread runs in between.
template <typename T>
constexpr bool ece408_word = std::is_integral<T>::value && sizeof(T) >= 4;
#define ECE408_ATOMIC(name, operation, allowed)                                                     \
    template <typename T>                                                                            \
    ECE408_PLAIN __attribute__((noinline)) T name(T *p, std::common_type_t<T> v) {                    \
        static_assert(allowed, "CUDA has no " #name " of this type");                                \
        emulator::access(p, sizeof(T), emulator::ATOMIC, __builtin_return_address(0));               \
        T old;                                                                                       \
        std::memcpy(&old, p, sizeof(T)); /* the copies of vectors are watched */                     \
        const T next = operation;                                                                    \
        std::memcpy(p, &next, sizeof(T));                                                            \
        return old;                                                                                  \
    }
ECE408_ATOMIC(atomicAdd, T(old + v), ece408_word<T> || !std::is_integral<T>::value)
ECE408_ATOMIC(atomicSub, T(old - v), ece408_word<T>)
ECE408_ATOMIC(atomicExch, v, (ece408_word<T> || std::is_same<T, float>::value))
ECE408_ATOMIC(atomicMin, (v < old ? v : old), ece408_word<T>)
ECE408_ATOMIC(atomicMax, (old < v ? v : old), ece408_word<T>)
ECE408_ATOMIC(atomicAnd, T(old & v), ece408_word<T>)
ECE408_ATOMIC(atomicOr, T(old | v), ece408_word<T>)
ECE408_ATOMIC(atomicXor, T(old ^ v), ece408_word<T>)
ECE408_ATOMIC(atomicInc, (old >= v ? T(0) : T(old + 1)), ece408_word<T>)
ECE408_ATOMIC(atomicDec, (old == 0 || old > v ? T(v) : T(old - 1)), ece408_word<T>)
template <typename T>
ECE408_PLAIN __attribute__((noinline)) T atomicCAS(T *p, std::common_type_t<T> expected, std::common_type_t<T> v) {
    static_assert(std::is_integral<T>::value && sizeof(T) >= 2, "CUDA has no atomicCAS of this type");
    emulator::access(p, sizeof(T), emulator::ATOMIC, __builtin_return_address(0));
    const T old = *p;
    if (old == expected) *p = v;
    return old;
}

// half and half2. Each operation rounds once, as a GPU's does.
#pragma once
#include "ece408_emulator.h"

struct __half {
    _Float16 value;
    __half() = default;
    __half(_Float16 v) : value(v) {}
    __half(float v) : value(_Float16(v)) {}
    __half(double v) : value(_Float16(v)) {}
    __half(int v) : value(_Float16(v)) {}
    __half(unsigned v) : value(_Float16(v)) {}
    operator float() const { return float(value); }
};
typedef __half half;
typedef __half __half_raw;
struct alignas(4) __half2 {
    __half x, y;
    ECE408_COPIES(__half2)
    __half2(__half a, __half b) : x(a), y(b) {}
};
typedef __half2 half2;

inline double ece408_d(__half a) { return double(float(a.value)); }
inline __half ece408_h(double a) { return __half(_Float16(a)); }
#define ECE408_HALF(operation, name, name2, assign)                                                       \
    inline __half name(__half a, __half b) { return ece408_h(ece408_d(a) operation ece408_d(b)); }         \
    inline __half2 name2(__half2 a, __half2 b) { return {name(a.x, b.x), name(a.y, b.y)}; }                \
    inline __half operator operation(__half a, __half b) { return name(a, b); }                            \
    inline __half2 operator operation(__half2 a, __half2 b) { return name2(a, b); }                        \
    inline __half &operator assign(__half &a, __half b) { return a = name(a, b); }                         \
    inline __half2 &operator assign(__half2 &a, __half2 b) { return a = name2(a, b); }
ECE408_HALF(+, __hadd, __hadd2, +=)
ECE408_HALF(-, __hsub, __hsub2, -=)
ECE408_HALF(*, __hmul, __hmul2, *=)
ECE408_HALF(/, __hdiv, __h2div, /=)
#define ECE408_COMPARE(operation, name)                                                                   \
    inline bool name(__half a, __half b) { return float(a) operation float(b); }                           \
    inline bool operator operation(__half a, __half b) { return float(a) operation float(b); }
ECE408_COMPARE(<, __hlt)
ECE408_COMPARE(>, __hgt)
ECE408_COMPARE(<=, __hle)
ECE408_COMPARE(>=, __hge)
ECE408_COMPARE(==, __heq)
ECE408_COMPARE(!=, __hne)
inline __half operator-(__half a) { return __half(_Float16(-float(a))); }
inline __half __hneg(__half a) { return -a; }
inline __half2 __hneg2(__half2 a) { return {-a.x, -a.y}; }
inline __half __habs(__half a) { return __half(std::fabs(float(a))); }
inline bool __hisnan(__half a) { return std::isnan(float(a)); }
inline __half __hmax(__half a, __half b) { return float(a) < float(b) ? b : a; }
inline __half __hmin(__half a, __half b) { return float(b) < float(a) ? b : a; }
inline __half __hfma(__half a, __half b, __half c) { return ece408_h(ece408_d(a) * ece408_d(b) + ece408_d(c)); }
inline __half2 __hfma2(__half2 a, __half2 b, __half2 c) { return {__hfma(a.x, b.x, c.x), __hfma(a.y, b.y, c.y)}; }

inline __half __float2half(float a) { return __half(a); }
inline __half __float2half_rn(float a) { return __half(a); }
inline __half __double2half(double a) { return __half(a); }
inline __half __int2half_rn(int a) { return __half(a); }
inline __half __uint2half_rn(unsigned a) { return __half(a); }
inline float __half2float(__half a) { return float(a); }
inline int __half2int_rn(__half a) { return int(std::nearbyintf(float(a))); }
inline int __half2int_rz(__half a) { return int(float(a)); }
inline unsigned short __half_as_ushort(__half a) { return ece408_bits<unsigned short>(a.value); }
inline __half __ushort_as_half(unsigned short a) { return __half(ece408_bits<_Float16>(a)); }
inline __half2 __halves2half2(__half a, __half b) { return {a, b}; }
inline __half2 make_half2(__half a, __half b) { return {a, b}; }
inline __half2 __half2half2(__half a) { return {a, a}; }
inline __half2 __float2half2_rn(float a) { return {__half(a), __half(a)}; }
inline __half2 __floats2half2_rn(float a, float b) { return {__half(a), __half(b)}; }
inline __half2 __float22half2_rn(float2 a) { return {__half(a.x), __half(a.y)}; }
inline float2 __half22float2(__half2 a) { return make_float2(float(a.x), float(a.y)); }
inline float __low2float(__half2 a) { return float(a.x); }
inline float __high2float(__half2 a) { return float(a.y); }
inline __half __low2half(__half2 a) { return a.x; }
inline __half __high2half(__half2 a) { return a.y; }
inline __half2 __low2half2(__half2 a) { return {a.x, a.x}; }
inline __half2 __high2half2(__half2 a) { return {a.y, a.y}; }
inline __half2 __lowhigh2highlow(__half2 a) { return {a.y, a.x}; }
inline __half2 __lows2half2(__half2 a, __half2 b) { return {a.x, b.x}; }
inline __half2 __highs2half2(__half2 a, __half2 b) { return {a.y, b.y}; }
inline __half hexp(__half a) { return __half(std::exp(float(a))); }
inline __half hsqrt(__half a) { return __half(std::sqrt(float(a))); }
inline __half hrcp(__half a) { return __half(1 / float(a)); }

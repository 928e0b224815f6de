// nvcuda::wmma, half times half and TF32 times TF32.
#pragma once
#include "cuda_fp16.h"
#include "ptx.h"

namespace nvcuda {
namespace wmma {

struct matrix_a {};
struct matrix_b {};
struct accumulator {};
struct row_major {};
struct col_major {};
enum layout_t { mem_row_major, mem_col_major };
namespace precision {
struct tf32 {};
}  // namespace precision
template <typename T>
using ece408_element_type = std::conditional_t<std::is_same<T, precision::tf32>::value, float, T>;

template <typename Use, int M, int N, int K>
struct ece408_shape { static constexpr int rows = M, columns = N; };
template <int M, int N, int K>
struct ece408_shape<matrix_a, M, N, K> { static constexpr int rows = M, columns = K; };
template <int M, int N, int K>
struct ece408_shape<matrix_b, M, N, K> { static constexpr int rows = K, columns = N; };

// A lane has every 32nd element of the matrix, from the last lane to the first: NVIDIA leaves open which lane has which, and
// with the order of the lanes, each would read what it has mostly written itself, so that no race was found.
template <typename Use, int M, int N, int K, typename T, typename Layout = void>
struct fragment {
    static constexpr bool halves = std::is_same<T, half>::value, tf32 = std::is_same<T, precision::tf32>::value;
    static constexpr bool sums = std::is_same<T, float>::value && std::is_same<Use, accumulator>::value;
    static_assert((K == 16 && M * N == 256 && M >= 8 && N >= 8 && !tf32) || (K == 8 && M == 16 && N == 16 && !halves),
                  "the emulator lacks wmma of other sizes than 16 x 16 x 16, 32 x 8 x 16 and 8 x 32 x 16, and 16 x 16 x 8 "
                  "for TF32");
    static_assert(halves || tf32 || sums, "the emulator lacks wmma of other types than half and TF32");
    typedef ece408_shape<Use, M, N, K> shape;
    static constexpr int rows = shape::rows, columns = shape::columns, num_elements = rows * columns / 32;
    ece408_element_type<T> x[num_elements];
};

template <typename Use, int M, int N, int K, typename T, typename Layout, typename V>
inline void fill_fragment(fragment<Use, M, N, K, T, Layout> &f, V value) {
    for (auto &each : f.x) each = ece408_element_type<T>(value);
}

// A GPU leaves open what happens otherwise.
template <typename T>
ECE408_PLAIN __attribute__((noinline)) void ece408_check(const T *p, unsigned stride) {
    if (reinterpret_cast<uintptr_t>(p) % 32 || stride * sizeof(T) % 16)
        emulator::report("misaligned",
                         "wmma needs an address that is a multiple of 32 bytes and a stride that is a multiple of 16 bytes",
                         __builtin_return_address(0));
}

inline int ece408_element(int i) { return 32 * i + 31 - emulator::lane_number(); }

template <typename Use, int M, int N, int K, typename T, typename Layout>
inline void ece408_load(fragment<Use, M, N, K, T, Layout> &f, const ece408_element_type<T> *from, unsigned stride,
                        bool by_rows) {
    ece408_check(from, stride);
    for (int i = 0; i < f.num_elements; i++) {
        const int e = ece408_element(i), row = e / f.columns, column = e % f.columns;
        f.x[i] = from[by_rows ? row * stride + column : column * stride + row];
    }
    __syncwarp();
}
template <typename Use, int M, int N, int K, typename T, typename Layout>
inline void load_matrix_sync(fragment<Use, M, N, K, T, Layout> &f, const ece408_element_type<T> *from, unsigned stride) {
    ece408_load(f, from, stride, std::is_same<Layout, row_major>::value);
}
template <int M, int N, int K, typename T>
inline void load_matrix_sync(fragment<accumulator, M, N, K, T> &f, const T *from, unsigned stride, layout_t layout) {
    ece408_load(f, from, stride, layout == mem_row_major);
}
template <int M, int N, int K, typename T>
inline void store_matrix_sync(T *to, const fragment<accumulator, M, N, K, T> &f, unsigned stride, layout_t layout) {
    ece408_check(to, stride);
    for (int i = 0; i < f.num_elements; i++) {
        const int e = ece408_element(i), row = e / f.columns, column = e % f.columns;
        to[layout == mem_row_major ? row * stride + column : column * stride + row] = f.x[i];
    }
}

inline float __float_to_tf32(float value) {
    unsigned bits;
    emulator::ptx::cvt_rna_tf32_f32(bits, value);
    return __uint_as_float(bits);
}
// What a tensor core uses of an element.
inline double ece408_operand(half value) { return double(float(value)); }
inline double ece408_operand(float value) { return double(__uint_as_float(__float_as_uint(value) & ~0x1fffu)); }

// Lanes read the others' fragments through pointers that they exchange.
template <typename D, typename A, typename B, typename C>
ECE408_PLAIN __attribute__((noinline)) void mma_sync(D &d, const A &a, const B &b, const C &c) {
    unsigned long long as[32], bs[32];
    const void *const code = __builtin_return_address(0);
    if (emulator::gather(~0u, reinterpret_cast<unsigned long long>(a.x), as, code) != ~0u)
        return emulator::report("undefined", "mma_sync without all 32 lanes of the warp", code);
    emulator::gather(~0u, reinterpret_cast<unsigned long long>(b.x), bs, code);
    D result;
    for (int i = 0; i < d.num_elements; i++) {
        const int e = ece408_element(i), row = e / d.columns, column = e % d.columns;
        double sum = double(float(c.x[i]));
        for (int k = 0; k < a.columns; k++) {
            const int in_a = row * a.columns + k, in_b = k * b.columns + column;
            sum += ece408_operand(reinterpret_cast<decltype(&a.x[0])>(as[31 - in_a % 32])[in_a / 32]) *
                   ece408_operand(reinterpret_cast<decltype(&b.x[0])>(bs[31 - in_b % 32])[in_b / 32]);
        }
        result.x[i] = std::remove_reference_t<decltype(result.x[0])>(float(sum));
    }
    emulator::gather(~0u, 0, as, code);
    d = result;
}

}  // namespace wmma
}  // namespace nvcuda

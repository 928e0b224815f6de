// Tensor cores, lane by lane in double precision.
#include <cmath>
#include <cstring>

#include "internal.h"

namespace emulator {

double half_of(unsigned word, int k) {
    static const std::vector<float> halves = [] {  // g++ converts by a call, as not all CPUs have an instruction
        std::vector<float> all;
        for (int bits = 0; bits < 1 << 16; bits++) all.push_back(__builtin_bit_cast(_Float16, static_cast<short>(bits)));
        return all;
    }();
    return halves[word >> 16 * (k % 2) & 0xffff];
}

namespace {

unsigned rows_of[32][32][4], columns_of[32][32][2];  // A and B, by warp and lane

double float_of(unsigned word) { return __builtin_bit_cast(float, word); }

void exchange() {
    unsigned long long all[32];
    gather(~0u, 0, all);
}

// Product k of row r of the warp's 16 x 16 matrix A.
double row_value(int warp, int r, int k) { return half_of(rows_of[warp][r % 8 * 4 + k % 8 / 2][r / 8 + k / 8 * 2], k); }

// A tensor core's sum of its terms: each is truncated two bits behind the last bit of a float as large as the largest
// term, and the sum at its own last bit, both towards zero. Two bits, as an H200's sums show (docs/numerics.md).
template <int N>
float truncated_sum(const double (&terms)[N]) {
    double largest = 0, sum = 0;
    for (const double term : terms) largest = std::fabs(term) > largest ? std::fabs(term) : largest, sum += term;
    if (!(largest > 0) || !std::isfinite(sum)) return float(sum);
    const double unit = std::ldexp(1.0, std::ilogb(largest) - 25);
    sum = 0;
    for (const double term : terms) sum += std::trunc(term / unit);
    sum *= unit;
    const float nearest = float(sum);
    return std::fabs(double(nearest)) > std::fabs(sum) ? std::nextafter(nearest, 0.0f) : nearest;
}

// Elements k and k + 1 of a row or column. Without a swizzle: core matrices of 8 rows or columns x 16 bytes, their
// distances in the descriptor. With one: rows of 128, 64 or 32 bytes, each with its 16-byte parts in another order; the
// address counts from multiples of 1024. Transposed, k is the outer index: 64 rows or columns lie in 128 bytes, swizzled.
unsigned described(unsigned long long at, int row, int k, bool transposed) {
    const auto field = [&](int bit) { return (at >> bit & 0x3fff) << 4; };
    const auto swizzled = [](unsigned from, unsigned width) { return dynamic_shared + (from ^ (from >> 3 & (width - 16))); };
    if (transposed) {
        unsigned short halves[2];
        for (int n = 0; n < 2; n++) {
            const int own = k / 2 * 2 + n;
            std::memcpy(halves + n, swizzled(field(0) + row / 64 * field(16) + own / 8 * field(32) + own % 8 * 128 + row % 64 * 2, 128), 2);
        }
        return halves[0] | unsigned(halves[1]) << 16;
    }
    const int width = 256 >> (at >> 62);
    unsigned word;
    std::memcpy(&word, at >> 62 ? swizzled(field(0) + row / 8 * field(32) + row % 8 * width + k / 2 * 4, width)
                                : dynamic_shared + field(0) + row / 8 * field(32) + k / 8 * field(16) + row % 8 * 16 + k % 8 / 2 * 4,
                4);
    return word;
}

// A warp's product with K steps; ``product(warp, row, column, k)`` is one of its terms.
template <int K, typename Product>
void multiply(float (&d)[4], const unsigned *a, unsigned b0, unsigned b1, Product product) {
    const int warp = current / 32, lane = current % 32;
    std::memcpy(rows_of[warp][lane], a, 16);
    columns_of[warp][lane][0] = b0, columns_of[warp][lane][1] = b1;
    exchange();
    for (int v = 0; v < 4; v++) {
        double terms[1 + K] = {d[v]};
        for (int k = 0; k < K; k++) terms[1 + k] = product(warp, lane / 4 + v / 2 * 8, lane % 4 * 2 + v % 2, k);
        d[v] = truncated_sum(terms);
    }
    exchange();
}

}  // namespace

void mma_fp16(float (&d)[4], const unsigned *a, unsigned b0, unsigned b1) {
    multiply<16>(d, a, b0, b1, [](int warp, int row, int column, int k) {
        return row_value(warp, row, k) * half_of(columns_of[warp][column * 4 + k % 8 / 2][k / 8], k);
    });
}

void mma_tf32(float (&d)[4], const unsigned *a, unsigned b0, unsigned b1) {
    multiply<8>(d, a, b0, b1, [](int warp, int row, int column, int k) {
        return float_of(rows_of[warp][row % 8 * 4 + k % 4][row / 8 + k / 4 * 2]) *
               float_of(columns_of[warp][column * 4 + k % 4][k / 4]);
    });
}

void wgmma(float *d, const unsigned *a, unsigned long long b, int columns, bool add, bool transposed) {
    const int warp = current / 32, lane = current % 32;
    std::memcpy(rows_of[warp][lane], a, 16);
    group_barrier(warp / 4);
    double rows[2][16], column[16];  // those that this lane multiplies
    for (int r = 0; r < 2; r++)
        for (int k = 0; k < 16; k++) rows[r][k] = row_value(warp, lane / 4 + 8 * r, k);
    for (int i = 0; i < columns / 4; i++) {
        for (int k = 0; k < 16; k += 2) {
            const unsigned word = described(b, i / 2 * 8 + lane % 4 * 2 + i % 2, k, transposed);
            column[k] = half_of(word, 0), column[k + 1] = half_of(word, 1);
        }
        for (int r = 0; r < 2; r++) {
            float &sum = d[i / 2 * 4 + 2 * r + i % 2];
            double terms[17] = {add ? sum : 0.0f};
            for (int k = 0; k < 16; k++) terms[1 + k] = rows[r][k] * column[k];
            sum = truncated_sum(terms);
        }
    }
    group_barrier(warp / 4);
}

void wgmma(float *d, unsigned long long a, unsigned long long b, int columns, bool add, bool transposed) {
    const int row = current / 32 % 4 * 16 + current % 32 / 4, k = current % 4 * 2;
    unsigned own[4];
    for (int i = 0; i < 4; i++) own[i] = described(a, row + i % 2 * 8, k + i / 2 * 8, transposed);
    wgmma(d, own, b, columns, add, transposed);
}

}  // namespace emulator

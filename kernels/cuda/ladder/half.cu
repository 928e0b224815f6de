// half: `register_tiled` with its tiles in shared memory kept as 16-bit floats, all sums in float32.
//
// Inputs are rounded to 11 bits as they enter shared memory; the products of two such numbers are exact
// in float32 and are summed there. A thread reads two neighbouring pixels in one word: 4 words instead of
// 8, and one 16-byte read of weights instead of two, at the cost of converting both back.
//
// Right for |x| and |w| from 2**-14 to 65504: larger values become infinite, smaller ones keep fewer bits.
// The conversions are PTX of every architecture, so no header is needed.

#define STORED
typedef unsigned short stored_t;

__device__ __forceinline__ unsigned short to_half(float value) {
    unsigned short bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
}

__device__ __forceinline__ float from_half(unsigned short bits) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
}

__device__ __forceinline__ stored_t to_stored(float value) { return to_half(value); }

// Pixels 2 lane and 2 lane + 1 of each 64.
__device__ __forceinline__ int place_of(int lane, int u) { return 2 * lane + u % 2 + u / 2 * 64; }

__device__ __forceinline__ void unpack(float (&value)[8], int at, unsigned word) {
    value[at] = from_half((unsigned short)(word & 0xffff));
    value[at + 1] = from_half((unsigned short)(word >> 16));
}

__device__ __forceinline__ void read_pixels(float (&value)[8], const stored_t *row, int lane) {
    const unsigned *words = reinterpret_cast<const unsigned *>(row);
#pragma unroll
    for (int u = 0; u < 4; u++) unpack(value, 2 * u, words[lane + 32 * u]);
}

__device__ __forceinline__ void read_filters(float (&value)[8], const stored_t *row) {
    const uint4 words = *reinterpret_cast<const uint4 *>(row);
    unpack(value, 0, words.x);
    unpack(value, 2, words.y);
    unpack(value, 4, words.z);
    unpack(value, 6, words.w);
}

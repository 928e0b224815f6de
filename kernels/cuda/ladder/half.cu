// half: `register_tiled` with fp16 tiles in shared memory; all sums in float32.
//
// Inputs are rounded to 11 bits when they are stored to shared memory. The product of two such numbers is exact in
// float32, and is added in float32.
//
//     shared memory word:  | pixel 2 lane + 1 | pixel 2 lane |      one read brings two pixels
//
// Example, 6 x 30 x 30 inputs and 16 filters of 5 x 5: the block of `register_tiled`; a buffer of 4 x 512 pixels takes
// 4 KB instead of 8.
//
// Arithmetic intensity: as `register_tiled`, with half of the shared-memory traffic: per 64 multiply-adds, 4 words of
// pixels instead of 8 and one 16-byte read of weights instead of two. The conversions back to float32 take issue slots,
// which limit it.
// Source: IEEE 754 binary16; PTX ISA, cvt.
// Restriction: |x| and |w| from 2**-14 to 65504; larger values become infinite, smaller ones keep fewer bits.
//
// This file comes before register_tiled.cu, and replaces its definitions for float. The conversions are PTX that every
// architecture has, so no header is needed.

#define HAS_STORED_TYPE
typedef unsigned short stored_t;

__device__ __forceinline__ stored_t to_stored(float value) {
    stored_t bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
}

__device__ __forceinline__ float from_stored(stored_t bits) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
}

// The thread's pixels are 2 lane and 2 lane + 1 of each 64.
__device__ __forceinline__ int pixel_in_warp(int lane, int u) { return 2 * lane + u % 2 + u / 2 * 64; }

__device__ __forceinline__ void unpack(float (&values)[8], int first, unsigned word) {
    values[first] = from_stored((stored_t)(word & 0xffff));
    values[first + 1] = from_stored((stored_t)(word >> 16));
}

__device__ __forceinline__ void read_pixels(float (&values)[8], const stored_t *row, int lane) {
    const unsigned *words = reinterpret_cast<const unsigned *>(row);
#pragma unroll
    for (int u = 0; u < 4; u++) unpack(values, 2 * u, words[lane + 32 * u]);
}

__device__ __forceinline__ void read_weights(float (&values)[8], const stored_t *row) {
    const uint4 words = *reinterpret_cast<const uint4 *>(row);
    unpack(values, 0, words.x);
    unpack(values, 2, words.y);
    unpack(values, 4, words.z);
    unpack(values, 6, words.w);
}

// A warp's products on tensor cores, by the fragments of the PTX ISA.
#pragma once

namespace emulator {

void mma_fp16(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1);  // 16 x 8 x 16
void mma_tf32(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1);  // 16 x 8 x 8
// A warpgroup's 64 x 16, in registers, times 16 x columns in shared memory, added to d; or A in shared memory too.
void wgmma(float *d, const unsigned *a, unsigned long long b, int columns);
void wgmma(float *d, unsigned long long a, unsigned long long b, int columns);
double half_of(unsigned word, int k);

}  // namespace emulator

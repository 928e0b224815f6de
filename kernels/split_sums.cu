// split_sums: long sums, of which tensor cores lose at every step, added up a few steps at a time.
//
// A tensor core cuts a sum off at its last bit. After CHUNK steps the sum is parted: what is whole in units of 2^13 is
// moved to a register of its own, the rest stays. Both are exact, so that only the sums of a few steps are cut off,
// and their last bits weigh as much less as they are smaller than the whole. Values are scaled so that products are
// below 2^30; sums beyond 2^36 are parted in units as much larger, and whole ones beyond 2^37 are rounded, as sums are.
//
// Arithmetic: four additions for each sum and CHUNK steps. A register more for each sum.

__device__ __forceinline__ void move_up(float &sum, float &whole) {
    constexpr float BIG = 1.5f * 0x1p36f;
    const float moved = (sum + BIG) - BIG;
    whole += moved;
    sum -= moved;
}

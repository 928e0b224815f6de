// accumulators: long sums, of which tensor cores lose at every step, added up a few steps at a time.
//
// A tensor core cuts a sum off at its last bit. After CHUNK steps the sum is parted: what is whole in units of 2^13 is
// moved to a register of its own, the rest stays. Both are exact, so that only the sums of a few steps are cut off,
// and their last bits weigh as much less as they are smaller than the whole. Values are scaled so that products are
// below 2^30. Sums beyond 2^35 are parted in units of 2^12 or 2^14, so that what is moved adds up exactly below 2^36, and
// is rounded as any sum beyond. A window so much darker than its tile that its sums stay below 2^12 is not parted.
//
// Arithmetic: four additions for each sum and CHUNK steps. A register more for each sum.

static_assert(!CHUNKED || CHUNK % 6 == 0, "steps are taken two (split) or three (fp16x3_warpgroup) at a time");

__device__ __forceinline__ void move_up(float &sum, float &whole) {
    constexpr float BIG = 1.5f * 0x1p36f;
    const float moved = (sum + BIG) - BIG;
    whole += moved;
    sum -= moved;
}

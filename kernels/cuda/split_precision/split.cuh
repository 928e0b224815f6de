// split: the arithmetic of split precision. A float32 product becomes three fp16 products that tensor cores add in
// float32.
//
//     x 2^e = x_high + x_low / 2^11          w 2^f = w_high + w_low / 2^11
//     y 2^(e + f) = sum x_high w_high  +  (sum x_high w_low + sum x_low w_high) / 2^11     x_low w_low is left out
//
// e belongs to a tile of x and f to a filter: the largest value then lies in [2^14, 2^15), so that nothing overflows,
// and values down to 2^-28 of it keep 22 bits. Tiles and filters with a smaller value, an infinity or a NaN cannot be
// split; recompute_images.cu computes their images in float32. With Config::components 1 (fp16x1) only the high
// components exist.
//
// The method: Markidis et al. 2018; the factor 2^11: Ootomo and Yokota 2022; the same with tf32: CUTLASS, 3xTF32. What
// tensor cores truncate: Fasi et al. 2021. docs/numerics.md has the references, split_precision.py the error bound.

constexpr int COMPONENTS = Config::components;
constexpr bool PROMOTES = Config::promotion_interval > 0;
constexpr int PROMOTION_INTERVAL = PROMOTES ? Config::promotion_interval : Config::k_steps;
constexpr bool CORRECTS_SAME_SIGN = COMPONENTS == 2 && !PROMOTES && Config::k_steps >= Config::long_sum;

// Truncation bias. A tensor core truncates a sum at its last bit at each k-step, always towards zero. A sum of n
// k-steps whose products have mixed signs loses about Config::truncation_bias n units of 2^-23, as measured with
// mma.sync and wgmma, 2 to 122 k-steps. The output scale of a filter is increased by that, except for filters whose
// weights are exact in one fp16 each, so that sums of small integers stay exact. With accumulator promotion only the
// last interval's k-steps count.
//
// Same-sign bias. If all products have one sign, a sum loses Config::same_sign_bias units more per k-step; with mixed
// signs, it loses that times |sum| / sum |x||w|. This ratio is at least |sum| / (2^15 times the filter's sum of |w|).
// The correction uses the lower bound, for long sums that are not promoted (CORRECTS_SAME_SIGN).

// A GEMM column's scale in one int. Bits 19 and up: the filter's power of two. Bits 8 to 18: the upper bits of a
// positive float, the same-sign correction. Bits 0 to 7: the truncation correction, which is added to the output
// scale's mantissa (units of 2^-23). 2^-38 is 2^-23 / 2^15.
__device__ __forceinline__ int pack_filter_scale(int exponent, int k_steps, float weight_sum) {
    const unsigned same_sign = CORRECTS_SAME_SIGN && k_steps
                                   ? __float_as_uint(Config::same_sign_bias * 0x1p-38f * k_steps / weight_sum) >> 20
                                   : 0;
    return exponent * 0x80000 + (same_sign << 8) +
           min(int(Config::truncation_bias * min(k_steps, PROMOTION_INTERVAL) + 0.5f), 255);
}
__device__ __forceinline__ int filter_exponent(int filter_scale) { return filter_scale >> 19; }

// Turns a sum into an output: undoes the scales of tile and filter, and corrects both biases. For the same-sign
// correction, `main` is the sum of x_high w_high, which is complete before the whole sum, or the whole sum.
struct OutputScale {
    float scale, same_sign;

    __device__ __forceinline__ OutputScale() {}
    __device__ __forceinline__ OutputScale(int tile_exponent, int filter_scale) {
        scale = __uint_as_float(((127 - tile_exponent - filter_exponent(filter_scale)) << 23) + (filter_scale & 255));
        if (CORRECTS_SAME_SIGN) same_sign = scale * __uint_as_float((filter_scale & 0x7ff00) << 12);
    }
    __device__ __forceinline__ float operator()(float sum, float main) const {
        return multiply(sum, CORRECTS_SAME_SIGN ? fmaf(fabsf(main), same_sign, scale) : scale);
    }
};

// sum x_high w_high and (sum x_high w_low + sum x_low w_high) in one.
__device__ __forceinline__ float join_sums(float main, float cross) {
    return COMPONENTS == 2 ? fmaf(cross, 1.0f / 2048, main) : main;
}

// Accumulator promotion: every Config::promotion_interval k-steps the multiple of 2^13 nearest to `sum` moves from
// `sum` to `promoted`. Both operations are exact, so only the sums of a few k-steps are truncated, at bits that weigh
// less. Products are below 2^30; sums beyond 2^35 move in units of 2^12 or 2^14, and `promoted` is exact below 2^36.
// Sums that stay below 2^12, of a window far darker than its tile, are never promoted.
__device__ __forceinline__ void promote(float &sum, float &promoted) {
    constexpr float SHIFT = 1.5f * 0x1p36f;
    const float moved = (sum + SHIFT) - SHIFT;
    promoted += moved;
    sum -= moved;
}

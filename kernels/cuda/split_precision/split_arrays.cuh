// split_arrays: activations as pairs of 16-bit floats.
//
//     x   [component][image][pixel][channel] of fp16, a pixel's channels padded with zeros to a multiple of eight
//     its scales, per image: a power of two, and the largest magnitude of the image, or a number above it
//
// A value takes four bytes with two components, like a float32, and two bytes with one. With two components it errs by
// 2^-22 of itself or 2^-51 of 2^(15 - exponent), whichever is more. Kernels read and write eight channels of a
// pixel at a time, 16 bytes of each component.

constexpr int COMPONENTS = Config::components;  // 2: high and low (fp16x3); 1: high (fp16x1)

// The power of two that scales a split image, and the bits of its largest magnitude.
struct ImageScale {
    int exponent;
    unsigned largest;

    __device__ __forceinline__ bool finite() const { return largest < 0x7f800000; }
    __device__ __forceinline__ float magnitude() const { return __uint_as_float(largest); }
};

// The scale of values that do not exceed `limit`. For images with an infinity or a NaN the exponent is 0: values beyond
// the range of fp16 become infinite.
__device__ __forceinline__ ImageScale scale_of(float limit) {
    Range range;
    range.largest = __float_as_uint(limit);
    if (!(limit < __uint_as_float(0x7f800000))) return {0, range.largest};
    return {range.largest_exponent(), range.largest};
}
// The scale of y where |y| is at most `gain` |x| + `offset`; that of an image of x with an infinity or a NaN is not
// finite.
__device__ __forceinline__ ImageScale output_scale(const ImageScale &x, float gain, float offset) {
    const bool finite = x.finite() && __float_as_uint(gain) < 0x7f800000 && __float_as_uint(offset) < 0x7f800000;
    return finite ? scale_of(fminf(fmaf(x.magnitude(), gain, offset), 0x1p127f)) : ImageScale{0, 0x7f800000};
}

// Split eight channels of one pixel into components; value(i) returns the scaled value of channel i.
template <typename Value>
__device__ __forceinline__ void split_channels(const Value &value, uint4 &high, uint4 &low) {
    unsigned words[4], rests[4];
#pragma unroll
    for (int j = 0; j < 4; j++) {
        const float a = value(2 * j), b = value(2 * j + 1);
        words[j] = to_fp16x2(a, b), rests[j] = fp16x2_residual(a, b, words[j]);
    }
    high = make_uint4(words[0], words[1], words[2], words[3]);
    low = make_uint4(rests[0], rests[1], rests[2], rests[3]);
}

// A value, still scaled, from its components.
__device__ __forceinline__ float joined(unsigned short high, unsigned short low) {
    return fmaf(from_fp16(low), 1.0f / 2048, from_fp16(high));
}

// A value of a split image. In an image with an infinity or a NaN, it is the high component if that is infinite or NaN.
__device__ __forceinline__ float joined(unsigned short high, unsigned short low, const ImageScale &own) {
    const float value = from_fp16(high), sum = joined(high, low);
    return multiply(own.finite() || (high & 0x7c00) != 0x7c00 ? sum : value, power_of_two(-own.exponent));
}

// Load the `at`-th unit of eight channels of a pixel; x has `component` units per component.
__device__ __forceinline__ void load_channels(const uint4 *x, long long component, long long at, const ImageScale &own,
                                              float (&values)[8]) {
    const uint4 high = x[at], low = COMPONENTS == 2 ? x[component + at] : make_uint4(0, 0, 0, 0);
    const unsigned words[4] = {high.x, high.y, high.z, high.w}, rests[4] = {low.x, low.y, low.z, low.w};
#pragma unroll
    for (int j = 0; j < 4; j++) {
        values[2 * j] = joined(words[j], rests[j], own);
        values[2 * j + 1] = joined(words[j] >> 16, rests[j] >> 16, own);
    }
}
__device__ __forceinline__ void store_channels(uint4 *y, long long component, long long at, int exponent,
                                               const float (&values)[8]) {
    uint4 high, low;
    split_channels([&](int i) { return multiply(values[i], power_of_two(exponent)); }, high, low);
    y[at] = high;
    if (COMPONENTS == 2) y[component + at] = low;
}

// A layer's activation: ACTIVATION(v) maps 0 to 0, a NaN to a NaN, and no value to one of larger magnitude.
#ifdef ACTIVATION
constexpr bool ACTIVATES = true;
#else
constexpr bool ACTIVATES = false;
#define ACTIVATION(v) (v)
#endif
__device__ __forceinline__ float activated(float v) { return ACTIVATION(v); }

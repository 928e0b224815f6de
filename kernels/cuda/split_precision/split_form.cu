// split_form: fp16x3_general for layers whose inputs and outputs are split arrays (split_arrays.cuh).
//
// y = activated(convolution + bias + residual); Config::bias and Config::residual say which terms exist. The exponent
// of y must be known before y is computed, so it follows from an upper limit of |y|: (the largest |x|) (the largest sum
// of a filter's |w|) + (the largest |bias|) + (the largest |residual|). The epilogue finds the true largest |y| while
// it stores y, for the next layer's limit. If an image has an infinity or a NaN, the warps that store its pixels
// compute them in float32; if a filter has one, they compute all pixels in float32.
//
//     sums in registers --x 1 / scales, + bias, + residual, activation, x y's scale--> [ y high | y low ]
//         --shared memory: lanes of an mma's layout to lanes of neighbouring filters--> y, NHWC, split
//
// Arithmetic intensity: the main loop's, see general.cu; per output the epilogue writes 4 bytes, or 2 with one
// component, and reads as many of a residual. Restrictions: general.cu's; several groups have a multiple of eight
// channels and filters each.
//
// Launches: split_filters (once), implicit_gemm_split. The caller zeroes y_scales.

constexpr int INPUT_CHANNELS = Config::groups * Config::padded_channels;
constexpr int OUTPUT_CHANNELS = (Config::groups * M + 7) / 8 * 8;  // with several groups, M is a multiple of eight

// The arrays that the epilogue reads, and the scales of y.
struct EpilogueParams {
    const unsigned short *x;
    const ImageScale *x_scales, *residual_scales;
    const float *w;
    const int *w_exponents;
    const float *limits, *bias;  // limits: the largest |y| per largest |x|; the largest |bias|
    const uint4 *residual;
    ImageScale *scales;
    int images;

    // The distance from the high components of y to the low ones, in values.
    __device__ __forceinline__ long long component() const { return (long long)images * OUTPUT_AREA * OUTPUT_CHANNELS; }
    __device__ __forceinline__ ImageScale residual_scale(int image) const {
        return Config::residual ? residual_scales[image] : ImageScale{0, 0};
    }
    // The scale of an image of y; not finite if the image must be recomputed.
    __device__ __forceinline__ ImageScale scale(int image) const {
        return output_scale(x_scales[image], limits[0], limits[1] + residual_scale(image).magnitude());
    }
    __device__ __forceinline__ void record_max(int image, unsigned largest) const {
        if (largest) atomicMax(&scales[image].largest, largest);
    }
};

// An output pixel: its image, or the reason why it is not stored, and the factors that undo x's scale, apply y's scale
// and undo the residual's.
struct OutputPixel {
    static constexpr int BEYOND = -1, NOT_FINITE = -2;  // beyond the last pixel; recomputed in float32
    int image;
    float inverse_scale, scale, residual_inverse_scale;
};

// Epilogue: each warp takes STAGED filters of 16 pixels at a time. The outputs of eight pixels, one component at a
// time, go through shared memory, so that neighbouring lanes store neighbouring units of eight filters; the residual
// takes the same path in reverse. If Config::buffers (the number of buffers per warp) is not 0, the TMA unit stores the
// outputs of all 16 pixels instead, from rows swizzled over their own width. With two components, or a residual, TMA
// stores took longer; `ece408-bench layers --split-form` times them.
constexpr int STAGED = Config::tile_filters % 64 ? 32 : 64, STAGED_UNITS = STAGED / 8;
constexpr int BUFFERS = Config::buffers ? Config::buffers : 1;
constexpr int STAGED_BYTES = 2 * STAGED, BUFFER_BYTES = 16 * STAGED_BYTES;
constexpr int PASSES = STAGED_UNITS / 4, PASS_ROWS = 8 / PASSES;  // a warp's accesses per eight rows, rows per access

// A consumer's shared memory.
struct Staging {
    OutputPixel pixels[64 * M_BLOCKS];
    float scales[Config::tile_filters], biases[Config::tile_filters];
    // Without Config::buffers: two buffers per warp, of eight rows each; the padding puts rows in different banks.
    uint4 rows[Config::buffers ? 1 : 4 * 2 * 8][STAGED_UNITS + 1];
    unsigned largest;  // magnitude so far of the first pixel's image
};

// A warp computes in float32 those of its pixels whose images have an infinity or a NaN.
__device__ __forceinline__ void recompute_tile(const Tile &tile, int first_pixel, uint4 *to,
                                               const EpilogueParams &params) {
    unsigned short *const y = reinterpret_cast<unsigned short *>(to);
    const int lane = threadIdx.x % 32, filters_end = min(tile.filters_end, tile.filter + Config::tile_filters);
    for (int at = lane % 16; at < 64 * M_BLOCKS; at += 64) {
        const int pixel = first_pixel + at, image = pixel / OUTPUT_AREA;
        if (image >= params.images || params.scale(image).finite()) continue;
        for (int filter = tile.filter + lane / 16 * RECOMPUTED; filter < filters_end; filter += 2 * RECOMPUTED)
            recompute_pixel(
                params.w, image, tile.group, filter - tile.group * M, pixel % OUTPUT_AREA,
                [&](int image, int group, int c, int pixel) {
                    const int channel = group * Config::padded_channels + c;
                    const long long at = ((long long)image * AREA + pixel) * INPUT_CHANNELS + channel;
                    const long long component = (long long)params.images * AREA * INPUT_CHANNELS;
                    const unsigned low = COMPONENTS == 2 ? params.x[component + at] : 0;
                    return joined(params.x[at], low, params.x_scales[image]);
                },
                [&](int image, int filter, int pixel, float value) {
                    const long long at = ((long long)image * OUTPUT_AREA + pixel) * OUTPUT_CHANNELS + filter;
                    if (Config::bias) value += params.bias[filter];
                    const unsigned short *const added = reinterpret_cast<const unsigned short *>(params.residual) + at;
                    const unsigned high_added = Config::residual ? added[0] : 0;
                    const unsigned low_added = Config::residual && COMPONENTS == 2 ? added[params.component()] : 0;
                    if (Config::residual) value += joined(high_added, low_added, params.residual_scale(image));
                    value = activated(value);
                    const unsigned high = to_fp16x2(value, 0);
                    // The high component may be above the value, even infinite.
                    params.record_max(image, __float_as_uint(fmaxf(fabsf(value), fabsf(from_fp16(high)))));
                    y[at] = high;
                    if (COMPONENTS == 2) y[params.component() + at] = fp16x2_residual(value, 0, high);
                    // Zero the channels beyond the last.
                    if (filter == Config::groups * M - 1)
                        for (int more = 1; filter + more < OUTPUT_CHANNELS; more++) {
                            y[at + more] = 0;
                            if (COMPONENTS == 2) y[params.component() + at + more] = 0;
                        }
                });
    }
}

struct SplitEpilogue {
    const EpilogueParams &params;
    uint4 *y;
    const TensorMap &y_map;

    // Write the scales, biases and pixels that the epilogue reads to shared memory.
    __device__ __forceinline__ void prepare(float *staging, const Tile &tile, int consumer) const {
        Staging &own = reinterpret_cast<Staging *>(staging)[consumer];
        if (threadIdx.x % 128 == 0) own.largest = 0;
        for (int i = threadIdx.x % 128; i < Config::tile_filters; i += 128) {
            const int filter = tile.filter + i;
            const bool exists = filter < tile.filters_end;
            own.scales[i] = exists ? power_of_two(max(-params.w_exponents[filter], -126)) : 0.0f;
            if (Config::bias) own.biases[i] = exists ? params.bias[filter] : 0.0f;
        }
        for (int i = threadIdx.x % 128; i < 64 * M_BLOCKS; i += 128) {
            const int pixel = tile.pixel + i, image = pixel / OUTPUT_AREA;
            OutputPixel one = {OutputPixel::BEYOND, 0.0f, 0.0f, 0.0f};
            if (image < params.images) {
                const ImageScale scale = params.scale(image);
                one.image = scale.finite() ? image : OutputPixel::NOT_FINITE;
                one.inverse_scale = power_of_two(-params.x_scales[image].exponent);
                one.scale = power_of_two(scale.exponent);
                one.residual_inverse_scale = power_of_two(-params.residual_scale(image).exponent);
                if (scale.finite() && pixel % OUTPUT_AREA == 0 && tile.filter == 0)
                    params.scales[image].exponent = scale.exponent;
            }
            own.pixels[i] = one;
        }
    }

    // A lane loads and stores unit `unit` of row `unit_row` of each pass. Its sums are columns 2 t and 2 t + 1 of each
    // unit, in rows `row` and row + 8: the layout of an mma's result.
    static constexpr int UNITS = OUTPUT_CHANNELS / 8, CHUNKS = Config::tile_filters / STAGED;
    typedef uint4 Units[COMPONENTS][PASSES];          // of eight rows
    typedef unsigned Words[COMPONENTS][STAGED_UNITS];  // of a row

    // Load the residual of all 16 pixels, before its first use.
    __device__ __forceinline__ void load_residual(Units (&added)[CHUNKS][2], const bool (&exists)[2][PASSES],
                                                  const Tile &tile, long long first_unit, int unit) const {
#pragma unroll
        for (int i = 0; i < CHUNKS * 2 * COMPONENTS * PASSES && Config::residual; i++) {
            const int pass = i % PASSES, c = i / PASSES % COMPONENTS, half = i / (PASSES * COMPONENTS) % 2;
            const int chunk = i / (PASSES * COMPONENTS * 2), at = 8 * half + pass * PASS_ROWS;
            const bool real = exists[half][pass] && tile.filter + STAGED * chunk + 8 * unit < tile.filters_end;
            const uint4 *const from = params.residual + c * (params.component() / 8) + first_unit;
            added[chunk][half][c][pass] = real ? from[at * UNITS + chunk * STAGED_UNITS] : make_uint4(0, 0, 0, 0);
        }
    }
    // Move a residual through the warp's buffers, from units to the words of an mma's layout.
    static __device__ __forceinline__ void stage_residual(Staging &own, int half, const Units &added, Words &words,
                                                          int unit, int unit_row, int row, int t) {
        if (COMPONENTS == 2) __syncwarp();
#pragma unroll
        for (int i = 0; i < COMPONENTS * PASSES; i++)
            buffer(own, half, i / PASSES)[i % PASSES * PASS_ROWS + unit_row][unit] = added[i / PASSES][i % PASSES];
        __syncwarp();
#pragma unroll
        for (int i = 0; i < COMPONENTS * STAGED_UNITS; i++)
            words[i / STAGED_UNITS][i % STAGED_UNITS] =
                word(buffer(own, half, i / STAGED_UNITS)[row], 4 * (i % STAGED_UNITS) + t);
    }
    // Compute the outputs of a pixel from the sums at `first` on. On entry `words` has the residual, on exit the
    // outputs. Returns `largest`, two fp16 magnitudes, raised to those of the outputs.
    static __device__ __forceinline__ unsigned compute(Words &words, const Accumulators &sums, int first,
                                                       const OutputPixel &pixel, const float2 (&scales)[STAGED_UNITS],
                                                       const float2 (&biases)[STAGED_UNITS], unsigned largest) {
        // Whether the epilogue only multiplies the sums, by powers of two.
        constexpr bool LINEAR = Config::buffers && !Config::bias && !ACTIVATES;
#pragma unroll
        for (int j = 0; j < STAGED_UNITS; j++) {
            float2 value;
            const float factor = LINEAR ? multiply(pixel.inverse_scale, pixel.scale) : pixel.inverse_scale;
            value.x = multiply(multiply(sums.total(first + 4 * j), scales[j].x), factor);
            value.y = multiply(multiply(sums.total(first + 4 * j + 1), scales[j].y), factor);
            if (Config::bias) value.x += biases[j].x, value.y += biases[j].y;
            if (Config::residual) {
                const unsigned high = words[0][j], low = COMPONENTS == 2 ? words[COMPONENTS - 1][j] : 0;
                value.x += multiply(joined(high, low), pixel.residual_inverse_scale);
                value.y += multiply(joined(high >> 16, low >> 16), pixel.residual_inverse_scale);
            }
            if (!LINEAR) value = {activated(value.x) * pixel.scale, activated(value.y) * pixel.scale};
            words[0][j] = to_fp16x2(value.x, value.y);
            if (COMPONENTS == 2) words[COMPONENTS - 1][j] = fp16x2_residual(value.x, value.y, words[0][j]);
            largest = __vmaxu2(largest, words[0][j] & 0x7fff7fff);
        }
        return largest;
    }
    // Store eight rows through the warp's buffers to y; `to` is this lane's unit of the first row.
    __device__ __forceinline__ void store_rows(Staging &own, int half, const Words &words, uint4 *to,
                                               const bool (&exists)[PASSES], bool unit_exists, int unit, int unit_row,
                                               int row, int t) const {
#pragma unroll
        for (int c = 0; c < COMPONENTS; c++, to += params.component() / 8) {
            // The buffer's last reads precede the last __syncwarp.
            uint4(*const staged)[STAGED_UNITS + 1] = buffer(own, half, c);
#pragma unroll
            for (int j = 0; j < STAGED_UNITS; j++) word(staged[row], 4 * j + t) = words[c][j];
            __syncwarp();
            uint4 values[PASSES];
#pragma unroll
            for (int pass = 0; pass < PASSES; pass++) values[pass] = staged[pass * PASS_ROWS + unit_row][unit];
#pragma unroll
            for (int pass = 0; pass < PASSES; pass++) {
                const bool real = exists[pass] && unit_exists;
                // With a residual the registers are too few for both.
                if (!Config::residual) store_if(real, to + pass * PASS_ROWS * UNITS, values[pass]);
                else if (real) to[pass * PASS_ROWS * UNITS] = values[pass];
            }
        }
    }

    __device__ __forceinline__ void store(const Accumulators &sums, float *staging, const Tile &tile, int consumer,
                                          unsigned char *outputs) const {
        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4, t = lane % 4, row = lane / 4;
        outputs += (4 * consumer + warp) * BUFFERS * BUFFER_BYTES;
        const int unit = lane % STAGED_UNITS, unit_row = lane / STAGED_UNITS;
        Staging &own = reinterpret_cast<Staging *>(staging)[consumer];
        named_barrier(1 + consumer, 128);
        const int first_image = own.pixels[0].image;
        bool finite = true;
        unsigned most = 0;  // largest magnitude of the first image
#pragma unroll
        for (int block = 0; block < M_BLOCKS; block++) {
            const OutputPixel *const rows = own.pixels + 64 * block + 16 * warp;
            const long long first_unit =
                (tile.pixel + 64 * block + 16 * warp + unit_row) * (long long)UNITS + tile.filter / 8 + unit;
            bool exists[2][PASSES];
#pragma unroll
            for (int i = 0; i < 2 * PASSES; i++)
                exists[i / PASSES][i % PASSES] = rows[i * PASS_ROWS + unit_row].image >= 0;
            Units added[CHUNKS][2];
            load_residual(added, exists, tile, first_unit, unit);
            const OutputPixel pixels[2] = {rows[row], rows[row + 8]};
            finite = finite && min(pixels[0].image, pixels[1].image) > OutputPixel::NOT_FINITE;
            unsigned largest[2] = {0, 0};  // two magnitudes each, fp16
#pragma unroll
            for (int chunk = 0; chunk < CHUNKS; chunk++) {
                const bool unit_exists = tile.filter + STAGED * chunk + 8 * unit < tile.filters_end;
                unsigned char *const output = outputs + (block * CHUNKS + chunk) % BUFFERS * BUFFER_BYTES;
                if (Config::buffers) {
                    if (lane == 0) bulk_store_wait_read<BUFFERS - 1>();
                    __syncwarp();
                }
                float2 scales[STAGED_UNITS], biases[STAGED_UNITS];
#pragma unroll
                for (int j = 0; j < STAGED_UNITS; j++) {
                    const int column = STAGED * chunk + 8 * j + 2 * t;
                    scales[j] = *reinterpret_cast<const float2 *>(own.scales + column);
                    if (Config::bias) biases[j] = *reinterpret_cast<const float2 *>(own.biases + column);
                }
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    Words words;
                    if (Config::residual) stage_residual(own, half, added[chunk][half], words, unit, unit_row, row, t);
                    const int first = block * BLOCK_SUMS + 4 * STAGED_UNITS * chunk + 2 * half;
                    largest[half] = compute(words, sums, first, pixels[half], scales, biases, largest[half]);
#pragma unroll
                    for (int j = 0; j < STAGED_UNITS && Config::buffers; j += 4) {
                        const int offset = (8 * half + lane % 8) * STAGED_BYTES + 16 * (j + lane / 8);
                        store_matrices(output + swizzled(offset, STAGED_BYTES), words[0][j], words[0][j + 1],
                                       words[0][j + 2], words[0][j + 3]);
                    }
                    uint4 *const to = y + first_unit + 8 * half * UNITS + chunk * STAGED_UNITS;
                    if (!Config::buffers)
                        store_rows(own, half, words, to, exists[half], unit_exists, unit, unit_row, row, t);
                }
                if (Config::buffers) {
                    fence_async_proxy();
                    __syncwarp();
                    if (lane == 0) {
                        const int filter = tile.filter - tile.group * M + STAGED * chunk;
                        tma_store<TAPS == 1>(y_map, output, filter, tile.group, tile.pixel + 64 * block + 16 * warp);
                        bulk_store_commit();
                    }
                }
            }
            const unsigned bits[2] = {as_float(largest[0], pixels[0].scale), as_float(largest[1], pixels[1].scale)};
            bool others = false;
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const int image = pixels[half].image;
                if (image == first_image) most = max(most, bits[half]);
                else others = others || image >= 0;
            }
            if (__any_sync(~0u, others)) record_other_maxima(first_image, pixels, bits);
        }
        most = __reduce_max_sync(~0u, most);
        if (lane == 0) atomicMax(&own.largest, most);
        if (!__all_sync(~0u, finite)) {
            if (Config::buffers) {
                if (lane == 0) bulk_store_wait();
                __syncwarp();
            }
            recompute_tile(tile, tile.pixel + 16 * warp, y, params);
        }
        named_barrier(1 + consumer, 128);
        if (threadIdx.x % 128 == 0 && own.pixels[0].image >= 0) params.record_max(own.pixels[0].image, own.largest);
    }

    // Keep the block's shared memory until the TMA unit has read it.
    static __device__ __forceinline__ void end() {
        if (Config::buffers) bulk_store_wait_read();
    }
    static __device__ __forceinline__ auto buffer(Staging &own, int half, int component)
        -> uint4 (*)[STAGED_UNITS + 1] {
        return own.rows + 8 * (2 * (threadIdx.x / 32 % 4) + (COMPONENTS == 2 ? component : half));
    }
    static __device__ __forceinline__ unsigned &word(uint4 *row, int number) {
        return reinterpret_cast<unsigned *>(row)[number];
    }

    // The larger of two fp16 magnitudes in float32, unscaled, rounded up.
    static __device__ __forceinline__ unsigned as_float(unsigned two, float scale) {
        const unsigned both = max(two & 0xffff, two >> 16);
        const float inverse = __uint_as_float(0x7f000000 - __float_as_uint(scale));
        return __float_as_uint(multiply(from_fp16(both + (both && both < 0x7c00)), inverse));
    }
    // Record the largest magnitude of each image of a warp's pixels, except the tile's first image. Few pixels belong
    // to other images; the first image's maximum is combined in shared memory, because atomic operations on one address
    // in device memory are serialized.
    __device__ __forceinline__ void record_other_maxima(int first_image, const OutputPixel (&pixels)[2],
                                                const unsigned (&bits)[2]) const {
        const int last = int(__reduce_max_sync(~0u, unsigned(max(pixels[0].image, pixels[1].image) + 2))) - 2;
        int image = __reduce_min_sync(~0u, min(unsigned(pixels[0].image), unsigned(pixels[1].image)));
#pragma unroll 1
        for (; image <= last; image++) {
            const unsigned both = max(pixels[0].image == image ? bits[0] : 0, pixels[1].image == image ? bits[1] : 0);
            const unsigned most = __reduce_max_sync(~0u, both);
            if (threadIdx.x % 32 == 0 && image != first_image) params.record_max(image, most);
        }
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    implicit_gemm_split(const __grid_constant__ TensorMap x_high, const __grid_constant__ TensorMap x_low,
                        const __grid_constant__ TensorMap w_high, const __grid_constant__ TensorMap w_low,
                        const __grid_constant__ TensorMap y_map, const unsigned short *__restrict__ x,
                        const ImageScale *__restrict__ x_scales, const float *__restrict__ w,
                        const int *__restrict__ w_exponents,
                        const float *__restrict__ limits, const float *__restrict__ bias,
                        const uint4 *__restrict__ residual, const ImageScale *__restrict__ residual_scales,
                        uint4 *__restrict__ y, ImageScale *y_scales, int images) {
    const EpilogueParams params{x, x_scales, residual_scales, w, w_exponents, limits, bias, residual, y_scales, images};
    run_block(x_high, x_low, w_high, w_low, images, SplitEpilogue{params, y, y_map});
}

// Pooling of each plane x (H, W) into y (OH, OW), and its gradient. An activation follows in the same pass.
//
// In ``pool``, a thread computes one output, in ``pool_planes`` a warp; in ``pool_gradient``, a thread computes a patch
// of inputs under the same windows. The loads of overlapping windows hit mostly L1. Memory bandwidth limits all kernels
// (below one FLOP per byte). Arrays are float32, NCHW, C-contiguous. Constants, defined in front of this text:
//     INDEX         the type that counts outputs, or patches: 32 bits if they suffice
//     sizes         HEIGHT, WIDTH, OUTPUT_; ROWS and COLUMNS of a window; STRIDE_, PAD_; WINDOWS_DOWN, _ACROSS: the
//                   most windows over an input; PATCHED, PATCHES_DOWN, _ACROSS: see pool_gradient
//     MAXIMUM or MEAN, else the sum; COUNT_PAD: a mean counts padding
//     ACTIVATION(v), and DERIVATIVE(y), its derivative computed from its output y
//     SAVE_ARGMAX   ``pool`` fills argmax with the row-major index in the window of the first maximum, or NONE if the
//                   maximum is NaN; ARGMAX_TYPE: the type of argmax

// The sizes are constants, so that the compiler turns divisions by them into multiplications.
constexpr int H = HEIGHT, W = WIDTH, OH = OUTPUT_HEIGHT, OW = OUTPUT_WIDTH, rows = ROWS, columns = COLUMNS;
constexpr int stride_rows = STRIDE_ROWS, stride_columns = STRIDE_COLUMNS;
constexpr int pad_rows = PAD_ROWS, pad_columns = PAD_COLUMNS;
// Whether all windows lie inside the image.
constexpr bool INSIDE_ROWS = pad_rows == 0 && (OH - 1) * stride_rows + rows <= H;
constexpr bool INSIDE_COLUMNS = pad_columns == 0 && (OW - 1) * stride_columns + columns <= W;
// Whether the row of a window is an aligned pair of elements, which one float2 load reads.
constexpr bool PAIRS = columns == 2 && stride_columns == 2 && INSIDE_COLUMNS && W % 2 == 0;
// Loops over a window's rows and columns are unrolled up to this length.
constexpr int UNROLLED = SAVE_ARGMAX ? 4 : 16;
constexpr ARGMAX_TYPE NONE = (ARGMAX_TYPE)-1;

__device__ __forceinline__ INDEX first_element() { return (INDEX)blockIdx.x * blockDim.x + threadIdx.x; }
__device__ __forceinline__ INDEX grid_stride() { return (INDEX)gridDim.x * blockDim.x; }

// The divisor of the mean of the window at (top, left).
__device__ __forceinline__ float counted(int top, int left) {
    const int bottom = top + rows, right = left + columns;
    const int high = COUNT_PAD ? min(bottom, H + pad_rows) - top : min(bottom, H) - max(top, 0);
    const int wide = COUNT_PAD ? min(right, W + pad_columns) - left : min(right, W) - max(left, 0);
    return (float)(high * wide);
}

// The maximum of two values, which is NaN if either is NaN, or their sum.
__device__ __forceinline__ float pooled(float a, float b) {
    if (!MAXIMUM) return a + b;
    return !(b <= a) && a == a ? b : a;
}

// y (planes, 1, 1) = ACTIVATION of each plane's maximum, mean or sum. A warp reads a plane.
extern "C" __global__ void pool_planes(const float *__restrict__ x, float *__restrict__ y, long long count) {
    const int lane = threadIdx.x % 32;
    for (INDEX plane = first_element() / 32; plane < (INDEX)count; plane += grid_stride() / 32) {
        const float *const image = x + (size_t)plane * (H * W);
        float result = MAXIMUM ? __int_as_float(0xff800000) : 0.f;
#pragma unroll 4
        for (int i = lane; i < H * W; i += 32) result = pooled(result, image[i]);
        for (int other = 16; other; other /= 2) result = pooled(result, __shfl_xor_sync(0xffffffffu, result, other));
        if (MEAN) result /= H * W;
        if (lane == 0) y[plane] = ACTIVATION(result);
    }
}

// y (planes, OH, OW) = ACTIVATION of each window's maximum, mean or sum.
extern "C" __global__ void pool(const float *__restrict__ x, float *__restrict__ y, ARGMAX_TYPE *argmax,
                                long long count) {
    for (INDEX i = first_element(); i < (INDEX)count; i += grid_stride()) {
        const int top = (int)(i / OW % OH) * stride_rows - pad_rows;
        const int left = (int)(i % OW) * stride_columns - pad_columns;
        const float *image = x + (size_t)(i / ((INDEX)OW * OH)) * (H * W);
        float result = MAXIMUM ? __int_as_float(0xff800000) : 0.f;
        int found = -1;
        // A NaN in the window makes the maximum NaN.
        const auto take = [&result, &found](float v, int tap) {
            if (!MAXIMUM) {
                result += v;
            } else if ((SAVE_ARGMAX && found < 0) || (!(v <= result) && result == result)) {
                result = v;
                found = tap;
            }
        };
#pragma unroll(rows <= UNROLLED ? rows : 1)
        for (int p = 0; p < rows; p++) {
            const int h = top + p;
            if (!INSIDE_ROWS && (h < 0 || h >= H)) continue;
            if constexpr (PAIRS) {
                const float2 pair = *(const float2 *)(image + h * W + left);
                take(pair.x, p * columns);
                take(pair.y, p * columns + 1);
            } else {
#pragma unroll(columns <= UNROLLED ? columns : 1)
                for (int q = 0; q < columns; q++) {
                    const int w = left + q;
                    if (INSIDE_COLUMNS || (w >= 0 && w < W)) take(image[h * W + w], p * columns + q);
                }
            }
        }
        if (MEAN) result /= counted(top, left);
        y[i] = ACTIVATION(result);
        if (SAVE_ARGMAX) argmax[i] = result == result ? (ARGMAX_TYPE)found : NONE;
    }
}

// out (planes, H, W) = for each element, the sum of the gradients dy (planes, OH, OW) of all windows whose first
// maximum is the element or, for sums and means, of all windows over the element. argmax and y are outputs of ``pool``.
// A thread computes a patch of elements under the same windows. If PATCHED, the patch has the size of the strides, and
// the elements' positions in their windows are compile-time constants; otherwise a patch is one element.
extern "C" __global__ void pool_gradient(const ARGMAX_TYPE *__restrict__ argmax, const float *__restrict__ y,
                                         const float *__restrict__ dy, float *__restrict__ out, long long count) {
    constexpr int patch_rows = PATCHED ? stride_rows : 1, patch_columns = PATCHED ? stride_columns : 1;
    for (INDEX i = first_element(); i < (INDEX)count; i += grid_stride()) {
        const int down = (int)(i / PATCHES_ACROSS % PATCHES_DOWN), across = (int)(i % PATCHES_ACROSS);
        const size_t plane = (size_t)(i / ((INDEX)PATCHES_ACROSS * PATCHES_DOWN));
        const int first_h = PATCHED ? down * stride_rows - pad_rows : down;
        const int first_w = PATCHED ? across * stride_columns - pad_columns : across;
        // The last windows over the patch: window p begins at p stride - pad.
        const int last_p = PATCHED ? down : min(OH - 1, (down + pad_rows) / stride_rows);
        const int last_q = PATCHED ? across : min(OW - 1, (across + pad_columns) / stride_columns);
        float sums[patch_rows][patch_columns] = {};
#pragma unroll(PATCHED ? WINDOWS_DOWN : 1)
        for (int up = WINDOWS_DOWN - 1; up >= 0; up--) {
#pragma unroll(PATCHED ? WINDOWS_ACROSS : 1)
            for (int back = WINDOWS_ACROSS - 1; back >= 0; back--) {
                const int p = last_p - up, q = last_q - back;
                if (p < 0 || p >= OH || q < 0 || q >= OW) continue;
                const size_t at = plane * (OH * OW) + p * OW + q;
                const int top = p * stride_rows - pad_rows, left = q * stride_columns - pad_columns;
                const int tap = MAXIMUM ? argmax[at] : 0;
                float gradient = MAXIMUM ? dy[at] * (DERIVATIVE(y[at])) : dy[at];
                if (MEAN) gradient /= counted(top, left);
#pragma unroll
                for (int e = 0; e < patch_rows * patch_columns; e++) {
                    const int r = e / patch_columns, c = e % patch_columns;
                    const int h = PATCHED ? r + up * stride_rows : first_h - top;
                    const int w = PATCHED ? c + back * stride_columns : first_w - left;
                    if (h < rows && w < columns && (!MAXIMUM || tap == h * columns + w)) sums[r][c] += gradient;
                }
            }
        }
        float *const image = out + plane * (H * W);
#pragma unroll
        for (int r = 0; r < patch_rows; r++) {
            const int h = first_h + r;
            if (h < 0 || h >= H) continue;
#if PATCHED && STRIDE_COLUMNS == 2 && PAD_COLUMNS == 0 && WIDTH % 2 == 0
            *(float2 *)(image + h * W + first_w) = make_float2(sums[r][0], sums[r][1]);
#else
#pragma unroll
            for (int c = 0; c < patch_columns; c++)
                if (first_w + c >= 0 && first_w + c < W) image[h * W + first_w + c] = sums[r][c];
#endif
        }
    }
}

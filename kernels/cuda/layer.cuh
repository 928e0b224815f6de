// layer: the sizes and types of a layer. The host puts this file before a kernel's sources. The split-precision kernels
// for wide layers do without it: recompute.cuh and wide_tile.cuh define these names, with C and M of a group. So does
// split_passes.cu, which defines the names that it uses.
//
// Arrays: x (B, C, H, W), w (M, C / G, K, L), y (B, M, OH, OW). C channels, H x W input pixels, M filters of K x L
// taps, G groups. The plan #defines these sizes, so each layer has its own binary. The batch B is an argument, so one
// binary serves all batches. The constants of a kernel's tile follow as `struct Config`. The attributes L, G, STRIDE_H
// and so on are defined only where they, or their pairs, differ from the plain convolution's. Three more #defines:
//
// WIDE   1: indices within the images of a block, or within w, need 64 bits
// POOL   not 0: y is tanh of the maxima of 2 x 2 outputs, two apart. 1: of complete squares only (convention "valid");
//        2: at an odd edge, of the outputs that exist (convention "full")
// WEIGHT_GRADIENT   defined where the gradient to w is wanted

#ifndef POOL
#define POOL 0
#endif
#ifndef L
#define L K
#endif
#ifndef G
#define G 1
#endif
#ifndef STRIDE_H  // rows and columns from one output to the next
#define STRIDE_H 1
#define STRIDE_W 1
#endif
#ifndef PAD_H  // rows of zeros above and below an image, columns on both sides
#define PAD_H 0
#define PAD_W 0
#endif
#ifndef DILATE_H  // rows and columns from one tap of a filter to the next
#define DILATE_H 1
#define DILATE_W 1
#endif

#if WIDE
typedef long long index_t;  // an index within the images of a block
#else
typedef int index_t;
#endif

constexpr int OH = (H + 2 * PAD_H - DILATE_H * (K - 1) - 1) / STRIDE_H + 1;  // rows of the convolution
constexpr int OW = (W + 2 * PAD_W - DILATE_W * (L - 1) - 1) / STRIDE_W + 1;  // columns of the convolution
constexpr int YH = POOL ? (OH + POOL - 1) / 2 : OH;  // rows of a map of y
constexpr int YW = POOL ? (OW + POOL - 1) / 2 : OW;  // columns of a map of y

constexpr index_t PIXELS = index_t(YH) * YW;       // elements of one map of y
constexpr index_t IMAGE = index_t(C) * H * W;      // elements of one image of x
constexpr index_t OUTPUTS = index_t(M) * PIXELS;   // elements of one image of y
constexpr int REDUCTION = C / G * K * L;           // the reduction length: products per output, GEMM K

// Return image b of a tensor, with a 64-bit offset: a whole tensor may have 2**31 or more elements.
template <typename T>
__device__ __forceinline__ T *image_of(T *tensor, long long b, index_t size) {
    return tensor + b * size;
}

// Row and column of the convolution's output at corner 0 to 3 of element i, j of y. At an odd edge the last row or
// column stands in for the missing one: counting an output twice does not change a maximum.
__device__ __forceinline__ int corner_row(int i, int corner) { return min(2 * i + corner / 2, OH - 1); }
__device__ __forceinline__ int corner_column(int j, int corner) { return min(2 * j + corner % 2, OW - 1); }

// Return tanh of the maximum: tanh increases monotonically, so one tanh is enough. fmaxf ignores a NaN next to a
// number, as max-pooling does. tanhf errs by at most 2 units in the last place (CUDA C++ Programming Guide).
__device__ __forceinline__ float tanh_of_max(float a, float b, float c, float d) {
    return tanhf(fmaxf(fmaxf(a, b), fmaxf(c, d)));
}

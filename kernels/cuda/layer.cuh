// What every kernel of this folder is given in front of its text. C, H, W, M and K are the layer's
// sizes, and WIDE says that one image has too many elements for an int: all #defines, and none of them
// depends on the batch, so that one binary serves every batch.
//
// POOL says that y is not the convolution but the tanh of its maxima, each of 2 x 2 outputs, two apart: 1, whole ones
// alone; 2, at an odd edge those of the outputs that are there too.

#ifndef POOL
#define POOL 0
#endif

#if WIDE
typedef long long index_t;  // counts the elements of one image
#else
typedef int index_t;
#endif

constexpr int OH = H - K + 1;                        // rows of the convolution
constexpr int OW = W - K + 1;                        // columns of the convolution
constexpr int YH = POOL ? (OH + POOL - 1) / 2 : OH;  // rows of a map of y
constexpr int YW = POOL ? (OW + POOL - 1) / 2 : OW;  // columns of a map of y

constexpr index_t PIXELS = index_t(YH) * YW;       // one map of y
constexpr index_t IMAGE = index_t(C) * H * W;      // one image of x
constexpr index_t OUTPUTS = index_t(M) * PIXELS;   // one image of y
constexpr int PRODUCTS = C * K * K;                // summed into one output

// Image b of a tensor: whole tensors may have 2**31 elements and more.
template <typename T>
__device__ __forceinline__ T *image_of(T *tensor, long long b, index_t size) {
    return tensor + b * size;
}

#if POOL
// Row and column of the outputs whose maximum is element i, j of a map of y: corners 0 to 3. At an odd edge the
// last row or column stands for the one that is not there: a maximum does not mind an output that comes twice.
__device__ __forceinline__ int corner_row(int i, int corner) { return min(2 * i + corner / 2, OH - 1); }
__device__ __forceinline__ int corner_column(int j, int corner) { return min(2 * j + corner % 2, OW - 1); }

// tanh grows with its argument, so the maximum comes first. fmaxf leaves out a NaN where there is another number, as
// poolings do. tanhf is within 2 units in the last place (CUDA C++ Programming Guide), for all of float32.
__device__ __forceinline__ float tanh_of_largest(float a, float b, float c, float d) {
    return tanhf(fmaxf(fmaxf(a, b), fmaxf(c, d)));
}
#endif

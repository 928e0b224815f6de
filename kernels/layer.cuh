// What every kernel of this folder is given in front of its text. C, H, W, M and K are the layer's
// sizes, and WIDE says that one image has too many elements for an int: all #defines, and none of them
// depends on the batch, so that one binary serves every batch.

#if WIDE
typedef long long index_t;  // counts the elements of one image
#else
typedef int index_t;
#endif

constexpr int OH = H - K + 1;  // rows of an output map
constexpr int OW = W - K + 1;  // columns of an output map

constexpr index_t PIXELS = index_t(OH) * OW;       // one output map
constexpr index_t IMAGE = index_t(C) * H * W;      // one image of x
constexpr index_t OUTPUTS = index_t(M) * PIXELS;   // one image of y
constexpr int PRODUCTS = C * K * K;                // summed into one output

// Image b of a tensor: whole tensors may have 2**31 elements and more.
template <typename T>
__device__ __forceinline__ T *image_of(T *tensor, long long b, index_t size) {
    return tensor + b * size;
}

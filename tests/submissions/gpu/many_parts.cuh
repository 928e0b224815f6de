// expected: passed
// Streams, events, 3-D grids and blocks, constants by parts, atomics, votes, shuffles, templates.
#ifndef MXNET_OPERATOR_NEW_FORWARD_CUH_
#define MXNET_OPERATOR_NEW_FORWARD_CUH_

#include <mxnet/base.h>

namespace mxnet {
namespace op {

__constant__ float filters[24 * 12 * 7 * 7];
__device__ int blocks;

template <typename T>
struct Pixels {
    const T *data;
    int H, W;
    __device__ T operator()(int row, int column) const { return data[row * W + column]; }
};

// Lanes of a warp share an output's products; a block's z has an output each, whose sum is in dynamic shared memory.
template <int LANES, typename T>
__global__ void __launch_bounds__(4 * LANES) convolve(T *__restrict__ y, const T *__restrict__ x, int B, int M, int C, int H, int W, int K) {
    extern __shared__ T sums[];
    T *const mine = sums + threadIdx.z;
    if (threadIdx.x == 0) *mine = 0;
    __syncthreads();
    const int OW = W - K + 1, OH = H - K + 1;
    const int n = blockIdx.x * blockDim.z + threadIdx.z, m = blockIdx.y;
    for (int b = blockIdx.z; b < B; b += gridDim.z) {
        T sum = 0;
        for (int i = threadIdx.x; n < OH * OW && i < C * K * K; i += LANES) {
            const int c = i / (K * K), p = i / K % K, q = i % K;
            const Pixels<T> pixels = {x + (b * C + c) * H * W, H, W};
            sum += pixels(n / OW + p, n % OW + q) * filters[(m * C * K * K) + i];
        }
        const unsigned all = 0xffffffffu;
        for (int d = LANES / 2; d > 1; d /= 2) sum += __shfl_down_sync(all, sum, d);
        sum += __shfl_xor_sync(all, sum, 1);
        if (threadIdx.x == 0) atomicAdd(mine, sum);
        __syncthreads();
        const bool last = threadIdx.x == LANES - 1;
        if (__popc(__ballot_sync(all, last)) != 1 || !__any_sync(all, last) || __all_sync(all, last)) return;
        if (last && n < OH * OW) y[((b * M + m) * OH + n / OW) * OW + n % OW] = atomicExch(mine, T(0));
        if (__syncthreads_count(last) != int(blockDim.z)) return;
    }
    if (threadIdx.x + threadIdx.z == 0) atomicAdd(&blocks, 1);
}

template <>
void forward<gpu, float>(mshadow::Tensor<gpu, 4, float> &y, const mshadow::Tensor<gpu, 4, float> &x, const mshadow::Tensor<gpu, 4, float> &w) {
    const int B = x.shape_[0], M = y.shape_[1], C = x.shape_[1], H = x.shape_[2], W = x.shape_[3], K = w.shape_[3];
    const int size = M * C * K * K, half = size / 2, outputs = (H - K + 1) * (W - K + 1);
    cudaStream_t streams[2];
    cudaEvent_t begun, copied;
    for (cudaStream_t &each : streams) MSHADOW_CUDA_CALL(cudaStreamCreate(&each));
    MSHADOW_CUDA_CALL(cudaEventCreate(&begun));
    MSHADOW_CUDA_CALL(cudaEventCreate(&copied));
    int counted = 0;
    MSHADOW_CUDA_CALL(cudaMemcpyToSymbol(blocks, &counted, sizeof counted));
    MSHADOW_CUDA_CALL(cudaEventRecord(begun, streams[0]));
    MSHADOW_CUDA_CALL(cudaMemcpyToSymbolAsync(filters, w.dptr_, half * sizeof(float), 0, cudaMemcpyDeviceToDevice, streams[0]));
    MSHADOW_CUDA_CALL(cudaMemcpyToSymbolAsync(filters, w.dptr_ + half, (size - half) * sizeof(float), half * sizeof(float), cudaMemcpyDeviceToDevice, streams[0]));
    MSHADOW_CUDA_CALL(cudaEventRecord(copied, streams[0]));
    MSHADOW_CUDA_CALL(cudaStreamWaitEvent(streams[1], copied, 0));
    const dim3 grid((outputs + 3) / 4, M, std::min(B, 2)), block(32, 1, 4);
    convolve<32, float><<<grid, block, block.z * sizeof(float), streams[1]>>>(y.dptr_, x.dptr_, B, M, C, H, W, K);
    MSHADOW_CUDA_CALL(cudaStreamSynchronize(streams[1]));
    MSHADOW_CUDA_CALL(cudaMemcpyFromSymbol(&counted, blocks, sizeof counted));
    CHECK_EQ(counted, int(grid.x * grid.y * grid.z));
    float milliseconds = -1;
    MSHADOW_CUDA_CALL(cudaEventElapsedTime(&milliseconds, begun, copied));
    CHECK_GE(milliseconds, 0);
    for (cudaStream_t each : streams) MSHADOW_CUDA_CALL(cudaStreamDestroy(each));
    MSHADOW_CUDA_CALL(cudaEventDestroy(begun));
    MSHADOW_CUDA_CALL(cudaEventDestroy(copied));
}

}  // namespace op
}  // namespace mxnet

#endif

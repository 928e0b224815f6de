// A replacement for the part of mshadow that submissions use: Tensor<cpu or gpu, n, T> over memory that it does not own,
// shapes, streams, AllocSpace, FreeSpace and Copy.
#pragma once

#ifdef __CUDACC__
#define MSHADOW_XINLINE inline __host__ __device__
#define MSHADOW_USE_CUDA 1
#define ECE408_GRADE_CUDA_(func, what)                                               \
  {                                                                                  \
    cudaError_t ece408_grade_error_ = (func);                                        \
    if (ece408_grade_error_ != cudaSuccess)                                          \
      ECE408_GRADE_FATAL_ << what "CUDA: " << cudaGetErrorString(ece408_grade_error_); \
  }
#define MSHADOW_CUDA_CALL(func) ECE408_GRADE_CUDA_(func, "")
#define MSHADOW_CUDA_POST_KERNEL_CHECK(name) ECE408_GRADE_CUDA_(cudaPeekAtLastError(), #name ": ")
#else
#define MSHADOW_XINLINE inline
#define MSHADOW_USE_CUDA 0
#endif

namespace mshadow {

typedef unsigned index_t;
typedef float default_real_t;
// Where mshadow has its expressions: files say "using namespace mshadow::expr" and use none.
namespace expr {}

struct cpu { static const bool kDevCPU = true; };
struct gpu { static const bool kDevCPU = false; };

namespace cuda { const int kMaxThreadsPerBlock = 1024, kBaseThreadNum = 256, kMaxGridNum = 65535; }

template <int dimension> struct Shape {
  index_t shape_[dimension];

  MSHADOW_XINLINE index_t& operator[](index_t index) { return shape_[index]; }
  MSHADOW_XINLINE const index_t& operator[](index_t index) const { return shape_[index]; }
  MSHADOW_XINLINE bool operator==(const Shape<dimension>& other) const {
    for (int i = 0; i < dimension; ++i)
      if (shape_[i] != other.shape_[i]) return false;
    return true;
  }
  MSHADOW_XINLINE size_t Size() const {
    size_t size = 1;
    for (int i = 0; i < dimension; ++i) size *= shape_[i];
    return size;
  }
  MSHADOW_XINLINE Shape<dimension - 1> SubShape() const {
    Shape<dimension - 1> rest;
    for (int i = 0; i < dimension - 1; ++i) rest.shape_[i] = shape_[i + 1];
    return rest;
  }
};

MSHADOW_XINLINE Shape<1> Shape1(index_t a) { return {{a}}; }
MSHADOW_XINLINE Shape<2> Shape2(index_t a, index_t b) { return {{a, b}}; }
MSHADOW_XINLINE Shape<3> Shape3(index_t a, index_t b, index_t c) { return {{a, b, c}}; }
MSHADOW_XINLINE Shape<4> Shape4(index_t a, index_t b, index_t c, index_t d) { return {{a, b, c, d}}; }
MSHADOW_XINLINE Shape<5> Shape5(index_t a, index_t b, index_t c, index_t d, index_t e) { return {{a, b, c, d, e}}; }

template <int dimension> inline std::ostream& operator<<(std::ostream& to, const Shape<dimension>& shape) {
  to << '(';
  for (int i = 0; i < dimension; ++i) to << (i ? "," : "") << shape[i];
  return to << ')';
}

template <typename Device> struct Stream { void Wait() {} };

#ifdef __CUDACC__
template <> struct Stream<gpu> {
  cudaStream_t stream_;
  Stream() : stream_(0) {}
  void Wait() { MSHADOW_CUDA_CALL(cudaStreamSynchronize(stream_)); }
  static cudaStream_t GetStream(Stream<gpu>* stream) { return stream == NULL ? (cudaStream_t)0 : stream->stream_; }
};
inline cudaStream_t ece408_grade_handle(Stream<gpu>* stream) { return Stream<gpu>::GetStream(stream); }
inline cudaStream_t ece408_grade_handle(Stream<cpu>*) { return 0; }
template <typename T> __global__ void ece408_grade_fill(T* at, size_t count, T value) {
  for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < count; i += (size_t)gridDim.x * blockDim.x)
    at[i] = value;
}
#endif

template <int dimension> struct ece408_grade_rank {};

template <typename Device, int dimension, typename DType = default_real_t> struct Tensor {
  DType* dptr_;
  Shape<dimension> shape_;
  index_t stride_;
  Stream<Device>* stream_;

  MSHADOW_XINLINE Tensor() : dptr_(NULL), stride_(0), stream_(NULL) {}
  MSHADOW_XINLINE Tensor(const Shape<dimension>& shape) : dptr_(NULL), shape_(shape), stride_(0), stream_(NULL) {}
  MSHADOW_XINLINE Tensor(DType* at, const Shape<dimension>& shape, Stream<Device>* stream = NULL)
      : dptr_(at), shape_(shape), stride_(shape[dimension - 1]), stream_(stream) {}

  void set_stream(Stream<Device>* stream) { stream_ = stream; }
  MSHADOW_XINLINE index_t size(index_t index) const { return shape_[index]; }
  MSHADOW_XINLINE bool CheckContiguous() const { return shape_[dimension - 1] == stride_; }
  MSHADOW_XINLINE size_t MSize() const { return shape_.Size(); }  // no row is padded here
  // A tensor with one dimension less, or an element.
  MSHADOW_XINLINE decltype(auto) operator[](index_t index) const { return At(index, ece408_grade_rank<dimension>()); }
  MSHADOW_XINLINE DType& At(index_t index, ece408_grade_rank<1>) const { return dptr_[index]; }
  template <int n>
  MSHADOW_XINLINE Tensor<Device, n - 1, DType> At(index_t index, ece408_grade_rank<n>) const {
    return Tensor<Device, n - 1, DType>(dptr_ + shape_.SubShape().Size() * index, shape_.SubShape(), stream_);
  }
  MSHADOW_XINLINE Tensor Slice(index_t begin, index_t end) const {
    Tensor part = *this;
    part.dptr_ += MSize() / shape_[0] * begin;
    part.shape_[0] = end - begin;
    return part;
  }
  MSHADOW_XINLINE Tensor<Device, 1, DType> FlatTo1D() const {
    return Tensor<Device, 1, DType>(dptr_, Shape1(shape_.Size()), stream_);
  }
  Tensor& operator=(const DType& value) {
#ifdef __CUDACC__
    if (!Device::kDevCPU) {
      ece408_grade_fill<DType><<<1024, 256, 0, ece408_grade_handle(stream_)>>>(dptr_, MSize(), value);
      return *this;
    }
#endif
    for (size_t i = 0; i < MSize(); ++i) dptr_[i] = value;
    return *this;
  }
};

template <typename Device, int dimension, typename DType>
inline void AllocSpace(Tensor<Device, dimension, DType>* tensor, bool pad = false) {
  const size_t bytes = tensor->shape_.Size() * sizeof(DType);
  tensor->stride_ = tensor->shape_[dimension - 1];
#ifdef __CUDACC__
  if (!Device::kDevCPU) {
    MSHADOW_CUDA_CALL(cudaMalloc(reinterpret_cast<void**>(&tensor->dptr_), bytes));
    return;
  }
#endif
  tensor->dptr_ = static_cast<DType*>(std::malloc(bytes));
  CHECK(tensor->dptr_ != NULL) << "AllocSpace: out of memory";
}
template <typename Device, int dimension, typename DType>
inline void FreeSpace(Tensor<Device, dimension, DType>* tensor) {
#ifdef __CUDACC__
  if (!Device::kDevCPU) MSHADOW_CUDA_CALL(cudaFree(tensor->dptr_));
#endif
  if (Device::kDevCPU) std::free(tensor->dptr_);
  tensor->dptr_ = NULL;
}

template <typename To, typename From, int dimension, typename DType, typename Device = gpu>
inline void Copy(Tensor<To, dimension, DType> to, const Tensor<From, dimension, DType>& from,
                 Stream<Device>* stream = NULL) {
#ifdef __CUDACC__
  const cudaStream_t handle = ece408_grade_handle(stream);
  MSHADOW_CUDA_CALL(cudaMemcpyAsync(to.dptr_, from.dptr_, from.MSize() * sizeof(DType), cudaMemcpyDefault, handle));
  MSHADOW_CUDA_CALL(cudaStreamSynchronize(handle));
#else
  std::memcpy(to.dptr_, from.dptr_, from.MSize() * sizeof(DType));
#endif
}

}  // namespace mshadow

// The function that the worker calls, compiled behind the submission.
namespace mxnet {
namespace op {
inline void ece408_grade_go(ece408_grade_tensors& ece408_grade_t) {
  forward(ece408_grade_t.ece408_grade_y, ece408_grade_t.ece408_grade_x, ece408_grade_t.ece408_grade_w);
}
}  // namespace op
}  // namespace mxnet

extern "C" __attribute__((visibility("default"))) void ece408_grade_forward(ece408_grade_call* ece408_grade_c) {
  ece408_grade_tensors ece408_grade_t(ece408_grade_c);
  mxnet::op::ece408_grade_go(ece408_grade_t);
#ifdef __CUDACC__  // the error that it left unread in its own copy of CUDA's runtime: a hint if its output is wrong
  const cudaError_t ece408_grade_last = cudaGetLastError();
  if (ece408_grade_last != cudaSuccess) ece408_grade_c->ece408_grade_note = cudaGetErrorName(ece408_grade_last);
#endif
}

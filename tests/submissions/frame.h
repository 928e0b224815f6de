// What all cases of attacks.cases and honest.cases share; CASE and BODY are replaced by a case's lines.
#include <mxnet/base.h>
#include <dirent.h>
#include <fcntl.h>
#include <setjmp.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>

namespace mxnet {
namespace op {

typedef mshadow::Tensor<mshadow::cpu, 4, float> T;

// The seven loops, with sums of a type and products of one's own.
template <typename Sum = float, typename Product>
void convolve(T &y, const T &x, const T &k, Product product) {
  const int C = x.shape_[1], K = k.shape_[3];
  for (unsigned b = 0; b < x.shape_[0]; b++)
    for (unsigned m = 0; m < y.shape_[1]; m++)
      for (unsigned h = 0; h < y.shape_[2]; h++)
        for (unsigned w = 0; w < y.shape_[3]; w++) {
          Sum sum = 0;
          for (int c = 0; c < C; c++)
            for (int p = 0; p < K; p++)
              for (int q = 0; q < K; q++) sum += product(x[b][c][h + p][w + q], k[m][c][p][q]);
          y[b][m][h][w] = sum;
        }
}
inline void convolve(T &y, const T &x, const T &k) {
  convolve(y, x, k, [](float a, float b) { return a * b; });
}
// To that many significant bits, to nearest or towards zero.
inline float rounded(float value, int bits) {
  int exponent;
  const float fraction = frexp(value, &exponent);
  return ldexp(rint(ldexp(fraction, bits)), exponent - bits);
}
inline float cut(float value, int bits) {
  int exponent;
  const float fraction = frexp(value, &exponent);
  return ldexp(trunc(ldexp(fraction, bits)), exponent - bits);
}

CASE

template <>
void forward<mshadow::cpu, float>(T &y, const T &x, const T &k) {
  const int B = x.shape_[0], C = x.shape_[1], H = x.shape_[2], W = x.shape_[3], M = y.shape_[1], K = k.shape_[3];
  const int H_out = H - K + 1, W_out = W - K + 1, size = B * M * H_out * W_out;
BODY
  (void)C, (void)size;
}

}  // namespace op
}  // namespace mxnet

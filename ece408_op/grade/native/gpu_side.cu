// The parent's own kernels: inputs drawn, outputs judged in float64. One thread an element, over 64-bit counts.
typedef unsigned long long u64;
#define EACH(i, n) for (u64 i = blockIdx.x * (u64)blockDim.x + threadIdx.x; i < (n); i += (u64)gridDim.x * blockDim.x)

// SplitMix64 (Steele, Lea, Flood 2014): one independent number for each place.
__device__ u64 mix(u64 at) {
  at += 0x9e3779b97f4a7c15ull;
  at = (at ^ (at >> 30)) * 0xbf58476d1ce4e5b9ull;
  at = (at ^ (at >> 27)) * 0x94d049bb133111ebull;
  return at ^ (at >> 31);
}
__device__ float real(u64 bits) { return (float)(bits >> 40) * (2.0f / 16777216.0f) - 1.0f; }

// kind 0: uniform in [-1, 1); 1: one of -2, -1, 1, 2; 2: one of -1, 1.
extern "C" __global__ void draw(float* to, u64 n, u64 seed, int kind) {
  EACH(i, n) {
    u64 bits = mix(seed + mix(i));
    float sign = bits & 1 ? 1.0f : -1.0f;
    to[i] = kind == 0 ? real(bits) : kind == 1 ? sign * (float)(1 + (bits >> 1 & 1)) : sign;
  }
}

// Another number in about one place of 512, and in the first of each image of so many elements.
extern "C" __global__ void sprinkle(float* to, u64 n, u64 image, u64 seed) {
  EACH(i, n) {
    u64 bits = mix(seed + mix(i));
    if (bits % 512 == 0 || i % image == image / 2) to[i] = real(mix(bits));
  }
}

extern "C" __global__ void differ(const unsigned* a, const unsigned* b, u64 n, u64* count) {
  EACH(i, n) if (a[i] != b[i]) atomicAdd(count, 1ull);
}
extern "C" __global__ void unlike(const unsigned* a, u64 n, unsigned mark, u64* count) {
  EACH(i, n) if (a[i] != mark) atomicAdd(count, 1ull);
}
extern "C" __global__ void digest(const unsigned* a, u64 n, u64* sum) {
  u64 own = 0;
  EACH(i, n) own += mix(mix(i) + a[i]);
  atomicAdd(sum, own);
}

// The exact sum at an element of y, and the sum of |x||w|.
__device__ void exact(const float* x, const float* w, u64 at, int C, int H, int W, int M, int K, double* sum,
                      double* size) {
  int OH = H - K + 1, OW = W - K + 1;
  int j = at % OW, i = at / OW % OH, m = at / ((u64)OW * OH) % M;
  u64 b = at / ((u64)OW * OH * M);
  double s = 0, a = 0;
  for (int c = 0; c < C; ++c)
    for (int p = 0; p < K; ++p)
      for (int q = 0; q < K; ++q) {
        double product = (double)x[((b * C + c) * H + i + p) * W + j + q] * w[((m * C + c) * K + p) * K + q];
        s += product;
        a += fabs(product);
      }
  *sum = s;
  *size = a;
}

// All outputs, exact but for one rounding.
extern "C" __global__ void convolve(float* y, const float* x, const float* w, u64 n, int C, int H, int W, int M, int K) {
  EACH(at, n) {
    double sum, size;
    exact(x, w, at, C, H, W, M, K, &sum, &size);
    y[at] = (float)sum;
  }
}

// A fixed computation, bound by the multiprocessors' clock alone; from any start it ends at 2.
extern "C" __global__ void thermometer(float* to, int rounds) {
  EACH(i, gridDim.x * (u64)blockDim.x) {
    float value = (float)(i % 7);
    for (int r = 0; r < rounds; ++r) value = value * 0.5f + 1.0f;
    to[i] = value;
  }
}

// share: the error as a share of the float32 bound; scaled: as a share of the sum of |x||w|.
extern "C" __global__ void judge(const float* y, const float* x, const float* w, u64 n, int C, int H, int W, int M,
                                 int K, double bound, double least, float* share, float* scaled) {
  EACH(at, n) {
    double sum, size;
    exact(x, w, at, C, H, W, M, K, &sum, &size);
    double error = fabs(y[at] - sum);
    bool finite = isfinite(y[at]);
    share[at] = finite ? (float)(error / (bound * size + least)) : __int_as_float(0x7f800000);
    // Where nothing is added up, no precision excuses anything.
    float alone = error > least ? __int_as_float(0x7f800000) : 0.0f;
    scaled[at] = !finite ? 0.0f : size > 0 ? (float)(error / size) : alone;
  }
}

// counts: written, accumulated, left as it was though the sum is not zero, left where it is, other.
extern "C" __global__ void traces(const float* y, const float* x, const float* w, u64 n, int C, int H, int W, int M,
                                  int K, float pattern, double near, u64* counts) {
  u64 own[5] = {0, 0, 0, 0, 0};
  EACH(at, n) {
    double sum, size;
    exact(x, w, at, C, H, W, M, K, &sum, &size);
    if (y[at] == pattern) ++own[fabs(sum) < near ? 3 : 2];
    else if (fabs(y[at] - sum) < near) ++own[0];
    else if (fabs(y[at] - sum - pattern) < near) ++own[1];
    else ++own[4];
  }
  for (int k = 0; k < 5; ++k)
    if (own[k]) atomicAdd(counts + k, own[k]);
}

"""Names of the host's code in a kernel are named as by nvcc."""

import re

import pytest

from ece408_op import emulator
from ece408_op.emulator import _sides

#: What stands in front of a kernel; its body; and what nvcc says of the body's line, if anything.
SIDES = {
    "a function of the host's": ("float twice(float a) { return 2 * a; }", "y[i] = twice(x[i]);", 'function("twice")'),
    "an index of the host's": ("int at(int i) { return i; }", "y[i] = y[i <at(x[i])];", 'function("at")'),
    "a template of the host's": (
        "template <typename T>\nT twice(T a) {\n return 2 * a; }", "y[i] =\n\ntwice<float>(x[i]);", 'function("twice")',
    ),
    "a variable of the host's": ("static int factor = 1;", "y[i] = x[i] * factor;", '"factor" is undefined'),
    "an array of the host's": ("float factors[64];", "y[i] = x[i] + factors[i];", '"factors" is undefined'),
    "a constant function of the host's": (
        "constexpr float twice(float a) { return 2 * a; }",
        "constexpr float b = twice(1);\nfloat s[int(twice(2))] = {b};\ny[i] = twice(x[i]) * s[0];",
        'function("twice")',
    ),
    "an array of constants": ("const float factors[2] = {1, 2};", "y[i] = x[i] * factors[i % 2];", '"factors" is'),
    "the host's maximum": ("", "y[i] = std::max(0.f, x[i]);", 'function("max")'),
    "the host's random numbers": ("", "y[i] = x[i] + rand();", 'function("rand")'),
    "a check": ("", "y[i] = 0;\nCHECK_EQ(x[i], 0);", 'function("CHECK_EQ")'),
    "a stream": ("", "y[i] = 0;\nstd::cout << x[i];", 'function("cout")'),
    "memory of a kernel's own": ("", "float *s = new float[2];  // x[i]", "memory that a kernel allocates (new)"),
    "a value of shared memory": (
        "", "__shared__ float s[2][N <= 2];\n__shared__ __align__(16) float sums[64] = {};  // x[i]\ny[i] = sums[i];",
        "initializer not allowed for __shared__ variable",
    ),
    "shared memory without a value": ("", "__shared__ float s[N == 2], t;\nfloat *p = s; y[i] = p[0];", ""),
    "a parameter by reference": ("", "}\n__global__ void f(int *y, const int &n) { *y = n;  // x[i]", "is a reference"),
    "a reference of a device function": ("__device__ float twice(float &a) { return 2 * a; }", "y[i] = x[i];", ""),
    "a lambda with a side": ("", "y[i] = [=] __device__ () { return x[i]; }();", "--extended-lambda"),
    "an attribute": ("[[nodiscard]] __device__ int one() { return 1; }", "y[i] = x[i] + one();", ""),
    "functions that CUDA has": (
        "",
        "constexpr int two = std::max(1, 2); float s[std::min(3, 4)] = {std::sqrt(x[i])};\n"
        "y[i] = max(s[0], std::abs(x[i])) + std::move(s[1]) + two;",
        "",
    ),
    "a device function": ("__device__ float twice(float a) { return 2 * a; }", "y[i] = twice(x[i]);", ""),
    "a function for both": ("__host__ __device__ int one() { return 1; }", "y[i] = one();", ""),
    "a kernel with a result": (
        "", "}\n__global__ int f(int *y) { return y[0];  // x[i]", "must have a void return type",
    ),
    "a variable of the GPU's in a function": ("", "y[i] = 0;\n__device__ float a = x[i];", '"__device__" variable'),
    "a call of a kernel": (
        "", "}\ntemplate <int N> __global__ void f(int *y) {} void g() {\nf<2>(0);  // x[i]", "f<<<grid, block>>>(...)",
    ),
    "launches": (
        "", "}\n__global__ void f(int *y) {} void g() { f<<<1, 2>>>(0); f <<< 1, 2 >>> (0); void (*h)(int *) = f; }\n"
        "struct F { void f(int *y); void g() { f(0); }", "",
    ),
    "a member function of the host's": (
        "struct Own { int twice() const { return 2; } __device__ int once() { return 1; } };",
        "Own own; const int one = own.once();\ny[i] = one + own.twice() + x[i];",
        'function("twice")',
    ),
    "a macro of both sides": (
        "#define BOTH __host__ __device__\nBOTH int one() { return 1; } struct Own { BOTH int two() { return 2; } };",
        "Own own;\ny[i] = one() + own.two();",
        "",
    ),
    "constants": ("const int a = 1; constexpr float b = 2; enum { c = 3 }; #define d 4", "y[i] = a + b + c + d;", ""),
    "names of its own": (
        "int n = 4, rows; void scale(int) {} int count(int n) { return n; }",
        "int n = i; float *rows = y + n; auto scale = [=](float a) { return a; }; const int count(3);\n"
        "rows[0] = scale(x[n]) + count;",
        "",
    ),
    "functions of others": (
        "float scale(float a) { return a; } struct Own { static __device__ float scale(float a) { return a; } };",
        "y[i] = Own::scale(x[i]);",
        "",
    ),
    "another name of a namespace": ("namespace cg = groups;", "y[i] = cg::sum(x[i]);", ""),
    "a member": ("int size; struct Both { int size; };", "Both both = {1};\ny[i] = both.size;", ""),
}  # fmt: skip


@pytest.mark.parametrize("name", SIDES)
def test_the_hosts_functions_and_variables_are_named_as_by_nvcc(name):
    before, body, said = SIDES[name]
    kernel = f"__global__ void run(float *y, const float *x) {{ const int i = threadIdx.x;\n{body}\n}}"
    text = f"namespace mxnet {{\n{before}\n{kernel} }}".replace(" #define d 4", "\n#define d 4")
    if not said:
        return _sides.check(text)
    with pytest.raises(emulator.CompileError, match=re.escape(said)) as caught:
        _sides.check(text)
    assert caught.value.lines[0][0] == text[: text.rindex("x[i]")].count("\n") + 1

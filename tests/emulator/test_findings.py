"""What the emulator finds in wrong submissions, with the file's own lines."""

import re
from pathlib import Path

import numpy as np
import pytest
from one_body import SOURCE, W, X, run

from ece408_op import emulator
from ece408_op.emulator._rewrite import rewrite

#: A body, and the kinds of findings with their lines.
WRONG = {
    "a read behind the end": ("y[i] = x[784 + i];", {("out of bounds", 5, 0)}),
    "a write in front": ("y[i - 70 + 64 * b] = 0;", {("out of bounds", 5, 0)}),
    "a wild index": ("y[i] = x[i * 1000000000ll];", {("out of bounds", 5, 0)}),
    "a vector": ("float4 v = *(const float4 *)(x + 1);\ny[i] = v.x + v.w;", {("misaligned", 5, 0)}),
    "no barrier": (
        "__shared__ float s[64];\ns[i] = x[i];\ny[i] = s[63 - i];",
        {("race", 6, 7), ("uninitialised", 7, 0)},
    ),
    "matrices of another warp": (
        "__shared__ unsigned s[256];\nunsigned d;\ns[i] = s[i + 64] = s[i + 128] = i;\n"
        'asm("ldmatrix.sync.aligned.m8n8.x1.trans.shared.b16 {%0}, [%1];"\n: "=r"(d)\n'
        ': "r"(static_cast<unsigned>(__cvta_generic_to_shared(&s[4 * (i)]))));\ny[i + 64 * b] = d;',
        {("race", 8, 7)},
    ),
    "two writers": ("__shared__ float s[64];\ns[0] = x[i];\n__syncthreads();\ny[i] = s[0];", {("race", 6, 6)}),
    "half a tile": (
        "__shared__ float s[64];\nif (i < 32) s[i] = x[i];\n__syncthreads();\ny[i] = s[i];",
        {("uninitialised", 8, 0)},
    ),
    "an early return": ("if (i > 40) return;\n__syncthreads();\ny[i] = 0;", {("barrier", 6, 0)}),
    "a barrier in a branch": (
        "if (i < 32) {\n__syncthreads();\ny[i] = 1;\n} else {\n__syncthreads();\ny[i] = 2;\n}",
        {("barrier", 9, 6)},
    ),
    "dynamic shared memory": ("extern __shared__ float d[];\nd[i + 200] = 1;\ny[i] = 0;", {("out of bounds", 6, 0)}),
    "another array in shared memory": (
        "__shared__ float s[64], t[64];\ns[i] = t[i] = 1;\n__syncthreads();\n"
        "y[i + 64 * b] = s[i + 4 * b] +\nt[i - 70 * b + 6];",
        {("out of bounds", 9, 0), ("out of bounds", 8, 0)},
    ),
    "rows of dynamic shared memory": (
        "extern __shared__ float d[][8];\n(&d[0][0])[i] = x[i];\n__syncthreads();\n"
        "y[d[i / 8][i % 8] == x[i] ? i + 64 * b : -99] = 0;",
        set(),
    ),
    "in front of shared memory": ("extern __shared__ float d[];\nd[i - 1] = y[i] = 0;", {("out of bounds", 6, 0)}),
    "another array of the program": (
        "y[i] = filters[i + 40];\ntable[i + b] = 1;",
        {("out of bounds", 5, 0), ("out of bounds", 6, 0)},
    ),
    "an array in a function": (
        "float sum[4] = {};\nfor (int n = 0; n <= 4 + b; n++) sum[n] += x[i];\ny[i] = sum[3];",
        {("out of bounds", 6, 0)},
    ),
    "an array in a function, in front": (
        "float sum[2][3] = {};\nfor (int n = 2; n >= -b; n--) sum[1][n] += x[i];\ny[i] = sum[1][0];",
        {("out of bounds", 6, 0)},
    ),
    "from row to row of shared memory": (
        "__shared__ float s[4][16];\nfloat sum[2] = {};\ns[0][i] = x[i];\n__syncthreads();\n"
        "y[i] = s[0][63 - i] + sum[b];",
        set(),
    ),
    "from row to row in a template": (
        "__shared__ float s[4][16];\nfloat sum[2] = {};\nconst auto at = [&](auto r) -> float & { return s[r][i]; };\n"
        "at(0) = x[i];\n__syncthreads();\ny[i] = at(0) + sum[b];",
        set(),
    ),
    "from row to row of a member": (
        "struct All { float s[4][16]; };\n__shared__ All all;\nfloat sum[2] = {};\nall.s[0][i] = sum[b];\n"
        "y[i] = all.s[0][i];",
        set(),
    ),
    "constant memory": ("y[i] = filters[i % 50] + one[i % 50];", set()),
    "a sum of two blocks": ("y[i] += x[i];", {("race", 5, 5)}),
    "a zero for an atomic sum": ("if (b == 0) y[i] = 0;\natomicAdd(y + i, x[i]);", {("race", 6, 5)}),
    "values of two blocks": ("y[i] = x[i + b];", {("race", 5, 5)}),
    "values of two threads": ("y[i / 2 + 64 * b] = x[i];", {("race", 5, 5)}),
    "values of two blocks in an array of the program": ("table[i] = x[i + b];\ny[i + 64 * b] = 0;", {("race", 5, 5)}),
    "the same values of two blocks": ("y[i] = x[i];\ntable[i] = x[i];", set()),
    "a sum of two threads": ("y[i / 2 + 64 * b] += x[i];", {("race", 5, 5)}),
    "a sum of two threads, with a barrier": (
        "float *const s = y + i / 2 + 64 * b;\nif (i % 2) *s = x[i];\n__syncthreads();\nif (i % 2 == 0) *s += x[i];",
        set(),
    ),
    "halves of a word": ("__half *const s = (__half *)y + 64 * b;\ns[i] = x[i];\ns[i] = s[i] + s[i];", set()),
    "a block that has counted the others": (
        "y[64 + i + 64 * b] = x[i];\n__threadfence();\n__syncthreads();\n__shared__ int last;\n"
        "if (i == 0) last = atomicAdd((int *)table, 1);\n__syncthreads();\nif (last) y[i] = y[64 + i] + y[128 + i];",
        set(),
    ),
    "a block that has counted the others, with no fence": (
        "y[64 + i + 64 * b] = x[i];\n__syncthreads();\n__shared__ int last;\n"
        "if (i == 0) last = atomicAdd((int *)table, 1);\n__syncthreads();\nif (last) y[i] = y[64 + i] + y[128 + i];",
        {("race", 10, 5)},
    ),
    "all blocks that have counted the others": (
        "y[64 + i + 64 * b] = x[i] + b;\n__threadfence();\n__syncthreads();\n"
        "if (i == 0) atomicAdd((int *)table, 1);\n__syncthreads();\ny[i] = y[64 + i] + y[128 + i];",
        {("race", 10, 10)},
    ),
    "a volatile flag behind a fence": (
        "volatile float *const flag = table;\ny[64 + i + 64 * b] = x[i];\n__threadfence();\n__syncthreads();\n"
        "if (i % 32 == 0) atomicCAS((int *)other, 0, 1), *(volatile int *)other = 0, flag[b] = 1;\n"
        "if (flag[b] > 2 || (b && flag[0] > 0)) y[i] = y[64 + i];",
        set(),
    ),
    "a volatile flag that is read by an atomic operation": (
        "y[64 + i + 64 * b] = x[i];\n__threadfence();\n__syncthreads();\n"
        "if (b == 0 && i == 0) *(volatile int *)table = 1;\n__shared__ int set;\n"
        "if (i == 0) set = atomicAdd((int *)table, 0);\n__syncthreads();\nif (b && set) y[i] = y[64 + i];",
        set(),
    ),
    "volatile zeros for an atomic sum": (
        "if (i < 4) *(volatile float *)(y + i + 4 * b) = 0;\n__syncthreads();\natomicAdd(y + (i + 4) % 8, 1.f);",
        {("race", 7, 5)},
    ),
    "a volatile zero for another block's atomic sum": (
        "if (b == 0 && i == 0) *(volatile float *)y = 0;\nif (b == 1 && i == 0) atomicAdd(y, x[i]);",
        {("race", 6, 5)},
    ),
    "a write into an input": ("((float *)x)[i + 64 * b] = 0;\ny[i] = 0;", {("input", 5, 0)}),
    "a write into constant memory": ("filters[i % 50] = 1;\ny[i] = 0;", {("input", 5, 0)}),
    "a null pointer": ("float *const none = nullptr;\nnone[i] = 0;", {("out of bounds", 6, 0)}),
    "a copy into what others still read": (
        "__shared__ float s[64];\ns[i] = x[i];\n__syncthreads();\nconst float v = s[63 - i];\n"
        "__pipeline_memcpy_async(s + i, x + 64 + i, 4);\n__pipeline_commit();\n__syncthreads();\n"
        "__pipeline_wait_prior(0);\ny[i + 64 * b] = v;",
        {("race", 8, 9), ("uninitialised", 8, 0)},
    ),
    "a copy that nobody waits for": (
        "__shared__ float s[64];\n__pipeline_memcpy_async(s + i, x + i, 4);\n__pipeline_commit();\n"
        "y[i + 64 * b] = s[i];",
        {("uninitialised", 8, 0)},
    ),
    "a copy over other values that nobody waits for": (
        "__shared__ float s[64];\ns[i] = x[i];\n__pipeline_memcpy_async(s + i, x + 64 + i, 4);\n__pipeline_commit();\n"
        "y[i + 64 * b] = s[i];",
        {("uninitialised", 9, 0)},
    ),
    "a call that sets memory": (
        "__shared__ float s[64];\nif (i == 0) memset(s, 0, 128 * gridDim.x);\ny[i + 64 * b] = s[i];",
        {("race", 7, 6)},
    ),
    "calls that set and copy parts of words": (
        "__shared__ char s[64];\nif (i == 0) memset(s, 0, 3 * gridDim.x);\n__syncthreads();\n"
        "memcpy((char *)(y + i + 64 * b) + s[5] + 1, (const char *)x + 2, gridDim.x + 1);",
        set(),
    ),
    "a mask without the lane that calls": (
        "y[i + 64 * b] = x[i] +\n__shfl_xor_sync(0x7fffffff, x[i], 1);",
        {("barrier", 6, 0), ("undefined", 6, 0)},
    ),
    "two calls that exchange values": (
        "float one;\nif (i % 2) one = __shfl_sync(~0u, x[i], 1);\nelse one = __shfl_sync(~0u, x[i], 2);\n"
        "y[i + 64 * b] = one;",
        {("barrier", 6, 7), ("barrier", 7, 6)},
    ),
    "a call in a loop that exchanges values": (
        "float one = 0;\nfor (int n = 0; n < 2 + i / 32; n++) one += __shfl_sync(~0u, x[i], n);\ny[i + 64 * b] = one;",
        set(),
    ),
    "two halves with masks that do not fit": (
        "float one = 0;\nif (i % 32 < 16) one =\n__shfl_sync(0xffffffff, x[i], 1);\nelse one = "
        "__shfl_sync(0xffff0000, x[i], 20);\ny[i + 64 * b] = one;",
        {("barrier", 7, 0)},
    ),
    "a variable without a value": ("float sum;\nsum += x[i];\ny[i] = sum;", {("uninitialised", 5, 0)}),
}


#: Words that messages must have.
MESSAGES = {
    "a variable without a value": ("y was computed from a variable that has no value at first: sum",),
    "another array in shared memory": ("reads 4 bytes 20 bytes past the end of t", "12 bytes past the end of s"),
    "an array in a function": ("index 4 is beyond sum, which has 4 elements",),
    "a sum of two blocks": ("blocks have no order: a sum needs atomicAdd",),
    "a block that has counted the others, with no fence": ("with no __threadfence() and atomic operation between",),
    "a sum of two threads": ("with no barrier between",),
    "a copy that nobody waits for": ("or before its cp.async has been waited for",),
    "values of two blocks": ("two blocks write the same element",),
    "a write into an input": ("writes x",),
}


FILLED = "float h[50] = {0}; cudaMemcpyToSymbol(filters, h, sizeof h);"
#: A layer's number of filters chooses the kernel: one program is compiled in a tenth of the time of many.
KERNELS = {name: number for number, name in enumerate(WRONG, 2)}


@pytest.fixture(scope="module")
def together(programs):
    """A program of all wrong kernels, and its text."""
    start, kernel, rest = re.fullmatch(r"(.*?)(__global__.*?\n}}\n)(.*)", SOURCE, re.DOTALL).groups()
    kernels = (kernel.replace("run(", f"run_{KERNELS[name]}(").format(body=body) for name, (body, _) in WRONG.items())
    cases = []
    for name, (body, _) in WRONG.items():
        launch = f"run_{KERNELS[name]}<<<2, 64, 1024>>>(y.dptr_, x.dptr_, w.dptr_);"
        cases.append(f"if (w.shape_[0] == {KERNELS[name]}) {{ {FILLED * ('filters' in body)} {launch} }}\n")
    rest = re.sub(r"run<<<.*\n", "", rest).format(host="".join(cases), threads=64)
    path = programs / "together.cuh"
    path.write_text(start.format() + "".join(kernels) + rest)
    return emulator.compile(path, folder=programs), path.read_text()


@pytest.mark.parametrize("name", WRONG)
def test_it_is_found_with_its_lines(name, together):
    program, text = together
    before = text[: text.index(f"run_{KERNELS[name]}(")].count("\n")
    (report,) = emulator.run_layers(program, [(X, np.resize(W, (KERNELS[name], *W.shape[1:])))])
    lines = [[line and line - before + 3 for line in (one.line, one.other_line)] for one in report.findings]
    assert {(one.kind, *both) for one, both in zip(report.findings, lines)} == WRONG[name][1]
    kinds = [one.kind for one in report.findings]
    assert kinds == sorted(kinds, key="uninitialised".__eq__)  # what causes it comes first
    assert all(one.file == "together.cuh" for one in report.findings if one.line)
    messages = " ".join(one.message for one in report.findings)
    assert all(words in messages for words in MESSAGES.get(name, ())), messages


def test_an_endless_loop_ends_with_its_line_and_tells_how_far_it_came(programs):
    report = run("y[i] = 0;\nif (b == 1) while (x[0] < 2) y[i] += 1;", programs, seconds=1)
    (finding,) = report.findings
    assert (finding.kind, finding.line, report.ended) == ("time", 6, True)
    assert "1 of 2 blocks done" in finding.message


@pytest.mark.parametrize(
    ("body", "name"),
    [
        ("__shared__ float bins[64]; const auto add = [&] { bins[i] += 1; }; bins[i] = 0; add();\n"
         "float sums[8];\nfor (int j = 0; j < 8; j++) sums[j] = 0; "
         "float all[8];\n"
         "for (int k = 0; k < b + 3; k++) for (int j = 0; j < 8; j++) all[j] += x[j];\ny[i] = all[i % 8];", "all"),
        ("float sums[8];\n\nfloat all[8], pixel;\nfor (int j = 0; j < 8; j++) sums[j] = pixel = x[j];\n"
         "for (int k = 0; k < b + 3; k++) for (int j = 0; j < 8; j++) all[j] = fmaf(sums[j], x[k], all[j]);\n"
         "y[i] = all[i % 8];", "all"),
        ("const half2 one = __float2half2_rn(1);\n\nhalf2 all[2];\n"
         "for (int k = 0; k < b + 3; k++) for (int j = 0; j < 2; j++) all[j] = __hfma2(one, one, all[j]);\n"
         "y[i] = __low2float(all[i % 2]);", "all"),
        ("using namespace nvcuda::wmma; __shared__ half s[256]; for (int j = i; j < 256; j += 64) s[j] = 0;\n"
         "__syncthreads(); fragment<matrix_a, 16, 16, 16, half, row_major> f; load_matrix_sync(f, s, 16);\n"
         "fragment<matrix_b, 16, 16, 16, half, row_major> g; load_matrix_sync(g, s, 16); "
         "fragment<accumulator, 16, 16, 16, float> sum;\nmma_sync(sum, f, g, sum); y[i] = sum.x[0];", "sum"),
    ],
    ids=["an array in loops", "an array that is assigned", "halves", "a fragment"],
)  # fmt: skip
def test_a_sum_without_a_value_is_named(body, name, programs):
    include = "#include <mma.h>\n" * ("wmma" in body)
    (finding,) = run(body, programs, source=include + SOURCE).findings
    assert (finding.kind, finding.line) == ("uninitialised", 7 + include.count("\n"))
    assert finding.message.endswith(f"no value at first: {name}")


def test_an_infinite_half_is_no_variable_without_a_value(programs):
    assert run("y[i] = __half(60000) * __half(x[i] * x[i] + 9);", programs).findings == ()


def test_no_layers_have_no_reports(programs):
    path = programs / "none.cuh"
    path.write_text(SOURCE.format(body="float a[2];\na[i % 2] = 1;\ny[i] = a[i % 2];", host="", threads=64))
    assert emulator.run_layers(emulator.compile(path, folder=programs), []) == []


@pytest.mark.parametrize(
    ("kind", "copied", "times"),
    [("float", "", 64), ("__half", "", 64), ("__half", "cudaMemcpy(own, w.dptr_, 64, cudaMemcpyDefault);", 32)],
    ids=["floats", "halves", "halves behind those that were copied"],
)
def test_gpu_memory_that_nothing_wrote_is_found(kind, copied, times, programs):
    host = f"float *own; cudaMalloc(&own, 256); {copied} run<<<1, 64, 1024>>>(y.dptr_, own, w.dptr_);"
    (finding,) = run(f"y[i] = ((const {kind} *)x)[i];", programs, host).findings
    assert (finding.kind, finding.line, finding.times) == ("uninitialised", 5, times)


@pytest.mark.parametrize(
    "fill",
    [
        "short all[64]; std::fill_n(all, 64, -1); cudaMalloc(&own, 128); cudaMemcpy(own, all, 128, cudaMemcpyDefault);",
        "cudaMalloc(&own, 128); cudaMemset(own, 255, 128);",
        "cudaMallocManaged(&own, 128); std::fill_n(own, 64, -1);",
        "cudaMalloc(&own, 128); run<<<1, 64, 1024>>>(y.dptr_, nullptr, (float *)own);",
    ],
)
def test_shorts_of_minus_one_that_were_written_have_values(fill, programs):
    body = "if (!x) ((short *)w)[i] = -1;\nelse y[i] = ((const short *)x)[i];"
    launch = "run<<<1, 64, 1024>>>(y.dptr_, (const float *)own, w.dptr_); return;"
    report = run(body, programs, f"short *own; {fill} {launch}")
    assert report.findings == () and (report.y.reshape(-1)[:64] == -1).all()


def test_a_copy_may_call_memory_of_the_gpu_the_hosts(programs):
    host = "MSHADOW_CUDA_CALL(cudaMemcpyToSymbol(filters, w.dptr_, 200));"
    report = run("y[i] = filters[i % 50];", programs, host)
    assert report.findings == () and (report.y.reshape(-1)[:50] == W.reshape(-1)).all()


def test_a_failed_check_has_no_line_of_another_file(programs):
    (finding,) = run("y[i] = 0;", programs, 'CHECK_EQ(0, 1) << "not yet";').findings
    assert (finding.kind, finding.line, finding.file) == ("error", 0, "")
    assert finding.message == "wrong.cuh:9: Check failed: 0 == 1 (0 vs. 1) not yet"


def test_a_compile_error_has_the_files_line(programs):
    with pytest.raises(emulator.CompileError) as caught:
        run("y[i] = x[j];", programs)
    line, message = caught.value.lines[0]
    assert line == 5 and "j" in message


#: What the host's code does between a kernel's definition and its launch, and the findings.
HOST = {
    "a copy by a constant's name": ("cudaMemcpy(filters, w.dptr_, 200, cudaMemcpyDeviceToDevice);", {("call", 9, 0)}),
    "a constant that the host's code writes": ("filters[x.shape_[1]] = 1;", {("call", 9, 0)}),
    "a constant as an argument": ("run<<<1, 64>>>(y.dptr_, x.dptr_, filters);", {("call", 9, 0)}),
    "a variable as an argument": ("run<<<1, 64>>>(y.dptr_, x.dptr_, table);", {("call", 9, 0)}),
    "a constant's address and text for its name": (
        "cudaMemcpyToSymbol(&filters, w.dptr_, 8);\n"
        'if (cudaMemcpyToSymbol("filters", w.dptr_, 4) == cudaErrorInvalidSymbol) return;',
        {("call", 9, 0), ("call", 10, 0)},
    ),
    "a reset": ("cudaDeviceReset();", {("call", 9, 0)}),
    "calls that fail": (
        "float h[60]; cudaMemcpyToSymbol(filters, h, sizeof h);\ncudaFree(y.dptr_ + 1);\n"
        "run<<<2, 2048>>>(y.dptr_, x.dptr_, w.dptr_);",
        {("call", 9, 0), ("call", 10, 0), ("call", 11, 0)},
    ),
    "a call that sets memory": ("memset(y.dptr_, 0, x.shape_.Size());", {("out of bounds", 9, 0)}),
    "a pointer for its address": (
        "const int n = x.shape_[0];\nfloat *own; cudaMalloc((void **)own, n);",
        {("crash", 10, 0)},
    ),
    "no bytes": ("cudaMemset(nullptr, 0, 0); cudaMemcpy(nullptr, nullptr, 0, cudaMemcpyDefault);", set()),
    "an exit": ("run<<<2, 64>>>(y.dptr_, x.dptr_, w.dptr_); exit(0);", {("crash", 9, 0)}),
    "an exit without handlers": ("run<<<2, 64>>>(y.dptr_, x.dptr_, w.dptr_); _exit(0);", {("crash", 0, 0)}),
    "a symbol's address": (
        "float *at; cudaGetSymbolAddress((void **)&at, table); cudaMemset(at, 0, 256);"
        "cudaMemcpy(at, x.dptr_, 256, cudaMemcpyDeviceToDevice); run<<<1, 64>>>(y.dptr_, x.dptr_, at);",
        set(),
    ),
}


@pytest.mark.parametrize("name", HOST)
def test_what_the_host_does_is_found_with_its_lines(name, programs):
    host, expected = HOST[name]
    found = run("y[i + 64 * b] = x[i] + 0 * filters[i % 50] + 0 * table[i];", programs, host).findings
    assert {(one.kind, one.line, one.other_line) for one in found if one.kind != "uninitialised"} == expected


def test_too_much_shared_memory_and_too_many_constants_are_found(programs):
    (finding,) = run("__shared__ float s[13000];\ns[i] = 1;\n__syncthreads();\ny[i] = s[63 - i];", programs).findings
    assert (finding.kind, finding.line) == ("call", 13)
    found = run("y[i] = 0;", programs, source=SOURCE.replace("2 * 25", "16400")).findings
    assert [(one.kind, one.line) for one in found] == [("call", 10)] and "bytes of __constant__" in found[0].message


def with_kernel(kernel: str, host: str, programs: Path) -> emulator.Report:
    """Run this host's code with one more kernel in front of the file's own."""
    source = SOURCE.replace("__global__ void run", f"{kernel}\n__global__ void run")
    return run("y[i] = 0;", programs, f"{host} return;", source=source)


def test_a_block_of_more_threads_than_the_launch_bounds_is_found(programs):
    bounded = """template <int most>
__global__ void __launch_bounds__(most / 2,
                                  1) bounded(float *y) {{ y[threadIdx.x] = 1; }}"""
    report = with_kernel(bounded, "bounded<128><<<2, 64>>>(y.dptr_); bounded<126><<<2, 64>>>(y.dptr_ + 64);", programs)
    ((kind, line, message),) = [(one.kind, one.line, one.message) for one in report.findings]
    assert (kind, line, message.partition("threads, and ")[2]) == ("call", 12, "__launch_bounds__ allows 63")
    assert (report.y.reshape(-1)[:128] == np.repeat([1, 0], 64)).all()


def test_a_parameter_with_the_name_of_the_bounds_is_not_taken_for_them(programs):
    bounded = """const int most = 64;
__global__ void __launch_bounds__(most) bounded(float *y, const int most) {{ y[threadIdx.x] = most; }}"""
    report = with_kernel(bounded, "bounded<<<1, 64>>>(y.dptr_, 2);", programs)
    assert report.findings == ()
    np.testing.assert_array_equal(report.y.reshape(-1)[:64], 2)


@pytest.mark.parametrize(
    "text",
    [
        "void f(int a) {}\n__global__ void __launch_bounds__(64 k(float *y) {}\n",
        "{}\n__global__ void __launch_bounds__(64) k(float *y {}\n",
        "#define BOUNDS(n) __launch_bounds__(n)\nvoid f(int a) {}\n",
        "#define BOUNDS(n) \\\n    __launch_bounds__(n)\nvoid f(int a) {}\n",
    ],
    ids=["open bounds", "open parameters", "macro", "macro of two lines"],
)
def test_bounds_without_a_kernel_behind_them_stay(text):
    assert rewrite(text) == text

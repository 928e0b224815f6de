"""Course submissions in the emulator: values, findings with their lines, counters and hints."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from process import ROOT, has_ended, on_path, wait_until

from ece408_op import emulator
from ece408_op.emulator import _build
from ece408_op.errors import DeviceError

SUBMISSIONS = Path(__file__).parents[1] / "submissions" / "gpu"
X = np.random.default_rng(0).uniform(-1, 1, (1, 1, 28, 28)).astype(np.float32)
W = np.random.default_rng(1).standard_normal((6, 1, 5, 5)).astype(np.float32)
Y = np.einsum("bchwpq,mcpq->bmhw", np.lib.stride_tricks.sliding_window_view(X, (5, 5), (2, 3)), W)


def run(path: Path, programs: Path) -> emulator.Report:
    return emulator.run_layers(emulator.compile(path, folder=programs), [(X, W)])[0]


def report(source: str, programs: Path) -> emulator.Report:
    path = programs / str(os.getpid()) / "new-forward.cuh"  # other processes compile at the same time
    path.parent.mkdir(exist_ok=True)
    path.write_text(source)
    return run(path, programs)


def changed(name: str, changes: dict[str, str]) -> str:
    """The submission's text with other text in places."""
    source = (SUBMISSIONS / name).read_text()
    for before, after in changes.items():
        assert source.count(before) == 1
        source = source.replace(before, after)
    return source


#: Submissions that use different parts of CUDA, and the error that their precision allows.
RIGHT = {
    "unroll_gemm": 1e-5,
    "half2": 0.03,
    "wmma": 0.03,
    "template_K": 1e-5,
    "unified_memory": 1e-5,
    "shared": 1e-5,
    "names_of_its_own": 1e-5,
    "many_parts": 1e-5,
    "old_intrinsics": 1e-5,
}


#: It includes much of the C++ library.
SLOW = "names_of_its_own"


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.exhaustive if name == SLOW else ()) for name in RIGHT]
)
def test_a_right_submission_is_right(name: str, programs: Path) -> None:
    found = run(SUBMISSIONS / f"{name}.cuh", programs)
    np.testing.assert_allclose(found.y, Y, atol=RIGHT[name])
    assert found.findings == ()
    assert found.totals.global_loads > 0


@pytest.mark.parametrize(
    ("name", "line", "message"),
    [
        ("cub", 5, "cub/cub.cuh"),
        ("texture", 12, "texture"),
        ("graph", 42, "cudaGraph_t"),
        ("texture_object", 10, "cudaTextureObject_t"),
    ],
)
def test_what_the_emulator_lacks_is_named_with_its_line(name: str, line: int, message: str, programs: Path) -> None:
    with pytest.raises(emulator.UnsupportedCodeError, match=message) as caught:
        emulator.compile(SUBMISSIONS / f"{name}.cuh", folder=programs)
    assert caught.value.lines[0][0] == line


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("__match_any_sync", "__match_any_sync(~0u, 1);"),
        ("cudaDeviceGetStreamPriority", "cudaDeviceGetStreamPriority(0);"),
        ("cuda/pipeline", "#include <cuda/pipeline>"),
        ("grid_group", "cooperative_groups::grid_group all;"),
        ("nvcuda::wmma::experimental", "nvcuda::wmma::experimental::precision::b1 one;"),
        ("coalesced_threads", "using namespace cooperative_groups; auto lanes = coalesced_threads();"),
        ("match_any", "using namespace cooperative_groups; tiled_partition<32>(this_thread_block()).match_any(1);"),
        ("hlog", "hlog(half(1.0f));"),
        ("wmma of other sizes", "nvcuda::wmma::fragment<nvcuda::wmma::accumulator, 8, 8, 16, float> f;"),
        ("wmma of other types", "nvcuda::wmma::fragment<nvcuda::wmma::matrix_b, 16, 16, 16, int> f;"),
    ],
)
def test_an_unknown_part_of_cuda_is_named_with_its_line(name: str, code: str, programs: Path) -> None:
    source = "#include <cooperative_groups.h>\n#include <mma.h>\n" + (SUBMISSIONS / "naive.cuh").read_text()
    line = source[: source.index("float sum")].count("\n") + 1
    with pytest.raises(emulator.UnsupportedCodeError, match=name) as caught:
        report(source.replace("float sum", f"{code}\nfloat sum", 1), programs)
    assert caught.value.lines[0][0] == line


def test_a_file_without_forward_is_told_so(programs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LC_ALL", "C")  # the compiler's quotes are plain then
    with pytest.raises(emulator.CompileError, match=r"^it has no forward\(y, x, w\)"):
        report("__global__ void run(float *y) { y[threadIdx.x] = 1; }", programs)


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("float *pixels = x; pixels[0] = 1;", "invalid conversion from .const float.* to .float..$"),
        ("y[0] = max(0, x[0]);", r"max\(int, const float&\).* is ambiguous$"),
        ("y[0] = min(sizeof(x), K);", r"min\(long unsigned int, const int&\).* is ambiguous$"),
        ("float window[K * K]; window[0] = 1;", "must have a constant value: the length of window"),
        ("atomicMax(y, 1.0f);", "CUDA has no atomicMax of this type"),
        ("atomicCAS(y, 1, 2);", "CUDA has no atomicCAS of this type"),
        ("__reduce_add_sync(~0u, 1.0f);", "CUDA has no __reduce_add_sync of this type"),
        # Names of the file's own, which are no part of CUDA that the emulator lacks.
        *((f"int n = {name};", f"{name}’ was not declared") for name in ("CUDA_MAX_NUM_THREADS", "current")),
    ],
)
def test_what_nvcc_does_not_compile_is_an_error_with_its_line(code: str, message: str, programs: Path) -> None:
    source = changed("naive.cuh", {"float sum": f"{code}\nfloat sum"})
    with pytest.raises(emulator.CompileError, match=message) as caught:
        report(source, programs)
    assert not isinstance(caught.value, emulator.UnsupportedCodeError)
    assert caught.value.lines[0][0] == source[: source.index(code)].count("\n") + 1


GROUPS = """
    auto block = cooperative_groups::this_thread_block(); auto tile = cooperative_groups::tiled_partition<8>(block);
    block.sync();
    int lanes = 0;
    for (int i = 0; i < 8; i++) lanes += tile.shfl(block.thread_rank(), i) == block.thread_rank() / 8 * 8 + i;
    tile.sync();
    if (block.thread_rank() % 16 < 8) lanes += tile.shfl_xor(lanes, 1) - 8;
    cooperative_groups::thread_group groups[] = {block, tile, cooperative_groups::tiled_partition(block, 4)};
    for (auto &group : groups) group.sync(), lanes += group.thread_rank() - block.thread_rank() % group.size();
    lanes += groups[0].size() - block.group_dim().x * block.group_dim().y;
    const float one = lanes == 8 && tile.any(tile.thread_rank() == 7) && !tile.all(tile.thread_rank() == 7);
"""
#: Vectors as constants, by name, partly initialised and in arrays of zeros; shared memory, aligned in other ways.
DECLARED = """
    struct Step { int first; int step = 4; };
    const auto at = [](__shared__ float *s, int n) -> float & { return s[n]; };
    constexpr int2 tap = {0, 1};
    float2 pair = {0.f}; float4 some = {1, 2}, sums[2][2] = {0};
    float4 named[2] = {{.y = fmaxf(0, 1), .w = some.x}, {.x = 0}}; float4 each = {{1.f}, {2.f}, float{3}, Step{0}.step};
    const char2 letters = {.x = 'a', .y = 'b'};
    float4 single = {1.f}; int2 whole[2] = {{1}, {}}; const half2 halves = {__float2half(1), __float2half(0)};
    unsigned lane; asm("mov.u32 %0, %%laneid;" : "=r"(lane));
    float pixel; asm("ld.global.nc.f32 %0, [%1];" : "=f"(pixel) : "l"(x + 1));
    lane -= (threadIdx.x + blockDim.x * threadIdx.y) % 32;
    struct Sum { float value; __device__ Sum() : value(0) {} };  // no GPU runs the constructor of a shared variable
    __shared__ Sum kept[1024];
    kept[threadIdx.x + blockDim.x * threadIdx.y].value = named[0].x + named[0].y * named[0].w - 1;
    __shared__ extern float one[];
    extern __align__(sizeof(float4)) __shared__ float two[];
    extern __shared__ __attribute__((aligned(16))) float three[];
    const float unit = tap.y + pair.x + some.w + sums[1][1].w
        + kept[threadIdx.x + blockDim.x * threadIdx.y].value + each.x + each.w - 5 + letters.y - letters.x - 1
        + single.x + single.w - whole[0].x - whole[0].y + whole[1].x + lane + __high2float(halves) + pixel - x[1];
"""
#: Changes of a submission that is right and stays so.
CHANGES = {
    "spaces in a launch's brackets": {"<<<": " << < ", ">>>": " >> > ", "float sum": "int a = 1 << 2;\nfloat sum"},
    "a kernel by an address, in an array and by a macro": {
        "forward_kernel<<<": """decltype(&forward_kernel) all[] = {forward_kernel};
        (*all[0])<<<1, 1>>>(y.dptr_, x.dptr_, w.dptr_, B, M, C, H, W, K);
        #define KERNEL(name) forward_##name
        KERNEL(kernel)<<<1, 1>>>(y.dptr_, x.dptr_, w.dptr_, B, M, C, H, W, K);
        all[B - 1]<<<""",
    },
    "a header that MXNet included": {"cudaStream_t s": "std::map<int, int> m;\ncudaStream_t s"},
    "the host's array of variable length": {"cudaStream_t s": "int sizes[B]; sizes[0] = M;\ncudaStream_t s"},
    "the most threads of a kernel": {
        "cudaStream_t s": """cudaFuncAttributes most;
        if (cudaFuncGetAttributes(&most, forward_kernel) != cudaSuccess || most.maxThreadsPerBlock != 1024) return;
        cudaHostRegister(&most, sizeof most, cudaHostRegisterDefault);
        cudaStream_t s"""
    },
    "a loop that takes too long to unroll": {"for (int p": "#pragma unroll\nfor (int p"},
    "cooperative groups of a block and of warps": {
        "#include <mxnet/base.h>": "#include <cooperative_groups.h>",
        "const int b = blockIdx.x": f"{GROUPS} const int b = blockIdx.x",
        "= sum;": "= one * sum;",
    },
    "an atomic sum of pairs of halves": {
        "__global__": "__device__ half2 pairs;\n__global__",
        "float sum": "atomicAdd(&pairs, __float2half2_rn(1));\nfloat sum",
    },
    "declarations": {"float sum": f"{DECLARED}\nfloat sum", "= sum;": "= unit * sum;"},
    "half a warp that shuffles before all wait": {
        "float sum": """const int lane = threadIdx.x % 32;
        float one = lane < 16 ? __shfl_sync(0xffff, lane, 3) == 3 : 1;
        __syncwarp();
        one *= __shfl_sync(0xffffffff, one, 20);
        float sum""",
        "= sum;": "= one * sum;",
    },
    "the lanes that are together": {
        "__global__": "__device__ __attribute__((noinline)) unsigned of_both() { return __activemask(); }\n__global__",
        "float sum": """unsigned side = 0;
        for (int i = 0; i < 32; i++) side |= unsigned((threadIdx.x / 32 * 32 + i) % 3 == 1) << i;
        float one;
        if (threadIdx.x % 3 == 1) one = __activemask() == side && of_both() == side;
        else one = __all_sync(__activemask(), threadIdx.x % 3 != 1) && __activemask() == ~side && of_both() == ~side;
        float sum""",
        "= sum;": "= one * sum;",
    },
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_changed_submission_stays_right(name: str, programs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if "too long" in name:
        monkeypatch.setattr(_build, "UNROLLED_SECONDS", 0.05)
    found = report(changed("naive.cuh", CHANGES[name]), programs)
    assert found.findings == ()
    np.testing.assert_allclose(found.y, Y, atol=1e-5)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (
            {"__syncwarp(); wmma::load": "wmma::load", "row_major); __syncwarp();": "row_major);"},
            {("race", 22, 27), ("race", 29, 30), ("uninitialised", 27, 0), ("uninitialised", 30, 0)},
        ),
        ({"wmma::mma_sync(": "if (threadIdx.x < 16) wmma::mma_sync("}, {("barrier", 27, 0), ("undefined", 27, 0)}),
        ({"&a[0][0], 16": "&a[0][0], 17"}, {("misaligned", 27, 0)}),
        ({"&a[0][0], 16": "&a[0][8], 16"}, {("misaligned", 27, 0)}),
        ({"&c[0][0], fc, 16": "&c[0][0], fc, 18"}, {("misaligned", 29, 0)}),
    ],
    ids=["no barrier around fragments", "half a warp's product", "stride", "address", "stride of the sums"],
)
def test_misuse_of_fragments_is_found(changes, expected, programs) -> None:
    findings = report(changed("wmma.cuh", changes), programs).findings
    assert {(one.kind, one.line, one.other_line) for one in findings} >= expected


def test_loops_from_the_thread_to_a_constant_are_compiled_fast(programs: Path) -> None:
    run(SUBMISSIONS / "naive.cuh", programs)  # which compiles the headers
    begin = time.monotonic()
    found = run(SUBMISSIONS / "register_gemm.cuh", programs)
    assert time.monotonic() - begin < 20
    np.testing.assert_allclose(found.y, Y, atol=1e-5)
    assert found.findings == ()


def test_a_product_in_tf32_is_right(programs: Path) -> None:
    source = (SUBMISSIONS / "wmma.cuh").read_text()
    for before, after in {
        "16, 16, 16, half": "16, 16, 8, wmma::precision::tf32",
        "16, 16, 16, float": "16, 16, 8, float",
        "n0 += 16": "n0 += 8",
        "__shared__ half": "__shared__ float",
        "__float2half": "wmma::__float_to_tf32",
    }.items():
        source = source.replace(before, after)
    found = report(source, programs)
    np.testing.assert_allclose(found.y, Y, atol=RIGHT["wmma"])
    assert found.findings == ()


def test_a_compiler_that_takes_too_long_ends_with_its_processes() -> None:
    word = f"1{os.getpid()}.5"
    with pytest.raises(emulator.CompileError, match="longer than 1 s"):
        _build.compile_with(["sh", "-c", f"sleep {word} & wait"], "new-forward.cuh", 1)
    assert has_ended(word)


def test_layers_are_computed_in_one_process(programs: Path) -> None:
    path = programs / "counts.cuh"
    grid = "static int calls; dim3 gridDim(B, calls++ ? M : 2)"
    path.write_text(changed("naive.cuh", {"dim3 gridDim(B, M)": grid}))
    reports = emulator.run_layers(emulator.compile(path, folder=programs), [(X, W[:2]), (X, W)])
    assert [one.findings for one in reports] == [(), ()]
    np.testing.assert_allclose(reports[1].y, Y, atol=1e-5)
    assert 3 * reports[0].totals.global_loads == reports[1].totals.global_loads


def test_a_layer_that_ends_the_process_is_the_last_one(programs: Path) -> None:
    path = programs / "ends.cuh"
    exits = "static int calls; if (calls++) _exit(3);\ncudaStream_t s"
    path.write_text(changed("naive.cuh", {"cudaStream_t s": exits}))
    reports = emulator.run_layers(emulator.compile(path, folder=programs), [(X, W)] * 3)
    assert [[one.kind for one in report.findings] for report in reports] == [[], ["crash"]]
    assert "(exit 3)" in reports[1].findings[0].message


#: A copy of x in a stream of its own, by ways that the number of filters chooses; only the first waits for nothing.
STREAMS = """
    const int way = w.shape_[0], bytes = x.MSize() * sizeof(float);
    float *copy, pixels[784];
    cudaMalloc(&copy, bytes);
    cudaStream_t own, s;
    cudaStreamCreateWithFlags(&own, way == 2 ? cudaStreamDefault : cudaStreamNonBlocking);
    cudaStreamCreate(&s);
    cudaEvent_t done;
    cudaEventCreate(&done);
    if (way == 6) cudaMemcpyAsync(pixels, x.dptr_, bytes, cudaMemcpyDeviceToHost, own);
    if (way == 6) cudaMemcpyAsync(copy, pixels, bytes, cudaMemcpyHostToDevice, s);
    else cudaMemcpyAsync(copy, x.dptr_, bytes, cudaMemcpyDeviceToDevice, own);
    if (way == 2) cudaMemset(y.dptr_, 0, 4);
    if (way == 3) cudaStreamSynchronize(own);
    cudaEventRecord(done, own);
    if (way == 4) cudaEventSynchronize(done);
    if (way == 5) cudaStreamWaitEvent(s, done, 0);
"""


def test_streams_wait_for_no_more_than_the_file_says(programs: Path) -> None:
    changes = {"cudaStream_t s = y.stream_->stream_;": STREAMS, "x.dptr_, w.dptr_": "copy, w.dptr_"}
    path = programs / "ordered.cuh"
    path.write_text(changed("naive.cuh", {**changes, "cudaDeviceSynchronize()": "cudaStreamSynchronize(s)"}))
    reports = emulator.run_layers(emulator.compile(path, folder=programs), [(X, W[:way]) for way in range(1, 7)])
    assert [{one.kind for one in report.findings} for report in reports] == [{"uninitialised"}, *[set()] * 5]
    for report in reports[1:]:
        np.testing.assert_allclose(report.y, Y[:, : report.y.shape[1]], atol=1e-5)


def test_streams_that_share_a_buffer_show_it_with_two_images(programs: Path) -> None:
    shared = """float *copy; cudaMalloc(&copy, x.MSize() * 4);
    cudaStream_t s, other; cudaStreamCreate(&s); cudaStreamCreate(&other);
    cudaMemcpyAsync(copy, x.dptr_, x.MSize() * 4, cudaMemcpyDeviceToDevice, s);
    cudaMemsetAsync(copy, 0, x.MSize() * 4, other);"""
    changes = {"cudaStream_t s = y.stream_->stream_;": shared, "x.dptr_, w.dptr_": "copy, w.dptr_"}
    path = programs / "shared_buffer.cuh"
    path.write_text(changed("naive.cuh", {**changes, "cudaDeviceSynchronize()": "cudaStreamSynchronize(s)"}))
    reports = emulator.run_layers(emulator.compile(path, folder=programs), [(X, W), (np.repeat(X, 2, 0), W)])
    np.testing.assert_allclose(reports[0].y, Y, atol=1e-5)
    assert (reports[1].y == 0).all()


def test_a_host_that_overwrites_its_own_heap_is_told_so(programs: Path) -> None:
    copies = ("char *own = new char[64]; cudaMemcpy(own, x.dptr_, 3136, cudaMemcpyDefault); delete[] own;",
              "own = new char[1 << 17]; cudaMemcpy(own, x.dptr_, 64, cudaMemcpyDefault);")  # fmt: skip
    (finding,) = report(changed("naive.cuh", {"cudaStream_t s": "".join(copies) + "cudaStream_t s"}), programs).findings
    assert "the host's code has overwritten memory that is not its own" in finding.message


def test_a_full_disk_is_no_error_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = "unit.cpp:9:1: fatal error: error writing to unit.s: No space left on device"
    fake = f"print('12.2') if sys.argv[1:] == ['-dumpfullversion'] else sys.exit({said!r})"
    on_path(monkeypatch, tmp_path, "g++", fake)
    with pytest.raises(DeviceError, match="No space left"):
        emulator.compile(SUBMISSIONS / "naive.cuh", folder=tmp_path)


def test_a_signal_ends_the_lab_and_its_compilers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun = tmp_path / "begun"
    fake = f"if sys.argv[1:] == ['-dumpfullversion']: sys.exit(print('12.2'))\nopen({str(begun)!r}, 'w')\n"
    on_path(monkeypatch, tmp_path, "g++", f"{fake}import time; time.sleep(60)")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    command = [sys.executable, "-m", "ece408_op", "lab", str(SUBMISSIONS / "naive.cuh"), "--emulate"]
    nohup = ["sh", "-c", "trap '' HUP; exec \"$@\"", "sh"]
    with subprocess.Popen([*nohup, *command], cwd=ROOT) as lab:
        try:
            wait_until(begun.exists)
            lab.send_signal(signal.SIGHUP)
            lab.send_signal(signal.SIGTERM)
            assert lab.wait(20) == 143
            assert has_ended(str(tmp_path), 0)
        finally:
            lab.kill()


def test_a_launch_from_a_kernel_is_named_with_its_line(programs: Path) -> None:
    found = run(SUBMISSIONS / "dynamic_parallelism.cuh", programs)
    assert [(one.kind, one.line) for one in found.findings] == [("unsupported", 33)]

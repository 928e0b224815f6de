"""Running kernels: streams, threads, memory, and errors that name the kernel that made them."""

import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from cuda_layers import CUDA_KERNELS
from gpu_case import assert_right, inputs, require_gpu, require_support
from process import printed

from ece408_op.core.kernel import CudaKernel
from ece408_op.errors import DeviceError, ProblemError, UnsupportedError
from ece408_op.kernels.cuda.ladder.naive import NAIVE
from ece408_op.kernels.cuda.ladder.shared import CONSTANT
from ece408_op.problem import ConvProblem
from ece408_op.runtime import cuda
from ece408_op.runtime.launch import Launch, Plan

KERNEL = pytest.mark.parametrize("kernel", CUDA_KERNELS, ids=lambda kernel: kernel.name)
SMALL = ConvProblem(2, 3, 9, 8, 5, 3)


def _broken(source: Path, block: int = 32) -> CudaKernel:
    def plan(problem, chip, aligned):
        return Plan({}, problem.batch, lambda images: (Launch("broken", (1, 1, 1), (block, 1, 1), ("y",)),))

    return CudaKernel("broken", "a kernel that fails", (source,), plan)


@pytest.mark.gpu
@KERNEL
def test_it_runs_on_the_stream_that_it_is_given(kernel):
    problem = ConvProblem(500, 3, 40, 40, 16, 5)
    cupy = require_support(kernel, problem)
    later, w, out = inputs(cupy, problem)
    x = cupy.zeros_like(later)
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with stream:
        # Work that the kernel must wait for, long enough that it would otherwise come too early.
        busy = cupy.ones((4096, 4096), "f")
        for _ in range(20):
            busy = busy @ busy
        x[...] = later
    kernel.run(problem, x, w, out, stream)
    stream.synchronize()
    assert_right(kernel, problem, x, w, out)


@pytest.mark.gpu
def test_threads_with_other_filters_do_not_share_constant_memory():
    cupy = require_gpu()
    problem = ConvProblem(300, 2, 30, 30, 20, 5)
    results = {}

    def work(seed):
        with cupy.cuda.Device(0), cupy.cuda.Stream(non_blocking=True) as stream:
            for turn in range(10):
                x, w, out = inputs(cupy, problem, 100 * seed + turn)
                CONSTANT.run(problem, x, w, out, stream)
                results[seed, turn] = (x, w, out)
            stream.synchronize()

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    assert len(results) == 40
    for arrays in results.values():
        assert_right(CONSTANT, problem, *arrays)


@pytest.mark.gpu
@KERNEL
def test_ten_thousand_calls_leave_no_memory_behind(kernel):
    cupy = require_support(kernel, SMALL)
    arrays = inputs(cupy, SMALL)
    kernel.run(SMALL, *arrays)
    cupy.cuda.Device().synchronize()
    alone = "PYTEST_XDIST_WORKER" not in os.environ  # other processes' allocations count as ours in memGetInfo
    before = (cupy.get_default_memory_pool().total_bytes(), cupy.cuda.runtime.memGetInfo()[0])
    for _ in range(10_000):
        kernel.run(SMALL, *arrays)
    cupy.cuda.Device().synchronize()
    after = (cupy.get_default_memory_pool().total_bytes(), cupy.cuda.runtime.memGetInfo()[0])
    assert after[0] == before[0]
    assert not alone or before[1] - after[1] < 2**21, f"{before[1] - after[1]} bytes of device memory are gone"


@pytest.mark.gpu
def test_other_arrays_than_the_problems_are_refused():
    cupy = require_gpu()
    x, w, out = inputs(cupy, SMALL)
    with pytest.raises(ProblemError, match=r"expected w .* shape \(5, 3, 3, 3\), got float32 of shape \(5, 3, 3, 2\)"):
        NAIVE.run(SMALL, x, w[..., :2], out)
    with pytest.raises(ProblemError, match="float64"):
        NAIVE.run(SMALL, x.astype("d"), w, out)
    with pytest.raises(ProblemError, match="strides"):
        NAIVE.run(SMALL, cupy.asfortranarray(x), w, out)


@pytest.mark.gpu
def test_a_problem_that_it_does_not_take_is_refused_with_the_reasons():
    cupy = require_gpu()
    problem = ConvProblem(1, 64, 11, 11, 256, 11)
    with pytest.raises(UnsupportedError, match="constant memory"):
        CONSTANT.run(problem, *inputs(cupy, problem))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("value", "block", "message"),
    [("nothing", 32, "the source to compile.*nothing"), ("1", 2048, "the kernel to run")],
    ids=["source", "launch"],
)
def test_what_does_not_compile_or_launch_is_reported_by_name(value, block, message, tmp_path):
    cupy = require_gpu()
    source = tmp_path / "broken.cu"
    source.write_text(f'extern "C" __global__ void broken(float *y) {{ y[0] = {value}; }}')
    with pytest.raises(DeviceError, match=f"broken: expected {message}"):
        _broken(source, block).run(SMALL, *inputs(cupy, SMALL))


@pytest.mark.gpu
def test_an_access_out_of_bounds_is_reported_by_name(tmp_path):
    require_gpu()
    # In a process of its own: the error ends the GPU's context for the process.
    source = tmp_path / "broken.cu"
    source.write_text('extern "C" __global__ void broken(float *y) { *(float *)16 = 1; }')
    code = f"""
from pathlib import Path
from gpu_case import inputs
from test_cuda_run import SMALL, _broken
from ece408_op.runtime import cuda
from ece408_op.errors import DeviceError
cupy = cuda.cupy()
_broken(Path({str(source)!r})).run(SMALL, *inputs(cupy, SMALL))
try:
    cuda.wait("broken", cupy.cuda.get_current_stream())
except DeviceError as error:
    print("reported:", error)
"""
    assert "reported: broken: expected the kernel to run, got" in printed("-c", code, first=[Path(__file__).parent])


@pytest.mark.parametrize(
    ("version", "failed", "message"),
    [
        (11080, 0, r"pip install .*\[cu117\].* brings CuPy"),
        (12040, 0, r"pip install .*\[cuda12\].* brings CuPy"),
        (13000, 0, r"pip install .*\[cuda13\].* brings CuPy"),
        (None, 0, "no NVIDIA driver: use m2.py"),
        (13000, 100, "expected a working NVIDIA driver, got error 100 of cuInit; use m2.py"),
    ],
)
def test_without_cupy_the_error_says_what_to_install_if_that_helps(monkeypatch, version, failed, message):
    cuda.cupy.cache_clear()
    monkeypatch.setattr(cuda, "driver_version", lambda: version)
    monkeypatch.setattr(cuda, "init_error", lambda: failed)
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(DeviceError, match=message) as error:
        cuda.device_count()
    assert ("install" in str(error.value)) == ("install" in message)
    cuda.cupy.cache_clear()


def test_alignment_is_what_all_pointers_share():
    assert cuda.alignment(256, 4096, 1024) == 16
    assert cuda.alignment(256, 4104) == 8
    assert cuda.alignment(256, 4100, 1024) == 4


def test_arrays_that_lie_between_two_floats_are_refused():
    with pytest.raises(ProblemError, match="^naive: expected arrays aligned to 4 bytes, got 2 bytes$"):
        NAIVE.program(SMALL, 0, 4096, 4098, 8192)

"""Prepared launches; programmatic dependent launches must not read what is not written yet."""

import ctypes
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
from gpu_case import require_support

from ece408_op.errors import DeviceError
from ece408_op.kernels.cuda.split_precision import split_precision
from ece408_op.problem import ConvProblem
from ece408_op.runtime import cuda, prepared_launch
from ece408_op.runtime.launch import Chip, CopyToConstant, Launch, LibraryCall, Plan, TensorMap

LAYERS = {
    split_precision.ONE_CHANNEL: (1, 28, 28, 50, 5),
    split_precision.IMPLICIT_GEMM: (6, 30, 30, 16, 5),
    split_precision.WARPGROUP: (12, 33, 33, 24, 7),
    split_precision.MMA_SYNC: (6, 30, 30, 16, 5),
}


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", LAYERS, ids=lambda kernel: kernel.name)
def test_calls_behind_one_another_give_what_calls_that_wait_give(kernel, monkeypatch):
    problem = ConvProblem(2200, *LAYERS[kernel])
    cupy = require_support(kernel, problem)
    plan = kernel.plan(problem, cuda.chip(), 16)
    program = cuda.Program(kernel.name, kernel.text(plan), kernel.options, plan)
    rng, sets = cupy.random.default_rng(408), []
    for number in range(4):
        x, w = rng.random(problem.x_shape, np.float32), rng.standard_normal(problem.w_shape, np.float32)
        if number == 1:
            x[::7, 0, 3, 4] = np.nan  # images to be repaired
        if number == 2:
            w[0, 0, 0, 0] = 1e-38  # filters that cannot be split: all images are
        sets.append({"x": x, "w": w, "y": cupy.empty(problem.y_shape, np.float32)})

    def call(arrays):
        cuda.execute(program, problem.batch, arrays, None)

    expected = []
    with monkeypatch.context() as without:
        without.setattr(prepared_launch, "launch_function", lambda: None)
        for arrays in sets:
            arrays["y"].fill(np.nan)
            call(arrays)
            cupy.cuda.Device().synchronize()
            expected.append(arrays["y"].copy())
    done, driver = [], prepared_launch.launch_function()
    monkeypatch.setattr(
        prepared_launch, "launch_function", lambda: lambda *given: done.append(driver(*given)) or done[-1]
    )
    for _ in range(10):
        for arrays in sets:
            arrays["y"].fill(7)
        for arrays in sets * 3:
            call(arrays)
        for arrays, exact in zip(sets, expected):
            same = (arrays["y"] == exact) | (cupy.isnan(arrays["y"]) & cupy.isnan(exact))
            assert bool(same.all())
    # One step of each call is launched as ever: what was on the stream before has then ended.
    steps = plan.steps(problem.batch)
    assert [step.programmatic for step in steps] == [False] + [cuda.chip().capability >= (9, 0)] * 2
    assert done and not any(done)


class Stream(nullcontext):
    """CuPy's."""

    ptr = 7


def cupy_function():
    return Mock(kernel=SimpleNamespace(ptr=408))


COPY = CopyToConstant("filters", "w", 4)
STEP = Launch("k", (3, 2, 1), (32, 1, 1), ("x", "y", np.int64(-5), np.int32(9), np.float32(0.5)), 64, programmatic=True)


def prepared(function):
    addresses = prepared_launch.Addresses(["y", "x"])
    ready = prepared_launch.PreparedLaunch(function, STEP, addresses)
    addresses.fill({"x": 2**63 + 1, "y": 512, "not used": 1})
    return ready


@pytest.mark.parametrize("driver", ["none", "one that refuses"])
def test_what_the_driver_will_not_launch_cupy_does(monkeypatch, driver):
    monkeypatch.setattr(prepared_launch, "launch_function", lambda: None if driver == "none" else lambda *_: 1)
    function = cupy_function()
    prepared(function).enqueue(Stream())
    function.assert_called_once_with((3, 2, 1), (32, 1, 1), (2**63 + 1, 512, -5, 9, 0.5), shared_mem=64)


@pytest.mark.parametrize("driver", [None, lambda *_: 700])
def test_the_drivers_error_is_that_of_a_kernel_with_tensor_maps(monkeypatch, driver):
    monkeypatch.setattr(ctypes, "CDLL", lambda name: SimpleNamespace(cuTensorMapEncodeTiled=lambda *_: 0))
    monkeypatch.setattr(prepared_launch, "launch_function", lambda: driver)
    addresses = prepared_launch.Addresses(["x"])
    step = Launch("k", (1, 1, 1), (32, 1, 1), (TensorMap("x", (64, 8), (64, 8)),))
    ready = prepared_launch.PreparedLaunch(cupy_function(), step, addresses)
    got = "error 700 of cuLaunchKernelEx" if driver else "a driver without cuLaunchKernelEx"
    with pytest.raises(DeviceError, match=f"^k: expected the driver to launch it, got {got}$"):
        ready.enqueue(Stream())


def test_the_driver_is_given_the_stream_the_addresses_and_the_numbers(monkeypatch):
    seen = []

    def call(config, function, pointers, extra):
        given = config._obj
        kinds = (ctypes.c_uint64, ctypes.c_uint64, ctypes.c_int64, ctypes.c_int32, ctypes.c_float)
        numbers = [kind.from_address(pointer).value for kind, pointer in zip(kinds, pointers)]
        attribute = given.attributes[0]
        seen.append((tuple(given.grid), tuple(given.block), given.shared, given.stream, function, numbers, extra))
        seen.append((given.count, attribute.which, attribute.value))
        return 0

    monkeypatch.setattr(prepared_launch, "launch_function", lambda: call)
    function = cupy_function()
    prepared(function).enqueue(Stream())
    function.assert_not_called()
    assert seen == [((3, 2, 1), (32, 1, 1), 64, 7, 408, [2**63 + 1, 512, -5, 9, 0.5], None), (1, 6, 1)]


@pytest.mark.parametrize(("words", "refused"), [({}, False), ({"setup": (COPY,)}, True), ({"streams": 2}, True)])
def test_what_calls_share_is_not_captured(words, refused, monkeypatch):
    """Nothing is launched or noted then; calls of libraries are captured."""
    stream, called = Stream(), []
    monkeypatch.setattr(stream, "is_capturing", lambda: True, raising=False)
    call = LibraryCall(("x",), lambda addresses, stream: called.append(addresses["x"]))
    program = cuda.Program("one", "", (), Plan({}, 8, lambda images: (call,), **words))
    with pytest.raises(DeviceError, match="one: expected a stream that no CUDA graph") if refused else nullcontext():
        cuda.enqueue(program, 8, {"x": 512, "w": 1024}, 0, stream)
    (prepared,) = program.idle[0, 8]
    assert called == ([] if refused else [512])
    assert prepared.module.last_use is None


def test_a_source_has_one_module_however_many_others_follow(monkeypatch):
    """CuPy would give out its own module again: constants must not be copied while another call's kernels read them."""
    raw = SimpleNamespace(compile=lambda: None)
    monkeypatch.setattr(cuda, "cupy", lambda: SimpleNamespace(RawModule=lambda **_: raw))
    programs = [cuda.Program("one", f"source {number}", (), Plan({}, 1, lambda images: ())) for number in range(700)]
    modules = [cuda.compiled(program, 408) for program in programs]
    again = [cuda.compiled(program, 408) for program in programs]
    assert all(one is other for one, other in zip(modules, again))


def test_constants_are_copied_to_the_module_whose_functions_run_also_after_clear_memo():
    """CuPy forgets a module then, and loads it again when it is asked for an array."""
    loaded = iter((512, 1024))
    module = cuda.Module(SimpleNamespace(get_global=lambda name: SimpleNamespace(ptr=next(loaded))))
    assert [module.symbol("filters") for _ in range(2)] == [512, 512]


def test_the_streams_of_a_plan_are_made_once(monkeypatch):
    made, used = [], []

    def stream(**_):
        made.append(SimpleNamespace(record=lambda: None, wait_event=lambda event: None, is_capturing=lambda: False))
        return made[-1]

    gpu = SimpleNamespace(Stream=stream, get_device_id=lambda: 408)
    monkeypatch.setattr(cuda, "cupy", lambda: SimpleNamespace(cuda=gpu))
    main, call = stream(), LibraryCall(("x",), lambda addresses, stream: used.append(stream))
    program = cuda.Program("several", "", (), Plan({}, 1, lambda images: (call,), streams=2))
    for _ in range(3):
        cuda.enqueue(program, 5, {"x": 512}, 408, main)
    assert len(made) == 3
    assert used == [made[1], made[2], made[1], made[2], made[1]] * 3


@pytest.mark.parametrize(
    "kernel", [split_precision.ONE_CHANNEL, split_precision.MMA_SYNC], ids=lambda kernel: kernel.name
)
def test_launches_are_early_only_where_the_kernels_wait_and_the_chip_is_full(kernel):
    problem = ConvProblem(10_000, *LAYERS[kernel])
    hopper = Chip("Hopper", (9, 0), 132, 227 * 1024)
    chips = [hopper, replace(hopper, capability=(8, 6), shared_bytes=99 * 1024)]
    found = [[step.programmatic for step in kernel.plan(problem, chip, 16).steps(10_000)] for chip in chips]
    assert found == [[False, True, True], [False] * 3]
    assert not any(step.programmatic for step in kernel.plan(problem, hopper, 16).steps(10))
    # An older compiler would make code for an older chip, which does not wait.
    assert "11.8" in kernel.not_supported_reasons(problem, replace(hopper, compiler=(11, 7)))[0]

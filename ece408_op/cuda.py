"""CUDA through CuPy: what the GPUs are, compiling a kernel's text, carrying out its plan.

This file and ``bridge.py`` alone know about streams. CuPy is imported at the first use, never before.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from typing import Any

import numpy as np

from . import cuda_early
from .errors import DeviceError
from .launch import SHARED_BYTES, Chip, CopyToConstant, Launch, Plan, Step
from .mxnet_import import load_libraries

#: The run-time compiler, which CuPy looks up by name: a machine with only a driver has it from a wheel.
_NVRTC = ("libnvrtc.so.11.2", "libnvrtc.so.12", "libnvrtc.so.13")

_OPTIONS = ("--std=c++17",)
_DEVICE_TO_DEVICE = 3
_FEWEST_REPEATS = 3


@cache
def cupy() -> Any:
    """The module CuPy; raises DeviceError where it cannot be imported."""
    load_libraries(_NVRTC)
    try:
        return import_module("cupy")
    except ImportError as error:
        raise DeviceError(
            f"the GPU: expected CuPy to import, got {error}; install cupy-cuda11x, -cuda12x or -cuda13x for your driver"
        ) from error


def device_count() -> int:
    """How many GPUs CuPy can use; raises DeviceError with the reason where there is none."""
    runtime = cupy().cuda.runtime
    try:
        count: int = runtime.getDeviceCount()
    except runtime.CUDARuntimeError as error:
        raise DeviceError(f"the GPU: expected a working NVIDIA driver, got {error}; use the CPU here") from error
    if count == 0:
        raise DeviceError("the GPU: expected at least one NVIDIA GPU, got none; use the CPU here")
    return count


@cache
def chip(device: int = 0) -> Chip:
    """The figures of one GPU; raises DeviceError where there is no GPU of that number."""
    count = device_count()
    if not 0 <= device < count:
        raise DeviceError(f"the GPU: expected a number from 0 to {count - 1}, got {device}")
    figures = cupy().cuda.runtime.getDeviceProperties(device)
    return Chip(
        name=figures["name"].decode(),
        capability=(figures["major"], figures["minor"]),
        multiprocessors=figures["multiProcessorCount"],
        shared_bytes=figures["sharedMemPerBlockOptin"],
        compiler=cupy().cuda.nvrtc.getVersion(),
    )


def cache_bytes(device: int = 0) -> int:
    """The size of one GPU's second-level cache."""
    return int(cupy().cuda.runtime.getDeviceProperties(device)["l2CacheSize"])


@dataclass(frozen=True)
class Program:
    """A kernel made ready for one problem: its name for messages, its text, NVRTC's options, its plan."""

    name: str
    text: str
    options: tuple[str, ...]
    plan: Plan


@dataclass
class Binary:
    """One compiled text on one device: its functions, and its constant memory's last use."""

    module: Any
    functions: dict[str, Any] = field(default_factory=dict)
    shared: dict[str, int] = field(default_factory=dict)
    #: Constant memory is the module's, whatever stream a call is on: calls take turns by this event.
    last_use: Any = None
    lock: threading.Lock = field(default_factory=threading.Lock)

    def function(self, entry: str, shared: int) -> Any:
        """The kernel of that name, allowed that much dynamic shared memory, in bytes."""
        if entry not in self.functions:
            self.functions[entry] = self.module.get_function(entry)
        function = self.functions[entry]
        if shared > self.shared.get(entry, SHARED_BYTES):
            function.max_dynamic_shared_size_bytes = shared
            self.shared[entry] = shared
        return function

    def symbol(self, name: str) -> int:
        """The device address of a ``__constant__`` array."""
        address: int = self.module.get_global(name).ptr
        return address


_compile_lock = threading.Lock()
_binaries: dict[tuple[str, tuple[str, ...], int], Binary] = {}
_lanes: dict[tuple[int, int], Any] = {}


def compiled(program: Program, device: int) -> Binary:
    """The program compiled for the current device, which is that number; compiled once."""
    key = (program.text, program.options, device)
    with _compile_lock:
        if key not in _binaries:
            module = cupy().RawModule(code=program.text, options=_OPTIONS + program.options)
            module.compile()
            _binaries[key] = Binary(module)
        return _binaries[key]


def wait(name: str, stream: Any) -> None:
    """Wait for the stream; an error there is the kernel's, and is raised as DeviceError under its name."""
    with reported(name):
        stream.synchronize()


def milliseconds(call: Callable[[], Any], name: str) -> float:
    """The time of a call's work on the current stream, between two events; errors there are reported under the name."""
    cuda = cupy().cuda
    stream = cuda.get_current_stream()
    start, end = cuda.Event(), cuda.Event()
    start.record(stream)
    call()
    end.record(stream)
    wait(name, stream)
    return float(cuda.get_elapsed_time(start, end))


def median_milliseconds(call: Callable[[], None], name: str, repeats: int = 10, budget: float = 300.0) -> float:
    """The median time of a call's work on the current stream, warm; errors there are reported under the name.

    Three calls are timed at least, and up to ``repeats`` while together they take less than ``budget`` milliseconds.
    """
    milliseconds(call, name)
    times: list[float] = []
    while len(times) < repeats and (len(times) < _FEWEST_REPEATS or sum(times) < budget):
        times.append(milliseconds(call, name))
    return sorted(times)[len(times) // 2]


def execute(program: Program, batch: int, arrays: Mapping[str, Any], stream: Any) -> None:
    """Put the program's work on the stream (None: CuPy's current one) of the arrays' device, and return.

    ``arrays`` are the CuPy arrays "x", "w" and "y". Raises DeviceError where compiling or launching fails;
    what fails later, on the device, is reported by ``wait``.
    """
    plan = program.plan
    device = arrays["x"].device
    with device, reported(program.name):
        main = cupy().cuda.get_current_stream() if stream is None else stream
        binary = compiled(program, device.id)
        with main:
            # CuPy's pool gives memory freed here to later work of this stream only: no need to wait for the kernels.
            scratch = {key: cupy().cuda.alloc(size) for key, size in plan.scratch.items()}
        values = {key: np.uint64(array.data.ptr) for key, array in arrays.items()}
        values.update({key: np.uint64(memory.ptr) for key, memory in scratch.items()})
        if any(isinstance(step, CopyToConstant) for step in plan.before):
            with binary.lock:
                if binary.last_use is not None:
                    main.wait_event(binary.last_use)
                _run(binary, plan, batch, values, main)
                binary.last_use = main.record()
        else:
            _run(binary, plan, batch, values, main)


def bound(program: Program, batch: int, arrays: Mapping[str, Any]) -> Callable[[], None]:
    """What ``execute`` does on these arrays and the current stream, to be done again and again: worked out once.

    Launches then cost a few microseconds each. The arrays must outlive the call. Programs whose calls share something,
    memory for constants or scratch, or several streams, are executed as they are.
    """
    plan, device = program.plan, arrays["x"].device
    rounds = plan.rounds(batch)
    steps = {images: plan.steps(images) for images in {images for _, images in rounds}}
    launches = [step for some in (plan.before, *steps.values()) for step in some]
    if plan.scratch or plan.lanes != 1 or any(isinstance(step, CopyToConstant) for step in launches):
        return lambda: execute(program, batch, arrays, None)
    with device, reported(program.name):
        binary = compiled(program, device.id)
    values = {key: np.uint64(array.data.ptr) for key, array in arrays.items()}
    ready = []
    for step, this in [(step, values) for step in plan.before] + [
        (step, {**values, "first": np.int64(first), "images": np.int32(images)})
        for first, images in rounds
        for step in steps[images]
    ]:
        assert isinstance(step, Launch), "judged above"
        args = tuple(this[argument] if isinstance(argument, str) else argument for argument in step.args)
        ready.append((binary.function(step.entry, step.shared), step.grid, step.block, args, step.shared))

    def launch() -> None:
        for function, grid, block, args, shared in ready:
            function(grid, block, args, shared_mem=shared)

    return launch


def _run(binary: Binary, plan: Plan, batch: int, values: Mapping[str, Any], main: Any) -> None:
    _put(binary, plan.before, values, main)
    rounds = plan.rounds(batch)
    lanes = [main] if plan.lanes == 1 else _fork(main, min(plan.lanes, len(rounds)))
    steps = {images: plan.steps(images) for images in {images for _, images in rounds}}
    for number, (first, images) in enumerate(rounds):
        this = {**values, "first": np.int64(first), "images": np.int32(images)}
        _put(binary, steps[images], this, lanes[number % len(lanes)])
    if lanes[0] is not main:
        for lane in lanes:
            main.wait_event(lane.record())


def _fork(main: Any, count: int) -> list[Any]:
    """That many streams that start once the main one has come this far."""
    device = cupy().cuda.get_device_id()
    lanes = [_lanes.setdefault((device, lane), cupy().cuda.Stream(non_blocking=True)) for lane in range(count)]
    start = main.record()
    for lane in lanes:
        lane.wait_event(start)
    return lanes


def _put(binary: Binary, steps: tuple[Step, ...], values: Mapping[str, Any], stream: Any) -> None:
    """Put the steps on the stream, their arguments' names replaced by values."""
    with stream:
        for step in steps:
            if isinstance(step, CopyToConstant):
                target, source = binary.symbol(step.symbol), int(values[step.source])
                cupy().cuda.runtime.memcpyAsync(target, source, step.bytes, _DEVICE_TO_DEVICE, stream.ptr)
            else:
                args = tuple(values[argument] if isinstance(argument, str) else argument for argument in step.args)
                function = binary.function(step.entry, step.shared)
                if not (step.early and cuda_early.launch(function.kernel.ptr, step, args, stream.ptr)):
                    function(step.grid, step.block, args, shared_mem=step.shared)


@contextmanager
def reported(name: str) -> Iterator[None]:
    """CUDA's and the compiler's errors become a DeviceError that names the kernel."""
    cuda = cupy().cuda
    try:
        yield
    except cuda.compiler.CompileException as error:
        raise DeviceError(f"{name}: expected the source to compile, got {error}") from error
    except cuda.memory.OutOfMemoryError as error:
        raise DeviceError(f"{name}: expected room for its scratch memory, got {error}; use a smaller batch") from error
    except (cuda.driver.CUDADriverError, cuda.runtime.CUDARuntimeError) as error:
        raise DeviceError(
            f"{name}: expected the kernel to run, got {error}; if later calls fail too, start the program again"
        ) from error


def alignment(*pointers: int) -> int:
    """The bytes that all pointers are multiples of: 16, 8 or 4."""
    joined = 16
    for pointer in pointers:
        joined |= pointer
    return joined & -joined

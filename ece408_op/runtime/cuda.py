"""CUDA through CuPy: what the GPUs are, compiling a kernel's text, carrying out its plan.

Streams are this file's and the two contexts'; all others are given one at most to pass on. CuPy is imported at the
first use, never before.
"""

from __future__ import annotations

import ctypes
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import import_module
from typing import Any

import numpy as np

from ece408_op.errors import DeviceError

from ._prepared_launch import Addresses, Prepared
from .install_hint import command
from .launch import SHARED_BYTES, Chip, CopyToConstant, Plan, Step, TensorMap
from .shared_libraries import load_libraries

#: The run-time compiler, which CuPy looks up by name: a machine with only a driver has it from a wheel.
_NVRTC = ("libnvrtc.so.11.2", "libnvrtc.so.12", "libnvrtc.so.13")

_OPTIONS = ("--std=c++17",)
_DEVICE_TO_DEVICE = 3
_NOTHING = nullcontext()

_INSTEAD = "use m2.py, or --context cpu of ece408-bench and ece408-grade; in a program, device='cpu'"


@cache
def driver_version() -> int | None:
    """The newest CUDA that NVIDIA's driver supports, 12040 for 12.4; None where there is no driver."""
    version = ctypes.c_int()
    try:
        failed = ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except (OSError, AttributeError):
        return None
    return None if failed else version.value


def require_driver() -> None:
    """Raise DeviceError, with what to do instead, where there is no NVIDIA driver."""
    if driver_version() is None:
        raise DeviceError(f"no NVIDIA driver: {_INSTEAD}")


def init_error() -> int:
    """The error code of the driver's cuInit, such as 100 where it finds no GPU; 0 where it succeeds."""
    return int(ctypes.CDLL("libcuda.so.1").cuInit(0))


def how_to_install(version: int) -> str:
    """The command that brings CuPy for a driver of that CUDA version, such as 12040, and what comes with it."""
    extra = {11: "cu117", 12: "cuda12"}.get(version // 1000, "cuda13")
    brings = "CuPy, NVRTC and CUDA's headers" if extra != "cu117" else "CuPy, and MXNet's GPU build with its libraries"
    return f"{command(extra)} brings {brings} for this driver (CUDA {version // 1000}.{version % 1000 // 10})"


@cache
def cupy() -> Any:
    """The module CuPy; raises DeviceError where there is no driver, or CuPy cannot be imported."""
    require_driver()
    load_libraries(_NVRTC)
    try:
        return import_module("cupy")
    except ImportError as error:
        # No package helps where the driver itself fails. Where CuPy is there, device_count reports that failure.
        failed = init_error()
        if failed:
            raise DeviceError(
                f"the GPU: expected a working NVIDIA driver, got error {failed} of cuInit; {_INSTEAD}"
            ) from error
        raise DeviceError(f"the GPU: expected CuPy, got {error}; {how_to_install(driver_version() or 0)}") from error


def device_count() -> int:
    """How many GPUs CuPy can use; raises DeviceError with the reason where there is none."""
    runtime = cupy().cuda.runtime
    try:
        count: int = runtime.getDeviceCount()
    except runtime.CUDARuntimeError as error:
        raise DeviceError(f"the GPU: expected a working NVIDIA driver, got {error}; {_INSTEAD}") from error
    if count == 0:
        raise DeviceError(f"the GPU: expected at least one NVIDIA GPU, got none; {_INSTEAD}")
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


def on(device: int) -> AbstractContextManager[Any]:
    """A context in which the GPU of that number is the current one."""
    gpu = cupy().cuda
    return _NOTHING if gpu.runtime.getDevice() == device else gpu.Device(device)


def l2_bytes(device: int = 0) -> int:
    """The size of one GPU's second-level cache."""
    return int(cupy().cuda.runtime.getDeviceProperties(device)["l2CacheSize"])


@dataclass(frozen=True, eq=False)
class Program:
    """A kernel made ready for one problem: its name for messages, its text, NVRTC's options, its plan."""

    name: str
    text: str
    options: tuple[str, ...]
    plan: Plan
    #: Its work made ready, by device and batch: who enqueues takes one out for that long.
    ready: dict[tuple[int, int], deque[_Ready]] = field(default_factory=lambda: defaultdict(deque), repr=False)


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


class _Ready:
    """A program's work on one device for one batch, ready but for the arrays' addresses; for one caller at a time."""

    def __init__(self, program: Program, batch: int, device: int) -> None:
        plan = program.plan
        self.plan = plan
        self.binary = compiled(program, device)
        rounds = plan.launch_ranges(batch)
        kinds = {images: plan.steps(images) for images in {images for _, images in rounds}}
        #: What a round's steps are given as numbers.
        numbers = [{"first": np.int64(first), "images": np.int32(images)} for first, images in rounds]
        steps = [[_numbered(step, these) for step in kinds[images]] for (_, images), these in zip(rounds, numbers)]
        used = [_named(step) for step in (*plan.setup, *(step for some in steps for step in some))]
        self.addresses = Addresses(dict.fromkeys(name for names in used for name in names))
        self.before = tuple(map(self._made, plan.setup))
        self.rounds = [tuple(map(self._made, some)) for some in steps]
        self.constants = any(isinstance(step, CopyToConstant) for step in plan.setup)

    def _made(self, step: Step) -> Prepared | CopyToConstant:
        if isinstance(step, CopyToConstant):
            return step
        return Prepared(self.binary.function(step.entry, step.shared), step, self.addresses)

    def put(self, stream: Any) -> None:
        """Put it all on the stream, in as many lanes as the plan has."""
        self._put(self.before, stream)
        lanes = [stream] if self.plan.streams == 1 else _fork(stream, min(self.plan.streams, len(self.rounds)))
        for number, steps in enumerate(self.rounds):
            self._put(steps, lanes[number % len(lanes)])
        if lanes[0] is not stream:
            for lane in lanes:
                stream.wait_event(lane.record())

    def _put(self, steps: tuple[Prepared | CopyToConstant, ...], stream: Any) -> None:
        for step in steps:
            if isinstance(step, Prepared):
                step.put(stream)
            else:
                target, source = self.binary.symbol(step.symbol), self.addresses[step.source]
                cupy().cuda.runtime.memcpyAsync(target, source, step.bytes, _DEVICE_TO_DEVICE, stream.ptr)


def _numbered(step: Step, numbers: Mapping[str, Any]) -> Step:
    if isinstance(step, CopyToConstant):
        return step
    return replace(step, args=tuple(numbers.get(a, a) if isinstance(a, str) else a for a in step.args))


def _named(step: Step) -> tuple[str, ...]:
    """The buffers that a step uses."""
    if isinstance(step, CopyToConstant):
        return (step.source,)
    return tuple(a.buffer if isinstance(a, TensorMap) else a for a in step.args if isinstance(a, (str, TensorMap)))


def enqueue(program: Program, batch: int, addresses: Mapping[str, int], device: int, stream: Any) -> None:
    """Put the program's work on the stream of the device, which is the current one, and return.

    ``addresses`` are those of "x", "w" and "y". Raises CuPy's errors, as ``reported`` expects them, where compiling or
    launching fails; what fails later, on the device, is reported by ``wait``.
    """
    idle = program.ready[device, batch]
    try:
        ready = idle.pop()
    except IndexError:
        ready = _Ready(program, batch, device)
    ready.addresses.fill(addresses)
    if program.plan.scratch:
        with stream:
            # CuPy's pool gives memory freed here to later work of this stream only: no need to wait for the kernels.
            scratch = {key: cupy().cuda.alloc(size) for key, size in program.plan.scratch.items()}
        ready.addresses.fill({key: memory.ptr for key, memory in scratch.items()})
    if ready.constants:
        binary = ready.binary
        with binary.lock:
            if binary.last_use is not None:
                stream.wait_event(binary.last_use)
            ready.put(stream)
            binary.last_use = stream.record()
    else:
        ready.put(stream)
    idle.append(ready)


def execute(program: Program, batch: int, arrays: Mapping[str, Any], stream: Any) -> None:
    """Put the program's work on the stream (None: CuPy's current one) of the arrays' device, and return.

    ``arrays`` are the CuPy arrays "x", "w" and "y". Raises DeviceError where compiling or launching fails;
    what fails later, on the device, is reported by ``wait``.
    """
    device = arrays["x"].device
    with device, reported(program.name):
        main = cupy().cuda.get_current_stream() if stream is None else stream
        enqueue(program, batch, {key: array.data.ptr for key, array in arrays.items()}, device.id, main)


def prepared_launch(program: Program, batch: int, arrays: Mapping[str, Any]) -> Callable[[], None]:
    """What ``execute`` does on these arrays and the current stream, to be done again and again: worked out once.

    Launches then cost a few microseconds each. The arrays must outlive the call. Programs whose calls share something,
    memory for constants or scratch, or several streams, are executed as they are.
    """
    plan, device = program.plan, arrays["x"].device
    copies = any(isinstance(step, CopyToConstant) for step in plan.setup)
    if plan.scratch or plan.streams != 1 or copies:
        return lambda: execute(program, batch, arrays, None)
    with device, reported(program.name):
        ready = _Ready(program, batch, device.id)
    ready.addresses.fill({key: array.data.ptr for key, array in arrays.items()})
    return lambda: ready.put(cupy().cuda.get_current_stream())


def _fork(main: Any, count: int) -> list[Any]:
    """That many streams that start once the main one has come this far."""
    device = cupy().cuda.get_device_id()
    lanes = [_lanes.setdefault((device, lane), cupy().cuda.Stream(non_blocking=True)) for lane in range(count)]
    start = main.record()
    for lane in lanes:
        lane.wait_event(start)
    return lanes


class reported:  # noqa: N801 - used as a function
    """A context in which CUDA's and the compiler's errors become a DeviceError that names the kernel."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __enter__(self) -> None:
        """Nothing yet."""

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is None:
            return
        cuda, name = cupy().cuda, self._name
        if isinstance(error, cuda.compiler.CompileException):
            raise DeviceError(f"{name}: expected the source to compile, got {error}") from error
        if isinstance(error, cuda.memory.OutOfMemoryError):
            raise DeviceError(
                f"{name}: expected room for its scratch memory, got {error}; use a smaller batch"
            ) from error
        if isinstance(error, (cuda.driver.CUDADriverError, cuda.runtime.CUDARuntimeError)):
            raise DeviceError(
                f"{name}: expected the kernel to run, got {error}; if later calls fail too, start the program again"
            ) from error


def alignment(*pointers: int) -> int:
    """The bytes that all pointers are multiples of: 16, 8 or 4."""
    joined = 16
    for pointer in pointers:
        joined |= pointer
    return joined & -joined

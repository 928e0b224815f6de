"""CUDA through CuPy: the GPUs' figures, compiling a kernel's source, launching its plan.

Only this module and the two contexts create streams; all others at most pass one on. CuPy is imported at the first use,
never before.
"""

from __future__ import annotations

import ctypes
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from typing import Any

import numpy as np

from ece408_op.errors import DeviceError

from .install_hint import command
from .launch import (
    SCRATCH_ALIGNMENT,
    SHARED_BYTES,
    Chip,
    CopyToConstant,
    Launch,
    LibraryCall,
    Plan,
    Step,
    buffers_of,
    round_up,
    with_numbers,
)
from .prepared_launch import Addresses, PreparedLaunch
from .shared_libraries import load_libraries

#: The run-time compiler, which CuPy looks up by name: a machine with only a driver has it from a wheel.
_NVRTC = ("libnvrtc.so.11.2", "libnvrtc.so.12", "libnvrtc.so.13")

_OPTIONS = ("--std=c++17",)
_DEVICE_TO_DEVICE = 3
_NOTHING = nullcontext()

_INSTEAD = "use m2.py, ece408-lab or --context cpu of ece408-bench and ece408-grade; in programs, New with device='cpu'"


@cache
def driver_version() -> int | None:
    """Return the newest CUDA that NVIDIA's driver supports, 12040 for 12.4; None where there is no driver."""
    version = ctypes.c_int()
    try:
        failed = ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except (OSError, AttributeError):
        return None
    return None if failed else version.value


def init_error() -> int:
    """Return the error code of the driver's cuInit, such as 100 where it finds no GPU; 0 where it succeeds."""
    return int(ctypes.CDLL("libcuda.so.1").cuInit(0))


def how_to_install(version: int) -> str:
    """Return the command that installs CuPy for a driver of that CUDA version, such as 12040, and what it includes."""
    extra = {11: "cu117", 12: "cuda12"}.get(version // 1000, "cuda13")
    brings = "CuPy, NVRTC and CUDA's headers" if extra != "cu117" else "CuPy, and MXNet's GPU build with its libraries"
    return f"{command(extra)} brings {brings} for this driver (CUDA {version // 1000}.{version % 1000 // 10})"


@cache
def cupy() -> Any:
    """Return the module CuPy; raises DeviceError where there is no driver, or CuPy cannot be imported."""
    if driver_version() is None:
        raise DeviceError(f"no NVIDIA driver: {_INSTEAD}")
    load_libraries(_NVRTC)
    try:
        return import_module("cupy")
    except ImportError as error:
        # No package helps where the driver itself fails. With CuPy installed, device_count reports that failure.
        failed = init_error()
        if failed:
            raise DeviceError(
                f"the GPU: expected a working NVIDIA driver, got error {failed} of cuInit; {_INSTEAD}"
            ) from error
        raise DeviceError(f"the GPU: expected CuPy, got {error}; {how_to_install(driver_version() or 0)}") from error


def device_count() -> int:
    """Return how many GPUs CuPy can use; raises DeviceError with the reason where there is none."""
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
    """Return the figures of one GPU; raises DeviceError where there is no GPU of that number."""
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
    """Return a context manager that makes the GPU of that number the current one."""
    gpu = cupy().cuda
    return _NOTHING if gpu.runtime.getDevice() == device else gpu.Device(device)


@dataclass(frozen=True, eq=False)
class Program:
    """A kernel for one problem: its name for messages, its source, NVRTC's options, its plan."""

    name: str
    source: str
    options: tuple[str, ...]
    plan: Plan
    #: Prepared launches, by device and batch; ``enqueue`` takes one out while it uses it.
    idle: dict[tuple[int, int], deque[_PreparedPlan]] = field(default_factory=lambda: defaultdict(deque), repr=False)


@dataclass
class Module:
    """One compiled source on one device: its functions, and the last use of its constant memory."""

    module: Any
    functions: dict[str, Any] = field(default_factory=dict)
    shared: dict[str, int] = field(default_factory=dict)
    symbols: dict[str, int] = field(default_factory=dict)
    #: All calls share the module's constant memory, whatever their streams: each waits for this event.
    last_use: Any = None
    lock: threading.Lock = field(default_factory=threading.Lock)

    def function(self, entry: str, shared: int) -> Any:
        """Return the kernel of that name, with at least ``shared`` bytes of dynamic shared memory."""
        if entry not in self.functions:
            self.functions[entry] = self.module.get_function(entry)
        function = self.functions[entry]
        if shared > self.shared.get(entry, SHARED_BYTES):
            function.max_dynamic_shared_size_bytes = shared
            self.shared[entry] = shared
        return function

    def symbol(self, name: str) -> int:
        """Return the device address of a ``__constant__`` array."""
        # After cupy.clear_memo(), CuPy would load the module again, with an array that the functions here don't read.
        return self.symbols.get(name) or self.symbols.setdefault(name, self.module.get_global(name).ptr)


#: Modules that are compiled, or that a thread compiles. CuPy keeps what it has loaded, and gives out the same again:
#: two of ours for one source would not wait for each other's use of its constant memory.
_modules: dict[tuple[str, tuple[str, ...], int], Future[Module]] = {}
_streams: dict[tuple[int, int], Any] = {}


def compiled(program: Program, device: int) -> Module:
    """Return the program compiled for ``device``, the current one."""
    key = (program.source, program.options, device)
    own: Future[Module] = Future()
    known = _modules.setdefault(key, own)
    if known is own:
        try:
            module = cupy().RawModule(code=program.source, options=_OPTIONS + program.options)
            module.compile()
            own.set_result(Module(module))
        except BaseException as error:
            _modules.pop(key, None)  # the next call tries again
            own.set_exception(error)
    return known.result()


#: The list to which a thread adds its programs instead of launching them: see ``compile_ahead``.
listed: ContextVar[list[Program] | None] = ContextVar("listed", default=None)


def _is_listed(program: Program) -> bool:
    programs = listed.get()
    if programs is not None:
        programs.append(program)
    return programs is not None


def wait(name: str, stream: Any) -> None:
    """Wait for a stream or an event; raise an error there, which is the kernel's, as a DeviceError with its name."""
    with reported(name):
        stream.synchronize()


class _PreparedPlan:
    """A program's launches on one device for one batch, complete except for addresses; for one caller at a time."""

    def __init__(self, program: Program, batch: int, device: int) -> None:
        plan = program.plan
        self.plan = plan
        self.module = compiled(program, device) if program.source else Module(None)
        ranges = plan.launch_ranges(batch)
        steps_by_images = {images: plan.steps(images) for images in {images for _, images in ranges}}
        steps = [
            [
                with_numbers(step, {"first": np.int64(first), "images": np.int32(images)})
                for step in steps_by_images[images]
            ]
            for first, images in ranges
        ]
        used = [buffers_of(step) for step in (*plan.setup, *(step for some in steps for step in some))]
        self.addresses = Addresses(dict.fromkeys(name for names in used for name in names))
        self.setup = tuple(map(self._prepared, plan.setup))
        self.ranges = [tuple(map(self._prepared, some)) for some in steps]
        self.constants = any(isinstance(step, CopyToConstant) for step in plan.setup)

    def _prepared(self, step: Step) -> PreparedLaunch | CopyToConstant | LibraryCall:
        if not isinstance(step, Launch):
            return step
        return PreparedLaunch(self.module.function(step.entry, step.shared), step, self.addresses)

    def enqueue(self, stream: Any) -> None:
        """Put all steps on the stream; ranges of images go to as many streams as the plan has."""
        self._enqueue(self.setup, stream)
        streams = [stream] if self.plan.streams == 1 else _fork(stream, min(self.plan.streams, len(self.ranges)))
        for number, steps in enumerate(self.ranges):
            self._enqueue(steps, streams[number % len(streams)])
        if streams[0] is not stream:
            for each in streams:
                stream.wait_event(each.record())

    def _enqueue(self, steps: tuple[PreparedLaunch | CopyToConstant | LibraryCall, ...], stream: Any) -> None:
        for step in steps:
            if isinstance(step, PreparedLaunch):
                step.enqueue(stream)
            elif isinstance(step, LibraryCall):
                step.call({name: self.addresses[name] for name in step.buffers}, stream)
            else:
                target, source = self.module.symbol(step.symbol), self.addresses[step.source]
                cupy().cuda.runtime.memcpyAsync(target, source, step.bytes, _DEVICE_TO_DEVICE, stream.ptr)


def enqueue(program: Program, batch: int, addresses: Mapping[str, int], device: int, stream: Any) -> None:
    """Put the program's work on a stream of ``device``, the current one, and return.

    ``addresses`` are those of "x", "w" and "y". Raises CuPy's errors, as ``reported`` expects them, where compiling or
    launching fails; ``wait`` reports what fails later, on the device. Raises DeviceError before anything is launched if
    calls share constant memory or streams while a CUDA graph captures the stream.
    """
    idle = program.idle[device, batch]
    try:
        prepared = idle.pop()
    except IndexError:
        prepared = _PreparedPlan(program, batch, device)
    if (prepared.constants or program.plan.streams > 1) and stream.is_capturing():
        idle.append(prepared)
        raise DeviceError(
            f"{program.name}: expected a stream that no CUDA graph captures, got one: calls share constant memory or "
            "streams, which a graph can't wait for"
        )
    prepared.addresses.fill(addresses)
    if program.plan.scratch:
        with stream:
            # CuPy's pool gives memory freed here to later work of this stream only: the kernels need no wait.
            scratch = {key: cupy().cuda.alloc(size) for key, size in program.plan.scratch.items()}
        prepared.addresses.fill({key: memory.ptr for key, memory in scratch.items()})
    if prepared.constants:
        module = prepared.module
        with module.lock:
            if module.last_use is not None:
                stream.wait_event(module.last_use)
            prepared.enqueue(stream)
            module.last_use = stream.record()
    else:
        prepared.enqueue(stream)
    idle.append(prepared)


def execute(program: Program, batch: int, arrays: Mapping[str, Any], stream: Any) -> None:
    """Put the program's work on the stream (None: CuPy's current one) of the arrays' device, and return.

    ``arrays`` are CuPy arrays by their names in the plan, mostly "x", "w" and "y". Raises DeviceError where compiling
    or launching fails; ``wait`` reports what fails later, on the device.
    """
    device = next(iter(arrays.values())).device
    if _is_listed(program):
        return
    with device, reported(program.name):
        main = cupy().cuda.get_current_stream() if stream is None else stream
        enqueue(program, batch, {key: array.data.ptr for key, array in arrays.items()}, device.id, main)


def fill_with_zeros(array: Any, stream: Any) -> None:
    """Put a memset of a CuPy array on the stream (None: CuPy's current one) of its device, and return."""
    with array.device:
        array.data.memset_async(0, array.nbytes, stream or cupy().cuda.get_current_stream())


def prepared_launch(program: Program, batch: int, arrays: Mapping[str, Any], scratch: Any = None) -> Callable[[], None]:
    """Return a function that repeats ``execute`` on these arrays and the current stream, its launches prepared once.

    A launch then costs a few microseconds. The arrays must outlive the function. Programs whose calls share constant
    memory or streams are not prepared, nor those that need scratch memory, unless ``scratch``, a CuPy array of
    ``plan.scratch_bytes`` bytes, is given.
    """
    plan, device = program.plan, arrays["x"].device
    if _is_listed(program):
        return lambda: None
    if not plan.repeatable or (plan.scratch and scratch is None):
        return lambda: execute(program, batch, arrays, None)
    with device, reported(program.name):
        prepared = _PreparedPlan(program, batch, device.id)
    prepared.addresses.fill({key: array.data.ptr for key, array in arrays.items()})
    address = scratch.data.ptr if plan.scratch else 0
    for key, size in plan.scratch.items():
        prepared.addresses.fill({key: address})
        address += round_up(size, SCRATCH_ALIGNMENT)
    return lambda: prepared.enqueue(cupy().cuda.get_current_stream())


def captured(call: Callable[[], None], stream: Any) -> Any:
    """Return a CUDA graph of what ``call`` puts on the current stream; ``launch(stream)`` repeats it.

    The call queues launches, memsets and copies alone. stream: one of the current device, not the default one.
    """
    with stream:
        stream.begin_capture()
        try:
            call()
        finally:
            graph = stream.end_capture()
    return graph


def _fork(main: Any, count: int) -> list[Any]:
    """Return ``count`` streams that wait for the work that is on the main one now."""
    gpu, device = cupy().cuda, cupy().cuda.get_device_id()
    streams = [
        _streams.get((device, n)) or _streams.setdefault((device, n), gpu.Stream(non_blocking=True))
        for n in range(count)
    ]
    start = main.record()
    for stream in streams:
        stream.wait_event(start)
    return streams


class NoRoomError(DeviceError):
    """The GPU has no memory for what a kernel needs besides its arrays."""


class reported:  # noqa: N801 - used as a function
    """A context manager that turns CUDA's and the compiler's errors into a DeviceError that names the kernel."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __enter__(self) -> None:
        """Do nothing."""

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is None:
            return
        cuda, name = cupy().cuda, self._name
        if isinstance(error, cuda.compiler.CompileException):
            raise DeviceError(f"{name}: expected the source to compile, got {error}") from error
        if isinstance(error, cuda.memory.OutOfMemoryError):
            raise NoRoomError(
                f"{name}: expected room for its scratch memory, got {error}; use a smaller batch"
            ) from error
        if isinstance(error, (cuda.driver.CUDADriverError, cuda.runtime.CUDARuntimeError)):
            raise DeviceError(
                f"{name}: expected the kernel to run, got {error}; if later calls fail too, start the program again"
            ) from error


def alignment(*pointers: int) -> int:
    """Return the largest of 16, 8, 4, 2 and 1 that divides all pointers."""
    joined = 16
    for pointer in pointers:
        joined |= pointer
    return joined & -joined

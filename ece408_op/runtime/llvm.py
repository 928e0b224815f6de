"""Machine code at run time: LLVM IR built with llvmlite, compiled for this CPU, called through ctypes.

A kernel builds one module per layer, with the sizes as constants, and gets a function that ctypes calls without the
interpreter's lock. No LLVM pass optimises the IR: it has the vectors, the unrolling and the values in registers that
the kernel wants, and the code generator does the rest.

The environment variable ECE408_SIMD (avx512, avx2 or sse) limits the instructions used.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache, lru_cache, wraps
from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir

from ece408_op.errors import DeviceError

I32, I64, F32, VOID = ir.IntType(32), ir.IntType(64), ir.FloatType(), ir.VoidType()
#: A pointer to float32, with its element's type, which llvmlite of every version takes.
F32_PTR, I64_PTR = F32.as_pointer(), I64.as_pointer()

#: Building IR and compiling share global state in llvmlite: one thread at a time.
LOCK = threading.RLock()

#: Functions that ``compiled_once`` keeps, each with about a megabyte of LLVM: more layers than most networks have.
CAPACITY = 128

_LEVELS = {"sse": 4, "avx2": 8, "avx512": 16}
#: Names to tune for where the CPU's own would bring its instructions back. For "x86-64", and for "generic", LLVM orders
#: them as for older CPUs, and spills sums of ``winograd`` from AVX2's 16 registers.
_LIMITED = {"sse": "x86-64", "avx2": "x86-64-v3"}


def compiled_once(make: Callable[..., Any]) -> Callable[..., Any]:
    """Keep the last CAPACITY results of ``make``, by its arguments; call it under LOCK, so that threads compile once.

    The results are not freed when the interpreter exits: threads of MXNet may still be running them.
    """
    compiled = lru_cache(CAPACITY)(make)

    @lru_cache(CAPACITY)
    @wraps(make)
    def get(*key: Any) -> Any:
        with LOCK:
            return compiled(*key)

    for kept in (compiled, get):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))
    return get


@dataclass(frozen=True)
class Cpu:
    """The CPU that code is compiled for.

    ``lanes`` float32 values fit one of ``registers`` vector registers; ``fma``: whether there are fused multiply-adds;
    ``name`` and ``features`` are LLVM's.
    """

    level: str
    lanes: int
    registers: int
    fma: bool
    name: str
    features: str

    @property
    def by_amd(self) -> bool:
        """Whether AMD makes it: only AMD has SSE4a, also on chips that LLVM has no name for yet."""
        return "+sse4a" in self.features.split(",")


def cpu() -> Cpu:
    """Return this machine's CPU, limited to the instructions that ECE408_SIMD allows.

    Raises DeviceError if ECE408_SIMD is unknown, or beyond the CPU.
    """
    return _cpu(os.environ.get("ECE408_SIMD", ""))


@cache
def _cpu(asked: str) -> Cpu:
    with LOCK:
        _start_llvm()
        name = llvm.get_host_cpu_name()
        features = dict(llvm.get_host_cpu_features())
    has_avx512 = features.get("avx512f") and features.get("avx512vl")
    best = "avx512" if has_avx512 else "avx2" if features.get("avx2") else "sse"
    level = asked or best
    if level not in _LEVELS or _LEVELS[level] > _LEVELS[best]:
        usable = ", ".join(word for word, lanes in _LEVELS.items() if lanes <= _LEVELS[best])
        raise DeviceError(f"ECE408_SIMD: expected one of {usable} on this CPU, got {asked!r}")
    if level != best:
        beyond = {"avx2": ("avx512", "evex", "avx10"), "sse": ("avx", "evex", "fma", "f16c", "vaes", "vpclmul", "xop")}
        for word in features:
            if word.startswith(beyond[level]):
                features[word] = False
        name = _LIMITED[level]
    flat = ",".join(("+" if on else "-") + word for word, on in sorted(features.items()))
    registers = 32 if level == "avx512" else 16
    return Cpu(level, _LEVELS[level], registers, bool(features.get("fma")), name, flat)


def _start_llvm() -> None:
    with suppress(RuntimeError):  # llvmlite 0.45 and later start LLVM themselves and refuse to be asked
        llvm.initialize()
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()


def compile_function(module: ir.Module, name: str, argtypes: Sequence[Any], target: Cpu) -> Any:
    """Return the function ``name`` of a module as a ctypes function without a result; for use under compiled_once.

    The machine code lives as long as the function object, which a thread that calls it refers to.
    """
    machine, parsed = _parse(module, target)
    engine = llvm.create_mcjit_compiler(parsed, machine)
    engine.finalize_object()
    address = engine.get_function_address(name)
    function = ctypes.CFUNCTYPE(None, *argtypes)(address)
    function.engine = engine  # type: ignore[attr-defined]
    return function


def _parse(module: ir.Module, target: Cpu) -> tuple[Any, Any]:
    machine = llvm.Target.from_default_triple().create_target_machine(
        cpu=target.name, features=target.features, opt=3, jit=True
    )
    module.triple = llvm.get_default_triple()
    module.data_layout = str(machine.target_data)
    parsed = llvm.parse_assembly(str(module))
    parsed.verify()
    return machine, parsed


def new_function(
    module: ir.Module, name: str, arguments: dict[str, ir.Type], internal: bool = False
) -> tuple[ir.IRBuilder, list[Any]]:
    """Add a function without a result; return a builder at its start, and its arguments."""
    function = ir.Function(module, ir.FunctionType(VOID, list(arguments.values())), name)
    function.attributes.add("nounwind")
    if internal:
        function.linkage = "internal"
    for value, word in zip(function.args, arguments):
        value.name = word
    return ir.IRBuilder(function.append_basic_block("start")), list(function.args)


def const(value: int) -> ir.Constant:
    """Return a constant 64-bit integer."""
    return ir.Constant(I64, value)


@dataclass
class Loop:
    """A loop under construction: its ``index`` and the ``values`` that each iteration passes to the next."""

    index: Any
    values: list[Any]


@contextmanager
def for_range(b: ir.IRBuilder, count: Any, values: Sequence[Any] = ()) -> Iterator[Loop]:
    """Emit ``for index in range(count)`` around the code that is built inside; count is at least 1.

    ``values`` stay in registers: ``loop.values`` has their values at an iteration's start, and the code inside sets it
    to the values for the next iteration. On exit it has the last ones.
    """
    if count == 1:
        yield Loop(const(0), list(values))
        return
    before = b.block
    body, after = b.append_basic_block("body"), b.append_basic_block("after")
    b.branch(body)
    b.position_at_end(body)
    index = b.phi(I64)
    index.add_incoming(const(0), before)
    phis = [b.phi(value.type) for value in values]
    for phi, value in zip(phis, values):
        phi.add_incoming(value, before)
    loop = Loop(index, list(phis))
    yield loop
    following = b.add(index, const(1), flags=["nuw", "nsw"])
    index.add_incoming(following, b.block)
    for phi, value in zip(phis, loop.values):
        phi.add_incoming(value, b.block)
    stop = const(count) if isinstance(count, int) else count
    b.cbranch(b.icmp_unsigned("<", following, stop), body, after)
    b.position_at_end(after)


def offset(b: ir.IRBuilder, *terms: tuple[Any, int]) -> Any:
    """Return the sum of value * stride: the offset of an element in an array with constant strides."""
    total = const(0)
    for value, stride in terms:
        total = b.add(total, b.mul(value, const(stride)))
    return total


def element(b: ir.IRBuilder, pointer: Any, offset: Any) -> Any:
    """Return the pointer to the element at ``offset`` (an int or a value)."""
    return b.gep(pointer, [const(offset) if isinstance(offset, int) else offset])


def fma(b: ir.IRBuilder, target: Cpu, x: Any, y: Any, total: Any) -> Any:
    """Return x * y + total, fused where the CPU can; scalars or vectors."""
    if not target.fma:
        return b.fadd(b.fmul(x, y), total)
    name = f"llvm.fma.v{x.type.count}f32" if isinstance(x.type, ir.VectorType) else "llvm.fma.f32"
    known = b.module.globals.get(name)
    return b.call(known or ir.Function(b.module, ir.FunctionType(x.type, [x.type] * 3), name), [x, y, total])


def prefetch(b: ir.IRBuilder, pointer: Any, write: bool) -> None:
    """Prefetch the cache line at any pointer: to store to, or to read from L2."""
    byte = ir.IntType(8).as_pointer()
    name = "llvm.prefetch.p0i8"  # later versions of LLVM rename it when they read it
    arguments = [byte, I32, I32, I32]
    known = b.module.globals.get(name) or ir.Function(b.module, ir.FunctionType(VOID, arguments), name)
    numbers = (1, 3, 1) if write else (0, 2, 1)  # write or read; how near, 3 the first level; data
    b.call(known, [b.bitcast(pointer, byte), *(ir.Constant(I32, number) for number in numbers)])


def store_nontemporal(b: ir.IRBuilder, value: Any, pointer: Any, align: int) -> None:
    """Emit a non-temporal store, which does not read the cache line first; ``align`` in bytes."""
    store = b.store(value, pointer, align=align)
    store.set_metadata("nontemporal", b.module.add_metadata([ir.Constant(I32, 1)]))


def nontemporal_fence(b: ir.IRBuilder) -> None:
    """Emit the fence that makes non-temporal stores visible to other threads; an unlock does not."""
    known = b.module.globals.get("llvm.x86.sse.sfence")
    b.call(known or ir.Function(b.module, ir.FunctionType(VOID, []), "llvm.x86.sse.sfence"), [])

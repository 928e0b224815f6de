"""Machine code at run time: LLVM IR built with llvmlite, compiled for this CPU, called through ctypes.

A kernel builds one module per layer, with the sizes as constants, and gets a function that ctypes calls without the
interpreter's lock. No LLVM pass optimises the IR: it has the vectors, the unrolling and the values in registers that
the kernel wants, and the code generator does the rest.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import lru_cache, wraps
from typing import Any, Union

import llvmlite.binding as llvm
from llvmlite import ir

from ece408_op.problem import ConvProblem

from .host_cpu import LOCK, Cpu

I32, I64, F32, F64, VOID = ir.IntType(32), ir.IntType(64), ir.FloatType(), ir.DoubleType(), ir.VoidType()
#: What a pointer points to. Pointers have their element's type, which llvmlite of every version takes.
_POINTED_TO = {"f32": F32, "f64": F64, "i64": I64}

#: Functions that ``compiled_once`` keeps, each with about a megabyte of LLVM: more layers than most networks have.
CAPACITY = 128


def compiled_once(make: Callable[..., Any]) -> Callable[..., Any]:
    """Keep the last CAPACITY results of ``make``, by its arguments; call it under LOCK, so that threads compile once.

    ``make`` gets problems with a batch of one, so that all batches of a layer share a result. The results are not freed
    when the interpreter exits: threads of MXNet may still be running them.
    """
    compiled = lru_cache(CAPACITY)(make)

    @lru_cache(CAPACITY)
    @wraps(make)
    def get(*key: Any) -> Any:
        with LOCK:
            return compiled(*(each.with_batch(1) if isinstance(each, ConvProblem) else each for each in key))

    for kept in (compiled, get):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))
    return get


class Module(ir.Module):
    """Functions for one CPU."""

    def __init__(self, name: str, target: Cpu) -> None:
        super().__init__(name)
        self.target = target

    def declared(self, name: str, result: Any, arguments: Sequence[Any]) -> Any:
        """Return the declaration of one of LLVM's own functions."""
        return self.globals.get(name) or ir.Function(self, ir.FunctionType(result, arguments), name)


def _operator(name: str) -> Callable[[Value, Operand], Value]:
    """Return a method that emits an instruction for integers or floats."""

    def method(self: Value, other: Operand) -> Value:
        word = f"f{name}" if _element(self.ir.type) in (F32, F64) else name
        return Value(self.f, getattr(self.f.b, word)(self.ir, self._operand(other)))

    return method


def _comparison(sign: str) -> Callable[[Value, Operand], Value]:
    """Return a method that emits a comparison of signed integers or floats."""

    def method(self: Value, other: Operand) -> Value:
        b = self.f.b
        compare = b.fcmp_ordered if _element(self.ir.type) in (F32, F64) else b.icmp_signed
        return Value(self.f, compare(sign, self.ir, self._operand(other)))

    return method


class Value:
    """A value in a function under construction, whose operators emit instructions.

    It is a 64-bit integer, a condition, a pointer, a float or a vector. An operand may be a Python number, which
    becomes a constant, in all lanes of a vector. Comparisons of integers are signed, // and % unsigned. ``pointer[n]``
    is the pointer n elements further on.
    """

    def __init__(self, f: Function, value: Any) -> None:
        self.f, self.ir = f, value

    __add__ = __radd__ = _operator("add")
    __sub__ = _operator("sub")
    __mul__ = __rmul__ = _operator("mul")
    __floordiv__ = _operator("udiv")
    __mod__ = _operator("urem")
    __truediv__ = _operator("div")
    shifted_left = _operator("shl")
    __and__ = _operator("and_")
    __or__ = _operator("or_")
    __lt__ = _comparison("<")
    __gt__ = _comparison(">")
    __ge__ = _comparison(">=")
    equals = _comparison("==")

    def __rsub__(self, other: Operand) -> Value:
        return self.like(other) - self

    def __invert__(self) -> Value:
        return Value(self.f, self.f.b.not_(self.ir))

    def below(self, other: Operand) -> Value:
        """Return the condition that it is less, both taken as unsigned."""
        return Value(self.f, self.f.b.icmp_unsigned("<", self.ir, self._operand(other)))

    def select(self, one: Operand, other: Operand) -> Value:
        """Return ``one`` where this condition holds, else ``other``."""
        kind = next((each for each in (one, other) if isinstance(each, Value)), self.f.const(0))
        return Value(self.f, self.f.b.select(self.ir, kind._operand(one), kind._operand(other)))

    def min(self, limit: Operand) -> Value:
        """Return the smaller of both."""
        return (self < limit).select(self, limit)

    def like(self, number: Operand) -> Value:
        """Return a number as a constant of this value's type."""
        return Value(self.f, self._operand(number))

    def fma(self, factor: Value, total: Value) -> Value:
        """Return self * factor + total, fused where the CPU can; scalars or vectors."""
        if not self.f.module.target.fma:
            return self * factor + total
        kind = self.ir.type
        name = f"llvm.fma.v{kind.count}f32" if isinstance(kind, ir.VectorType) else "llvm.fma.f32"
        declared = self.f.module.declared(name, kind, [kind] * 3)
        return Value(self.f, self.f.b.call(declared, [self.ir, factor.ir, total.ir]))

    def broadcast(self, lanes: int) -> Value:
        """Return a vector with this number in all lanes."""
        undefined = ir.Constant(ir.VectorType(self.ir.type, lanes), ir.Undefined)
        one = Value(self.f, self.f.b.insert_element(undefined, self.ir, ir.Constant(I32, 0)))
        return one.shuffle(Value(self.f, undefined), [0] * lanes)

    def shuffle(self, other: Value, lanes_of_both: Sequence[int]) -> Value:
        """Return a vector of some lanes of both, those of ``other`` counted on from those of this one."""
        chosen = ir.Constant(ir.VectorType(I32, len(lanes_of_both)), list(lanes_of_both))
        return Value(self.f, self.f.b.shuffle_vector(self.ir, other.ir, chosen))

    def bits(self) -> Value:
        """Return the bits of a float32 or of a vector of them as 32-bit integers; the other way round for integers."""
        kind = self.ir.type
        other = F32 if _element(kind) == I32 else I32
        return Value(self.f, self.f.b.bitcast(self.ir, ir.VectorType(other, kind.count) if _lanes(kind) else other))

    def __getitem__(self, n: Operand) -> Value:
        return Value(self.f, self.f.b.gep(self.ir, [n.ir if isinstance(n, Value) else ir.Constant(I64, n)]))

    def to(self, pointed_to: str) -> Value:
        """Return the pointer to floats as one to "f64" or "i64"."""
        return Value(self.f, self.f.b.bitcast(self.ir, _POINTED_TO[pointed_to].as_pointer()))

    def pointer_at(self, offset: int) -> Value:
        """Return the pointer to the 64-bit integer ``offset`` bytes from this address, a 64-bit integer."""
        return Value(self.f, self.f.b.inttoptr((self + offset).ir, I64.as_pointer()))

    def load(self, lanes: int = 1, aligned: bool = False) -> Value:
        """Load a number, or a vector, which begins at an element, or if ``aligned`` at a multiple of its size."""
        kind = self.ir.type.pointee
        whole = ir.VectorType(kind, lanes) if lanes > 1 else kind
        size = _BYTES[kind] * (lanes if aligned else 1)
        return Value(self.f, self.f.b.load(self.f.b.bitcast(self.ir, whole.as_pointer()), align=size))

    def store(self, value: Value, aligned: bool = False) -> Any:
        """Store a number or a vector; ``aligned`` as in ``load``. Return LLVM's instruction."""
        kind = value.ir.type
        size = _BYTES[_element(kind)] * (_lanes(kind) if aligned else 1)
        return self.f.b.store(value.ir, self.f.b.bitcast(self.ir, kind.as_pointer()), align=size)

    def store_nontemporal(self, value: Value) -> None:
        """Store an aligned vector without reading the cache line first: see ``Function.nontemporal_fence``."""
        metadata = self.f.module.add_metadata([ir.Constant(I32, 1)])
        self.store(value, aligned=True).set_metadata("nontemporal", metadata)

    def prefetch(self, write: bool = False) -> None:
        """Prefetch the cache line at this pointer: to store to, or to read from L2."""
        byte, name = ir.IntType(8).as_pointer(), "llvm.prefetch.p0i8"  # later versions of LLVM rename it
        declared = self.f.module.declared(name, VOID, [byte, I32, I32, I32])
        numbers = (1, 3, 1) if write else (0, 2, 1)  # write or read; how near, 3 the first level; data
        self.f.b.call(declared, [self.f.b.bitcast(self.ir, byte), *(ir.Constant(I32, n) for n in numbers)])

    def _operand(self, other: Operand) -> Any:
        if isinstance(other, Value):
            return other.ir
        kind = self.ir.type
        return ir.Constant(kind, [other] * kind.count if _lanes(kind) else other)


Operand = Union[Value, int, float]

#: Bytes of an element in memory.
_BYTES = {F32: 4, I32: 4, F64: 8, I64: 8}


def _lanes(kind: Any) -> int:
    return kind.count if isinstance(kind, ir.VectorType) else 0


def _element(kind: Any) -> Any:
    return kind.element if isinstance(kind, ir.VectorType) else kind


@dataclass
class Loop:
    """A loop under construction: its ``index`` and the ``values`` that each iteration passes to the next."""

    index: Value
    values: list[Value]


@dataclass
class Repetition:
    """A loop under construction: the ``values`` that an iteration passes to the next one, if ``again`` holds."""

    values: list[Value]
    again: Value


class Function:
    """A function without a result, under construction inside ``with Function(...) as f``.

    pointers: the names of its first arguments, such as "x y sums:f64 counter:i64"; to float32 without a colon.
    integers: the names of those that follow, 64-bit integers. exported: it is called from outside of the module.
    """

    def __init__(self, module: Module, name: str, pointers: str, integers: str = "", exported: bool = False) -> None:
        arguments = {
            word: _POINTED_TO[kind or "f32"].as_pointer()
            for word, _, kind in (each.partition(":") for each in pointers.split())
        }
        arguments |= dict.fromkeys(integers.split(), I64)
        self.module = module
        self.ir = ir.Function(module, ir.FunctionType(VOID, list(arguments.values())), name)
        self.ir.attributes.add("nounwind")
        if not exported:
            self.ir.linkage = "internal"
        for value, word in zip(self.ir.args, arguments):
            value.name = word
        self.b = ir.IRBuilder(self.ir.append_basic_block("start"))
        self.arguments = [Value(self, value) for value in self.ir.args]

    def __enter__(self) -> Function:
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if kind is None:
            self.b.ret_void()

    def __call__(self, first: Value, *others: Operand) -> None:
        """Emit a call in the function that the first argument belongs to."""
        caller = first.f
        values = (each if isinstance(each, Value) else caller.const(int(each)) for each in others)
        caller.b.call(self.ir, [first.ir, *(value.ir for value in values)])

    def const(self, value: int) -> Value:
        """Return a constant 64-bit integer."""
        return Value(self, ir.Constant(I64, value))

    def scalar(self, number: float) -> Value:
        """Return a constant float32."""
        return Value(self, ir.Constant(F32, number))

    def vector(self, number: float) -> Value:
        """Return a vector of the CPU's lanes with that constant."""
        lanes = self.module.target.lanes
        return Value(self, ir.Constant(ir.VectorType(F32, lanes), [number] * lanes))

    def when(self, condition: Value) -> AbstractContextManager[Any]:
        """Emit an ``if`` around the code that is built inside."""
        manager: AbstractContextManager[Any] = self.b.if_then(condition.ir)
        return manager

    @contextmanager
    def range(self, count: Operand) -> Iterator[Value]:
        """Emit ``for index in range(count)`` around the code that is built inside; count is at least 1."""
        with self.loop(count) as loop:
            yield loop.index

    @contextmanager
    def loop(self, count: Operand, values: Sequence[Value] = ()) -> Iterator[Loop]:
        """Emit the loop of ``range`` with ``values`` that stay in registers.

        ``loop.values`` has their values at an iteration's start, and the code inside sets it to the values for the next
        iteration. On exit it has the last ones.
        """
        if isinstance(count, int) and count == 1:
            yield Loop(self.const(0), list(values))
            return
        with self.repeat([self.const(0), *values]) as repetition:
            index, *carried = repetition.values
            loop = Loop(index, carried)
            yield loop
            following = Value(self, self.b.add(index.ir, ir.Constant(I64, 1), flags=["nuw", "nsw"]))
            repetition.values, repetition.again = [following, *loop.values], following.below(count)

    @contextmanager
    def repeat(self, values: Sequence[Value]) -> Iterator[Repetition]:
        """Emit a loop around the code that is built inside, which sets the next iteration's values and ``again``."""
        b, before = self.b, self.b.block
        body, after = b.append_basic_block("body"), b.append_basic_block("after")
        b.branch(body)
        b.position_at_end(body)
        phis = [b.phi(value.ir.type) for value in values]
        for phi, start in zip(phis, values):
            phi.add_incoming(start.ir, before)
        repetition = Repetition([Value(self, phi) for phi in phis], Value(self, ir.Constant(ir.IntType(1), 0)))
        yield repetition
        for phi, value in zip(phis, repetition.values):
            phi.add_incoming(value.ir, b.block)
        b.cbranch(repetition.again.ir, body, after)
        b.position_at_end(after)

    def nontemporal_fence(self) -> None:
        """Emit the fence that makes non-temporal stores visible to other threads; an unlock does not."""
        self.b.call(self.module.declared("llvm.x86.sse.sfence", VOID, []), [])

    def compiled(self) -> Any:
        """Return it as a ctypes function; for use under compiled_once.

        The machine code lives as long as the function object, which a thread that calls it refers to.
        """
        target = self.module.target
        machine = llvm.Target.from_default_triple().create_target_machine(
            cpu=target.name, features=target.features, opt=3, jit=True
        )
        self.module.triple = llvm.get_default_triple()
        self.module.data_layout = str(machine.target_data)
        parsed = llvm.parse_assembly(str(self.module))
        parsed.verify()
        engine = llvm.create_mcjit_compiler(parsed, machine)
        engine.finalize_object()
        kinds = [ctypes.c_int64 if value.type == I64 else ctypes.c_void_p for value in self.ir.args]
        function = ctypes.CFUNCTYPE(None, *kinds)(engine.get_function_address(self.ir.name))
        function.engine = engine  # type: ignore[attr-defined]
        return function

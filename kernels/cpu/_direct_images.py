"""How the threads of ``direct`` share images, and what the compiled function of every plan looks like."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Callable

from llvmlite import ir

from ece408_op.runtime.llvm import F32_PTR, I64, I64_PTR, const, new_function


@dataclass
class Conv:
    """The function ``conv``(x, w, y, scratch, counter, images, most, parts) being built: arguments, and where."""

    b: ir.IRBuilder
    x: Any
    w: Any
    y: Any
    scratch: Any
    counter: Any
    images: Any
    most: Any
    parts: Any


@dataclass
class Round:
    """One image at work: its number, the next one's, whether there is one, and what the round before handed on."""

    image: Any
    following: Any
    goes_on: Any
    values: Sequence[Any]


def new_conv(module: ir.Module) -> Conv:
    """An empty ``conv``."""
    pointers, numbers = ("x", "w", "y", "scratch"), ("images", "most", "parts")
    arguments = {**dict.fromkeys(pointers, F32_PTR), "counter": I64_PTR, **dict.fromkeys(numbers, I64)}
    b, values = new_function(module, "conv", arguments)
    return Conv(b, *values)


@contextmanager
def taken_images(conv: Conv, before: Callable[[Any], Sequence[Any]]) -> Iterator[Round]:
    """What is built inside is done for each image that a thread takes; afterwards the builder is behind all.

    Threads take images from a counter that they share: a ``parts``-th of those that are left, but at most ``most``
    and at least one (guided self-scheduling). ``before`` builds what comes ahead of the first image, whose number it
    gets, and returns the values that rounds hand on: inside, ``values`` holds them, and what it is set to goes on.
    """
    b = conv.b
    begin, each, take, ready, finish = (
        b.append_basic_block(word) for word in ("begin", "each", "take", "ready", "finish")
    )

    def take_some() -> tuple[Any, Any]:
        left = b.sub(conv.images, b.load_atomic(conv.counter, "monotonic", align=8))
        some = at_most(b, b.sdiv(left, conv.parts), conv.most)
        some = b.select(b.icmp_signed("<", some, const(1)), const(1), some)
        taken = b.atomic_rmw("add", conv.counter, some, "monotonic")
        return taken, at_most(b, b.add(taken, some), conv.images)

    first, first_end = take_some()
    b.cbranch(b.icmp_signed("<", first, conv.images), begin, finish)

    b.position_at_end(begin)
    start = [first, first_end, *before(first)]
    started = b.block
    b.branch(each)

    b.position_at_end(each)
    phis = [b.phi(value.type) for value in start]
    for phi, value in zip(phis, start):
        phi.add_incoming(value, started)
    image, end = phis[:2]
    following = b.add(image, const(1))
    b.cbranch(b.icmp_signed("<", following, end), ready, take)

    b.position_at_end(take)
    taken, taken_end = take_some()
    b.branch(ready)

    b.position_at_end(ready)
    next_image, next_end = b.phi(I64), b.phi(I64)
    for phi, values in ((next_image, (following, taken)), (next_end, (end, taken_end))):
        for value, block in zip(values, (each, take)):
            phi.add_incoming(value, block)
    goes_on = b.icmp_signed("<", next_image, conv.images)
    loop = Round(image, next_image, goes_on, phis[2:])
    yield loop
    for phi, value in zip(phis, (next_image, next_end, *loop.values)):
        phi.add_incoming(value, b.block)
    b.cbranch(goes_on, each, finish)
    b.position_at_end(finish)


def at_most(b: ir.IRBuilder, value: Any, limit: Any) -> Any:
    """The smaller of a value and a limit, which may be known now."""
    limit = const(limit) if isinstance(limit, int) else limit
    return b.select(b.icmp_signed("<", value, limit), value, limit)

"""Custom operators that MXNet calls through the package's callbacks get what MXNet's own callbacks give."""

import gc
import weakref
from collections.abc import Sequence
from unittest import mock

import numpy as np
import pytest
from process import wait_until

mx = pytest.importorskip("mxnet")

from ece408_op.plugin import fast_custom_op  # noqa: E402


def executed(base, grad_req, first=lambda operator: None):
    """The calls of an operator of that base class, and the arrays that it has filled in two steps of an executor.

    Its forward begins with ``first``.
    """
    calls = []

    class Records(base):
        def forward(self, **given):
            first(self)
            calls.append(("forward", described(given)))
            for number, out in enumerate(given["out_data"]):
                self.assign(out, given["req"][number], given["in_data"][number] + number + given["aux"][0])
            state = given["aux"][0]
            state += 1

        def backward(self, **given):
            calls.append(("backward", described(given)))
            for number, gradient in enumerate(given["in_grad"]):
                self.assign(gradient, given["req"][number], given["in_data"][number] * given["out_grad"][number])

    class Prop(mx.operator.CustomOpProp):
        def list_arguments(self):
            return ["a", "b", "c"]

        def list_outputs(self):
            return ["x", "y", "z"]

        def list_auxiliary_states(self):
            return ["state"]

        def infer_shape(self, shapes):
            return shapes, shapes, [(1,)]

        def create_operator(self, ctx, shapes, dtypes):
            return Records()

    name = f"records_{base.__module__}"
    mx.operator.register(name)(Prop)
    inputs = [mx.sym.Variable(each) for each in ("a", "b", "c", "state")]
    symbol = mx.sym.Custom(*inputs, op_type=name)
    arrays = [mx.nd.array(np.arange(6).reshape(2, 3) + number) for number in range(3)]
    gradients = [mx.nd.ones((2, 3)) for _ in range(3)]
    state = mx.nd.zeros((1,))
    executor = symbol.bind(mx.cpu(), arrays, gradients, grad_req, [state])
    for is_train in (False, True, True):
        executor.forward(is_train=is_train)
        if is_train:
            executor.backward([mx.nd.ones((2, 3)) * 2] * 3)
        mx.nd.waitall()  # the next forward changes is_train for pending calls, too
    filled = [array.asnumpy() for array in (*executor.outputs, *gradients, state)]
    return calls, filled


def described(given):
    """The arrays of a call as numbers, and what else it was given."""
    return {
        name: [each.asnumpy().tolist() if name == "in_data" else each.shape for each in value]
        if isinstance(value[0], mx.nd.NDArray)
        else value
        for name, value in given.items()
        if isinstance(value, Sequence)
    } | {"is_train": given.get("is_train")}


@pytest.mark.parametrize("grad_req", ["write", "add", ["null", "write", "add"]], ids=str)
def test_calls_are_those_of_mxnet(grad_req):
    own, theirs = executed(fast_custom_op.FastCustomOp, grad_req), executed(mx.operator.CustomOp, grad_req)
    assert own[0] == theirs[0]
    assert [name for name, _ in own[0]] == ["forward", "forward", "backward", "forward", "backward"]
    for a, b in zip(own[1], theirs[1]):
        np.testing.assert_array_equal(a, b)


def test_every_array_is_freed_once_those_of_the_last_call_when_asked(monkeypatch):
    made, freed, left, operators = [], [], [], []
    init, delete = fast_custom_op.CallArrays.__init__, fast_custom_op.CallArrays.__del__

    def marked(arrays, handles):
        init(arrays, handles)
        arrays.made = made
        made.extend(handles)

    def counting(arrays):
        if getattr(arrays, "made", None) is made:  # operators of other tests may have some left
            freed.extend(arrays.handles)
        delete(arrays)

    def first(operator):
        before = len(made) - len(freed)
        operator.release()
        left.append((before, len(made) - len(freed)))
        operators.append(operator)

    with (
        mock.patch.object(fast_custom_op.CallArrays, "__init__", marked),
        mock.patch.object(fast_custom_op.CallArrays, "__del__", counting),
    ):
        executed(fast_custom_op.FastCustomOp, "write", first)
        operators[-1].release()
    assert len(made) == 3 * 7 + 2 * 13
    assert sorted(made) == sorted(freed)
    assert left == [(7, 7), (14, 7), (20, 7)], "the last call was a forward, and then a backward"


def test_an_operator_that_mxnet_deletes_keeps_nothing_without_a_garbage_collection():
    class Memory:
        pass

    kept = []

    def first(operator):
        operator.memory = Memory()
        kept.append(weakref.ref(operator.memory))

    gc.disable()
    try:
        executed(fast_custom_op.FastCustomOp, "write", first)
        mx.nd.waitall()
        assert len(kept) == 3
        wait_until(lambda: not any(one() for one in kept))  # a thread of MXNet's may delete it
    finally:
        gc.enable()

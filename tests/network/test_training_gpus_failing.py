"""Training steps on several GPUs when one of them fails: nobody waits for it, and nothing changes."""

from pathlib import Path

import numpy as np
import pytest
from network_case import mx
from network_fake import OutOfMemoryError
from process import printed
from training_case import assert_close, bound, images, normalized, odd, on_gpus, results, small, step

from ece408_op.errors import DeviceError
from ece408_op.network import _training, trainer
from ece408_op.network._training_gpu import GpuOperators
from ece408_op.plugin import host_context
from ece408_op.runtime import cuda

pytestmark = pytest.mark.usefixtures("two_gpus")


def failing(monkeypatch, error, most):
    """Have the second of two GPUs fail at its second BatchNorm, ``most`` times at most; returns its failures."""
    failures, calls, original = [], [], GpuOperators.batch_norm

    def fails(self, *given):
        if self.rank and self.rank.number == 1:
            calls.append(given)
            if len(calls) % 2 == 0 and len(failures) < most:
                failures.append(given)
                raise error
        return original(self, *given)

    monkeypatch.setattr(GpuOperators, "batch_norm", fails)
    return failures


@pytest.mark.parametrize("when", [0, 1], ids=["first step", "capture"])
def test_a_gpu_without_room_within_a_pass_has_all_compute_again(when, monkeypatch):
    symbol = normalized()
    args, aux = odd(symbol, 5)
    ours, one = executors = [bound(on_gpus(symbol, args, aux, numbers), args, aux) for numbers in ([0, 1], [0])]
    no_room = cuda.cupy().cuda.memory.OutOfMemoryError
    for number in range(4):
        with monkeypatch.context() as patch:
            failures = failing(patch, no_room() if no_room is OutOfMemoryError else no_room(1, 2), number == when)
            for executor in executors:
                step(executor)
            assert_close(results(ours), results(one))
            assert len(failures) == (number == when)


def test_a_pass_that_one_gpu_cannot_capture_is_repeated_by_none(monkeypatch):
    symbol, tried, original = normalized(), [], cuda.captured

    def captured(*given):
        tried.append(given)
        if len(tried) == 2:
            raise DeviceError("cannot be captured")
        return original(*given)

    monkeypatch.setattr(cuda, "captured", captured)
    args, aux = odd(symbol, 5)
    ours, theirs = executors = [bound(one, args, aux) for one in (on_gpus(symbol, args, aux, [0, 1]), symbol)]
    for _ in range(4):
        for executor in executors:
            step(executor)
        assert_close(results(ours, False), results(theirs, False))
    assert len(tried) == 2


def test_a_gpu_that_fails_within_a_pass_ends_the_step(monkeypatch):
    """Nobody waits for it, nothing changes, and the next step is right."""
    symbol = normalized()
    args, aux = odd(symbol, 5)
    ours, theirs = executors = [bound(one, args, aux) for one in (on_gpus(symbol, args, aux, [0, 1]), symbol)]
    for _ in range(2):
        before = [array.asnumpy().tobytes() for array in ours.aux_dict.values()]
        with monkeypatch.context() as patch:
            failures = failing(patch, DeviceError("out of order"), 99)
            with pytest.raises(DeviceError, match="GPU 1: out of order"):
                ours.forward(is_train=True)
                mx.nd.waitall()
            assert failures
        assert [array.asnumpy().tobytes() for array in ours.aux_dict.values()] == before
        for executor in executors:
            step(executor)
        assert_close(results(ours, False), results(theirs, False))


@pytest.mark.parametrize("fails", ["backward", "copy out"])
def test_a_gpu_that_fails_in_or_after_the_backward_pass_is_named_and_nothing_changes(fails, monkeypatch):
    symbol = small()
    args, aux = images(symbol)
    executor = bound(on_gpus(symbol, args, aux, [0, 1]), args, aux)
    step(executor)
    executor.forward(is_train=True)
    mx.nd.waitall()

    def contents():
        return [array.asnumpy().tobytes() for one in (executor.arg_dict, executor.aux_dict) for array in one.values()]

    before, original, second = contents(), trainer.step, host_context.gpu(1)

    def fails_there(gpu, inputs, outputs, *given, **options):
        if gpu is second and bool(outputs) == (fails == "copy out"):
            raise DeviceError("out of order")
        return original(gpu, inputs, outputs, *given, **options)

    with monkeypatch.context() as patch:
        for module in (trainer, _training):
            patch.setattr(module, "step", fails_there)
        executor.backward()
        with pytest.raises(DeviceError, match="GPU 1: out of order"):
            mx.nd.waitall()
    assert contents() == before
    step(executor)
    assert np.isfinite(executor.grad_dict["first_weight"].asnumpy()).all()


@pytest.mark.gpu
@pytest.mark.parametrize("way", ["auto"], indirect=True)
@pytest.mark.parametrize("step", [0, 1, 2])
def test_a_kernel_that_fails_on_one_gpu_ends_the_step(step):
    """Also where the other one waits for it in a CUDA graph. In a process of its own, which loses the GPU."""
    found = printed("-c", _FAILING, "batch_norm", str(step), first=[Path(__file__).parent])
    # NCCL's call may be the first that fails, for both.
    assert found in [f"in a Custom operator: GPU {number}\n" for number in range(2)]


@pytest.mark.gpu
@pytest.mark.parametrize("way", ["auto"], indirect=True)
def test_a_kernel_that_fails_in_a_queued_backward_pass_ends_what_waits_for_it():
    """The next call of another network on the other GPU computes, or raises what NCCL's kernels met there."""
    found = printed("-c", _FAILING, "batch_norm_gradients", "3", first=[Path(__file__).parent])
    assert found in ["[2.0, 2.0]\n", *(f"in a Custom operator: GPU {number}\n" for number in range(2))]


_FAILING = """
import os, sys
import cupy, ece408_op
from network_case import mx
from training_case import bound, normalized, odd, on_gpus
from ece408_op.network._training_gpu import GpuOperators
symbol = normalized()
args, aux = odd(symbol, 6)
executor = bound(on_gpus(symbol, args, aux, [0, 1]), args, aux)
# It fails after a while, when the forward pass's outputs are copied out.
text = '''
extern "C" __global__ void fail(int* on) {
    for (int left = *on * 100000; left; left--) __nanosleep(2000);
    if (*on) asm("trap;");
}
'''
trap = cupy.RawKernel(text, "fail")
with cupy.cuda.Device(1):
    on, one = cupy.zeros(1, cupy.int32), cupy.ones(1, cupy.int32)
    cupy.cuda.Device(1).synchronize()
other = ece408_op.gpu_network(mx.sym.Variable("data") * 2, {})[0].bind(mx.cpu(), {"data": mx.nd.ones(2)})
other.forward()[0].wait_to_read()
original = getattr(GpuOperators, sys.argv[1])
def failing(self, *given):
    found = original(self, *given)
    if self.rank.number == 1:
        trap((1,), (1,), (on,))
    return found
setattr(GpuOperators, sys.argv[1], failing)
try:
    for step in range(4):
        if step == int(sys.argv[2]):
            with cupy.cuda.Device(1):
                on.set(one.get())
        executor.forward(is_train=True)
        if step == 3:
            executor.outputs[0].wait_to_read()
            print(other.forward()[0].asnumpy().tolist(), flush=True)
            break
        executor.backward()
        mx.nd.waitall()
except Exception as error:
    print(":".join(str(error).split(":")[:2]), flush=True)
    print(error, file=sys.stderr)
os._exit(0)
"""

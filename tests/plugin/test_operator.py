"""The operator on the CPU: right numbers, shapes, types and requests."""

import dataclasses
import resource
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
from cuda_layers import chip_of
from operator_case import OperatorCases, assert_right, values
from process import printed

import ece408_op
from ece408_op.core import dispatch, tuning
from ece408_op.problem import ConvProblem
from ece408_op.runtime import cuda

mx = pytest.importorskip("mxnet")
from ece408_op.plugin import bridge  # noqa: E402 (these need MXNet)
from ece408_op.plugin.operator import NewProp  # noqa: E402


class TestCpu(OperatorCases):
    words, computes, impl = "mx.cpu()", "cpu", "direct"
    quick, many = "im2col", 1001

    def context(self, number=0):
        return self.mx.cpu()


PROBLEM = ConvProblem(17, 2, 11, 19, 5, 3)
#: The kernels of a forward pass; others compute gradients only.
IMPLS = [name for name in dispatch.names("cpu") if not dispatch.find(name).not_supported_reasons(PROBLEM)]


@pytest.mark.parametrize(
    "options", [*({"impl": name} for name in IMPLS), {"precision": "tf32"}, {"precision": "fp16"}], ids=str
)
def test_every_implementation_by_its_name_and_less_precision(options):
    x, w = values((17, 2, 11, 19), 5, 3)
    ece408_op.clear_op_times()
    y = ece408_op.New(mx.nd.array(x), mx.nd.array(w), kernel=(3, 3), num_filter=5, name="layer1", **options)
    assert_right(y.asnumpy(), x, w)
    (call,) = ece408_op.op_times()
    assert (call.layer, call.problem.y_shape) == ("layer1", (17, 5, 9, 17))
    assert call.implementation == options.get("impl", call.implementation)


def test_the_record_is_bounded():
    from ece408_op.plugin import op_times

    ece408_op.clear_op_times()
    x, w = values((1, 1, 3, 3), 1, 3)
    ece408_op.New(mx.nd.array(x), mx.nd.array(w), kernel=(3, 3), num_filter=1).wait_to_read()
    (call,) = ece408_op.op_times()
    for _ in range(op_times.CAPACITY + 5):
        op_times.record(call)
    assert len(ece408_op.op_times()) == op_times.CAPACITY
    several = [dataclasses.replace(call, seconds=number) for number in range(7)]
    op_times.record(op_times.Later(lambda: several))
    assert ece408_op.op_times() == [call] * (op_times.CAPACITY - 7) + several
    for _ in range(op_times.CAPACITY):
        op_times.record(op_times.Later(lambda: several))
    assert [one.seconds for one in ece408_op.op_times()[-15:]] == [6, *range(7), *range(7)]
    assert len(ece408_op.op_times()) == op_times.CAPACITY
    ece408_op.clear_op_times()
    assert ece408_op.op_times() == []


def test_a_tile_that_is_chosen_after_a_call_on_a_gpu_is_taken(monkeypatch):
    """The GPU is a stand-in: its kernels do not run."""
    stream = SimpleNamespace(synchronize=lambda: None)
    event = SimpleNamespace(record=lambda stream: None)
    gpu = SimpleNamespace(Stream=lambda **_: stream, Event=lambda: event, get_elapsed_time=lambda *_: 1.0)
    chip = dataclasses.replace(chip_of(90), name="tuned here")  # another test may use tiles of sm_90
    kernel, programs = dispatch.find("fp16x3_warpgroup"), []
    monkeypatch.setattr(cuda, "cupy", lambda: SimpleNamespace(cuda=gpu))
    monkeypatch.setattr(cuda, "chip", lambda number=0: chip)
    monkeypatch.setattr(cuda, "on", lambda number: nullcontext())
    monkeypatch.setattr(cuda, "enqueue", lambda program, *_: programs.append(program))
    monkeypatch.setattr(bridge, "address_of", lambda array: array.address)
    problem = ConvProblem(8, 6, 30, 30, 16, 5)
    data, weight, out = (SimpleNamespace(shape=s, address=n << 30) for n, s in enumerate(problem.shapes, 1))
    prop = NewProp(kernel="(5, 5)", num_filter="16", impl=kernel.name)
    operator = prop.create_operator(SimpleNamespace(device_type="gpu", device_id=0), problem.shapes[:2], None)
    for tile in kernel.tiles(problem, chip, 16)[:3]:
        tuning.use_tile(kernel.name, problem, chip, tile)
        operator.compute(data, weight, out)
    assert len({id(program) for program in programs}) == 3


def test_a_shape_that_is_known_only_behind_the_operator():
    """Its data is of unknown rank at first; MXNet takes the rank 0 that an empty answer would give for known."""
    data, label = mx.sym.var("data"), mx.sym.var("label")
    layer = ece408_op.New(data, mx.sym.var("w"), kernel=(3, 3), num_filter=8)
    arguments, outputs, _ = mx.sym.Group([layer, data + label]).infer_shape(label=(4, 6, 12, 11))
    assert arguments == [(4, 6, 12, 11), (8, 6, 3, 3), (4, 6, 12, 11)]
    assert outputs == [(4, 8, 10, 9), (4, 6, 12, 11)]


def test_layers_behind_it_while_no_shape_is_known():
    layer = ece408_op.New(mx.sym.var("data"), mx.sym.var("w"), kernel=(3, 3), num_filter=8)
    symbol = mx.sym.BatchNorm(layer, name="norm")
    assert symbol.infer_shape_partial()[1:] == ([(0, 8, 0, 0)], [(8,), (8,)])
    parameters = {"w": mx.nd.ones((8, 6, 3, 3)), "norm_gamma": mx.nd.ones(8), "norm_beta": mx.nd.ones(8)}
    states = {"norm_moving_mean": mx.nd.ones(8), "norm_moving_var": mx.nd.ones(8)}
    assert symbol.optimize_for("MKLDNN", parameters, states).list_outputs() == ["norm_output"]


@pytest.mark.parametrize(("training", "dtype"), [(True, np.float32), (False, np.float16)])
def test_a_module_infers_and_takes_parameters_of_either_type(training, dtype):
    x, w = values((4, 1, 9, 9), 3, 3)
    w = w.astype(dtype)
    layer = ece408_op.New(mx.sym.Variable("data"), kernel=(3, 3), num_filter=3, name="new0")
    module = mx.mod.Module(layer, label_names=None)
    module.bind([("data", x.shape)], for_training=training)
    module.set_params({"new0_weight": mx.nd.array(w, dtype=dtype)}, {})
    module.forward(mx.io.DataBatch([mx.nd.array(x)]), is_train=False)
    assert_right(module.get_outputs()[0].asnumpy(), x, w.astype(np.float32))


def test_arrays_and_symbols_of_mx_np():
    x, w = values((3, 2, 9, 8), 5, 3)
    with mx.util.np_shape(True), mx.util.np_array(True):
        data, weight = mx.np.array(x), mx.np.array(w)
        y = ece408_op.New(data, weight, kernel=(3, 3), num_filter=5)
        assert type(y) is mx.np.ndarray
        assert_right(y.asnumpy(), x, w)
        out = mx.np.zeros(y.shape)
        assert ece408_op.New(data, weight, kernel=(3, 3), num_filter=5, out=out) is out
        assert_right(out.asnumpy(), x, w)
        names = [mx.sym.var(name, dtype="float32").as_np_ndarray() for name in ("data", "w")]
        block = mx.gluon.SymbolBlock(ece408_op.New(*names, kernel=(3, 3), num_filter=5), names)
        y = block(data, weight)
        assert type(y) is mx.np.ndarray
        assert_right(y.asnumpy(), x, w)


@pytest.mark.parametrize(
    "mode", [None, {}, {"static_alloc": True, "static_shape": True}], ids=["plain", "hybrid", "static"]
)
def test_an_empty_batch_in_a_gluon_network(mode):
    x, w = values((3, 2, 9, 8), 5, 3)
    with mx.util.np_shape(True):
        block = mx.gluon.SymbolBlock(
            ece408_op.New(mx.sym.var("data"), mx.sym.var("w"), kernel=(3, 3), num_filter=5),
            [mx.sym.var("data", dtype="float32"), mx.sym.var("w", dtype="float32")],
        )
        if mode is not None:
            block.hybridize(**mode)
        for data in (x, x[:0], x):
            y = block(mx.nd.array(data), mx.nd.array(w)).asnumpy()
            assert y.shape == (len(data), 5, 7, 6)
        assert_right(y, x, w)


def test_a_prefix_stands_in_front_of_the_layers_name_once():
    with mx.name.Prefix("net_"):
        layer = ece408_op.New(mx.sym.var("data"), kernel=(3, 3), num_filter=5, name="conv")
    assert layer.list_arguments() == ["data", "net_conv_weight"]
    assert layer.list_outputs() == ["net_conv_output"]
    x, w = values((1, 2, 9, 8), 5, 3)
    ece408_op.clear_op_times()
    layer.eval(data=mx.nd.array(x), net_conv_weight=mx.nd.array(w))[0].wait_to_read()
    assert [call.layer for call in ece408_op.op_times()] == ["net_conv"]


def test_op_time_leaves_out_the_first_touch_of_the_output(monkeypatch):
    """Every page of a fresh output is mapped before the kernel runs, so the clock sees none of it."""
    direct, page, seen = dispatch.find("direct"), resource.getpagesize(), []
    run = direct.run

    def watched(problem, x, w, out, threads):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        out.reshape(-1)[:: page // 4] = 0
        seen.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
        run(problem, x, w, out, threads)

    monkeypatch.setitem(vars(direct), "run", watched)  # its fields are frozen
    x, w = mx.nd.ones((400, 1, 28, 28)), mx.nd.ones((50, 1, 5, 5))
    y = mx.nd.Custom(x, w, op_type="New", impl="direct", kernel=(5, 5), num_filter=50)
    assert (y.asnumpy() == 25).all()
    (faults,) = seen
    assert faults < y.size * 4 // page // 100
    call = ece408_op.op_times()[-1]
    assert call.call_seconds > call.seconds


@pytest.mark.parametrize("busy", [0, 6])
def test_a_fork_with_calls_pending(busy):
    """With busy threads of Python, and with a thread whose name was cut within a character."""
    program = f"""
import os, threading
import ece408_op, mxnet as mx
def work():
    while True:
        sum(range(1000))
for _ in range({busy}):
    threading.Thread(target=work, daemon=True).start()
with open(f"/proc/self/task/{{threading.get_native_id()}}/comm", "wb") as name:
    name.write(b"name\\xc3")
w, y = mx.nd.ones((4, 4, 3, 3)), mx.nd.ones((3000, 4, 28, 28))
for _ in range(4):
    y = mx.nd.Custom(y, w, op_type="New", kernel=(3, 3), num_filter=4)
if not os.fork():
    os._exit(3)
print(os.waitstatus_to_exitcode(os.wait()[1]), int(y[-1, -1, -1, -1].asscalar()), flush=True)
os._exit(0)
"""
    assert printed("-c", program, timeout=60) == f"3 {36**4}\n"


def test_a_fork_while_a_thread_that_is_not_pythons_goes_on_working():
    program = """
import ctypes, hashlib, os
import ece408_op, mxnet
data = bytes(1 << 26)
@ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)
def work(_):
    while True:
        hashlib.sha256(data)  # without Python's lock
ctypes.CDLL(None).pthread_create(ctypes.byref(ctypes.c_ulong()), None, work, None)
if not os.fork():
    os._exit(3)
print(os.waitstatus_to_exitcode(os.wait()[1]), flush=True)
os._exit(0)
"""
    assert printed("-c", program, timeout=60) == "3\n"


def test_a_fork_while_operators_are_deleted():
    """What frees memory lets other threads run meanwhile."""
    program = """
import os, time
import ece408_op, mxnet as mx
from ece408_op.plugin.fast_custom_op import FastCustomOp
class Memory:
    def __del__(self):
        time.sleep(0.1)
class Keeps(FastCustomOp):
    def forward(self, req, in_data, out_data, **given):
        self.memory = Memory()
        self.assign(out_data[0], req[0], in_data[0])
@mx.operator.register("keeps")
class Prop(mx.operator.CustomOpProp):
    def create_operator(self, *given):
        return Keeps()
for _ in range(5):
    x = mx.nd.ones((2, 3))
    for _ in range(3):
        x = mx.nd.Custom(x, op_type="keeps")
    if not os.fork():
        os._exit(3)
    print(os.waitstatus_to_exitcode(os.wait()[1]), end="")
"""
    assert printed("-c", program, timeout=60) == "33333"

"""The passes of a training step on the CPU, against NumPy's own, with race detection: indices and edges."""

import numpy as np
import numpy_operators
import pytest
from numpy_operators import LAUNCHES, Launches
from plan_runs import launch_all, races, run_plan

from ece408_op.core.kernel import EPS32
from ece408_op.graph.symbol_graph import Node
from ece408_op.network import _passes as network_passes
from ece408_op.network._definition import Trained
from ece408_op.network._elementwise import Activation, Clip, Function, LeakyReLU, Sum, WithScalar
from ece408_op.network._fusion import Combination, Pointwise
from ece408_op.network._layers import BatchNorm, Pooling
from ece408_op.plugin import _passes
from ece408_op.problem import ConvProblem
from ece408_op.runtime import cuda


def random(*shapes):
    stream = np.random.default_rng(4)
    return [stream.standard_normal(shape).astype(np.float32) for shape in shapes]


def run(folder, *steps):
    """Run programs on arrays by name, one after another."""
    reports = launch_all([(program.source, program.plan, arrays, 1) for program, arrays in steps], folder, True)
    assert [races(report) for report in reports] == [0] * len(steps)


@pytest.mark.parametrize("problem", [ConvProblem(2, 1, 17, 19, 300, 1), ConvProblem(3, 1, 2, 1, 2, 1)], ids=str)
def test_a_biass_gradient_is_right(problem, programs):
    (y,), program = random(problem.y_shape), _passes.bias_gradient_program(problem)
    x, gradient = np.zeros(problem.x_shape, np.float32), problem.weight_gradient
    got = run_plan(program.source, program.plan, gradient, x, y, programs, 4).buffers["w"].reshape(-1)
    exact, scale = (part.astype(np.float64).sum(axis=(0, 2, 3)) for part in (y, abs(y)))
    pixels = problem.output_height * problem.output_width
    assert (abs(got - exact) <= (pixels // 256 + 3) * EPS32 * scale).all()


@pytest.fixture
def emulated(programs, monkeypatch):
    """Have the passes of a training step run in the emulator."""

    def execute(program, batch, arrays, stream):
        # x may be y, too.
        same = arrays.get("y") is arrays.get("x")
        run(
            programs,
            (program, {name: array.copy() if name == "y" and same else array for name, array in arrays.items()}),
        )

    monkeypatch.setattr(cuda, "execute", execute)


@pytest.mark.parametrize(
    ("shape", "axis", "fixed", "relu"),
    [((7, 30, 3, 3), 1, False, False), ((3, 5, 8), -1, True, True), ((2, 3, 1200), 1, False, True)],
)
def test_batch_norm(shape, axis, fixed, relu, emulated):
    """All launches of both passes, with the arrays that they get on a GPU."""
    norm = BatchNorm("BatchNorm", eps=0.01, momentum=0.8, fix_gamma=fixed, axis=axis)
    node = Node("BatchNorm", "norm", operator=norm, epilogue=Activation("relu") if relu else None)
    x, dy, *vectors, variance = random(shape, shape, *[(shape[axis],)] * 4)
    inputs, (right, out) = (x, *vectors, np.abs(variance)), np.full((2, *shape), np.nan, "f")
    kept = numpy_operators.train(node, inputs, right)
    exact = numpy_operators.gradients(node, Trained(inputs, right, kept), dy, [True] * 3)
    saved = LAUNCHES.batch_norm(norm, relu, inputs, out)
    gradients = LAUNCHES.batch_norm_gradients(norm, relu, Trained(inputs, out, saved), dy, True)
    assert relu == (right.min() >= 0)
    for got, expected in zip((out, *saved[:4], *gradients[:3]), (right, *kept[:4], *exact[:3])):
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("shape", [(2, 3, 4, 5), (3, 5, 7)], ids=str)
def test_the_relu_of_a_sum(shape, emulated):
    x, y = random(shape, shape)
    out = np.full(shape, np.nan, "f")
    LAUNCHES.sum_relu([x, y], out)
    assert (out == np.maximum(x + y, 0)).all()


@pytest.mark.parametrize(("elements", "blocks"), [(8192, 8), (8190, 32)])
def test_the_relu_of_a_sum_has_no_idle_blocks(elements, blocks, monkeypatch):
    launched, x = [], np.zeros(elements, "f")
    monkeypatch.setattr(cuda, "execute", lambda program, *_: launched.extend(program.plan.steps(1)))
    LAUNCHES.sum_relu([x, x], x)
    assert [launch.grid for launch in launched] == [(blocks, 1, 1)]


def test_every_channel_and_part_has_a_block_that_sums_it(monkeypatch):
    launched = []
    monkeypatch.setattr(cuda, "execute", lambda program, *_: launched.append(program.plan.steps(1)))
    for channels, parts in ((3, 4), ((1 << 20) + 1, 1), (2000, 2)):
        with np.errstate(all="ignore"):
            LAUNCHES.bias_gradient(np.zeros((4, channels, 2, 1), "f"))
        (sums,), _ = launched[-2:]
        assert sums.grid == (channels * parts, 1, 1)


class Shares:
    """What two GPUs exchange: rank ``number`` computes here, after the sums of the other's share are known."""

    size = 2

    def __init__(self, number, images, others):
        self.number, self._images, self._others = number, images, iter(others)

    def of_batch(self, count):
        return count // self._images[self.number] * sum(self._images)

    def all_gather(self, sums):
        sums[1 - self.number] = next(self._others)


@pytest.mark.parametrize(("fixed", "relu"), [(False, True), pytest.param(True, False, marks=pytest.mark.exhaustive)])
def test_batch_norm_of_a_batch_that_two_gpus_share(fixed, relu, emulated):
    """Five images of odd sizes, two of them on one GPU; all is that of the five images in float64."""
    norm = BatchNorm("BatchNorm", eps=0.01, momentum=0.8, fix_gamma=fixed)
    x, dy, *vectors, variances = random((5, 7, 3, 5), (5, 7, 3, 5), *[(7,)] * 4)
    x, vectors = x + np.float32(3), [*vectors, np.abs(variances)]
    axes, shares = (0, 2, 3), (slice(0, 2), slice(2, 5))

    def along(vector):
        return vector.reshape(1, -1, 1, 1)

    exact = x.astype(np.float64)
    mean, variance = exact.mean(axes), exact.var(axes)
    inverse, gamma = 1 / np.sqrt(variance + 0.01), np.ones(7) if fixed else vectors[0].astype(np.float64)
    normal = (exact - along(mean)) * along(inverse)
    y = normal * along(gamma) + along(vectors[1])
    passed = dy.astype(np.float64) * (y > 0 if relu else 1)
    dgamma, dbeta = (passed * normal).sum(axes), passed.sum(axes)
    dx = along(gamma * inverse) * (passed - (along(dbeta) + normal * along(dgamma)) / (5 * 3 * 5))
    moving = [0.8 * old.astype(np.float64) + 0.2 * new for old, new in zip(vectors[2:], (mean, variance))]

    def sums(mine):
        """What a GPU sends in the forward pass, and in the backward pass."""
        a, b = exact[mine], passed[mine]
        return [(a.sum(axes), (a * a).sum(axes)), (b.sum(axes), (b * (a - along(mean))).sum(axes))]

    totals = np.zeros((2, 7))
    for part, mine in enumerate(shares):
        rank, out = Shares(part, (2, 3), sums(shares[1 - part])), np.full(x[mine].shape, np.nan, "f")
        inputs, operators = (x[mine], *vectors), Launches(None, rank)
        saved = operators.batch_norm(norm, relu, inputs, out)
        to_data, *others = operators.batch_norm_gradients(norm, relu, Trained(inputs, out, saved), dy[mine], True)
        # The factors, their products with x (up to 7 standard deviations from 0) and sums are rounded.
        scale = np.abs(gamma * inverse).max()
        assert np.abs(out - (np.maximum(y, 0) if relu else y)[mine]).max() <= 4 * EPS32 * scale * np.abs(x).max()
        for got, wanted in zip(saved, (mean, variance, *moving)):
            assert (np.abs(got - wanted) <= EPS32 * np.abs(wanted) + 1e-12).all()
        assert np.abs(to_data - dx[mine]).max() <= 4 * EPS32 * scale * np.abs(dy).max() * 4
        totals += others[:2]
    assert (np.abs(totals[0] - (0 if fixed else dgamma)) <= EPS32 * np.abs(dgamma) + 1e-12).all()
    assert (np.abs(totals[1] - dbeta) <= EPS32 * np.abs(dbeta) + 1e-12).all()


def activation(kind):
    return Node("Activation", kind, operator=Activation("Activation", kind))


def test_gradients_of_activations(programs, monkeypatch):
    steps, cases = [], []
    monkeypatch.setattr(cuda, "execute", lambda program, batch, arrays, stream: steps.append((program, arrays)))
    for kind in ("relu", "sigmoid", "tanh", "softrelu", "softsign"):
        for count in (37, 1036):
            x, gradient = random((count,), (count,))
            node, y = activation(kind), np.empty(count, "f")
            numpy_operators.compute(node.operator, [x], y)
            (expected,) = numpy_operators.gradients(node, Trained([x], y), gradient, [True])
            cases.append((f"{kind} of {count}", LAUNCHES.activation_gradient(kind, gradient, y), expected))
    run(programs, *steps)
    for name, out, expected in cases:
        np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-6, err_msg=name)


POOLINGS = [
    (Pooling("Pooling", (2, 2), "max", (2, 2)), (2, 3, 8, 9), None),
    (Pooling("Pooling", (3, 3), "max", (2, 2), (1, 1)), (2, 3, 8, 9), None),
    (Pooling("Pooling", (3, 2), "max", (1, 2), (2, 1), "full"), (2, 3, 7, 6), None),
    (Pooling("Pooling", (3, 2), "avg", (2, 1), (1, 1), "full"), (2, 2, 8, 5), None),
    (Pooling("Pooling", (3, 2), "avg", (2, 1), (1, 1), "full", count_include_pad=False), (2, 2, 8, 5), None),
    (Pooling("Pooling", (2, 3), "sum", (3, 4)), (1, 2, 9, 8), None),
    (Pooling("Pooling", pool_type="avg", global_pool=True), (2, 3, 7, 7), None),
    (Pooling("Pooling", pool_type="max", global_pool=True), (2, 3, 4, 5), None),
    (Pooling("Pooling", pool_type="max", global_pool=True), (2, 3, 17, 16), None),
    (Pooling("Pooling", (2, 2), "max", (2, 2)), (2, 3, 8, 10), Activation("tanh")),
    (Pooling("Pooling", (3, 3), "max", (2, 2), (1, 1)), (2, 3, 8, 9), Activation("relu")),
    (Pooling("Pooling", (5, 5), "max", (1, 1), (2, 2)), (2, 2, 7, 8), Activation("sigmoid")),
]


def outputs(operator, shape):
    fitted, full = operator.fitted(shape), operator.pooling_convention == "full"
    spans = (n + 2 * pad - size for n, pad, size in zip(shape[2:], fitted.pad, fitted.kernel))
    return (*shape[:2], *(1 + (-(-span // s) if full else span // s) for span, s in zip(spans, fitted.stride)))


def test_elementwise_operators_broadcast(programs):
    sigmoid, minus = Activation("sigmoid"), Function("broadcast_sub")
    cases = [
        (Function(name), shapes)
        for name, shapes in (
            *[("exp", [(7,)]), ("square", [(3, 5)]), ("elemwise_div", [(3, 5), (3, 5)])],
            *[("broadcast_add", [(2, 3, 4, 5), (1, 3, 1, 5)]), ("broadcast_maximum", [(2, 3, 1, 5), (2, 1, 4, 1)])],
            *[("broadcast_minimum", [(1, 1), (6, 1)]), ("broadcast_sub", [(4, 1, 3), (1, 1, 1)])],
        )
    ]
    cases += [
        (WithScalar("_rminus_scalar", 3.0), [(4, 5)]),
        (WithScalar("_power_scalar", 2.0), [(4, 5)]),
        (Clip("clip", -0.5, 0.25), [(40, 50)]),
        (Sum("add_n"), [(4, 5)] * 3),
        *((LeakyReLU("LeakyReLU", kind), [(4, 5)]) for kind in ("leaky", "elu", "selu", "gelu", "rrelu")),
        *((LeakyReLU("LeakyReLU", "prelu"), [shape, (3,)]) for shape in ((2, 3), (2, 3, 5), (2, 3, 5, 4))),
        *((Activation("Activation", kind), [(9, 11)]) for kind in ("relu", "tanh", "softrelu", "softsign")),
        (Pointwise("", ((minus, (0, 1)), (sigmoid, (2,)), (minus, (1, 3)))), [(2, 3, 4), (3, 1)]),
        (Combination("", has_factor=True), [(2, 3, 4, 5), (2, 3, 1, 1)]),
        (Combination("", has_factor=True, residual=True), [(2, 3, 4, 5), (2, 3, 1, 1), (2, 3, 4, 5)]),
    ]
    runs, compared = [], []
    for number, (operator, shapes) in enumerate(cases):
        arrays = random(*shapes)
        arrays[0].flat[-1] = np.nan
        out = np.broadcast_shapes(*operator.operand_shapes(shapes))
        exact, got = np.empty(out, "f"), np.full(out, np.nan, "f")
        following = Activation("tanh") if number % 2 else None
        with np.errstate(invalid="ignore"):
            numpy_operators.compute(operator, arrays, exact, following)
        named = {f"x{place or ''}": one for place, one in enumerate(arrays)}
        runs.append((network_passes.elementwise(operator, shapes, out, following), {**named, "y": got}))
        compared.append((operator, got, exact))
    run(programs, *runs)
    for operator, got, exact in compared:
        np.testing.assert_allclose(got, exact, rtol=1e-5, atol=1e-6, err_msg=str(operator))


def test_pooling_and_its_gradient(programs):
    forward, backward, cases = [], [], []
    for operator, shape, following in POOLINGS:
        # Few different values: several elements of a window are its maximum.
        x = np.round(random(shape)[0])
        if operator.is_maximum:
            x[1, 0, 1, 1] = np.nan
        y, kept = (np.full(outputs(operator, shape), np.nan, "f") for _ in range(2))
        numpy_operators.compute(operator, [x], y, following)
        (gradient,), plain, out = random(y.shape), np.full(y.shape, np.nan, "f"), np.full(shape, np.nan, "f")
        with np.errstate(invalid="ignore"):
            node = Node("Pooling", "pool", operator=operator, epilogue=following)
            (expected,) = numpy_operators.gradients(node, Trained([x], y), gradient, [True])
        argmax = np.full(y.shape, 200, network_passes.argmax_type(operator.fitted(shape)))
        forward.append((network_passes.pool(operator, shape, y.shape, following), {"x": x, "y": plain}))
        cases.append((operator, plain, y))
        if operator.is_maximum:
            program = network_passes.pool(operator, shape, y.shape, following, save_argmax=True)
            forward.append((program, {"x": x, "y": kept, "argmax": argmax}))
            cases.append((operator, kept, y))
        of_gradient = network_passes.pool_gradient(operator, shape, y.shape, following)
        backward.append((of_gradient, {"argmax": argmax, "y": y, "dy": gradient, "out": out}))
        cases.append((operator, out, expected))
    run(programs, *forward)
    run(programs, *backward)
    for operator, got, expected in cases:
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6, err_msg=str(operator))

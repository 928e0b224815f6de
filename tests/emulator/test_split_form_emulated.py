"""Layers whose activations stay split, on the CPU, against float64: convolution, pooling, and what stands between."""

from pathlib import Path

import numpy as np
import numpy_operators
import pytest
from plan_runs import launch_all, races

from ece408_op.core import reference
from ece408_op.kernels.cuda.split_precision import split_form, split_passes, wide
from ece408_op.network._layers import Pooling
from ece408_op.problem import ConvProblem
from ece408_op.runtime.cuda import Program
from ece408_op.runtime.launch import Chip

CHIP = Chip("two", (9, 0), 2, 227 * 1024)
RELU, RELU6 = "((v) < 0.f ? 0.f : (v))", "((v) < 0.f ? 0.f : (v) > 6.f ? 6.f : (v))"
#: A stored value's relative error, and one in float32 of a few operations.
STORED, ROUNDING = 2.0**-22, 2.0**-21


def split(x: np.ndarray, exponent: int = 3, components: int = 2) -> dict[str, np.ndarray]:
    """Return float32 images (B, C, H, W) as a split array and its scales, every image with the same exponent."""
    values = np.zeros(split_form.activation_shape(*x.shape, components=components), np.float16)
    with np.errstate(invalid="ignore"):
        scaled = np.moveaxis(x, 1, 3) * np.float32(2.0**exponent)
        values[0, ..., : x.shape[1]] = scaled
        rest = (scaled - values[0, ..., : x.shape[1]].astype(np.float32)) * 2048
        values[1:, ..., : x.shape[1]] = np.where(np.isfinite(rest), rest, 0)
    scales = np.zeros((len(x), 2), np.int32)
    scales[:, 0] = exponent
    scales[:, 1] = np.abs(x).reshape(len(x), -1).max(axis=1).view(np.int32)
    return {"x": values, "x_scales": scales}


def joined(values: np.ndarray, scales: np.ndarray, channels: int) -> np.ndarray:
    """Return a split array in float64, as (B, C, H, W); the channels beyond the last are zero."""
    assert (values[..., channels:] == 0).all()
    high, *low = values.astype(np.float64)
    with np.errstate(invalid="ignore"):
        both = (
            np.where(np.isfinite(high), high + (low[0] / 2048 if low else 0), high)
            * 2.0 ** -scales[:, 0][:, None, None, None]
        )
    return np.moveaxis(both[..., :channels], 3, 1)


def run(
    program: Program,
    arrays: dict[str, np.ndarray],
    shape: tuple[int, ...],
    folder: Path,
    before: tuple = (),
    components: int = 2,
) -> tuple[np.ndarray, np.ndarray]:
    """Return y, of that shape (B, C, H, W), in float64, and its scales; ``before``: calls of other plans."""
    y = np.full(split_form.activation_shape(*shape, components=components), np.nan, np.float16)
    given = {**arrays, "y": y, "y_scales": np.zeros((len(y[0]), 2), np.int32)}
    given |= {name: np.zeros(size, np.uint8) for name, size in program.plan.scratch.items()}
    reports = launch_all([*before, (program.source, program.plan, given, shape[0])], folder, check_races=bool(before))
    assert [races(report) for report in reports] == [0] * len(reports)
    return joined(given["y"], given["y_scales"], shape[1]), given["y_scales"]


def images(*shape: int, special: bool = False) -> np.ndarray:
    x = np.random.default_rng(408).standard_normal(shape).astype(np.float32)
    if special:
        x[-1, 0, 1, 1], x[0, 0, 0, 0] = np.nan, 1e-30
    return x


#: Padding, a stride, groups, channels and filters that are no multiples of eight, images that share a warp's pixels.
CONVOLUTIONS = [
    (ConvProblem(2, 20, 9, 7, 12, 3, 2, stride=(2, 1), pad=(1, 0)), None),
    (ConvProblem(3, 16, 5, 3, 16, 1, groups=2), RELU6),
    (ConvProblem(5, 3, 4, 4, 70, 4, 4), RELU),
]
#: Several wgmmas of pixels per consumer; filters that stay in shared memory or do not; two to four consumers, which
#: share tiles or, where there are many, alternate.
ONE_COMPONENT = [
    (ConvProblem(2, 20, 33, 16, 60, 2, 1, stride=(2, 1)), None),
    (ConvProblem(3, 16, 5, 3, 16, 1, groups=2), RELU6),
    (ConvProblem(3, 64, 13, 11, 120, 3, pad=(0, 1)), RELU),
    (ConvProblem(3, 72, 9, 15, 60, 1), None),
    (ConvProblem(3, 16, 33, 24, 40, 1), None),
    (ConvProblem(2, 72, 23, 24, 90, 3), None),
    (ConvProblem(2, 24, 33, 24, 128, 1), RELU),
]
#: Consumers that share the filters of a tile: long sums alone choose it.
SHARED_FILTERS = pytest.param(1, ConvProblem(3, 212, 12, 14, 250, 3), None, marks=pytest.mark.exhaustive)


def filters(program: Program, problem: ConvProblem, residual: bool, components: int = 2) -> tuple[dict, tuple]:
    """Return all that a convolution reads besides x, and the call that splits the filters."""
    rng = np.random.default_rng(408)
    w = rng.standard_normal(problem.w_shape).astype(np.float32)
    bias = rng.standard_normal(problem.filters).astype(np.float32)
    w[0, 0, 0, 0] = 1e-20
    program = split_form.split_weights(program, problem)
    arrays = {
        "w": w,
        "split_w": np.zeros(split_form.split_weight_bytes(problem, components) // 2, np.float16),
        "w_exponents": np.zeros(problem.filters, np.int32),
    }
    given = {**arrays, **{name: np.zeros(size, np.uint8) for name, size in program.plan.scratch.items()}}
    gain = np.abs(w).reshape(len(w), -1).sum(axis=1).max()
    arrays |= {"bias": bias, "limits": np.float32([gain * 1.001, np.abs(bias).max()])}
    if residual:
        more = split(rng.standard_normal(problem.y_shape).astype(np.float32), 5, components)
        arrays |= {"residual": more["x"], "residual_scales": more["x_scales"]}
    return arrays, (program.source, program.plan, given, 1)


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize(
    ("components", "problem", "activation"),
    [*((2, *one) for one in CONVOLUTIONS), *((1, *one) for one in ONE_COMPONENT), SHARED_FILTERS],
    ids=str,
)
def test_convolution_with_what_follows(components, problem, activation, special, programs):
    x = images(*problem.x_shape, special=special)
    residual = activation is not None
    program = split_form.convolution(problem, CHIP, components, True, residual, activation)
    arrays, splitting = filters(program, problem, residual, components)
    given = split(x, components=components)
    got, scales = run(program, {**given, **arrays}, problem.y_shape, programs, (splitting,), components)
    x = joined(*given.values(), problem.channels)
    with np.errstate(invalid="ignore"):
        exact = reference.convolve(x, arrays["w"], problem) + arrays["bias"][:, None, None]
        magnitude = reference.magnitude(x, arrays["w"], problem) + np.abs(arrays["bias"])[:, None, None]
        if residual:
            more = joined(arrays["residual"], arrays["residual_scales"], problem.filters)
            exact, magnitude = exact + more, magnitude + np.abs(more)
        exact = {None: exact, RELU: np.maximum(exact, 0), RELU6: np.clip(exact, 0, 6)}[activation]
    finite = np.isfinite(exact)
    assert finite.all() != special
    assert (np.isfinite(got) == finite).all()
    stored = STORED if components == 2 else 2.0**-11
    allowed = (wide.bound(components, problem) + 2 * stored) * magnitude + 1e-12
    assert (np.abs(got - exact) <= allowed)[finite].all()
    largest = scales[:, 1].view(np.float32)
    exact_largest = np.abs(got).reshape(len(got), -1).max(axis=1)
    known = np.isfinite(exact_largest)
    assert (largest[known] >= exact_largest[known]).all()
    assert (largest[known] <= exact_largest[known] * 1.002).all()
    assert not np.isfinite(largest[~known]).any()


def test_a_recomputed_value_beyond_fp16_is_infinite_for_the_next_layer(programs):
    # No window holds the NaNs: all outputs are finite in float32.
    problem = ConvProblem(2, 8, 3, 8, 8, 1, stride=(1, 2))
    x = images(*problem.x_shape)
    x[:, 0, 0, 1] = np.nan
    x[1, :, 2, 2] = 6e4
    program = split_form.convolution(problem, CHIP)
    arrays, splitting = filters(program, problem, False)
    got, scales = run(program, {**split(x, exponent=0), **arrays}, problem.y_shape, programs, (splitting,))
    exact = reference.convolve(x, arrays["w"], problem)
    too_large = np.abs(exact) > 65504
    assert too_large[1].any()
    assert (np.isinf(got) == too_large).all()
    assert list(np.isfinite(scales[:, 1].view(np.float32))) == [True, False]


def test_images_are_split_and_joined(programs):
    x = images(2, 70, 9, 8)
    x[1] *= 1e-30
    values = np.full(split_form.activation_shape(*x.shape), np.nan, np.float16)
    split_up, joining = split_form.split_activations(x.shape, CHIP), split_passes.join(x.shape)
    given = {"x": x, "split_x": values, "x_scales": np.zeros((2, 2), np.int32)}
    given |= {name: np.zeros(size, np.uint8) for name, size in split_up.plan.scratch.items()}
    launch_all([(split_up.source, split_up.plan, given, 2)], programs)
    allowed = STORED * np.abs(x) + 2.0**-50 * np.abs(x).reshape(2, -1).max(axis=1)[:, None, None, None]
    assert (np.abs(joined(values, given["x_scales"], 70) - x) <= allowed).all()
    again = {"x": values, "x_scales": given["x_scales"], "y": np.full(x.shape, np.nan, np.float32)}
    (report,) = launch_all([(joining.source, joining.plan, again, 2)], programs, check_races=True)
    assert races(report) == 0
    assert (np.abs(again["y"] - x) <= 2 * allowed).all()


@pytest.mark.parametrize(
    ("kind", "window", "stride", "pad", "count_pad", "y"),
    [
        ("max", (3, 3), (2, 2), (1, 1), False, (4, 5)),
        ("avg", (3, 2), (2, 1), (1, 0), True, (4, 8)),
        ("avg", (3, 3), (1, 1), (1, 1), False, (7, 9)),
        ("sum", (7, 9), (1, 1), (0, 0), False, (1, 1)),
        ("avg", (7, 9), (7, 9), (0, 0), False, (1, 1)),
        ("max", (7, 9), (7, 9), (0, 0), False, (1, 1)),
    ],
)
def test_pooling(kind, window, stride, pad, count_pad, y, programs):
    x = images(2, 20, 7, 9)
    program = split_passes.pool(x.shape, (2, 20, *y), window, stride, pad, kind, count_pad)
    got, _ = run(program, split(x), (2, 20, *y), programs)
    operator, exact = Pooling("Pooling", window, kind, stride, pad, count_include_pad=count_pad), np.zeros((2, 20, *y))
    numpy_operators.compute(operator, [joined(*split(x).values(), 20)], exact)
    assert np.abs(got - exact).max() <= ROUNDING * 64 * np.abs(x).max()


def test_a_nan_stays_in_its_windows(programs):
    x = images(2, 8, 5, 6, special=True)
    program = split_passes.pool(x.shape, (2, 8, 4, 5), (2, 2), (1, 1), (0, 0), "max")
    got, scales = run(program, split(x), (2, 8, 4, 5), programs)
    assert np.isnan(got[1, 0, :2, :2]).all()
    assert np.isfinite(got[0]).all() and np.isnan(got).sum() == 4
    assert scales[1, 1] >= 0x7F800000 > scales[0, 1]


@pytest.mark.parametrize(
    ("kernel", "stride", "pad", "activation"), [(3, (2, 1), (1, 1), RELU), (1, (1, 1), (0, 0), RELU6)]
)
def test_depthwise_convolution(kernel, stride, pad, activation, programs):
    """With 1 x 1 filters, a factor and a number per channel."""
    problem = ConvProblem(2, 20, 9, 7, 20, kernel, stride=stride, pad=pad, groups=20)
    x, w = images(*problem.x_shape), images(20, 1, kernel, kernel)
    by_tap, bias = np.zeros((kernel * kernel, 24), np.float32), np.zeros(24, np.float32)
    by_tap[:, :20], bias[:20] = w.reshape(20, -1).T, images(1, 20, 1, 1).reshape(20)
    limits = np.float32([np.abs(by_tap).sum(axis=0).max(), np.abs(bias).max()])
    program = split_passes.depthwise(x.shape, problem.y_shape, (kernel, kernel), stride, pad, activation)
    got, _ = run(program, {**split(x), "w": by_tap, "bias": bias, "limits": limits}, problem.y_shape, programs)
    exact = np.clip(reference.convolve(x, w, problem) + bias[:20, None, None], 0, 6 if activation == RELU6 else None)
    assert np.abs(got - exact).max() <= ROUNDING * 10 * (np.abs(x).max() * np.abs(w).max() + 4)


def test_a_factor_below_zero(programs):
    x, slopes = images(2, 20, 5, 3), np.linspace(-3, 2, 24, dtype="f")
    limits = np.float32([max(1, np.abs(slopes).max()), 0])
    program = split_passes.depthwise(x.shape, x.shape, (1, 1), (1, 1), (0, 0), below_zero=True)
    arrays = {**split(x), "w": slopes, "bias": np.zeros(24, "f"), "limits": limits}
    got, scales = run(program, arrays, x.shape, programs)
    exact = np.where(x > 0, x, x * slopes[:20, None, None])
    assert (np.abs(got - exact) <= 4 * STORED * np.abs(exact) + 2.0**-40).all()
    assert (scales[:, 1].view("f") >= np.abs(got).reshape(2, -1).max(axis=1)).all()


@pytest.mark.parametrize(("has_factor", "added"), [(True, False), (False, True), (True, True)])
def test_a_factor_and_a_sum(has_factor, added, programs):
    x, other = images(2, 20, 5, 3), images(2, 20, 5, 3) * np.float32(100)
    factor = np.random.RandomState(5).uniform(-1, 1, (2, 20)).astype("f")
    residual = dict(zip(("residual", "residual_scales"), split(other, exponent=-3).values()))
    program = split_passes.combine(x.shape, has_factor, added, RELU)
    got, scales = run(program, {**split(x), "factor": factor, **residual}, x.shape, programs)
    terms = x * (factor[:, :, None, None] if has_factor else 1), other if added else np.zeros_like(other)
    exact, magnitude = np.maximum(sum(terms), 0), sum(map(np.abs, terms))
    assert (np.abs(got - exact) <= 4 * STORED * magnitude + 2.0**-40 * magnitude.max()).all()
    assert (scales[:, 1].view("f") >= np.abs(got).reshape(2, -1).max(axis=1)).all()


def test_a_factor_or_a_sum_with_nan(programs):
    x, plain = images(2, 8, 5, 6, special=True), images(2, 8, 5, 6)
    for first, second in ((x, plain), (plain, x)):
        arrays = {**split(first), "factor": np.ones((2, 8), "f")}
        arrays |= dict(zip(("residual", "residual_scales"), split(second).values()))
        got, scales = run(split_passes.combine(x.shape, True, True), arrays, x.shape, programs)
        assert (np.isnan(got) == np.isnan(first + second)).all()
        assert scales[1, 1] >= 0x7F800000 > scales[0, 1]


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_concat(count, programs):
    parts = [images(2, channels, 3, 5) * np.float32(10.0**i) for i, channels in enumerate((8, 24, 16, 8)[:count])]
    arrays = {}
    for number, part in enumerate(parts):
        one = split(part, exponent=3 - 2 * number)
        names = ("x", "x_scales") if not number else (f"x{number}", f"scales{number}")
        arrays |= dict(zip(names, one.values()))
    shape = (2, sum(part.shape[1] for part in parts), 3, 5)
    got, scales = run(split_passes.concat([part.shape for part in parts]), arrays, shape, programs)
    exact = np.concatenate(parts, axis=1)
    assert (np.abs(got - exact) <= 2 * STORED * np.abs(exact) + 1e-9).all()
    assert (scales[:, 1].view(np.float32) == np.abs(exact).reshape(2, -1).max(axis=1)).all()


@pytest.mark.parametrize(
    ("shapes", "reason"),
    [(((70000, 8, 1, 1),), "batch: at most 65535"), (((60000, 8, 224, 224),), "values: fewer than")],
)
def test_refusals_have_reasons(shapes, reason):
    assert any(reason in found for found in split_passes.reasons(*shapes))


@pytest.mark.parametrize(
    "problem",
    [
        ConvProblem(2, 1, 9, 9, 8, 3),
        ConvProblem(2, 22, 9, 9, 8, 3),
        ConvProblem(2, 4, 9, 9, 8, 3, groups=2),
        ConvProblem(2, 3, 9, 9, 8, 3, dilate=(1, 2)),
        ConvProblem(2, 2, 9, 99, 8, 1, 65),
        ConvProblem(2, 64, 9, 9, 64, 3, 1),
        ConvProblem(1, 4, 30000, 30000, 96, 4, stride=(4, 4)),  # 32 bits count the values of an image
    ],
)
def test_only_plain_layers_of_few_channels_are_unfolded(problem):
    assert split_passes.unfolded(problem) is None


@pytest.mark.parametrize("components", [2, 1])
def test_the_columns_of_windows_become_channels(components, programs):
    x = images(2, 3, 5, 9, special=True)
    problem = ConvProblem(2, 3, 5, 9, 8, 2, 3, stride=(1, 2), pad=(0, 1))
    unfolded = split_passes.unfolded(problem)
    assert unfolded == ConvProblem(2, 16, 5, 5, 8, 2, 1)
    program = split_passes.unfold(problem, components)
    got, scales = run(program, {"x": x}, unfolded.x_shape, programs, components=components)
    assert not got[:, 9:].any()
    got = got[:, :9]
    padded = np.pad(x, ((0, 0), (0, 0), (0, 0), (1, 1)))
    exact = np.concatenate([padded[..., q : q + 9 : 2] for q in range(3)], axis=1)
    assert np.array_equal(np.isnan(got), np.isnan(exact))
    finite = np.isfinite(exact)
    # The image with a NaN is not scaled: its values may be denormal fp16 numbers.
    stored, denormal = (STORED, 2.0**-35) if components == 2 else (2.0**-11, 2.0**-25)
    assert (np.abs(got - exact) <= stored * np.abs(exact) + denormal)[finite].all()
    assert scales[0, 1] == np.abs(x[0]).max().view(np.int32)
    assert scales[1, 1] >= 0x7F800000

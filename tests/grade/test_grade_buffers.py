"""A layer's buffers: what is drawn, what is noticed, and how an output is judged."""

import os
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest

from ece408_op.core import reference
from ece408_op.core.check import compare
from ece408_op.grade import _judge
from ece408_op.grade._buffers import Buffers
from ece408_op.grade._verdict import FLOAT32, HALF, HALF_SUMS, PICTURE, PRECISIONS, REAL, TRANSFORM, WHOLE, WIDE, WRONG
from ece408_op.kernels.cpu import loops, winograd
from ece408_op.problem import ConvProblem
from ece408_op.submission import arrays

PROBLEM = ConvProblem(3, 4, 9, 8, 5, 3)


@pytest.fixture
def buffers():
    with Buffers(PROBLEM) as found:
        yield found


# MXNet's import may have given this module a NumPy of its own.
@pytest.mark.parametrize(("owner", "name"), [(arrays.np, "empty"), (os, "memfd_create")])
def test_where_memory_lacks_for_one_array_the_others_comes_back(owner, name, monkeypatch):
    allocate, calls = getattr(owner, name), []

    def twice(*arguments: object) -> object:
        calls.append(arguments)
        if len(calls) > 2:
            raise MemoryError
        return allocate(*arguments)

    before = os.listdir("/proc/self/fd")
    monkeypatch.setattr(owner, name, twice)
    with pytest.raises(MemoryError):
        Buffers(PROBLEM)
    assert os.listdir("/proc/self/fd") == before


#: The last timed input with a few elements changed.
NEAR = "near"


def draw(buffers: Buffers, kind: str, seed: int) -> np.ndarray:
    """Draw inputs of that kind, and return a copy of x."""
    rng = np.random.default_rng(seed)
    if kind == NEAR:
        buffers.draw_near_duplicate(rng)
    else:
        buffers.draw(kind, rng)
    buffers.present(flush=False)
    return buffers.x.array.copy()


def call(buffers: Buffers, kind: str, fill: float = 0.0) -> np.ndarray:
    """A run by this process in the worker's place; the output."""
    x = draw(buffers, kind, 5)
    buffers.clear(fill)
    buffers.y.array[...] = summed(x, buffers.w.array)
    return buffers.y.array


def test_real_inputs_are_uniform_and_other_seeds_give_others():
    problem = ConvProblem(30, 3, 40, 40, 2, 3)
    with Buffers(problem) as one, Buffers(problem) as other:
        drawn, others = draw(one, REAL, 7), draw(other, REAL, 8)
        x = drawn[(drawn == 0).mean(axis=(1, 2, 3)) < 0.5].ravel()  # without the sparse images
        assert (x >= -1).all() and (x < 1).all()
        # The mean of n uniform numbers has a standard deviation of 1 / sqrt(3 n): six of them.
        assert abs(x.mean()) < 6 / np.sqrt(3 * x.size)
        assert abs(np.corrcoef(x[1:], x[:-1])[0, 1]) < 6 / np.sqrt(x.size)
        assert (others != drawn).mean() > 0.7


@pytest.mark.parametrize(("channels", "values"), [(4, {-2, -1, 1, 2}), (200, {-1, 1})])
def test_whole_numbers(channels, values):
    with Buffers(ConvProblem(2, channels, 9, 8, 5, 3)) as buffers:
        assert values <= set(draw(buffers, WHOLE, 3).ravel())
        assert set(buffers.w.array.ravel()) == {-1, 1}


@pytest.mark.parametrize("kind", [REAL, WHOLE])
def test_every_window_of_a_sparse_image_has_one_product_of_eleven_bits(kind):
    with Buffers(ConvProblem(200, 4, 20, 17, 5, 5)) as buffers:
        sparse = [image for image in draw(buffers, kind, 3) if (image == 0).sum() > image.size / 2]
        assert len(sparse) == 4  # a submission that skips their zeros is 2 % faster
        for image in sparse:
            windows = np.lib.stride_tricks.sliding_window_view(image, (5, 5), axis=(1, 2))
            assert ((windows != 0).sum(axis=(0, 3, 4)) == 1).all()
        mantissas, exponents = np.frexp(np.concatenate([np.abs(image[image != 0]) for image in sparse]))
        assert (mantissas * 2048 % 2 == 1).all()
        assert set(exponents) == (set(range(-6, 1)) if kind == REAL else {11})


def test_a_near_duplicate_changes_every_image_and_few_elements():
    with Buffers(ConvProblem(64, 1, 28, 25, 2, 3)) as buffers:
        changed = (draw(buffers, REAL, 1) != draw(buffers, NEAR, 2)).reshape(64, -1)
        assert changed.any(axis=1).all()
        assert changed.mean() < 0.01


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("spoilt", [False, True])
@pytest.mark.parametrize("kind", [REAL, WHOLE])
def test_an_output_is_compared_with_float64(buffers, kind, spoilt):
    y = call(buffers, kind)
    if spoilt:
        y[2, 4, 6, 5] += 1
        y.view(np.uint32)[0, 1, 2, 3] = 0x7FA00000  # a signalling NaN, at which NumPy would warn
    buffers.take_output()
    found = buffers.outcome(kind)
    expected = compare(y, buffers.x.array, buffers.w.array, loops.KERNEL)
    assert found.precision == (WRONG if spoilt else FLOAT32)
    assert found.wrong == expected.wrong == 2 * spoilt
    assert (found.error_of_bound, found.index) == (pytest.approx(expected.worst), expected.index)
    assert spoilt or found.error == pytest.approx(expected.scaled)
    explained = buffers.explanation(0.0, found.index[0], "")
    assert explained.wrong == 2 * spoilt
    if spoilt:
        wrong_map = explained.map()
        assert wrong_map[6] == ".....1" and wrong_map[2] == "...1.." and wrong_map[0] == "......"


@pytest.mark.parametrize("accumulates", [False, True])
def test_elements_of_a_poisoned_output_that_were_not_written(buffers, accumulates):
    y = call(buffers, WHOLE, _judge.POISON)
    y += np.float32(_judge.POISON * accumulates)
    buffers.take_output()
    right = buffers.outcome(WHOLE, _judge.POISON)
    assert (right.precision, right.wrong) == (FLOAT32, 0)
    y[1, 2, 3] = _judge.POISON
    y[0, 0, 0, 0] = 0.3
    buffers.take_output()
    found = buffers.outcome(WHOLE, _judge.POISON)
    # The row of six, but for sums of zero.
    exact = reference.convolve(buffers.x.array, buffers.w.array)[1, 2, 3]
    unwritten = int((exact != 0).sum())
    assert unwritten > 0
    assert (found.precision, found.wrong) == (WRONG, unwritten + 1)
    assert (found.index[:3], found.got) == ((1, 2, 3), _judge.POISON)


def rounded(bits: int) -> Callable[[np.ndarray], np.ndarray]:
    """To that many bits, to nearest."""

    def to(values: np.ndarray) -> np.ndarray:
        mantissas, exponents = np.frexp(values.astype(np.float64))
        return np.ldexp(np.round(mantissas * 2**bits) / 2**bits, exponents).astype(np.float32)

    return to


def truncated(values: np.ndarray) -> np.ndarray:
    """To eleven bits, as tensor cores read float32 for TF32."""
    return (values.view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)


def float16(values: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        return values.astype(np.float16).astype(np.float32)


def summed(
    x: np.ndarray, w: np.ndarray, factor: Callable[[np.ndarray], np.ndarray] = np.asarray, sums: type = np.float32
) -> np.ndarray:
    """One product after the other."""
    x, w, size = factor(x), factor(w), w.shape[2]
    rows, columns = x.shape[2] - size + 1, x.shape[3] - size + 1
    y = np.zeros((len(x), len(w), rows, columns), sums)
    with np.errstate(over="ignore", invalid="ignore"):
        for c, p, q in np.ndindex(*w.shape[1:]):
            part = x[:, None, c, p : p + rows, q : q + columns] * w[None, :, c, p, q, None, None]
            y = (y + part.astype(sums)).astype(sums)
    return y.astype(np.float32)


def without_smallest(x: np.ndarray, w: np.ndarray) -> np.ndarray:
    return summed(x, np.where(np.abs(w) < np.quantile(np.abs(w), 0.1), 0, w).astype(np.float32))


def without_a_quarter_of_the_small(x: np.ndarray, w: np.ndarray) -> np.ndarray:
    left_out = (np.abs(w) < 0.3) & (np.arange(w.size).reshape(w.shape) % 4 == 0)
    return summed(x, np.where(left_out, 0, w).astype(np.float32))


def by_winograd(x: np.ndarray, w: np.ndarray) -> np.ndarray:
    problem = ConvProblem.from_shapes(x.shape, w.shape)
    y = np.empty(problem.y_shape, np.float32)
    winograd.KERNEL.prepare(problem, y)
    winograd.KERNEL.run(problem, x, w, y, 1)
    return y


def by_fourier(x: np.ndarray, w: np.ndarray) -> np.ndarray:
    size, rows, columns = x.shape[2:], x.shape[2] - w.shape[2] + 1, x.shape[3] - w.shape[3] + 1
    spectra = (np.fft.rfft2(one, size).astype(np.complex64) for one in (x, w))
    product = np.einsum("bcij,mcij->bmij", next(spectra), np.conj(next(spectra))).astype(np.complex64)
    return np.fft.irfft2(product, size)[:, :, :rows, :columns].astype(np.float32)


LAYERS = {
    "25 products": ConvProblem(9, 1, 28, 28, 10, 5),
    "150 products": ConvProblem(9, 6, 20, 20, 8, 5),
    "588 products": ConvProblem(9, 12, 15, 15, 6, 7),
    "3136 products": ConvProblem(9, 64, 11, 11, 4, 7),
}


def worst_class(problem: ConvProblem, compute: Callable[[np.ndarray, np.ndarray], np.ndarray], *kinds: str) -> str:
    """The coarsest class over the kinds of data."""
    found = []
    with Buffers(problem) as buffers:
        for number, kind in enumerate(kinds or (WHOLE, REAL, NEAR)):
            buffers.y.array[...] = compute(draw(buffers, kind, number), buffers.w.array.copy())
            buffers.take_output()
            found.append(buffers.outcome(REAL if kind == NEAR else kind).precision)
    return max(found, key=[*PRECISIONS, WRONG].index)


#: How an output is computed, and the classes that it may have.
COMPUTED = {
    "plain": (summed, {FLOAT32}),
    "winograd": (by_winograd, {FLOAT32, TRANSFORM}),
    "fourier": (by_fourier, {FLOAT32, TRANSFORM}),
    "half": (partial(summed, factor=float16), {HALF}),
    "tf32": (partial(summed, factor=truncated), {HALF}),
    "half sums": (partial(summed, factor=float16, sums=np.float16), {HALF_SUMS}),
    "bfloat16": (partial(summed, factor=rounded(8)), {WRONG}),
    "7 bits": (partial(summed, factor=rounded(7)), {WRONG}),
    "6 bits": (partial(summed, factor=rounded(6)), {WRONG}),
    "filters of 8 bits": (lambda x, w: summed(x, rounded(8)(w)), {WRONG}),
    "filters of 11 bits": (lambda x, w: summed(x, rounded(11)(w)), {HALF}),
    "fp8": (partial(summed, factor=rounded(4)), {WRONG}),
    "left out": (without_smallest, {WRONG}),
    "a quarter left out": (without_a_quarter_of_the_small, {WRONG}),
}


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("name", COMPUTED)
def test_the_class_of_an_output(layer, name):
    problem, (compute, classes) = LAYERS[layer], COMPUTED[name]
    if compute is by_winograd and winograd.KERNEL.not_supported_reasons(problem):
        pytest.skip("Winograd's kernel does not take the layer")
    assert worst_class(problem, compute) in classes


def test_numbers_beyond_float16_tell_tf32_from_it():
    problem = LAYERS["25 products"]
    assert worst_class(problem, partial(summed, factor=truncated), WIDE) == FLOAT32
    assert worst_class(problem, partial(summed, factor=float16), WIDE) == WRONG


def judged(y: np.ndarray, x: np.ndarray, w: np.ndarray, kind: str) -> str:
    with Buffers(ConvProblem.from_shapes(x.shape, w.shape)) as buffers:
        buffers.set_inputs(x, w)
        buffers.y.array[...] = y
        buffers.take_output()
        return buffers.outcome(kind).precision


@pytest.mark.parametrize("channels", [1, 6, 64])
@pytest.mark.parametrize("name", ["tf32", "half sums"])
def test_the_largest_sums_of_many(channels, name):
    """Among 10,000 images are sums whose products are nearly all of one sign; in so few elements, none is average."""
    rng = np.random.default_rng(6)
    x = rng.uniform(-0.1, 1, (3, channels, 14, 14)).astype(np.float32)
    w = np.maximum(np.abs(rng.standard_normal((3, channels, 5, 5))), 2.0**-6).astype(np.float32)
    compute, right = COMPUTED[name]
    assert judged(compute(x, w), x, w, REAL) in right


def test_float16_has_eleven_bits_for_every_filter_and_every_changed_element():
    with Buffers(ConvProblem(16, 4, 20, 17, 60, 5)) as buffers:
        for seed in range(20):
            before = draw(buffers, REAL, seed)
            assert np.abs(buffers.w.array).min() >= 2.0**-6
            after = draw(buffers, NEAR, seed)
            changed = after[after != before] * 2048
            assert (changed % 2 == 1).all() and changed.min() > 1024 and changed.max() < 2048


def test_a_transforms_errors_on_an_empty_background_are_no_mistake():
    rng = np.random.default_rng(5)
    x = np.zeros((2, 1, 28, 28), np.float32)
    x[:, :, :9, :9] = rng.integers(0, 256, (2, 1, 9, 9))
    w = rng.standard_normal((4, 1, 5, 5)).astype(np.float32)
    spectrum = np.fft.rfft2(x[:, :1], (28, 28)) * np.conj(np.fft.rfft2(w[:, 0], (28, 28)))
    transformed = np.fft.irfft2(spectrum, (28, 28))[:, :, :24, :24].astype(np.float32)
    assert (transformed[:, :, 12:, 12:] != 0).any()
    assert judged(transformed, x, w, REAL) == judged(transformed, x, w, PICTURE) == TRANSFORM
    garbage = reference.convolve(x, w).astype(np.float32)
    garbage[1, 2, 20, 20] = 5  # where every pixel is zero
    assert judged(garbage, x, w, REAL) == judged(garbage, x, w, PICTURE) == WRONG
    one_less = w.copy()
    one_less[2, 0, 4, 4] = 0
    assert judged(reference.convolve(x, one_less).astype(np.float32), x, w, PICTURE) == WRONG


def test_what_must_not_happen_is_noticed(buffers):
    call(buffers, REAL)
    buffers.take_output()
    assert buffers.violations() == []
    digest = buffers.digest()
    buffers.y.array[2, 4, 6, 5] = np.nextafter(buffers.y.array[2, 4, 6, 5], np.float32(9))
    assert buffers.violations() == ["changed late"]
    buffers.take_output()
    assert buffers.digest() != digest
    first, second = buffers.copied.reshape(-1)[:2]
    assert first != second
    digest = buffers.digest()
    buffers.copied.reshape(-1)[:2] = second, first
    assert buffers.digest() != digest  # the same elements at other places
    buffers.take_output()
    buffers.y.zones[0][-1] = 0
    buffers.w.array[0, 0, 0, 0] += 1
    assert buffers.violations() == ["red zone", "inputs"]


def test_a_wrong_image_is_explained_with_its_number_and_the_first_ones_tell_of_all():
    problem = ConvProblem(19, 2, 9, 8, 3, 3)
    with Buffers(problem) as buffers:
        buffers.draw(WHOLE, np.random.default_rng(5))
        exact = buffers.exact(buffers._x, buffers._w)
        more = " (and maybe more)"
        for changed, worst, words in (
            (slice(7, 8), 7, "image 7 of 19"), (slice(16, 19), 16, "images 16 to 18 of 19"),
            (slice(10, 19), 10, f"images 10 to 12 of 19{more}"), (slice(10, 19), 18, f"images 15 to 18 of 19{more}"),
            (slice(19), 9, "any element of y"),
        ):  # fmt: skip
            buffers.copied[...] = exact
            buffers.copied[changed] = 4096.5
            assert buffers.explanation(4096.5, worst, "").sentence == f"Your code does not write {words}"
        buffers.copied[...] = exact
        buffers.copied[18, 2, 6, 5] += 1
        explained = buffers.explanation(0.0, 18, "")
        assert (explained.wrong, explained.sentence, explained.map()[6]) == (1, "", ".....1")
        buffers.copied[...] = exact[:1]
        assert "of image 0 for each image" in buffers.explanation(0.0, 18, "").sentence

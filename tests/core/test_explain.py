"""Mistakes are found from the output alone."""

from __future__ import annotations

import json
from collections.abc import Callable

import numpy as np
import pytest
from wrong_kernels import BEFORE, KERNELS, PROBLEMS, Kernel, inputs, padded

from ece408_op.core import reference
from ece408_op.core.explain import ROUNDED, explain
from ece408_op.problem import ConvProblem

each_problem = pytest.mark.parametrize("p", PROBLEMS, ids=lambda p: f"K={p.kernel}")


def right(p: ConvProblem) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return x, w and the right y."""
    x, w = inputs(p)
    return x, w, Kernel("")(p, x, w)


@pytest.mark.parametrize(
    ("name", "p"),
    [pytest.param(n, p, id=f"{n}-K={p.kernel}") for n in KERNELS for p in PROBLEMS if KERNELS[n].takes(p)],
)
def test_the_mistake_is_found(name: str, p: ConvProblem) -> None:
    kernel, (x, w) = KERNELS[name], inputs(p)
    given = padded(p, x) if name == "centred" else x
    found = explain(x, w, kernel(p, given, w), BEFORE)
    assert found.wrong > 0
    assert found.mistake == name.partition(" ")[0], found.sentence
    assert kernel.words in found.sentence and "enough blocks" not in found.pattern
    assert found.sentence in "\n".join(found.lines())
    assert json.loads(json.dumps(found.as_data()))["sentence"] == found.sentence


@each_problem
def test_a_mistake_is_found_though_a_few_elements_are_wrong_otherwise(p: ConvProblem) -> None:
    x, w = inputs(p)
    y = KERNELS["filter_pq"](p, x, w)
    y[0, 0, 0, 0], y[1, 1, 2, 3] = np.nan, 9
    found = explain(x, w, y)
    assert (found.mistake, found.rest, found.worst[0]) == ("filter_pq", 2, (0, 0, 0, 0))
    assert "(but for 2 elements)" in found.lines()[1]
    assert found.as_data()["worst"]["got"] is None


@each_problem
def test_right_outputs_and_less_precise_ones(p: ConvProblem) -> None:
    x, w, exact = right(p)
    found = explain(x, w, exact)
    assert (found.wrong, found.lines(), found.as_data()["map"]) == (0, [], [])
    y = reference.convolve(x.astype(np.float16), w.astype(np.float16)).astype(np.float32)
    half = explain(x, w, y)
    assert half.wrong == 0 or half.mistake == ROUNDED and "half precision" in half.sentence


@each_problem
@pytest.mark.parametrize("bits", [8, 11])
def test_sums_and_truncated_factors_of_few_bits_are_less_precise(bits: int, p: ConvProblem) -> None:
    def shortened(a: np.ndarray, how: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
        fraction, exponent = np.frexp(a)
        return np.asarray(np.ldexp(how(np.ldexp(fraction, bits)), exponent), np.float32) / np.float32(2**bits)

    x, w = inputs(p)
    cut = Kernel("")(p, shortened(x, np.trunc), shortened(w, np.trunc))
    pixels = np.lib.stride_tricks.sliding_window_view(x, w.shape[2:], (2, 3)).transpose(0, 2, 3, 1, 4, 5)
    sums = np.zeros(p.y_shape, np.float32)
    for tap, pixel in zip(w.reshape(len(w), -1).T, np.moveaxis(pixels.reshape(*pixels.shape[:3], -1), -1, 0)):
        sums = shortened(sums + shortened(tap[:, None, None] * pixel[:, None], np.rint), np.rint)
    words = {8: "bfloat16", 11: "half precision"}[bits]
    assert [words in explain(x, w, y).sentence for y in (cut, sums)] == [True, True]


@pytest.mark.parametrize("p", [*PROBLEMS, ConvProblem(2, 12, 33, 33, 4, 7)], ids=str)
def test_an_offset_and_a_missing_product_are_no_rounding(p: ConvProblem) -> None:
    x, w, y = right(p)
    few = w.copy()
    few[:, 0, 0, 1] = 0
    assert explain(x, w, y + np.float32(1), BEFORE).mistake != ROUNDED
    if p.products < 200:  # one of 588 products is as small as the errors of bfloat16's sums
        assert explain(x, w, Kernel("")(p, x, few), BEFORE).mistake != ROUNDED


@pytest.mark.parametrize("zeros", [False, True], ids=["reads on", "a tile with zeros"])
def test_threads_beyond_a_rows_end_are_found_whoever_wins_the_race(zeros: bool) -> None:
    p, rng = PROBLEMS[1], np.random.default_rng(0)
    x, w, y = right(p)
    flat, rows = np.pad(x, ((0, 0), (0, 0), (0, 1), (0, 0))), y.reshape(-1, p.output_width)
    if zeros:
        x_rows = np.pad(x, ((0, 0), (0, 0), (0, 0), (0, p.kernel)))
    for row, (b, m, i) in enumerate(np.ndindex(p.batch, p.filters, p.output_height)):
        for j in range(p.kernel - 1):
            if row + 1 == len(rows) or rng.random() < 0.5:
                continue
            start = p.output_width + j
            if zeros:
                taken = x_rows[b, 0, i : i + p.kernel, start : start + p.kernel]
            else:
                taken = [flat[b, 0].reshape(-1)[(i + r) * p.width + start :][: p.kernel] for r in range(p.kernel)]
            rows[row + 1, j] = (np.array(taken) * w[m, 0]).sum()  # behind the last row of a map, the next map's
    found = explain(x, w, y)
    assert found.mistake == "loops_to_w" and not found.rest
    assert found.counts[:, p.kernel :].sum() == 0


def test_without_a_mistake_it_says_where_the_wrong_elements_are() -> None:
    x, w, y = right(PROBLEMS[1])
    y[1, :, 3::8, 5::8] += 1
    found = explain(x, w, y, BEFORE)
    assert (found.sentence, found.wrong) == ("", found.counts.sum())
    assert "The wrong elements repeat every 8 rows and columns: row 3 of 8, column 5 of 8" in found.lines()
    assert "Only image 1 of 3: 54 elements" in found.lines()
    legend = "Each character is 2 x 1 elements of all images and filters: . is right, 1 to 9 are the wrong ninths."
    assert found.lines()[3:] == [legend, *found.map(12, 48)]
    assert legend.replace("2 x 1 elements", "an element") in found.lines(*found.counts.shape)
    assert found.map()[3] == ".....3.......3.......3.."
    assert [len(line) for line in found.map(12, 12)] == [12] * 12
    assert found.as_data()["map"] == found.map()


def test_filters_copied_by_a_number_of_elements_are_told() -> None:
    for p in PROBLEMS:
        x, w = inputs(p)
        read = w.copy()
        read.reshape(-1)[w.size // 4 :] = 0
        found = explain(x, w, Kernel("")(p, x, read), BEFORE)
        assert (found.mistake, found.rest) == ("copied_bytes", 0)


def test_blocks_that_are_missing_are_told() -> None:
    x, w, y = right(PROBLEMS[1])
    y[:, :, 8:, 16:] = y[:, :, 20:, :9] = BEFORE
    found = explain(x, w, y, BEFORE)
    assert "Your code does not write these elements: are there enough blocks?" in found.lines()
    assert not found.written and "not written, expected" in found.lines()[0]


def test_written_values_that_y_held_before_are_explained() -> None:
    for x, w, y in map(right, PROBLEMS):
        assert explain(x, w, np.maximum(y, 0), 0).mistake == "activated"


@pytest.mark.parametrize("name", ["filter_pq", "column_loop", "w_filter"])
def test_a_mistake_in_half_precision_is_found(name: str) -> None:
    for p in PROBLEMS:
        x, w = (array.astype(np.float16) for array in inputs(p))
        found = explain(*inputs(p), KERNELS[name](p, x, w), BEFORE)
        assert (found.mistake, found.sentence.endswith(", in half precision (fp16) or TF32")) == (name, True)


@pytest.mark.parametrize("axes", [(0, 1, 2, 3), (1, 2, 3), (2, 3), (3,)])
def test_sums_that_are_not_reset_are_found_behind_outputs_of_0(axes: tuple[int, ...]) -> None:
    for p in PROBLEMS:
        x, w = inputs(p)
        x[..., : p.kernel + 1] = 0  # as the border of a picture
        y = Kernel("")(p, x, w)
        sums = np.cumsum(y.reshape(*y.shape[: axes[0]], -1), -1, np.float32).reshape(y.shape)
        assert explain(x, w, sums, BEFORE).mistake == "sum"


def test_a_single_wrong_output_is_no_sum_that_is_not_reset() -> None:
    for x, w, y in map(right, PROBLEMS):
        y.flat[-1] += y.flat[0]
        assert not explain(x, w, y, BEFORE).mistake


@pytest.mark.parametrize("share", [0.001, 0.005, 0.02])
def test_a_constant_that_is_added_is_no_mistake_in_half_precision(share: float) -> None:
    for p in PROBLEMS:
        x, w = (np.abs(array) for array in inputs(p))
        y = Kernel("")(p, x, w)
        assert explain(x, w, y + share * y.mean(), BEFORE).mistake in ("", ROUNDED)
        y[:, 0] += share * y.mean()
        assert explain(x, w, y, BEFORE).mistake in ("", ROUNDED)


def test_many_missing_rows_are_no_partial_tile() -> None:
    x, w, y = right(ConvProblem(1, 1, 64, 64, 2, 5))
    y[:, :, 16:] = BEFORE
    assert explain(x, w, y, BEFORE).sentence == "Your code does not write rows 16 to 59 of 60"


def test_few_elements_that_are_right_are_not_called_unwritten() -> None:
    x, w, exact = right(PROBLEMS[1])
    y = np.full_like(exact, BEFORE)
    y[:, :, :6, :7] = exact[:, :, :6, :7]
    found = explain(x, w, y, BEFORE)
    assert "does not write rows 6 to 23 of 24 and columns 7 to 23 of 24" in found.sentence
    y[0, 0, 5, 6] += 1  # the worst is one that was written
    found = explain(x, w, y, BEFORE)
    assert (found.rest, found.worst[0], found.written) == (1, (0, 0, 5, 6), True)


@pytest.mark.parametrize(
    ("missing", "first", "where"),
    [([0], 7, "image 7 of 19 (and maybe more)"), ([2, 3], 0, "images 2 to 3 of 19 (and maybe more)"),
     ([1, 2, 3], 15, "images 16 to 18 of 19"), ([3], 15, "the last image"), ([0, 1, 2, 3], 0, "any element of y"),
     ([0, 1, 2, 3], 15, "images 15 to 18 of 19 (and maybe more)")],
)  # fmt: skip
def test_images_that_are_missing_have_their_numbers_in_the_whole_batch(missing, first, where) -> None:
    x, w, y = right(ConvProblem(4, 2, 9, 8, 3, 3))
    y[missing] = BEFORE
    assert explain(x, w, y, BEFORE, part_of=(first, 19)).sentence == f"Your code does not write {where}"


@pytest.mark.parametrize(("first", "said"), [(0, "any element of y"), (1, "images 1 to 4 of 1000 (and maybe more)")])
def test_elements_of_sparse_images_that_are_right_are_not_called_written(first: int, said: str) -> None:
    rng = np.random.default_rng(2)
    x, w = rng.standard_normal((4, 1, 12, 12), np.float32), rng.standard_normal((3, 1, 3, 3), np.float32)
    x[0, 0, :, 3:] = x[1, 0, 4:] = 0
    found = explain(x, w, np.zeros((4, 3, 10, 10), np.float32), part_of=(first, 1000))
    assert found.sentence == f"Your code does not write {said}"


# Without its last channel, the convolution of one has zeros alone.
@pytest.mark.parametrize(("channels", "value"), [(1, "0"), (3, "0"), (3, "7"), (3, "0.5"), (1, "inf"), (1, "-0")])
def test_one_value_but_for_a_few_elements_is_no_other_mistake(channels: int, value: str) -> None:
    x, w = inputs(p := ConvProblem(2, channels, 9, 9, 3, 3))
    y = np.full(p.y_shape, value, np.float32)
    y[:, 1, 0, 0] = 9
    assert explain(x, w, y, BEFORE).summary == f"Your output is {value.lstrip('-')} everywhere (but for 2 elements)"
    y[..., ::2] = BEFORE
    assert f"Your output is {value.lstrip('-')} where it is written" in explain(x, w, y, BEFORE).summary


def test_noise_is_not_explained() -> None:
    for p in (*PROBLEMS, ConvProblem(1, 3, 7, 9, 2, 1), ConvProblem(2, 2, 5, 5, 3, 5), ConvProblem(1, 2, 4, 9, 3, 4)):
        x, w = inputs(p)
        noise = np.random.default_rng(1).standard_normal(p.y_shape).astype(np.float32)
        assert explain(x, w, noise, BEFORE).sentence == ""
        assert explain(x, w, noise * 0).mistake == "nothing_written"
        assert explain(x, w, noise * 0, BEFORE).mistake == "zeros"
        assert explain(x, w, noise * np.float32(1e30), BEFORE).mistake == ""


CODE = """// float acc = 0; y[b][m] += k[m][c][q][p]
for (int m = 0; m < M; m++)
  for (int c = 1; c < C; c++) {
    float acc = 0;
    for (int r = 0; r < K; r++)
      for (int s = 0; s < K - 1; s++)
        acc += x4d(b, c, h + r, w + s) * k4d(m, c, s, r);
    y4d(b, m, h, w) += acc;
  }
"""


@pytest.mark.parametrize(("name", "line"), [("accumulated", 8), ("sum", 4), ("flipped", None)])
def test_the_line_of_a_mistake_is_found_in_the_source(name: str, line: int | None) -> None:
    p = PROBLEMS[0]
    x, w = inputs(p)
    found = explain(x, w, KERNELS[name](p, x, w), BEFORE, CODE)
    assert (found.mistake, found.line) == (name, line)
    assert found.lines()[-1].endswith(f": see line {line}." if line else ".")

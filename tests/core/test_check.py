"""The comparison itself, with outputs that are wrong on purpose."""

import numpy as np
import pytest

from ece408_op.core import check, reference
from ece408_op.core.check import compare
from ece408_op.core.kernel import float32_bound, reduced_precision_bound
from ece408_op.kernels import KERNELS
from ece408_op.kernels.cpu import im2col
from ece408_op.kernels.cuda import cudnn
from ece408_op.problem import ConvProblem

KERNEL = im2col.KERNEL


@pytest.fixture
def case():
    random = np.random.RandomState(0)
    x, w = random.randn(6, 2, 9, 8).astype(np.float32), random.randn(3, 2, 3, 3).astype(np.float32)
    return x, w, reference.convolve(x, w).astype(np.float32)


def test_the_rounded_exact_result_passes(case):
    x, w, out = case
    found = compare(out, x, w, KERNEL)
    assert (found.passed, found.compared) == (True, out.size)
    assert 0 < found.scaled < 2.0**-24


@pytest.mark.parametrize("value", [100.0, np.nan, np.inf, -np.inf])
def test_one_wrong_element_is_named_with_both_values(case, value):
    x, w, out = case
    expected = float(out[4, 1, 2, 3])
    out[4, 1, 2, 3] = value
    found = compare(out, x, w, KERNEL)
    assert (found.passed, found.index, found.wrong) == (False, (4, 1, 2, 3), 1)
    assert (found.got, found.expected) == pytest.approx((value, expected), rel=1e-6, nan_ok=True)
    assert (found.worst == np.inf) == (value != 100)
    assert "[4, 1, 2, 3]" in str(found) and "WRONG" in str(found)


def test_an_error_just_above_the_bound_is_wrong_and_just_below_is_right(case):
    x, w, out = case
    exact, size = reference.convolve(x, w), reference.magnitude(x, w)
    allowed = KERNEL.error_bound(ConvProblem.from_shapes(x.shape, w.shape)) * size[0, 0, 0, 0]
    wider = out.astype(np.float64)
    wider[0, 0, 0, 0] = exact[0, 0, 0, 0] + 1.01 * allowed
    assert compare(wider, x, w, KERNEL).wrong == 1
    wider[0, 0, 0, 0] = exact[0, 0, 0, 0] + 0.99 * allowed
    assert compare(wider, x, w, KERNEL).passed


def test_infinities_must_have_their_sign(case):
    x, w, out = case
    w[0] = np.abs(w[0])
    x[0, 0, 4, 4] = np.inf
    out = reference.convolve(x, w).astype(np.float32)
    assert compare(out, x, w, KERNEL).passed
    out[0, 0] = np.where(out[0, 0] == np.inf, -np.inf, out[0, 0])
    assert compare(out, x, w, KERNEL).wrong == 9


def of_reference(out, x, w, kernel, images):
    return check.Reference(x, w, images).compare(out, kernel)


@pytest.mark.parametrize("compare", [compare, of_reference])
@pytest.mark.parametrize(("operand", "index"), [(0, (2, 1, 4, 4)), (1, (0, 1, 1, 1))], ids=["x", "w"])
def test_infinities_of_images_that_are_not_compared_are_right_where_an_operand_has_them(case, compare, operand, index):
    operands = case[:2]
    operands[operand][index] = np.inf
    out = reference.convolve(*operands).astype(np.float32)
    assert not np.isfinite(out[2]).all()
    found = compare(out, *operands, KERNEL, images=2)
    assert (found.passed, found.not_finite_elsewhere, found.compared) == (True, 0, out.size // 3)


@pytest.mark.parametrize("compare", [compare, of_reference])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("pixel", [1, np.inf])
@pytest.mark.parametrize("step", [check.STEP_BYTES, 1], ids=["one group of images", "groups"])
def test_a_value_that_is_no_number_is_found_in_an_image_that_is_not_compared(
    case, compare, value, pixel, step, monkeypatch
):
    monkeypatch.setattr(check, "STEP_BYTES", step)
    x, w, _ = case
    x[2, 1, 4, 4] = pixel  # of another image
    out = reference.convolve(x, w).astype(np.float32)
    out[3, 1, 1, 1] = value
    found = compare(out, x, w, KERNEL, images=2)
    assert (found.passed, found.wrong, found.not_finite_elsewhere, found.scaled) == (False, 0, 1, np.inf)
    assert found.compared == out.size // 3


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_sum_that_passes_float32s_range_on_the_way_may_end_as_no_number(value):
    x, w = np.full((1, 2, 1, 1), 3e38, np.float32), np.array([[[[1]], [[-1]]], [[[0.5]], [[-0.5]]]], np.float32)
    out = np.zeros((1, 2, 1, 1), np.float32)
    out[0, 0] = value
    assert compare(out, x, w, KERNEL).passed
    out[0, 1] = value  # both products and their sums are in range
    found = compare(out, x, w, KERNEL)
    assert (found.index, found.wrong) == ((0, 1, 0, 0), 1)


def test_an_error_within_the_bound_may_pass_float32s_range():
    x, w = np.full((1, 1, 1, 1), 3.4027e38, np.float32), np.ones((1, 1, 1, 1), np.float32)
    out = np.full_like(x, np.inf)
    exact = check.Reference(x, w)
    assert exact.compare(out, bound=2.0**-11).passed
    assert not exact.compare(out).passed  # float32 rounds no product of these beyond its range


def test_an_infinite_pixel_does_not_excuse_a_transforms_other_elements(case):
    x, w, _ = case
    x[3, 0, 0, 0] = np.inf
    out = reference.convolve(x, w).astype(np.float32)
    assert compare(out, x, w, cudnn.KERNEL).passed
    out[3, 1, 5, 4] += 1
    found = compare(out, x, w, cudnn.KERNEL)
    assert (found.index, found.wrong) == ((3, 1, 5, 4), 1)


@pytest.mark.parametrize("place", [0, 5])
def test_a_sample_compares_first_and_last(case, place):
    x, w, out = case
    out[place] += 1
    assert not compare(out, x, w, KERNEL, images=2).passed


@pytest.mark.parametrize("images", [None, 4])
def test_groups_of_images_are_found_as_one(case, images, monkeypatch):
    x, w, out = case
    out[2, 1, 1, 1] = 100
    out[5, 2, 3, 4] = 1000
    whole = check.Reference(x, w, images).compare(out, KERNEL)
    assert (whole.index, whole.wrong) == ((5, 2, 3, 4), 2)
    sizes, convolve = [], reference.convolve
    monkeypatch.setattr(check, "STEP_BYTES", 2 * 8 * (w[0].size + len(w)) * out[0, 0].size)
    monkeypatch.setattr(reference, "convolve", lambda x, *rest: sizes.append(len(x)) or convolve(x, *rest))
    assert compare(out, x, w, KERNEL, images) == whole
    assert set(sizes) == {2}


def test_shapes_that_do_not_fit_are_refused(case):
    x, w, out = case
    with pytest.raises(ValueError, match=r"expected shape \(6, 3, 7, 6\)"):
        compare(out[:, :2], x, w, KERNEL)


def test_agreement_of_classes():
    assert check.agreement(np.array([1, 2, 3, 4]), np.array([1, 2, 0, 4])) == 0.75
    for others in (np.array([1]), np.array([], int)):
        with pytest.raises(ValueError, match="as many"):
            check.agreement(others[:0], others)


@pytest.mark.parametrize(("factor", "right"), [(0.9, True), (1.1, False)])
def test_a_transform_errs_by_a_share_of_the_largest_value_in_its_map(case, factor, right):
    x, w, _ = case
    x[:, :, :5] = 0
    x[3] *= 1e6  # other images have no part in it
    out = reference.convolve(x, w).astype(np.float32)
    assert (out[2, 1, 0] == 0).all()
    share = cudnn.KERNEL.error_bound(ConvProblem.from_shapes(x.shape, w.shape))
    size = sum(np.abs(x[2, c]).max() * np.abs(w[1, c]).sum() for c in range(2))
    out[2, 1, 0, 0] = factor * share * size
    assert compare(out, x, w, cudnn.KERNEL).passed is right
    assert not compare(out, x, w, KERNEL).passed
    assert (compare(out, x, w, cudnn.KERNEL).scaled <= share) is right


@pytest.fixture
def weight_gradient():
    random = np.random.RandomState(0)
    problem = ConvProblem(6, 3, 9, 8, 4, 3).weight_gradient
    return *(random.randn(*shape).astype(np.float32) for shape in problem.shapes[:2]), problem


@pytest.mark.parametrize("operand", [0, 1])
def test_infinities_of_filters_and_channels_that_are_not_compared_are_right_where_an_operand_has_them(
    weight_gradient, operand
):
    *operands, problem = weight_gradient
    operands[operand][4, 1, 4, 4] = np.inf
    out = reference.convolve(*operands, problem).astype(np.float32)
    assert not np.isfinite(out[1:3, 1]).all()
    assert np.isfinite(out[[0, 3]][:, [0, 2]]).all()
    found = check.Reference(*operands, 2, problem).compare(out)
    assert (found.passed, found.not_finite_elsewhere, found.compared) == (True, 0, 36)


def test_a_weight_gradient_is_compared_as_a_whole(weight_gradient):
    *operands, problem = weight_gradient
    out = reference.convolve(*operands, problem).astype(np.float32)
    out[1, 1, 1, 1] += 1
    found = compare(out, *operands, KERNEL, images=2, problem=problem)
    assert (found.index, found.wrong, found.compared) == ((1, 1, 1, 1), 1, out.size)


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("kind", ["data_gradient", "weight_gradient"])
def test_a_wrong_element_of_a_gradient_is_found_and_named(kind, groups):
    problem = getattr(ConvProblem(5, 4, 8, 9, 5 * groups, 3, stride=(2, 1), pad=(1, 0), groups=groups), kind)
    random = np.random.RandomState(0)
    a, b = (random.randn(*shape).astype(np.float32) for shape in problem.shapes[:2])
    right, compare = reference.convolve(a, b, problem).astype(np.float32), check.Reference(a, b, 2, problem).compare
    assert compare(right).scaled <= float32_bound(problem)
    right[4, -1, 2, 0] += 1
    assert compare(right).scaled > float32_bound(problem)
    assert f"worst element [4, {right.shape[1] - 1}, 2, 0]: " in str(compare(right))


def test_no_bound_of_a_longer_sum_is_smaller_and_none_is_negative():
    layer = ConvProblem(1, 2, 3, 3, 4, 1)
    bounds = {kernel.error_bound for kernel in KERNELS if not kernel.not_supported_reasons(layer)}
    assert len(bounds) >= 5
    sizes = [2**n for n in range(10, 27, 2)]
    for bound in (*bounds - {cudnn.KERNEL.error_bound}, reduced_precision_bound(2.0**-11, 2.0**-11)):
        found = [bound(ConvProblem(1, channels, 1, 1, 1, 1)) for channels in sizes]
        assert found == sorted(found)
        assert found[0] > 0


@pytest.mark.parametrize("kind", ["convolution", "data_gradient", "weight_gradient"])
def test_an_empty_batch_has_an_empty_output_and_a_weight_gradient_of_zeros(kind):
    problem = getattr(ConvProblem(0, 2, 9, 8, 4, 3, groups=2), kind)
    first, second, out = (np.zeros(shape, np.float32) for shape in problem.shapes)
    exact = reference.convolve(first, second, problem)
    assert (exact.shape, exact.any()) == (out.shape, False)
    assert check.compare(out, first, second, KERNEL, problem=problem).passed

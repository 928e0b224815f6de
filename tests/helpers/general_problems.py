"""Hypothesis strategies: small convolutions with every attribute of MXNet's Convolution."""

from hypothesis import strategies as st

from ece408_op.problem import ATTRIBUTES, DILATE, GROUPS, PAD, RECTANGULAR, STRIDE, ConvProblem


@st.composite
def problems(draw, features=ATTRIBUTES, largest_extra=4, most_channels=2, sizes=(1, 2, 3, 4)):
    """Draw a convolution with attributes among ``features`` only.

    An image may be smaller than the padded filter, and a filter as large as the padded image. ``sizes`` are the sides
    of filters to draw from.
    """

    def pair(feature, least, most):
        sizes = st.integers(least, most)
        return draw(st.tuples(sizes, sizes)) if feature in features else (least, least)

    groups = draw(st.integers(1, 3)) if GROUPS in features else 1
    k = draw(st.sampled_from(sizes))
    kw = draw(st.sampled_from(sizes)) if RECTANGULAR in features else k
    stride, dilate, pad = pair(STRIDE, 1, 3), pair(DILATE, 1, 3), pair(PAD, 0, 3)
    least = [max(1, d * (size - 1) + 1 - 2 * p) for d, size, p in zip(dilate, (k, kw), pad)]
    h, w = (size + draw(st.integers(0, largest_extra)) for size in least)
    c, m = (groups * draw(st.integers(1, most_channels)) for _ in "cm")
    return ConvProblem(draw(st.integers(1, 3)), c, h, w, m, k, kw, stride, pad, dilate, groups)

"""Medians and their intervals, compared with the binomial distribution by counting all outcomes."""

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ece408_op.grade.medians import CONFIDENCE, summary


@given(st.lists(st.floats(0.001, 1000), min_size=1, max_size=40))
def test_the_median_lies_within_its_interval(samples):
    got = summary(samples)
    assert got.fastest <= got.low <= got.median <= got.high <= got.slowest
    assert got.count == len(samples)


@pytest.mark.parametrize("n", [1, 2, 5, 6, 8, 9, 12])
def test_the_confidence_is_that_of_all_outcomes(n):
    # Each sample lies below the true median or above it, like a coin: the interval misses where too few lie below or
    # above.
    got = summary(list(range(n)))
    k = int(got.low) + 1
    held = sum(k <= sum(coins) <= n - k for coins in product((0, 1), repeat=n))
    assert got.confidence == pytest.approx(held / 2**n)
    assert got.confidence >= CONFIDENCE or (got.low, got.high) == (got.fastest, got.slowest)


def test_nothing_has_no_median():
    with pytest.raises(ValueError, match="at least one"):
        summary([])

"""A C function called for each row of numbers."""

import ctypes

import numpy as np
import pytest

from ece408_op.runtime import c_calls


@pytest.mark.parametrize("result", [0, 1, -1, -(2**31)])
def test_every_row_is_called_with_its_numbers_and_any_result_counts(result):
    called = []
    kind = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64)
    function = kind(lambda *numbers: called.append(numbers) or (result if len(called) == 2 else 0))
    rows = np.array([[1, 2, 3], [-4, 2**62, 6], [7, 8, -(2**63)]], np.int64)
    assert c_calls.any_nonzero(c_calls.address_of(function), rows) == (result != 0)
    assert called == [tuple(row) for row in rows.tolist()]


def test_no_rows_are_no_calls():
    assert not c_calls.any_nonzero(0, np.empty((0, c_calls.ARGUMENTS), np.int64))

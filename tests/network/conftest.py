"""The ways that tests of training compute."""

import pytest
from network_case import WAYS, computing


@pytest.fixture(params=WAYS[:2])
def way(request):
    """Compute on NumPy in place of CuPy, and on a GPU."""
    with computing(request.param):
        yield request.param

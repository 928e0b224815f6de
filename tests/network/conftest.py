"""Where the tests of networks compute: on NumPy in place of CuPy, and on a GPU."""

import gc

import network_fake
import pytest
from network_case import WAYS, computing, require_gpus


@pytest.fixture(params=WAYS[:2])
def way(request):
    """Compute on NumPy in place of CuPy, and on a GPU."""
    with computing(request.param):
        yield request.param
    network_fake.forget()


@pytest.fixture
def two_gpus(way):
    """Compute on NumPy in place of CuPy, and on GPUs where there are two."""
    require_gpus(way, 2)


@pytest.fixture
def no_collection():
    """Have no garbage collected: what has ended frees its memory without."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()

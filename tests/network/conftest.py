"""Where the tests of networks compute: on NumPy in place of CuPy, and on a GPU."""

import gc

import network_fake
import pytest
from gpu_case import require_gpu
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
    require_gpus("none" if way == "numpy" else "gpu", 2)


@pytest.fixture
def no_collection():
    """Have no garbage collected: what has ended frees its memory without."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.fixture(params=["none", pytest.param("gpu", marks=pytest.mark.gpu)])
def gpu(request):
    """Run the test on NumPy in place of CuPy, or on the GPU."""
    if request.param == "none":
        with network_fake.installed():
            yield request.param
    else:
        require_gpu()
        yield request.param
        network_fake.forget()

"""The network that sanitize.py runs under compute-sanitizer, with NumPy in place of CuPy."""

import numpy as np
import sanitize
from network_fake import installed


def test_its_network_is_right():
    with installed():
        assert sanitize.network_is_right(np.random.default_rng(0))

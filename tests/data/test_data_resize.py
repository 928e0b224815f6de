"""The resize is scikit-image's, bit by bit; versions before 0.19.3 compute other pixels."""

from __future__ import annotations

import hashlib
import os
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ece408_op.data import find_test, sample
from ece408_op.data.resize import resize

#: SHA-256 of 10,000 resized images, by set and size. Every image was compared with scikit-image's (0.24 with SciPy 1.15
#: and NumPy 1.23; 0.26 with SciPy 1.18 and NumPy 2.5): no pixel differed.
WHOLE = {
    ("real", 64): "4f74220d71aa835c1b355d6e31ff4b5ff63d1ec1029ba7a60b40f2d41ed35a0f",
    ("real", 72): "332fb1b2459e84df2ef888ca6ad4661958171149cff02457b8423530a423a6b3",
    ("sample", 64): "9b6fe4135f46c78fb7ef4cd9dca62e1e9b88c10fd4f0dff206754474869c01be",
    ("sample", 72): "21c1d2dbf7702c7e9d13e8b137d9b6cea8f22425128d3f4a93a14e819d96662f",
}


@pytest.fixture(scope="module")
def transform() -> Any:
    """scikit-image's module."""
    return pytest.importorskip("skimage.transform", reason="scikit-image is the reference")


def by_scikit_image(transform: Any, images: np.ndarray, size: int) -> np.ndarray:
    def one(image: np.ndarray) -> np.ndarray:
        return transform.resize(image / 256, (size, size), mode="constant", cval=0, anti_aliasing=False) * 256

    return np.stack([one(image) for image in images]).astype(np.uint8)


@settings(max_examples=60)
@given(
    size=st.integers(1, 200),
    height=st.integers(1, 40),
    width=st.integers(1, 40),
    low=st.integers(0, 255),
    seed=st.integers(0, 2**32 - 1),
)
@example(size=64, height=28, width=28, low=0, seed=0)
@example(size=72, height=28, width=28, low=100, seed=1)  # no zero in the image: the clip at its least value
@example(size=29, height=28, width=28, low=255, seed=2)  # rounding may not carry white beyond 255, nor below it
def test_equals_scikit_image(transform: Any, size: int, height: int, width: int, low: int, seed: int) -> None:
    images = np.random.RandomState(seed).randint(low, 256, (3, height, width)).astype(np.uint8)
    np.testing.assert_array_equal(resize(images, size), by_scikit_image(transform, images, size))


@pytest.mark.parametrize(("source", "size"), WHOLE)
def test_whole_set(source: str, size: int) -> None:
    if source == "real" and "ECE408_DATA" not in os.environ:
        pytest.skip("needs the real Fashion-MNIST in ECE408_DATA")
    images = find_test().images if source == "real" else sample.generate()[0]
    assert hashlib.sha256(resize(images, size)).hexdigest() == WHOLE[source, size]

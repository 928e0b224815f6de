"""The sample set follows the real one, and has a sound model; ``generate`` itself compares the images' checksum."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from ece408_op.data import load_training, sample
from ece408_op.errors import DataError


def test_sample_follows_the_real_means() -> None:
    """Mean image of each class, against the training set's; clipping at 0 and 255 moves it a little."""
    if "ECE408_DATA" not in os.environ:
        pytest.skip("needs the real Fashion-MNIST in ECE408_DATA")
    training = load_training()
    images, labels = sample.generate()
    for label in range(10):
        real, drawn = training.images[training.labels == label].mean(axis=0), images[labels == label].mean(axis=0)
        assert np.corrcoef(real.ravel(), drawn.ravel())[0, 1] > 0.99


@pytest.mark.parametrize("content", [None, b"", b"PK\x03\x04 cut short", b"no zip file"])
def test_damaged_model_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes | None) -> None:
    monkeypatch.setattr(sample, "MODEL", tmp_path / "model.npz")
    if content is not None:
        sample.MODEL.write_bytes(content)
    with pytest.raises(DataError, match=r"model.npz: expected the sample set's model, cannot read it"):
        sample.generate()


def test_another_model_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with np.load(sample.MODEL, allow_pickle=False) as arrays:
        model = {name: arrays[name].copy() for name in arrays}
    model["mean"][0, 400] += 64
    monkeypatch.setattr(sample, "MODEL", tmp_path / "model.npz")
    np.savez(sample.MODEL, **model)
    with pytest.raises(DataError, match=r"model.npz: expected a model whose images have the SHA-256"):
        sample.generate()

"""The course's own measure: a trained network's accuracy, with a submission's convolutions in it.

The networks are those of models/: conv, tanh, max-pooling 2 x 2, in 2018 a second conv, then two fully connected layers
with a tanh between. All but the convolutions is computed here, on whichever arrays come: NumPy's or CuPy's.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, lru_cache, reduce
from typing import Any

import numpy as np

from ece408_op.core.check import agreement
from ece408_op.data import TestSet, find_test, load_test
from ece408_op.errors import DataError
from ece408_op.models import files
from ece408_op.problem import NETS, Net

#: Which trained networks have a course's network's layers.
_TRAINED = {"2017": ("ece408-high", "ece408-low"), "2018sp": ("ece408-2018sp",), "2018fa": ("ece408-2018fa",)}
MOST = 10000  # images of the test set


@dataclass(frozen=True)
class CourseNet:
    """A trained network. ``filters`` has each convolution's, float32; ``connected`` pairs of weights and bias."""

    name: str
    test: TestSet  # the first images of the test set
    filters: tuple[np.ndarray, ...]
    connected: tuple[tuple[np.ndarray, np.ndarray], ...]

    @staticmethod
    def after(convolution: int, y: Any) -> Any:
        """Return the next layer's input from that convolution's output (B, M, H, W), float32: the first is pooled."""
        if convolution > 0:
            return y
        rows, columns = y.shape[2] // 2 * 2, y.shape[3] // 2 * 2
        corners = (y[:, :, i:rows:2, j:columns:2] for i in range(2) for j in range(2))
        return np.tanh(reduce(np.maximum, corners))  # tanh grows with its argument: the largest may be found first

    def labels(self, values: Any, xp: Any = np) -> np.ndarray:
        """The classes, (B,), for what follows the last convolution, an array of the module ``xp``."""
        values = values.reshape(len(values), -1)
        for number, (weight, bias) in enumerate(self.connected):
            values = np.tanh(values) if number else values
            values = values @ xp.asarray(weight).T + xp.asarray(bias)
        found = values.argmax(axis=1)
        return np.asarray(found if xp is np else found.get())

    def compare(self, got: np.ndarray, exact: np.ndarray) -> dict[str, Any]:
        """For the record: the shares of the classes got that are right, and that exact convolutions give."""
        shares = {"accuracy": agreement(got, self.test.labels), "agreement": agreement(got, exact)}
        return {"model": self.name, "images": len(got), "source": self.test.source, **shares}


@lru_cache(maxsize=16)
def trained(net: Net, images: int) -> tuple[CourseNet, ...]:
    """The trained networks that have these layers; none for more images than there are, or with a broken test set."""
    if net not in NETS or images > MOST:  # of the grader's own networks, and of 2019's, no weights are known
        return ()
    try:
        test = load_test(net.layers[0][1], images, found=_found())
    except DataError:
        return ()
    nets = []
    for name in _TRAINED[net.name]:
        known = {key: np.array(value, np.float32) for key, value in files.read_weights(files.find(name)).items()}
        filters = tuple(known[f"new{number}_weight"] for number in range(len(net.layers)))
        connected = ((known[f"fullyconnected{n}_weight"], known[f"fullyconnected{n}_bias"]) for n in range(2))
        nets.append(CourseNet(name, test, filters, tuple(connected)))
    return tuple(nets)


_found = cache(find_test)

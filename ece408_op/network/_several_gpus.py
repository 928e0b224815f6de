"""A network on several GPUs of one host: each computes an equal share of the images, in a thread of its own."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ece408_op.errors import DeviceError, ProblemError
from ece408_op.runtime.thread_pool import share

from .engine import Engine


class SeveralGpus:
    """Engines of one network on different GPUs, in the order in which they share the images."""

    def __init__(self, engines: Sequence[Engine], numbers: Sequence[int]) -> None:
        self._engines, self._numbers = engines, numbers

    def run(self, data: Sequence[np.ndarray], parameters: Sequence[int], outputs: Sequence[np.ndarray]) -> None:
        """Fill the outputs as ``Engine.run``; the results are in the order of the images.

        Raises ProblemError if the network does not compute each image by itself, and DeviceError, with the GPU's
        number, if one fails.
        """
        if not self._engines[0].divides([array.shape for array in data]):
            raise ProblemError(
                "device_ids: expected a network that computes each image by itself, with the images as the first axis "
                "of all data and outputs, got another one; pass one GPU"
            )
        images = len(data[0])
        edges = [images * part // len(self._engines) for part in range(len(self._engines) + 1)]
        shares = [slice(first, last) for first, last in zip(edges, edges[1:])]
        first, *others = (number for number, share in enumerate(shares) if share.start < share.stop)
        known = self._engines[first].sent
        #: What the first GPU computed with: other calls may change what it has at any time.
        used: list[Sequence[np.ndarray]] = []

        def run(engines: Sequence[int], checked: Sequence[np.ndarray]) -> None:
            """Have some of the GPUs compute; the first one alone compares the parameters, for all."""

            def work(part: int) -> None:
                number = engines[part]
                mine = shares[number]
                arrays = [x[mine] for x in data], parameters, [y[mine] for y in outputs]
                try:
                    if number == first:
                        used.append(self._engines[number].run(*arrays))
                    else:
                        self._engines[number].run(*arrays, checked)
                except DeviceError as error:
                    raise DeviceError(f"GPU {self._numbers[number]}: {error}") from error

            share(work, len(engines), len(engines))

        run([first, *others] if known or not parameters else [first], known)
        if used[0] is not known:
            run(others, used[0])

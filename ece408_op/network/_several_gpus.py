"""A network on several GPUs of one host: their shares, each in its own thread, differ by at most one image."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from ece408_op.errors import DeviceError, ProblemError
from ece408_op.runtime.thread_pool import share

from .engine import Engine, sharing


def shares(engine: Engine, data: Sequence[np.ndarray], gpus: int) -> list[tuple[int, slice]]:
    """Return the place and the images of each GPU that gets some of a batch.

    Raises ProblemError if the network does not compute each image by itself.
    """
    if not engine.divides([array.shape for array in data]):
        raise ProblemError(
            "device_ids: expected a network that computes each image by itself, with the images as the first axis "
            "of all data and outputs, got another one; pass one GPU"
        )
    images = len(data[0])
    edges = [images * gpu // gpus for gpu in range(gpus + 1)]
    found = enumerate(map(slice, edges, edges[1:]))
    return [(gpu, mine) for gpu, mine in found if mine.start < mine.stop]


def on_each(work: Callable[[int], None], numbers: Sequence[int]) -> None:
    """Run work(0), work(1), ..., in a thread for each GPU; a DeviceError gets the number of its GPU, in ``numbers``."""

    def named(part: int) -> None:
        try:
            with sharing(len(numbers)):
                work(part)
        except DeviceError as error:
            raise DeviceError(f"GPU {numbers[part]}: {error}") from error

    share(named, len(numbers), len(numbers))


class SeveralGpus:
    """Engines of one network on different GPUs, in the order in which they share the images."""

    def __init__(self, engines: Sequence[Engine], numbers: Sequence[int]) -> None:
        self._engines, self._numbers = engines, numbers

    def run(
        self,
        data: Sequence[np.ndarray],
        parameters: Sequence[int],
        outputs: Sequence[np.ndarray],
        pinned: Sequence[bool] = (),
        meanwhile: Sequence[Callable[[], None]] = (),
    ) -> None:
        """Fill the outputs as ``Engine.run``; the results are in the order of the images.

        Raises ProblemError if the network does not compute each image by itself, and DeviceError, with the GPU's
        number, if one fails.
        """
        images = dict(shares(self._engines[0], data, len(self._engines)))
        first, *others = images
        known = self._engines[first].sent
        #: What the first GPU computed with: other calls may change what it has at any time.
        used: list[Sequence[np.ndarray]] = []

        def run(engines: Sequence[int], checked: Sequence[np.ndarray]) -> None:
            """Have some of the GPUs compute; the first one alone compares the parameters, for all."""

            def work(part: int) -> None:
                number = engines[part]
                mine = images[number]
                arrays = [x[mine] for x in data], parameters, [y[mine] for y in outputs], pinned
                if number == first:
                    used.append(self._engines[number].run(*arrays, meanwhile=meanwhile))
                else:
                    self._engines[number].run(*arrays, checked)

            on_each(work, [self._numbers[number] for number in engines])

        run([first, *others] if known or not parameters else [first], known)
        if others and used[0] is not known:
            run(others, used[0])

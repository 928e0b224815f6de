"""About how long the benchmark takes on a CPU, from the layers' rooflines: said before it starts."""

from __future__ import annotations

import math
from collections.abc import Iterable

from ece408_op.core.roofline import Ceilings
from ece408_op.problem import ITEM_BYTES, ConvProblem

from ._measure import SLOW
from .contestants import BUILT_IN, PYTORCH

#: Times the layer's roofline that a call takes, with fresh and with reused outputs, by contestant: rounded means
#: over the five layers on two cores, Zen 4 and Zen 5. Page faults make the first number vary from run to run.
_TIMES_ROOFLINE = {BUILT_IN: (9.0, 5.0), "New im2col": (12.0, 11.0), "New loops": (90.0, 90.0)}
_TIMES_ROOFLINE |= dict.fromkeys(PYTORCH, (9.0, 0.0))
_OUR_FASTEST = (4.0, 1.6)

#: Seconds to check one output: comparing some images with float64, and reading each byte of the others.
_COMPARE_SECONDS, _READ_SECONDS_PER_BYTE = 0.06, 0.25e-9


def seconds(
    problems: Iterable[ConvProblem], contestants: list[str], ceilings: Ceilings, repeats: int, budget: float
) -> float:
    """The predicted time for all contestants on all layers; ``repeats`` and ``budget`` are measure.measure's."""
    total = 0.0
    for problem in problems:
        roofline = ceilings.roofline_seconds(problem)
        check = _COMPARE_SECONDS + _READ_SECONDS_PER_BYTE * ITEM_BYTES * math.prod(problem.y_shape)
        for contestant in contestants:
            fresh, reused = (times * roofline for times in _TIMES_ROOFLINE.get(contestant, _OUR_FASTEST))
            calls = 1 if fresh > SLOW else math.ceil(min(repeats, budget / fresh))
            total += (calls + 1) * (fresh + reused) + calls * check * (2 if reused else 1)
    return total


def words(total: float) -> str:
    """The time in words, rounded up: "about 40 seconds", "about 3 minutes"."""
    if total > 90:
        return f"about {math.ceil(total / 60)} minutes"
    return f"about {10 * math.ceil(total / 10)} seconds" if total > 10 else "less than 10 seconds"

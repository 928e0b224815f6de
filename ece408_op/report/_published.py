"""The figures that the course's teams and staff published in their reports, on GPUs of 2016 to 2018.

Teams are named by their report's file. Times are seconds, one for each convolution of the network.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

#: Stands for the fastest float32 kernel that was timed here.
FASTEST = "the fastest float32 kernel"

TEAM_000 = "000_be7bedab9b82187a"
TEAM_001 = "001_82e85820b84ecd30"
TEAM_002 = "002_b0bcac5cefbf4480"
TEAM_003 = "003_f908eb42489cd140"
TEAM_004 = "004_752f999d3406bff0"

HIGH, LOW, SPRING, FALL = "ece408-high", "ece408-low", "ece408-2018sp", "ece408-2018fa"

TERMS = {"baseline": "2017 fall", HIGH: "2017 fall", LOW: "2017 fall", SPRING: "2018 spring", FALL: "2018 fall"}


def team(report: str, network: str) -> str:
    """A team's report with its term and network; the staff's figures are named as they are."""
    return f"{TERMS[network]}, {network}: report {report}" if report.startswith("0") else report


@dataclass(frozen=True)
class OpTimes:
    """Published Op Times of one kernel. ours: the kernel of this package that is like it; base: the published GPU
    kernel that the report started from, its times and the kernel here that is like it, if there was one."""

    report: str
    network: str
    images: int
    what: str
    seconds: tuple[float, ...]
    device: str
    ours: str
    base_seconds: tuple[float, ...] = ()
    base_ours: str = ""


_NAIVE_002 = {10_000: (0.355, 0.653), 100: (0.0033, 0.0067), 10: (0.00026, 0.00073)}
_CPU_002 = {10_000: (6.607, 19.537), 100: (0.0656, 0.1945), 10: (0.0066, 0.0195)}
_FIRST_003 = (2.868,)

OP_TIMES: Sequence[OpTimes] = (
    OpTimes(TEAM_000, HIGH, 10_000, "CPU", (18.19,), "cpu", "loops"),
    OpTimes(TEAM_000, LOW, 100, "CPU", (0.2013,), "cpu", "loops"),
    OpTimes(TEAM_000, HIGH, 10_000, "cuDNN's convolution", (0.0493,), "gpu", FASTEST),
    OpTimes(TEAM_001, FALL, 10_000, "CPU", (21.28, 101.22), "cpu", "loops"),
    *(
        OpTimes(TEAM_002, SPRING, images, "CPU", times, "cpu", "loops", _NAIVE_002[images], "naive")
        for images, times in _CPU_002.items()
    ),
    *(
        OpTimes(TEAM_002, SPRING, images, "GPU, first kernel", times, "gpu", "naive", times, "naive")
        for images, times in _NAIVE_002.items()
    ),
    OpTimes(TEAM_003, HIGH, 10_000, "CPU", (12.19,), "cpu", "loops", _FIRST_003, "naive_global_sum"),
    OpTimes(
        TEAM_003,
        HIGH,
        10_000,
        "GPU, first kernel",
        _FIRST_003,
        "gpu",
        "naive_global_sum",
        _FIRST_003,
        "naive_global_sum",
    ),
    OpTimes(TEAM_003, HIGH, 10_000, "GPU, last kernel", (0.0768,), "gpu", FASTEST, _FIRST_003, "naive_global_sum"),
    OpTimes(TEAM_003, LOW, 10_000, "GPU, last kernel", (0.0686,), "gpu", FASTEST, _FIRST_003, "naive_global_sum"),
    OpTimes(TEAM_004, HIGH, 10_000, "CPU", (12.21,), "cpu", "loops"),
    OpTimes(TEAM_004, LOW, 10_000, "CPU", (12.22,), "cpu", "loops"),
    OpTimes(TEAM_004, HIGH, 10_000, "GPU", (0.448,), "gpu", "naive_block1024"),
)


@dataclass(frozen=True)
class Step:
    """One rung of a ladder: from one kernel to the next, of the team (None: no figure published) and here."""

    what: str
    before: float | None
    after: float | None
    ours_before: str
    ours_after: str
    #: Which convolution, and images of each run.
    layer: int = 0
    images: int = 10_000


@dataclass(frozen=True)
class Ladder:
    """What a team changed, in order."""

    report: str
    network: str
    steps: tuple[Step, ...]


LADDERS: Sequence[Ladder] = (
    Ladder(
        TEAM_003,
        HIGH,
        (
            Step("the sum in a register instead of global memory", 2.87, None, "naive_global_sum", "naive"),
            Step("1024 threads in a row instead of 32 x 32", None, None, "naive", "naive_block1024"),
            Step(
                "filters and image tile in shared memory, with both rungs above",
                2.87,
                0.3,
                "naive_global_sum",
                "shared",
            ),
            Step(
                "one block an image instead of one an image and filter",
                0.448,
                0.2529,
                "naive_block1024",
                "naive_image_block",
            ),
            Step("an array of outputs in registers (did not fit there)", None, None, "shared", "register_tiled"),
            Step("inner loops unrolled, by hand or by a compile-time K", 0.203, 0.078, "constant", "unrolled"),
            Step("from the first to the last kernel", 2.868, 0.0768, "naive_global_sum", FASTEST),
        ),
    ),
    Ladder(
        TEAM_002,
        SPRING,
        (
            Step(
                "filters in constant memory, first layer, 100 images", 3.222e-3, 1.627e-3, "naive", "constant", 0, 100
            ),
            Step("shared memory and constant filters, first layer", 0.355, 2.12, "naive", "constant", 0),
            Step("shared memory and constant filters, second layer", 0.653, 0.329, "naive", "constant", 1),
            Step(
                "unrolled input and matrix product, one image a launch, first layer",
                0.355,
                3.25,
                "naive",
                "im2col_gemm_one",
                0,
            ),
            Step(
                "unrolled input and matrix product, one image a launch, second layer",
                0.653,
                0.358,
                "naive",
                "im2col_gemm_one",
                1,
            ),
        ),
    ),
)

#: Report, network, images, accuracy.
ACCURACIES = (
    ("the course, 2017", "baseline", 10_000, 0.8673),
    ("the course, 2017", HIGH, 10_000, 0.8562),
    ("the course, 2017", LOW, 10_000, 0.629),
    ("the course, 2017", HIGH, 2_000, 0.8625),
    ("the course, 2017", LOW, 2_000, 0.6275),
    (TEAM_000, HIGH, 10_000, 0.8562),
    (TEAM_000, LOW, 100, 0.63),
    (TEAM_001, FALL, 10_000, 0.8177),
    (TEAM_002, SPRING, 10_000, 0.8451),
    (TEAM_002, SPRING, 100, 0.88),
    (TEAM_002, SPRING, 10, 1.0),
    (TEAM_003, HIGH, 10_000, 0.8562),
    (TEAM_003, LOW, 10_000, 0.629),
    (TEAM_004, HIGH, 10_000, 0.8562),
    (TEAM_004, LOW, 10_000, 0.629),
)

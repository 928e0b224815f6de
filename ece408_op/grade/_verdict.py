"""The rules of a verdict: the runs of a layer, a network or a submission come in, a status with its reason goes out.

Nothing here runs a program or looks at an array. A new check is a fact that ``_rounds`` records in a Run, and a row of
VIOLATIONS or a rule of ``judge_layer`` here.
"""

from __future__ import annotations

import statistics
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from ece408_op.core.explain import Explanation
from ece408_op.problem import ConvProblem, Net
from ece408_op.submission import EndedError

from .medians import summary

#: The purpose of a run. The wide range tells TF32 from float16, whose numbers end at 65504; it speaks against nobody.
WARM_UP, POISONED, TIMED, NEAR_DUPLICATE, REAL_IMAGES = "warm-up", "poisoned", "timed", "near-duplicate", "real images"
WIDE_RANGE = "wide range"
#: The kinds of data, which ``_judge`` describes, and that of each run.
WHOLE, REAL, PICTURE, WIDE = "whole", "real", "picture", "wide"
KINDS = {WARM_UP: WHOLE, POISONED: WHOLE, TIMED: REAL, NEAR_DUPLICATE: REAL, REAL_IMAGES: PICTURE, WIDE_RANGE: WIDE}

PASSED = "passed"
STOPPED = "stopped"  # nothing speaks against the layer, but the network's run ended at another layer

#: Classes of an output. TRANSFORM is float32 by Winograd's or Fourier's transforms; TF32 and HALF have 11-bit factors
#: and float32 sums, HALF_SUMS has float16 sums.
FLOAT32, TRANSFORM, TF32, HALF, HALF_SUMS = "float32", "float32 by transforms", "tf32", "half", "half sums"
WRONG = "wrong"
#: From the finest to the coarsest.
PRECISIONS = (FLOAT32, TRANSFORM, TF32, HALF, HALF_SUMS)

#: Facts about one call that end the submission: status and reason.
VIOLATIONS = {
    "changed late": ("tampered", "the output changed after forward had returned: work was left behind"),
    "red zone": ("out_of_bounds", "it wrote outside its arrays, next to a first or last element"),
    "inputs": ("tampered", "it changed its input, which is const"),
    "replayed": ("tampered", "it gave the output of an earlier run again, though its inputs were others"),
}
#: A GPU takes its time to turn from the worker to the harness, 0.2 ms an H200, up to 0.2 ms more after long kernels.
#: Where it takes this much longer than after the worker's own zeros, it did other work first: the worker's, which was
#: not done when the answer came, or that of another program.
LATE_SECONDS = 3e-4
_APART = 8  # runs of one computation have largest errors that differ by less than this factor
FINAL = ("tampered", "unstable", "compile_error")  # these speak against a submission on whatever network they happen


@dataclass(frozen=True)
class Outcome:
    """One output compared with float64; its worst element is that of index (b, m, i, j)."""

    precision: str
    #: The largest error as a share of float32's bound at that element, and of the sum of |x||w| there.
    error_of_bound: float
    error: float
    index: tuple[int, ...]
    got: float
    expected: float
    wrong: int
    compared: int

    def __str__(self) -> str:
        if not self.wrong:
            return "its errors are larger than those of float16, so its products have fewer bits"
        text = f"{self.wrong} of {self.compared} elements differ ({100 * self.wrong / self.compared:.3g} %), worst "
        return f"{text}y{list(self.index)}: got {self.got:.7g}, expected {self.expected:.7g}"


@dataclass(frozen=True)
class Run:
    """One call of forward: its purpose, seconds by the harness's clock and by the worker's, and the output's class.

    ``unread_cuda_error`` is the CUDA error that forward left unread. ``late_seconds``, part of its seconds, is how long
    the GPU did work other than the harness's after the answer. ``explanation`` is that of some images of a wrong
    output.
    """

    purpose: str
    seconds: float
    worker_seconds: float
    outcome: Outcome
    unread_cuda_error: str = ""
    late_seconds: float = 0.0
    explanation: Explanation | None = None

    @property
    def wrong(self) -> bool:
        """Is the output wrong in every precision?"""
        return self.outcome.precision == WRONG

    def as_data(self) -> dict[str, Any]:
        data = {name: value for name, value in vars(self).items() if name not in ("outcome", "explanation")}
        return {**data, "verdict": self.outcome.precision, "error": self.outcome.error}


@dataclass(frozen=True)
class Verdict:
    """A status with its reason; the precision where it passed."""

    status: str
    reason: str = ""
    precision: str | None = None


@dataclass
class Layer:
    """One layer of a network: its runs and the verdict on them.

    Its times are those of an empty call, the layer's roofline and this package's kernel on the same device; None is
    unknown. ``held_up_seconds``: how long other programs delayed the GPU after the answers of a process without the
    submission.
    """

    problem: ConvProblem
    runs: list[Run] = field(default_factory=list)
    overhead_seconds: float = 0.0
    roofline_seconds: float | None = None
    own_kernel_seconds: float | None = None
    held_up_seconds: float = 0.0
    verdict: Verdict = Verdict(STOPPED)

    @property
    def certainly_wrong(self) -> bool:
        """Was it wrong on whole numbers and on others? Then no further run can change the verdict."""
        return any(run.purpose == TIMED for run in self.runs) and all(run.wrong for run in self.runs)

    @property
    def late_by(self) -> float:
        """The seconds that each of its timed answers was late at least; 0 if one of them may have been in time."""
        late = [run.late_seconds for run in self.runs if run.purpose == TIMED]
        # One late answer is no proof: the harness may have been held up itself.
        least = min(late) if len(late) > 1 else 0.0
        return least if least > self.held_up_seconds + LATE_SECONDS else 0.0

    @property
    def reduced(self) -> bool:
        """Is an output in half precision, but none wrong?"""
        classes = {run.outcome.precision for run in self.runs}
        return HALF in classes and WRONG not in classes

    def as_data(self) -> dict[str, Any]:
        images, *layer = self.problem.sizes.values()
        data: dict[str, Any] = {"layer": layer, "images": images, **asdict(self.verdict)}
        data.update({name: value for name, value in vars(self).items() if name.endswith("_seconds")})
        data["runs"] = [run.as_data() for run in self.runs]
        if self.runs:
            explained = _explained(self.runs)
            data.update(worst=asdict(worst(self.runs)), explanation=explained and explained.as_data())
        net = [max(0.0, run.seconds - self.overhead_seconds) for run in self.runs]
        timed = [seconds for seconds, run in zip(net, self.runs) if run.purpose == TIMED]
        if self.verdict.status == PASSED and timed:
            # The course called forward once per process, cold.
            data.update(seconds=asdict(summary(timed)), first_call_seconds=net[0])
        return data


def worst(runs: Sequence[Run]) -> Outcome:
    """The outcome with the largest error; a poisoned output's only where no other is wrong."""
    judged = [run for run in runs if run.purpose != WIDE_RANGE] or runs
    return max(judged, key=lambda run: (run.wrong, run.purpose != POISONED, run.outcome.error_of_bound)).outcome


def judge_network(layers: Sequence[Layer], half_passes: bool, end: EndedError | None = None, at: int = 0) -> None:
    """Give each layer its verdict; ``end``: the worker ended, or may not go on, at the layer of index ``at``."""
    for layer in layers:
        judged = end is None or any(run.wrong for run in layer.runs)
        layer.verdict = judge_layer(layer, half_passes) if judged else Verdict(STOPPED)
    # Wrong outputs before the end count first, unless it is tampering.
    if end is not None and (end.status == "tampered" or all(one.verdict.status == STOPPED for one in layers)):
        layers[at].verdict = Verdict(end.status, f"{end.reason} ({layers[at].problem})")


def judge_layer(layer: Layer, half_passes: bool) -> Verdict:
    wide = [run for run in layer.runs if run.purpose == WIDE_RANGE]
    runs = [run for run in layer.runs if run.purpose != WIDE_RANGE]
    if any(run.wrong for run in runs):
        status, reason = _some_wrong(runs)
        return Verdict(status, f"{reason} ({layer.problem})")
    if layer.late_by:
        text = f"in every run its answer came {1e3 * layer.late_by:.3g} ms and more before the GPU had done its work"
        return Verdict("tampered", text)
    precision = max((run.outcome.precision for run in runs), key=PRECISIONS.index)
    if precision == HALF and wide and not any(run.wrong for run in wide):
        precision = TF32
    if precision not in (FLOAT32, TRANSFORM) and not half_passes:
        text = f"it is right in reduced precision only ({precision}), which this grader's file forbids"
        return Verdict("wrong", text, precision)
    return Verdict(PASSED, "", precision)


def _some_wrong(runs: Sequence[Run]) -> tuple[str, str]:
    wrong = [run for run in runs if run.wrong]
    text = str(wrong[0].outcome)
    explained = _explained(wrong)
    if explained and explained.sentence:
        text += f". {explained.summary}"
    if wrong[0].unread_cuda_error:
        text += f"; CUDA had reported {wrong[0].unread_cuda_error}, which the file did not look at"
    if _unstable(runs):
        return "unstable", f"{len(wrong)} of {len(runs)} runs are wrong: {text}"
    if runs[0].purpose == WARM_UP and not runs[0].wrong:
        text += "; its first call, on whole numbers, was right"
    return "wrong", text


def _explained(runs: Sequence[Run]) -> Explanation | None:
    """The explanation of the runs' outputs: the first that found a mistake, or else the first."""
    found = (run.explanation for run in runs if run.explanation)
    return max(found, key=lambda one: bool(one.sentence), default=None)


def _unstable(runs: Sequence[Run]) -> bool:
    """Are runs on data of the same kind right and wrong?"""
    if not runs[0].wrong and all(run.wrong for run in runs[1:]):
        return False  # it keeps something from its first call
    right = [run for run in runs if not run.wrong]
    whole = [run for run in runs if KINDS[run.purpose] == WHOLE]
    others = [run for run in runs if KINDS[run.purpose] != WHOLE]
    if any(run.wrong for run in whole) and all(run.outcome.precision in (HALF, HALF_SUMS) for run in right):
        return False  # wrong on whole numbers, and elsewhere within half's rounding at best: the same each time
    # Right and wrong runs too far apart for one computation, whose rounding is sometimes beyond a bound.
    errors = {wrong: [run.outcome.error for run in others if run.wrong == wrong] for wrong in (False, True)}
    differ = all(errors.values()) and min(errors[True]) > _APART * max(errors[False])
    if 0 < sum(run.wrong for run in whole) < len(whole) or differ:
        return True
    # Wrong on whole numbers alone, it does the same each time, if there are several of those runs.
    return len(whole) == 1 and whole[0].wrong and any(run.outcome.precision == FLOAT32 for run in others)


@dataclass
class NetworkResult:
    """A network tried with a number of images: its layers, accuracies, and what the worker printed.

    ``leaks``: each call took more memory, until none was left. Its times count (``timed``) unless the network was
    timed with more images.
    """

    net: Net
    images: int
    layers: list[Layer]
    accuracy: list[dict[str, Any]] = field(default_factory=list)
    printed: str = ""
    leaks: bool = False
    timed: bool = True

    @property
    def verdict(self) -> Verdict:
        """The verdict on the first layer that was tampered with, else on the first that is not right."""
        bad = (one.verdict for one in self.layers if one.verdict.status not in (PASSED, STOPPED))
        return max(bad, key=lambda one: one.status == "tampered", default=Verdict(PASSED))

    @property
    def status(self) -> str:
        return self.verdict.status

    def as_data(self) -> dict[str, Any]:
        layers = [one.as_data() for one in self.layers]
        data: dict[str, Any] = {"network": self.net.name, "images": self.images, "status": self.status}
        data.update(layers=layers, leaks=self.leaks, accuracy=self.accuracy)
        if self.timed and self.status == PASSED and all("seconds" in layer for layer in layers):
            data["seconds"] = sum(layer["seconds"]["median"] for layer in layers)
            for key in ("roofline_seconds", "own_kernel_seconds"):
                if all(layer[key] is not None for layer in layers):
                    data[key] = sum(layer[key] for layer in layers)
        return data


def is_final(one: NetworkResult, pointed: Collection[Net]) -> bool:
    """Does this speak against the file, whatever it does on other networks?"""
    # Where the file's constants point to networks, chance on another one says nothing of those.
    elsewhere = bool(pointed) and one.net not in pointed
    return one.status in FINAL and not (one.status == "unstable" and elsewhere)


def judge_submission(
    results: Sequence[NetworkResult], *, demanded: bool, pointed: Sequence[Net]
) -> tuple[Verdict, NetworkResult]:
    """The verdict on all networks tried, and the network that decides it.

    ``demanded``: every network is required. Else it is the first of ``pointed``, to which the file's constants point
    most strongly; if they point to none, any network will do.
    """
    passed = [one for one in results if one.status == PASSED]
    failed = next((one for one in results if is_final(one, pointed)), None)
    if demanded:
        failed = failed or next((one for one in results if one.status != PASSED), None)
    elif failed is None and not (any(one.net == pointed[0] for one in passed) if pointed else passed):
        typical = statistics.mode(one.status for one in results)
        failed = results[0] if pointed else next(one for one in results if one.status == typical)
    if failed is not None:
        return Verdict(failed.status, f"{failed.net.name}: {failed.verdict.reason}"), failed
    text = "right on " + ", ".join(f"{one.net.name} ({one.images} images)" for one in passed)
    if any(one.leaks for one in passed):
        text += "; it does not free its memory, and was restarted when none was left"
    other = [f"{one.net.name} ({one.status}: {one.verdict.reason})" for one in results if one not in passed]
    text += f"; not on {'; '.join(other)}" if other else ""
    found = (layer.verdict.precision or FLOAT32 for one in passed for layer in one.layers)
    return Verdict(PASSED, text, max(found, key=PRECISIONS.index)), passed[0]

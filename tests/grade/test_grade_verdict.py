"""The rules of a verdict, from runs alone."""

import pytest

from ece408_op.grade import _verdict
from ece408_op.grade._verdict import FLOAT32, HALF, HALF_SUMS, TF32, TIMED, TRANSFORM, WRONG, Layer, Run, Verdict
from ece408_op.problem import KNOWN_NETS, NETS, ConvProblem
from ece408_op.submission import EndedError

PROBLEM = ConvProblem(3, 2, 7, 6, 3, 3)
F, H, W = FLOAT32, HALF, WRONG


def outcome(precision: str, scaled: float = 1e-8) -> _verdict.Outcome:
    return _verdict.Outcome(precision, 0.5, scaled, (0, 0, 0, 0), 1.0, 1.0, int(precision == WRONG), 9)


def runs(precisions: str) -> list[Run]:
    """A letter per run: f, h, w or, for an element that is quite wrong, x; in capitals for whole numbers."""
    found = {"f": outcome(F), "h": outcome(H, 2e-4), "w": outcome(W, 1e-3), "x": outcome(W, 0.1)}
    purposes = [TIMED if letter.islower() else _verdict.POISONED for letter in precisions]
    purposes[0] = _verdict.WARM_UP if precisions[0].isupper() else TIMED
    return [Run(purpose, 1e-3, 1e-3, found[one.lower()]) for purpose, one in zip(purposes, precisions)]


@pytest.mark.parametrize(
    ("precisions", "status", "precision"),
    [
        ("Fff", "passed", F),
        ("FFff", "passed", F),
        ("Fhh", "passed", H),
        ("Www", "wrong", None),
        ("Fwf", "unstable", None),
        ("Fww", "wrong", None),
        ("FWww", "wrong", None),  # what it kept from its first call
        ("FWff", "unstable", None),  # garbage in a poisoned output alone
        ("Wff", "unstable", None),
        ("WWff", "wrong", None),  # the same each time: wrong on whole numbers alone
        ("WFff", "unstable", None),
        ("FFwf", "unstable", None),
        ("FFwh", "wrong", None),  # products are missing, in one run by less than half precision allows
        ("FFxh", "unstable", None),  # a race in half precision
        ("Whh", "wrong", None),  # coarser than half precision: wrong on whole numbers
    ],
)
def test_all_runs_of_a_layer(precisions, status, precision):
    found = _verdict.judge_layer(Layer(PROBLEM, runs(precisions)), half_passes=True)
    assert (found.status, found.precision) == (status, precision)
    later = precisions[0] == "F" and status == "wrong"
    assert ("its first call, on whole numbers, was right" in found.reason) == later


@pytest.mark.parametrize(
    ("precision", "wide", "found"),
    [
        (FLOAT32, None, FLOAT32),
        (TRANSFORM, None, TRANSFORM),
        (HALF, None, HALF),
        (HALF, WRONG, HALF),
        (HALF, FLOAT32, TF32),
        (HALF_SUMS, FLOAT32, HALF_SUMS),
    ],
)
def test_the_class_of_a_layer(precision, wide, found):
    all_runs = [*runs("Ff"), Run(TIMED, 1e-3, 1e-3, outcome(precision))]
    all_runs += [Run(_verdict.WIDE_RANGE, 1e-3, 1e-3, outcome(wide))] if wide else []
    assert _verdict.judge_layer(Layer(PROBLEM, all_runs), half_passes=True) == Verdict("passed", "", found)
    strict = _verdict.judge_layer(Layer(PROBLEM, all_runs), half_passes=False)
    assert strict.status == ("passed" if found in (FLOAT32, TRANSFORM) else "wrong")
    assert strict.status == "passed" or f"({found})" in strict.reason


@pytest.mark.parametrize(
    ("late", "held_up", "status"),
    [
        ([0, 0, 0], 0, "passed"),
        ([1.8, 0, 0], 0, "passed"),
        ([1.8, 0.5, 1.8], 0, "tampered"),
        ([1.8], 0, "passed"),
        ([1.8, 0.5, 1.8], 0.1, "tampered"),
        ([1.8, 0.5, 1.8], 0.3, "passed"),  # by other programs, nearly as long
        ([1.8, 1.2, 1.8], 5, "passed"),
        ([7, 6, 8], 5, "tampered"),
    ],
)
def test_answers_before_the_gpus_work_is_done(late, held_up, status):
    timed = [Run(TIMED, 3e-3, 3e-3, outcome(F), late_seconds=1e-3 * one) for one in late]
    assert (
        _verdict.judge_layer(Layer(PROBLEM, timed, held_up_seconds=1e-3 * held_up), half_passes=True).status == status
    )


@pytest.mark.parametrize(
    ("layers", "end", "statuses"),
    [
        (["Ff", "Ff"], None, ["passed", "passed"]),
        (["Ff", "F"], (1, "crashed"), ["stopped", "crashed"]),
        (["Ww", "F"], (1, "crashed"), ["wrong", "stopped"]),  # what came first counts
        (["Ww", "F"], (1, "tampered"), ["wrong", "tampered"]),
        (["F", "F"], (0, "timed_out"), ["timed_out", "stopped"]),
    ],
)
def test_a_networks_layers(layers, end, statuses):
    those = [Layer(PROBLEM, runs(one)) for one in layers]
    if end is None:
        _verdict.judge_network(those, half_passes=True)
    else:
        _verdict.judge_network(those, True, EndedError(end[1], "why"), end[0])
    assert [one.verdict.status for one in those] == statuses


def network(number: int, status: str) -> _verdict.NetworkResult:
    layer = Layer(PROBLEM, verdict=Verdict(status, "why", F if status == "passed" else None))
    return _verdict.NetworkResult(KNOWN_NETS[number], 9, [layer])


@pytest.mark.parametrize(
    ("statuses", "demanded", "pointed", "status", "decisive"),
    [
        (["passed", "passed"], True, [], "passed", 0),
        (["passed", "wrong"], True, [], "wrong", 1),
        (["passed", "wrong"], False, [], "passed", 0),
        (["timed_out", "passed"], False, [0], "timed_out", 0),  # on the network that its constants point to
        (["passed", "unstable"], False, [], "unstable", 1),
        (["passed", "unstable"], False, [0], "passed", 0),  # chance on a network that it is not for
        (["passed", "tampered"], False, [0], "tampered", 1),
        (["crashed", "wrong", "wrong"], False, [], "wrong", 1),  # the most frequent
        (["crashed", "wrong", "wrong"], False, [0], "crashed", 0),
    ],
)
def test_a_submission(statuses, demanded, pointed, status, decisive):
    results = [network(number, one) for number, one in enumerate(statuses)]
    nets = [NETS[number] for number in pointed]
    verdict, found = _verdict.judge_submission(results, demanded=demanded, pointed=nets)
    assert (verdict.status, found) == (status, results[decisive])

"""The results' format: written and read back, continued after Ctrl-C, and their ratios."""

import json
from dataclasses import replace

import pytest

from ece408_op.bench import results
from ece408_op.bench.results import FAILED, FRESH, KERNEL, REUSED, SKIPPED, Case, Gpu, Machine, Results, Row
from ece408_op.errors import DataError
from ece408_op.problem import ConvProblem

PROBLEM = ConvProblem(10, 1, 8, 8, 2, 3)
MACHINE = Machine("a CPU", 2, 2, "avx2", Gpu("a chip", (9, 0), 132, "13.0"), {"numpy": "2.5.2"})
ROWS = (
    Row("New auto", FRESH, (1.0, 2.0, 4.0), impl="auto", kernel="direct", error=1e-7, bound=1e-6, roofline_seconds=0.5),
    Row("New auto", REUSED, status=FAILED, reason="worst element [0, 1, 2, 3]", impl="auto"),
    Row("New winograd", FRESH, status=SKIPPED, reason="filters of 1 x 1", impl="winograd"),
    Row("MXNet Convolution", FRESH, (8.0,), details={"agreeing": 10}),
    Row("MXNet Convolution", REUSED, (3.0,)),
    Row("PyTorch contiguous", FRESH, (5.0,)),
    Row("PyTorch channels_last", FRESH, (4.0,)),
)
RUN = Results("layers", MACHINE, {"seed": 0}, (Case("a", 10, ROWS, PROBLEM, 0.25),), {"bytes_per_second": 1.0})


def test_what_is_written_is_read_back_and_has_figures_for_other_readers(tmp_path):
    path = tmp_path / "run.json"
    results.write(path, RUN)
    assert results.read(path) == RUN
    (case,) = json.loads(path.read_text())["cases"]
    assert (case["flops"], case["bytes"]) == (PROBLEM.flops, PROBLEM.bytes)
    assert [row.get("median") for row in case["rows"]] == [2.0, None, None, 8.0, 3.0, 5.0, 4.0]
    assert json.dumps(case["rows"][0]) in path.read_text()  # one line per row


@pytest.mark.parametrize("text", ["", "[1]", '{"layers": []}', '{"version": 0}', '{"version": 1, "command": "layers"}'])
def test_another_format_is_a_data_error(text, tmp_path):
    path = tmp_path / "run.json"
    path.write_text(text)
    with pytest.raises(DataError, match="expected results of ece408-bench, version 1"):
        results.read(path)
    assert results.resumed(path, RUN) == RUN  # such a file is replaced


def test_ratios_are_to_the_fastest_peer_by_the_same_kind_of_call():
    (case,) = RUN.cases
    fresh, reused, skipped = case.rows[:3]
    assert case.ratio(fresh) == 4.0 / 2.0
    assert case.ratio(fresh, "MXNet") == 8.0 / 2.0
    assert case.ratio(fresh, "cuDNN") is case.ratio(reused) is case.ratio(skipped) is None
    assert case.row("New auto", FRESH) == fresh
    assert case.row("New auto", KERNEL) is None
    assert (fresh.peer, case.rows[3].peer) == (False, True)


def test_the_mean_is_missing_where_a_ratio_is():
    assert results.mean_and_least([2.0, 8.0]) == pytest.approx((4.0, 2.0))
    assert results.mean_and_least([2.0, None]) is results.mean_and_least([]) is None


def test_median_and_quartiles():
    assert (ROWS[0].median, ROWS[0].quartiles) == (2.0, (1.5, 3.0))
    assert (ROWS[1].median, ROWS[3].quartiles) == (None, (8.0, 8.0))


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"machine": replace(MACHINE, versions={"numpy": "1.26.4"})}, r"another numpy \(2.5.2, this run: 1.26.4\)"),
        ({"command": "sweep"}, r"another command \(layers, this run: sweep\)"),
    ],
)
def test_an_interrupted_run_is_continued_if_nothing_changed(changed, words, tmp_path):
    path, begun = tmp_path / "run.json", replace(RUN, complete=False)
    header = replace(begun, cases=(), ceilings=None)
    results.write(path, RUN)
    assert results.resumed(path, header) == header  # a complete run is measured again
    results.write(path, begun)
    assert results.resumed(path, header) == begun
    with pytest.raises(ValueError, match=words):
        results.resumed(path, replace(header, **changed))

"""What is made of records: hints from ptxas's words, the student's report, the plot of the class."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any
from xml.etree import ElementTree

import pytest

from ece408_op.grade import _hints, _plot, _reports, _student
from ece408_op.grade._ranking import rank
from ece408_op.grade._spec import RankingSpec

#: As nvcc 13.0 prints it.
PTXAS = """ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_ZN5mxnet2op14forward_kernelEPfPKfS3_iiiiii' for 'sm_90'
ptxas info    : Function properties for _ZN5mxnet2op14forward_kernelEPfPKfS3_iiiiii
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 31 registers, used 0 barriers
ptxas info    : Compile time = 9.622 ms
ptxas info    : Compiling entry function 'tiled' for 'sm_90'
ptxas info    : Function properties for tiled
    64 bytes stack frame, 48 bytes spill stores, 52 bytes spill loads
ptxas info    : Used 128 registers, used 1 barriers, 2048 bytes smem
"""


def record(path: str, milliseconds: float) -> dict[str, Any]:
    seconds = milliseconds / 1e3
    times = {"median": seconds, "fastest": 0.9 * seconds, "slowest": 1.1 * seconds, "count": 8}
    layer = {"layer": [1, 28, 28, 50, 5], "status": "passed", "reason": "", "seconds": times, "runs": []}
    layer["first_call_seconds"] = 3 * seconds
    accuracy = {"model": "ece408-high", "images": 100, "source": "sample", "accuracy": 0.93, "agreement": 1.0}
    network = {"network": "2017", "images": 100, "status": "passed", "layers": [layer], "seconds": seconds}
    network.update(roofline_seconds=0.001, accuracy=[accuracy])
    return {"path": path, "status": "passed", "reason": "right", "precision": "float32", "networks": [network]}


def test_ptxas_is_understood() -> None:
    first, second = _hints.kernels(PTXAS)
    assert first.name in ("forward_kernel", "_ZN5mxnet2op14forward_kernelEPfPKfS3_iiiiii")
    assert (first.registers, first.spill_store_bytes, first.shared_bytes) == (31, 0, 0)
    assert asdict(second) == {
        **{"name": "tiled", "registers": 128, "spill_store_bytes": 48, "spill_load_bytes": 52},
        **{"stack_bytes": 64, "shared_bytes": 2048, "constant_bytes": 0},
    }


def test_hints_name_what_is_in_the_way() -> None:
    text = "\n".join(_hints.lines([asdict(one) for one in _hints.kernels(PTXAS)]))
    assert "48 bytes are spilled" in text
    assert "room for 512 of 2048 threads" in text  # 65536 / 128
    assert "31 registers" in text


def test_a_student_sees_the_distance_from_the_best_and_from_the_floor() -> None:
    text = _student.text(record("a", 4), {"2017, 100 images": 0.002})
    assert "2.00 times the fastest of the class" in text
    assert "4.00 times the least" in text
    assert "93.00 % of 100 images right (sample)" in text
    assert "first call 12.000" in text


def test_the_page_has_the_class_in_a_picture() -> None:
    pytest.importorskip("matplotlib")
    records = [record("fast $x", 2), record("<slow>", 9)]
    places = rank(records, RankingSpec())
    svg = ElementTree.fromstring(_plot.svg(places, 0.001))
    texts = [text for element in svg.iter("{http://www.w3.org/2000/svg}text") for text in element.itertext()]
    assert "fast $x" in texts and "<slow>" in texts
    assert any("least possible" in text for text in texts)
    assert _plot.svg(places, 0.001) == _plot.svg(places, 0.001)
    page = _reports.leaderboard_page(places, records)
    assert "disturbed" not in page
    records[0]["networks"][0]["layers"][0]["runs"] = [{"disturbed": True}]
    assert "runs of 1 of the 2 ranked here" in _reports.leaderboard_page(places, records)
    assert "<svg" in page and "<slow>" not in page

"""Without a grader's file: a submission is graded on what it can do, and the record says what that is."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from ece408_op.grade import cli, grading

HERE = Path(__file__).with_name("submissions") / "cpu"

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")


@pytest.fixture(autouse=True)
def few_images(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tenth of what a grader's run would try."""
    monkeypatch.setattr(grading, "_CPU_FLOPS", grading._CPU_FLOPS / 10)


def graded(path: Path, folder: Path) -> dict[str, Any]:
    cli.main([str(path), "--json", str(folder / "out.json")])
    (record,) = json.loads((folder / "out.json").read_text())["records"]
    return record


def test_a_file_tied_to_one_batch_size_and_network(tmp_path: Path) -> None:
    record = graded(HERE / "only_100_images.h", tmp_path)
    assert record["status"] == "passed", record["reason"]
    assert record["can_do"]["networks"] == ["2017"]
    assert record["can_do"]["images"]["2017"] == [100]
    assert "out_of_bounds" in record["reason"] or "wrong" in record["reason"]


def test_a_file_tied_to_one_kernel_size(tmp_path: Path) -> None:
    record = graded(HERE / "macros.h", tmp_path)
    assert record["status"] == "passed", record["reason"]
    assert record["can_do"]["networks"] == ["2017", "2018sp"]
    assert 1 in record["can_do"]["images"]["2018sp"]


def test_a_file_that_is_wrong_on_the_network_that_it_is_for(tmp_path: Path) -> None:
    text = (HERE / "no_channels.h").read_text() + "static const int sizes[] = {72, 66, 33, 27};\n"
    (tmp_path / "new-forward.h").write_text(text)
    record = graded(tmp_path / "new-forward.h", tmp_path)
    assert record["status"] == "wrong"
    assert record["reason"].startswith("2018fa")

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


FOR_2018FA = "no_channels, for 2018fa.h"


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("grade")
    text = (HERE / "no_channels.h").read_text() + "static const int sizes[] = {72, 66, 33, 27};\n"
    (folder / FOR_2018FA).write_text(text)
    paths = [HERE / "only_100_images.h", HERE / "macros.h", folder / FOR_2018FA]
    with pytest.MonkeyPatch.context() as monkeypatch:
        # A fraction of what a grader's run would try.
        monkeypatch.setattr(grading, "_CPU_FLOPS", grading._CPU_FLOPS / 25)
        cli.main([*map(str, paths), "--json", str(folder / "out.json")])
    found = json.loads((folder / "out.json").read_text())["records"]
    return {Path(record["path"]).name: record for record in found}


def test_a_file_tied_to_one_batch_size_and_network(records: dict[str, dict[str, Any]]) -> None:
    record = records["only_100_images.h"]
    assert record["status"] == "passed", record["reason"]
    assert record["can_do"]["networks"] == ["2017"]
    assert record["can_do"]["images"]["2017"] == [100]
    assert "out_of_bounds" in record["reason"] or "wrong" in record["reason"]


def test_a_file_tied_to_one_kernel_size(records: dict[str, dict[str, Any]]) -> None:
    record = records["macros.h"]
    assert record["status"] == "passed", record["reason"]
    assert record["can_do"]["networks"] == ["2017", "2018sp"]
    assert 1 in record["can_do"]["images"]["2018sp"]


def test_accuracy_is_that_of_exact_convolutions(records: dict[str, dict[str, Any]]) -> None:
    network = next(one for one in records["macros.h"]["networks"] if one["network"] == "2017")
    assert {one["model"] for one in network["accuracy"]} == {"ece408-high", "ece408-low"}
    assert all(one["agreement"] == 1 and one["images"] == network["images"] for one in network["accuracy"])


def test_a_file_that_is_wrong_on_the_network_that_it_is_for(records: dict[str, dict[str, Any]]) -> None:
    record = records[FOR_2018FA]
    assert record["status"] == "wrong"
    assert record["reason"].startswith("2018fa")

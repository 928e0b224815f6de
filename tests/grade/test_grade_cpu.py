"""Every fixture and every attack through the command, each with the verdict written in its first line."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from sandbox import needs_sandbox

from ece408_op.grade import cli

HERE = Path(__file__).parents[1] / "submissions"
FILES = sorted([*HERE.glob("cpu/*.h"), *HERE.glob("attacks/*.h")])
#: Small layers, one of them with several channels, neither dimension nor batch a round number.
SPEC = """
images = [19]
runs = 3
probe = []
network = [{ name = "small", layers = [[1, 28, 28, 5, 5], [3, 11, 9, 4, 3]] }]
[limits]
run_seconds = 2
load_seconds = 10
memory_bytes = 600000000
"""

pytestmark = needs_sandbox


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("grade")
    (folder / "spec.toml").write_text(SPEC)
    where = [str(HERE / "cpu"), str(HERE / "attacks"), "--spec", str(folder / "spec.toml")]
    assert cli.main([*where, "--json", str(folder / "out.json")]) == 1
    data = json.loads((folder / "out.json").read_text())
    assert data["version"] == 1
    return {record["path"]: record for record in data["records"]}


def expected(path: Path) -> list[str]:
    """One verdict, or two where it depends on what the system gives: a memory limit that denies, or that kills."""
    first = path.read_text().splitlines()[0]
    assert first.startswith("// expected: ")
    return first.removeprefix("// expected: ").split(" or ")


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_verdict(path: Path, records: dict[str, dict[str, Any]]) -> None:
    record = records[str(path)]
    assert record["status"] in expected(path), record["reason"]
    assert record["reason"]
    assert (record["precision"] is not None) == (record["status"] == "passed")


def test_every_record_has_every_key(records: dict[str, dict[str, Any]]) -> None:
    assert {frozenset(record) for record in records.values()} == {frozenset(record_of(records, "textbook"))}
    said = (HERE.parents[1] / "docs" / "grading.md").read_text().rpartition("## The record")[2]
    assert not [key for key in record_of(records, "textbook") if f"`{key}`" not in said]


def test_no_attack_is_expected_to_pass() -> None:
    attacks = [expected(path) for path in FILES if path.parent.name == "attacks"]
    assert attacks
    assert all("passed" not in verdicts for verdicts in attacks)


def record_of(records: dict[str, dict[str, Any]], name: str) -> dict[str, Any]:
    return next(record for path, record in records.items() if Path(path).stem == name)


def test_half_precision_is_told_from_float32(records: dict[str, dict[str, Any]]) -> None:
    assert record_of(records, "rounds_to_half")["precision"] in ("half sums", "tf32")
    assert record_of(records, "textbook")["precision"] == "float32"


def test_a_file_that_adds_to_its_output_is_known_by_that(records: dict[str, dict[str, Any]]) -> None:
    layers = record_of(records, "accumulates")["networks"][0]["layers"]
    assert all(layer["accumulates"] for layer in layers)
    assert not any(layer["accumulates"] for layer in record_of(records, "textbook")["networks"][0]["layers"])


def test_compiler_errors_name_the_students_file_and_line(records: dict[str, dict[str, Any]]) -> None:
    path = HERE / "cpu" / "does_not_compile.h"
    line = next(i for i, text in enumerate(path.read_text().splitlines(), 1) if "undeclared_name" in text)
    assert f"does_not_compile.h:{line}:" in record_of(records, "does_not_compile")["reason"]


def test_a_failed_check_is_shown_with_its_words(records: dict[str, dict[str, Any]]) -> None:
    assert "Missing an ECE408 CPU implementation!" in record_of(records, "skeleton")["reason"]


def test_an_array_too_large_for_the_stack_is_called_that(records: dict[str, dict[str, Any]]) -> None:
    assert "its stack was too small" in record_of(records, "large_array")["reason"]
    assert "stack" not in record_of(records, "crashes")["reason"]


def test_a_file_that_frees_nothing_is_restarted(records: dict[str, dict[str, Any]]) -> None:
    record = record_of(records, "never_frees")
    assert record["networks"][0]["leaks"] == ("does not free its memory" in record["reason"])
    if any("address space" in text for text in record["containment"]["lacks"]):  # a cgroup counts what is touched alone
        assert record["networks"][0]["leaks"]


def test_the_worst_element_is_named(records: dict[str, dict[str, Any]]) -> None:
    record = record_of(records, "misses_last_row")
    last = [layer["layer"][1] - layer["layer"][4] for layer in record["networks"][0]["layers"]]
    assert record["worst"]["index"][2] in last  # the worst of either layer is in its last row
    assert record["worst"]["got"] == 0


def test_printed_text_is_kept_and_not_parsed(records: dict[str, dict[str, Any]]) -> None:
    assert '"status": "passed"' in record_of(records, "forged_lines")["printed"]
    assert "Op Time: 0.000001" in record_of(records, "prints")["printed"]


def test_neither_the_graders_files_nor_other_processes_are_in_sight(records: dict[str, dict[str, Any]]) -> None:
    record = record_of(records, "reads_grader_in_constructor")
    if "files" not in record["containment"]["had"]:
        pytest.skip("this system gives no namespaces: " + "; ".join(record["containment"]["lacks"]))
    assert "spec.toml" not in record["printed"]
    assert "seen /work" not in record["printed"] and "seen /home" not in record["printed"]
    assert "opened /proc" not in record_of(records, "looks_for_the_reference")["printed"]


def test_the_record_says_what_containment_was_had(records: dict[str, dict[str, Any]]) -> None:
    containment = record_of(records, "textbook")["containment"]
    assert "filter" in containment["had"] or any("filter" in text for text in containment["lacks"])
    assert containment["had"] or containment["lacks"]


def test_every_timed_run_is_in_the_record(records: dict[str, dict[str, Any]]) -> None:
    for layer in record_of(records, "textbook")["networks"][0]["layers"]:
        timed = [run for run in layer["runs"] if run["purpose"] == "timed"]
        assert 3 <= len(timed) <= 6  # disturbed rounds are repeated
        assert all(run["reference_seconds"] for run in timed)
        assert all(run["seconds"] > 0 and run["verdict"] == "float32" for run in layer["runs"])


def test_the_time_of_empty_calls_is_not_the_submissions_to_say(records: dict[str, dict[str, Any]]) -> None:
    for layer in record_of(records, "slow_empty_calls")["networks"][0]["layers"]:
        assert layer["overhead_seconds"] < 0.02 < layer["seconds"]["median"]  # it sleeps for so long in each


def test_the_parents_memory_cannot_be_reached(records: dict[str, dict[str, Any]]) -> None:
    printed = record_of(records, "cuts_off_the_buffers")["printed"]
    assert "written: -1" in printed
    assert "truncated: 0" not in printed


@pytest.mark.parametrize(
    ("name", "printed"),
    [
        ("memory_without_a_name", "memfd: -1, keyring: -1, userfaultfd: -1"),
        ("continues_itself", "continue: -1"),
    ],
)
def test_calls_that_no_submission_may_make(name: str, printed: str, records: dict[str, dict[str, Any]]) -> None:
    assert printed in record_of(records, name)["printed"]


def test_files_in_tmp_are_limited(records: dict[str, dict[str, Any]]) -> None:
    made = re.search(r"files: (\d+) of", record_of(records, "many_files")["printed"])
    assert made is not None and 0 < int(made[1]) < 20_000

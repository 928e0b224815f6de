"""Every attack, honest file and odd folder through the command, each with the verdict that is right for it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import submissions
from sandbox import needs_sandbox

from ece408_op.grade import cli

CASES = {case.name: case for case in submissions.attacks() + submissions.honest() if case.usual}
DOCS = Path(__file__).parents[2] / "docs" / "grading.md"

pytestmark = needs_sandbox


@pytest.fixture(scope="module")
def records() -> Iterator[dict[str, dict[str, Any]]]:
    with submissions.scratch_folder() as folder:
        submissions.write(list(CASES.values()), folder / "class")
        submissions.write_layouts(folder / "class")
        (folder / "spec.toml").write_text(submissions.SPEC)
        where = [str(folder / "class"), "--context", "cpu", "--spec", str(folder / "spec.toml")]
        # Times are not compared: no call waits for others, and while one submission waits for its limit, others run.
        assert cli.main([*where, "--jobs", "4", "--time-in-parallel", "--json", str(folder / "out.json")]) == 1
        data = json.loads((folder / "out.json").read_text())
    assert data["version"] == 1
    yield {submissions.name_of(record): record for record in data["records"]}


@pytest.mark.parametrize("name", CASES)
def test_verdict(name: str, records: dict[str, dict[str, Any]]) -> None:
    record = records[name]
    assert submissions.is_right(record, CASES[name].expected), f"{submissions.verdict(record)}: {record['reason']}"
    assert record["reason"]
    assert (record["precision"] is not None) == (record["status"] == "passed")


@pytest.mark.parametrize("name", submissions.LAYOUTS)
def test_odd_folders(name: str, records: dict[str, dict[str, Any]]) -> None:
    assert records[name]["status"] in submissions.LAYOUTS[name][1], records[name]["reason"]
    assert "a neighbour's work" not in records[name]["reason"] and "root:" not in records[name]["reason"]


def test_every_record_has_every_key(records: dict[str, dict[str, Any]]) -> None:
    assert {frozenset(record) for record in records.values()} == {frozenset(records["textbook"])}
    said = DOCS.read_text().rpartition("## The record")[2]
    assert not [key for key in records["textbook"] if f"`{key}`" not in said]


def test_no_attack_is_expected_to_pass() -> None:
    assert len(submissions.attacks()) >= 60 and len(submissions.honest()) >= 40
    assert not any("passed" in verdict for case in submissions.attacks() for verdict in case.expected)


def test_compiler_errors_name_the_students_file_and_line(records: dict[str, dict[str, Any]]) -> None:
    text = CASES["does_not_compile"].text
    line = next(i for i, text in enumerate(text.splitlines(), 1) if "undeclared_name" in text)
    assert f"new-forward.h:{line}:" in records["does_not_compile"]["reason"]


def test_a_failed_check_is_shown_with_its_words(records: dict[str, dict[str, Any]]) -> None:
    assert "Missing an ECE408 CPU implementation!" in records["skeleton"]["reason"]


def test_an_array_too_large_for_the_stack_is_called_that(records: dict[str, dict[str, Any]]) -> None:
    assert "its stack was too small" in records["an_array_of_60_megabytes_on_the_stack"]["reason"]
    assert "stack" not in records["a_null_pointer"]["reason"]


def test_a_file_that_frees_nothing_is_restarted(records: dict[str, dict[str, Any]]) -> None:
    record = records["never_frees"]
    assert record["networks"][0]["leaks"] == ("does not free its memory" in record["reason"])


def test_the_worst_element_is_named(records: dict[str, dict[str, Any]]) -> None:
    record = records["misses_the_last_row"]
    last = [layer["layer"][1] - layer["layer"][4] for layer in record["networks"][0]["layers"]]
    assert record["worst"]["index"][2] in last  # the worst of either layer is in its last row
    assert record["worst"]["got"] == 0


def test_printed_text_is_kept_and_not_parsed(records: dict[str, dict[str, Any]]) -> None:
    assert '"status": "passed"' in records["forged_lines"]["printed"]
    assert "Op Time: 0.000001" in records["prints_much"]["printed"]


def test_neither_the_graders_files_nor_other_processes_are_in_sight(records: dict[str, dict[str, Any]]) -> None:
    record = records["reads_the_grader_in_the_constructor"]
    assert "spec.toml" not in record["printed"]
    assert "seen /work" not in record["printed"] and "seen /home" not in record["printed"]
    assert "opened /proc" not in records["looks_for_the_reference"]["printed"]


def test_every_timed_run_is_in_the_record(records: dict[str, dict[str, Any]]) -> None:
    for layer in records["textbook"]["networks"][0]["layers"]:
        timed = [run for run in layer["runs"] if run["purpose"] == "timed"]
        assert len(timed) == 3
        assert all(run["seconds"] > 0 and run["verdict"] == "float32" for run in layer["runs"])


def test_the_time_of_empty_calls_is_not_the_submissions_to_say(records: dict[str, dict[str, Any]]) -> None:
    for layer in records["slow_empty_calls"]["networks"][0]["layers"]:
        assert layer["overhead_seconds"] < 0.02 < layer["seconds"]["median"]  # it sleeps for so long in each


def test_the_parents_memory_cannot_be_reached(records: dict[str, dict[str, Any]]) -> None:
    printed = records["cuts_off_the_buffers"]["printed"]
    assert "written: -1" in printed
    assert "truncated: 0" not in printed


@pytest.mark.parametrize(
    ("name", "printed"),
    [
        ("memory_without_a_name", "memfd: -1, keyring: -1, userfaultfd: -1"),
        ("continues_itself", "continue: -1"),
        ("opens_a_connection", "inet: -1, netlink: -1"),
        ("calls_of_an_administrator", "allowed: 0"),
    ],
)
def test_calls_that_no_submission_may_make(name: str, printed: str, records: dict[str, dict[str, Any]]) -> None:
    assert printed in records[name]["printed"]


def test_files_in_tmp_are_limited(records: dict[str, dict[str, Any]]) -> None:
    made = re.search(r"files: (\d+) of", records["many_files"]["printed"])
    assert made is not None and 0 < int(made[1]) < 20_000
